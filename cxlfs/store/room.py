"""Making room for what would fail without: in the order of what it costs everybody else.

Never here: moving data (``cleaner``), saying how much room there is (``space``, ``report``).

Invariants
- Nothing that was committed is given up, and nothing that nobody asked to publish is published but
  as the periodic commit would do it.
- Every step that says that it helped has made room, or has made something movable or dead: trying
  again ends.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from cxlfs.errors import CxlfsError
from cxlfs.native.discards import discard_in_steps, drop_discarded
from cxlfs.store.clones import REFS_AT_ONCE
from cxlfs.store.past_space import POOL_MIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from cxlfs.store.commits import Commits
    from cxlfs.store.versions import Versions
    from cxlfs.store.volume import Volume

log = logging.getLogger(__name__)

_REFS_IN_A_STEP = 25_000


class Removing(Protocol):
    """What nobody wants any more and is taken apart in steps."""

    @property
    def is_removing(self) -> bool:
        """Some is left."""
        ...

    def remove_some(self) -> bool:
        """One step; False: there is none."""
        ...


class NothingToRemove:
    is_removing = False

    def remove_some(self) -> bool:
        return False


class Room:
    """What can be had without moving data; one for each volume."""

    def __init__(self, volume: Volume, versions: Versions, commits: Commits) -> None:
        self.volume = volume
        self.versions = versions
        self.commits = commits
        self.units: Removing = NothingToRemove()
        self.drop_removed: Callable[[], bool] = lambda: False
        """Give up what a user has removed; whether something was."""
        self.give_up_held: Callable[[], bool] = lambda: False
        """Give up history that was to be kept; whether some was."""
        self.close_slips: Callable[[], None] = lambda: None
        """Take back what programs that write by themselves have not used."""
        discard_in_steps(volume.engine, REFS_AT_ONCE)

    def drop_discarded(self) -> bool:
        """One step of taking off what contents that have ended referred to, 1 to 2 ms; False: there
        is none. Until then their bytes count as used.
        """
        return drop_discarded(self.volume.engine, _REFS_IN_A_STEP)

    def drop_all_discarded(self) -> None:
        """Where the next thing depends on what is used to the byte."""
        while self.drop_discarded():
            pass

    @property
    def is_discarding(self) -> bool:
        return self.volume.engine.statistics().discarded_refs > 0

    @property
    def is_removing(self) -> bool:
        """What nobody wants any more is being taken apart: a step of that may free nothing yet."""
        return self.is_discarding or self.units.is_removing

    def make(self, needed_bytes: int) -> bool:
        """Make room for file data, or (0) for metadata; False: nothing of this kind can be had.

        Raises NoSpaceError, MediaError, ReadOnlyError.
        """
        if self.volume.space.history.make_free(self.volume.refresh_reserve() + POOL_MIN):
            return True
        before = self._measure(needed_bytes)
        self.versions.leases.close_all()
        self.close_slips()
        self.free_dead()
        if self._measure(needed_bytes) > before:
            return True
        if self._commit_open():
            self.free_dead()
            if self._measure(needed_bytes) > before or self.is_discarding:
                return True
        if (
            self.units.remove_some()
            or self.versions.drop_oldest_aside()
            or self.versions.overwrites.give_up_oldest()
        ):
            self.free_dead()
            return True
        return False

    def give_up_some(self) -> bool:
        """One step of giving up what counts as kept because it has names, and is only there until
        its room is wanted: in the order of :meth:`make`; False when there is none. Raises as that.
        """
        return self.units.remove_some() or self.make_of_removed()

    def make_of_removed(self) -> bool:
        """Make room of what a user has removed and a unit remembers, when nothing else has any;
        False when there is none. Raises as :meth:`make`.
        """
        if not self.drop_removed():
            return self.give_up_held()
        self.units.remove_some()
        self.free_dead()
        return True

    def free_dead(self) -> None:
        """What is dead, and what metadata that has shrunk leaves."""
        self.volume.release_dead()
        if self.volume.metadata_has_shrunk:
            self.volume.rollover()

    def _measure(self, needed_bytes: int) -> int:
        space = self.volume.space
        return space.available_bytes if needed_bytes else space.free_count

    def _commit_open(self) -> bool:
        """What is not published cannot be moved, and what it has replaced is not dead yet."""
        try:
            return self.commits.commit_all(for_room=True)
        except CxlfsError as error:
            if self.volume.read_only:
                raise
            log.info("what is open is not all committed to make room: %s", error.message)
            return False
