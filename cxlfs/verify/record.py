"""Telling a store how a verify of it ended, so that the next mount still knows.

Never here: what is remembered, and where (``store.health``); looking for damage.

Invariants
- A run that did not come to its end is not recorded.
- Files are called good again only by a run that read all file data, and only for damage that was
  known before it began.
"""

from __future__ import annotations

import time

from cxlfs.store import Store
from cxlfs.store.health import VerifyOutcome
from cxlfs.verify.data_pass import KEPT_ASIDE
from cxlfs.verify.findings import ERROR, Finding, Progress
from cxlfs.verify.passes import PASSES

_DATA_PASSES = frozenset(each.id for each in PASSES if each.data)
_NEEDS_NOTHING = frozenset({"data-unused-damaged"})
"""Findings about data that nothing can be done about, and that no file has."""


class Recorder:
    """Follows one run; ``store``: the open store, or None when it is opened later to record."""

    def __init__(self, store: Store | None = None) -> None:
        self._known_at = 0 if store is None else store.health.sightings
        self._findings: list[Finding] = []
        self._skipped = False
        self._read_all_data = False

    def take(self, step: Finding | Progress) -> None:
        """What the run says, in its order."""
        if isinstance(step, Finding):
            self._findings.append(step)
        elif step.finished:
            self._skipped = self._skipped or step.skipped is not None
            if step.pass_id in _DATA_PASSES:
                self._read_all_data = step.skipped is None

    def repaired(self, remaining: list[Finding]) -> None:
        """These are what a repair has left of the findings."""
        self._findings = list(remaining)

    def finish(self, store: Store) -> VerifyOutcome:
        """The run came to its end: write it into the store. Durable when it returns.

        Raises ReadOnlyError, NoSpaceError, MediaError.
        """
        damaged = self._damaged(store)
        for ino in damaged:
            store.health.seen(store.namespace.inodes[ino])
        if self._read_all_data:
            store.health.found_good(known_at=self._known_at, except_inos=damaged)
        outcome = outcome_of(
            self._findings, structure_only=not self._read_all_data, complete=not self._skipped
        )
        store.health.verified(outcome)
        return outcome

    def _damaged(self, store: Store) -> set[int]:
        """Files that a reader finds damaged, and that are still there."""
        inos = {
            use.ino
            for finding in self._findings
            if finding.pass_id in _DATA_PASSES
            for use in finding.uses
            if use.version != KEPT_ASIDE
        }
        return inos & store.namespace.inodes.keys()


def outcome_of(findings: list[Finding], *, structure_only: bool, complete: bool) -> VerifyOutcome:
    """What a store remembers of a run that ended just now with ``findings``."""
    counted = [f for f in findings if f.id not in _NEEDS_NOTHING]
    structure = [f for f in counted if f.pass_id not in _DATA_PASSES]
    errors = sum(f.severity == ERROR for f in findings)
    return VerifyOutcome(
        ended_ns=time.time_ns(),
        structure_only=structure_only,
        complete=complete,
        errors=errors,
        warnings=len(findings) - errors,
        structure_findings=len(structure),
        kinds=tuple(dict.fromkeys(f.id for f in (structure or counted))),
    )
