"""Agents of an Orbax job: threads with a directory each, the golden checkpoint of Orbax, and the
job's side of the protocol of files. Orbax itself is in ``tests/frameworks``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cxlfs.errors import JobMessageError
from cxlfs.job import copying
from cxlfs.job.agent import orbax_files, rounds
from cxlfs.job.agent.orbax_files import KEPT, OrbaxDirectory, Request, read_request
from cxlfs.job.agent.rounds import Decision, Report, decide
from tests.support.agents import OrbaxNodes


@pytest.fixture
def nodes(tmp_path: Path) -> OrbaxNodes:
    return OrbaxNodes(tmp_path)


def damage(nodes: OrbaxNodes, rank: int, step: int) -> None:
    """Of a value: names, sizes and headers are as they were."""
    pieces = (nodes.directory(rank) / str(step) / "default").glob("ocdbt.process_0/d/*")
    path = max(pieces, key=lambda each: each.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)


def went_on(nodes: OrbaxNodes, step: int) -> None:
    """All nodes have an answer, each its own files of that step."""
    assert nodes.asks() == []
    for rank in range(nodes.world):
        assert nodes.given(rank) == f"node {rank} step {step}"
        assert max(nodes.steps(rank)) == step


# --- answers ------------------------------------------------------------------------------------


def test_a_first_start_after_another_one(nodes: OrbaxNodes) -> None:
    """What a former start was told is not taken for the answer."""
    for rank in range(2):
        (nodes.directory(rank) / f"run1-s7-n{rank}-w0.restore").symlink_to("gone")
        (nodes.directory(rank) / "replicator.failed").write_text("of before")
    nodes.ask()
    assert nodes.rounds() == [None, None]
    for rank in range(2):
        info = (nodes.directory(rank) / "jax-init-info.txt").read_text()
        assert info.splitlines() == [str(rank), "127.0.0.1:1234"]
        assert nodes.given(rank) is None
    assert nodes.asks() == []
    assert nodes.states() == ["answered"]


def test_the_newest_step_that_all_have(nodes: OrbaxNodes) -> None:
    nodes.save(10)
    nodes.save(20)
    nodes.save(30, 0)
    (nodes.directory(1) / "30.orbax-checkpoint-tmp").mkdir()
    nodes.ask()
    nodes.rounds()
    went_on(nodes, 20)
    assert nodes.steps(0) == [10, 20]
    nodes.start()
    nodes.ask()  # at once, with step 10 alone where the job had saved it
    nodes.rounds()
    went_on(nodes, 20)
    nodes.start()
    nodes.save(30)
    nodes.ask()
    nodes.rounds()
    went_on(nodes, 30)


def test_step_0_is_found_though_its_answer_means_nothing(nodes: OrbaxNodes) -> None:
    nodes.save(0)
    nodes.save(1, 0)
    nodes.ask()
    nodes.rounds()
    went_on(nodes, 0)


def test_what_is_damaged_on_one_node_is_given_to_none(nodes: OrbaxNodes) -> None:
    nodes.save(10)
    nodes.save(20)
    damage(nodes, 1, 20)
    nodes.ask()
    nodes.rounds()
    went_on(nodes, 10)
    (event,) = [event for event in nodes.events[0] if event.state == "not-kept"]
    assert event.step == 20
    assert "rank 1" in event.text


def test_none_is_answered_before_all_have_asked(nodes: OrbaxNodes) -> None:
    nodes.save(10)
    nodes.ask(0)
    nodes.rounds(2)
    assert nodes.asks() == [0]
    assert not list(nodes.directory(0).glob("*.restore"))
    assert nodes.events[0][-1].ranks == (1,)
    nodes.ask(1)
    nodes.rounds()
    went_on(nodes, 10)


def test_who_asks_once_more_gets_the_same_answer(nodes: OrbaxNodes) -> None:
    """Its process found an older question of its own, which was answered first."""
    nodes.save(10)
    nodes.ask()
    nodes.rounds()
    went_on(nodes, 10)
    nodes.ask(1)
    nodes.rounds()
    assert nodes.asks() == []
    assert nodes.given(1) == "node 1 step 10"
    assert (nodes.directory(0) / "10" / "mark.txt").read_text() == "node 0 step 10"
    nodes.save(11, 0)  # the others have gone on
    nodes.ask(1)
    nodes.rounds()
    assert nodes.asks() == [1]
    nodes.ask(0)
    nodes.rounds()
    went_on(nodes, 10)


def test_a_question_that_goes_meanwhile(nodes: OrbaxNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As whoever starts a job again may clean up before it: the others have their answer."""
    nodes.save(10)
    nodes.ask()
    original = OrbaxDirectory.steps

    def steps(self: OrbaxDirectory) -> list[int]:
        if self.root == nodes.directory(1):  # both nodes' threads come here, in any order
            (self.root / "replicator.yaml").unlink(missing_ok=True)
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(OrbaxDirectory, "steps", steps)
        assert nodes.rounds() == [None, None]
    assert nodes.given(0) == "node 0 step 10"
    nodes.ask(1)
    nodes.rounds()
    assert nodes.given(1) == "node 1 step 10"


