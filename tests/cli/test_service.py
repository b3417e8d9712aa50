"""``cxlfs service``: files for systemd, and ``cxlfs completion``: scripts for shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cxlfs.daemon import systemd
from cxlfs.errors import UsageError
from tests.support.cli import Run, assert_two_lines, run_program

PROGRAM = Path(sys.executable).with_name("cxlfs")


def test_install_writes_absolute_paths(run: Run, tmp_path: Path) -> None:
    options = ["-o", "allow_other,commit=5", "--root", tmp_path]
    found = run("service", "install", "/dev/dax0.0", "/mnt/ckpt", *options, "--json").document
    unit = tmp_path / "etc/systemd/system/cxlfs@.service"
    configuration = tmp_path / "etc/cxlfs/mnt-ckpt.conf"
    assert found["changed"] == [str(unit), str(configuration)]
    assert found["service"] == "cxlfs@mnt-ckpt.service"
    assert found["program"] == str(PROGRAM)
    assert "systemctl enable --now 'cxlfs@mnt-ckpt.service'" in found["next_step"]
    lines = unit.read_text().splitlines()
    (start,) = [line for line in lines if line.startswith("ExecStart=")]
    assert start == (f'ExecStart="{PROGRAM}" mount --foreground -o ${{OPTIONS}} ${{SOURCE}} %f')
    (prevented,) = [line for line in lines if line.startswith("RestartPreventExitStatus=")]
    assert {"2", "10", "12", "15", "126", "127", "203"} <= set(prevented.split("=")[1].split())
    assert configuration.read_text().splitlines()[1:] == [
        'SOURCE="/dev/dax0.0"',
        'OPTIONS="allow_other,commit=5"',
    ]
    again = run("service", "install", "/dev/dax0.0", "/mnt/ckpt", *options)
    assert again.stdout.splitlines()[0] == "nothing to install: cxlfs@mnt-ckpt.service"


def test_tidy_is_an_option_of_a_service_too(run: Run, tmp_path: Path) -> None:
    options = ["-o", "tidy", "-o", "commit=5", "--root", tmp_path]
    assert run("service", "install", "/dev/dax0.0", "/mnt/ckpt", *options).code == 0
    configuration = tmp_path / "etc/cxlfs/mnt-ckpt.conf"
    assert 'OPTIONS="tidy,commit=5"' in configuration.read_text().splitlines()
    said = run("service", "install", "/dev/dax0.0", "/mnt/ckpt", "-o", "tidy=often")
    assert_two_lines(said, 2, "cxlfs service", "tidy=often")


def test_a_dry_run_changes_nothing(run: Run, tmp_path: Path) -> None:
    said = run("service", "install", "a b", "/mnt/c", "--dry-run", "--root", tmp_path)
    assert said.code == 0
    assert f'    SOURCE="{Path.cwd()}/a b"' in said.stdout.splitlines()
    assert list(tmp_path.iterdir()) == []


def test_remove_takes_the_unit_away_with_the_last_mount(run: Run, tmp_path: Path) -> None:
    for name in ("one", "two"):
        said = run("service", "install", "/dev/x", f"/mnt/{name}", "--root", tmp_path)
        assert said.code == 0
    unit = tmp_path / "etc/systemd/system/cxlfs@.service"
    said = run("service", "remove", "/mnt/one", "--root", tmp_path, "--dry-run")
    assert said.stdout.splitlines()[0] == f"would remove {tmp_path}/etc/cxlfs/mnt-one.conf"
    assert run("service", "remove", "/mnt/one", "--root", tmp_path).code == 0
    assert unit.exists()
    assert run("service", "remove", "/mnt/two", "--root", tmp_path).code == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not (tmp_path / "etc/cxlfs").exists()
    said = run("service", "remove", "/mnt/two", "--root", tmp_path)
    assert said.stdout.splitlines()[0] == "nothing to remove: cxlfs@mnt-two.service"


def test_what_others_wrote_is_left_alone(run: Run, tmp_path: Path) -> None:
    unit = tmp_path / "etc/systemd/system/cxlfs@.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Unit]\nDescription=mine\n")
    said = run("service", "install", "/dev/x", "/mnt/c", "--root", tmp_path)
    assert_two_lines(said, 19, "cxlfs service", str(unit), "move it away")
    said = run("service", "remove", "/mnt/c", "--root", tmp_path)
    assert_two_lines(said, 19, "cxlfs service", str(unit))
    assert unit.read_text() == "[Unit]\nDescription=mine\n"


def test_an_option_that_mount_would_refuse_is_refused_here(run: Run, tmp_path: Path) -> None:
    options = ["-o", "alow_other", "--root", tmp_path]
    said = run("service", "install", "/dev/x", "/mnt/c", *options)
    assert_two_lines(said, 2, "cxlfs service", "alow_other", "did you mean allow_other?")
    assert list(tmp_path.iterdir()) == []


def test_without_permission_it_says_what_is_missing() -> None:
    user = 65534 if os.geteuid() == 0 else None
    said = run_program("service", "install", "/dev/x", "/mnt/c", user=user)
    assert_two_lines(said, 1, "cxlfs service", "Permission denied", "as root")


@pytest.mark.parametrize(
    "path", ["/", "/mnt/ckpt", "/mnt/a b-c/.x", "/.hidden", "/a//b/", "/ü/%i", "/_1:2/$x"]
)
def test_names_are_escaped_as_systemd_does(path: str) -> None:
    program = shutil.which("systemd-escape")
    expected = {"/": "-", "/mnt/ckpt": "mnt-ckpt", "/mnt/a b-c/.x": "mnt-a\\x20b\\x2dc-.x"}
    if path in expected:
        assert systemd.instance_of(path) == expected[path]
    if program is not None:
        done = subprocess.run([program, "--path", path], capture_output=True, text=True, check=True)
        assert systemd.instance_of(path) == done.stdout.rstrip("\n")


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="control character"):
        systemd.service_files("/dev/x\ny", "/m", "", program="/p", root=tmp_path)
    with pytest.raises(UsageError, match="absolute"):
        systemd.instance_of("m")
    files = systemd.service_files('/a"$b`\\', "/m", "x", program="/p %", root=tmp_path)
    assert 'SOURCE="/a\\"\\$b\\`\\\\"' in files.configuration
    assert 'ExecStart="/p %%" mount' in files.unit


# --- completion ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(run: Run, shell: str, tmp_path: Path) -> None:
    said = run("completion", shell)
    assert said.code == 0
    assert f"_CXLFS_COMPLETE={shell}_complete" in said.stdout
    program = shutil.which(shell)
    if program is not None:
        (tmp_path / "script").write_text(said.stdout)
        subprocess.run([program, "-n", tmp_path / "script"], check=True)


def test_verbs_and_options_are_completed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_CXLFS_COMPLETE", "bash_complete")
    for words, position, expected in (
        ("cxlfs st", "1", ["plain,status"]),
        ("cxlfs verify --re", "2", ["plain,--repair", "plain,--record"]),
        ("cxlfs service ", "2", ["plain,install", "plain,remove"]),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", position)
        assert run().stdout.split() == expected
