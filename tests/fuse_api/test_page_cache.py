"""Which files bypass the page cache, and what is invalidated when."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from cxlfs.fuse.data_plane import HandlersOnly
from cxlfs.fuse.handles import OpenFile, OpenFiles
from cxlfs.fuse.page_cache import PageCache
from tests.support.fuse_api import Kernel, finish
from tests.support.fuse_socket import SECONDS_MAX
from tests.support.mount import wait_until


@pytest.mark.parametrize(
    ("flags", "direct"),
    [
        (os.O_RDONLY, False),
        (os.O_RDWR, False),
        (os.O_RDWR | os.O_TRUNC, False),
        (os.O_WRONLY, True),
        (os.O_WRONLY | os.O_APPEND, True),
        (os.O_WRONLY | os.O_TRUNC, True),
    ],
)
def test_only_what_cannot_be_mapped_bypasses_the_cache(
    kernel: Kernel, flags: int, direct: bool
) -> None:
    ino = kernel.write_file(b"file", b"x")
    info = kernel.open(ino, flags)
    assert info.direct_io == direct
    kernel.close(info.fh)


def test_pages_are_kept_between_opens_until_a_direct_write(kernel: Kernel) -> None:
    ino = kernel.write_file(b"file", b"x")
    keeps = []
    for _ in range(3):
        info = kernel.open(ino, os.O_RDONLY)
        keeps.append(info.keep_cache)
        kernel.close(info.fh)
    assert keeps == [False, True, True]  # it was written directly when it was made
    writer = kernel.open(ino, os.O_WRONLY).fh
    finish(kernel.operations.write(writer, 0, b"y"))
    first = kernel.open(ino, os.O_RDONLY)
    finish(kernel.operations.write(writer, 0, b"z"))
    second = kernel.open(ino, os.O_RDONLY)
    assert (first.keep_cache, second.keep_cache) == (False, False)
    for handle in (writer, first.fh, second.fh):
        kernel.close(handle)


class Recorder(HandlersOnly):
    """A data plane that notes what the kernel is told."""

    def __init__(self, error: int = 0) -> None:
        self.calls: list[tuple[int, bool]] = []
        self.error = error

    def invalidate(self, ino: int, attributes_only: bool) -> None:
        self.calls.append((ino, attributes_only))
        if self.error:
            raise OSError(self.error, os.strerror(self.error))


def cache_with_reader(recorder: Recorder, ino: int) -> PageCache:
    files = OpenFiles()
    files.add(
        1,
        OpenFile(
            ino,
            writable=False,
            direct=False,
            appends=False,
            opener=None,
            may_keep_set_id=False,
            uid=0,
            gid=0,
        ),
    )
    return PageCache(files, recorder)


def run_until_called(cache: PageCache, recorder: Recorder, count: int) -> None:
    cache.start()
    wait_until(lambda: len(recorder.calls) >= count, "the thread has told the kernel")
    assert cache.quiesce(SECONDS_MAX)


def test_direct_writes_invalidate_what_others_hold_cached() -> None:
    recorder = Recorder()
    cache = cache_with_reader(recorder, ino=5)
    for _ in range(10):
        cache.written_directly(5)
        cache.written_directly(6)  # nobody has it cached
    run_until_called(cache, recorder, 1)
    assert recorder.calls == [(5, False)]


def test_replaced_content_is_always_invalidated() -> None:
    recorder = Recorder()
    cache = PageCache(OpenFiles(), recorder)
    cache.content_replaced(7)
    cache.content_replaced(9)
    cache.forgotten(9)
    at_once = [(7, True), (9, True)]  # whoever closes a file finds the size that it has
    assert recorder.calls == at_once
    run_until_called(cache, recorder, 3)
    assert recorder.calls == [*at_once, (7, False)]
    assert not cache.keep_at_open(7, direct=False)


def test_changed_attributes_are_invalidated_before_anybody_goes_on() -> None:
    recorder = Recorder()
    cache = PageCache(OpenFiles(), recorder)
    cache.attributes_changed(8)
    assert recorder.calls == [(8, True)]


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTCONN, errno.EPERM])
def test_a_failed_invalidation_does_not_end_the_others(
    number: int, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(error=number)
    cache = PageCache(OpenFiles(), recorder)
    cache.content_replaced(1)
    cache.content_replaced(2)
    run_until_called(cache, recorder, 4)
    assert bool(caplog.records) == (number == errno.EPERM)


def test_the_connection_is_not_closed_under_an_invalidation() -> None:
    """It is told when the thread is through, and nothing is begun afterwards."""
    entered, leave = threading.Event(), threading.Event()
    calls: list[tuple[int, bool]] = []

    class Slow(HandlersOnly):
        def invalidate(self, ino: int, attributes_only: bool) -> None:
            if attributes_only:
                return
            calls.append((ino, attributes_only))
            entered.set()
            assert leave.wait(SECONDS_MAX)

    cache = PageCache(OpenFiles(), Slow())
    cache.content_replaced(1)
    cache.content_replaced(2)
    cache.start()
    assert entered.wait(SECONDS_MAX)
    assert not cache.quiesce(0.01)
    leave.set()
    assert cache.quiesce(SECONDS_MAX)
    cache.content_replaced(3)
    assert calls == [(1, False)]


def test_a_revert_reaches_the_page_cache(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event of the store is what tells the kernel that the old version is back."""
    ino = kernel.write_file(b"file", b"old")
    told: list[int] = []
    monkeypatch.setattr(kernel.operations.page_cache, "content_replaced", told.append)
    monkeypatch.setattr(
        kernel.operations._processes, "is_being_killed", lambda process: process is None
    )
    handle = kernel.open(ino, os.O_WRONLY | os.O_TRUNC).fh
    finish(kernel.operations.write(handle, 0, b"newer"))
    kernel.close(handle)
    assert told == [ino]
    assert kernel.read(ino) == b"old"


class Slow(Recorder):
    """Pages are dropped when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()

    def invalidate(self, ino: int, attributes_only: bool) -> None:
        super().invalidate(ino, attributes_only)
        if not attributes_only:
            assert self.may_end.wait(SECONDS_MAX)


def test_who_opens_a_replaced_file_waits_until_its_pages_are_gone() -> None:
    """Its size is that of the new content from then on, for maps of it too."""
    slow = Slow()
    cache = PageCache(OpenFiles(), slow)
    cache.start()
    cache.content_replaced(7)
    assert cache.is_replacing(7)
    assert not cache.is_replacing(8)
    wait_until(lambda: (7, False) in slow.calls, "the pages are being dropped")
    assert cache.is_replacing(7)
    slow.may_end.set()
    wait_until(lambda: not cache.is_replacing(7), "they are gone")
    assert cache.quiesce(SECONDS_MAX)
