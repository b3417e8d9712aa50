"""What a commit of a job asks of a mounted store behind its votes, and that it is durable there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cxlfs import durable
from cxlfs.job import Checkpointer, Committed, Restored, checkpointer, files
from tests.support.mount import Workplace

pytestmark = pytest.mark.mounted


def save(directory: Path) -> None:
    (directory / "shard.bin").write_bytes(bytes(4096))


def test_no_directory_is_opened_before_the_verdict(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening, reading or syncing one takes as long as all the rest of it; older ones are gone."""
    made = Checkpointer(place.mountpoint / "job", engine="local", allow_volatile=True)
    made.restore_from_checkpoint(lambda _path: None)
    for step in range(3):
        made.distributed_checkpoint(step, save)
    made.wait()
    act, opened = Checkpointer._save, list[str]()

    def watched(self: Checkpointer, action: object, write: object) -> str | None:
        if type(action).__name__ not in {"RecordCommit", "Collect"}:
            return act(self, action, write)  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            for module, name in ((os, "scandir"), (durable, "sync_directory")):
                real = getattr(module, name)
                patch.setattr(
                    module, name, lambda *given, f=real: (opened.append("one"), f(*given))[1]
                )
            patch.setattr(self._room, "_begin", lambda _task: None)
            return act(self, action, write)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpointer.Checkpointer, "_save", watched)
    outcome = made.distributed_checkpoint(3, save)
    assert isinstance(outcome, Committed)
    assert outcome.is_cleaned
    assert opened == []
    assert [attempt.step for attempt in sorted(files.attempts_in(made.root))] == [2, 3]


def test_a_record_is_durable_without_a_sync_of_its_directory(place: Workplace) -> None:
    made = Checkpointer(place.mountpoint / "job", engine="local", allow_volatile=True)
    made.restore_from_checkpoint(lambda _path: None)
    outcome = made.distributed_checkpoint(1, save)
    assert isinstance(outcome, Committed)
    place.kill_daemon()
    place.unmount()
    place.mount()
    inventory, problems = files.take_stock(made.root, made.store)
    assert problems == ()
    assert [commit.digest for commit in inventory.commits] == [outcome.digest]
    again = Checkpointer(made.root, engine="local", allow_volatile=True)
    assert isinstance(again.restore_from_checkpoint(lambda _path: None), Restored)
