"""``cxlfs verify``: run the checks of a store, say what they find, and repair where that is safe.

Never here: the checks and the repairs (``cxlfs.verify``).

Invariants
- Nothing is changed without --repair; with it nothing before it is announced and saved.
- A mounted store is checked by its daemon, and never repaired.
- Exit code 0 means that every pass asked for ran to its end and found nothing.
"""

from __future__ import annotations

import datetime as dt
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import FINDINGS, HINTS, OK, REPAIRED, epilog
from cxlfs.cli.output import Output, Report, quote
from cxlfs.cli.progress import Progress
from cxlfs.cli.source import media_of
from cxlfs.cli.target import OPEN_EXIT_CODES, served_by
from cxlfs.cli.verify_reports import (
    FindingReport,
    PassReport,
    RemainingReport,
    RepairReport,
    Summary,
    Undone,
)
from cxlfs.control.client import control_request
from cxlfs.control.discovery import Registration
from cxlfs.errors import (
    BusyError,
    CorruptionError,
    CxlfsError,
    DirectoryAbsentError,
    ManifestError,
    NotACxlfsError,
    NotInspectableError,
    SavedCopyError,
    UsageError,
)
from cxlfs.format import superblock
from cxlfs.media import Media, signatures
from cxlfs.store import Store
from cxlfs.verify import (
    ERROR,
    PASSES,
    Finding,
    finding_from_dict,
    progress_from_dict,
    run_passes,
    run_steps,
)
from cxlfs.verify import Progress as PassProgress
from cxlfs.verify.record import Recorder
from cxlfs.verify.repair import apply, plan
from cxlfs.verify.repair import undo as undo_repair

NOT_MOUNTED = "it is not mounted, and was only read (--record writes the outcome into it)"
_INSIDE_EXIT_CODES = tuple(
    error.exit_code for error in (NotInspectableError, ManifestError, DirectoryAbsentError)
)
_DATA_PASSES = frozenset(each.id for each in PASSES if each.data)

HELP = """Check the store on SOURCE, or the one mounted on MOUNTPOINT: first every structure, then
every byte of file data against its checksum.

Each finding names the structure, where it lies on the media, and the inode and path that it
belongs to. Nothing is changed, and a mounted store goes on working, unless --repair is given: it
restores structures that have a good second copy, says first what it will do, and keeps a copy of
everything it changes, which --undo puts back. File data has no second copy: delete a damaged file,
or save it again.

A mounted store remembers the outcome, and "cxlfs status" and "cxlfs list" show it until the damage
is gone. One that is not mounted is only read; with --record it is opened as by a mount, and the
outcome is written into it.

Two options check checkpoints instead, in any directory, on a store or not. --manifest FILE compares
the files in DIR with a manifest, every byte, and names the tensors that differ (exit code 3);
--public-key says who must have signed it. --deep PATH looks at a checkpoint, or at all in a
directory from the oldest on: it compares the checksums of their formats (exit code 3), and gives
hints of damage that no checksum finds: NaN, Inf, and changes of a tensor ten times as large as ever
before (exit code 5). A hint proves nothing.

\b
Examples:
  cxlfs verify /mnt/ckpt
  cxlfs verify /dev/dax0.0 --structure-only
  cxlfs verify /dev/dax0.0 --repair
  cxlfs verify /dev/dax0.0 --undo /var/tmp/dax0.0.saved-20260131T120000Z
  cxlfs verify --manifest step-700.manifest run/step-700
  cxlfs verify --deep run --last 5
"""


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
        self.recorder = Recorder()
        self.not_recorded: str | None = NOT_MOUNTED

    def take(self, steps: Iterable[Finding | PassProgress]) -> None:
        """Report every step as it comes."""
        try:
            for step in steps:
                self.recorder.take(step)
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

    def record(self, media: Media) -> None:
        """Let the store remember what is left; a failure to do so is told, and no failure."""
        if self.repairs:
            self.recorder.repaired(self.remaining)
        try:
            store = Store.open(media)
            try:
                self.recorder.finish(store)
            finally:
                store.close()
        except CxlfsError as error:
            self.not_recorded = error.message
        else:
            self.not_recorded = None

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
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(FINDINGS, REPAIRED, HINTS, *OPEN_EXIT_CODES, *_INSIDE_EXIT_CODES),
)
@click.argument("target", metavar="SOURCE|MOUNTPOINT|PATH", type=ANY_PATH, required=False)
@click.option("--structure-only", is_flag=True, help="Do not read file data.")
@click.option("--repair", is_flag=True, help="Repair what can be undone from a saved copy.")
@click.option("--record", is_flag=True, help="Write the outcome into a store that is not mounted.")
@click.option("--undo", metavar="SAVED_COPY", type=ANY_PATH, help="Take a repair back.")
@click.option("--manifest", metavar="FILE", type=ANY_PATH, help="Compare PATH with a manifest.")
@click.option("--public-key", metavar="KEY", type=ANY_PATH, help="Check who signed the manifest.")
@click.option("--deep", is_flag=True, help="Look inside the checkpoints at PATH.")
@click.option("--last", metavar="N", type=click.IntRange(1), help="With --deep: the newest N.")
@common_options
def command(
    target: str | None,
    undo: str | None,
    manifest: str | None,
    public_key: str | None,
    last: int | None,
    *,
    deep: bool,
    structure_only: bool,
    repair: bool,
    record: bool,
    as_json: bool,
) -> int:
    """See HELP."""
    output = Output(as_json=as_json)
    if manifest is not None or deep or public_key is not None or last is not None:
        if structure_only or repair or record or undo is not None:
            raise UsageError(
                "--manifest and --deep go with no option that is about a store",
                next_step="see cxlfs verify --help",
            )
        return _inside(target, manifest, public_key, last, output, deep=deep)
    if target is None:
        raise UsageError("name what to check", next_step="cxlfs verify SOURCE, or MOUNTPOINT")
    if undo is not None:
        if structure_only or repair or record:
            raise UsageError("--undo takes no other option", next_step="see cxlfs verify --help")
        output.report(take_back(target, Path(undo)))
        return OK
    return check(target, output, structure_only=structure_only, repair=repair, record=record)


