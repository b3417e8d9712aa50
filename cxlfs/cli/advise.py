"""``cxlfs advise``: how often a job should save, and what its failures cost.

Never here: the model (``job.advice``), the trial of a save (``job.trial``).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, TypeVar

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style, columns, quote
from cxlfs.cli.progress import Progress
from cxlfs.errors import NoCheckpointError, UsageError
from cxlfs.job import advice
from cxlfs.job.advice import Costs
from cxlfs.job.trial import Trial, try_save
from cxlfs.units import NANOSECONDS, format_duration, format_size, parse_duration, parse_size

HELP = """Say how often a job should save, what share of its time is training then, and what a
failure costs.

The mean time between failures is that of the whole job (--mtbf), or that of one node and how many
there are (--node-mtbf, --nodes). A save takes --save until it counts, and training stands still for
--stall of that (all of it unless given: a blocking save). The model, and what it leaves out:
docs/advice.md.

With DIR, a directory of checkpoints, the interval of those that are there is compared. With --try
a file as large as the newest of them (--size: of so many bytes) is saved there, read and removed:
the time that took stands for --save and is added to --restart.

Durations are written like 850ms, 1.5s, 20min, 2h07m or 54d.

\b
Examples:
  cxlfs advise --mtbf 3.9h --save 20min --restart 10min --every 30min
  cxlfs advise --nodes 100 --node-mtbf 16d --save 1s --stall 0.1s --restart 2min
  cxlfs advise /mnt/ckpt/run1 --try --nodes 100 --node-mtbf 16d
