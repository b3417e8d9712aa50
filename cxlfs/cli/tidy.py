"""``cxlfs tidy``: set aside what keeps a framework's own resume from working.

Never here: what is set aside, and how (``checkpoint.tidy``).
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from typing import ClassVar

import click

from cxlfs.checkpoint import Level, TidyBelow, plan, require_directory, tidy, undo
from cxlfs.checkpoint.tidy import Plan
from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.directory import DIRECTORY_EXIT_CODES, first_start, plain_option
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style, quote
from cxlfs.errors import (
    BusyError,
    CxlfsError,
    NoCheckpointError,
    NoGoodCheckpointError,
    ReadOnlyError,
    UsageError,
)

HELP = """Set checkpoints in DIR aside that are newer than the newest good one and not complete.

Frameworks resume from the newest checkpoint, finished or not. After this the newest is the one that
"cxlfs good" prints, and trackers (latest, latest_checkpointed_iteration.txt, checkpoint, symbolic
links, Lightning's last.ckpt) that named another one name it. DIR is any directory, on a store or
(--plain) not. Run it before a job, not beside one: it refuses to move what a process is writing to.

Nothing is deleted. What is set aside is renamed to DIR/.cxlfs-aside/TIME (of accelerate to the
directory above), with a list of what was wrong; --undo puts the last of them back. Where no
checkpoint is good they are set aside if all are incomplete (the first save was killed: the job
starts anew); otherwise all stay, and the exit code is 23 or 35.

With --all every directory below DIR that holds checkpoints is tidied, too: what the mount option
"tidy" does with a whole store after a crash.

\b
Examples:
  cxlfs tidy /mnt/ckpt/run1 && torchrun train.py --resume
  cxlfs tidy /mnt/ckpt/run1 --dry-run
  cxlfs tidy /mnt/ckpt/run1 --undo
  cxlfs tidy /mnt/ckpt --all --structure-only
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Aside:
    """A checkpoint that was moved; ``names`` are those in the directory."""

    path: bytes
    names: tuple[bytes, ...]
    state: str
    reason: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class TrackerChange:
    """A file or link that names the checkpoint to resume from. ``old`` null: it named none."""

    name: bytes
    old: bytes | None
    new: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Tidied(Report):
    """What was set aside, or put back."""

    schema: ClassVar[str] = "cxlfs.tidy/1"

    directory: bytes
    action: str
    dry_run: bool
    good: bytes | None
    aside: bytes | None
    checkpoints: tuple[Aside, ...]
    trackers: tuple[TrackerChange, ...]

    @classmethod
    def of(cls, found: Plan, action: str, *, dry_run: bool) -> Tidied:
        return cls(
            directory=os.fsencode(found.directory),
            action=action,
            dry_run=dry_run,
            good=None if found.good is None else os.fsencode(found.good.path),
            aside=None if found.aside is None else os.fsencode(found.aside),
            checkpoints=tuple(
                Aside(
                    os.fsencode(move.path),
                    tuple(os.fsencode(name) for name in move.names),
                    move.state.value,
                    move.reason,
                )
                for move in found.moves
            ),
            trackers=tuple(
                TrackerChange(
                    os.fsencode(tracker.name),
                    None if tracker.old is None else os.fsencode(tracker.old),
                    os.fsencode(tracker.new),
                )
                for tracker in found.retargets
            ),
        )

    def lines(self, style: Style, /) -> Iterator[str]:
        would = "would be " if self.dry_run else ""
        for each in self.checkpoints:
            words = each.state if each.reason is None else f"{each.state}: {each.reason}"
            done = "put back" if self.action == "undo" else "set aside"
            yield f"{style.warning(f'{would}{done}')}: {quote(each.path)}, {quote(words)}"
        for tracker in self.trackers:
            done = "put back" if self.action == "undo" else "rewritten"
            new = quote(tracker.new).splitlines()[0] if self.action != "undo" else ""
            yield f"{would}{done}: {quote(tracker.name)}" + (f", now {new}" if new else "")
        if self.aside is None:
            yield "nothing is in the way"
        elif self.action == "tidy":
            yield f"kept in: {quote(self.aside)}"
        if self.good is not None:
            yield f"newest good: {quote(self.good)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """A directory that could not be tidied."""

    directory: bytes
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class TidiedAll(Report):
    """What became of a directory and all below it."""

    schema: ClassVar[str] = "cxlfs.tidy_all/1"

    directory: bytes
    dry_run: bool
    directories: int
    with_checkpoints: int
    checkpoints: int
    trackers: int
    failed: tuple[Failed, ...]
    left_out: str | None
    seconds: float

    def lines(self, style: Style, /) -> Iterator[str]:
        for each in self.failed:
            yield f"{style.bad('not tidied')}: {quote(each.directory)}: {quote(each.message)}"
        if self.left_out is not None:
            yield f"{style.bad('not all was looked at')}: {self.left_out}"
        would = "would be " if self.dry_run else ""
        yield (
            f"{self.checkpoints} {would}set aside and {self.trackers} trackers {would}rewritten; "
            f"{self.with_checkpoints} of {self.directories} directories hold checkpoints"
        )


@click.command(
    "tidy",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(
        BusyError.exit_code,
        ReadOnlyError.exit_code,
        NoCheckpointError.exit_code,
        NoGoodCheckpointError.exit_code,
        *DIRECTORY_EXIT_CODES,
    ),
)
@click.argument("directory", metavar="DIR", type=ANY_PATH)
@click.option("--dry-run", "-n", is_flag=True, help="Say what would be done, and change nothing.")
@click.option("--undo", "take_back", is_flag=True, help="Put back what was set aside last.")
@click.option("--structure-only", is_flag=True, help="Read headers and sizes, not the tensors.")
@click.option("--all", "below", is_flag=True, help="Every directory below DIR, too.")
@click.option(
    "--seconds-max",
    type=click.FloatRange(min=0),
    metavar="S",
    help="With --all: begin no directory later than that.",
)
@plain_option
@common_options
def command(
    directory: str,
    seconds_max: float | None,
    *,
    dry_run: bool,
    take_back: bool,
    structure_only: bool,
    below: bool,
    plain: bool,
    as_json: bool,
) -> None:
    """See HELP."""
    output = Output(as_json=as_json)
    level = Level.STRUCTURE if structure_only else Level.CONTENT
    if take_back and structure_only:
        raise UsageError("--undo looks at no checkpoint", next_step="leave --structure-only out")
    if take_back and below:
        raise UsageError("--undo is for one directory", next_step="leave --all out")
    if seconds_max is not None and not below:
        raise UsageError("--seconds-max is for many directories", next_step="give --all, too")
    require_directory(directory)
    if below:
        walk = TidyBelow(directory, level, dry_run=dry_run, seconds_max=seconds_max)
        _tidy_all(output, directory, walk, dry_run=dry_run)
        return
    if take_back:
        output.report(Tidied.of(undo(directory, dry_run=dry_run), "undo", dry_run=dry_run))
        return
    with first_start(directory, plain=plain):
        found = plan(directory, level) if dry_run else tidy(directory, level)
    output.report(Tidied.of(found, "tidy", dry_run=dry_run))
    if found.good is None:
        output.warning("no checkpoint is good: a job that starts now starts from the beginning")


def _tidy_all(output: Output, directory: str, walk: TidyBelow, *, dry_run: bool) -> None:
    """Raises CxlfsError where something is left to do; what was done has been said then."""
    began = time.monotonic()
    done: list[Plan] = []
    failed: list[Failed] = []
    for found in walk:
        if found.plan is None:
            failed.append(Failed(os.fsencode(found.directory), found.problem or ""))
            continue
        done.append(found.plan)
        if found.plan.aside is not None:
            output.report(Tidied.of(found.plan, "tidy", dry_run=dry_run))
            output.flush()
    output.report(
        TidiedAll(
            directory=os.fsencode(directory),
            dry_run=dry_run,
            directories=walk.directories,
            with_checkpoints=len(done) + len(failed),
            checkpoints=sum(len(each.moves) for each in done),
            trackers=sum(len(each.retargets) for each in done),
            failed=tuple(failed),
            left_out=walk.left_out,
            seconds=round(time.monotonic() - began, 6),
        )
    )
    if failed or walk.left_out is not None:
        what = f"{len(failed)} directories could not be tidied" if failed else "not all was done"
        raise CxlfsError(
            f"{what} in {directory}", next_step="run it for each directory that matters"
        )
