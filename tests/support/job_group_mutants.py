"""Mistakes in how groups of ranks are counted, and in who records for whom, planted into the
protocol one at a time: the histories must find each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cxlfs.job.protocol import (
    Aborted,
    Machine,
    Part,
    Restoring,
    Saving,
    Tally,
)
from cxlfs.job.protocol.model import digest_of_some

Patch = pytest.MonkeyPatch

_voted = Saving._voted
_voted_by_all = Saving._voted_by_all
_loaded_by_all = Restoring._loaded_by_all
_recorded_by_all = Saving._recorded_by_all
_count_groups = Machine._count_groups
_listen = Machine._listen
_decide_commit = Saving._decide_commit


def a_part_is_made_of_what_was_heard(patch: Patch) -> None:
    """A leader whose deadline has passed tells that its group has voted."""

    def voted(self: Saving, heard: dict[int, Any], missing: tuple[int, ...]) -> Any:
        place = self.place
        if missing and place.rank and place.leads and self._begun is not None:
            votes = ((rank, vote.manifest) for rank, vote in heard.items())
            return Tally(self._begun, digest_of_some(votes))
        return _voted(self, heard, missing)

    patch.setattr(Saving, "_voted", voted)


def a_group_that_is_not_heard_has_voted(patch: Patch) -> None:
    def voted(self: Saving, against: Any, _missing: Any, digests: list[str]) -> Any:
        return _voted_by_all(self, against, (), digests)

    patch.setattr(Saving, "_voted_by_all", voted)


def a_group_that_is_not_heard_has_loaded(patch: Patch) -> None:
    def loaded(self: Restoring, failed: Any, _missing: Any, digests: list[str]) -> Any:
        return _loaded_by_all(self, failed, (), digests)

    patch.setattr(Restoring, "_loaded_by_all", loaded)


def a_group_that_is_not_heard_has_recorded(patch: Patch) -> None:
    def recorded(self: Saving, against: Any, _missing: Any, digests: list[str]) -> Any:
        return _recorded_by_all(self, against, (), digests)

    patch.setattr(Saving, "_recorded_by_all", recorded)


def a_leader_decides_for_its_group(patch: Patch) -> None:
    """What it has counted goes to rank 0 and to the group at once."""

    def told(self: Machine, body: Any) -> Any:
        return self._pass_on(body.tally if isinstance(body, Part) else body)

    told_of_saving = Saving._told

    def saving(self: Saving, body: Any) -> Any:
        return told(self, body) if isinstance(body, Part) else told_of_saving(self, body)

    patch.setattr(Saving, "_told", saving)


def a_part_is_taken_for_a_tally(patch: Patch) -> None:
    """By the ranks of a group that hear what their leader tells rank 0."""

    def listen(self: Machine, action: Any, event: Any) -> None:
        body = getattr(event, "body", None)
        if isinstance(body, Part) and action.above is not None and not action.of_leaders:
            self._hear_tally(action, event.sender, body.tally)
        else:
            _listen(self, action, event)

    patch.setattr(Machine, "_listen", listen)


def a_leader_that_hears_no_tally_aborts(patch: Patch) -> None:
    """And tells its group so, while rank 0 has told the others."""

    def counted(self: Machine, heard: Any, missing: tuple[int, ...]) -> Any:
        if missing and self.place.rank and self.place.leads and isinstance(self, Saving):
            self._finish(Aborted(self.attempt.step, ((0, "not heard"),)))
            return None
        return _count_groups(self, heard, missing)

    patch.setattr(Machine, "_count_groups", counted)


def a_digest_leaves_out_a_group(patch: Patch) -> None:
    """A commit of which the votes that are found are not those that were counted."""

    def voted(self: Saving, against: Any, missing: Any, digests: list[str]) -> Any:
        return _voted_by_all(self, against, missing, digests[:1])

    patch.setattr(Saving, "_voted_by_all", voted)


def rank_0_records_for_all(patch: Patch) -> None:
    """Other nodes' stores know of no commit when what is older goes."""

    def decide(self: Saving, tally: Tally) -> Any:
        self.recorders = frozenset({0})
        return _decide_commit(self, tally)

    patch.setattr(Saving, "_decide_commit", decide)


GROUP_MUTANTS: tuple[Callable[[Patch], None], ...] = (
    a_part_is_made_of_what_was_heard,
    a_group_that_is_not_heard_has_voted,
    a_group_that_is_not_heard_has_loaded,
    a_group_that_is_not_heard_has_recorded,
    a_leader_decides_for_its_group,
    a_part_is_taken_for_a_tally,
    a_leader_that_hears_no_tally_aborts,
    a_digest_leaves_out_a_group,
    rank_0_records_for_all,
)