@pytest.mark.parametrize("replicas", [1, 2])
def test_none_begins_anew_while_another_node_has_steps(tmp_path: Path, replicas: int) -> None:
    nodes = OrbaxNodes(tmp_path, replicas=replicas)
    nodes.save(10, 0)
    nodes.ask()
    assert nodes.rounds() == [None, None]
    assert nodes.asks() == []
    for rank in range(2):
        with pytest.raises(RuntimeError, match="none that is whole on all nodes; next: "):
            nodes.given(rank)
    assert nodes.steps(0) == [10]


# --- keeping ------------------------------------------------------------------------------------


def test_steps_are_kept_at_the_interval_and_older_ones_go(nodes: OrbaxNodes) -> None:
    nodes.ask(interval=2)
    nodes.rounds()
    for rank in range(2):
        assert nodes.given(rank) is None
    kept = []
    for step in range(6):
        nodes.save(step)
        nodes.rounds()
        kept.append([event.step for event in nodes.events[1] if event.state == "kept"])
        assert nodes.steps(0) == nodes.steps(1) == list(range(max(step - 1, 0), step + 1))
    assert kept[-1] == [1, 3, 5]
    kept_here = sorted(path.name for path in (nodes.directory(0) / KEPT).glob("step-*"))
    assert [name[5:17] for name in kept_here] == ["000000000003", "000000000005"]


def test_a_step_that_one_node_lacks_keeps_older_ones(nodes: OrbaxNodes) -> None:
    nodes.save(1)
    for step in (2, 3, 4):
        nodes.save(step, 0)
    nodes.rounds(2)
    assert nodes.steps(0) == [1, 2, 3, 4]


