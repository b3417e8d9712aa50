"""mount(8) with ``-o remount``, and what it leaves out of the options that it passes on."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxlfs.cli.system import mount_main
from cxlfs.control.client import control_request
from tests.support.mount import Workplace, assert_store_clean

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may remount")
OF_THE_TABLE = "user_id=0,group_id=0,max_read=524288,relatime"
"""What mount(8) adds where only a mount point is named."""


def mount(place: Workplace, options: str) -> int:
    return mount_main([str(place.source), str(place.mountpoint), "-o", options])


def flags(place: Workplace) -> set[str]:
    """Those of the mount, and of the file system."""
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        fields = line.split()
        if fields[1] == str(place.mountpoint):
            return set(fields[3].split(","))
    raise AssertionError("not mounted")


def state(place: Workplace) -> object:
    (message,) = control_request(str(place.mountpoint), "status")
    return message["state"], message["reason"]


@pytest.fixture
def copy(place: Workplace) -> Iterator[Path]:
    """Of the source, which another store may be opened on."""
    path = place.root / "copy"

    yield path
    path.unlink(missing_ok=True)


def test_read_only_and_back(place: Workplace, copy: Path) -> None:
    file = place.mountpoint / "file"
    file.write_bytes(b"content")
    with file.open("rb") as reader:
        assert mount(place, f"remount,ro,nosuid,nodev,{OF_THE_TABLE}") == 0
        assert "ro" in flags(place)
        with pytest.raises(OSError, match="Read-only") as caught:
            file.write_bytes(b"other")
        assert caught.value.errno == errno.EROFS
        assert state(place) == ("READ-ONLY", "it was remounted read-only")
        shutil.copyfile(place.source, copy)
        assert_store_clean(copy)
        assert reader.read() == b"content"
    before = copy.read_bytes()
    assert place.source.read_bytes() == before, "reading changed nothing"
    assert mount(place, "remount,rw,nosuid,nodev") == 0
    assert "rw" in flags(place)
    assert state(place) == ("ONLINE", None)
    file.write_bytes(b"other")
    place.remount()
    assert file.read_bytes() == b"other"


def test_an_unmount_after_it_is_clean(place: Workplace) -> None:
    (place.mountpoint / "file").write_bytes(b"content")
    assert mount(place, "remount,ro") == 0
    place.unmount()
    assert_store_clean(place.source)


def test_a_file_open_for_writing_keeps_it_writable(
    place: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    with (place.mountpoint / "file").open("wb", buffering=0) as file:
        assert mount(place, "remount,ro") == 32
        assert str(os.getpid()) in capsys.readouterr().err
        file.write(b"content")
    assert state(place) == ("ONLINE", None)
    assert "rw" in flags(place)
    assert mount(place, "remount,ro") == 0


def test_what_was_opened_for_reading_cannot_be_written(
    unmounted: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    unmounted.mount("ro")
    assert mount(unmounted, "remount,rw") == 1
    assert f"cxlfs umount {unmounted.mountpoint}" in capsys.readouterr().err
    assert "ro" in flags(unmounted)
    assert mount(unmounted, "remount,ro") == 0


@pytest.mark.parametrize("option", ["verify=off", "commit=5", "allow_other", "transport=pyfuse3"])
def test_what_the_daemon_was_started_with_stays(
    place: Workplace, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = flags(place)
    assert mount(place, f"remount,ro,{option}") == 1
    assert "cannot be changed while the store is mounted" in capsys.readouterr().err
    assert flags(place) == before
    assert state(place) == ("ONLINE", None)


def test_the_same_options_again_are_no_change(unmounted: Workplace) -> None:
    unmounted.mount("commit=5,allow_other,verify=off")
    table = f"{OF_THE_TABLE},default_permissions,allow_other"
    assert mount(unmounted, f"remount,ro,commit=5,verify=off,{table}") == 0


def test_what_is_not_mounted_cannot_be_remounted(unmounted: Workplace) -> None:
    assert mount(unmounted, "remount,ro") == 32


def test_suid_and_dev_are_what_root_gets_from_mount(place: Workplace) -> None:
    """mount(8) passes neither on: who does not want them says so."""
    assert {"nosuid", "nodev"} <= flags(place), "cxlfs mount is more careful"
    place.unmount()
    assert mount(place, "rw") == 0
    assert not {"nosuid", "nodev"} & flags(place)
    assert mount(place, "remount,rw,nosuid,noexec") == 0
    assert {"nosuid", "noexec"} <= flags(place)
    assert "nodev" not in flags(place)
    place.unmount()
    assert mount(place, "rw,nosuid,nodev") == 0
    assert {"nosuid", "nodev"} <= flags(place)
