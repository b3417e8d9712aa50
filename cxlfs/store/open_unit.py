"""Open checkpoint units while they are written.

Never here: what becomes of it (``units``), what the media say of it beyond ``record``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from cxlfs.store.unit_members import UNKNOWN
from cxlfs.store.unit_record import OpenRecord
from cxlfs.store.unit_rules import Rule

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode


@dataclasses.dataclass(slots=True, eq=False)
class OpenUnit:
    """``first_ino``: the first inode number that was not given when it began. ``kept_in``: the
    directory of what died in it, None: nothing did. ``published``: inode numbers
    of the files that were, since it began; ``spoiled``: of those that could not be finished;
    ``unclosed``, where each file is a checkpoint: of those that were published by fsync or the
    periodic commit, and may be half of a save.
    """

    inode: Inode
    rule: Rule
    first_ino: int
    since_ns: int
    changed: float
    kept_in: Inode | None = None
    began_ino: int = 0
    """The first inode number that was not given when it began: ``first_ino`` may be less where its
    directory was empty."""
    uid: int = UNKNOWN
    """Whose changes belong to it."""
    is_guess: bool = False
    """Its directory was made beside sets of a saver by that saver, and has shown nothing yet."""
    lsn: int = 0
    """Of the record that says that it is open: older contents were not born in it."""
    marked: bool = False
    kept: bool = False
    """What was written is there after a crash; the media say nothing of the unit any more."""
    replaces: bool = False
    """What was there before was removed by a user, who wants its room if there is no other."""
    place: tuple[int, bytes] | None = None
    """Directory and name of one that was removed, which can still be undone."""
    before: int = 0
    """Inode number of the directory that it replaces."""
    looked: tuple[float, str] | None = None
    """What it lacks of what was there before, and what ``changed`` was then."""
    followed: bool = False
    writers: dict[Hashable, bool] = dataclasses.field(default_factory=dict)
    """Who has written, and whether each is a program that copies files."""
    published: set[int] = dataclasses.field(default_factory=set)
    rewritten: bool = False
    """A file that is no marker has got another content, or was removed, since one was published."""
    edited: bool = False
    """A file that was there has been changed in place."""
    spoiled: set[int] = dataclasses.field(default_factory=set)
    unclosed: set[int] = dataclasses.field(default_factory=set)
    apart: set[int] = dataclasses.field(default_factory=set)
    """Inode numbers of files below it that do not belong to it."""
    early: set[int] = dataclasses.field(default_factory=set)
    """Of those that were open for writing when it began: its end does not wait for them."""
    foreign: set[int] = dataclasses.field(default_factory=set)
    """Of files below it that other users have changed: they stay as they are."""
    appended: set[int] = dataclasses.field(default_factory=set)
    """Of those the ones that are written on at their end, as logs are."""
    fresh: set[int] = dataclasses.field(default_factory=set)
    """Of those that were open then the ones that were not committed."""
    stand_ins: dict[int, tuple[int, bytes]] = dataclasses.field(default_factory=dict)
    """Directories that have got another name, and what stands for each where the old one is kept:
    they belong to the unit, wherever they are.
    """
    came: dict[int, tuple[int, bytes]] = dataclasses.field(default_factory=dict)
    """What was moved in from elsewhere, and where its old name is kept."""
    regions: dict[int, int] = dataclasses.field(default_factory=dict)
    """Directories in which another inode number than ``first_ino`` is the first one that was not
    there before: they came from elsewhere, or lie in such.
    """
    went: dict[int, int] = dataclasses.field(default_factory=dict)
    """Files that were moved out and have left a copy: the record that published each."""
    kept_names: dict[int, tuple[int, bytes]] = dataclasses.field(default_factory=dict)
    """Where names of files are kept, by their inode numbers: the first of each."""
    linked: set[int] | None = None
    """Of files below it that have several names; None: nobody has asked."""
    contents: set[int] = dataclasses.field(default_factory=set)
    """Inode numbers of the files whose content before is kept."""
    each_file: bool = dataclasses.field(init=False)
    """The rule's ``ends_with_each_file``, which is asked for at every change."""

    def __post_init__(self) -> None:
        self.each_file = self.rule.ends_with_each_file

    @property
    def is_new(self) -> bool:
        """Its directory was made since it began."""
        return self.inode.ino >= self.first_ino

    @property
    def record(self) -> OpenRecord:
        kept = self.kept_in.ino if self.kept_in is not None else 0
        return OpenRecord(
            *(self.inode.ino, kept, self.since_ns, self.uid, self.first_ino),
            tuple(sorted(self.apart)),
            tuple(sorted(self.fresh)),
            tuple(sorted(self.foreign)),
        )

    def made_anew(self, directory: Inode, since_ns: int, changed: float) -> OpenUnit:
        """The same unit, whose directory was removed and is made again: what it keeps stays as it
        is, and what was known of who wrote to the first is over.
        """
        return dataclasses.replace(
            self,
            inode=directory,
            since_ns=since_ns,
            changed=changed,
            replaces=True,
            before=self.before or self.inode.ino,
            looked=None,
            lsn=0,
            marked=False,
            kept=False,
            place=None,
            followed=False,
            writers={},
            published=set(),
            rewritten=False,
            edited=False,
            spoiled=set(),
            unclosed=set(),
            early=set(),
        )

    def has_old(self, inode: Inode, first_ino: int) -> bool:
        """It was committed when the unit began, or when it came. ``first_ino``: as ``regions``."""
        if inode.uncommitted or inode.ino in self.fresh:
            return False
        return inode.ino < first_ino or inode.ino < self.first_ino or inode.ino in self.came

    def made_alone(self, inode: Inode) -> bool:
        """It was made in the unit, and nothing has come there that could be taken for it."""
        return inode.ino >= self.first_ino and not (self.regions or inode.ino in self.came)