def test_minutes_are_those_of_rank_0(nodes: OrbaxNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.ask(unit="minutes", interval=5)
    nodes.rounds()
    nodes.save(10)
    nodes.rounds(2)
    assert "kept" not in nodes.states()
    monkeypatch.setattr(nodes._agents[0], "_since", nodes._agents[0]._since - 301)
    nodes.rounds()
    nodes.save(11)
    nodes.rounds()
    assert [event.step for event in nodes.events[0] if event.state == "kept"] == [10]


def test_what_is_kept_takes_no_room_of_its_own(nodes: OrbaxNodes) -> None:
    nodes.save(10)
    nodes.rounds(is_last=True)
    (kept,) = (nodes.directory(0) / KEPT).glob("step-*/rank-00000/mark.txt")
    assert kept.samefile(nodes.directory(0) / "10" / "mark.txt")


def test_what_was_left_behind_waits_for_something_newer(nodes: OrbaxNodes) -> None:
    nodes.save(10)
    nodes.save(20, 0)
    nodes.ask(interval=1)
    nodes.rounds()
    went_on(nodes, 10)
    aside = nodes.directory(0) / KEPT / "aside"
    assert (aside / "20" / "mark.txt").exists()
    nodes.save(11)
    nodes.rounds()
    assert not aside.exists()


def test_once_keeps_what_is_there(nodes: OrbaxNodes) -> None:
    nodes.save(10)
    nodes.save(20, 0)
    assert nodes.rounds(is_last=True) == [None, None]
    assert [(event.state, event.step) for event in nodes.events[1]] == [("kept", 10)]


# --- nodes that are replaced --------------------------------------------------------------------


def test_an_empty_store_gets_its_step_back(tmp_path: Path) -> None:
    nodes = OrbaxNodes(tmp_path, world=3, replicas=2)
    nodes.ask(interval=1)
    nodes.rounds()
    nodes.save(10)
    nodes.rounds()
    nodes.save(20, 0, 2)
    nodes.wipe(1)
    nodes.start()
    nodes.ask()
    assert nodes.rounds() == [None] * 3
    went_on(nodes, 10)
    nodes.save(30)
    nodes.rounds()
    nodes.wipe(2)  # whole again: another one may go
    nodes.start()
    nodes.ask()
    nodes.rounds()
    went_on(nodes, 30)
    for agent in nodes._agents:
        agent.end()


def test_without_copies_nothing_older_is_passed_off(nodes: OrbaxNodes) -> None:
    nodes.save(10)
    nodes.rounds(is_last=True)
    nodes.wipe(1)
    nodes.start()
    nodes.ask()
    nodes.rounds()
    for rank in range(2):
        with pytest.raises(RuntimeError, match="no store has the shards of rank 1"):
            nodes.given(rank)


def test_a_copy_that_breaks_off_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is refused by all; what was kept before is there."""
    nodes = OrbaxNodes(tmp_path, replicas=2)
    nodes.save(10)
    nodes.rounds(is_last=True)
    nodes.save(20)

    def reserve(*_given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(copying, "_reserve", reserve)
    nodes.start()
    nodes.ask()
    nodes.rounds()
    went_on(nodes, 10)
    assert "not-kept" in nodes.states()


def test_a_process_whose_answer_cannot_be_written_hears_so(
    nodes: OrbaxNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.save(10)
    real = orbax_files._link_tree

    def link_tree(source: Path, into: Path, *, leave: str = "") -> None:
        if leave and nodes.directory(1) in into.parents:
            raise OSError(28, "No space left on device", str(into))
        real(source, into, leave=leave)

    monkeypatch.setattr(orbax_files, "_link_tree", link_tree)
    nodes.ask()
    failed = nodes.rounds()
    assert failed[0] is None
    assert isinstance(failed[1], OSError)
    assert nodes.given(0) == "node 0 step 10"
    with pytest.raises(RuntimeError, match="No space left on device; next: "):
        nodes.given(1)


def test_what_no_store_has_comes_from_the_tier(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="pip install 'cxlfs[tier]' has it")
    nodes = OrbaxNodes(tmp_path)
    (tmp_path / "tier").mkdir()
    nodes.tier = f"file://{tmp_path}/tier"
    nodes.save(10)
    nodes.rounds(is_last=True)
    for agent in nodes._agents:
        agent.end()
    nodes.wipe(0)
    nodes.wipe(1)
    nodes.start()
    nodes.ask()
    nodes.rounds()
    went_on(nodes, 10)
    for agent in nodes._agents:
        agent.end()


def test_a_node_that_has_another_number_now(nodes: OrbaxNodes) -> None:
    """Its steps are another's, and no part of this job; what was kept knows whose it is."""
    nodes.ask()
    nodes.rounds()
    nodes.save(10)
    nodes.rounds(is_last=True)
    nodes.save(20)
    one, two = nodes.directory(0), nodes.directory(1)
    one.rename(one.with_name("aside"))
    two.rename(one)
    one.with_name("aside").rename(two)
    nodes.start()
    nodes.ask()
    nodes.rounds()
    went_on(nodes, 10)


class Killed(BaseException):
    pass


def test_an_answer_that_was_killed_anywhere_is_given_again(nodes: OrbaxNodes) -> None:
    """At each thing that it does to the directory: the question is there until all of it is."""
    nodes.save(10)
    nodes.save(20)
    nodes.rounds(is_last=True)
    request = Request("run1", 0, 2, "steps", 2)
    (shards,) = (nodes.directory(0) / KEPT).glob("step-*/rank-00000")
    kills = 0
    for number in range(1000):
        nodes.ask(0)
        left = [number]

        def counted(real: Callable[..., Any], left: list[int] = left) -> Callable[..., Any]:
            def call(*given: Any, **more: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return real(*given, **more)

            return call

        directory = orbax_files.OrbaxDirectory(nodes.directory(0), 0)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("unlink", "rename", "symlink_to", "touch", "mkdir"):
                patch.setattr(Path, name, counted(getattr(Path, name)))
            patch.setattr(orbax_files.os, "link", counted(orbax_files.os.link))
            patch.setattr(orbax_files, "write_durably", counted(orbax_files.write_durably))
            patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
            try:
                directory.answer(request, 20, shards)
            except Killed:
                kills += 1
                assert nodes.asks() == [0]
            else:
                break
        orbax_files.OrbaxDirectory(nodes.directory(0), 0).answer(request, 20, shards)
        assert nodes.given(0) == "node 0 step 20"
        assert nodes.steps(0) == [10, 20]
    assert kills > 20


# --- what a job says ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("framework: orbax", "framework: other"),
        ("node-rank: 1", "node-rank: 2"),
        ("nodes: 2", "nodes: many"),
        ("run1", "../run1"),
        ("backup-interval-steps: 2", "backup-interval-steps: 0"),
        ("backup-interval-steps", "backup-interval-hours"),
    ],
)
def test_what_is_not_understood_is_refused(nodes: OrbaxNodes, before: str, after: str) -> None:
    nodes.ask()
    path = nodes.directory(1) / "replicator.yaml"
    path.write_text(path.read_text().replace(before, after))
    nodes.rounds()
    with pytest.raises(RuntimeError, match="not a request of Orbax"):
        nodes.given(1)
    assert nodes.asks() == [0]


