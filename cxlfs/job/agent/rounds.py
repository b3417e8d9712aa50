"""What the agents of an Orbax job tell each other in a round, and what follows from it: pure.

Rank 0 hears all, decides, and tells the others; all do the same.

Invariants
- A job is answered when every node asks. One that asks once more, as its process was slower than an
  older question of it, gets the same answer, as long as nothing was finished since.
- What may go is older than ``keep`` steps that every node has whole.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from cxlfs.errors import JobMessageError
from cxlfs.job.agent.orbax_files import Request, request_of
from cxlfs.plain import Plain, PlainError, fields, number, parse, row, text, truth

STEPS_MAX = 1000
_BYTES_MAX = 1 << 16
_REASON_MAX = 500
NOTHING = "nothing"
"""The answer of a first start."""


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """``asked``: by the job, now; ``saver``: by the last that was answered; ``answered``: the step,
    or NOTHING; empty: not by this agent, or the job has finished a step since. ``steps``: whole,
    newest first; ``has_any``: or not. ``problem``: why this node cannot take part.
    """

    asked: Request | None = None
    saver: Request | None = None
    answered: str = ""
    steps: tuple[int, ...] = ()
    has_any: bool = False
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """``kind``: ``idle``, ``answer`` (the first of ``steps`` that can be kept, else what was kept),
    ``again`` (as before), ``keep`` (the first of ``steps``), ``refuse`` (for ``reason``).
    ``waiting``: nodes whose job has not asked yet. ``floor``: what is before it may go.
    """

    kind: str
    steps: tuple[int, ...] = ()
    has_any: bool = False
    floor: int = 0
    waiting: tuple[int, ...] = ()
    reason: str = ""


def common_steps(reports: Sequence[Report]) -> tuple[int, ...]:
    """What all have whole, newest first."""
    common = set.intersection(*(set(report.steps) for report in reports))
    return tuple(sorted(common, reverse=True))


def decide(
    reports: Sequence[Report],
    *,
    keep: int,
    kept: int,
    refused: frozenset[int],
    elapsed_seconds: float,
    is_last: bool,
) -> Decision:
    """``reports``: by rank. ``kept``: the newest step that was agreed on, or -1; ``refused``: what
    could not be; ``elapsed_seconds``: since the last was. ``is_last``: there is no other round.
    """
    common = common_steps(reports)
    floor = common[keep - 1] if len(common) >= keep else 0
    problems = [
        f"rank {rank}: {r.problem[:_REASON_MAX]}" for rank, r in enumerate(reports) if r.problem
    ]
    asking = [rank for rank, report in enumerate(reports) if report.asked is not None]
    if asking:
        problems += _contradictions(reports)
        if problems:
            return Decision("refuse", reason="; ".join(problems)[:_REASON_MAX])
        if len(asking) == len(reports):
            has_any = any(report.has_any for report in reports)
            return Decision("answer", common, has_any)
        answered = {report.answered for report in reports}
        if len(answered) == 1 and answered != {""}:
            return Decision("again")
        waiting = tuple(sorted(set(range(len(reports))) - set(asking)))
        return Decision("idle", floor=floor, waiting=waiting)
    open_steps = tuple(step for step in common if step > kept and step not in refused)
    if (
        not problems
        and open_steps
        and (is_last or _is_due(reports, open_steps[0] - kept, elapsed_seconds))
    ):
        return Decision("keep", open_steps[:1], floor=floor)
    return Decision("idle", floor=floor)


def _contradictions(reports: Sequence[Report]) -> list[str]:
    found = []
    jobs = set()
    for rank, report in enumerate(reports):
        for request in filter(None, (report.asked, report.saver)):
            jobs.add(request.job)
        if report.asked is None:
            continue
        if report.asked.nodes != len(reports):
            found.append(f"the job has {report.asked.nodes} nodes, its agents {len(reports)}")
        if report.asked.rank != rank:
            found.append(f"rank {rank}: the process there has number {report.asked.rank}")
    if len(jobs) > 1:
        found.append(f"this directory is that of one job, not of {' and '.join(sorted(jobs))}")
    return list(dict.fromkeys(found))


def _is_due(reports: Sequence[Report], steps: int, elapsed_seconds: float) -> bool:
    savers = [report.saver for report in reports if report.saver is not None]
    if not savers:
        return False
    if savers[0].unit == "steps":
        return steps >= savers[0].interval
    return elapsed_seconds >= savers[0].interval * 60.0


# --- form ---------------------------------------------------------------------------------------


def encode(body: Report | Decision) -> bytes:
    return json.dumps(dataclasses.asdict(body)).encode()


def report_of(data: bytes) -> Report:
    """Raises JobMessageError."""
    try:
        found = _fields(data, Report)
        return Report(
            _request(found["asked"]),
            _request(found["saver"]),
            text(found["answered"]),
            row(found["steps"], number, STEPS_MAX),
            truth(found["has_any"]),
            text(found["problem"]),
        )
    except PlainError as error:
        raise JobMessageError(f"what an agent has: {error}") from None


def decision_of(data: bytes) -> Decision:
    """Raises JobMessageError."""
    try:
        found = _fields(data, Decision)
        return Decision(
            text(found["kind"]),
            row(found["steps"], number, STEPS_MAX),
            truth(found["has_any"]),
            number(found["floor"]),
            row(found["waiting"], number, _BYTES_MAX),
            text(found["reason"]),
        )
    except PlainError as error:
        raise JobMessageError(f"what the agents do: {error}") from None


def _fields(data: bytes, kind: type[Report | Decision]) -> dict[str, Plain]:
    names = tuple(field.name for field in dataclasses.fields(kind))
    return fields(parse(data, _BYTES_MAX), names)


def _request(plain: Plain) -> Request | None:
    return None if plain is None else request_of(plain)