"""


def _duration(text: str) -> float:
    return _parsed(parse_duration, text)


def _size(text: str) -> int:
    return _parsed(parse_size, text)


_Number = TypeVar("_Number", int, float)


def _parsed(parse: Callable[[str], _Number], text: str) -> _Number:
    try:
        return parse(text)
    except UsageError as error:
        raise click.BadParameter(f"{error.message} ({error.next_step})") from None


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What comes of saving every so often."""

    name: str
    """``best``, ``given`` (--every) or ``found`` (in DIR)."""
    interval_seconds: float
    training: float
    overhead: float
    stalls: float
    redone: float
    restarts: float
    failure_restart_seconds: float
    failure_redone_seconds: float
    failure_redone_seconds_max: float

    @classmethod
    def of(cls, name: str, costs: Costs, interval_seconds: float) -> Plan:
        found = advice.shares(costs, interval_seconds)
        failure = advice.failure(costs, interval_seconds)
        return cls(
            name,
            interval_seconds,
            **dataclasses.asdict(found),
            failure_restart_seconds=failure.restart_seconds,
            failure_redone_seconds=failure.redone_seconds,
            failure_redone_seconds_max=failure.redone_seconds_max,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Advice(Report):
    """How often, and what comes of it."""

    schema: ClassVar[str] = "cxlfs.advise/1"

    nodes: int | None
    mtbf_seconds: float
    save_seconds: float
    stall_seconds: float
    restart_seconds: float
    overhead: float
    young_seconds: float
    daly_seconds: float
    saxena_seconds: float
    plans: tuple[Plan, ...]
    directory: bytes | None
    checkpoints: int
    size_bytes: int | None
    load_seconds: float | None

    def lines(self, style: Style, /) -> Iterator[str]:
        yield from columns(self._rows(style))

    def _rows(self, style: Style) -> Iterator[tuple[str, str]]:
        nodes = "" if self.nodes is None else f"{self.nodes} nodes, "
        yield "job", f"{nodes}a failure every {format_duration(self.mtbf_seconds)} on average"
        yield "save", f"{format_duration(self.save_seconds)}, {self._standstill()}"
        if self.load_seconds is not None and self.size_bytes is not None:
            load = format_duration(self.load_seconds)
            yield "tried", f"{format_size(self.size_bytes)} in DIR; loading took {load}"
        best, *others = self.plans
        others_say = ", ".join(
            f"{name} {format_duration(seconds)}"
            for name, seconds in (
                ("Young", self.young_seconds),
                ("Daly", self.daly_seconds),
                ("Saxena", self.saxena_seconds),
            )
        )
        every = style.strong(f"every {format_duration(best.interval_seconds)}")
        yield "best", f"{every} ({others_say})"
        yield from _plan_rows(best)
        for plan in others:
            yield plan.name, f"every {format_duration(plan.interval_seconds)}"
            yield from _plan_rows(plan)
        seconds = f"{best.interval_seconds:.{0 if best.interval_seconds >= 10 else 3}f}"
        yield "next", f"due = cxlfs.job.every(seconds={seconds}): docs/job.md"

    def _standstill(self) -> str:
        if self.stall_seconds == self.save_seconds:
            return "while training stands still"
        return f"of which training stands still for {format_duration(self.stall_seconds)}"


def _plan_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    shares = {
        "standing still": plan.stalls,
        "done again": plan.redone,
        "starting again": plan.restarts,
        "other things": plan.overhead,
    }
    losses = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    yield "training", f"{plan.training:.1%} of the time; {losses}"
    restart, redone, most = map(
        format_duration,
        (
            plan.failure_restart_seconds,
            plan.failure_redone_seconds,
            plan.failure_redone_seconds_max,
        ),
    )
    yield "a failure", f"costs {restart} to start again, {redone} to do again ({most} at most)"


@click.command(
    "advise",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(NoCheckpointError.exit_code),
)
@click.argument("directory", metavar="[DIR]", type=ANY_PATH, required=False)
@click.option(
    "--mtbf",
    type=_duration,
    metavar="DURATION",
    help="Mean time between failures of the whole job.",
)
@click.option(
    "--node-mtbf",
    type=_duration,
    metavar="DURATION",
    help="Mean time between failures of one node.",
)
@click.option("--nodes", type=click.IntRange(1, 10**7), help="How many nodes the job has.")
@click.option(
    "--save", type=_duration, metavar="DURATION", help="What a save takes until it counts."
)
@click.option(
    "--stall",
    type=_duration,
    metavar="DURATION",
    help="How long training stands still for it (--save).",
)
@click.option(
    "--restart",
    type=_duration,
    metavar="DURATION",
    default="0",
    show_default=True,
    help="From a failure until training goes on: found, started, loaded.",
)
@click.option(
    "--overhead",
    type=click.FloatRange(0, 100, max_open=True),
    default=0.0,
    metavar="PERCENT",
    help="What else training loses.",
)
@click.option(
    "--every",
    type=_duration,
    metavar="DURATION",
    help="Say of this interval, too, what comes of it.",
)
@click.option("--try", "tries", is_flag=True, help="Time a save in DIR.")
@click.option(
    "--size", type=_size, metavar="SIZE", help="Of so many bytes (those of the newest checkpoint)."
)
@common_options
def command(
    directory: str | None,
    *,
    mtbf: float | None,
    node_mtbf: float | None,
    nodes: int | None,
    save: float | None,
    stall: float | None,
    restart: float,
    overhead: float,
    every: float | None,
    size: int | None,
    tries: bool,
    as_json: bool,
) -> None:
    """See HELP."""
    output = Output(as_json=as_json)
    if mtbf is None:
        mtbf = _of_nodes(node_mtbf, nodes)
    found = None if directory is None else _look(Path(directory))
    trial = None
    if tries:
        trial = _try(output, directory, size, found)
        save = trial.save_seconds if save is None else save
        restart += trial.load_seconds
    if save is None:
        raise UsageError(
            "what does a save take?", next_step="give --save DURATION, or DIR and --try"
        )
    costs = Costs(mtbf, save, save if stall is None else stall, restart, overhead / 100)
    plans = [Plan.of("best", costs, advice.best_interval(costs))]
    if every is not None:
        plans.append(Plan.of("given", costs, every))
    if found is not None and found.interval_seconds is not None:
        if found.interval_seconds >= costs.save_seconds:
            plans.append(Plan.of("found", costs, found.interval_seconds))
        else:
            between = format_duration(found.interval_seconds)
            output.warning(f"the checkpoints in DIR are {between} apart, less than a save takes")
    size_of = trial if trial is not None else found
    output.report(
        Advice(
            nodes=nodes,
            **dataclasses.asdict(costs),
            young_seconds=advice.young(costs),
            daly_seconds=advice.daly(costs),
            saxena_seconds=advice.saxena(costs),
            plans=tuple(plans),
            directory=None if directory is None else os.fsencode(directory),
            checkpoints=0 if found is None else found.count,
            size_bytes=None if size_of is None else size_of.size_bytes,
            load_seconds=None if trial is None else trial.load_seconds,
        )
    )


def _of_nodes(node_mtbf: float | None, nodes: int | None) -> float:
    if node_mtbf is None or nodes is None:
        raise UsageError(
            "how often does the job fail?",
            next_step="give --mtbf DURATION, or --node-mtbf DURATION and --nodes N",
        )
    return node_mtbf / nodes


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """What lies in DIR: of the newest, its size; between them, the median of the times."""

    count: int
    size_bytes: int | None
    interval_seconds: float | None


def _look(directory: Path) -> _Found:
    # Only where it is asked for: formats take a while to load.
    from cxlfs.checkpoint import catalogue  # noqa: PLC0415

    entries = catalogue(directory)
    times = sorted(entry.written_ns for entry in entries)
    apart = [(late - early) / NANOSECONDS for early, late in itertools.pairwise(times)]
    between = statistics.median(apart) if apart else 0.0
    size = entries[0].checkpoint.size_bytes if entries else None
    return _Found(len(entries), size, between if between > 0 else None)


def _try(output: Output, directory: str | None, size: int | None, found: _Found | None) -> Trial:
    if directory is None or found is None:
        raise UsageError("a save is tried in a directory", next_step="give DIR")
    size = found.size_bytes if size is None else size
    if not size:
        raise NoCheckpointError(
            f"there is no checkpoint in {quote(directory)} to take the size of",
            next_step="give --size, the bytes that one rank saves",
        )
    progress = Progress(output)
    try:
        return try_save(Path(directory), size, progress)
    finally:
        progress.clear()