class OpenUnits(dict[int, OpenUnit]):
    """All of a store, by the inode numbers of their directories. Whoever changes it calls
    :meth:`look`; what is asked here is asked at every change of a file.
    """

    def __init__(self) -> None:
        super().__init__()
        self.beside: list[OpenUnit] = []
        """Those whose marker lies in the directory above."""
        self.markers: set[bytes] = set()
        """Names of files that end one."""
        self.needs: set[bytes] = set()
        """Patterns of those that may."""
        self._removed: dict[tuple[int, bytes], OpenUnit] = {}
        self.strays: dict[int, OpenUnit] = {}
        """Directories that have got another name, and the unit that each belongs to."""
        self.has_each_file = False
        """In one of them each file is a checkpoint."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when some began, or are over."""

    def look(self) -> None:
        """Some began, or are over."""
        self.on_change()
        self.markers = {name for unit in self.values() for name in unit.rule.done}
        self.needs = {pattern for unit in self.values() for pattern in unit.rule.needs}
        self.beside = [unit for unit in self.values() if unit.rule.done_beside]
        self.has_each_file = any(unit.each_file for unit in self.values())
        self.look_for_strays()
        self._removed = {unit.place: unit for unit in self.values() if unit.place is not None}

    def look_for_strays(self) -> None:
        """A directory belongs to the unit that it was in, else to the first that it came to."""
        strays: dict[int, OpenUnit] = {}
        for unit in self.values():
            for ino in unit.stand_ins:
                if ino not in strays or ino not in unit.came:
                    strays[ino] = unit
        self.strays = strays

    def removed_at(self, parent: int, name: bytes) -> OpenUnit | None:
        """One that had this name, and whose removal is not over yet."""
        return self._removed.get((parent, name))

    def of_user(self, uid: int) -> list[OpenUnit]:
        """The oldest first."""
        return sorted((u for u in self.values() if u.uid == uid), key=lambda u: u.since_ns)

    def has_writer(self, writer: Hashable) -> bool:
        """It has written to one of them."""
        return any(writer in unit.writers for unit in self.values())

    def writers(self) -> set[Hashable]:
        """Tokens of all who have."""
        return {writer for unit in self.values() for writer in unit.writers}