def _inside(
    target: str | None,
    manifest: str | None,
    public_key: str | None,
    last: int | None,
    output: Output,
    *,
    deep: bool,
) -> int:
    """Check checkpoints; the exit code."""
    # Only where they are asked for: formats take a while to load.
    from cxlfs.cli.verify_inside import verify_deep, verify_manifest  # noqa: PLC0415

    if manifest is not None:
        if deep or last is not None:
            raise UsageError("--manifest and --deep are two checks", next_step="run one at a time")
        return verify_manifest(manifest, target, public_key, output)
    if public_key is not None:
        raise UsageError("--public-key goes with --manifest", next_step="see cxlfs verify --help")
    if not deep or target is None:
        raise UsageError("--deep needs a PATH", next_step="cxlfs verify --deep PATH [--last N]")
    return verify_deep(target, last, output)


def take_back(source: str, saved_copy: Path) -> Undone:
    """Put back what a repair has changed. Raises SavedCopyError, and what opening raises."""
    _refuse_mounted(source, served_by(source), "--undo", saved_copy)
    with media_of(source, read_only=False) as media:
        length = undo_repair(media, saved_copy)
    return Undone(
        source=os.fsencode(source),
        saved_copy=os.fsencode(saved_copy),
        length=length,
        next_step=f"cxlfs verify {source}",
    )


def _refuse_mounted(target: str, daemon: Registration | None, *options: object) -> None:
    if daemon is not None:
        words = " ".join(str(option) for option in options)
        raise BusyError(
            f"{target} is mounted, and a mounted store is not repaired",
            next_step=f"cxlfs umount {daemon.mountpoint}; cxlfs verify {daemon.source} {words}",
        )


def check(
    target: str, output: Output, *, structure_only: bool, repair: bool, record: bool | None
) -> int:
    """Check, and repair if asked to; the exit code. ``record``: write the outcome into a store that
    is not mounted; None: do not, and do not mention it. Raises what opening the source raises.
    """
    daemon = served_by(target)
    tally = Tally(output)
    if repair:
        _refuse_mounted(target, daemon, "--repair")
    if daemon is not None:
        tally.take(_ask(daemon, tally, structure_only=structure_only))
        return _conclude(output, tally, target, structure_only=structure_only, daemon=daemon)
    with media_of(target, read_only=not (repair or record)) as media:
        _require_store(media)
        tally.take(run_steps(media, structure_only=structure_only))
        if repair:
            tally.repair(media, target)
        if record:
            tally.record(media)
    says = record is not None
    return _conclude(output, tally, target, structure_only=structure_only, says_unrecorded=says)


def _require_store(media: Media) -> None:
    """Raises NotACxlfsError where there is nothing to check; what is damaged the passes report."""
    try:
        superblock.choose(media)
    except CorruptionError:
        return
    except NotACxlfsError:
        if not signatures.find(media.read, media.size_bytes, signatures.STORES):
            raise


def _ask(
    daemon: Registration, tally: Tally, *, structure_only: bool
) -> Iterator[Finding | PassProgress]:
    tally.not_recorded = "its daemon is of a version that does not"
    messages = control_request(daemon.mountpoint, "verify", {"structure_only": structure_only})
    for message in messages:
        if message["message_type"] == "finding":
            yield finding_from_dict(message)
        elif message["message_type"] == "recorded":
            reason = message.get("reason")
            tally.not_recorded = None if reason is None else str(reason)
        else:
            yield progress_from_dict(message)


def _conclude(
    output: Output,
    tally: Tally,
    target: str,
    *,
    structure_only: bool,
    daemon: Registration | None = None,
    says_unrecorded: bool = True,
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
        recorded=tally.not_recorded is None,
        not_recorded=tally.not_recorded if says_unrecorded else None,
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
