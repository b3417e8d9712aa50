"""mount, umount, status and list against real mounts, and what stands in the way of one."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from pathlib import Path

import pytest

from cxlfs.cli import mount
from cxlfs.control import mountinfo
from cxlfs.daemon import preflight, unmount
from cxlfs.errors import BusyError
from cxlfs.format.superblock import choose
from cxlfs.media import open_media
from cxlfs.media.room import VOLATILE_TEXT
from cxlfs.units import MIB
from tests.support.cli import PROGRAM, Run, assert_two_lines, run_program
from tests.support.mount import (
    Workplace,
    caution_of,
    is_in_memory,
    require_allow_other,
    wait_until,
)

pytestmark = pytest.mark.mounted


# --- mount and umount ---------------------------------------------------------------------------


def test_mount_use_umount(run: Run, place: Workplace) -> None:
    said = run("mount", place.source, place.mountpoint)
    assert (said.code, said.stderr) == (0, caution_of(place))
    assert said.stdout == f"mounted {place.source} on {place.mountpoint}\n"
    (place.mountpoint / "a.pt").write_bytes(b"x" * MIB)
    said = run("umount", place.mountpoint)
    assert (said.code, said.stderr) == (0, "")
    assert said.stdout == f"unmounted {place.mountpoint}\n"
    assert not place.is_mounted
    (entry,) = run("list", place.source, "--json").document["checkpoints"]
    assert (entry["path"], entry["size_bytes"]) == ("/a.pt", MIB)


def test_mount_and_umount_json(run: Run, place: Workplace) -> None:
    found = run("mount", place.source, place.mountpoint, "--json").document
    assert found == {
        "schema": "cxlfs.mount/1",
        "source": str(place.source),
        "mountpoint": str(place.mountpoint),
        "read_only": False,
        "pid": place.daemon_pid,
        "log_path": str(next(place.runtime.glob("*.log"))),
        "state": "ONLINE",
        "recovered_records": None,
        "open_units": 0,
        "open_unit_paths": [],
        "already_mounted": False,
        "weakened": [VOLATILE_TEXT] if is_in_memory(place.source) else [],
        "tidied": None,
    }
    assert run("umount", place.mountpoint, "--json").document == {
        "schema": "cxlfs.umount/1",
        "mountpoint": str(place.mountpoint),
        "source": str(place.source),
    }


def test_relative_paths(run: Run, place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.root)
    assert run("mount", "source", "mnt").code == 0
    assert run("status", "mnt", "--json").document["source"] == str(place.source)
    assert run("umount", "./mnt/").code == 0


def test_read_only(run: Run, place: Workplace) -> None:
    found = run("mount", place.source, place.mountpoint, "--read-only", "--json").document
    assert found["read_only"] is True
    with pytest.raises(OSError, match="Read-only"):
        (place.mountpoint / "x").touch()
    status = run("status", place.mountpoint, "--json").document
    assert (status["state"], status["read_only"]) == ("READ-ONLY", True)
    assert status["action"].startswith("to write: cxlfs umount ")
    assert run("umount", place.mountpoint).code == 0


def test_options_reach_the_mount(run: Run, place: Workplace) -> None:
    require_allow_other()
    arguments = ["--allow-other", "-o", "nosuid,noatime", "-o", "commit=2"]
    assert run("mount", place.source, place.mountpoint, *arguments).code == 0
    mount = mountinfo.find_mount(str(place.mountpoint))
    assert mount is not None
    assert "allow_other" in mount.options
    assert run("umount", place.mountpoint).code == 0


def test_verify_off_delivers_what_read_refuses(run: Run, place: Workplace) -> None:
    assert run("mount", place.source, place.mountpoint).code == 0
    (place.mountpoint / "a").write_bytes(b"right" * 1000)
    assert run("umount", place.mountpoint).code == 0
    found = run("dump", place.source, "inode", "2", "--json").document
    offset = found["versions"][0]["references"][0]["media_offset"]
    with place.source.open("r+b") as file:
        file.seek(offset)
        file.write(b"w")
    place.announced.append("check|damage|checksum")
    assert run("mount", place.source, place.mountpoint, "--verify", "off").code == 0
    assert (place.mountpoint / "a").read_bytes().startswith(b"wight")
    assert run("umount", place.mountpoint).code == 0
    assert run("mount", place.source, place.mountpoint, "--verify", "read").code == 0
    with pytest.raises(OSError, match="Input/output error"):
        (place.mountpoint / "a").read_bytes()
    status = run("status", place.mountpoint, "--json").document
    assert status["state"] == "NEEDS-CHECK"
    assert status["errors"]["checksum"] > 0
    assert status["status"] == "the data of a file is damaged: /a"
    assert f"cxlfs verify {place.mountpoint} names every one" in status["action"]
    (entry,) = run("list", place.mountpoint, "--json").document["checkpoints"]
    assert entry["state"] == "damaged"
    (place.mountpoint / "a").unlink()
    assert run("umount", place.mountpoint).code == 0


def test_foreground_serves_until_it_is_told_to_end(run: Run, place: Workplace) -> None:
    process = subprocess.Popen(
        [*PROGRAM, "mount", str(place.source), str(place.mountpoint), "--foreground"],
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: run("status", place.mountpoint).code == 0, "the mount answers")
    assert run("status", place.mountpoint, "--json").document["pid"] == process.pid
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert not place.is_mounted


# --- a mounted store, asked -----------------------------------------------------------------------


def test_the_process_says_what_it_serves(place: Workplace) -> None:
    place.mount()
    process = Path(f"/proc/{place.daemon_pid}")
    title = process.joinpath("cmdline").read_bytes().rstrip(b"\0")
    assert title == os.fsencode(f"cxlfs: {place.mountpoint} ({place.source})")
    assert process.joinpath("comm").read_text() == "cxlfs\n"


def test_without_an_argument_every_mount_is_shown(run: Run, place: Workplace) -> None:
    place.mount()
    mine = [found for found in run("status", "--json").documents if is_of(found, place)]
    assert [(found["schema"], found["state"]) for found in mine] == [("cxlfs.status/1", "ONLINE")]
    assert f"{place.mountpoint}, process {place.daemon_pid}" in run("status").stdout
    mine = [found for found in run("list", "--json").documents if is_of(found, place)]
    assert [(found["schema"], found["checkpoints"]) for found in mine] == [("cxlfs.list/1", [])]
    assert f"{place.mountpoint}:\nno checkpoints in /\n" in run("list").stdout
    place.mountpoint.stat()
    place.kill_daemon()
    place.announced.append("recover|dead mount|not closed")
    said = run("status", "--json")
    assert said.code == 21
    (found,) = (found for found in said.documents if is_of(found, place))
    assert (found["schema"], found["id"]) == ("cxlfs.unreachable/1", "mount-failed")
    assert "is a dead mount" in run("status").stdout
    assert run("umount", place.mountpoint).code == 0


def is_of(found: dict[str, object], place: Workplace) -> bool:
    return found["mountpoint"] == str(place.mountpoint)


def test_status_by_mount_point_and_by_source(run: Run, place: Workplace) -> None:
    place.mount()
    (place.mountpoint / "d").mkdir()
    (place.mountpoint / "d" / "f").write_bytes(bytes(100_000))
    wait_until(  # the kernel gives a closed file up a little later, and its room comes back then
        lambda: run("status", place.mountpoint, "--json").document["contents"]["open_files"] == 0,
        "the file is released",
    )
    found = run("status", place.mountpoint, "--json").document
    media = open_media(place.source, read_only=True, exclusive=False)
    block, _ = choose(media)
    media.close()
    assert found["uuid"] == str(uuid.UUID(bytes=block.uuid))
    assert found["source"] == str(place.source)
    assert found["mountpoint"] == str(place.mountpoint)
    assert found["pid"] == place.daemon_pid
    assert found["log_path"] == str(place.log)
    assert (found["state"], found["status"], found["action"]) == ("ONLINE", None, None)
    assert found["read_only"] is False
    assert found["media"]["kind"] == "file"
    assert found["media"]["size_bytes"] == place.source.stat().st_size
    assert found["contents"]["files"] == 1
    assert found["contents"]["directories"] == 2
    assert found["activity"]["bytes_written"] >= 100_000
    vfs = os.statvfs(place.mountpoint)
    assert found["space"]["free_bytes"] // vfs.f_frsize == vfs.f_bfree
    again = run("status", place.source, "--json").document
    assert again["mountpoint"] == str(place.mountpoint)
    assert again["uuid"] == found["uuid"]
    text = run("status", place.source).stdout
    assert f"mount: {place.mountpoint}, process {place.daemon_pid}\n" in text
    assert "state: ONLINE\n" in text
    assert "status:" not in text
    assert "action:" not in text


def test_list_through_the_daemon(run: Run, place: Workplace) -> None:
    place.mount()
    odd = os.fsdecode(b"bad\xff\x1b[31m")
    (place.mountpoint / "run1").mkdir()
    (place.mountpoint / "run1" / odd).write_bytes(b"12345")
    with (place.mountpoint / "open.log").open("wb") as file:
        file.write(b"beginning")
        file.flush()
        entries = run("list", place.mountpoint, "--json").document["checkpoints"]
        states = [(e["path"], e["kind"], e["state"], e["being_written"]) for e in entries]
        assert states == [
            ("/open.log", "file", "incomplete", True),
            ("/run1", "directory", "complete", False),
        ]
        os.fsync(file.fileno())  # what is there is complete, and goes on growing
        assert (
            run("list", place.mountpoint)
            .stdout.splitlines()[1]
            .startswith("complete, being written ")
        )
    assert run("list", place.source).stdout.splitlines()[1].startswith("complete")
    for path in ("run1", "/run1", place.mountpoint / "run1"):
        found = run("list", place.mountpoint, path, "--json").document
        assert found["path"] == "/run1"
        (entry,) = found["checkpoints"]
        assert entry["path_b64"]
        assert entry["size_bytes"] == 5
    assert "\x1b" not in run("list", place.mountpoint, "run1").stdout
    assert_two_lines(run("list", place.mountpoint, "/no"), 1, "cxlfs list", "/no")


def test_a_path_inside_the_mount_is_explained(run: Run, place: Workplace) -> None:
    place.mount()
    (place.mountpoint / "d").mkdir()
    (place.mountpoint / "d" / "f").touch()
    for below in ("d", "d/f"):
        said = run("status", place.mountpoint / below)
        words = (f"inside the store mounted on {place.mountpoint}", f"/{below}")
        assert_two_lines(said, 16, "cxlfs status", *words)


@pytest.mark.parametrize("options", [[], ["default_permissions"]])
def test_recovery_is_reported(run: Run, place: Workplace, options: list[str]) -> None:
    place.mount(*options)
    (place.mountpoint / "a").write_bytes(b"x")
    place.mountpoint.stat()  # the kernel goes on answering that of the dead mount
    place.kill_daemon()
    place.announced.append("not closed cleanly|recover|dead mount")
    found = run("mount", place.source, place.mountpoint, "--json").document
    assert found["recovered_records"] >= 1
    assert run("status", place.mountpoint, "--json").document["recovery"]["clean"] is False
    assert (place.mountpoint / "a").read_bytes() == b"x"
    assert run("umount", place.mountpoint).code == 0


# --- what stands in the way ---------------------------------------------------------------------


def test_a_second_mount_of_a_source(run: Run, place: Workplace) -> None:
    place.mount()
    other = place.root / "other"
    other.mkdir()
    said = run("mount", place.source, other)
    words = (f"is mounted on {place.mountpoint}", str(place.daemon_pid))
    assert_two_lines(said, 11, "cxlfs mount", *words, f"cxlfs umount {place.mountpoint}")
    assert mountinfo.find_mount(str(other)) is None


@pytest.mark.parametrize("arguments", [["mkfs", "--force"], ["dump", "inode", "1"]])
def test_what_needs_a_source_of_its_own_names_the_mount(
    run: Run, place: Workplace, arguments: list[str]
) -> None:
    place.mount()
    verb, *rest = [word.replace("MOUNTPOINT", str(place.mountpoint)) for word in arguments]
    said = run(verb, place.source, *rest)
    assert_two_lines(said, 11, f"cxlfs {verb}", f"cxlfs umount {place.mountpoint}")


def test_a_mount_that_is_there_already(run: Run, place: Workplace) -> None:
    place.mount()
    pid = place.daemon_pid
    said = run("mount", place.source, place.mountpoint)
    assert said.code == 0
    assert said.stdout == f"already mounted: {place.source} on {place.mountpoint}\n"
    found = run("mount", place.source, place.mountpoint, "--json").document
    assert (found["already_mounted"], found["pid"]) == (True, pid)
    said = run("mount", place.source, place.mountpoint, "--read-only")
    assert_two_lines(said, 11, "cxlfs mount", "is mounted on", f"cxlfs umount {place.mountpoint}")


def test_a_daemon_that_is_just_ending_is_none(
    run: Run, place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket takes a connection as long as the process is not gone."""
    place.mount()
    place.kill_daemon()
    monkeypatch.setattr(mount, "is_served", lambda _: True)
    said = run("mount", place.source, place.mountpoint)
    assert said.code == 0
    assert said.stdout.startswith(f"mounted {place.source} on {place.mountpoint}\n")
    assert list(place.mountpoint.iterdir()) == []


