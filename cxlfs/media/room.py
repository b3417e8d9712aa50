"""Whether the file system below a source has room for it, asked before a byte is allocated.

Never here: allocating (``file``).

Invariants
- What is asked for is compared with what is free first: a file system is never filled to find out
  that a file does not fit.
- Some of what is free stays free: a file system without room fails programs that have nothing to
  do with the store. In memory (tmpfs) what the machine can still give counts, not only what the
  file system may take: its limit is half of the memory whether or not that is free.
"""

from __future__ import annotations

import os
from pathlib import Path

from cxlfs.errors import NoSpaceError
from cxlfs.units import GIB, KIB, format_size

VOLATILE_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
VOLATILE_TEXT = "the source is a file in memory (tmpfs, hugetlbfs): it is gone with the power"

_STAT_BLOCK_BYTES = 512  # unit of st_blocks, whatever the file system
_KEPT_PART = 100
_KEPT_BYTES_MAX = GIB
_KEPT_PART_OF_MEMORY = 16
_FIELDS_BEFORE_OPTIONAL = 6


def file_system_of(descriptor: int, proc: Path = Path("/proc")) -> str | None:
    """The type of the file system that a file lies on, as mount(8) calls it; None: not known."""
    fields = _mount_of(descriptor, proc)
    return os.fsdecode(fields[0]) if fields else None


def mount_options_of(descriptor: int, proc: Path = Path("/proc")) -> tuple[str, ...]:
    """Those of the file system itself, like ``huge=always``; none: not known."""
    fields = _mount_of(descriptor, proc)
    return tuple(os.fsdecode(fields[-1]).split(",")) if fields else ()


def _mount_of(descriptor: int, proc: Path) -> list[bytes]:
    """Type, source and options of the file system; empty: not known."""
    number = os.fstat(descriptor).st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}".encode()
    try:
        lines = (proc / "self" / "mountinfo").read_bytes().splitlines()
    except OSError:
        return []
    for line in lines:
        fields = line.split(b" ")
        if len(fields) > _FIELDS_BEFORE_OPTIONAL and fields[2] == wanted and b"-" in fields:
            return fields[fields.index(b"-", _FIELDS_BEFORE_OPTIONAL) + 1 :]
    return []


def allocated_bytes(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * _STAT_BLOCK_BYTES


def require_room(
    descriptor: int,
    path: str,
    size_bytes: int,
    *,
    proc: Path = Path("/proc"),
    cgroups: Path = Path("/sys/fs/cgroup"),
) -> None:
    """Raises NoSpaceError unless the file can be ``size_bytes`` long, all of it allocated, and the
    file system below keeps some room for others.
    """
    needed_bytes = size_bytes - allocated_bytes(descriptor)
    if needed_bytes <= 0:
        return
    system = os.fstatvfs(descriptor)
    free_bytes = system.f_bavail * system.f_frsize
    kept_bytes = min(system.f_blocks * system.f_frsize // _KEPT_PART, _KEPT_BYTES_MAX)
    where = "the file system has"
    if file_system_of(descriptor, proc) in VOLATILE_FILE_SYSTEMS:
        memory_bytes = _memory_available(proc, cgroups)
        if memory_bytes is not None and memory_bytes < free_bytes:
            free_bytes, kept_bytes = memory_bytes, memory_bytes // _KEPT_PART_OF_MEMORY
            where = "it lies in memory, of which the machine has"
    if needed_bytes <= free_bytes - kept_bytes:
        return
    most_bytes = max(free_bytes - kept_bytes + size_bytes - needed_bytes, 0)
    raise NoSpaceError(
        f"{path} cannot be {format_size(size_bytes)} long: {where} {format_size(free_bytes)} free, "
        f"and {format_size(kept_bytes)} of that stay free for others",
        needed_bytes=needed_bytes,
        available_bytes=free_bytes,
        next_step=f"choose a smaller size (at most {format_size(most_bytes)} now), or free space "
        "there",
    )


def _memory_available(proc: Path, cgroups: Path) -> int | None:
    """What the machine, and the control group of this process, can still give; None: not known.

    Sources: proc_meminfo(5); Documentation/admin-guide/cgroup-v2.rst.
    """
    limits = [_of_machine(proc), *_of_control_groups(proc, cgroups)]
    return min((limit for limit in limits if limit is not None), default=None)


def _of_machine(proc: Path) -> int | None:
    fields = _numbers(proc / "meminfo")
    if "MemAvailable" not in fields:
        return None
    return (fields["MemAvailable"] + fields.get("SwapFree", 0)) * KIB


def _of_control_groups(proc: Path, cgroups: Path) -> list[int | None]:
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    name = next((line[3:] for line in lines if line.startswith("0::")), None)
    if name is None:
        return []
    group = cgroups / name.strip("/")
    return [_of_group(each) for each in (group, *group.parents) if cgroups in (each, *each.parents)]


def _of_group(group: Path) -> int | None:
    """What the group may still take: file pages that can be dropped count as free."""
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None
    pages = _numbers(group / "memory.stat")
    used -= pages.get("inactive_file", 0) + pages.get("active_file", 0)
    return max(limit - max(used, 0), 0)


def _numbers(path: Path) -> dict[str, int]:
    """``Name: 12 kB`` and ``name 12``, line by line."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    rows = (line.replace(":", " ").split() for line in lines)
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
