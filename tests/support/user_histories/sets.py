"""What one user changes below one checkpoint directory, from the first change to the end.

The rules are those of the table in docs/operations.md. Names and markers come from the store's
table of frameworks (``unit_rules.TABLE``), decisions do not.
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import re
from collections.abc import Container, Hashable, Iterator

from cxlfs.store.unit_rules import TABLE as RULES
from cxlfs.store.unit_rules import (
    Ending,
    Rule,
    matches,
    may_be_empty,
    rule_of_directory,
    rule_of_file,
)
from tests.support.user_histories.model import Directory, File, Path, Picture, is_torn

LOGS = (b"*.log", b"*.csv", b"events.out.tfevents*")
_WRONG = frozenset({Ending.KILLED, Ending.INTERRUPTED})


class Outcome(enum.Enum):
    WAIT = "wait"
    STAYS = "stays"
    BACK = "back"


def is_log_name(name: bytes) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in LOGS)


def rule_of(directory: Directory, name: bytes | None) -> tuple[Directory, Rule] | None:
    """The checkpoint directory that a change of a name concerns; the outermost one counts."""
    found = None
    here: Directory | None = directory
    while here is not None and here.parent is not None:
        rule = rule_of_directory(here.name, RULES)
        found = (here, rule) if rule is not None else found
        here = here.parent
    if found is None and name is not None and directory.parent is not None:
        rule = rule_of_file(name, directory.entries)
        return None if rule is None else (directory, rule)
    return found


def rule_beside(directory: Directory, but: Container[Directory] = ()) -> Rule | None:
    """The rule by which a directory beside this one is finished, of the same name but for its
    numbers. ``but``: not by these.
    """
    beside = directory.parent.entries if directory.parent is not None else {}
    for name, each in beside.items():
        if not isinstance(each, Directory) or each is directory or each in but:
            continue
        if not _is_series(name, directory):
            continue
        rule = rule_of_directory(name, RULES)
        for known in (rule,) if rule is not None else RULES:
            shows = rule is not None or any(matches(file, known.files) for file in each.entries)
            if shows and any(done in each.entries for done in known.done):
                return known
    return None


def needed_beside(directory: Directory, rule: Rule) -> set[bytes]:
    """Names of what comes last in any directory beside this one, of the same name but for its
    numbers.
    """
    beside = directory.parent.entries if directory.parent is not None else {}
    series = (
        each
        for name, each in beside.items()
        if isinstance(each, Directory) and each is not directory and _is_series(name, directory)
    )
    return {name for each in series for name in each.entries if matches(name, rule.needs)}


def _is_series(name: bytes, directory: Directory) -> bool:
    number = re.compile(rb"[0-9]+")
    return bool(number.search(name)) and number.sub(b"", name) == number.sub(b"", directory.name)


@dataclasses.dataclass(eq=False)
class Given:
    """Of what got a name in a set, and had another one: ``homes`` that it lost, the first one
    first; ``names`` that it got; ``contents`` that it had since, and the ``files`` that had them.
    """

    homes: list[tuple[Directory, bytes]] = dataclasses.field(default_factory=list)
    names: list[tuple[Directory, bytes]] = dataclasses.field(default_factory=list)
    contents: dict[Path, set[bytes]] = dataclasses.field(default_factory=dict)
    """By the path below it; of a file: the empty one."""
    files: dict[Path, set[File]] = dataclasses.field(default_factory=dict)

    def note(self, child: File | Directory) -> None:
        """What is in it now."""
        below = [((), child)] if isinstance(child, File) else child.below()
        for path, file in below:
            if file.committed is not None:
                self.contents.setdefault(path, set()).add(file.committed)
                self.files.setdefault(path, set()).add(file)


@dataclasses.dataclass(eq=False)
class ChangeSet:
    """``before``: what was there when it began. ``foreign``: names that other users changed since;
    ``loose``: names that they moved; ``apart``: files that belong to nobody's set; ``contents``:
    all that was published in it; ``moved``: what was moved in, and where it was. ``place``: where
    the directory was, once it is removed.
    """

    top: Directory
    rule: Rule
    uid: int
    is_new: bool
    began: int
    changed: float
    was_made: bool = False
    """Its directory was made by it."""
    was_removed: bool = False
    """Its directory was removed by it, and is made again."""
    before: Picture = dataclasses.field(default_factory=dict)
    before_files: dict[Path, File] = dataclasses.field(default_factory=dict)
    writers: set[Hashable] = dataclasses.field(default_factory=set)
    foreign: set[Path] = dataclasses.field(default_factory=set)
    loose: set[Path] = dataclasses.field(default_factory=set)
    apart: set[File] = dataclasses.field(default_factory=set)
    changed_by_others: set[File] = dataclasses.field(default_factory=set)
    """Files whose content another user has changed since: it stays, under any name."""
    early: set[File] = dataclasses.field(default_factory=set)
    published: set[File] = dataclasses.field(default_factory=set)
    contents: set[bytes] = dataclasses.field(default_factory=set)
    spoiled: set[File] = dataclasses.field(default_factory=set)
    removed_of_others: set[Path] = dataclasses.field(default_factory=set)
    """Directories of other users, which do not come back, nor what was below."""
    moved: dict[File | Directory, tuple[Directory, bytes]] = dataclasses.field(default_factory=dict)
    given: dict[File | Directory, Given] = dataclasses.field(default_factory=dict)
    arrived: dict[File, set[bytes]] = dataclasses.field(default_factory=dict)
    """Contents of files when they, or a directory above them, came into the set, or when it began:
    they may come back also if another user removes the name that they had then.
    """
    gone: set[bytes] = dataclasses.field(default_factory=set)
    """What was published in sets that have gone back since."""
    left: set[File] = dataclasses.field(default_factory=set)
    """Files that were moved out of it: what becomes of them is no matter of this set any more."""
    went: set[Directory] = dataclasses.field(default_factory=set)
    """Directories that were moved out: they come back, with what is in them."""
    lost: dict[Path, set[bytes]] = dataclasses.field(default_factory=dict)
    """Contents that others and logs had when their names were taken: with them they come back."""
    place: tuple[Directory, bytes] | None = None
    marked: bool = False
    followed: bool = False
    is_guess: bool = False
    """Its directory lies beside sets of who made it, and has shown nothing yet."""
    is_murky: bool = False
    """The promises do not say what becomes of it."""

    def path_of(self, directory: Directory, name: bytes) -> Path:
        return (*directory.path[len(self.top.path) :], name)

    def belongs(self, file: File, name: bytes) -> bool:
        return file not in self.apart and file.uid == self.uid and not is_log_name(name)

    def give(
        self,
        child: File | Directory,
        home: tuple[Directory, bytes],
        name: tuple[Directory, bytes],
    ) -> None:
        """It got a name in the set, and had another one."""
        if not self.has_old(child):
            return
        is_first = child not in self.given
        self.left -= {child} if isinstance(child, File) else {file for _, file in child.below()}
        found = self.given.setdefault(child, Given())
        found.homes.append(home)
        found.names.append(name)
        found.note(child)
        for _, file in [((), child)] if isinstance(child, File) else child.below():
            if file.committed is not None and is_first:
                self.arrived.setdefault(file, {file.committed} | self.before_of(file))

    def not_given(self, file: File) -> None:
        """It need not have a name, by itself or in a directory that came."""
        self.given.pop(file, None)
        self.left.add(file)

    def has_old(self, child: File | Directory) -> bool:
        """It was there when the set began, or comes from elsewhere."""
        if child in self.given:
            return True
        if isinstance(child, Directory):
            return not child.is_in(self.top)
        if child in self.before_files.values():
            return True
        return all(file is not child for _, file in self.top.below())

    def before_of(self, child: File) -> set[bytes]:
        """The contents of a file when the set began, or it came."""
        paths = [path for path, file in self.before_files.items() if file is child]
        was = {self.before[path] for path in paths if path in self.before}
        return was | self.arrived.get(child, set())

    def losing(self, path: Path, file: File) -> None:
        """A name is taken: what others wrote into the file, and a log, come back with all."""
        is_apart = path in self.foreign or file in self.apart or is_log_name(path[-1])
        if not is_apart or file.committed is None:
            return
        for each in (path, *(p for p, was in self.before_files.items() if was is file)):
            self.lost.setdefault(each, set()).add(file.committed)

    def members(self) -> list[tuple[Path, File]]:
        return [(p, f) for p, f in self.top.below() if self.belongs(f, p[-1])]

    def seen(self, directory: Directory, name: bytes, file: File) -> None:
        """A content of a member was published, or got this name."""
        self.spoiled.discard(file)
        if not file.handles:  # else more of it may come
            self.closed(directory, name, file)
        self.published.add(file)

    def closed(self, directory: Directory, name: bytes, file: File) -> None:
        """A member was closed, or got this name."""
        if directory is self.top and name in self.rule.done and self._is_marker(name, file):
            self.marked = self.marked or bool(self.published - {file})
            self.is_murky = self.is_murky or bool(self.went)  # what is in those may count
        if directory is self.top and self.is_new and matches(name, self.rule.needs):
            self._look_beside(file)

    def _look_beside(self, file: File) -> None:
        """It may have all files that come last in those beside it."""
        wanted = needed_beside(self.top, self.rule)
        found = {name: self.top.entries.get(name) for name in wanted}
        written = self.published | {file}
        if wanted and all(isinstance(f, File) and f in written and f.live for f in found.values()):
            self.marked = True
            self.is_murky = self.is_murky or any(is_torn(f.live) for f in found.values())

    def seen_beside(self, name: bytes, file: File) -> None:
        """The same, of a file beside its directory."""
        if name in self.rule.done_beside and self.published and self._is_marker(name, file):
            self.marked = True

    def _is_marker(self, name: bytes, file: File) -> bool:
        if file.uid != self.uid or file.born <= self.began:
            return False
        others = self.published - {file} or {file}
        self.is_murky = self.is_murky or file.is_linked or all(f.is_linked for f in others)
        if not file.live and not may_be_empty(name):
            return False
        self.is_murky = self.is_murky or is_torn(file.live)
        return True

    # --- ends -----------------------------------------------------------------------------------

    def is_written(self) -> bool:
        """Anything below its directory waits for its publication."""
        return any(file.is_dirty for _, file in self.top.below())

    def outcome(
        self,
        endings: dict[Hashable, Ending],
        now: float,
        *,
        lacks_marker: bool,
        closing: bool,
        of_saver: bool,
    ) -> Outcome:
        said = {endings.get(writer, Ending.ALIVE) for writer in self.writers}
        spoiled = self.spoiled & {file for _, file in self.top.below()}
        busy = any(f.is_dirty and f not in self.early for _, f in self.members())
        if self.marked and not busy and not spoiled:
            return Outcome.STAYS
        is_over = bool(said) and Ending.ALIVE not in said
        wrong = bool(spoiled or said & _WRONG)
        failed = wrong or (Ending.BADLY in said)
        expects = self.rule.expects_marker and self.place is None
        is_quiet = now - self.changed >= self.rule.quiet_seconds
        is_quiet = is_quiet and (is_over or not (expects and of_saver and self._has_part()))
        if closing:
            half = not (expects or self.place or self.followed or is_quiet)
            lacks = expects and not is_quiet and said != {Ending.WELL}
            back = failed or busy or lacks or (half and Ending.ALIVE in said)
            return Outcome.BACK if back or (lacks_marker and is_over) else Outcome.STAYS
        if busy and not (is_over and said & _WRONG):
            return Outcome.WAIT
        if is_over:
            if failed or lacks_marker:
                return Outcome.BACK
            return Outcome.STAYS if is_quiet or not expects else Outcome.WAIT
        if self.followed and not expects and not wrong:
            return Outcome.STAYS
        if not is_quiet:
            return Outcome.WAIT
        return Outcome.BACK if wrong else Outcome.STAYS

    def _has_part(self) -> bool:
        there = [(path[-1], file) for path, file in self.top.below() if file in self.published]
        is_new = self.is_new or self.was_removed
        return any(is_new or matches(name, self.rule.files) for name, _ in there)

    def goes_back(self, now: dict[Path, tuple[File, bytes]]) -> dict[Path, set[bytes | None]]:
        """What may be at each path below the top then; ``now``: what is there."""
        found: dict[Path, set[bytes | None]] = {}
        for path in self.before.keys() | now.keys():
            file, content = now.get(path, (None, None))
            if self._is_open(path, file):
                found[path] = {content, self.before.get(path), None}
            else:
                found[path] = {content if self._stays(path, file) else self.before.get(path)}
        for path, contents in self.lost.items():
            found[path] = found.get(path, {None}) | contents
        for path, was in self.before_files.items():
            if was.held is not None and path in found:
                found[path].add(was.held)  # once it is there again, its torn overwrite is judged
            if was in self.changed_by_others and len(found.get(path, ())) > 1:
                found[path].add(was.committed)  # it may come back under an earlier name
        return found

    def _is_open(self, path: Path, file: File | None) -> bool:
        """Nothing is promised of this name, but that no content is lost."""
        was = self.before_files.get(path)
        if path in dict(self.lost_their_directory()):
            return True
        if any(path[: len(above)] == above for above in self.removed_of_others):
            return True
        if path in self.loose or any(e is not None and e.is_linked for e in (file, was)):
            return True
        if file is not None and self.is_below_others(path):
            return True
        if self.is_new and not self.was_made and (is_log_name(path[-1]) or file in self.apart):
            return True
        if file is not None and file.uid == self.uid and was is not None and was.uid != self.uid:
            return True
        if was in self.apart and (file is None or file is not was):
            return True
        own = file is None or (file.uid == self.uid and file not in self.apart)
        new = self.is_new and file is not None and file.uid == self.uid
        return path in self.foreign and (own or new)

    def others_of(self, root: Directory) -> Iterator[Path]:
        """Of a set of which nothing is promised: what else is open then. Other names of its files,
        what came into it, and directories that left it.
        """
        files = {*self.before_files.values(), *self.published}
        files |= {file for _, file in self.top.below()}
        for path, file in root.below():
            if file in files:
                yield path
        for given in self.given.values():
            yield from ((*above.path, name) for above, name in (*given.homes, *given.names))
        yield from ((*above.path, name) for above, name in self.moved.values())
        yield from (directory.path for directory in self.went)

    def lost_their_directory(self) -> Iterator[tuple[Path, bytes]]:
        """What was in directories that do not come back, and comes back elsewhere."""
        for path, content in self.before.items():
            if any(path[: len(above)] == above for above in self.removed_of_others):
                yield path, content

    def is_below_others(self, path: Path) -> bool:
        """It lies in a directory of another user, there."""
        here = [self.top.find(path[:count]) for count in range(1, len(path))]
        return any(isinstance(each, Directory) and each.uid != self.uid for each in here)

    def _stays(self, path: Path, file: File | None) -> bool:
        if path in self.foreign or file in self.changed_by_others:
            return True
        if file is not None and file.uid != self.uid:
            return True
        if self.was_made and self.is_new:
            return False  # its own logs go with it
        if is_log_name(path[-1]) or (file is not None and file in self.apart):
            return True
        was = self.before_files.get(path)
        return was is not None and (was.uid != self.uid or was in self.apart)


def counts(top: Directory, child: File | Directory, name: bytes) -> bool:
    """It shows that something is there, where a set may begin."""
    if isinstance(child, Directory):
        return child.uid == top.uid
    is_log = is_log_name(name) or child.is_log
    return child.committed is not None and child.uid == top.uid and not is_log
