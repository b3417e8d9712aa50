"""Which checkpoint of a framework's own all nodes have: for trainers that save on each node by
themselves, and resume from the newest that a node finds.

Never: which steps a job committed (``checkpointer``): here nodes are only asked what they have.

Invariants
- The answer is the same step on every rank, or the same error. None begins anew while another
  resumes.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

from cxlfs.checkpoint import Entry, Level, State, catalogue
from cxlfs.checkpoint.catalogue import verified
from cxlfs.errors import JobMessageError, NoGoodCheckpointError, UndecidedError
from cxlfs.job.checkpointer import DEADLINE_SECONDS_DEFAULT
from cxlfs.job.engines import Engine, engine_named, gather
from cxlfs.plain import PlainError, fields, number, parse, row, truth

log = logging.getLogger(__name__)

_turns: weakref.WeakKeyDictionary[Engine, Iterator[int]] = weakref.WeakKeyDictionary()
"""Of each key an engine says one thing, however often it is asked."""
_STEPS_MAX = 1000
_MESSAGE_BYTES_MAX = 1 << 16


def agreed_checkpoint(
    directory: str | os.PathLike[str],
    *,
    engine: str | Engine = "auto",
    deadline_seconds: float = DEADLINE_SECONDS_DEFAULT,
    read_everything: bool = True,
) -> Path | None:
    """The newest checkpoint in ``directory``, each rank's own, that is complete on all of them;
    called on all ranks. None: there is none anywhere, a first start. Every byte of it is read
    unless ``read_everything`` is False.

    Raises NoGoodCheckpointError (there are some, and none that all have), UndecidedError,
    JobEngineError.
    """
    asked = _Asked(engine_named(engine) if isinstance(engine, str) else engine, deadline_seconds)
    listed = catalogue(Path(directory)) if Path(directory).exists() else ()
    entries = {e.checkpoint.step: e for e in listed if _is_whole(e)}
    mine = sorted((step for step in entries if step is not None), reverse=True)[:_STEPS_MAX]
    told = asked.all({"steps": mine, "has_any": bool(listed)})
    everybody = {rank: _steps_of(body) for rank, body in told.items()}
    common = set.intersection(*(set(steps) for steps, _ in everybody.values()))
    for step in sorted(common, reverse=True):
        entry = entries[step]
        good = not read_everything or _is_whole(verified(entry, Level.CONTENT))
        if all(_is_good(body) for body in asked.all({"good": good}).values()):
            return entry.path
    if any(has for _, has in everybody.values()):
        newest = ", ".join(
            f"rank {rank}: {max(steps, default='none')}" for rank, (steps, _) in everybody.items()
        )
        raise NoGoodCheckpointError(
            f"no checkpoint in {os.fspath(directory)} is complete on all ranks; newest: {newest}"
        )
    return None


def _is_whole(entry: Entry) -> bool:
    return entry.checkpoint.state is State.COMPLETE


class _Asked:
    def __init__(self, engine: Engine, deadline_seconds: float) -> None:
        self._engine = engine
        self._seconds = deadline_seconds
        self._turns = _turns.setdefault(engine, itertools.count())

    def all(self, plain: Mapping[str, object]) -> dict[int, bytes]:
        """What every rank says. Raises UndecidedError."""
        key = f"agreed/{next(self._turns)}"
        heard = gather(self._engine, key, json.dumps(plain).encode(), self._seconds)
        missing = sorted(set(range(self._engine.world().size)) - set(heard))
        if missing:
            ranks = ", ".join(map(str, missing))
            raise UndecidedError(
                f"which checkpoints there are: not heard within {self._seconds:g} s: rank {ranks}",
                next_step="call it on all ranks, and start the job again",
            )
        return heard


def _steps_of(body: bytes) -> tuple[tuple[int, ...], bool]:
    try:
        found = fields(parse(body, _MESSAGE_BYTES_MAX), ("steps", "has_any"))
        return row(found["steps"], number, _STEPS_MAX), truth(found["has_any"])
    except PlainError as error:
        raise JobMessageError(f"which checkpoints a rank has: {error}") from None


def _is_good(body: bytes) -> bool:
    try:
        return truth(fields(parse(body, _MESSAGE_BYTES_MAX), ("good",))["good"])
    except PlainError as error:
        raise JobMessageError(f"whether a checkpoint is good: {error}") from None
