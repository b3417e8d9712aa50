"""``cxlfs keep``: remove checkpoints that no rule keeps.

Other modules decide what is kept (``checkpoint.keep``).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import ClassVar

import click

from cxlfs.checkpoint import Level
from cxlfs.checkpoint.keep import Decision, Rules, Value, decide, remove
from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style, quote
from cxlfs.errors import (
    BusyError,
    NoCheckpointError,
    NoGoodCheckpointError,
    ReadOnlyError,
    UsageError,
)
from cxlfs.units import NANOSECONDS, format_size, parse_duration

HELP = """Remove checkpoints in DIR that no rule keeps.

A checkpoint is kept if at least one rule keeps it. DIR is any directory, on a store or not. On a
store, "cxlfs undelete" brings a checkpoint back until its space is needed. Elsewhere it is gone.

The newest good checkpoint stays in any case, and all of its bytes are read before anything is
removed. So do checkpoints that are not complete, that a tracker (latest and the like) or a symbolic
link names, and that a process writes to.

Hours, days, weeks and months are those of UTC. FILE:KEY names a number in a JSON file of each
checkpoint. KEY may be several keys with dots between them; of a list the last item counts.

\b
Examples:
  cxlfs keep /mnt/ckpt/run1 --last 3 --every 1000
  cxlfs keep /mnt/ckpt/run1 --last 2 --best 3 --lowest trainer_state.json:log_history.eval_loss
  cxlfs keep /mnt/ckpt/run1 --within 1d12h --daily 14 --dry-run
"""


@dataclasses.dataclass(frozen=True, slots=True)
class KeepDecision:
    """One checkpoint, newest first."""

    path: bytes
    step: int | None
    size_bytes: int
    kept: bool
    reasons: tuple[str, ...]

    @classmethod
    def of(cls, decision: Decision) -> KeepDecision:
        found = decision.entry.checkpoint
        return cls(
            os.fsencode(found.path),
            found.step,
            found.size_bytes,
            decision.is_kept,
            decision.reasons,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Kept(Report):
    """What is kept and why, and what is removed."""

    schema: ClassVar[str] = "cxlfs.keep/1"

    directory: bytes
    dry_run: bool
    removed: int
    removed_bytes: int
    checkpoints: tuple[KeepDecision, ...]

    def lines(self, style: Style, /) -> Iterator[str]:
        removed = "would be removed" if self.dry_run else "removed"
        for each in self.checkpoints:
            if each.kept:
                yield f"kept: {quote(each.path)} ({quote(', '.join(each.reasons))})"
            else:
                yield f"{style.warning(removed)}: {quote(each.path)}"
        yield f"{removed}: {self.removed}, {format_size(self.removed_bytes)}"


_COUNT = click.IntRange(min=1)


@click.command(
    "keep",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(
        *(
            e.exit_code
            for e in (
                UsageError,
                NoCheckpointError,
                NoGoodCheckpointError,
                BusyError,
                ReadOnlyError,
            )
        )
    ),
)
@click.argument("directory", metavar="DIR", type=ANY_PATH)
@click.option("--last", metavar="N", type=_COUNT, default=None, help="The last N.")
@click.option(
    "--every", metavar="STEPS", type=_COUNT, default=None, help="Steps that STEPS divides."
)
@click.option("--best", metavar="N", type=_COUNT, default=None, help="The best N by a value.")
@click.option("--lowest", metavar="FILE:KEY", default=None, help="The lowest value is best.")
@click.option("--highest", metavar="FILE:KEY", default=None, help="The highest value is best.")
@click.option("--hourly", metavar="N", type=_COUNT, default=None, help="One of each of N hours.")
@click.option("--daily", metavar="N", type=_COUNT, default=None, help="One of each of N days.")
@click.option("--weekly", metavar="N", type=_COUNT, default=None, help="One of each of N weeks.")
@click.option("--monthly", metavar="N", type=_COUNT, default=None, help="One of each of N months.")
@click.option(
    "--within",
    metavar="DURATION",
    default=None,
    help="All that are not older than DURATION before the newest good one.",
)
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be done, and remove nothing.")
@common_options
def command(
    directory: str,
    *,
    lowest: str | None,
    highest: str | None,
    within: str | None,
    dry_run: bool,
    as_json: bool,
    **counts: int | None,
) -> None:
    """See HELP."""
    if lowest is not None and highest is not None:
        raise UsageError("--lowest and --highest exclude each other", next_step="give one of them")
    text = lowest if lowest is not None else highest
    rules = Rules(
        value=None if text is None else Value.parse(text, is_highest_best=lowest is None),
        within_ns=0 if within is None else int(parse_duration(within) * NANOSECONDS),
        **{name: count or 0 for name, count in counts.items()},
    )
    decisions = decide(directory, rules, Level.CONTENT)
    gone = [each for each in decisions if not each.is_kept] if dry_run else list(remove(decisions))
    Output(as_json=as_json).report(
        Kept(
            directory=os.fsencode(directory),
            dry_run=dry_run,
            removed=len(gone),
            removed_bytes=sum(each.entry.checkpoint.size_bytes for each in gone),
            checkpoints=tuple(KeepDecision.of(each) for each in decisions),
        )
    )
