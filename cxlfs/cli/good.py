"""``cxlfs good``: the newest checkpoint in a directory that is complete and verified.

Never here: what a checkpoint is (``checkpoint``).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import ClassVar

import click

from cxlfs.checkpoint import Entry, Level, good
from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style, quote, time_or_none
from cxlfs.errors import NoCheckpointError, NoGoodCheckpointError

HELP = """Print the path of the newest checkpoint in DIR that is complete and verified.

DIR is any directory, on a store or not. Newest is the highest step, or what was committed last
where checkpoints name no step. Every byte of the candidate is read, and every checksum compared
that its format has; on a store reading is itself a verification. Newer ones that are not good are
named on stderr. Nothing is changed.

\b
Examples:
  cxlfs good /mnt/ckpt/run1
  train.py --resume "$(cxlfs good /mnt/ckpt/run1)"
  cxlfs good run1; case $? in 0) resume;; 22) first_start;; *) ask_somebody;; esac
"""


@dataclasses.dataclass(frozen=True, slots=True)
class PassedOver:
    """A newer one that is not good."""

    path: bytes
    state: str
    reason: str | None

    @classmethod
    def of(cls, entry: Entry) -> PassedOver:
        found = entry.checkpoint
        return cls(os.fsencode(found.path), found.state.value, found.reason)


@dataclasses.dataclass(frozen=True, slots=True)
class Good(Report):
    """The newest good checkpoint."""

    schema: ClassVar[str] = "cxlfs.good/1"

    path: bytes
    format: str
    step: int | None
    content_verified: bool
    size_bytes: int
    files: int
    tensors: int
    written: str | None
    notes: tuple[str, ...]
    passed_over: tuple[PassedOver, ...]

    @classmethod
    def of(cls, entry: Entry, passed_over: tuple[Entry, ...]) -> Good:
        found = entry.checkpoint
        return cls(
            path=os.fsencode(found.path),
            format=found.kind,
            step=found.step,
            content_verified=found.content_verified,
            size_bytes=found.size_bytes,
            files=len(found.files),
            tensors=len(found.tensors),
            written=time_or_none(entry.written_ns),
            notes=found.notes,
            passed_over=tuple(map(PassedOver.of, passed_over)),
        )

    def lines(self, _style: Style, /) -> Iterator[str]:
        yield os.fsdecode(self.path)


@click.command(
    "good",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(NoCheckpointError.exit_code, NoGoodCheckpointError.exit_code),
)
@click.argument("directory", metavar="DIR", type=ANY_PATH)
@click.option("--structure-only", is_flag=True, help="Read headers and sizes, not the tensors.")
@common_options
def command(directory: str, *, structure_only: bool, as_json: bool) -> None:
    """See HELP."""
    output = Output(as_json=as_json)
    entry, passed_over = good(directory, Level.STRUCTURE if structure_only else Level.CONTENT)
    for each in passed_over:
        output.warning(f"{quote(each.checkpoint.path)} is {quote(each.checkpoint.words)}")
    output.report(Good.of(entry, passed_over))
