"""``cxlfs verify``: run the checks of a store, say what they find, and repair where that is safe.

Never here: the checks and the repairs (``cxlfs.verify``).

Invariants
- Nothing is changed without --repair; with it nothing before it is announced and saved.
- A mounted store is checked by its daemon, and never repaired.
- Exit code 0 means that every pass asked for ran to its end and found nothing.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar, Self

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import FINDINGS, OK, REPAIRED, epilog
from cxlfs.cli.output import Output, Report, Style, quote
from cxlfs.cli.progress import Progress
from cxlfs.cli.source import media_of
from cxlfs.cli.target import OPEN_EXIT_CODES, served_by
from cxlfs.control.client import control_request
from cxlfs.control.discovery import Registration
from cxlfs.errors import BusyError, CorruptionError, NotACxlfsError, SavedCopyError
from cxlfs.format import superblock
from cxlfs.media import Media, signatures
from cxlfs.units import format_duration, format_size
from cxlfs.verify import (
    ERROR,
    PASSES,
    Finding,
    Use,
    finding_from_dict,
    progress_from_dict,
    run_passes,
    run_steps,
)
from cxlfs.verify import Progress as PassProgress
from cxlfs.verify.repair import apply, plan

_DATA_PASSES = frozenset(each.id for each in PASSES if each.data)

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
            result = style.bad(_count(self.findings))
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
            yield f"{style.good('repaired')}: {_count(self.findings)}, none is left"
        else:
            worst = style.bad("damaged") if self.errors else style.warning("redundancy is lost")
            left = " left" if self.repairs else ""
            yield f"{worst}: {_count(self.remaining)}{left} in {what}, checked in {took}"
        if self.saved_copy is not None:
            yield f"saved copy of what was changed: {quote(self.saved_copy)}"
        if self.next_step is not None:
            yield f"next: {self.next_step}"


def _count(findings: int) -> str:
    return f"{findings} finding{'' if findings == 1 else 's'}"


class Tally:
    """Reports findings and passes as they come, and counts them."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._progress = Progress(output)
        self._of_pass: dict[int, int] = {}
        self._began = time.monotonic()
        self.findings: list[Finding] = []
        self.remaining: list[Finding] = []
        self.passes = 0
        self.passes_skipped = 0
        self.repairs = 0
        self.saved_copy: Path | None = None

    def take(self, steps: Iterable[Finding | PassProgress]) -> None:
        """Report every step as it comes."""
        try:
            for step in steps:
                if isinstance(step, Finding):
                    self._take_finding(step)
                else:
                    self._take_progress(step)
        finally:
            self._progress.clear()

    def repair(self, media: Media, source: str) -> None:
        """Do what can be done about the findings, and look again at all structures."""
        actions = plan(media, self.findings)
        if not actions:
            return
        for action in actions:
            self._say(
                RepairReport(
                    id=action.id,
                    text=action.text,
                    media_offset=action.media_offset,
                    length=action.length,
                    repairs=action.repairs,
                )
            )
        self.saved_copy = _saved_copy_path(source)
        self._output.text(f"saving what is changed to {quote(str(self.saved_copy))}")
        self._output.flush()
        try:
            apply(media, actions, self.saved_copy)
        except SavedCopyError as error:
            raise SavedCopyError(
                f"nothing was changed: {error.message}",
                next_step=f"make sure that {self.saved_copy.parent} can be written and has room",
            ) from error
        self.repairs = len(actions)
        of_structures = run_passes(media, structure_only=True)
        self.remaining = [f for f in self.findings if f.pass_id in _DATA_PASSES]
        for finding in of_structures:
            self.remaining.append(finding)
            self._say(RemainingReport.from_finding(finding))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def _take_finding(self, finding: Finding) -> None:
        self.findings.append(finding)
        self.remaining.append(finding)
        self._of_pass[finding.pass_id] = self._of_pass.get(finding.pass_id, 0) + 1
        self._say(FindingReport.from_finding(finding))

    def _take_progress(self, progress: PassProgress) -> None:
        if not progress.finished:
            self._progress(progress.name, progress.done, progress.total, progress.unit)
            return
        self.passes += 1
        self.passes_skipped += progress.skipped is not None
        self._say(
            PassReport(
                pass_id=progress.pass_id,
                name=progress.name,
                done=progress.done,
                unit=progress.unit,
                findings=self._of_pass.get(progress.pass_id, 0),
                skipped=progress.skipped,
            )
        )

    def _say(self, report: Report) -> None:
        self._progress.clear()
        self._output.report(report)
        self._output.flush()


