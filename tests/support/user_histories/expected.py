"""What must be there after sets went back, and how it is compared with what is.

Other modules say which sets do (``world``).
"""

from __future__ import annotations

import dataclasses

from tests.support.user_histories.model import Directory, File, Path, Picture, is_torn
from tests.support.user_histories.sets import ChangeSet


class Violation(AssertionError):  # noqa: N818 - of a promise
    """A promise was broken."""


@dataclasses.dataclass(eq=False)
class Expected:
    """``files``: what is there. ``either``: what may be, where a set goes back. ``open_below``:
    nothing is promised below these. ``somewhere``: contents that were moved in, and have no place;
    ``anywhere``: contents that may have one more name.
    """

    files: Picture
    open_below: list[Path] = dataclasses.field(default_factory=list)
    either: dict[Path, set[bytes | None]] = dataclasses.field(default_factory=dict)
    somewhere: set[bytes] = dataclasses.field(default_factory=set)
    anywhere: set[bytes] = dataclasses.field(default_factory=set)
    must: set[frozenset[bytes]] = dataclasses.field(default_factory=set)
    """Of each file that got a name: one of these has one."""
    going: list[Directory] = dataclasses.field(default_factory=list)
    """Directories of all sets that go back now."""
    was: dict[File, set[bytes]] = dataclasses.field(default_factory=dict)
    """What files were before the sets began that go back."""
    committed: set[bytes] = dataclasses.field(default_factory=set)
    """Contents that had a name then."""

    def go_back(self, each: ChangeSet, root: Directory, view: Picture) -> None:
        """``view``: what is there at each path, before it goes back."""
        if each.place is not None:
            above, name = each.place
            if not is_there(above, root) or name in above.entries:
                return
            top = (*above.path, name)
        else:
            top = each.top.path
        now = {
            path: (file, view[(*top, *path)])
            for path, file in each.top.below()
            if each.place is None and (*top, *path) in view
        }
        for path in [path for path in self.files if path[: len(top)] == top]:
            del self.files[path]
        for file, content in now.values():
            if file.is_linked:
                self.anywhere.add(content)
        for path, allowed in each.goes_back(now).items():
            self.either[*top, *path] = self.either.get((*top, *path), set()) | allowed
            if allowed != {was := each.before.get(path)}:  # or as NAME.moved-in
                self.anywhere |= {content for content in (*allowed, was) if content is not None}
        self._other_names(each, root, view, top)
        for child, place in each.moved.items():
            self._moved_out(each, child, place, root, view)
        self._directories(each, view)

    def _directories(self, each: ChangeSet, view: Picture) -> None:
        """Those that left it come back, with what is in them. What was in some that do not come
        back is elsewhere.
        """
        for directory in each.went:
            below = (directory.path + path for path, _ in directory.below())
            self.open_below.append(directory.path)
            self.anywhere |= {view[path] for path in below if path in view}
        for path, content in each.lost_their_directory():
            self.anywhere.add(content)
            if not each.is_murky and each.belongs(each.before_files[path], path[-1]):
                self.must.add(frozenset({content}))

    def _other_names(self, each: ChangeSet, root: Directory, view: Picture, top: Path) -> None:
        """A link outside sees the file as it is, or as it was."""
        was = {f: each.before[path] for path, f in each.before_files.items() if path in each.before}
        for file, content in was.items():
            self.was.setdefault(file, set()).add(content)
        for path, file in root.below():
            if path[: len(top)] == top or path not in view:
                continue
            if file.is_linked:
                self.anywhere.add(view[path])
            if file in was:
                self.either[path] = self.either.get(path, {view[path]}) | {was[file]}

    def give_back(self, each: ChangeSet, root: Directory, born: set[bytes]) -> None:
        """What got a name in a set has the one again that it had, or keeps what it got; but for
        what was ``born`` in another one that may go back, too.
        """
        for child, given in each.given.items():
            given.note(child)
            places = {(*above.path, name) for above, name in (*given.homes, *given.names)}
            if isinstance(child, File):
                places |= {path for path, file in root.below() if file is child}
            for rest, contents in given.contents.items():
                file = child if isinstance(child, File) else child.find(rest)
                allowed = set(contents)
                if isinstance(file, File):
                    allowed |= each.before_of(file) | self.was.get(file, set())
                for place in places:
                    path = (*place, *rest)
                    before = each.before.get(path[len(each.top.path) :])
                    have = self.either.get(path, {self.files.get(path)})
                    self.either[path] = have | allowed | {None, before}
                self.anywhere |= allowed
                was_made = file is not child and isinstance(file, File) and file not in each.arrived
                may_go = allowed & born or given.files[rest] & each.left
                if not (each.is_murky or was_made or may_go):
                    self.must.add(frozenset(allowed))

    def _moved_out(
        self,
        each: ChangeSet,
        child: File | Directory,
        place: tuple[Directory, bytes],
        root: Directory,
        view: Picture,
    ) -> None:
        """What was moved in is where it was, or somewhere."""
        above, name = place
        for path, file in each.top.below():
            whole = (*each.top.path, *path)
            rest = rest_of(each.top, path, child)
            if rest is None or whole not in view:
                continue
            if file.is_linked:
                self.anywhere.add(view[whole])
            elif path in each.loose or file.uid != each.uid or each.is_below_others(path):
                self.somewhere.add(view[whole])
                self.either[whole] = self.either.get(whole, set()) | {view[whole], None}
            elif list(each.moved.values()).count(place) > 1 or any(map(above.is_in, self.going)):
                self.somewhere.add(view[whole])
            elif is_there(above, root) and name not in above.entries:
                self.files[*above.path, name, *rest] = view[whole]
            else:
                self.somewhere.add(view[whole])

    def compare(self, found: Picture) -> None:
        """Raises Violation."""
        problems = []
        for path in sorted(self.files.keys() | self.either.keys() | found.keys()):
            if any(path[: len(top)] == top for top in self.open_below):
                continue
            want, have = self.files.get(path), found.get(path)
            allowed = self.either.get(path, {want})
            moved_in = path not in self.files and have in self.somewhere | self.anywhere
            if have not in allowed and not moved_in:
                wanted = " or ".join(map(say, allowed))
                problems.append(f"{show(path)}: {say(have)}, expected {wanted}")
        problems += [f"{say(c)} has no name" for c in self.somewhere - set(found.values())]
        there = set(found.values())
        problems += [
            f"none of {', '.join(map(say, each))} has a name"
            for each in self.must
            if not each & there
        ]
        if problems:
            raise Violation("; ".join(problems))


def require(wanted: set[bytes], there: set[bytes]) -> None:
    """Every whole content is there, or the beginning of one that is. Raises Violation."""
    for content in wanted - there:
        if is_torn(content) or any(each.startswith(content) for each in there):
            continue
        raise Violation(f"{say(content)} has lost its last name, and history does not have it")


def is_there(directory: Directory, root: Directory) -> bool:
    return root.find(directory.path) is directory


def rest_of(top: Directory, path: Path, child: File | Directory) -> Path | None:
    """The names below ``child`` that lead to a path below ``top``; None: it is not on the way."""
    for count in range(1, len(path) + 1):
        if top.find(path[:count]) is child:
            return path[count:]
    return None


def show(path: Path) -> str:
    return b"/".join(path).decode()


def say(content: bytes | None) -> str:
    return "nothing" if content is None else f"{len(content)} bytes {content[:24]!r}"
