"""``cxlfs diff``: what changed between two checkpoints.

Never here: comparing (``checkpoint.tensors``).
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from typing import ClassVar

import click

from cxlfs.checkpoint.tensors import Difference, TensorChange, difference
from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import OK, epilog
from cxlfs.cli.inspect import INSPECT_EXIT_CODES, reading, require_layout
from cxlfs.cli.output import Output, Report, Style, quote
from cxlfs.cli.tables import finite, short, table
from cxlfs.units import format_size

HELP = """Compare the checkpoints at BEFORE and AFTER, tensor by tensor: what was added, what is
gone, how many items changed, and how large the change is.

Tensors are compared by their names and item by item, in whatever formats, strides and shards they
are stored. A table sums them up by family (embedding, attention, mlp, norm, optimizer, other), as
the usual names say it. The norm is that of the change; relative is that norm by the one before.

A tensor is not read where both are known to hold the same bytes: it is one file, a store says that
both files have one size and one CRC32C, or the format keeps equal checksums of both. --all reads
everything.

\b
Examples:
  cxlfs diff run/step-600 run/step-700
  cxlfs diff base.safetensors tuned.safetensors --tensors
  cxlfs diff a.pt b.pt --json | jq '.tensors[] | select(.changed_items > 0) | .name'
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One that both have. ``changed_items`` None: it was not compared, and ``reason`` says why."""

    name: str
    family: str
    dtype: str
    shape: tuple[int, ...]
    items: int
    changed_items: int | None
    unmeasured_items: int | None
    """Items that changed from or to NaN or Inf: they are in no norm."""
    norm: float | None
    relative: float | None
    largest: float | None
    shared: bool
    """It is the same, and was not read."""
    reason: str | None

    @classmethod
    def of(cls, found: TensorChange) -> Tensor:
        change = found.change
        is_known = found.is_shared or change is not None
        return cls(
            name=found.name,
            family=found.family,
            dtype=found.after.dtype,
            shape=found.after.shape,
            items=found.after.items,
            changed_items=change.changed if change is not None else 0 if is_known else None,
            unmeasured_items=change.unmeasured if change is not None else 0 if is_known else None,
            norm=finite(math.sqrt(change.squares))
            if change is not None
            else 0.0
            if is_known
            else None,
            relative=finite(found.relative),
            largest=finite(change.largest) if change is not None else 0.0 if is_known else None,
            shared=found.is_shared,
            reason=found.reason,
        )

    def row(self) -> list[str]:
        if self.changed_items is None:
            return [quote(self.name), "-", "-", "-", f"({quote(self.reason or '')})"]
        share = f"{100 * self.changed_items / self.items:.3g}%" if self.items else "-"
        more = f"{self.unmeasured_items} from or to NaN or Inf" if self.unmeasured_items else ""
        return [quote(self.name), share, short(self.norm), short(self.relative), more]


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """``relative`` is None where tensors of it were not read: they are the same."""

    family: str
    tensors: int
    changed_tensors: int
    items: int
    changed_items: int
    norm: float | None
    relative: float | None

    def row(self) -> list[str]:
        share = f"{100 * self.changed_items / self.items:.3g}%" if self.items else "-"
        count = f"{self.changed_tensors} of {self.tensors}"
        return [self.family, count, share, short(self.norm), short(self.relative)]


@dataclasses.dataclass(frozen=True, slots=True)
class Changes(Report):
    """Of two checkpoints."""

    schema: ClassVar[str] = "cxlfs.diff/1"

    before: bytes
    after: bytes
    same: bool
    """Nothing was added, is gone or changed, and everything was compared."""
    added: tuple[str, ...]
    gone: tuple[str, ...]
    changed: int
    unchanged: int
    not_compared: int
    bytes_read: int
    bytes_shared: int
    families: tuple[Family, ...]
    tensors: tuple[Tensor, ...]
    lists_tensors: bool

    @classmethod
    def of(cls, before: str, after: str, found: Difference, *, lists_tensors: bool) -> Changes:
        tensors = tuple(map(Tensor.of, found.tensors))
        changed = sum(bool(each.changed_items) for each in tensors)
        unknown = sum(each.changed_items is None for each in tensors)
        families = tuple(
            Family(
                each.family,
                each.tensors,
                each.tensors_changed,
                each.items,
                each.items_changed,
                finite(each.norm),
                finite(each.relative),
            )
            for each in found.families()
        )
        return cls(
            before=os.fsencode(before),
            after=os.fsencode(after),
            same=not (changed or unknown or found.added or found.gone),
            added=tuple(each.name for each in found.added),
            gone=tuple(each.name for each in found.gone),
            changed=changed,
            unchanged=len(tensors) - changed - unknown,
            not_compared=unknown,
            bytes_read=found.bytes_read,
            bytes_shared=found.bytes_shared,
            families=families,
            tensors=tensors,
            lists_tensors=lists_tensors,
        )

    def lines(self, style: Style, /) -> Iterator[str]:
        yield from (f"added: {quote(name)}" for name in self.added)
        yield from (f"gone: {quote(name)}" for name in self.gone)
        rows = [
            each.row()
            for each in self.tensors
            if (each.changed_items != 0 if self.lists_tensors else each.changed_items is None)
        ]
        if rows:
            header = ("TENSOR", "CHANGED", "NORM", "RELATIVE", "NOTE")
            first, *rest = table(header, rows, frozenset({"CHANGED", "NORM", "RELATIVE"}))
            yield style.strong(first)
            yield from rest
        if self.families:
            header = ("FAMILY", "TENSORS", "CHANGED", "NORM", "RELATIVE")
            numbers = frozenset(header) - {"FAMILY"}
            first, *rest = table(header, [each.row() for each in self.families], numbers)
            yield style.strong(first)
            yield from rest
        parts = [f"{self.changed} changed", f"{self.unchanged} unchanged"]
        parts += [f"{self.not_compared} not compared"] if self.not_compared else []
        parts += [f"{len(self.added)} added", f"{len(self.gone)} gone"]
        yield "same" if self.same else ", ".join(parts)
        yield (
            f"read {format_size(self.bytes_read)}; "
            f"{format_size(self.bytes_shared)} are the same in both, and were not read"
        )


@click.command(
    "diff", help=HELP, context_settings=CONTEXT_SETTINGS, epilog=epilog(*INSPECT_EXIT_CODES)
)
@click.argument("before", metavar="BEFORE", type=ANY_PATH)
@click.argument("after", metavar="AFTER", type=ANY_PATH)
@click.option("--tensors", is_flag=True, help="List every tensor that changed.")
@click.option("--all", "reads_all", is_flag=True, help="Read what is known to be the same, too.")
@common_options
def command(before: str, after: str, *, tensors: bool, reads_all: bool, as_json: bool) -> int:
    """See HELP."""
    output = Output(as_json=as_json)
    layouts = require_layout(before), require_layout(after)
    with reading(output) as seen:
        found = difference(*layouts, reads_all=reads_all, seen=seen)
    output.report(Changes.of(before, after, found, lists_tensors=tensors))
    return OK
