"""``cxlfs send``: a checkpoint as a stream, for ``cxlfs receive`` at the other end of a pipe.

Never here: what the stream consists of (``tier``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, ClassVar

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style, quote
from cxlfs.cli.pipes import opened_output, standard_output
from cxlfs.cli.progress import Progress
from cxlfs.errors import NotSendableError, UsageError
from cxlfs.tier import Had, decode_inventory, send
from cxlfs.tier.manifest import BYTES_MAX
from cxlfs.units import format_size

HELP = """Write the checkpoint DIR (a directory or a file, on a store or not) to stdout, as a stream
that "cxlfs receive" makes the same checkpoint of: whole and compared byte by byte, or not at all.

The stream is a pax archive, with a manifest (names, sizes, CRC32C) as its first member: "tar t" and
"tar x" read it, too. What is known to be incomplete is refused. What the other side has already is
named and not sent, if an inventory says so (--base). When a transfer broke off, the same sends only
what had not arrived.

\b
Examples:
  cxlfs send /mnt/ckpt/run1/step-100 | ssh node2 cxlfs receive /mnt/ckpt/run1
  ssh node2 cxlfs receive /mnt/ckpt/run1 --have > have.json
  cxlfs send run1/step-200 --base have.json | ssh node2 cxlfs receive /mnt/ckpt/run1
  cxlfs send run1/step-100 --output step-100.tar
"""


@dataclasses.dataclass(frozen=True, slots=True)
class SentReport(Report):
    """What was sent."""

    schema: ClassVar[str] = "cxlfs.send/1"

    path: bytes
    name: str
    files: int
    size_bytes: int
    left_out_files: int
    left_out_bytes: int

    def lines(self, _style: Style, /) -> Iterator[str]:
        left = f", {self.left_out_files} left out" if self.left_out_files else ""
        yield f"sent {quote(self.name)}: {self.files} files, {format_size(self.size_bytes)}{left}"


@click.command(
    "send",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(NotSendableError.exit_code),
)
@click.argument("directory", metavar="DIR", type=ANY_PATH)
@click.option(
    "--base",
    type=ANY_PATH,
    metavar="FILE",
    help='What the other side has, as "cxlfs receive DIR --have" printed it there.',
)
@click.option("--output", "-o", "to", type=ANY_PATH, metavar="FILE", help="Not to stdout.")
@common_options
def command(directory: str, base: str | None, to: str | None, *, as_json: bool) -> None:
    """See HELP."""
    output = Output(as_json=as_json)
    if to is None and as_json:
        raise UsageError(
            "--json goes to stdout, and so does the stream",
            next_step="name where the stream goes: --output FILE (/dev/fd/3 and the like, too)",
        )
    if to is None and sys.stdout.isatty():
        raise UsageError("a stream is not for a terminal", next_step="pipe it, or --output FILE")
    path = Path(directory).absolute()
    had = () if base is None else _had(Path(base))
    progress = Progress(output)
    with _opened(to, path) as stream:
        sent = send(path, stream, had, progress=progress)
        stream.flush()
    progress.clear()
    if to is not None:
        output.report(
            SentReport(
                path=os.fsencode(path),
                name=sent.manifest.name,
                files=sent.files,
                size_bytes=sent.size_bytes,
                left_out_files=sent.left_out_files,
                left_out_bytes=sent.left_out_bytes,
            )
        )


def _had(path: Path) -> tuple[Had, ...]:
    with path.open("rb") as file:
        return decode_inventory(file.read(BYTES_MAX + 1))


@contextlib.contextmanager
def _opened(to: str | None, path: Path) -> Iterator[BinaryIO]:
    if to is None:
        yield standard_output()
        return
    if Path(to).resolve().is_relative_to(path.resolve()):
        raise UsageError(
            f"{quote(to)} is the checkpoint, or lies in it", next_step="name another --output"
        )
    with opened_output(Path(to)) as file:
        yield file
