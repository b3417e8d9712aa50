"""How often programs failed that had opened a file: kept with it, and not believed blindly."""

from __future__ import annotations

import os

import pytest

from cxlfs.errors import NotPermittedError
from cxlfs.store import Store
from cxlfs.store.failed_resumes import (
    COUNT_MAX,
    FAILED_RESUMES_XATTR,
    count_failed_resumes,
    failed_resumes,
)
from cxlfs.verify import run_passes
from tests.support.stores import new_store, reopen, write_file

NAME = b"user.cxlfs.failed_resumes"


def counted(times: int) -> tuple[Store, int]:
    store = new_store()
    ino = write_file(store, 1, b"model", b"x" * 5000)
    for _ in range(times):
        count_failed_resumes(store.volume, [ino])
    return store, ino


@pytest.mark.parametrize("clean", [True, False])
def test_the_count_outlives_the_mount(clean: bool) -> None:
    store, ino = counted(2)
    ctime = store.get_attributes(ino).ctime_ns
    store = reopen(store, clean=clean)
    assert store.get_xattr(ino, NAME) == b"2"
    assert store.get_attributes(ino).ctime_ns == ctime
    count_failed_resumes(store.volume, [ino, ino + 1000])
    assert store.get_xattr(ino, NAME) == b"3"
    store.close()
    assert list(run_passes(store.media, structure_only=False)) == []


def test_it_is_read_by_name_alone() -> None:
    store, ino = counted(1)
    assert store.list_xattrs(ino) == []
    store.set_xattr(ino, NAME, b"99")
    store.remove_xattr(ino, NAME)
    assert store.get_xattr(ino, NAME) == b"1"
    with pytest.raises(NotPermittedError):
        store.set_xattr(ino, FAILED_RESUMES_XATTR, b"9 9")
    store.close()


def test_a_rename_keeps_it_and_a_new_content_does_not() -> None:
    store, ino = counted(1)
    store.rename(1, b"model", 1, b"moved")
    assert store.get_xattr(ino, NAME) == b"1"
    handle = store.open_file(ino, os.O_WRONLY | os.O_TRUNC)
    store.write(handle, 0, b"new")
    assert store.get_xattr(ino, NAME) == b"1", "until it is published"
    store.flush(handle, writer_killed=False)
    store.release(handle)
    assert store.get_xattr(ino, NAME) == b"0"
    store.close()


def test_a_store_that_cannot_write_counts_nothing() -> None:
    store, ino = counted(1)
    store.stop_writing("a test")
    count_failed_resumes(store.volume, [ino])
    assert store.get_xattr(ino, NAME) == b"1"


@pytest.mark.parametrize(
    "value",
    [b"", b"x", b"3", b"-1 %d", b"3 %d 4", b"3  %d", b"9" * 60 + b" %d", b"3\n%d", b"\xff %d"],
)
def test_what_the_media_say_is_not_trusted(value: bytes) -> None:
    store, ino = counted(0)
    inode = store.namespace.get(ino)
    text = value % inode.commit_lsn if b"%d" in value else value
    store.namespace.set_xattr(inode, FAILED_RESUMES_XATTR, text)
    assert 0 <= failed_resumes(inode) <= COUNT_MAX
    assert failed_resumes(inode) in (0, COUNT_MAX)
    store.close()
