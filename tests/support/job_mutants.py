"""Mistakes that programs of this kind have made, planted into the protocol one at a time: the
histories must find each. Numbers in brackets: of the issue where a peer had it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from cxlfs.job.protocol import (
    Aborted,
    Asked,
    Attempt,
    Collect,
    Committed,
    Discard,
    Failed,
    Gather,
    Heard,
    Inventory,
    Key,
    Load,
    Machine,
    Nothing,
    NotRestored,
    Prepare,
    RecordCommit,
    Replicate,
    Restoring,
    Save,
    Saving,
    Tally,
    WriteManifest,
    digest_of,
    lineage,
    planning,
    restoring,
)
from cxlfs.job.protocol.messages import Recorded, Stock, Vote
from tests.support import job_histories

Patch = pytest.MonkeyPatch

_vote = Saving._vote
_voted = Saving._voted
_recorded = Saving._recorded
_saved = Saving._saved
_proceed = Saving._proceed
_counted = Machine._counted
_proceed_restoring = Restoring._proceed
_stocked = Restoring._stocked
_loaded = Restoring._loaded
_decide_restored = Restoring._decide_restored
_load_next = Restoring._load_next


def a_vote_not_heard_is_one_against(patch: Patch) -> None:
    """A deadline aborts, while others have heard all votes."""

    def voted(self: Saving, heard: dict[int, Any], missing: tuple[int, ...]) -> Any:
        return _voted(self, heard | {rank: Vote(None, "", "late") for rank in missing}, ())

    patch.setattr(Saving, "_voted", voted)


def a_vote_not_heard_is_one_for_it(patch: Patch) -> None:
    """Published after another node has failed [VeOmni 1172]."""

    def voted(self: Saving, heard: dict[int, Any], missing: tuple[int, ...]) -> Any:
        given = {rank: Vote(self._begun, "taken for granted") for rank in missing}
        return _voted(self, heard | given, ())

    patch.setattr(Saving, "_voted", voted)


def a_tally_is_made_of_what_was_heard(patch: Patch) -> None:
    """Rank 0 tells that all have voted when its own deadline has passed."""

    def voted(self: Saving, heard: dict[int, Any], missing: tuple[int, ...]) -> Any:
        tally = _voted(self, heard, missing)
        if tally is None and self._begun is not None and self.place.rank == 0:
            return Tally(self._begun, digest_of([vote.manifest for vote in heard.values()]))
        return tally

    patch.setattr(Saving, "_voted", voted)


def a_tally_of_another_rank_counts(patch: Patch) -> None:
    """Each rank tells what it has heard, and the first that comes is believed."""

    def counted(self: Machine, tally: Any, missing: tuple[int, ...]) -> Any:
        if tally is None and isinstance(self, Saving) and self._begun is not None:
            tally = Tally(self._begun, "nothing")
        return _counted(self, tally, missing)

    patch.setattr(Machine, "_counted", counted)


def a_tally_of_records_leaves_out_who_was_not_heard(patch: Patch) -> None:
    """Older ones go while a rank may not have recorded what is newer."""

    def recorded(self: Saving, heard: dict[int, Any], _missing: tuple[int, ...]) -> Any:
        return _recorded(self, heard, ())

    patch.setattr(Saving, "_recorded", recorded)


def who_hears_no_tally_takes_it_for_an_abort(patch: Patch) -> None:
    def counted(self: Machine, tally: Any, missing: tuple[int, ...]) -> Any:
        if tally is None and isinstance(self, Saving) and self.place.rank:
            self._finish(Aborted(self.attempt.step, ((0, "not heard"),)))
            return None
        return _counted(self, tally, missing)

    patch.setattr(Machine, "_counted", counted)


def what_failed_is_told_without_the_ranks(patch: Patch) -> None:
    """Rank 0 leaves out the holders that failed, the others only their own."""

    def decide(self: Restoring, tally: Tally) -> Any:
        if self.place.rank:
            own = tuple(pair for pair in tally.against if pair[0] == self.place.rank)
            tally = dataclasses.replace(tally, against=own)
        return _decide_restored(self, tally)

    patch.setattr(Restoring, "_decide_restored", decide)


def rank_0_alone_is_awaited(patch: Patch) -> None:
    """[Ray 62187]"""

    def voted(self: Saving, heard: dict[int, Any], _missing: tuple[int, ...]) -> Any:
        vote = heard.get(0)
        every = dict.fromkeys(range(self.place.world), vote) if vote is not None else {}
        return _voted(self, every, () if every else (0,))

    patch.setattr(Saving, "_voted", voted)


def an_exception_is_no_vote(patch: Patch) -> None:
    """The rank that failed returns, and the others wait for it [xtuner 1852, OLMo-core 831]."""

    def saved(self: Saving, action: Any, event: Any) -> Any:
        if isinstance(event, Failed):
            self._finish(Aborted(self.attempt.step, ((self.place.rank, event.reason),)))
            return None
        return _saved(self, action, event)

    patch.setattr(Saving, "_saved", saved)


def a_failed_save_is_not_looked_at(patch: Patch) -> None:
    """Replica bytes wrong at save, and no check [NVRx 349]."""

    def saved(self: Saving, action: Any, event: Any) -> Any:
        if isinstance(event, Failed) and isinstance(action, Save):
            return WriteManifest(action.attempt, self.place.world)
        return _saved(self, action, event)

    patch.setattr(Saving, "_saved", saved)


def failed_copies_are_reported_as_made(patch: Patch) -> None:
    """As a replicator for Orbax does."""

    def saved(self: Saving, action: Any, event: Any) -> Any:
        if isinstance(event, Failed) and isinstance(action, Replicate):
            return WriteManifest(action.attempt, self.place.world)
        return _saved(self, action, event)

    patch.setattr(Saving, "_saved", saved)


def copies_are_left_for_later(patch: Patch) -> None:
    """Voted for before there are copies."""

    def saved(self: Saving, action: Any, event: Any) -> Any:
        if isinstance(action, Save) and not isinstance(event, Failed):
            return WriteManifest(action.attempt, self.place.world)
        return _saved(self, action, event)

    patch.setattr(Saving, "_saved", saved)


def a_volatile_medium_is_not_told(patch: Patch) -> None:
    begin = Saving._begin

    def told(self: Saving) -> Any:
        self.refusal = ""
        return begin(self)

    patch.setattr(Saving, "_begin", told)


def older_ones_are_deleted_at_once(patch: Patch) -> None:
    """While another node may be unfinished [ML Flashpoint]."""

    def proceed(self: Saving, event: Any) -> Any:
        if isinstance(event.action, RecordCommit):
            return Collect(event.action.attempt)
        return _proceed(self, event)

    patch.setattr(Saving, "_proceed", proceed)


def a_commit_that_failed_is_reported_as_recorded(patch: Patch) -> None:
    def proceed(self: Saving, event: Any) -> Any:
        if isinstance(event.action, RecordCommit):
            return self._tell_recorded(Recorded(event.action.attempt, durable=True))
        return _proceed(self, event)

    patch.setattr(Saving, "_proceed", proceed)


def a_deadline_discards(patch: Patch) -> None:
    """What was not heard of is deleted, though all may have voted."""

    def counted(self: Machine, tally: Any, missing: tuple[int, ...]) -> Any:
        action = _counted(self, tally, missing)
        begun = getattr(self, "_begun", None)
        return Discard(begun) if tally is None and begun is not None else action

    patch.setattr(Machine, "_counted", counted)


def the_commit_comes_before_the_votes(patch: Patch) -> None:
    """Every rank says so as soon as it has saved [Megatron-LM 4378: a stale plan]."""

    def vote(self: Saving, manifest: str, reason: str) -> Any:
        if self._begun is None or not manifest:
            return _vote(self, manifest, reason)
        self._finish(Committed(self._begun, "", is_cleaned=False))
        return RecordCommit(self._begun, digest_of([manifest]))

    patch.setattr(Saving, "_vote", vote)


def a_step_is_known_by_its_number_alone(patch: Patch) -> None:
    """A step that is done again mixes two generations [Megatron-Bridge 5604]."""
    begin = Saving._begin_saving

    def begun(self: Saving, prepare: Prepare) -> Any:
        plain = Attempt(prepare.attempt.step, prepare.attempt.step, "id")
        return begin(self, dataclasses.replace(prepare, attempt=plain))

    patch.setattr(Saving, "_begin_saving", begun)


def messages_of_other_calls_are_heard(patch: Patch) -> None:
    """Ids collide [SCR 175]."""

    def key(_self: Machine, phase: str, _number: int = 0) -> Key:
        return Key("", 0, phase)

    patch.setattr(Machine, "_key", key)


def messages_are_counted_not_ranks(patch: Patch) -> None:
    """A vote that comes twice is two votes."""

    def listen(self: Machine, action: Gather, event: Any) -> None:
        if isinstance(event, Heard):
            self._heard[len(self._heard)] = event.body
            if len(self._heard) < len(action.wanted):
                return
        self._end_gathering(action)

    patch.setattr(Machine, "_listen", listen)


def each_rank_takes_its_own_newest(patch: Patch) -> None:
    """Ranks load different steps [DLRover 1233]; Megatron and VeloC take the largest."""

    def load_next(self: Restoring) -> Any:
        action = _load_next(self)
        rank = self.place.rank
        mine = [h for h in self.inventories[rank].held if h.rank == rank]
        choice = self._choice
        if choice is None or not mine:
            return action
        best = max(mine)
        store = self.inventories[rank].store
        holders = (*choice.holders[:rank], store, *choice.holders[rank + 1 :])
        self._choice = dataclasses.replace(choice, attempt=best.attempt, holders=holders)
        return Load(best.attempt, rank, store, best.manifest)

    def loaded(self: Restoring, heard: dict[int, Any], missing: tuple[int, ...]) -> Any:
        choice = self._choice
        if choice is not None:
            heard = {r: dataclasses.replace(b, attempt=choice.attempt) for r, b in heard.items()}
        return _loaded(self, heard, missing)

    patch.setattr(Restoring, "_load_next", load_next)
    patch.setattr(Restoring, "_loaded", loaded)


def nobody_asks_whether_the_others_have_loaded(patch: Patch) -> None:
    def proceed(self: Restoring, event: Any) -> Any:
        if isinstance(event.action, Load) and not isinstance(event, Failed):
            return self._begin_line()
        return _proceed_restoring(self, event)

    patch.setattr(Restoring, "_proceed", proceed)


def a_holder_that_failed_is_asked_again(patch: Patch) -> None:
    """Restarts without end [Megatron-LM 5281]."""

    def pick(
        inventories: Sequence[Inventory], _excluded: Collection[object] = (), **how: Any
    ) -> Any:
        return planning.judge(inventories, (), **how)

    patch.setattr(restoring, "judge", pick)


def copies_are_not_used(patch: Patch) -> None:
    """Redundancy is there, and unused on a replaced node [VeloC 26]."""

    def pick(inventories: Sequence[Inventory], excluded: Any = (), **how: Any) -> Any:
        return planning.judge(inventories, excluded, **{**how, "can_fetch": False})

    patch.setattr(restoring, "judge", pick)


def a_store_not_heard_of_is_an_empty_one(patch: Patch) -> None:
    def stocked(self: Restoring, heard: dict[int, Any], missing: tuple[int, ...]) -> Any:
        empty = {rank: Stock(Inventory(f"absent {rank}")) for rank in missing}
        return _stocked(self, heard | empty, ())

    patch.setattr(Restoring, "_stocked", stocked)


def it_begins_anew(patch: Patch) -> None:
    """Fetching fails, and the job starts from zero [SCR 540]."""

    def load_next(self: Restoring) -> Any:
        action = _load_next(self)
        if isinstance(self.outcome, NotRestored | Asked):
            self._finish(Nothing())
        return action

    patch.setattr(Restoring, "_load_next", load_next)


def the_number_is_the_first_stores(patch: Patch) -> None:
    number = lineage.next_number

    def guess(inventories: Sequence[Inventory]) -> int:
        return number(inventories[:1])

    patch.setattr(job_histories, "next_number", guess)


def what_is_under_way_is_collected(patch: Patch) -> None:
    """The newest step goes while others save the next."""

    def everything_else(
        inventory: Inventory, committed: Attempt, _keep: int, _lineage: object
    ) -> list[Attempt]:
        return sorted({held.attempt for held in inventory.held} - {committed})

    patch.setattr(job_histories, "collectable", everything_else)


def the_place_of_a_rank_is_its_number(patch: Patch) -> None:
    """What its store has is loaded, whosever it is [a path with the rank in it]."""

    def load_next(self: Restoring) -> Any:
        action = _load_next(self)
        if not isinstance(action, Load) or self._choice is None:
            return action
        mine = [h for h in self.inventories[self.place.rank].held if h.attempt == action.attempt]
        if not mine:
            return action
        return Load(
            action.attempt, mine[0].rank, self.inventories[self.place.rank].store, mine[0].manifest
        )

    patch.setattr(Restoring, "_load_next", load_next)


MUTANTS: tuple[Callable[[Patch], None], ...] = (
    a_vote_not_heard_is_one_against,
    a_vote_not_heard_is_one_for_it,
    a_tally_is_made_of_what_was_heard,
    a_tally_of_another_rank_counts,
    a_tally_of_records_leaves_out_who_was_not_heard,
    who_hears_no_tally_takes_it_for_an_abort,
    what_failed_is_told_without_the_ranks,
    rank_0_alone_is_awaited,
    an_exception_is_no_vote,
    a_failed_save_is_not_looked_at,
    failed_copies_are_reported_as_made,
    copies_are_left_for_later,
    a_volatile_medium_is_not_told,
    older_ones_are_deleted_at_once,
    a_commit_that_failed_is_reported_as_recorded,
    a_deadline_discards,
    the_commit_comes_before_the_votes,
    a_step_is_known_by_its_number_alone,
    messages_of_other_calls_are_heard,
    messages_are_counted_not_ranks,
    each_rank_takes_its_own_newest,
    nobody_asks_whether_the_others_have_loaded,
    a_holder_that_failed_is_asked_again,
    copies_are_not_used,
    a_store_not_heard_of_is_an_empty_one,
    it_begins_anew,
    the_number_is_the_first_stores,
    what_is_under_way_is_collected,
    the_place_of_a_rank_is_its_number,
)
