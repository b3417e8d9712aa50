"""Operations on ranges of files: shared copies, holes, allocated room; and sync.

A copy shares extents between files, so that what one file publishes the other may need: each here
is followed by something that a recovery could get wrong if it did not know of both.
"""

from __future__ import annotations

import functools
import os

from tests.support.crash import operations
from tests.support.crash.bench import Bench
from tests.support.crash.operations import BIG, TRUNCATE, Operation
from tests.support.model import truncate_bytes, write_bytes


def copy(
    bench: Bench, source: int | None, offset_in: int, target: int | None, offset_out: int, size: int
) -> None:
    """Of what readers of the source see now; refused where there is no room."""
    if source is None or target is None:
        return
    store = bench.store
    data = bytes(bench.content(store.files.get(source).inode)[offset_in : offset_in + size])
    inode = store.files.get(target).inode
    content = bench.content(inode)
    act = functools.partial(store.ranges.copy, source, offset_in, target, offset_out, size)
    if bench.do("copy", act, late=True, keeps=True):
        if data:  # of nothing, nothing is copied
            write_bytes(content, offset_out, data)
    else:
        bench.contents.pop(inode.ino)


def allocate(bench: Bench, handle: int | None, offset: int, size: int, **how: bool) -> None:
    """fallocate: with ``punch`` or ``zero`` the range reads as zeros."""
    if handle is None:
        return
    content = bench.content(bench.store.files.get(handle).inode)
    act = functools.partial(bench.store.allocate, handle, offset, size, **how)
    if not bench.do("allocate", act, late=True, keeps=True):
        return
    if not how.get("keep_size") and len(content) < offset + size:
        truncate_bytes(content, offset + size)
    if how.get("punch") or how.get("zero"):
        end = min(offset + size, len(content))
        content[offset:end] = bytes(max(0, end - offset))


# --- copies ---------------------------------------------------------------------------------------


def copy_committed(bench: Bench) -> None:
    """Then the source goes, and its room may be written again."""
    source, target = bench.open(b"old", os.O_RDONLY), bench.create(b"new")
    copy(bench, source, 0, target, 100, BIG)
    bench.close(target)
    bench.close(source)
    bench.unlink(b"old")
    operations.rollover(bench)
    bench.save(b"third", 9000)


def copy_unpublished(bench: Bench) -> None:
    """The copy is published before the source, which grows on, and is published too."""
    source = bench.create(b"new")
    bench.write(source, 0, 9001)
    target = bench.open(b"old")
    copy(bench, source, 0, target, 3000, 9001)
    bench.write(source, 9001, 4)
    bench.fsync(target)
    bench.write(source, 9005, 8)
    bench.close(source)
    bench.close(target)


def copy_of_a_killed_writer(bench: Bench) -> None:
    source = bench.open(b"old", TRUNCATE)
    bench.write(source, 0, 9000)
    target = bench.open(b"other", TRUNCATE)
    copy(bench, source, 0, target, 0, 9000)
    bench.close(source, killed=True)
    bench.close(target)
    operations.drop_aside(bench)
    operations.rollover(bench)


def copy_within(bench: Bench) -> None:
    handle = bench.open(b"old")
    bench.write(handle, 6000, 5000)
    copy(bench, handle, 2000, handle, 20_000, 8000)
    bench.close(handle)


def copy_a_shred(bench: Bench) -> None:
    """Too small to be worth references."""
    source, target = bench.open(b"old", os.O_RDONLY), bench.open(b"other")
    copy(bench, source, 5, target, 3, 900)
    bench.close(target)
    bench.close(source)


def copy_and_clean(bench: Bench) -> None:
    """The cleaner moves what two files share; the record names both."""
    source, target = bench.open(b"old", os.O_RDONLY), bench.create(b"new")
    copy(bench, source, 0, target, 0, 6000)
    bench.fsync(target)
    operations.clean(bench)
    bench.write(target, 1000, 100)
    bench.close(target)
    bench.close(source)


# --- room and holes -------------------------------------------------------------------------------


def allocate_ahead(bench: Bench) -> None:
    handle = bench.open(b"old")
    allocate(bench, handle, 5000, 9000)
    bench.write(handle, 7000, 5000)
    bench.fsync(handle)
    allocate(bench, handle, 0, 30_000, keep_size=True)
    bench.close(handle)


def punch_a_hole(bench: Bench) -> None:
    handle = bench.open(b"old")
    allocate(bench, handle, 100, 4500, keep_size=True, punch=True)
    bench.write(handle, 700, 13)
    bench.close(handle)


def zero_a_range(bench: Bench) -> None:
    handle = bench.open(b"old", TRUNCATE)
    bench.write(handle, 0, 9000)
    allocate(bench, handle, 8990, 100, zero=True)
    bench.close(handle)


# --- everything -----------------------------------------------------------------------------------


def sync(bench: Bench) -> None:
    operations.create_left_open(bench)
    operations.change_left_open(bench)
    operations.make_directory(bench)
    bench.do("sync", bench.store.sync, commits=True, steps=True)


RANGE_OPERATIONS: list[Operation] = [
    copy_committed, copy_unpublished, copy_of_a_killed_writer, copy_within, copy_a_shred,
    copy_and_clean, allocate_ahead, punch_a_hole, zero_a_range, sync,
]  # fmt: skip
