"""Requests that begin a checkpoint unit, and those that come behind the way back of one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

from cxlfs.fuse import boundary
from cxlfs.fuse.returned import TOLD_SECONDS
from cxlfs.store.unit_aside import ASIDE_NAME
from cxlfs.store.unit_rules import Ending, UnitsMode
from cxlfs.types import ROOT_INO
from tests.support.fuse_api import Kernel, error_number, finish

FILES = 40


def _write(kernel: Kernel, _directory: int, ino: int) -> None:
    finish(kernel.operations.write(kernel.open(ino).fh, 10, b"x"))


BEGINNINGS: dict[str, Callable[[Kernel, int, int], Any]] = {
    "create over": lambda k, d, _: k.create(b"7", os.O_RDWR | os.O_TRUNC, d),
    "open": lambda k, _, ino: k.open(ino, os.O_WRONLY | os.O_TRUNC),
    "setattr": lambda k, _, ino: k.setattr(ino, size=3),
    "setattr to nothing": lambda k, _, ino: k.setattr(ino, size=0),
    "unlink": lambda k, d, _: finish(k.operations.unlink(d, b"7", k.context)),
    "rename": lambda k, d, _: finish(k.operations.rename(d, b"7", d, b"n", 0, k.context)),
    "rename out": lambda k, d, _: finish(k.operations.rename(d, b"7", 1, b"n", 0, k.context)),
    "rename in": lambda k, d, _: finish(k.operations.rename(1, b"o", d, b"7", 0, k.context)),
    "rmdir": lambda k, d, _: finish(k.operations.rmdir(d, b"empty", k.context)),
    "write": _write,
}


@pytest.mark.parametrize("how", BEGINNINGS)
def test_whoever_begins_a_unit_of_many_files_begins_at_once(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Nothing is copied: the change itself is all there is, and one record in front of it."""
    store, operations = kernel.store, kernel.operations
    store.units.policies.mode, store.units.active = UnitsMode.AUTO, True
    kernel.write_file(b"o", b"outside")
    directory = finish(operations.mkdir(ROOT_INO, b"checkpoint-1", 0o755, kernel.context)).st_ino
    finish(operations.mkdir(directory, b"empty", 0o755, kernel.context))
    for name in [*(b"%d" % number for number in range(FILES)), b"trainer_state.json"]:
        handle = kernel.create(name, os.O_WRONLY, directory)[1]
        finish(operations.write(handle, 0, b"before"))
        kernel.close(handle)
    assert not store.units.has_open
    seen: list[bool] = []

    async def pause() -> None:
        seen.append(True)

    monkeypatch.setattr(operations, "pause", pause)
    commits = store.volume.counters.commits
    BEGINNINGS[how](kernel, directory, kernel.lookup(b"7", directory).st_ino)
    assert store.units.has_open
    assert not seen
    assert store.volume.counters.commits - commits <= 6
    for handle in list(operations.files):
        kernel.close(handle)


@pytest.fixture
def gone_back(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """A directory, and a file in it, that background work has just taken back: their writer was
    killed. The kernel remembers both names.
    """
    store, operations = kernel.store, kernel.operations
    store.units.policies.mode, store.units.active = UnitsMode.AUTO, True
    monkeypatch.setattr(store.units, "writer", lambda: "saver")
    monkeypatch.setattr(store.units, "ending_of", lambda _writer: Ending.ALIVE)
    directory = finish(operations.mkdir(ROOT_INO, b"checkpoint-1", 0o755, kernel.context)).st_ino
    ino, handle = kernel.create(b"shard", os.O_WRONLY, directory)
    finish(operations.write(handle, 0, b"half of a set"))
    kernel.close(handle)
    assert store.units.has_open
    monkeypatch.setattr(store.units, "ending_of", lambda _writer: Ending.KILLED)
    while store.maintain(1.0):
        pass
    assert not store.units.has_open
    return directory, ino


def test_who_comes_by_an_old_name_is_sent_back(
    kernel: Kernel, gone_back: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread once: it asks for the names again then."""
    directory, ino = gone_back
    requests: list[Callable[[], object]] = [
        lambda: finish(kernel.operations.opendir(directory, kernel.context)),
        lambda: kernel.open(ino, os.O_RDONLY),
        lambda: kernel.lookup(b"shard", directory),
    ]
    for tid, ask in enumerate(requests, 100):
        monkeypatch.setattr(boundary, "caller_of", lambda _arguments, tid=tid: tid)
        with error_number(errno.ESTALE):
            ask()
        ask()
    for number in (errno.ESTALE, errno.ENOENT):  # it was removed
        monkeypatch.setattr(boundary, "caller_of", lambda _arguments: 99)
        with error_number(number):
            kernel.create(b"new", os.O_WRONLY, directory)
    assert not kernel.lookup(b"checkpoint-1").st_ino
    with error_number(errno.ENOENT):
        kernel.lookup(ASIDE_NAME)


def test_the_old_names_are_forgotten_in_the_end(
    kernel: Kernel, gone_back: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = kernel.operations.returned._clock()
    monkeypatch.setattr(kernel.operations.returned, "_clock", lambda: now + TOLD_SECONDS)
    handle = finish(kernel.operations.opendir(gone_back[0], kernel.context))
    finish(kernel.operations.releasedir(handle))
    assert not kernel.operations.returned._told
