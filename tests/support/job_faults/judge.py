"""What must hold of a job whose processes, stores and messages go wrong, judged from what each rank
saw (docs/job.md, "What must hold"): from outside, by other code than the job's own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.support.job_faults.ranks import Start

Attempt = tuple[int, int, str]
LOST = {"NotRestoredError", "NotWholeError"}
"""What a start raises that cannot have what was committed."""
ERRORS = {"UndecidedError", "AbortedError", "JobLinkError", *LOST}


class BrokenError(AssertionError):
    """A promise is."""


@dataclasses.dataclass
class Judge:
    """Of one life of a job. ``lost[a]``: nodes whose part of that attempt, which somebody was told
    is committed, may be gone; ``below``: the number of the newest attempt that is in the tier.
    """

    replicas: int
    below: int = 0
    saved: dict[tuple[str, int], set[str]] = dataclasses.field(default_factory=dict)
    lost: dict[Attempt, set[int]] = dataclasses.field(default_factory=dict)

    def lose(self, node: int) -> None:
        for nodes in self.lost.values():
            nodes.add(node)

    def mended(self) -> None:
        """What was lost of the newest that is safe lies in its stores again."""
        safe = self.newest_safe()
        if safe is not None:
            self.lost[safe].clear()

    def newest_safe(self) -> Attempt | None:
        safe = [a for a, nodes in self.lost.items() if len(nodes) < self.replicas]
        return max(safe, default=None)

    def judge(self, start: Start, *, errors: set[str]) -> list[list[dict[str, Any]]]:
        """``errors``: what may be raised. Returns what the ranks were told. Raises BrokenError."""
        rows = [start.told(rank) for rank in range(start.world)]
        for rank, row in enumerate(rows):
            for line in row:
                self._line(rank, line, errors)
        self._restored([next(_of(row, "restored"), None) for row in rows])
        outcomes = [list(_of(row, "outcome")) for row in rows]
        for call in range(max(map(len, outcomes), default=0)):
            self._verdicts([row[call] for row in outcomes if len(row) > call])
        return rows

    def _line(self, rank: int, line: dict[str, Any], errors: set[str]) -> None:
        if line["kind"] == "saving":
            self.saved.setdefault((line["attempt"], rank), set()).add(line["sha256"])
        elif line["kind"] == "loaded":
            if {line["sha256"]} != self.saved.get((line["attempt"], line["part"])):
                raise BrokenError(f"rank {rank} loaded what was not saved: {line}")
        elif line["kind"] == "failed" or (
            line["kind"] == "raised" and line["error"] not in ERRORS | errors
        ):
            raise BrokenError(f"rank {rank}: {line}")

    def _restored(self, rows: list[dict[str, Any] | None]) -> None:
        found = [row for row in rows if row is not None]
        told = {(str(row.get("attempt")), row.get("digest")) for row in found}
        if len(told) > 1:
            raise BrokenError(f"ranks resume differently: {found}")
        safe = self.newest_safe()
        for row in found:
            number = row["attempt"][0] if "attempt" in row else 0
            if row["outcome"] == "Nothing" and self.lost:
                raise BrokenError(f"it begins anew, though {max(self.lost)} was committed")
            if safe is not None and number < safe[0]:
                raise BrokenError(f"{safe} was committed, and {row} is restored")
            if number < self.below:
                raise BrokenError(f"{self.below} is in the tier, and {row} is restored")

    def _verdicts(self, rows: list[dict[str, Any]]) -> None:
        kinds = {row["outcome"] for row in rows}
        if len(kinds) > 1:
            raise BrokenError(f"verdicts differ: {rows}")
        told = {(tuple(row["attempt"]), row["digest"]) for row in rows if "attempt" in row}
        if len(told) > 1:
            raise BrokenError(f"others were committed: {rows}")
        for attempt, _ in told:
            self.lost.setdefault(attempt, set())

    def judge_quiet(self, start: Start) -> bool:
        """Nothing goes wrong in it. False: too much was lost before, as its ranks say."""
        rows = self.judge(start, errors=set())
        raised = [next(_of(row, "raised"), None) for row in rows]
        if any(raised):
            names = {line["error"] if line else "" for line in raised}
            is_safe = self.newest_safe() is not None or self.below
            if not names <= LOST or is_safe:
                raise BrokenError(f"without a fault: {raised}, {self.newest_safe()} is safe")
            return False
        for row in rows:
            outcomes = list(_of(row, "outcome"))
            kinds = [(line["outcome"], line.get("is_cleaned")) for line in outcomes]
            if kinds != [("Committed", True)] * start.saves:
                raise BrokenError(f"without a fault: {outcomes}")
        for seat in start.seats:
            kept = sorted(path.name for path in seat.glob("step-*"))
            unfinished = [str(path) for path in seat.glob("step-*/rank-*.tmp")]
            waiting = 2 if start.tier else 0  # what is on its way there stays
            if start.saves and (len(kept) > start.keep + waiting or unfinished):
                raise BrokenError(f"{seat.name} keeps {kept}, {unfinished}")
        return True


def _of(row: list[dict[str, Any]], kind: str) -> Any:
    return (line for line in row if line["kind"] == kind)
