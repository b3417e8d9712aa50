"""``cxlfs verify``: run the checks of a store, say what they find, and repair where that is safe.

Never here: the checks and the repairs (``cxlfs.verify``).

Invariants
- Nothing is changed without --repair; with it nothing before a copy of what changes is durable.
- A mounted store is checked by its daemon, and never repaired.
- Exit code 0 means that every pass asked for ran to its end and found nothing.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

import click

from cxlfs.cli.common import CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import FINDINGS, OK, REPAIRED, epilog
from cxlfs.cli.mount import MOUNT_EXIT_CODES
from cxlfs.cli.output import Output, Report, Style, quote
from cxlfs.cli.progress import Progress
from cxlfs.cli.target import media_of, served_by
from cxlfs.errors import BusyError
from cxlfs.fuse.control_client import control_request
from cxlfs.fuse.runtime import Registration
from cxlfs.media import Media
from cxlfs.superblock import choose
from cxlfs.units import format_duration
from cxlfs.verify.findings import (
    Finding,
    Use,
    finding_from_dict,
    progress_from_dict,
)
from cxlfs.verify.findings import Progress as PassProgress

HELP = """Check the store on SOURCE, or the one mounted on MOUNTPOINT: first every structure, then
every byte of file data against its checksum.

Each finding names the structure, where it lies on the media, and the inode and path that it
belongs to. Nothing is changed, and a mounted store goes on working, unless --repair is given: it
restores structures that have a good second copy, says first what it will do, and keeps a copy of
everything it changes. File data has no second copy: delete a damaged file, or save it again.

\b
Examples:
  cxlfs verify /mnt/ckpt
  cxlfs verify /dev/dax0.0 --structure-only
  cxlfs verify /dev/dax0.0 --repair
"""


@dataclasses.dataclass(frozen=True, slots=True)
class FindingReport(Report):
    """One thing that is wrong."""

    schema: ClassVar[str] = "cxlfs.verify/1"
    message_type: ClassVar[str | None] = "finding"

    id: str
    pass_id: int
    severity: str
    structure: str
    media_offset: int | None
    ino: int | None
    path: bytes | None
    message: str
    expected: int | None
    actual: int | None
    repairable: bool
    next_step: str
    uses: tuple[Use, ...]

    @classmethod
    def from_finding(cls, finding: Finding) -> Self:
        return cls(**{field.name: getattr(finding, field.name) for field in dataclasses.fields(cls)})

    def lines(self, style: Style, /) -> Iterator[str]:
        paint = style.bad if self.severity == "error" else style.warning
        place = self.structure
        if self.media_offset is not None:
            place += f" at {self.media_offset:#x}"
        if self.ino is not None:
            place += f", inode {self.ino}"
        if self.path is not None:
            place += f", {quote(self.path)}"
        yield f"{paint(self.severity)} {self.id}: {place}"
        detail = self.message
        if self.expected is not None and self.actual is not None:
            detail += f" (expected {self.expected:#010x}, found {self.actual:#010x})"
        yield f"    {detail}"
        for use in self.uses:
            where = "an inode without a name" if use.path is None else quote(use.path)
            end = use.file_offset + use.length
            yield f"    {where}: bytes {use.file_offset} to {end} ({use.version}), inode {use.ino}"


@dataclasses.dataclass(frozen=True, slots=True)
class PassReport(Report):
    """One pass that ran to its end, or could not run (``skipped`` says why)."""

    schema: ClassVar[str] = "cxlfs.verify/1"
    message_type: ClassVar[str | None] = "pass"

    pass_id: int
    name: str
    done: int
    unit: str
    findings: int
    skipped: str | None

    def lines(self, style: Style, /) -> Iterator[str]:
        amount = format_size(self.done) if self.unit == "bytes" else f"{self.done}"
        if self.skipped is not None:
            result = f"{style.warning('not run')}: {self.skipped}"
        elif self.findings:
            result = style.bad(_count(self.findings))
        else:
            result = style.good("ok")
        yield f"{self.pass_id:>2} {self.name:<24} {amount:>12}  {result}"


