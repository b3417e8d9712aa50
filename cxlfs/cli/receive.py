"""``cxlfs receive``: make a checkpoint of a stream of ``cxlfs send``.

Never here: what the stream consists of, and how a checkpoint gets its name (``tier``).
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, ClassVar

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style, document, quote
from cxlfs.cli.pipes import standard_input
from cxlfs.cli.progress import Progress
from cxlfs.errors import (
    BusyError,
    CheckpointExistsError,
    NoSpaceError,
    StreamError,
    UsageError,
)
from cxlfs.tier import Had, inventory, receive
from cxlfs.tier.archive import PIECE_BYTES
from cxlfs.units import format_size

HELP = """Read a stream of "cxlfs send" from stdin, and make the checkpoint of it in DIR, under
the name that it had.

Every byte is compared with the manifest, and durable, before the checkpoint gets its name, in one
step. A stream that ends early, is damaged or hostile, and a full store, leave DIR as it was; what
had arrived whole is kept in DIR/.cxlfs-receiving, so that the same can be sent again without it.

\b
Examples:
  cxlfs send /mnt/ckpt/run1/step-100 | ssh node2 cxlfs receive /mnt/ckpt/run1
  cxlfs receive /mnt/ckpt/run1 --have > have.json     for cxlfs send --base have.json
  cxlfs receive /mnt/ckpt/run1 --name step-100-copy < step-100.tar
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Inventory(Report):
    """What a sender needs not send; JSON in both forms, as a program reads it."""

    schema: ClassVar[str] = "cxlfs.inventory/1"

    files: tuple[Had, ...]

    def lines(self, _style: Style, /) -> Iterator[str]:
        yield document(self)


@dataclasses.dataclass(frozen=True, slots=True)
class ReceivedReport(Report):
    """What was received."""

    schema: ClassVar[str] = "cxlfs.receive/1"

    path: bytes
    files: int
    size_bytes: int
    received_bytes: int
    kept_files: int
    taken_files: int

    def lines(self, style: Style, /) -> Iterator[str]:
        yield f"{style.good('received')}: {quote(self.path)}"
        parts = [f"{self.files} files", format_size(self.size_bytes)]
        if self.taken_files or self.kept_files:
            parts.append(f"{self.taken_files} taken from checkpoints that were here")
            parts.append(f"{self.kept_files} had arrived before")
        yield f"    {', '.join(parts)}"


@click.command(
    "receive",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(
        BusyError.exit_code,
        NoSpaceError.exit_code,
        StreamError.exit_code,
        CheckpointExistsError.exit_code,
    ),
)
@click.argument("directory", metavar="DIR", type=ANY_PATH)
@click.option("--have", is_flag=True, help="Print what DIR has, and receive nothing.")
@click.option("--name", metavar="NAME", help="Of the checkpoint, in place of the one it had.")
@click.option("--replace", is_flag=True, help="A checkpoint of that name goes, in the same step.")
@common_options
def command(directory: str, name: str | None, *, have: bool, replace: bool, as_json: bool) -> None:
    """See HELP."""
    output = Output(as_json=as_json)
    progress = Progress(output)
    path = Path(directory)
    if have:
        if name is not None or replace:
            raise UsageError("--have receives nothing", next_step="leave --name and --replace out")
        found = inventory(path, progress=Progress(Output(as_json=False)))
        output.report(Inventory(found))
        return
    if sys.stdin.isatty():
        raise UsageError("stdin is a terminal", next_step="pipe a stream of cxlfs send into it")
    stream = standard_input()
    received = receive(path, stream, name=name, replace=replace, progress=progress)
    progress.clear()
    _require_the_end(stream, received.path)
    output.report(
        ReceivedReport(
            path=os.fsencode(received.path),
            files=received.files,
            size_bytes=received.size_bytes,
            received_bytes=received.received_bytes,
            kept_files=received.kept_files,
            taken_files=received.taken_files,
        )
    )


def _require_the_end(stream: BinaryIO, path: Path) -> None:
    """Behind the name, as some pipes never end. Zeros are what programs fill up blocks with.

    Raises StreamError, OSError.
    """
    while piece := stream.read(PIECE_BYTES):
        if piece.strip(b"\0"):
            raise StreamError(
                f"{path} was received; behind its stream something else came, which was not",
                next_step="give each stream a cxlfs receive of its own",
            )
