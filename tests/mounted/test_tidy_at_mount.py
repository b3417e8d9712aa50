"""``-o tidy``: after a crash unfinished checkpoints are aside before anybody gets in."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cxlfs.cli.mount import with_visitor
from cxlfs.control.client import control_request
from cxlfs.daemon.mount import make_config, mount_background
from cxlfs.daemon.options import MountConfig
from tests.support.mount import Workplace, wait_until

ANNOUNCED = r"tidy: set aside: "


def mount(place: Workplace, *options: str, visitor: tuple[str, ...] | None = None) -> None:
    """As the command line does it."""
    config = make_config(
        str(place.source), str(place.mountpoint), options=options, log_path=str(place.log)
    )
    config = with_visitor(config)
    if visitor is not None:
        config = MountConfig.from_json(
            json.dumps({**json.loads(config.to_json()), "visitor": visitor})
        )
    mount_background(config)


def tidied(place: Workplace) -> dict[str, Any]:
    (message,) = control_request(str(place.mountpoint), "status")
    found = message["tidied"]
    assert isinstance(found, dict)
    return found


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def save(directory: Path, step: int, *, done: bool = True) -> Path:
    """A checkpoint; one that is not done was cut."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"step-{step}.npz"
    np.savez(path, w=np.arange(1000.0))
    if not done:  # a file of its own, and synced: the store takes nothing back of such a one
        cut = path.read_bytes()[:3000]
        path.unlink()
        with path.open("wb") as file:
            file.write(cut)
            os.fsync(file.fileno())
    return path


def save_runs(top: Path) -> None:
    for run in ("one", "deep/er/two"):
        for step in (1, 2, 3):
            save(top / run, step, done=step != 3)


def crash(place: Workplace) -> None:
    os.sync()
    place.kill_daemon()


@pytest.mark.parametrize("transport", ["native", "pyfuse3"])
def test_after_a_crash_every_run_resumes_from_its_last_good(
    unmounted: Workplace, transport: str
) -> None:
    place = unmounted
    mount(place, f"transport={transport}", "tidy")
    assert tidied(place)["state"] == "not needed"
    save_runs(place.mountpoint)
    crash(place)
    place.announced.append(ANNOUNCED)
    mount(place, f"transport={transport}", "tidy")
    found = tidied(place)
    assert (found["state"], found["checkpoints"], found["failed"]) == ("done", 2, 0)
    for run in ("one", "deep/er/two"):
        names = names_in(place.mountpoint / run)
        assert "step-3.npz" not in names
        assert {"step-1.npz", "step-2.npz", ".cxlfs-aside"} <= set(names)
        (aside,) = (place.mountpoint / run / ".cxlfs-aside").iterdir()
        assert (aside / "step-3.npz").stat().st_size == 3000
    assert "one/step-3.npz, incomplete: the archive has no end" in place.log_text()
    done = subprocess.run(
        [Path(sys.executable).with_name("cxlfs"), "tidy", place.mountpoint / "one", "--undo"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("put back: ")
    assert (place.mountpoint / "one" / "step-3.npz").exists()


def test_after_a_clean_end_nothing_is_touched_unless_always(unmounted: Workplace) -> None:
    place = unmounted
    mount(place)
    save_runs(place.mountpoint)
    place.unmount()
    mount(place, "tidy=unclean")
    assert tidied(place)["state"] == "not needed"
    assert (place.mountpoint / "one" / "step-3.npz").exists()
    place.unmount()
    place.announced.append(ANNOUNCED)
    mount(place, "tidy=always")
    assert tidied(place)["checkpoints"] == 2
    assert not (place.mountpoint / "one" / "step-3.npz").exists()


def test_without_the_option_a_crash_moves_nothing(unmounted: Workplace) -> None:
    place = unmounted
    mount(place)
    save_runs(place.mountpoint)
    crash(place)
    mount(place)
    (message,) = control_request(str(place.mountpoint), "status")
    assert message["tidied"] is None
    assert (place.mountpoint / "one" / "step-3.npz").exists()


def test_a_read_only_mount_moves_nothing(unmounted: Workplace) -> None:
    place = unmounted
    mount(place)
    save_runs(place.mountpoint)
    place.unmount()
    mount(place, "ro", "tidy=always")
    assert tidied(place)["message"] == "nothing can be changed on this mount"
    assert (place.mountpoint / "one" / "step-3.npz").exists()


VISITS = """
import os, sys, time
with open(sys.argv[1], "w") as file:  # outside of the mount
    file.write("ready")
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
top = sys.argv[3]
os.rename(f"{top}/step-3.npz", f"{top}/moved")
assert os.listdir(top)
print('{"schema": "cxlfs.tidy_all/1", "directories": 1, "failed": [], "left_out": null}')
"""
MOUNTS = """
import sys
from cxlfs.daemon.mount import mount_background
from cxlfs.daemon.options import MountConfig
mount_background(MountConfig.from_json(sys.stdin.read()))
print("mounted", flush=True)
"""


@pytest.mark.parametrize("transport", ["native", "pyfuse3"])
def test_nobody_else_gets_in_before_the_visitor_has_gone(
    unmounted: Workplace, transport: str
) -> None:
    place, top = unmounted, unmounted.mountpoint
    mount(place)
    save(top, 3)
    (top / "directory").mkdir()
    crash(place)
    here, go = place.root / "here", place.root / "go"
    visitor = (sys.executable, "-c", VISITS, str(here), str(go))
    options = [f"transport={transport},tidy"]
    config = make_config(str(place.source), str(top), options=options, log_path=str(place.log))
    caller = place.python(MOUNTS)
    assert caller.stdin is not None
    assert caller.stdout is not None
    caller.stdin.write(json.dumps({**json.loads(config.to_json()), "visitor": visitor}).encode())
    caller.stdin.close()
    wait_until(here.exists, "the visitor is there")
    assert top.is_mount()
    assert tidied(place)["state"] == "running"
    attempts: list[Callable[[], object]] = [
        lambda: names_in(top),
        (top / "step-3.npz").stat,
        (top / "step-3.npz").read_bytes,
        lambda: (top / "new").write_bytes(b"new"),
        (top / "made").mkdir,
        (top / "step-3.npz").unlink,
        (top / "directory").rmdir,
        lambda: (top / "step-3.npz").rename(top / "other"),
        lambda: (top / "link").symlink_to("step-3.npz"),
        lambda: os.setxattr(top, "user.name", b"value"),
        lambda: top.chmod(0o700),
    ]
    for attempt in attempts:
        with pytest.raises(OSError, match="busy"):
            attempt()
    assert caller.poll() is None
    go.touch()
    assert caller.stdout.readline() == b"mounted\n"
    assert names_in(top) == ["directory", "moved"]
    assert tidied(place)["state"] == "done"


LEFT = json.dumps(
    {
        "schema": "cxlfs.tidy_all/1",
        "failed": [{"directory": "/x", "message": "full"}],
        "left_out": None,
    }
)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise SystemExit(7)", "it ended with code 7; see the log"),
        ("import os; os.kill(os.getpid(), 9)", "it ended with code -9; see the log"),
        ("print('{' * 100000); print('[]'); print('{\"schema\": 1}')", "it ended with code 0"),
        (
            f"print({LEFT!r})",
            "1 directories are left",
        ),
    ],
)
def test_a_visitor_that_fails_does_not_keep_the_mount_from_coming_up(
    unmounted: Workplace, program: str, words: str
) -> None:
    place = unmounted
    place.announced += ["tidy: not everything was set aside", "could not be tidied"]
    mount(place, "tidy=always", visitor=(sys.executable, "-c", program))
    found = tidied(place)
    assert found["state"] in ("failed", "incomplete")
    assert words in found["message"]
    assert names_in(place.mountpoint) == []


