"""The judge of the kill campaign: it must notice what it is there for. No mount is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import kill_model, saver
from tests.support.kill_model import Checkpoints, Ledger, Log


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory without a daemon has nothing to wait for."""
    monkeypatch.setattr(kill_model, "PATIENCE_SECONDS", 0.02)


def _save(model: Checkpoints, version: int) -> None:
    data = saver.content(model.seed, model.role, version)
    saver.save(model.directory, model.seed, model.role, version, data)


def test_the_old_and_the_new_version_are_told_apart(tmp_path: Path, seed: int) -> None:
    model = Checkpoints(tmp_path, seed, "mixed")
    assert model.judge(Ledger(saved=1, begun=2)).was_new is False
    assert model.version == 1
    _save(model, 2)
    assert model.judge(Ledger(saved=1, begun=2)).was_new is True
    assert model.version == 2
    verdict = model.judge(Ledger(saved=2, begun=2))
    assert verdict.was_new is None
    assert verdict.problem is None


def test_a_saved_version_that_is_gone_is_noticed(tmp_path: Path, seed: int) -> None:
    model = Checkpoints(tmp_path, seed, "truncate")
    problem = model.judge(Ledger(saved=2, begun=3)).problem
    assert problem is not None
    assert "model.pt is not version 2 or 3" in problem


@pytest.mark.parametrize("damage", ["short", "mixed", "missing"])
def test_damage_to_any_file_is_noticed(tmp_path: Path, seed: int, damage: str) -> None:
    model = Checkpoints(tmp_path, seed, "shards")
    path = tmp_path / saver.name(seed, "shards", 17)
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "short" else data[:-1] + bytes([data[-1] ^ 1]))
    problem = model.judge(Ledger(saved=model.version, begun=model.version + 1)).problem
    assert problem is not None
    assert path.name in problem


def test_a_pointer_ahead_of_its_checkpoint_is_noticed(tmp_path: Path, seed: int) -> None:
    model = Checkpoints(tmp_path, seed, "mixed")
    (tmp_path / saver.POINTER).write_text("2\n")
    problem = model.judge(Ledger(saved=1, begun=2)).problem
    assert problem is not None
    assert saver.POINTER in problem


def test_a_log_is_a_prefix_with_all_that_fsync_returned_for(tmp_path: Path, seed: int) -> None:
    model = Log(tmp_path, seed)
    path = tmp_path / saver.log_name(0)
    path.write_bytes(saver.log_content(seed, 0, 0, 500))
    assert model.judge(Ledger(saved=500, begun=700)).was_new is False
    assert model.judge(Ledger(saved=300, begun=700)).was_new is True
    assert model.judge(Ledger(saved=500, begun=500)).problem is None
    short = model.judge(Ledger(saved=501, begun=700)).problem
    assert short is not None
    assert "500 bytes" in short
    assert model.judge(Ledger(saved=300, begun=400)).problem is not None
    data = saver.log_content(seed, 0, 0, 500)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert model.judge(Ledger(saved=500, begun=500)).problem is not None