def test_a_busy_mount_point(run: Run, place: Workplace) -> None:
    place.mount()
    other = place.root / "other.cxlfs"
    assert run("mkfs", other, "--size", "64M").code == 0
    said = run("mount", other, place.mountpoint)
    assert_two_lines(said, 11, "cxlfs mount", str(place.mountpoint), "in use", str(place.source))


def test_a_mount_that_failed_leaves_no_empty_log(run: Run, place: Workplace) -> None:
    assert run("mount", place.root / "no", place.mountpoint).code == 16
    assert list(place.runtime.glob("*.log")) == []
    assert run("mount", place.source, place.mountpoint).code == 0
    assert run("umount", place.mountpoint).code == 0
    (log,) = place.runtime.glob("*.log")
    before = log.read_text()
    assert run("mount", place.root / "no", place.mountpoint).code == 16
    assert log.read_text().startswith(before), "what was there is kept"


def test_a_missing_mount_point(run: Run, place: Workplace) -> None:
    said = run("mount", place.source, place.root / "no")
    assert_two_lines(said, 21, "cxlfs mount", "does not exist", f"mkdir -p {place.root}/no")


def test_a_file_as_mount_point(run: Run, place: Workplace) -> None:
    said = run("mount", place.source, place.source)
    assert_two_lines(said, 21, "cxlfs mount", "is not a directory")


