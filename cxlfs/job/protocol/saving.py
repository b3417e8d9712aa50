"""One rank's part in saving one step of the whole job.

    PREPARE from rank 0 -> save, replicate, manifest -> votes of all -> record -> all recorded?
        -> collect

That all have voted for one attempt is the commit; no coordinator decides it or writes it down. So a
rank that has voted and did not hear all the others may say neither that it is committed nor that it
is not: that is ``Undecided``. What one rank could not do is a vote against it, and as each rank
votes once in an attempt, one vote against it settles that it never will be committed.

Never: removes anything older before every rank has recorded the commit, or anything of an attempt
that might be committed.
"""

from __future__ import annotations

from cxlfs.job.protocol.machine import (
    Action,
    Collect,
    Discard,
    Done,
    Failed,
    Machine,
    Place,
    RecordCommit,
    Replicate,
    Save,
    WriteManifest,
)
from cxlfs.job.protocol.messages import Body, Prepare, Recorded, Vote
from cxlfs.job.protocol.model import Aborted, Attempt, Committed, Undecided, digest_of

_Missing = tuple[int, ...]


class Saving(Machine):
    """``attempt``: what this rank means to save; the id of rank 0's counts. ``refusal``: why this
    rank cannot vote for any (its medium is volatile), or empty.
    """

    def __init__(
        self, place: Place, attempt: Attempt, *, replicas: int = 1, refusal: str = ""
    ) -> None:
        super().__init__(place)
        self.attempt = attempt
        self.replicas = replicas
        self.refusal = refusal
        self._begun: Attempt | None = None
        self._digest = ""
        self._is_cleaned = False

    def _begin(self) -> Action:
        leads = self.place.rank == 0
        body = Prepare(self.attempt, self.place.world) if leads else None
        return self._gather("prepare", body, self._prepare, from_rank_0=True)

    def _prepare(self, heard: dict[int, Body], missing: _Missing) -> Action:
        prepare = heard.get(0)
        if missing or not isinstance(prepare, Prepare):
            return self._vote("", "PREPARE was not heard before the deadline")
        self._begun = prepare.attempt
        refusal = self._disagreement(prepare) or self.refusal
        return self._vote("", refusal) if refusal else Save(self._begun)

    def _disagreement(self, prepare: Prepare) -> str:
        mine, its = self.attempt, prepare.attempt
        if (its.step, its.number) != (mine.step, mine.number):
            return (
                f"rank 0 saves step {its.step} with number {its.number}, "
                f"this rank step {mine.step} with number {mine.number}"
            )
        if prepare.world != self.place.world:
            return f"rank 0 counts {prepare.world} ranks, this one {self.place.world}"
        return ""

    def _proceed(self, event: Done | Failed) -> Action | None:
        action = event.action
        if isinstance(action, Save | Replicate | WriteManifest):
            return self._saved(action, event)
        if isinstance(action, RecordCommit):
            body = Recorded(action.attempt, durable=isinstance(event, Done))
            return self._gather("recorded", body, self._recorded)
        if isinstance(action, Collect):
            self._committed(is_cleaned=isinstance(event, Done))
        return None  # Discard: the outcome is there

    def _saved(self, action: Save | Replicate | WriteManifest, event: Done | Failed) -> Action:
        if isinstance(event, Failed):
            return self._vote("", event.reason)
        if isinstance(action, Save) and self.replicas > 1:
            return Replicate(action.attempt)
        if not isinstance(action, WriteManifest):
            return WriteManifest(action.attempt, self.place.world)
        return self._vote(str(event.value), "")

    # --- votes ------------------------------------------------------------------------------

    def _vote(self, manifest: str, reason: str) -> Action:
        return self._gather("vote", Vote(self._begun, manifest, reason), self._voted)

    def _voted(self, heard: dict[int, Body], missing: _Missing) -> Action | None:
        votes = {rank: self._reading(body) for rank, body in heard.items()}
        against = {rank: vote.reason for rank, vote in votes.items() if not vote.manifest}
        if against:
            self._finish(Aborted(self.attempt.step, tuple(sorted(against.items()))))
            return Discard(self._begun) if self._begun is not None else None
        if missing or self._begun is None:
            self._finish(Undecided("vote", missing))
            return None
        manifests = [votes[rank].manifest for rank in range(self.place.world)]
        self._digest = digest_of(manifests)
        return RecordCommit(self._begun, self._digest)

    def _reading(self, body: Body) -> Vote:
        """A vote for another attempt is none for this one."""
        if not isinstance(body, Vote):
            return Vote(None, "", "another message instead of a vote")
        if body.manifest and body.attempt != self._begun:
            return Vote(body.attempt, "", f"a vote for {body.attempt}")
        return body

    # --- after the commit -------------------------------------------------------------------

    def _recorded(self, heard: dict[int, Body], missing: _Missing) -> Action | None:
        bodies = heard.values()
        durable = all(isinstance(body, Recorded) and body.durable for body in bodies)
        if missing or not durable or self._begun is None:
            self._committed(is_cleaned=False)
            return None
        return Collect(self._begun)

    def _committed(self, *, is_cleaned: bool) -> None:
        if self._begun is not None:
            self._finish(Committed(self._begun, self._digest, is_cleaned))
