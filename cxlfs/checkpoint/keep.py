"""Retention: which checkpoints of a directory are kept, by a union of rules, and removing the rest.

Other modules say what a checkpoint is (``inspection``) and which one is newest (``catalogue``).

Invariants
- A checkpoint is removed only if a newer one is complete, and every byte of that one was read.
- The newest good checkpoint is never removed. Neither is one that is not complete, that a tracker
  or a symbolic link names, or that a process is writing to.
- The order is that of the catalogue: steps, or commits. Modification times decide only which hour
  or day a checkpoint belongs to.
- The oldest checkpoint goes first. A crash leaves the newer ones whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cxlfs.checkpoint.catalogue import Entry, catalogue, good
from cxlfs.checkpoint.jsons import json_of
from cxlfs.checkpoint.model import Level, ProblemError, State
from cxlfs.checkpoint.place import Place
from cxlfs.checkpoint.trackers import trackers_of
from cxlfs.checkpoint.writers import writers_in
from cxlfs.durable import sync_directory
from cxlfs.errors import BusyError, ReadOnlyError, UsageError

_NS = 1_000_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """A number in a JSON file of each checkpoint. ``keys`` lead to it; of a list the last item
    counts that has the next key.
    """

    file: str
    keys: tuple[str, ...]
    is_highest_best: bool

    @classmethod
    def parse(cls, text: str, *, is_highest_best: bool) -> Value:
        """``FILE:KEY``, or ``FILE:KEY.KEY``. Raises UsageError."""
        file, colon, keys = text.rpartition(":")
        parts = Path(file).parts
        if not colon or not keys or not file or Path(file).is_absolute() or ".." in parts:
            raise UsageError(
                f"not a value of a checkpoint: {text!r}",
                next_step="write it like trainer_state.json:log_history.eval_loss",
            )
        return cls(file, tuple(keys.split(".")), is_highest_best)

    def of(self, entry: Entry) -> float | None:
        """None: the file or the number is not there, or is no number."""
        if not entry.path.is_dir():
            return None
        try:
            found = _lookup(json_of(Place(entry.path), self.file, dict[str, object]), self.keys)
        except (ProblemError, OSError):
            return None
        return None if found is None or math.isnan(found) else found


def _lookup(value: object, keys: Sequence[str]) -> float | None:
    if isinstance(value, list):
        items = (_lookup(each, keys) for each in reversed(value) if isinstance(each, dict))
        return next((each for each in items if each is not None), None)
    if not keys:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        with contextlib.suppress(OverflowError):  # a whole number of any length
            return float(value)
        return None
    return _lookup(value.get(keys[0]), keys[1:]) if isinstance(value, dict) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """A checkpoint is kept if one of them keeps it. 0: the rule is not used.

    ``best``: so many by ``value``. ``every``: steps that it divides. ``within_ns``: as old as that,
    before the newest good one.
    """

    last: int = 0
    every: int = 0
    best: int = 0
    value: Value | None = None
    hourly: int = 0
    daily: int = 0
    weekly: int = 0
    monthly: int = 0
    within_ns: int = 0

    def check(self) -> None:
        """Raises UsageError."""
        counts = (self.last, self.every, self.best, self.hourly, self.daily, self.weekly)
        if not any((*counts, self.monthly, self.within_ns)):
            raise UsageError("no rule says what to keep", next_step="give one, like --last 3")
        if bool(self.best) != (self.value is not None):
            raise UsageError(
                "--best needs a value, and a value needs --best",
                next_step="write it like --best 3 --lowest trainer_state.json:best_metric",
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """``reasons`` to keep a checkpoint; none: it goes."""

    entry: Entry
    reasons: tuple[str, ...]

    @property
    def is_kept(self) -> bool:
        return bool(self.reasons)


def decide(directory: str | Path, rules: Rules, level: Level = Level.CONTENT) -> list[Decision]:
    """What :func:`remove` would do, newest first. Changes nothing.

    Raises UsageError, NoCheckpointError, NoGoodCheckpointError: nothing may go then.
    """
    rules.check()
    place = Place(Path(directory))
    entries = catalogue(directory)
    if any(not entry.names for entry in entries):
        raise UsageError(
            f"{directory} is a checkpoint itself", next_step="name the directory that it lies in"
        )
    newest, passed_over = good(directory, level, entries)
    left = {entry.path: entry.checkpoint.words for entry in passed_over}
    candidates = []
    for entry in entries:
        if entry.checkpoint.state is not State.COMPLETE:
            left.setdefault(entry.path, entry.checkpoint.words)
        elif entry.path not in left:
            candidates.append(entry)
    reasons: dict[Path, list[str]] = {entry.path: [] for entry in entries}
    reasons[newest.path].append("newest good")
    for path, words in left.items():
        reasons[path].append(words)
    for path, reason in _kept_by_rules(candidates, rules):
        reasons[path].append(reason)
    for path, reason in _in_use(place, entries):
        reasons[path].append(reason)
    return [Decision(entry, tuple(reasons[entry.path])) for entry in entries]


def remove(decisions: Sequence[Decision]) -> Iterator[Decision]:
    """Remove what no reason keeps, the oldest first; yields each once it is gone. Durable then.

    Raises ReadOnlyError: this user may not; BusyError: another process removes it, too.
    """
    for decision in reversed(decisions):
        if decision.is_kept:
            continue
        home = decision.entry.path.parent
        try:
            for name in decision.entry.names:
                path = home / name
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            sync_directory(home)
        except FileNotFoundError as error:
            raise BusyError(
                f"{decision.entry.path} changes while it is removed",
                next_step="run it again when no other process removes checkpoints there",
            ) from error
        except OSError as error:
            raise ReadOnlyError(
                f"{decision.entry.path} cannot be removed: {error.strerror}",
                next_step="run it as who may write there",
            ) from error
        yield decision


# --- rules ----------------------------------------------------------------------------------


def _kept_by_rules(candidates: Sequence[Entry], rules: Rules) -> Iterator[tuple[Path, str]]:
    """``candidates``: complete ones, newest first."""
    for entry in candidates[: rules.last]:
        yield entry.path, f"last {rules.last}"
    for entry in candidates if rules.every else ():
        step = entry.checkpoint.step
        if step is not None and step % rules.every == 0:
            yield entry.path, f"every {rules.every} steps"
    if rules.value is not None:
        for entry in _best(candidates, rules.value)[: rules.best]:
            yield entry.path, f"best {rules.best}"
    for period, count, key in _periods(rules):
        for entry in _one_of_each(candidates, key, count):
            yield entry.path, period
    for entry in candidates if rules.within_ns else ():
        if entry.written_ns >= candidates[0].written_ns - rules.within_ns:
            yield entry.path, "within the duration"


def _periods(rules: Rules) -> Iterator[tuple[str, int, Callable[[dt.datetime], object]]]:
    """What each rule of times is called, how many periods it keeps, and which one a time is in."""
    yield "hourly", rules.hourly, lambda time: (time.date(), time.hour)
    yield "daily", rules.daily, lambda time: time.date()
    yield "weekly", rules.weekly, lambda time: time.isocalendar()[:2]
    yield "monthly", rules.monthly, lambda time: (time.year, time.month)


def _best(candidates: Sequence[Entry], value: Value) -> list[Entry]:
    """Those with a value, the best first; of equal ones the newest first."""
    found = [(value.of(entry), entry) for entry in candidates]
    known = [(number, entry) for number, entry in found if number is not None]
    sign = -1 if value.is_highest_best else 1
    return [entry for _, entry in sorted(known, key=lambda item: sign * item[0])]


def _one_of_each(
    candidates: Sequence[Entry], key: Callable[[dt.datetime], object], count: int
) -> Iterator[Entry]:
    """The newest checkpoint of each of the last ``count`` periods that have one."""
    seen: set[object] = set()
    for entry in candidates:
        period = key(dt.datetime.fromtimestamp(entry.written_ns / _NS, dt.UTC))
        if period not in seen and len(seen) < count:
            seen.add(period)
            yield entry


def _in_use(place: Place, entries: Sequence[Entry]) -> Iterator[tuple[Path, str]]:
    """Checkpoints that a tracker names, or that a process writes to."""
    by_name = {name: entry.path for entry in entries for name in (*entry.names, entry.path.name)}
    for tracker in trackers_of(place):
        if tracker.target in by_name:
            yield by_name[tracker.target], f"named by {tracker.name}"
    begin = f"{os.path.realpath(place.path)}/"
    for writer in writers_in(place.path):
        name = writer.path.removeprefix(begin).partition("/")[0]
        if name in by_name:
            yield by_name[name], f"process {writer.pid} ({writer.name}) writes to it"
