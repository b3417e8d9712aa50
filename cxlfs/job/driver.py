"""Carries out what a machine of the protocol wants: tells and listens through an engine, and gives
the rest to whoever saves and loads.

Never: decides anything; waits without a deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

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
    Machine,
    Outcome,
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
        else:
            machine.on(_event_of(action, act))
        action = machine.action
    if machine.outcome is None:
        raise InvariantError("a machine ended without an outcome")
    return machine.outcome


def _event_of(action: Action, act: Callable[[Action], str | Inventory | None]) -> Event:
    try:
        return Done(action, act(action))
    except Exception as error:
        log.exception("%s failed", type(action).__name__)
        return Failed(action, reason_of(error))


def reason_of(error: BaseException) -> str:
    """What others are told of it, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:REASON_MAX]


def _gather(
    machine: Machine, engine: Engine, action: Gather, seconds: float, said: list[str]
) -> None:
    key = f"{action.key.call}/{action.key.phase}/{action.key.round}"
    body = None if action.body is None else encode(action.body)
    if body is not None:
        said.append(key)
    heard: dict[int, bytes] = {}
    if action.from_rank_0:
        found = engine.broadcast(key, body, seconds)
        heard = {} if found is None else {0: found}
    elif body is not None:
        heard = engine.gather(key, body, seconds)
    for sender, data in sorted(heard.items()):
        try:
            machine.on(Heard(action.key, sender, decode(data)))
        except JobMessageError as error:
            log.warning("rank %d said what is not understood: %s", sender, error)
    if machine.action is action:
        machine.on(DeadlinePassed(action.key))
