"""The course of a campaign, with a machine that plays back events instead of booting."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.vm import campaign
from tests.vm.campaign import Campaign, TargetResult
from tests.vm.cuts import Cut, cuts_of
from tests.vm.ledger import content, digest
from tests.vm.machine import TARGETS, Boot, Event
from tests.vm.needs import Kernel

SIZE = 1000
CXL = TARGETS[2]


def write(number: int, step: int, *, done: bool) -> list[Event]:
    seed = f"latest.bin {step}"
    operation = {
        "number": number,
        "kind": "write",
        "path": "latest.bin",
        "seed": seed,
        "size": SIZE,
    }
    events: list[Event] = [
        {"event": "begin", "operation": operation},
        {"event": "middle", "number": number, "seed": seed},
    ]
    return [*events, {"event": "done", "number": number}] if done else events


def listing(data: bytes) -> Event:
    entry = {"size": len(data), "digest": digest(data), "state": "complete"}
    return {"event": "listing", "entries": {"latest.bin": entry}}


class Playback:
    """Gives each boot its events; a cut ends the boot there, as on a real machine."""

    stopped = False

    def __init__(self, boots: Iterable[list[Event]]) -> None:
        self._boots = iter(boots)
        self.commands: list[list[str]] = []
        self._cut = False

    def cut(self) -> None:
        self._cut = True

    def cut_after(self, seconds: float) -> None:
        raise AssertionError(f"no cut by time was asked for ({seconds} s)")

    def boot(self, command: list[str], on_event: Callable[[Event], None], **_more: object) -> Boot:
        self._cut = False
        self.commands.append(command)
        for event in next(self._boots):
            on_event(event)
            if self._cut:
                return Boot(started=True, cut=True)
        return Boot(started=True, status=0)


def play(
    monkeypatch: pytest.MonkeyPatch,
    work: Path,
    boots: list[list[Event]],
    *,
    reboot: bool = True,
) -> tuple[TargetResult, Playback]:
    machine = Playback(boots)
    monkeypatch.setattr(campaign, "Machine", lambda *_arguments: machine)
    monkeypatch.setattr(campaign, "make_media", lambda *_arguments: None)
    lines: list[str] = []
    one = Campaign(
        CXL,
        work,
        Kernel(work, "6.12", work),
        "tcg",
        python=Path("/venv/bin/python"),
        directory=work,
        environment={},
        say=lines.append,
    )
    return one.run([Cut("hold", version="latest.bin 2")], reboot=reboot), machine


FIRST = [*write(1, 1, done=True), *write(2, 2, done=False)]
OLD, NEW = content("latest.bin 1", SIZE), content("latest.bin 2", SIZE)


@pytest.mark.parametrize(("data", "outcome"), [(OLD, "before"), (NEW, "after")])
def test_all_rounds_of_a_target_that_recovers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: bytes, outcome: str
) -> None:
    last = content("latest.bin 3", SIZE)
    boots = [FIRST, [listing(data), *write(1, 3, done=True)], [listing(last)]]
    result, machine = play(monkeypatch, tmp_path, boots)
    assert result.problems == []
    assert [one.outcome for one in result.rounds] == ["", outcome, "nothing in flight"]
    assert result.rounds[0].cut_in == "write latest.bin"
    assert machine.commands[0][-3:-1] == ["make:", "mount"]
    assert "save:3:4:direct:" in machine.commands[1]
    assert "/venv/bin/cxlfs" in machine.commands[2]


def test_the_short_form_ends_with_the_clean_unmount(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    boots = [FIRST, [listing(OLD), *write(1, 3, done=True)]]
    result, machine = play(monkeypatch, tmp_path, boots, reboot=False)
    assert result.problems == []
    assert "verify:unmounted" in machine.commands[1]
    assert len(machine.commands) == 2


def test_a_torn_file_ends_the_target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torn = NEW[:500] + OLD[500:]
    result, machine = play(monkeypatch, tmp_path, [FIRST, [listing(torn)]])
    assert any("latest.bin" in problem for problem in result.problems)
    assert len(machine.commands) == 2


def test_a_file_lost_by_a_clean_reboot_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    boots = [FIRST, [listing(OLD), *write(1, 3, done=True)], [listing(OLD)]]
    result, _machine = play(monkeypatch, tmp_path, boots)
    assert any("latest.bin" in problem for problem in result.problems)


def test_a_cut_that_does_not_come_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result, _machine = play(monkeypatch, tmp_path, [write(1, 1, done=True)])
    assert any("did not come" in problem for problem in result.problems)


def test_a_failed_command_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed: Event = {"event": "failed", "message": "cxlfs mount: exit status 1"}
    result, _machine = play(monkeypatch, tmp_path, [FIRST, [failed]])
    assert any("exit status 1" in problem for problem in result.problems)


def test_the_seed_decides_the_cuts() -> None:
    assert cuts_of(random.Random("7 x"), 12) == cuts_of(random.Random("7 x"), 12)
    assert cuts_of(random.Random("7 x"), 12) != cuts_of(random.Random("8 x"), 12)
    assert [cut.kind for cut in cuts_of(random.Random(1), 2)] == ["hold", "delay"]
    assert {cut.kind for cut in cuts_of(random.Random(1), 8)} == {
        "hold",
        "delay",
        "recovery",
        "rename",
    }
