"""``cxlfs inspect``: the tensors of a checkpoint, where they are, and their statistics.

Never here: finding them, computing (``checkpoint.tensors``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import click

from cxlfs.checkpoint.tensors import (
    Layout,
    Part,
    Statistics,
    StoredTensor,
    draw,
    family_of,
    layer_of,
    only_layout,
    statistics,
)
from cxlfs.checkpoint.tensors.blocks import Seen
from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import OK, epilog
from cxlfs.cli.output import Output, Report, Style, quote
from cxlfs.cli.progress import Progress
from cxlfs.cli.tables import finite, short, table
from cxlfs.cli.targets import check_target
from cxlfs.durable import write_durably
from cxlfs.errors import DirectoryAbsentError, DirectoryUnreachableError, NotInspectableError
from cxlfs.units import format_size

_PICTURE = re.compile(rb"<svg ")

HELP = """List the tensors of the checkpoint at PATH: name, type, shape, bytes, file and offset.

PATH is a file, a directory, or the prefix of TensorFlow's files, on a store or anywhere else. No
framework is needed, and nothing in the checkpoint is run. Without options only headers are read, so
that it takes a moment however large the checkpoint is.

With --stats every item is read, on all cores: smallest, largest, mean and norm of the finite items,
and how many are NaN or Inf. --plot draws the norms by layer as SVG, and reads every item too.

Tensors that cannot be looked into (compressed chunks, texts, packed types) are listed with the
reason.

\b
Examples:
  cxlfs inspect model.pt
  cxlfs inspect /mnt/ckpt/step-700 --stats
  cxlfs inspect run/step-700 --tensor '*.weight' --plot norms.svg
  cxlfs inspect model.safetensors --stats --json | jq '.tensors[] | select(.statistics.nan > 0)'
