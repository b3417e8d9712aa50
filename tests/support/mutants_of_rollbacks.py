"""Planted bugs in the way back of a checkpoint unit: names and contents that come back."""

from __future__ import annotations

from cxlfs.store import unit_returns
from cxlfs.store.unit_kept import Kept
from tests.support.mutants import Patch, mutant, nothing


@mutant("one/LINE/unit_with_something_moved_in", 5)
def moved_in_and_never_sent_home(patch: Patch) -> None:
    """What was moved into a unit loses the name there, and does not get its old one again."""
    patch.setattr(unit_returns._WayBack, "_put_outside", nothing)


@mutant("one/LINE/unit_renamed_within", 5)
def given_name_stays(patch: Patch) -> None:
    """What was renamed or linked in a unit keeps the name that it got."""
    patch.setattr(unit_returns._WayBack, "_take_given", nothing)


@mutant("one/LINE/unit_changed_in_place", 16)
def contents_stay_as_they_were_written(patch: Patch) -> None:
    """Names come back, contents do not."""
    patch.setattr(unit_returns._WayBack, "_put_contents", nothing)


@mutant("one/LINE/unit_renamed_within", 10)
def kept_files_not_known(patch: Patch) -> None:
    """Which files a unit keeps is not known when it goes back: what they were renamed to stays."""
    patch.setattr(Kept, "keeps", lambda _self: lambda _inode: False)


@mutant("one/LINE/unit_of_a_new_directory", 14)
def made_stays(patch: Patch) -> None:
    """What was made in a unit stays beside what was there."""
    patch.setattr(unit_returns._WayBack, "_remove_made", lambda _self: [])