def test_a_request_of_orbax() -> None:
    data = b"job-name: a.b\nframework: orbax\nassume-data-parallelism: 2\nnode-rank: 1\nnodes: 4\n"
    data += b"peer-ranks: [3]\nbackup-interval-minutes: 30"
    assert read_request(data) == Request("a.b", 1, 4, "minutes", 30)


def test_another_job_in_the_same_directory(nodes: OrbaxNodes) -> None:
    nodes.ask()
    nodes.rounds()
    nodes.ask(job="run2")
    nodes.rounds()
    for rank in range(2):
        with pytest.raises(RuntimeError, match="one job, not of run1 and run2"):
            nodes.given(rank)


def test_a_damaged_record_of_the_agent_is_said(nodes: OrbaxNodes) -> None:
    nodes.ask()
    nodes.rounds()
    (nodes.directory(0) / KEPT / "job.json").write_text("{")
    nodes.ask()
    nodes.rounds()
    with pytest.raises(RuntimeError, match=r"rank 0: .*json"):
        nodes.given(1)


def test_half_of_what_is_removed_is_nothing(nodes: OrbaxNodes) -> None:
    """A removal that was killed has taken the name first."""
    nodes.save(10)
    directory = orbax_files.OrbaxDirectory(nodes.directory(0), 0)

    def killed(*_given: object, **_more: object) -> None:
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(SystemExit):
            directory.remove_before(20)
    assert nodes.steps(0) == []
    orbax_files.OrbaxDirectory(nodes.directory(0), 0)
    assert not (nodes.directory(0) / KEPT / "going").exists()


# --- what follows from what was told ------------------------------------------------------------


def decided(*reports: Report, **more: object) -> Decision:
    given = {"keep": 2, "kept": -1, "refused": frozenset(), "elapsed_seconds": 0, "is_last": False}
    return decide(reports, **{**given, **more})  # type: ignore[arg-type]


def test_what_could_not_be_kept_is_not_tried_at_each_round() -> None:
    saver = Request("run1", 0, 1, "steps", 2)
    reports = [Report(saver=saver, steps=(4, 3))]
    assert decided(*reports) == Decision("keep", (4,), floor=3)
    assert decided(*reports, refused=frozenset({4})) == Decision("keep", (3,), floor=3)
    assert decided(*reports, kept=3) == Decision("idle", floor=3)
    assert decided(*reports, kept=3, is_last=True) == Decision("keep", (4,), floor=3)
    assert decided(Report(steps=(4,))).kind == "idle"  # nobody has said how often


def test_nodes_that_do_not_fit() -> None:
    request = Request("run1", 0, 3, "steps", 2)
    found = decided(Report(asked=request), Report(asked=request))
    assert found.kind == "refuse"
    assert "3 nodes, its agents 2" in found.reason
    assert "rank 1: the process there has number 0" in found.reason


@pytest.mark.parametrize("body", [b"", b"{}", b"[" * 9999, b'{"asked": 1}'])
def test_what_others_say_is_checked(body: bytes) -> None:
    for read in (rounds.report_of, rounds.decision_of):
        with pytest.raises(JobMessageError):
            read(body)
    for said in (Report(), Report(Request("a", 0, 1, "steps", 1), None, "7", (7, 6), True, "x")):
        assert rounds.report_of(rounds.encode(said)) == said
    decision = Decision("answer", (3, 2), True, 2, (1,), "why")
    assert rounds.decision_of(rounds.encode(decision)) == decision