def test_a_missing_source(run: Run, place: Workplace) -> None:
    said = run("mount", place.root / "no", place.mountpoint)
    assert_two_lines(said, 16, "cxlfs mount", f"{place.root}/no does not exist")
    assert not place.is_mounted


def test_a_directory_as_source(run: Run, place: Workplace) -> None:
    said = run("mount", place.root, place.mountpoint)
    assert_two_lines(said, 16, "cxlfs mount", "is a directory")


def test_a_source_that_is_no_store(run: Run, place: Workplace) -> None:
    zeros = place.root / "zeros"
    with zeros.open("wb") as file:
        file.truncate(64 * MIB)
    assert_two_lines(run("mount", zeros, place.mountpoint), 10, "cxlfs mount", "cxlfs mkfs")


def test_a_source_that_shrank(run: Run, place: Workplace, source: Path) -> None:
    os.truncate(source, 50 * MIB)
    said = run("mount", source, place.mountpoint)
    assert_two_lines(said, 13, "cxlfs mount", "it shrank or was cut", "full size")
    assert run("mount", source, place.mountpoint, "--json").document["id"] == "media-error"


def test_umount_of_what_is_not_mounted(run: Run, place: Workplace) -> None:
    said = run("umount", place.mountpoint)
    assert_two_lines(said, 21, "cxlfs umount", "is not a mount point", "findmnt")
    assert_two_lines(run("umount", place.root / "no"), 21, "cxlfs umount")


