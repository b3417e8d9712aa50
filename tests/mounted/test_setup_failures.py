"""Everything that can stand in the way of a mount: one clear line and a next step, nothing left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cxlfs.daemon import preflight
from cxlfs.daemon.mount import make_config, mount_background, unmount
from cxlfs.errors import (
    CxlfsError,
    FuseUnavailableError,
    MediaUnavailableError,
    MountError,
    NotACxlfsError,
    UsageError,
)
from tests.support.mount import Workplace, wait_until


@pytest.fixture(autouse=True)
def _quiet(unmounted: Workplace) -> None:
    unmounted.announced.append("mount point")
    unmounted.starts_afresh = True


def refused(place: Workplace, kind: type[CxlfsError], *options: str) -> CxlfsError:
    with pytest.raises(kind) as caught:
        place.mount(*options)
    assert "\n" not in str(caught.value)
    assert caught.value.next_step
    assert not place.is_mounted
    return caught.value


def test_missing_mount_point(unmounted: Workplace) -> None:
    unmounted.mountpoint = unmounted.root / "none"
    error = refused(unmounted, MountError)
    assert "does not exist" in str(error)
    assert error.next_step == f"make it: mkdir -p {unmounted.mountpoint}"


def test_mount_point_that_is_a_file(unmounted: Workplace) -> None:
    unmounted.mountpoint = unmounted.root / "file"
    unmounted.mountpoint.touch()
    assert "not a directory" in str(refused(unmounted, MountError))


def test_missing_source(unmounted: Workplace) -> None:
    unmounted.source.rename(unmounted.root / "elsewhere")
    assert str(unmounted.source) in str(refused(unmounted, MediaUnavailableError))
    (unmounted.root / "elsewhere").rename(unmounted.source)


def test_source_that_is_no_store(unmounted: Workplace) -> None:
    original = unmounted.root / "elsewhere"
    unmounted.source.rename(original)
    unmounted.source.write_bytes(bytes(16 << 20))
    assert "mkfs" in refused(unmounted, NotACxlfsError).next_step
    original.rename(unmounted.source)


def test_source_that_shrank(unmounted: Workplace) -> None:
    content = unmounted.source.read_bytes()
    os.truncate(unmounted.source, len(content) // 2)
    refused(unmounted, CxlfsError)
    unmounted.source.write_bytes(content)


def test_unknown_option(unmounted: Workplace) -> None:
    with pytest.raises(UsageError) as caught:
        unmounted.mount("uid=5")
    assert "uid=5" in str(caught.value)


def test_log_that_cannot_be_written(unmounted: Workplace) -> None:
    unmounted.log = unmounted.root / "none" / "log"
    assert str(unmounted.log) in str(refused(unmounted, MountError))


def test_daemon_that_dies_without_a_word(
    unmounted: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert str(unmounted.log) in refused(unmounted, MountError).next_step


def test_daemon_that_does_not_come_up_in_time(
    unmounted: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, and nothing stays mounted."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "")
    config = make_config(
        str(unmounted.source), str(unmounted.mountpoint), log_path=str(unmounted.log)
    )
    with pytest.raises(MountError, match="did not come up"):
        mount_background(config, seconds_max=0.0)
    wait_until(lambda: _can_open(unmounted), "the daemon is gone")
    assert not unmounted.is_mounted


def _can_open(place: Workplace) -> bool:
    try:
        place.mount()
    except CxlfsError:
        return False
    place.unmount()
    return True


def test_unmounting_what_is_not_ours(unmounted: Workplace) -> None:
    with pytest.raises(MountError, match="not a mount point"):
        unmount(str(unmounted.mountpoint))
    with pytest.raises(MountError, match="not a cxlfs store"):
        unmount("/proc")


def test_no_fuse_device(tmp_path: Path) -> None:
    with pytest.raises(FuseUnavailableError) as caught:
        preflight.check_fuse(tmp_path / "fuse")
    assert "modprobe fuse" in caught.value.next_step


@pytest.mark.skipif(os.geteuid() != 0, reason="only root opens the device itself")
def test_fuse_device_that_does_not_open(tmp_path: Path) -> None:
    (tmp_path / "fuse").symlink_to("/dev/full/x")
    with pytest.raises(FuseUnavailableError):
        preflight.check_fuse(tmp_path / "fuse")


def test_no_fusermount3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FuseUnavailableError) as caught:
        preflight.check_fuse()
    assert "fuse3" in caught.value.next_step


def test_fusermount3_without_its_privilege(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fusermount3").touch(mode=0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FuseUnavailableError) as caught:
        preflight.check_fuse()
    assert "chmod u+s" in caught.value.next_step


def test_a_fuse_device_that_is_roots_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before the helper tries, and where tests ask whether they can mount."""
    helper = tmp_path / "fusermount3"
    helper.touch()
    helper.chmod(0o4755)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = []

    real = os.access

    def access(path: str | Path, mode: int, **details: bool) -> bool:
        if path == Path("/dev/null"):
            asked.append((mode, details))
            return False
        return real(path, mode, **details)

    preflight.check_fuse(Path("/dev/null"))
    monkeypatch.setattr(os, "access", access)
    with pytest.raises(FuseUnavailableError, match="may not open /dev/null") as caught:
        preflight.check_fuse(Path("/dev/null"))
    assert asked == [(os.R_OK | os.W_OK, {"effective_ids": True})]
    assert "chmod 666 /dev/null" in caught.value.next_step


@pytest.mark.parametrize(
    ("content", "allowed"),
    [("", False), ("#user_allow_other\n", False), ("mount_max = 5\n user_allow_other \n", True)],
)
def test_allow_other_is_roots_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, allowed: bool
) -> None:
    conf = tmp_path / "fuse.conf"
    conf.write_text(content, encoding="ascii")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    config = make_config("/source", "/mnt", allow_other=True)
    if allowed:
        preflight.check_allow_other(config, conf)
        return
    with pytest.raises(FuseUnavailableError) as caught:
        preflight.check_allow_other(config, conf)
    assert "user_allow_other" in caught.value.next_step
