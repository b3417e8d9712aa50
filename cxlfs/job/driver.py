"""Carries out what a machine of the protocol wants: tells and listens through an engine, and gives
the rest to whoever saves and loads.

Never: decides anything; waits without a deadline.
"""

from __future__ import annotations

import logging
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
    action = machine.start()
    while action is not None:
        if isinstance(action, Gather):
            _gather(machine, engine, action, deadline_seconds, said)
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
    key = _tally_name(action.key)
    said.append(key)
    engine.say(key, encode(action.body))
    machine.on(Done(action))


def _gather(
    machine: Machine, engine: Engine, action: Gather, seconds: float, said: list[str]
) -> None:
    """In a poll rank 0 hears all, the others rank 0; what else was said by then they hear when that
    was in vain.
    """
    key, place = _name(action.key), machine.place
    if action.body is not None:
        said.append(key)
        engine.say(key, encode(action.body), to_all=not action.is_poll)
    if action.is_poll and place.rank != 0:
        _hear(machine, engine, action, _tally_name(action.key), [0], seconds)
        seconds = 0.0
    if machine.action is action:
        ranks = range(1 if action.from_rank_0 else place.world)
        _hear(machine, engine, action, key, ranks, seconds)
    if machine.action is action:
        machine.on(DeadlinePassed(action.key))


def _name(key: Key) -> str:
    return f"{key.call}/{key.phase}/{key.round}"


def _tally_name(key: Key) -> str:
    """A rank says one thing of a name, and rank 0 has said its vote."""
    return f"{_name(key)}/tally"


def _hear(
    machine: Machine,
    engine: Engine,
    action: Gather,
    name: str,
    ranks: Sequence[int],
    seconds: float,
) -> None:
    for sender, data in sorted(engine.hear(name, ranks, seconds).items()):
        try:
            machine.on(Heard(action.key, sender, decode(data)))
        except JobMessageError as error:
            log.warning("rank %d said what is not understood: %s", sender, error)
