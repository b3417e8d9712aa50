"""The newest checkpoint that all nodes have: ranks as threads, frameworks' files, no framework."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cxlfs.errors import JobMessageError, NoGoodCheckpointError, UndecidedError
from cxlfs.job import agreed, agreed_checkpoint
from tests.support.job_ranks import SECONDS, ThreadEngine, on_all_ranks


def save(directory: Path, *steps: int) -> None:
    directory.mkdir(exist_ok=True)
    for step in steps:
        np.savez(directory / f"step-{step}.npz", weights=np.full(100, step))


def ask(root: Path, world: int = 2, seconds: float = SECONDS, **more: bool) -> list[object]:
    def task(engine: ThreadEngine) -> Path | None:
        directory = root / f"node{engine.rank}"
        return agreed_checkpoint(directory, engine=engine, deadline_seconds=seconds, **more)

    found = on_all_ranks(world, "1", task)
    return [found[rank] for rank in sorted(found)]


def test_the_newest_that_all_have(tmp_path: Path) -> None:
    save(tmp_path / "node0", 10, 20, 30)
    save(tmp_path / "node1", 10, 20)
    wanted = [tmp_path / f"node{rank}" / "step-20.npz" for rank in range(2)]
    assert ask(tmp_path) == wanted
    assert ask(tmp_path, 1) == [tmp_path / "node0" / "step-30.npz"]


def test_asked_again_by_the_same_engine(tmp_path: Path) -> None:
    save(tmp_path / "node0", 10, 20)
    save(tmp_path / "node1", 10)

    def task(engine: ThreadEngine) -> list[Path | None]:
        directory = tmp_path / f"node{engine.rank}"
        found = [agreed_checkpoint(directory, engine=engine)]
        save(directory, 20)
        return [*found, agreed_checkpoint(directory, engine=engine)]

    for each in on_all_ranks(2, "1", task).values():
        assert isinstance(each, list)
        assert [path.name for path in each if path is not None] == ["step-10.npz", "step-20.npz"]


def test_one_that_is_cut_on_one_node_is_none(tmp_path: Path) -> None:
    for rank in range(2):
        save(tmp_path / f"node{rank}", 10, 20)
    path = tmp_path / "node1" / "step-20.npz"
    path.write_bytes(path.read_bytes()[:-30])
    assert [each.name for each in ask(tmp_path) if isinstance(each, Path)] == ["step-10.npz"] * 2


def test_damaged_content_is_found_by_reading(tmp_path: Path) -> None:
    for rank in range(2):
        save(tmp_path / f"node{rank}", 10, 20)
    path = tmp_path / "node0" / "step-20.npz"
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)
    assert [each.name for each in ask(tmp_path) if isinstance(each, Path)] == ["step-10.npz"] * 2
    found = ask(tmp_path, read_everything=False)
    assert [each.name for each in found if isinstance(each, Path)] == ["step-20.npz"] * 2


def test_nothing_anywhere_is_a_first_start(tmp_path: Path) -> None:
    (tmp_path / "node0").mkdir()
    assert ask(tmp_path) == [None, None]


def test_none_begins_anew_while_another_has_one(tmp_path: Path) -> None:
    save(tmp_path / "node0", 10)
    for each in ask(tmp_path):
        assert isinstance(each, NoGoodCheckpointError)
        assert "rank 0: 10, rank 1: none" in each.message
    save(tmp_path / "node1", 20)
    assert all(isinstance(each, NoGoodCheckpointError) for each in ask(tmp_path))


def test_a_rank_that_does_not_ask(tmp_path: Path) -> None:
    def task(engine: ThreadEngine) -> Path | None:
        return agreed_checkpoint(tmp_path, engine=engine, deadline_seconds=0.3)

    (found,) = on_all_ranks(2, "1", task, absent=(0,)).values()
    assert isinstance(found, UndecidedError)
    assert "rank 0" in found.message


@pytest.mark.parametrize("body", [b"", b"{}", b'{"steps": [-1], "has_any": true}', b"[" * 9999])
def test_what_others_say_is_checked(body: bytes) -> None:
    with pytest.raises(JobMessageError):
        agreed._steps_of(body)
    with pytest.raises(JobMessageError):
        agreed._is_good(body)
