"""Carries out what a machine of the protocol wants: tells and listens through an engine, and gives
the rest to whoever saves and loads.

Never: decides anything; waits without a deadline. Of all gatherings of one key there is one
deadline: who has waited for its group, and then asks others, asks for what they have said.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from cxlfs.errors import InvariantError, JobMessageError
from cxlfs.job.engines import Engine
from cxlfs.job.protocol import (
    Action,
    DeadlinePassed,
    Done,
    Event,
    Failed,
    Gather,
    Heard,
    Inventory,
    Key,
    Machine,
    Outcome,
    Part,
    Place,
    Prepare,
    Tally,
    Tell,
    decode,
    encode,
)

log = logging.getLogger(__name__)

REASON_MAX = 500
"""Characters of an exception's text that others are told."""


def drive(
    machine: Machine,
    engine: Engine,
    act: Callable[[Action], str | Inventory | None],
    *,
    deadline_seconds: float,
    said: list[str],
) -> Outcome:
    """To its end. What ``act`` raises is told to all; ``said``: the keys of what was, added to."""
    ends: dict[Key, float] = {}
    action = machine.start()
    while action is not None:
        if isinstance(action, Gather):
            now = time.monotonic()
            left = ends.setdefault(action.key, now + deadline_seconds) - now
            _gather(machine, engine, action, max(left, 0.0), said)
        elif isinstance(action, Tell):
            _tell(machine, engine, action, said)
        else:
            machine.on(_event_of(action, act))
        action = machine.action
    if machine.outcome is None:
        raise InvariantError("a machine ended without an outcome")
    return machine.outcome


def _event_of(action: Action, act: Callable[[Action], str | Inventory | None]) -> Event:
    try:
        return Done(action, act(action))
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # as DCP's CheckpointException is, which is no Exception
        log.exception("%s failed", type(action).__name__)
        return Failed(action, reason_of(error))


def reason_of(error: BaseException) -> str:
    """What others are told of it, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:REASON_MAX]


def _tell(machine: Machine, engine: Engine, action: Tell, said: list[str]) -> None:
    said.append(name_of(action.key, type(action.body)))
    for to, near in tellings(machine.place, action):
        engine.say(said[-1], encode(action.body), to=to, near=near)
    machine.on(Done(action))


def tellings(place: Place, action: Tell) -> list[tuple[tuple[int, ...], bool]]:
    """Whom it is told, and whether these are of the rank's own group."""
    if isinstance(action.body, Part):
        return [(action.to, False)]
    near = tuple(rank for rank in action.to if place.is_near([rank]))
    far = tuple(rank for rank in action.to if not place.is_near([rank]))
    return [(to, is_near) for to, is_near in ((near, True), (far, False)) if to]


def _gather(
    machine: Machine, engine: Engine, action: Gather, seconds: float, said: list[str]
) -> None:
    """Who waits for a tally hears what else was said by then when that was in vain."""
    name = name_of(action.key)
    if action.body is not None:
        said.append(name)
        engine.say(name, encode(action.body), to=action.to, near=action.to is not None)
    if action.above is not None:
        tally = name_of(action.key, Tally)
        _hear(machine, engine, action, (tally, [action.above]), seconds)
        seconds = 0.0
    if machine.action is action and action.wanted:
        name = name_of(action.key, Part) if action.of_leaders else name
        _hear(machine, engine, action, (name, action.wanted), seconds)
    if machine.action is action:
        machine.on(DeadlinePassed(action.key))


def name_of(key: Key, kind: type[Prepare | Part | Tally] | None = None) -> str:
    """A rank says one thing of a name, and who counts has said its vote."""
    name = f"{key.call}/{key.phase}/{key.round}"
    return f"{name}/parts" if kind is Part else f"{name}/tally" if kind is Tally else name


def _hear(
    machine: Machine,
    engine: Engine,
    action: Gather,
    wanted: tuple[str, Sequence[int]],
    seconds: float,
) -> None:
    name, ranks = wanted
    near = not action.of_leaders and machine.place.is_near(ranks)
    for sender, data in sorted(engine.hear(name, ranks, seconds, near=near).items()):
        try:
            machine.on(Heard(action.key, sender, decode(data)))
        except JobMessageError as error:
            log.warning("rank %d said what is not understood: %s", sender, error)
