"""``cxlfs good``: the newest checkpoint in a directory that is complete and verified.

Never here: what a checkpoint is (``checkpoint``).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import ClassVar

import click

from cxlfs.checkpoint import (
    FAILED_RESUMES_MAX,
    By,
    Entry,
    Level,
    Retargeted,
    State,
    Suspect,
    astray,
    catalogue,
    failed_resumes,
    good,
    newer_by,
    suspect_of,
)
from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.directory import DIRECTORY_EXIT_CODES, first_start, plain_option
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style, quote, time_or_none
from cxlfs.errors import NoCheckpointError, NoGoodCheckpointError, SuspectCheckpointError

HELP = """Print the path of the newest checkpoint in DIR that is complete and verified.

DIR is any directory, on a store or not. On a store the newest is what was committed last.
Elsewhere it is what had come farthest, as the content of every checkpoint says (its step), or else
what was written last; where nothing but names is left, a warning says so. Every byte of the
candidate is read, and every checksum compared that its format has; on a store reading is itself a
verification. Newer ones that are not good are named on stderr, and trackers (latest and the like)
that name one which is not there or not good. Nothing is changed.

Only exit code 22 means a first start: DIR is there, on a store that answers, and no checkpoint is
in it. Where DIR is meant to be on no store, --plain says so; without it an empty directory there
means that nothing is mounted (36).

On a cxlfs mount the newest good one is suspect when programs that had opened it failed three times
(--suspect-after) and nothing newer was saved: a checkpoint that kills its job, perhaps. That is
said on stderr; with --suspect skip the one before it is printed instead, with --suspect refuse
nothing, and the exit code is 24.

\b
Examples:
  cxlfs good /mnt/ckpt/run1
  train.py --resume "$(cxlfs good /mnt/ckpt/run1)"
  train.py --resume "$(cxlfs good /mnt/ckpt/run1 --suspect skip)"
  cxlfs good /nfs/run1 --plain
  cxlfs good run1; case $? in 0) resume;; 22) first_start;; *) ask_somebody;; esac
"""

_NOTES_MAX = 5
"""Lines on stderr about what could not be looked into; --json has them all."""


@dataclasses.dataclass(frozen=True, slots=True)
class PassedOver:
    """A newer one that is not good."""

    path: bytes
    state: str
    reason: str | None

    @classmethod
    def of(cls, entry: Entry, suspect: Suspect | None) -> PassedOver:
        found = entry.checkpoint
        if suspect is not None and entry is suspect.entry:
            return cls(os.fsencode(found.path), "suspect", suspect.words.partition(": ")[2])
        return cls(os.fsencode(found.path), found.state.value, found.reason)


@dataclasses.dataclass(frozen=True, slots=True)
class Astray:
    """A tracker that names a checkpoint which is not there, or not good."""

    name: str
    target: str | None

    @classmethod
    def of(cls, found: Retargeted) -> Astray:
        return cls(found.name, found.old)

    def words(self, passed_over: tuple[PassedOver, ...]) -> str:
        if self.target is None:
            return "it names nothing"
        names = {os.path.basename(each.path) for each in passed_over}  # noqa: PTH119  bytes
        what = "good" if os.fsencode(self.target) in names else "there"
        return f"it names {self.target}, which is not {what}"


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
    failed_resumes: int
    suspect: bool
    before: bytes | None
    """Of one that is suspect: the newest complete one before it."""
    newest_by: str | None
    """What tells it from the next one: commit, step, time or name; None: there is no other."""
    passed_over: tuple[PassedOver, ...]
    astray: tuple[Astray, ...]
    """Trackers with which a framework's own resume would fail."""

    @classmethod
    def of(
        cls,
        entry: Entry,
        suspect: Suspect | None,
        passed_over: tuple[PassedOver, ...],
        trackers: tuple[Astray, ...],
        newest_by: By | None,
    ) -> Good:
        found = entry.checkpoint
        is_suspect = suspect is not None and suspect.entry.path == entry.path
        before = suspect.before if suspect is not None and is_suspect else None
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
            failed_resumes=failed_resumes(found),
            suspect=is_suspect,
            before=None if before is None else os.fsencode(before.path),
            newest_by=None if newest_by is None else newest_by.value,
            passed_over=passed_over,
            astray=trackers,
        )

    def lines(self, style: Style, /) -> Iterator[str]:
        # A program gets the path as it is, a terminal what does not steer it.
        yield os.fsdecode(self.path) if style.width is None else quote(self.path)


