"""``cxlfs.adapters.nvrx_replicas`` between ranks that are threads: where state dicts go, that they
come back, and that what is damaged, missing or late is an error on all ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cxlfs.adapters import nvrx_replicas
from cxlfs.adapters.nvrx_replicas import Id, Replicas
from cxlfs.errors import (
    JobConfigurationError,
    JobLinkError,
    JobMessageError,
    NotRestoredError,
    UndecidedError,
)
from tests.support.job_ranks import SECONDS, ThreadEngine, boards_made, on_all_ranks

pytestmark = [pytest.mark.frameworks("torch"), pytest.mark.slow]
torch = pytest.importorskip(
    "torch", reason="torch is not installed (scripts/test --frameworks installs it)"
)


class State:
    """A TensorAwareStateDict of NVRx, without NVRx."""

    def __init__(self, name: str, tensors: list[Any]) -> None:
        self.name = name
        self.held: list[Any] | None = tensors
        self.is_restored = False

    def pop_tensors(self) -> list[Any]:
        assert self.held is not None
        popped, self.held = self.held, None
        return popped

    def insert_tensors(self, tensors: list[Any]) -> None:
        assert self.held is None
        self.held = list(tensors)

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        self.is_restored = not non_blocking


def state_of(rank: int, step: int = 7) -> State:
    number = rank * 100 + step
    return State(
        f"rank {rank} step {step}",
        [
            torch.full((700, 333), float(number)),
            torch.arange(number, dtype=torch.int64),
            torch.tensor(number),
            torch.tensor([True, False]),
            torch.full((3, 5), number, dtype=torch.bfloat16).t(),
            torch.empty(0, 4),
            torch.full((2, 2), complex(number, 1)),
        ],
    )


def same(found: State, wanted: State) -> bool:
    assert found.held is not None
    assert wanted.held is not None
    assert found.name == wanted.name
    return all(
        (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(one, other)
        for one, other in zip(found.held, wanted.held, strict=True)
    )


def made(engine: ThreadEngine, root: Path, **how: Any) -> Replicas:
    node = f"node{engine.rank}"
    given = {"domain": node, "deadline_seconds": SECONDS, **how}
    return Replicas(root / node, engine=engine, **given)


def id_of(rank: int, step: int = 7) -> Id:
    return step, rank, "run"


@pytest.mark.parametrize(("world", "replicas"), [(2, 2), (3, 2), (4, 3), (3, 1)])
def test_each_state_lies_in_so_many_stores(
    tmp_path: Path, world: int, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrx_replicas, "PIECE_BYTES", 100_000)

    def task(engine: ThreadEngine) -> dict[Id, State]:
        own = state_of(engine.rank)
        ours = made(engine, tmp_path, replicas=replicas)
        for _ in range(2):
            states, ids = ours.replicate(own, id_of(engine.rank))  # type: ignore[arg-type]
            assert states[0] is own
        return dict(zip(ids, states, strict=True))  # type: ignore[arg-type]

    found = on_all_ranks(world, "1", task)
    held: dict[Id, list[int]] = {}
    for rank, states in found.items():
        assert isinstance(states, dict), states
        for each, state in states.items():
            assert same(state, state_of(each[1]))
            held.setdefault(each, []).append(rank)
    assert {each: len(ranks) for each, ranks in held.items()} == {
        id_of(rank): replicas for rank in range(world)
    }
    assert all(each[1] in ranks for each, ranks in held.items())


def test_who_has_lost_its_own_gets_it_back(tmp_path: Path) -> None:
    """Ranks 0 and 1 have each other's; rank 1's store is a new one."""
    having = [[id_of(0), id_of(1)], [], [id_of(2), id_of(3)], [id_of(3), id_of(2)]]

    def task(engine: ThreadEngine) -> tuple[set[Id], dict[Id, State]]:
        ours, wanted = made(engine, tmp_path), id_of(engine.rank)
        plan = ours.retrieve_plan(dict(enumerate(having)), [wanted])
        mine: Any = {each: state_of(each[1]) for each in plan.required_ids()}
        return plan.required_ids(), ours.retrieve_execute(plan, mine)  # type: ignore[return-value]

    found = on_all_ranks(4, "1", task)
    required = {rank: told[0] for rank, told in found.items() if isinstance(told, tuple)}
    assert required == {0: {id_of(0), id_of(1)}, 1: set(), 2: {id_of(2)}, 3: {id_of(3)}}
    for rank, told in found.items():
        assert isinstance(told, tuple)
        assert list(told[1]) == [id_of(rank)]
        assert same(told[1][id_of(rank)], state_of(rank))
        assert told[1][id_of(rank)].is_restored == (rank == 1)


def test_what_nobody_has_is_said_on_all(tmp_path: Path) -> None:
    def task(engine: ThreadEngine) -> object:
        having = {0: [id_of(0)], 1: []}
        return made(engine, tmp_path).retrieve_plan(having, [id_of(engine.rank)])

    for told in on_all_ranks(2, "1", task).values():
        assert isinstance(told, NotRestoredError)
        assert "which rank 1 needs" in told.message


@pytest.mark.parametrize("piece", ["head", "tensor"])
def test_what_is_damaged_on_the_way_is_given_to_nobody(
    tmp_path: Path, piece: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by one rank, and an error on all."""
    boards = boards_made(monkeypatch)

    def task(engine: ThreadEngine) -> object:
        def tap(_name: str, number: int, data: bytes) -> bytes:
            is_it = number == 1 if piece == "head" else len(data) > 900_000
            return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:] if is_it else data

        if engine.rank == 0:
            boards[0].switch.tap = tap
        return made(engine, tmp_path).replicate(state_of(engine.rank), id_of(engine.rank))  # type: ignore[arg-type]

    for told in on_all_ranks(3, "1", task).values():
        assert isinstance(told, JobLinkError)
        assert "damaged on arrival" in told.message


def test_a_rank_that_fails_before_it_sends(tmp_path: Path) -> None:
    """The others wait as long as they were told, and save nothing."""

    def task(engine: ThreadEngine) -> object:
        ours = made(engine, tmp_path, deadline_seconds=0.5)
        own = state_of(engine.rank)
        if engine.rank == 1:
            own.pop_tensors()
        return ours.replicate(own, id_of(engine.rank))  # type: ignore[arg-type]

    found = on_all_ranks(2, "1", task)
    assert isinstance(found[0], UndecidedError | JobLinkError)
    assert isinstance(found[1], AssertionError)


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    def task(engine: ThreadEngine) -> object:
        ours = made(engine, tmp_path, deadline_seconds=0.2)
        return ours.replicate(state_of(engine.rank), id_of(engine.rank))  # type: ignore[arg-type]

    told = on_all_ranks(2, "1", task, absent=(1,))[0]
    assert isinstance(told, UndecidedError)
    assert "rank 1" in told.message


def test_one_domain_is_too_few(tmp_path: Path) -> None:
    def task(engine: ThreadEngine) -> object:
        ours = made(engine, tmp_path, domain="rack")
        return ours.replicate(state_of(engine.rank), id_of(engine.rank))  # type: ignore[arg-type]

    for told in on_all_ranks(2, "1", task).values():
        assert isinstance(told, JobConfigurationError)


@pytest.mark.parametrize("body", [b"", b"[[1, 2]]", b'[[1, "2", "s"]]', b"[" * 9999, b"{}"])
def test_what_others_say_is_checked(body: bytes) -> None:
    with pytest.raises(JobMessageError):
        nvrx_replicas._ids_of(body)
    with pytest.raises(JobMessageError):
        nvrx_replicas._inventory_of(body)
