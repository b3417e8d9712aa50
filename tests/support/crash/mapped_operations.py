"""Operations over files that programs fill through shared mappings, and pages that are lost.

The operations play the kernel: closes with a mapping left, pages written back later, and some that
the store cannot take.
"""

from __future__ import annotations

import functools

from cxlfs.errors import NoSpaceError, NotFoundError
from cxlfs.format import layout
from cxlfs.store.namespace import Inode
from cxlfs.store.overwrite import Evidence
from cxlfs.store.unit_rules import Ending
from tests.support.crash.bench import Bench
from tests.support.crash.held_operations import holding, judge
from tests.support.crash.operations import TRUNCATE

_OLD, _NEW = b"old", b"new"
_BYTES = 12_000
_PAGE = 4096


def _inode_of(bench: Bench, handle: int) -> Inode:
    return bench.store.files.get(handle).inode


def _map(bench: Bench, handle: int) -> None:
    """Make room by ftruncate, and close while it is mapped: nothing is committed."""
    bench.ftruncate(handle, _BYTES)
    _close_mapped(bench, handle)


def _close_mapped(bench: Bench, handle: int) -> None:
    flush = bench.store.flush
    action = functools.partial(flush, handle, writer_killed=False, is_mapped=lambda: True)
    bench.do("close while mapped", action, late=True, keeps=True)


def _begin(bench: Bench, path: bytes = _OLD) -> int | None:
    handle = bench.open(path, TRUNCATE) or bench.create(path)
    if handle is not None:
        _map(bench, handle)
    return handle


def _begin_again(bench: Bench) -> int | None:
    """A header is saved over what is there, and the file opened again, as open_memmap does."""
    holding(bench)
    bench.save(_OLD, 100)
    handle = bench.open(_OLD)
    if handle is not None:
        _map(bench, handle)
    return handle


def _fill(bench: Bench, handle: int) -> None:
    for start in range(0, _BYTES, _PAGE):
        bench.write(handle, start, min(_PAGE, _BYTES - start))


def _lose(bench: Bench, handle: int, start: int) -> None:
    inode = _inode_of(bench, handle)
    error = NoSpaceError("no room")
    lose = functools.partial(bench.store.files.pages_lost, handle, start, error)
    bench.do("lose", lose, late=True, keeps=True)
    bench.contents.pop(inode.ino, None)


def _release(bench: Bench, handle: int) -> None:
    release = functools.partial(bench.store.release, handle)
    bench.do("release", release, late=True, steps=True)


def _is_alone(bench: Bench, handle: int) -> bool:
    """No earlier operation has left the file open, or changed."""
    return not bench.left_open and _inode_of(bench, handle).handles == 1


def _content(bench: Bench, path: bytes) -> bytes | None:
    try:
        inode = bench.inode(path)
    except NotFoundError:
        return None
    return None if inode.live is None else bytes(inode.live.read(0, inode.live.size))


def mapped_filled(bench: Bench) -> None:
    handle = _begin(bench)
    if handle is not None:
        _fill(bench, handle)
        bench.close(handle)


def mapped_with_holes(bench: Bench) -> None:
    """Published by fsync first, then as it is when the mapping ends."""
    handle = _begin(bench)
    if handle is not None:
        bench.write(handle, 0, _PAGE)
        bench.fsync(handle)
        bench.ftruncate(handle, 0)
        _map(bench, handle)
        bench.write(handle, _PAGE, _PAGE)
        _release(bench, handle)


def mapped_periodically(bench: Bench) -> None:
    """The periodic commit publishes what has no holes, and a new file with some as incomplete."""
    handle = _begin(bench)
    if handle is None:
        return
    commit = functools.partial(bench.store.commits.commit_old, older_than=1e18)
    alone = _is_alone(bench, handle)
    bench.write(handle, 0, _PAGE)
    bench.do("periodic", commit, late=True, steps=True)
    inode = _inode_of(bench, handle)
    is_open = inode.version is not None or inode.flags & layout.INODE_INCOMPLETE
    assert is_open or not alone, "it is not whole"
    _fill(bench, handle)
    bench.do("periodic", commit, late=True, steps=True)
    is_open = inode.version is not None or inode.flags & layout.INODE_INCOMPLETE
    assert not is_open or not alone, "nothing of it is missing"
    _release(bench, handle)


def mapped_killed(bench: Bench) -> None:
    handle = _begin(bench)
    if handle is not None:
        bench.write(handle, 0, _PAGE)
        bench.close(handle, killed=True)


def mapped_lost(bench: Bench) -> None:
    before = _content(bench, _OLD)
    handle = _begin(bench)
    if handle is None:
        return
    alone = _is_alone(bench, handle)
    bench.write(handle, 0, _PAGE)
    _lose(bench, handle, _PAGE)
    _close_mapped(bench, handle)  # which fails
    _release(bench, handle)
    if alone and before is not None:
        assert _content(bench, _OLD) == before, "the version before is not back"


def mapped_lost_of_a_new_file(bench: Bench) -> None:
    existed = _content(bench, _NEW) is not None
    replaces = _content(bench, _OLD) is not None
    handle = _begin(bench, _NEW)
    if handle is None:
        return
    alone = _is_alone(bench, handle) and not existed
    _fill(bench, handle)
    _lose(bench, handle, 2 * _PAGE)
    _release(bench, handle)
    if alone:
        assert len(_content(bench, _NEW) or b"") == 2 * _PAGE, "it has what was lost"
        bench.rename(_NEW, _OLD)
    if alone and replaces:
        assert len(_content(bench, _NEW) or b"") == 2 * _PAGE, "it has replaced another file"


def mapped_again_and_lost(bench: Bench) -> None:
    before = _content(bench, _OLD)
    handle = _begin_again(bench)
    if handle is None:
        return
    alone = _is_alone(bench, handle)
    _fill(bench, handle)
    bench.do("make room", bench.store.overwrites.give_up_oldest, late=True, steps=True)
    _lose(bench, handle, 0)
    _release(bench, handle)
    holding(bench, Ending.BADLY)
    judge(bench, Evidence.STRONG)
    if alone and before:
        assert _content(bench, _OLD) == before, "the version before is not back"


MAPPED_OPERATIONS = [
    mapped_filled, mapped_with_holes, mapped_periodically, mapped_killed, mapped_lost,
    mapped_lost_of_a_new_file, mapped_again_and_lost,
]  # fmt: skip
