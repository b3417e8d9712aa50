"""Between the last close of a killed writer and the RELEASE of the file: who asks for it waits."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from cxlfs.fuse.processes import Process
from cxlfs.fuse.releases import RELEASE_SECONDS
from tests.support.fuse_api import ROOT, Kernel, finish

Verb = Callable[[Kernel, int], object]


def lookup(kernel: Kernel, _ino: int) -> object:
    return finish(kernel.operations.lookup(ROOT, b"file", kernel.context))


def open_it(kernel: Kernel, ino: int) -> object:
    return kernel.operations.release_file(kernel.open(ino, os.O_RDONLY).fh)


def open_by_name(kernel: Kernel, _ino: int) -> object:
    return kernel.operations.release_file(kernel.create(b"file", os.O_RDONLY)[1])


def look(kernel: Kernel, ino: int) -> object:
    return finish(kernel.operations.getattr(ino, kernel.context))


def ask_for_its_state(kernel: Kernel, ino: int) -> object:
    return finish(kernel.operations.getxattr(ino, b"user.cxlfs.state", kernel.context))


def rename(kernel: Kernel, _ino: int) -> object:
    return finish(kernel.operations.rename(ROOT, b"file", ROOT, b"other", 0, kernel.context))


def link(kernel: Kernel, ino: int) -> object:
    return finish(kernel.operations.link(ino, ROOT, b"other", kernel.context))


VERBS: list[Verb] = [lookup, open_it, open_by_name, look, ask_for_its_state, rename, link]


@pytest.fixture
def left(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Inode and handle of a file that a killed writer has closed in the middle of an overwrite."""
    ino = kernel.write_file(b"file", b"the old content")
    handle = int(kernel.open(ino, os.O_WRONLY | os.O_TRUNC).fh)
    finish(kernel.operations.write(handle, 0, b"new"))
    with monkeypatch.context() as patch:
        patch.setattr(kernel.operations._processes, "is_being_killed", lambda _process: True)
        finish(kernel.operations.flush(handle))
    return ino, handle


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: str(verb.__name__))
def test_who_asks_for_the_file_finds_the_old_version(
    kernel: Kernel, left: tuple[int, int], verb: Verb
) -> None:
    ino, handle = left
    turns = 0

    async def others() -> None:
        nonlocal turns
        turns += 1
        if turns == 3:
            finish(kernel.operations.release(handle))

    kernel.operations.pause = others
    verb(kernel, ino)
    assert turns == 3
    assert kernel.read(ino) == b"the old content"
    assert not kernel.operations.releases._until


def test_who_has_it_open_does_not_wait(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    ino = kernel.write_file(b"file", b"the old content")
    reader = kernel.open(ino, os.O_RDONLY).fh
    handle = kernel.open(ino, os.O_WRONLY | os.O_TRUNC).fh
    finish(kernel.operations.write(handle, 0, b"new"))
    with monkeypatch.context() as patch:
        patch.setattr(kernel.operations._processes, "is_being_killed", lambda _process: True)
        finish(kernel.operations.flush(handle))
    kernel.operations.pause = pytest.fail
    assert bytes(finish(kernel.operations.read(reader, 0, 100))) == b"new"
    finish(kernel.operations.write(handle, 3, b"er"))  # so somebody lives
    assert look(kernel, ino)
    kernel.close(handle)
    kernel.close(reader)
    assert kernel.read(ino) == b"newer"


def test_nobody_waits_for_long(kernel: Kernel, left: tuple[int, int]) -> None:
    """Somebody else holds the descriptor: a child that inherited it, and has not written."""
    ino, handle = left
    now = kernel.operations.releases._clock()
    turns = 0

    async def others() -> None:
        nonlocal turns
        turns += 1

    kernel.operations.pause = others
    kernel.operations.releases._clock = lambda: now + turns
    assert kernel.read(ino) == b"new"
    assert turns <= RELEASE_SECONDS + 1
    kernel.operations.pause = pytest.fail
    assert kernel.read(ino) == b"new"
    finish(kernel.operations.release(handle))
    assert kernel.read(ino) == b"the old content"


def test_nobody_waits_where_another_writer_lives(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ino = kernel.write_file(b"file", b"the old content")
    handle = int(kernel.open(ino, os.O_WRONLY | os.O_TRUNC).fh)
    finish(kernel.operations.write(handle, 0, b"new"))
    kernel.operations.files.get(handle).writers.add(Process(7, 7))
    processes = kernel.operations._processes
    with monkeypatch.context() as patch:
        patch.setattr(processes, "is_being_killed", lambda _process: True)
        patch.setattr(processes, "is_alive", lambda process: process == Process(7, 7))
        finish(kernel.operations.flush(handle))
    kernel.operations.pause = pytest.fail
    assert kernel.read(ino) == b"new"
    finish(kernel.operations.release(handle))
    assert kernel.read(ino) == b"the old content"
