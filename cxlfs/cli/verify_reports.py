"""What ``cxlfs verify`` says: findings, passes, repairs, and the summary, as text and as JSON.

Never here: checking, repairing, printing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Self

from cxlfs.cli.exit_codes import FINDINGS, OK, REPAIRED
from cxlfs.cli.output import Report, Style, quote
from cxlfs.units import format_duration, format_size
from cxlfs.verify import ERROR, Finding, Use


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
        return cls(
            **{field.name: getattr(finding, field.name) for field in dataclasses.fields(cls)}
        )

    def lines(self, style: Style, /) -> Iterator[str]:
        paint = style.bad if self.severity == ERROR else style.warning
        place = self.structure
        if self.media_offset is not None:
            place += f" at {self.media_offset:#x}"
        if not self.uses:
            place += "" if self.ino is None else f", inode {self.ino}"
            place += "" if self.path is None else f", {quote(self.path)}"
        yield f"{paint(self.severity)} {self.id}: {place}"
        detail = self.message
        if self.expected is not None and self.actual is not None:
            detail += f" (expected {self.expected:#010x}, found {self.actual:#010x})"
        yield f"    {detail}"
        for use in self.uses:
            where = "an inode without a name" if use.path is None else quote(use.path)
            end = use.file_offset + use.length
            span = f"bytes {use.file_offset} to {end}, {use.version}"
            yield f"    in {where} (inode {use.ino}): {span}"


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
            result = style.bad(count_of(self.findings))
        else:
            result = style.good("ok")
        yield f"{self.pass_id:>2} {self.name:<24} {amount:>12}  {result}"


@dataclasses.dataclass(frozen=True, slots=True)
class RemainingReport(FindingReport):
    """A finding that is still there after repairing."""

    message_type: ClassVar[str | None] = "remaining"


@dataclasses.dataclass(frozen=True, slots=True)
class RepairReport(Report):
    """One thing that --repair is about to do."""

    schema: ClassVar[str] = "cxlfs.verify/1"
    message_type: ClassVar[str | None] = "repair"

    id: str
    text: str
    media_offset: int
    length: int
    repairs: tuple[str, ...]
    """Ids of the findings that it answers."""

    def lines(self, _style: Style, /) -> Iterator[str]:
        yield f"will {self.text}"


@dataclasses.dataclass(frozen=True, slots=True)
class Summary(Report):
    """The last document: what came out."""

    schema: ClassVar[str] = "cxlfs.verify/1"
    message_type: ClassVar[str | None] = "summary"

    structure_only: bool
    passes: int
    passes_skipped: int
    findings: int
    errors: int
    warnings: int
    repairable: int
    repairs: int
    remaining: int
    saved_copy: bytes | None
    recorded: bool
    not_recorded: str | None
    """Why the store does not remember this outcome."""
    seconds: float
    next_step: str | None

    @property
    def exit_code(self) -> int:
        if self.remaining or self.passes_skipped:
            return FINDINGS
        return REPAIRED if self.findings else OK

    def lines(self, style: Style, /) -> Iterator[str]:
        what = "structures" if self.structure_only else "structures and data"
        took = format_duration(self.seconds)
        if self.exit_code == OK:
            yield f"{style.good('clean')}: {what} checked in {took}"
        elif self.exit_code == REPAIRED:
            yield f"{style.good('repaired')}: {count_of(self.findings)}, none is left"
        else:
            worst = style.bad("damaged") if self.errors else style.warning("redundancy is lost")
            left = " left" if self.repairs else ""
            yield f"{worst}: {count_of(self.remaining)}{left} in {what}, checked in {took}"
        if self.saved_copy is not None:
            yield f"saved copy of what was changed: {quote(self.saved_copy)}"
        if self.not_recorded is not None:
            yield f"not recorded in the store: {self.not_recorded}"
        if self.next_step is not None:
            yield f"next: {self.next_step}"


@dataclasses.dataclass(frozen=True, slots=True)
class Undone(Report):
    """A repair that was taken back."""

    schema: ClassVar[str] = "cxlfs.verify/1"
    message_type: ClassVar[str | None] = "undone"

    source: bytes
    saved_copy: bytes
    length: int
    """Bytes that were put back."""
    next_step: str

    def lines(self, style: Style, /) -> Iterator[str]:
        saved = quote(self.saved_copy)
        yield f"{style.good('undone')}: {self.length} bytes are as they were saved in {saved}"
        yield f"next: {self.next_step}"


def count_of(findings: int) -> str:
    return f"{findings} finding{'' if findings == 1 else 's'}"