def test_a_visitor_that_cannot_be_begun(unmounted: Workplace) -> None:
    place = unmounted
    place.announced.append("tidy: not everything was set aside")
    mount(place, "tidy=always", visitor=("/nowhere/at/all",))
    assert "No such file" in tidied(place)["message"]
    assert names_in(place.mountpoint) == []


def test_what_is_set_aside_belongs_to_the_owner_of_the_run(unmounted: Workplace) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give files away")
    place = unmounted
    mount(place)
    run = place.mountpoint / "run"
    for step in (1, 2):
        save(run, step, done=step == 1)
    (run / "latest").write_text("step-2.npz")
    for path in (run, *run.iterdir()):
        os.chown(path, 1234, 1235)
    (run / "latest").chmod(0o664)
    run.chmod(0o2770)
    crash(place)
    place.announced.append(ANNOUNCED)
    mount(place, "tidy")
    (aside,) = (run / ".cxlfs-aside").iterdir()
    for path in (aside.parent, aside, *aside.iterdir(), run / "latest"):
        assert (path.stat().st_uid, path.stat().st_gid) == (1234, 1235), path
    assert (run / "latest").read_text() == "step-1.npz"
    assert stat.S_IMODE((run / "latest").stat().st_mode) == 0o664
    assert stat.S_IMODE(aside.stat().st_mode) == 0o2770


def test_no_link_leads_what_is_set_aside_elsewhere(unmounted: Workplace, tmp_path: Path) -> None:
    place = unmounted
    mount(place)
    save_runs(place.mountpoint)
    (place.mountpoint / "one" / ".cxlfs-aside").symlink_to(tmp_path)
    crash(place)
    place.announced += [ANNOUNCED, "could not be tidied", "not everything was set aside"]
    mount(place, "tidy")
    found = tidied(place)
    assert (found["state"], found["checkpoints"], found["failed"]) == ("incomplete", 1, 1)
    assert list(tmp_path.iterdir()) == []
    assert (place.mountpoint / "one" / "step-3.npz").exists()