"""
INSPECT_EXIT_CODES = tuple(
    error.exit_code
    for error in (NotInspectableError, DirectoryAbsentError, DirectoryUnreachableError)
)


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a file that hold a box of the tensor."""

    file: bytes
    offset: int
    size_bytes: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    codec: str | None

    @classmethod
    def of(cls, part: Part, name: str) -> Place:
        """``name``: of the file that is the checkpoint itself."""
        return cls(
            os.fsencode(part.file or name),
            part.offset,
            part.size_bytes,
            part.start,
            part.shape,
            part.strides,
            None if part.codec is None else part.codec.value,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """``reason``: why its items cannot be looked at."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    family: str
    layer: int | None
    size_bytes: int
    places: tuple[Place, ...]
    reason: str | None
    statistics: Statistics | None

    @classmethod
    def of(cls, tensor: StoredTensor, found: Statistics | str | None, name: str) -> Tensor:
        numbers = found if isinstance(found, Statistics) else None
        if numbers is not None:
            numbers = dataclasses.replace(
                numbers, mean=finite(numbers.mean), norm=finite(numbers.norm)
            )
        return cls(
            tensor.name,
            tensor.dtype,
            tensor.shape,
            family_of(tensor.name),
            layer_of(tensor.name),
            tensor.size_bytes,
            tuple(Place.of(part, name) for part in tensor.parts),
            found if isinstance(found, str) else tensor.reason,
            numbers,
        )

    def row(self, *, with_statistics: bool) -> list[str]:
        cells = [
            quote(self.name) or "-",
            quote(self.dtype) or "-",
            "x".join(map(str, self.shape)) or "-",
            format_size(self.size_bytes) if self.places else "-",
        ]
        found = self.statistics
        if with_statistics and found is not None:
            numbers = (found.minimum, found.maximum, found.mean, found.norm)
            cells += [*map(short, numbers), str(found.nan), str(found.inf)]
        elif with_statistics:
            cells += ["-"] * 6
        return [*cells, *self._place()]

    def _place(self) -> tuple[str, str]:
        """File and offset; in their place how many there are, or why there is none."""
        if self.reason is not None:
            return "-", f"({quote(self.reason)})"
        if len(self.places) == 1:
            return str(self.places[0].offset), quote(self.places[0].file) or "-"
        files = {place.file for place in self.places}
        return "-", f"{len(self.places)} parts in {len(files)} file{'s'[: len(files) != 1]}"


@dataclasses.dataclass(frozen=True, slots=True)
class Inspected(Report):
    """One checkpoint."""

    schema: ClassVar[str] = "cxlfs.inspect/1"

    path: bytes
    format: str
    state: str
    state_reason: str | None
    step: int | None
    files: int
    size_bytes: int
    with_statistics: bool
    nan: int | None
    inf: int | None
    """Of all tensors; None: no statistics were asked for."""
    tensors: tuple[Tensor, ...]
    notes: tuple[str, ...]

    def lines(self, style: Style, /) -> Iterator[str]:
        if self.tensors:
            header = ["NAME", "DTYPE", "SHAPE", "SIZE"]
            if self.with_statistics:
                header += ["MIN", "MAX", "MEAN", "NORM", "NAN", "INF"]
            header += ["OFFSET", "FILE"]
            rows = [each.row(with_statistics=self.with_statistics) for each in self.tensors]
            numbers = frozenset(header) - {"NAME", "DTYPE", "SHAPE", "FILE"}
            first, *rest = table(header, rows, numbers)
            yield style.strong(first)
            yield from rest
        words = self.state if self.state_reason is None else f"{self.state}: {self.state_reason}"
        parts = [
            f"{self.format}, {quote(words)}",
            f"{len(self.tensors)} tensor{'s'[: len(self.tensors) != 1]}",
            f"{format_size(self.size_bytes)} in {self.files} file{'s'[: self.files != 1]}",
        ]
        if self.step is not None:
            parts.insert(1, f"step {self.step}")
        yield ", ".join(parts)
        if self.nan or self.inf:
            yield style.bad(f"{self.nan} NaN and {self.inf} Inf")
        for note in self.notes:
            yield f"note: {quote(note)}"

    @classmethod
    def of(
        cls,
        layout: Layout,
        tensors: Sequence[StoredTensor],
        found: Sequence[Statistics | str] | None,
    ) -> Inspected:
        listed = tuple(
            Tensor.of(tensor, None if found is None else found[at], Path(layout.path).name)
            for at, tensor in enumerate(tensors)
        )
        numbers = [each.statistics for each in listed if each.statistics is not None]
        return cls(
            path=os.fsencode(layout.path),
            format=layout.kind,
            state=layout.state.value,
            state_reason=layout.state_reason,
            step=layout.step,
            files=len(layout.files),
            size_bytes=sum(file.size_bytes or 0 for file in layout.files),
            with_statistics=found is not None,
            nan=None if found is None else sum(each.nan for each in numbers),
            inf=None if found is None else sum(each.inf for each in numbers),
            tensors=listed,
            notes=layout.notes,
        )


@click.command(
    "inspect", help=HELP, context_settings=CONTEXT_SETTINGS, epilog=epilog(*INSPECT_EXIT_CODES)
)
@click.argument("path", metavar="PATH", type=ANY_PATH)
@click.option("--stats", is_flag=True, help="Read every item, and compute statistics.")
@click.option("--tensor", metavar="GLOB", help="List only tensors whose name matches.")
@click.option("--plot", metavar="FILE", type=ANY_PATH, help="Draw norms by layer as SVG.")
@common_options
def command(path: str, tensor: str | None, plot: str | None, *, stats: bool, as_json: bool) -> int:
    """See HELP."""
    output = Output(as_json=as_json)
    check_target(plot, _PICTURE, "SVG")
    layout = require_layout(path)
    wanted = [
        each for each in layout.tensors if tensor is None or fnmatch.fnmatchcase(each.name, tensor)
    ]
    found = None
    if stats or plot is not None:
        with reading(output) as seen:
            found = statistics(layout, wanted, seen=seen)
    if plot is not None and found is not None:
        named = [
            (each.name, norm)
            for each, numbers in zip(wanted, found, strict=True)
            if isinstance(numbers, Statistics) and (norm := finite(numbers.norm)) is not None
        ]
        write_durably(Path(plot), draw(Path(path).name, named).encode())
    output.report(Inspected.of(layout, wanted, found))
    if plot is not None:
        output.text(f"drawn: {quote(plot)}")
    return OK


@contextlib.contextmanager
def reading(output: Output) -> Iterator[Seen | None]:
    """Show how much was read, where a person watches; JSON stays one document."""
    if not output.shows_progress:
        yield None
        return
    progress = Progress(output)
    try:
        yield lambda done, total: progress("reading", done, total, "bytes")
    finally:
        progress.clear()


def require_layout(path: str) -> Layout:
    """Of the one checkpoint at ``path``. Raises DirectoryAbsentError, NotInspectableError."""
    found = only_layout(path)
    if found is None:
        raise NotInspectableError(f"cannot look inside {path}: no reader here knows its format")
    return found
