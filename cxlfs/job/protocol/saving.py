"""One rank's part in saving one step of the whole job.

    PREPARE from rank 0 -> save -> (all saved? -> copies) -> manifest -> votes of all -> record
        -> recorded in all stores? -> collect

That all have voted for one attempt is the commit; no coordinator decides it or writes it down. So a
rank that has voted and does not know what all others did may say neither that it is committed nor
that it is not: that is ``Undecided``. What one rank could not do is a vote against it, and as each
rank votes once in an attempt, one vote against it settles that it never will be committed. With
copies on other nodes (``replicas`` > 1) all hear first whether all have saved: who waits for the
shards of a rank that has failed would learn of it at the deadline only. The commit is recorded once
in each store, by one of the ranks that share it.

Never: removes anything older before the commit is recorded in every store, or anything of an
attempt that might be committed.
"""

from __future__ import annotations

from cxlfs.job.protocol.machine import (
    Action,
    Collect,
    Discard,
    Done,
    Failed,
    Gather,
    Machine,
    Poll,
    RecordCommit,
    Replicate,
    Save,
    Tell,
    WriteManifest,
)
from cxlfs.job.protocol.messages import (
    Body,
    Part,
    Prepare,
    Recorded,
    Saved,
    Tally,
    Vote,
    tally_of,
)
from cxlfs.job.protocol.model import (
    Aborted,
    Attempt,
    Committed,
    Undecided,
    digest_of_some,
    sum_of,
)
from cxlfs.job.protocol.place import Place

_Missing = tuple[int, ...]


