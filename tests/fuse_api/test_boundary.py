"""Errors at the edge: expected ones become their errno, defects stop writing but not reading."""

from __future__ import annotations

import errno
import logging
import os

import pytest

from cxlfs import errors
from tests.support.fuse_api import ROOT, Kernel, error_number, finish


def all_errors() -> list[type[errors.CxlfsError]]:
    found, pending = [], [errors.CxlfsError]
    while pending:
        error_class = pending.pop()
        found.append(error_class)
        pending.extend(error_class.__subclasses__())
    return sorted(set(found), key=lambda c: c.__name__)


@pytest.mark.parametrize("error_class", all_errors(), ids=lambda c: c.__name__)
def test_an_expected_error_becomes_its_errno(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, error_class: type[errors.CxlfsError]
) -> None:
    error = error_class.__new__(error_class)
    errors.CxlfsError.__init__(error, "as expected")

    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(kernel.store, "get_attributes", fail)
    with error_number(error_class.errno):
        kernel.getattr(ROOT)
    assert not kernel.store.read_only


def test_a_request_that_is_not_finished_is_made_again_after_a_pause(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the lock meanwhile; nothing is a defect."""
    operations, steps, pauses = kernel.operations, [True, True, False], list[bool]()

    async def pause() -> None:
        pauses.append(operations.lock.locked())

    ino = kernel.write_file(b"file", b"content")
    monkeypatch.setattr(operations, "pause", pause)
    monkeypatch.setattr(kernel.store.versions, "prepare_change", lambda _ino, **_: steps.pop(0))
    kernel.setattr(ino, size=3)
    assert (steps, pauses, operations.failures.counts.total()) == ([], [False, False], 0)
    assert kernel.store.get_attributes(ino).size == 3


@pytest.mark.parametrize("error", [KeyError("x"), errors.InvariantError("x"), OSError(5, "x")])
def test_a_defect_is_logged_counted_and_stops_writing(
    kernel: Kernel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    ino = kernel.write_file(b"file", b"content")

    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(kernel.store, "statfs", fail)
        for _ in range(3):
            with error_number(errno.EIO):
                finish(kernel.operations.statfs(kernel.context))
    assert kernel.operations.failures.counts == {f"statfs: {type(error).__name__}": 3}
    assert "Traceback" in caplog.text
    assert kernel.store.read_only
    assert type(error).__name__ in str(kernel.store.read_only_reason)
    with error_number(errno.EROFS):
        kernel.open(ino, os.O_WRONLY)
    assert kernel.read(ino) == b"content"
    kernel.operations.failures.counts.clear()


def test_the_same_defect_does_not_fill_the_log(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise KeyError

    monkeypatch.setattr(kernel.store, "statfs", fail)
    for _ in range(200):
        with error_number(errno.EIO):
            finish(kernel.operations.statfs(kernel.context))
    tracebacks = [record for record in caplog.records if record.exc_info]
    assert 1 <= len(tracebacks) <= 20
    assert kernel.operations.failures.counts.total() == 200
    kernel.operations.failures.counts.clear()


def test_a_notice_never_raises(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    ino = kernel.write_file(b"file", b"x")

    def fail(_ino: int) -> None:
        raise RuntimeError("x")

    with monkeypatch.context() as patch:
        patch.setattr(kernel.store, "unpin", fail)
        finish(kernel.operations.forget([(ino, 1)]))
    assert kernel.operations.failures.counts == {"forget: RuntimeError": 1}
    kernel.operations.failures.counts.clear()
    kernel.store.unpin(ino)


def test_a_defect_stops_who_writes_alone_while_nobody_else_uses_the_store(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ino = kernel.write_file(b"file", b"content")
    stopped: list[bool] = []

    class Port:
        def stop(self) -> int:
            stopped.append(kernel.operations.lock.locked())
            return 0

        def written(self) -> int:
            return 0

        def set_content(self, content: object) -> None: ...

    def fail(*_arguments: object, **_options: object) -> None:
        raise KeyError("x")

    kernel.store.namespace.get(ino).port = Port()
    with monkeypatch.context() as patch:
        patch.setattr(kernel.store, "statfs", fail)
        with error_number(errno.EIO):
            finish(kernel.operations.statfs(kernel.context))
    assert stopped == [True]
    kernel.operations.failures.counts.clear()
    kernel.store.namespace.get(ino).port = None