@click.command(
    "verify",
    help=HELP,
    short_help="Check structures and data; repair what can be repaired.",
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(FINDINGS, REPAIRED, *OPEN_EXIT_CODES),
)
@click.argument("target", metavar="SOURCE|MOUNTPOINT", type=ANY_PATH)
@click.option("--structure-only", is_flag=True, help="Do not read file data.")
@click.option("--repair", is_flag=True, help="Repair what can be undone from a saved copy.")
@common_options
def command(target: str, *, structure_only: bool, repair: bool, as_json: bool) -> int:
    """See HELP."""
    output = Output(as_json=as_json)
    return check(target, output, structure_only=structure_only, repair=repair)


def check(target: str, output: Output, *, structure_only: bool, repair: bool) -> int:
    """Check, and repair if asked to; the exit code. Raises what opening the source raises."""
    daemon = served_by(target)
    tally = Tally(output)
    if daemon is not None:
        if repair:
            raise BusyError(
                f"{target} is mounted, and a mounted store is not repaired",
                next_step=f"cxlfs umount {daemon.mountpoint}; "
                f"cxlfs verify {daemon.source} --repair",
            )
        tally.take(_ask(daemon, structure_only=structure_only))
        return _conclude(output, tally, target, structure_only=structure_only, daemon=daemon)
    with media_of(target, read_only=not repair) as media:
        _require_store(media)
        tally.take(run_steps(media, structure_only=structure_only))
        if repair:
            tally.repair(media, target)
        return _conclude(output, tally, target, structure_only=structure_only)


def _require_store(media: Media) -> None:
    """Raises NotACxlfsError where there is nothing to check; what is damaged the passes report."""
    try:
        superblock.choose(media)
    except CorruptionError:
        return
    except NotACxlfsError:
        if not signatures.find(media.read, media.size_bytes, signatures.STORES):
            raise


def _ask(daemon: Registration, *, structure_only: bool) -> Iterator[Finding | PassProgress]:
    messages = control_request(daemon.mountpoint, "verify", {"structure_only": structure_only})
    for message in messages:
        if message["message_type"] == "finding":
            yield finding_from_dict(message)
        else:
            yield progress_from_dict(message)


def _conclude(
    output: Output,
    tally: Tally,
    target: str,
    *,
    structure_only: bool,
    daemon: Registration | None = None,
) -> int:
    """Write the summary; the exit code."""
    summary = Summary(
        structure_only=structure_only,
        passes=tally.passes,
        passes_skipped=tally.passes_skipped,
        findings=len(tally.findings),
        errors=sum(finding.severity == ERROR for finding in tally.findings),
        warnings=sum(finding.severity != ERROR for finding in tally.findings),
        repairable=sum(finding.repairable for finding in tally.findings),
        repairs=tally.repairs,
        remaining=len(tally.remaining),
        saved_copy=None if tally.saved_copy is None else os.fsencode(tally.saved_copy),
        seconds=round(tally.seconds, 3),
        next_step=_next_step(tally.remaining, target, daemon),
    )
    output.report(summary)
    return summary.exit_code


def _next_step(remaining: list[Finding], target: str, daemon: Registration | None) -> str | None:
    """That of the worst finding, with the names of this store."""
    if not remaining:
        return None
    worst = min(remaining, key=lambda finding: finding.severity != ERROR).next_step
    if daemon is None:
        return worst.removeprefix("unmount it, then: ").replace("SOURCE", target)
    unmount = f"cxlfs umount {daemon.mountpoint}; "
    return worst.replace("unmount it, then: ", unmount).replace("SOURCE", daemon.source)


def _saved_copy_path(source: str) -> Path:
    """Beside an ordinary file; in /var/tmp, which outlives a restart, for a device."""
    path = Path(source).resolve()
    directory = path.parent if path.is_file() else Path("/var/tmp")  # noqa: S108  opened with O_EXCL
    moment = dt.datetime.now(dt.UTC)
    return directory / f"{path.name}.saved-{moment:%Y%m%dT%H%M%S}Z"
