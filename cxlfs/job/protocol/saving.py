"""One rank's part in saving one step of the whole job.

    PREPARE from rank 0 -> save -> (all saved? -> copies) -> manifest -> votes of all -> record
        -> all recorded? -> collect

That all have voted for one attempt is the commit; no coordinator decides it or writes it down. So a
rank that has voted and does not know what all others did may say neither that it is committed nor
that it is not: that is ``Undecided``. What one rank could not do is a vote against it, and as each
rank votes once in an attempt, one vote against it settles that it never will be committed. With
copies on other nodes (``replicas`` > 1) all hear first whether all have saved: who waits for the
shards of a rank that has failed would learn of it at the deadline only.

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
from cxlfs.job.protocol.messages import Body, Prepare, Recorded, Saved, Tally, Vote, tally_of
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
        self._has_told = replicas == 1
        self._digest = ""
        self._is_cleaned = False

    def _begin(self) -> Action:
        leads = self.place.rank == 0
        body = Prepare(self.attempt, self.place.world, self.replicas) if leads else None
        return self._gather("prepare", body, self._prepare, from_rank_0=True)

    def _prepare(self, heard: dict[int, Body], missing: _Missing) -> Action:
        prepare = heard.get(0)
        if missing or not isinstance(prepare, Prepare):
            return self._give_up("PREPARE was not heard before the deadline")
        self._begun = prepare.attempt
        self._has_told = prepare.replicas == 1
        refusal = self._disagreement(prepare) or self.refusal
        return self._give_up(refusal) if refusal else Save(self._begun)

    def _disagreement(self, prepare: Prepare) -> str:
        mine, its = self.attempt, prepare.attempt
        if (its.step, its.number) != (mine.step, mine.number):
            return (
                f"rank 0 saves step {its.step} with number {its.number}, "
                f"this rank step {mine.step} with number {mine.number}"
            )
        if prepare.world != self.place.world:
            return f"rank 0 counts {prepare.world} ranks, this one {self.place.world}"
        if prepare.replicas != self.replicas:
            return f"rank 0 makes {prepare.replicas} replicas, this rank {self.replicas}"
        return ""

    def _proceed(self, event: Done | Failed) -> Action | None:
        action = event.action
        if isinstance(action, Save | Replicate | WriteManifest):
            return self._saved(action, event)
        if isinstance(action, RecordCommit):
            body = Recorded(action.attempt, durable=isinstance(event, Done))
            return self._poll("recorded", body, self._recorded, self._decide_cleaning)
        if isinstance(action, Collect):
            self._committed(is_cleaned=isinstance(event, Done))
        return None  # Discard: the outcome is there

    def _saved(self, action: Save | Replicate | WriteManifest, event: Done | Failed) -> Action:
        if isinstance(event, Failed):
            return self._give_up(event.reason)
        if isinstance(action, Save) and self.replicas > 1:
            return self._tell_saved("")
        if not isinstance(action, WriteManifest):
            return WriteManifest(action.attempt, self.place.world)
        return self._vote(str(event.value), "")

    # --- before copies are made -------------------------------------------------------------

    def _tell_saved(self, reason: str) -> Action:
        self._has_told = True
        body = Saved(self._begun, reason)
        return self._poll("saved", body, self._all_saved, self._decide_copying)

    def _all_saved(self, heard: dict[int, Body], missing: _Missing) -> Tally | None:
        failed = {rank: self._why_not(body) for rank, body in heard.items()}
        failed = {rank: reason for rank, reason in failed.items() if reason}
        if missing and not failed:
            if self.place.rank != 0:
                return None
            failed = {0: _not_heard(missing)}  # it never votes for it, and tells all at once
        return tally_of(self._begun, "", failed)

    def _decide_copying(self, tally: Tally) -> Action | None:
        if tally.against:
            return self._abort(tally)
        if self._begun is None or tally.attempt != self._begun:
            return self._uncounted("saved", (0,))
        return Replicate(self._begun)

    def _uncounted(self, phase: str, missing: _Missing) -> Action | None:
        """Who has not voted yet may vote against it."""
        if phase != "saved":
            return super()._uncounted(phase, missing)
        return self._vote("", _not_heard(missing))

    def _why_not(self, body: Body) -> str:
        """Empty: that rank has saved this attempt."""
        if not isinstance(body, Saved):
            return "another message instead of what it has saved"
        if not body.reason and body.attempt != self._begun:
            return f"it saved {body.attempt}"
        return body.reason

    # --- votes ------------------------------------------------------------------------------

    def _give_up(self, reason: str) -> Action:
        """This rank never votes for it."""
        return self._vote("", reason) if self._has_told else self._tell_saved(reason)

    def _abort(self, tally: Tally) -> Action | None:
        self._finish(Aborted(self.attempt.step, tally.against))
        return Discard(self._begun) if self._begun is not None else None

    def _vote(self, manifest: str, reason: str) -> Action:
        vote = Vote(self._begun, manifest, reason)
        return self._poll("vote", vote, self._voted, self._decide_commit)

    def _voted(self, heard: dict[int, Body], missing: _Missing) -> Tally | None:
        votes = {rank: self._reading(body) for rank, body in heard.items()}
        against = {rank: vote.reason for rank, vote in votes.items() if not vote.manifest}
        if against:
            return tally_of(self._begun, "", against)
        if missing or self._begun is None:
            return None
        manifests = [votes[rank].manifest for rank in range(self.place.world)]
        return Tally(self._begun, digest_of(manifests))

    def _decide_commit(self, tally: Tally) -> Action | None:
        if tally.against:
            return self._abort(tally)
        if self._begun is None or tally.attempt != self._begun or not tally.digest:
            self._finish(Undecided("vote", (0,)))
            return None
        self._digest = tally.digest
        return RecordCommit(self._begun, self._digest)

    def _reading(self, body: Body) -> Vote:
        """A vote for another attempt is none for this one."""
        if not isinstance(body, Vote):
            return Vote(None, "", "another message instead of a vote")
        if body.manifest and body.attempt != self._begun:
            return Vote(body.attempt, "", f"a vote for {body.attempt}")
        return body

    # --- after the commit -------------------------------------------------------------------

    def _recorded(self, heard: dict[int, Body], missing: _Missing) -> Tally:
        against = dict.fromkeys(missing, "not heard")
        for rank, body in heard.items():
            if not isinstance(body, Recorded) or not body.durable:
                against[rank] = "not recorded"
        return tally_of(self._begun, self._digest, against)

    def _decide_cleaning(self, tally: Tally) -> Action | None:
        recorded = (tally.attempt, tally.digest) == (self._begun, self._digest)
        if self._begun is None or tally.against or not recorded:
            self._committed(is_cleaned=False)
            return None
        return Collect(self._begun)

    def _committed(self, *, is_cleaned: bool) -> None:
        if self._begun is not None:
            self._finish(Committed(self._begun, self._digest, is_cleaned))


def _not_heard(missing: _Missing) -> str:
    ranks = ", ".join(map(str, missing))
    return f"not heard to have saved before the deadline: rank {ranks}"