class Saving(Machine):
    """``attempt``: what this rank means to save, of the line that began. ``recorders``: ranks
    that record the commit, one of each store, alike on all ranks; None: each has a store of its
    own. ``refusal``: why this rank cannot vote for any (its medium is volatile), or empty.
    """

    def __init__(
        self,
        place: Place,
        attempt: Attempt,
        *,
        replicas: int = 1,
        placement: str = "groups",
        recorders: frozenset[int] | None = None,
        refusal: str = "",
    ) -> None:
        super().__init__(place)
        self.attempt = attempt
        self.replicas = replicas
        self.placement = placement
        self.recorders = recorders
        self.refusal = refusal
        self._begun: Attempt | None = None
        self._has_told = replicas == 1
        self._digest = ""
        self._is_cleaned = False

    def _begin(self) -> Action | None:
        place = self.place
        if place.rank == 0:
            prepare = Prepare(self.attempt, place.world, self.replicas, self.placement)
            return self._prepare({0: prepare}, ())
        waiting = Gather(self._key("prepare"), None, (place.above,))
        return self._gather(waiting, self._prepare)

    def _prepare(self, heard: dict[int, Body], missing: _Missing) -> Action | None:
        prepare = heard.get(self.place.above)
        if missing or not isinstance(prepare, Prepare):
            return self._give_up("PREPARE was not heard before the deadline")
        if self.place.below:
            return Tell(self._key("prepare"), prepare, self.place.below)
        return self._begin_saving(prepare)

    def _told(self, body: Prepare | Part | Tally) -> Action | None:
        return self._begin_saving(body) if isinstance(body, Prepare) else super()._told(body)

    def _begin_saving(self, prepare: Prepare) -> Action | None:
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
        if its.id != mine.id:
            return f"rank 0 is of line {its.id}, this rank of {mine.id}"
        if prepare.world != self.place.world:
            return f"rank 0 counts {prepare.world} ranks, this one {self.place.world}"
        if prepare.replicas != self.replicas:
            return f"rank 0 makes {prepare.replicas} replicas, this rank {self.replicas}"
        if prepare.placement != self.placement and self.replicas > 1:
            return f"rank 0 places copies in {prepare.placement}, this rank in {self.placement}"
        return ""

    def _proceed(self, event: Done | Failed) -> Action | None:
        action = event.action
        if isinstance(action, Save | Replicate | WriteManifest):
            return self._saved(action, event)
        if isinstance(action, RecordCommit):
            return self._tell_recorded(Recorded(action.attempt, isinstance(event, Done)))
        if isinstance(action, Collect):
            self._committed(is_cleaned=isinstance(event, Done))
        return None  # Discard: the outcome is there

    def _saved(
        self, action: Save | Replicate | WriteManifest, event: Done | Failed
    ) -> Action | None:
        if isinstance(event, Failed):
            return self._give_up(event.reason)
        if isinstance(action, Save) and self.replicas > 1:
            return self._tell_saved("")
        if not isinstance(action, WriteManifest):
            return WriteManifest(action.attempt, self.place.world)
        return self._vote(str(event.value), "")

    # --- before copies are made -------------------------------------------------------------

    def _tell_saved(self, reason: str) -> Action | None:
        self._has_told = True
        return self._begin_poll(
            Poll(
                self._key("saved"),
                self._begun,
                self._all_saved,
                self._saved_by_all,
                self._decide_copying,
            ),
            Saved(self._begun, reason),
        )

    def _all_saved(self, heard: dict[int, Body], missing: _Missing) -> Tally | None:
        failed = {rank: self._why_not(body) for rank, body in heard.items()}
        failed = {rank: reason for rank, reason in failed.items() if reason}
        return self._sum_of_saved(failed, missing, may_refuse=self.place.leads)

    def _saved_by_all(
        self, failed: dict[int, str], missing: _Missing, _digests: list[str]
    ) -> Tally | None:
        return self._sum_of_saved(failed, missing, may_refuse=self.place.rank == 0)

    def _sum_of_saved(
        self, failed: dict[int, str], missing: _Missing, *, may_refuse: bool
    ) -> Tally | None:
        """Who counts for others and refuses never votes for it, and tells them at once."""
        if missing and not failed:
            if not may_refuse:
                return None
            failed = {self.place.rank: _not_heard(missing)}
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

    def _give_up(self, reason: str) -> Action | None:
        """This rank never votes for it."""
        return self._vote("", reason) if self._has_told else self._tell_saved(reason)

    def _abort(self, tally: Tally) -> Action | None:
        self._finish(Aborted(self.attempt.step, tally.against))
        return Discard(self._begun) if self._begun is not None else None

    def _vote(self, manifest: str, reason: str) -> Action | None:
        return self._begin_poll(
            Poll(
                self._key("vote"),
                self._begun,
                self._voted,
                self._voted_by_all,
                self._decide_commit,
            ),
            Vote(self._begun, manifest, reason),
        )

    def _voted(self, heard: dict[int, Body], missing: _Missing) -> Tally | None:
        votes = {rank: self._reading(body) for rank, body in heard.items()}
        against = {rank: vote.reason for rank, vote in votes.items() if not vote.manifest}
        if against or missing:
            return self._voted_by_all(against, missing, [])
        digest = digest_of_some((rank, vote.manifest) for rank, vote in votes.items())
        return self._voted_by_all({}, (), [digest])

    def _voted_by_all(
        self, against: dict[int, str], missing: _Missing, digests: list[str]
    ) -> Tally | None:
        if against:
            return tally_of(self._begun, "", against)
        return None if missing or self._begun is None else Tally(self._begun, sum_of(digests))

    def _decide_commit(self, tally: Tally) -> Action | None:
        if tally.against:
            return self._abort(tally)
        if self._begun is None or tally.attempt != self._begun or not tally.digest:
            self._finish(Undecided("vote", (0,)))
            return None
        self._digest = tally.digest
        if self.recorders is None or self.place.rank in self.recorders:
            return RecordCommit(self._begun, self._digest)
        return self._tell_recorded(None)

    def _reading(self, body: Body) -> Vote:
        """A vote for another attempt is none for this one."""
        if not isinstance(body, Vote):
            return Vote(None, "", "another message instead of a vote")
        if body.manifest and body.attempt != self._begun:
            return Vote(body.attempt, "", f"a vote for {body.attempt}")
        return body

    # --- after the commit -------------------------------------------------------------------

    def _tell_recorded(self, body: Recorded | None) -> Action | None:
        return self._begin_poll(
            Poll(
                self._key("recorded"),
                self._begun,
                self._recorded,
                self._recorded_by_all,
                self._decide_cleaning,
                self.recorders,
            ),
            body,
        )

    def _recorded(self, heard: dict[int, Body], missing: _Missing) -> Tally:
        against = {
            rank: "not recorded"
            for rank, body in heard.items()
            if not isinstance(body, Recorded) or not body.durable
        }
        return self._recorded_by_all(against, missing, [])

    def _recorded_by_all(
        self, against: dict[int, str], missing: _Missing, _digests: list[str]
    ) -> Tally:
        unheard = dict.fromkeys(missing, "not heard")
        return tally_of(self._begun, self._digest, unheard | against)

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
