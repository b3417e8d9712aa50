"""Whether a file system has room: what counts as free, on a disk, in memory, in a container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cxlfs.errors import NoSpaceError
from cxlfs.media.room import file_system_of, require_room
from cxlfs.units import GIB, MIB


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def set_free(monkeypatch: pytest.MonkeyPatch, *, free_bytes: int, total_bytes: int) -> None:
    system = SimpleNamespace(f_bavail=free_bytes // 4096, f_blocks=total_bytes // 4096)
    system.f_frsize = 4096
    monkeypatch.setattr(os, "fstatvfs", lambda _descriptor: system)


def fake_proc(root: Path, descriptor: int, kind: str, *, available_bytes: int) -> Path:
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    device = os.fstat(descriptor).st_dev
    (proc / "self" / "mountinfo").write_text(
        f"22 1 {os.major(device)}:{os.minor(device)} / / rw shared:1 - {kind} none rw\n"
    )
    (proc / "meminfo").write_text(
        f"MemTotal: 999999999 kB\nMemAvailable: {available_bytes // 1024} kB\nSwapFree: 0 kB\n"
    )
    (proc / "self" / "cgroup").write_text("0::/job\n")
    return proc


def test_the_file_system_is_told_by_its_name(descriptor: int, tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, descriptor, "tmpfs", available_bytes=GIB)
    assert file_system_of(descriptor, proc) == "tmpfs"
    assert file_system_of(descriptor, tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("size_bytes", "total_bytes", "fits"),
    [
        (98 * GIB, 200 * GIB, True),
        (99 * GIB, 200 * GIB, True),
        (99 * GIB + 4096, 200 * GIB, False),  # 1 GiB at most stays free
        (101 * GIB, 200 * GIB, False),
    ],
)
def test_a_disk_keeps_some_room_for_others(
    descriptor: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size_bytes: int,
    total_bytes: int,
    fits: bool,
) -> None:
    proc = fake_proc(tmp_path, descriptor, "ext4", available_bytes=GIB)
    set_free(monkeypatch, free_bytes=100 * GIB, total_bytes=total_bytes)
    if fits:
        require_room(descriptor, "x", size_bytes, proc=proc, cgroups=tmp_path)
        return
    with pytest.raises(NoSpaceError, match=r"100.0 GiB free, and 1.0 GiB of that") as caught:
        require_room(descriptor, "x", size_bytes, proc=proc, cgroups=tmp_path)
    assert "at most 99.0 GiB now" in caught.value.next_step


def test_what_is_allocated_already_counts(
    descriptor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = fake_proc(tmp_path, descriptor, "ext4", available_bytes=GIB)
    os.posix_fallocate(descriptor, 0, 4 * MIB)
    set_free(monkeypatch, free_bytes=MIB, total_bytes=10 * MIB)
    require_room(descriptor, "x", 4 * MIB, proc=proc, cgroups=tmp_path)
    with pytest.raises(NoSpaceError):
        require_room(descriptor, "x", 5 * MIB, proc=proc, cgroups=tmp_path)


def test_a_file_in_memory_needs_memory(
    descriptor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = fake_proc(tmp_path, descriptor, "tmpfs", available_bytes=16 * GIB)
    set_free(monkeypatch, free_bytes=100 * GIB, total_bytes=128 * GIB)
    require_room(descriptor, "x", 15 * GIB, proc=proc, cgroups=tmp_path)
    with pytest.raises(NoSpaceError, match=r"lies in memory, of which the machine has 16\.0 GiB"):
        require_room(descriptor, "x", 15 * GIB + MIB, proc=proc, cgroups=tmp_path)


def test_a_container_has_what_its_group_may_take(
    descriptor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = fake_proc(tmp_path, descriptor, "tmpfs", available_bytes=64 * GIB)
    set_free(monkeypatch, free_bytes=100 * GIB, total_bytes=128 * GIB)
    group = tmp_path / "groups" / "job"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{4 * GIB}\n")
    (group / "memory.current").write_text(f"{3 * GIB}\n")
    (group / "memory.stat").write_text(f"anon {GIB}\ninactive_file {GIB}\nactive_file 0\n")
    groups = tmp_path / "groups"
    require_room(descriptor, "x", GIB, proc=proc, cgroups=groups)
    with pytest.raises(NoSpaceError, match=r"2.0 GiB free"):
        require_room(descriptor, "x", 2 * GIB, proc=proc, cgroups=groups)
    (group / "memory.max").write_text("max\n")
    require_room(descriptor, "x", 2 * GIB, proc=proc, cgroups=groups)
