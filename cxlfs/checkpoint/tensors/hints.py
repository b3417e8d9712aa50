"""Hints that a training run was damaged in silence: NaN and Inf, and changes of tensors that are
far larger than those before.

A hint proves nothing. A learning rate that was raised, a layer that was thawed or a loss that
diverged look alike; so does a bit that flipped in memory before it was saved, which no checksum
finds.

Other modules find the checkpoints and compute.

Invariants
- A hint of a change needs two changes of the same tensor before it, of complete checkpoints.
- Where most tensors change as much at once, one hint says so for the checkpoint.
"""

from __future__ import annotations

import dataclasses
import statistics as medians
from collections.abc import Iterator, Sequence
from pathlib import Path

from cxlfs.checkpoint.catalogue import Entry
from cxlfs.checkpoint.inspection import inspect
from cxlfs.checkpoint.model import Level, ProblemError, State
from cxlfs.checkpoint.tensors.compare import TensorChange, difference
from cxlfs.checkpoint.tensors.families import OPTIMIZER, family_of
from cxlfs.checkpoint.tensors.layout import layout_of
from cxlfs.checkpoint.tensors.model import Layout
from cxlfs.checkpoint.tensors.statistics import statistics

JUMP = 10.0
"""So many times as much as ever before is a hint."""
_CHANGES_MIN = 2
_MASK = "mask"
"""Of attention: its -inf are meant, and so are those of single numbers, such as the best loss."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hint:
    """``id``: ``nan``, ``inf``, ``jump``. ``tensor`` None: it concerns most of them."""

    id: str
    tensor: str | None
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class Looked:
    """One checkpoint. ``state``: as its format's own checksums say. ``unread``: tensors that could
    not be looked at, and why.
    """

    path: str
    kind: str
    step: int | None
    state: State
    reason: str | None
    hints: tuple[Hint, ...]
    tensors: int
    unread: tuple[tuple[str, str], ...]
    compared_with: str | None


def in_order(entries: Sequence[Entry]) -> list[Entry]:
    """Oldest first: by their steps where all have one of their own, else as they were written."""
    steps = [each.checkpoint.step for each in entries]
    known = [step for step in steps if step is not None]
    if len(set(known)) == len(entries):
        return [each for _, each in sorted(zip(known, entries, strict=True), key=lambda x: x[0])]
    return list(reversed(entries))


def look(paths: Sequence[Path]) -> Iterator[Looked]:
    """Each checkpoint as it is done; ``paths``: oldest first."""
    history = _History()
    before: Layout | None = None
    for path in paths:
        found = inspect(path, Level.CONTENT)
        if found is None:
            continue
        if found.state is not State.COMPLETE:
            yield Looked(
                str(path), found.kind, found.step, found.state, found.reason, (), 0, (), None
            )
            continue
        try:
            layout = layout_of(path)
        except ProblemError as error:
            state, reason = State.UNKNOWN, str(error)
            yield Looked(str(path), found.kind, found.step, state, reason, (), 0, (), None)
            continue
        if layout is None:
            continue
        hints, unread = _of_items(layout)
        if before is not None:
            hints += history.take(before, layout)
        yield Looked(
            str(path),
            layout.kind,
            layout.step,
            State.COMPLETE,
            None,
            tuple(hints),
            len(layout.tensors),
            tuple(unread),
            None if before is None else before.path,
        )
        before = layout


def _of_items(layout: Layout) -> tuple[list[Hint], list[tuple[str, str]]]:
    hints, unread = [], []
    for tensor, found in zip(layout.tensors, statistics(layout), strict=True):
        if isinstance(found, str):
            unread.append((tensor.name, found))
            continue
        if found.nan:
            words = f"{found.nan} of {found.items} items are NaN"
            hints.append(Hint("nan", tensor.name, words))
        if found.inf and found.items > 1 and _MASK not in tensor.name.lower():
            words = f"{found.inf} of {found.items} items are Inf"
            hints.append(Hint("inf", tensor.name, words))
    return hints, unread


class _History:
    """The largest relative change of each tensor for one step, so far."""

    def __init__(self) -> None:
        self._largest: dict[str, float] = {}
        self._changes: dict[str, int] = {}

    def take(self, before: Layout, after: Layout) -> list[Hint]:
        """What the newest change hints at; it is remembered."""
        now = {
            change.name: rate
            for change in difference(before, after).tensors
            if (rate := _rate(change, before, after)) is not None
        }
        hints = []
        for is_optimizer in (False, True):
            group = {n: r for n, r in now.items() if (family_of(n) == OPTIMIZER) is is_optimizer}
            hints += self._of_group(group, "optimizer" if is_optimizer else "weights")
        for name, rate in now.items():
            self._largest[name] = max(self._largest.get(name, 0.0), rate)
            self._changes[name] = self._changes.get(name, 0) + 1
        return hints

    def _of_group(self, rates: dict[str, float], what: str) -> list[Hint]:
        ratios = {
            name: rate / self._largest[name]
            for name, rate in rates.items()
            if self._changes.get(name, 0) >= _CHANGES_MIN and self._largest[name] > 0
        }
        hints = []
        usual = max(medians.median(ratios.values()), 1.0) if ratios else 1.0
        if usual > JUMP:
            words = f"most tensors ({what}) changed {usual:.3g} times as much as ever before"
            hints.append(Hint("jump", None, words))
        for name, ratio in ratios.items():
            if ratio > JUMP * usual:
                words = f"it changed {ratio:.3g} times as much as ever before"
                hints.append(Hint("jump", name, words))
        for name, rate in rates.items():
            is_known = self._changes.get(name, 0) >= _CHANGES_MIN
            if is_known and rate > 0 and not self._largest[name]:
                hints.append(Hint("jump", name, "it changed for the first time"))
        return hints


def _rate(change: TensorChange, before: Layout, after: Layout) -> float | None:
    """The relative change for one step, of floats."""
    of_item = change.after.type
    if of_item is None or not of_item.is_float or change.relative is None:
        return None
    steps = 1
    if before.step is not None and after.step is not None and after.step > before.step:
        steps = after.step - before.step
    return change.relative / steps