def test_umount_of_another_file_system(run: Run) -> None:
    assert_two_lines(run("umount", "/proc"), 21, "cxlfs umount", "not a cxlfs store")


def test_umount_of_a_busy_mount(run: Run, place: Workplace) -> None:
    place.mount()
    with (place.mountpoint / "f").open("wb"):
        said = run("umount", place.mountpoint)
        assert_two_lines(said, 11, "cxlfs umount", "in use", str(os.getpid()))
    assert run("umount", place.mountpoint).code == 0


def test_umount_waits_for_whoever_only_looks(
    run: Run, place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """df, or a monitoring agent: it has the mount for a moment, and nobody can be named."""
    place.mount()
    busy = iter([True, True])
    real = unmount.detach

    def detach(mountpoint: str, *, lazy: bool) -> None:
        if next(busy, False):
            raise BusyError(f"{mountpoint} is in use")
        real(mountpoint, lazy=lazy)

    monkeypatch.setattr(unmount, "detach", detach)
    assert run("umount", place.mountpoint).code == 0
    assert next(busy, None) is None
    assert not place.is_mounted


def test_a_dead_mount(run: Run, place: Workplace) -> None:
    place.mount()
    place.mountpoint.stat()  # the kernel goes on answering that
    place.kill_daemon()
    place.announced.append("recover|dead mount|not closed")
    for verb in ("status", "list", "verify"):
        said = run(verb, place.mountpoint)
        assert_two_lines(said, 21, f"cxlfs {verb}", "dead mount", f"cxlfs mount {place.source}")
    assert run("umount", place.mountpoint).code == 0
    assert run("status", place.source, "--json").document["recovery"]["clean"] is False


@pytest.mark.sampled(2)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize("options", [[], ["allow_other"]])
def test_a_live_mount_of_another_user_is_not_called_dead(
    place: Workplace, options: list[str]
) -> None:
    """Where only root may enter the kernel says EACCES, which is no sign of death."""
    place.mount(*options)
    for verb in ("status", "list", "verify"):
        said = run_program(verb, place.mountpoint, user=65534)
        words = ("is a live mount of root", "run the command as root")
        assert_two_lines(said, 21, f"cxlfs {verb}", *words)
    for verb in ("history", "undelete", "forget", "policy"):
        argument = f"{place.mountpoint}/a"
        said = run_program(verb, *(["show"] if verb == "policy" else []), argument, user=65534)
        assert_two_lines(said, 21, f"cxlfs {verb}", *words)
    said = run_program("umount", place.mountpoint, user=65534)
    assert_two_lines(said, 21, "cxlfs umount", "a mount of another user needs root")
    assert place.is_mounted


def test_a_mount_that_is_registered_elsewhere(place: Workplace, tmp_path: Path) -> None:
    place.mount()
    elsewhere = {"CXLFS_RUNTIME_DIR": str(tmp_path)}
    said = run_program("status", place.mountpoint, environment=elsewhere)
    assert_two_lines(said, 21, "cxlfs status", "mounted and answers", "CXLFS_RUNTIME_DIR")


def test_no_dev_fuse(
    run: Run, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight.check_fuse, "__defaults__", (tmp_path / "no" / "fuse",))
    said = run("mount", source, tmp_path, "--foreground")
    assert_two_lines(said, 20, "cxlfs mount", f"there is no {tmp_path}/no/fuse", "modprobe fuse")


def test_no_fusermount3_for_an_ordinary_user(source: Path, tmp_path: Path) -> None:
    user = 65534 if os.geteuid() == 0 else None
    said = run_program(
        *("mount", source, tmp_path, "--foreground"),
        environment={"PATH": "/nonexistent", "CXLFS_RUNTIME_DIR": str(tmp_path)},
        user=user,
    )
    assert_two_lines(said, 20, "cxlfs mount", "fusermount3", "install the Debian package fuse3")


# --- mount(8) and fsck(8) -----------------------------------------------------------------------


def test_mount_cxlfs(run: Run, place: Workplace) -> None:
    options = ("-o", "rw,nofail,x-systemd.automount,commit=3", "-n", "-t", "fuse.cxlfs")
    said = run_program(place.source, place.mountpoint, *options, program="mount.cxlfs")
    assert (said.code, said.stdout, said.stderr) == (0, "", "")
    assert run("umount", place.mountpoint).code == 0
    said = run_program(place.source, place.mountpoint, "-v", "-r", program="mount.cxlfs")
    assert (said.code, said.stderr) == (0, "")
    assert said.stdout == f"mounted {place.source} on {place.mountpoint} read-only\n"
    assert run("umount", place.mountpoint).code == 0


def test_mount_fuse_calls_the_program_itself(run: Run, place: Workplace) -> None:
    said = run_program(place.source, place.mountpoint, "-o", "rw,dev,suid")
    assert (said.code, said.stdout, said.stderr) == (0, "", "")
    assert run("status", place.mountpoint, "--json").document["state"] == "ONLINE"
    assert run("umount", place.mountpoint).code == 0


def test_mount_cxlfs_only_checks_with_f(place: Workplace) -> None:
    assert run_program(place.source, place.mountpoint, "-f", program="mount.cxlfs").code == 0
    assert not place.is_mounted


def test_mount_cxlfs_is_sloppy_when_told(run: Run, place: Workplace) -> None:
    arguments = (place.source, place.mountpoint, "-o", "compress=zstd,ro")
    said = run_program(*arguments, program="mount.cxlfs")
    assert_two_lines(said, 1, "mount.cxlfs", "compress=zstd")
    assert run_program(*arguments, "-s", program="mount.cxlfs").code == 0
    assert run("status", place.mountpoint, "--json").document["read_only"] is True
    assert run("umount", place.mountpoint).code == 0


def test_mount_cxlfs_gives_the_codes_of_mount(place: Workplace) -> None:
    said = run_program(place.root / "no", place.mountpoint, program="mount.cxlfs")
    assert_two_lines(said, 32, "mount.cxlfs", "does not exist")
    said = run_program(place.source, program="mount.cxlfs")
    assert_two_lines(said, 1, "mount.cxlfs", "missing argument")
