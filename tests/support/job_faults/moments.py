"""Moments of a rank in the protocol, at which something can be done to it, or to others: before or
behind an action, inside of it (at one of the calls into the file system that it makes), before or
behind a message. Of any engine and program: ``watched`` is a Checkpointer that comes by them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

from cxlfs.job import Checkpointer
from cxlfs.job.engines import Engine
from cxlfs.job.tier import Tier
from tests.support.job_faults.in_pieces import PIECE_EVENT

PREPARED, VOTES, COMMIT, RESTORE = PHASES = (
    "before PREPARED",
    "between votes",
    "after COMMIT",
    "during restore",
)
MESSAGES = {
    PREPARED: ("prepare", "saved"),
    VOTES: ("vote", "vote tally"),
    COMMIT: ("recorded", "recorded tally"),
    RESTORE: ("stock", "loaded", "loaded tally"),
}
ACTIONS = {
    PREPARED: ("Save", "Save", "Replicate", "WriteManifest"),
    VOTES: ("WriteManifest",),
    COMMIT: ("RecordCommit", "Collect", "Collect"),
    RESTORE: ("restore TakeStock", "restore Load", "restore RecordCommit"),
}
DRAIN = "Drain"
OF_COPIES = {"Replicate", "saved"}
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.link"} | {
    PIECE_EVENT
}
_CALLS_IN_AN_ACTION = 12


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """``what``: an action, or a message; ``when``: before, inside or behind; ``count``: the how
    manieth of them, and inside which call into the file system. One that makes fewer is over then.
    """

    rank: int
    what: str
    when: str
    count: int = 1
    call: int = 1


def a_moment(
    numbers: random.Random, phase: str, *, world: int, replicas: int, saves: int
) -> Moment:
    what = numbers.choice([*ACTIONS[phase], *MESSAGES[phase]])
    while replicas == 1 and what in OF_COPIES:
        what = numbers.choice([*ACTIONS[phase], *MESSAGES[phase]])
    whens = ["before", "inside", "inside", "behind"]
    if what in MESSAGES[phase]:
        whens = ["before", "behind"]
    elif what == "WriteManifest":  # behind it the vote is durable
        whens = ["before", "inside", "inside"] if phase == PREPARED else ["behind"]
    is_of_rank_0 = what == "prepare" or what.endswith("tally")
    rank = 0 if is_of_rank_0 else numbers.randrange(world)
    count = 1 if phase == RESTORE else numbers.randint(1, saves)
    return Moment(rank, what, numbers.choice(whens), count, call_of(numbers))


def call_of(numbers: random.Random) -> int:
    return numbers.randint(1, _CALLS_IN_AN_ACTION)


class Fate:
    """Does ``deed`` at the moment, once. ``moment``: None: never."""

    def __init__(self, moment: Moment | None, deed: Callable[[], object]) -> None:
        self._moment = moment
        self._deed = deed
        self._seen = 0
        self._calls_left = 0
        if moment is not None and moment.when == "inside":
            sys.addaudithook(self._audit)

    @contextlib.contextmanager
    def around(self, what: str) -> Iterator[None]:
        moment = self._moment
        if moment is None or moment.what != what:
            yield
            return
        self._seen += 1
        is_mine = self._seen == moment.count
        if is_mine and moment.when == "before":
            self._come()
        self._calls_left = moment.call if is_mine and moment.when == "inside" else 0
        yield
        self._calls_left = 0
        if is_mine:
            self._come()

    def _audit(self, event: str, _arguments: object) -> None:
        if self._calls_left and event in EVENTS:
            self._calls_left -= 1
            if not self._calls_left:
                self._come()

    def _come(self) -> None:
        if self._moment is not None:
            self._moment = None
            self._deed()


class WatchedEngine:
    """What a rank says through ``engine``."""

    def __init__(self, engine: Engine, fate: Fate) -> None:
        self._engine = engine
        self._fate = fate

    def say(self, key: str, body: bytes, **how: Any) -> None:
        """The phase is the second word of a key; its last may be ``tally``."""
        words = key.split("/")
        what = f"{words[1]} tally" if words[-1] == "tally" else words[1]
        with self._fate.around(what):
            self._engine.say(key, body, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def watched(engine: Engine, fate: Fate) -> tuple[WatchedEngine, type[Checkpointer]]:
    """An engine, and the Checkpointer to be made with it."""

    class Watched(Checkpointer):
        def _save(self, action: Any, save: Any) -> Any:
            with fate.around(type(action).__name__):
                return super()._save(action, save)

        def _restore(self, machine: Any, action: Any, load: Any) -> Any:
            with fate.around(f"restore {type(action).__name__}"):
                return super()._restore(machine, action, load)

    drain = Tier._drain  # in a thread of its own

    def watched_drain(tier: Tier, *arguments: Any) -> None:
        with fate.around(DRAIN):
            drain(tier, *arguments)

    Tier._drain = watched_drain  # type: ignore[method-assign]
    return WatchedEngine(engine, fate), Watched