@click.command(
    "good",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(
        NoCheckpointError.exit_code,
        NoGoodCheckpointError.exit_code,
        SuspectCheckpointError.exit_code,
        *DIRECTORY_EXIT_CODES,
    ),
)
@click.argument("directory", metavar="DIR", type=ANY_PATH)
@click.option("--structure-only", is_flag=True, help="Read headers and sizes, not the tensors.")
@click.option(
    "--suspect",
    "choice",
    type=click.Choice(["use", "skip", "refuse"]),
    default="use",
    help="What to do with a newest one that is suspect: print it, the one before it, or fail.",
)
@click.option(
    "--suspect-after",
    type=click.IntRange(min=0),
    default=FAILED_RESUMES_MAX,
    metavar="N",
    help=f"From how many failures on it is ({FAILED_RESUMES_MAX}); 0: never.",
)
@plain_option
@common_options
def command(
    directory: str,
    choice: str,
    suspect_after: int,
    *,
    structure_only: bool,
    plain: bool,
    as_json: bool,
) -> None:
    """See HELP."""
    output = Output(as_json=as_json)
    level = Level.STRUCTURE if structure_only else Level.CONTENT
    with first_start(directory, plain=plain):
        entries = catalogue(directory)
        _report(output, directory, entries, level, choice, suspect_after)


def _report(
    output: Output,
    directory: str,
    entries: tuple[Entry, ...],
    level: Level,
    choice: str,
    suspect_after: int,
) -> None:
    suspect = suspect_of(entries, failed_max=suspect_after)
    skip = suspect.entry if suspect is not None and choice == "skip" else None
    if suspect is not None and choice == "skip" and suspect.before is None:
        raise _refused(suspect)
    entry, passed_over = good(directory, level, entries, skip=skip)
    if suspect is not None and entry.path == suspect.entry.path:
        if choice == "refuse":
            raise _refused(suspect)
        output.warning(f"{quote(suspect.entry.checkpoint.path)} is {quote(suspect.words)}")
    over = tuple(PassedOver.of(each, suspect) for each in passed_over)
    for each in over:
        words = each.state if each.reason is None else f"{each.state}: {each.reason}"
        output.warning(f"{quote(each.path)} is {quote(words)}")
    for note in entry.checkpoint.notes[:_NOTES_MAX]:
        output.warning(f"{quote(entry.checkpoint.path)}: {quote(note)}")
    known = {each.path: each for each in (*passed_over, entry)}
    looked_at = [known.get(each.path, each) for each in entries]
    trackers = tuple(map(Astray.of, astray(directory, entry, looked_at)))
    for tracker in trackers:
        path = quote(os.path.join(directory, tracker.name))  # noqa: PTH118  as the user wrote it
        output.warning(f"{path}: {quote(tracker.words(over))} (cxlfs tidy puts it right)")
    newest_by = _newest_by(entries, entry)
    if newest_by is By.NAME:
        words = "only by its name: neither commits, contents nor times say which is newest"
        output.warning(f"{quote(entry.checkpoint.path)} is the newest {words}")
    output.report(Good.of(entry, suspect, over, trackers, newest_by))


def _newest_by(entries: Sequence[Entry], newest: Entry) -> By | None:
    """What tells it from the next complete one."""
    paths = [each.path for each in entries]
    older = entries[paths.index(newest.path) + 1 :]
    following = next((each for each in older if each.checkpoint.state is State.COMPLETE), None)
    return None if following is None else newer_by(newest, following)


def _refused(suspect: Suspect) -> SuspectCheckpointError:
    return SuspectCheckpointError(
        f"{suspect.entry.checkpoint.path} is {suspect.words}",
        next_step=None
        if suspect.before is not None
        else "look at what the job says when it ends; --suspect use prints it all the same",
    )
