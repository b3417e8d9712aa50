"""A checkpoint directory on a bench, and what a user sees of it after a cut: all old or all new.

Whether a unit is open is told by the workload itself, and what it shows then is what was seen when
it began: neither is asked of the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Hashable, Iterator

from cxlfs.store import unit_garbage, unit_keeping, unit_large
from cxlfs.store.health import HIDDEN_PREFIX
from cxlfs.store.namespace import FileKind
from cxlfs.store.space import LEASE_BYTES_LEAST
from cxlfs.store.unit_aside import ASIDE_NAME
from cxlfs.store.unit_rules import UnitsMode
from tests.support.crash.bench import Bench
from tests.support.crash.tape import State, committed_state

MARKER = b"trainer_state.json"
SET = b"checkpoint-1"
TRUNCATE = os.O_RDWR | os.O_TRUNC
_PLACE = b"/" + ASIDE_NAME


def user_view(state: State) -> State:
    """Without what is kept aside, and without what changes where a unit goes back: hidden
    attributes, times of change, times of directories, and link counts (of names outside).
    """
    found: State = {}
    for path, entry in state.items():
        if path == _PLACE or path.startswith(_PLACE + b"/"):
            continue
        xattrs = tuple(item for item in entry.xattrs if not item[0].startswith(HIDDEN_PREFIX))
        changes: dict[str, object] = {"xattrs": xattrs, "ctime_ns": 0, "nlink": 0}
        if entry.kind is FileKind.DIRECTORY:
            changes |= {"atime_ns": 0, "mtime_ns": 0, "ctime_ns": 0}
        found[path] = dataclasses.replace(entry, **changes)  # type: ignore[arg-type]
    return found


def _below(state: State, path: bytes) -> State:
    top = b"/" + path
    return {p: entry for p, entry in state.items() if p == top or p.startswith(top + b"/")}


class Scene:
    """A bench with units. What is open goes back, at a cut, to what it was when it began."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.units = bench.store.units
        self.units.policies.mode = UnitsMode.AUTO
        self.units.active = True
        self.now = 0.0
        self.units.clock = lambda: self.now
        self._open: dict[bytes, State] = {}
        self._removed: dict[bytes, Hashable | None] = {}
        """Units that were removed and can come back, the oldest first: by whom."""
        self._followed: set[bytes] = set()
        """Those behind which their remover has begun the next one beside them."""
        self.stays: dict[bytes, bytes] = {}
        """Paths of what belongs to no unit: where it is when the unit has gone back."""
        self.gone: set[bytes] = set()
        """Of what did not, and was removed."""
        self._drop_removed = bench.store.room.drop_removed
        bench.store.room.drop_removed = self._give_up_oldest
        bench.tape.view = user_view
        bench.tape.committed = self._committed

    def _committed(self) -> State:
        state = user_view(committed_state(self.bench.store))
        for path, before in self._open.items():
            below = _below(state, path)
            for gone in below:
                del state[gone]
            state |= {place: entry for place, entry in before.items() if place not in self.gone}
            state |= {to: below[at] for at, to in self.stays.items() if at in below}
            names = {entry.ino: entry for entry in before.values() if entry.kind is FileKind.FILE}
            inside = _below(state, path)
            for place, entry in state.items():  # names elsewhere of files that go back
                if place not in inside:
                    state[place] = names.get(entry.ino, entry)
        return state

    def begin(self, path: bytes) -> None:
        """From here on the directory is an open unit."""
        self._follow(path)
        self._open[path] = _below(user_view(committed_state(self.bench.store)), path)

    def begin_without(self, path: bytes) -> None:
        """The same of an empty directory: it goes away with what is in it."""
        self._follow(path)
        self._open[path] = {}

    def is_open(self, path: bytes) -> bool:
        return path in self._open

    def end(self, path: bytes) -> None:
        del self._open[path]
        self._removed.pop(path, None)
        self._followed.discard(path)

    # --- removals that stand ------------------------------------------------------------------

    def _follow(self, path: bytes) -> None:
        """The program that begins this unit has removed some beside it."""
        who = self.units.writer()
        for removed, remover in self._removed.items():
            beside = os.path.dirname(removed) == os.path.dirname(path)  # noqa: PTH120  bytes
            if beside and removed != path and who in {None, remover}:
                self._followed.add(removed)

    def _let_stand(self) -> None:
        """Whoever commits next makes removals stand that were followed: in a record behind his."""
        for path in list(self._followed):
            self.end(path)

    def _give_up_oldest(self) -> bool:
        """A write asks for the room of what was removed: it gets it only where no other is, and
        then the removal that is the oldest one stands.
        """
        store, space = self.bench.store, self.bench.store.volume.space
        assert space.available_bytes < LEASE_BYTES_LEAST, "there is room"
        assert not space.collect_dead(), "there is room when what is dead is given back"
        asides = store.versions.asides.values()
        assert all(inode.version is not None for inode in asides), "a killed writer left some"
        assert not self.units.garbage.is_removing, "there is some that nobody wants"
        used = [int(each) for each in store.volume.engine.usage() if each]
        payload_bytes = store.superblock.segment_payload_bytes
        assert sum(used) > (len(used) - 1) * payload_bytes, "there is room when it is gathered"
        gave = self._drop_removed()
        assert gave == bool(self._removed), "what nobody has removed is given up"
        if gave:
            self.end(next(iter(self._removed)))
        return gave

    # --- verbs ------------------------------------------------------------------------------

    def make(self, path: bytes) -> None:
        store, place = self.bench.store, self.bench.place(path)
        self.bench.do("mkdir", lambda: store.make_directory(*place, 0o755, 0, 0))
        self._removed.pop(path, None)  # it takes over what comes back

    def remove(self, path: bytes) -> None:
        store, place = self.bench.store, self.bench.place(path)
        self.bench.do("rmdir", lambda: store.remove_directory(*place))
        if self._open.get(path):
            self._removed[path] = self.units.writer()

    def move_in(self, old: bytes, new: bytes) -> None:
        """From elsewhere to a name in an open unit."""

        def action() -> None:
            self.bench.store.rename(*self.bench.place(old), *self.bench.place(new))
            self.stays[b"/" + new] = b"/" + old

        self.bench.do("move in", action, commits=True)

    def close(self, handle: int) -> None:
        self._let_stand()
        self.bench.close(handle)

    def open(self, path: bytes, flags: int = TRUNCATE) -> int:
        """A handle; where it begins a unit, that is committed."""
        made: list[int] = []
        store = self.bench.store

        def action() -> None:
            directory, name = self.bench.place(path)
            inode = store.namespace.find(directory, name)
            if inode is None:
                made.append(store.create(directory, name, 0o644, 1, 1, os.O_RDWR)[1])
                inode = store.files.get(made[0]).inode
            else:
                made.append(store.open_file(inode.ino, flags))
            if flags & os.O_TRUNC:
                self.bench.contents[inode.ino] = bytearray()

        self.bench.do("open", action, late=True, keeps=True, steps=True)
        return made[0]

    def save(self, path: bytes, length: int) -> None:
        handle = self.open(path)
        self.bench.write(handle, 0, length)
        self.close(handle)

    def finish(self, path: bytes, length: int, of: bytes) -> None:
        """Save the file that ends the unit ``of``."""
        handle = self.open(path)
        self.bench.write(handle, 0, length)
        self.ending("last close", of, lambda: self.bench.store.flush(handle, writer_killed=False))
        self.bench.do("release", lambda: self.bench.store.release(handle), late=True, keeps=True)

    def step(self, path: bytes) -> bool:
        """One step of keeping the content of a file, as its change asks for; False: it is kept, and
        nothing is changed yet.
        """
        ino = self.bench.inode(path).ino
        versions = self.bench.store.versions
        more: list[bool] = []
        prepare = versions.prepare_change
        self.bench.do(
            "step", lambda: more.append(prepare(ino, emptied=True)), late=True, keeps=True
        )
        return more[0]

    def ending(self, name: str, path: bytes, action: Callable[[], object]) -> None:
        """A verb that ends a unit: durable when it returns, one step for whoever looks."""
        assert not self._followed, "it ends two, in two steps"

        def whole() -> None:
            action()
            assert path not in {u.inode.name for u in self.units.open_units()}, "it is still open"
            self.end(path)

        self.bench.do(name, whole, commits=True)

    def write_in_place(self, handle: int, length: int) -> None:
        """Perhaps the first change of a unit: that it is open is committed then."""
        store = self.bench.store
        self.bench.do(
            "write",
            lambda: store.write(handle, 100, b"w" * length),
            late=True,
            keeps=True,
            steps=True,
        )
        self.bench.contents.pop(store.files.get(handle).inode.ino, None)

    def keeping(self, path: bytes, action: Callable[[], object]) -> None:
        """A verb behind which no cut takes the unit back, while an error of its writer may."""

        def whole() -> None:
            action()
            assert [u.kept for u in self.units.open_units() if u.inode.name == path] == [True]
            self.end(path)

        self.bench.do("kept", whole, commits=True)

    def before(self, path: bytes) -> State:
        """What an open unit was when it began."""
        return self._open[path]

    def back_to(self, path: bytes, before: State) -> None:
        """The store takes back what no cut did: one step for whoever looks."""

        def whole() -> None:
            assert self.units.settle(), "nothing was decided"
            assert _below(user_view(committed_state(self.bench.store)), path) == before

        self.bench.do("back", whole, commits=True)

    def back(self, path: bytes) -> None:
        """The store takes the unit back by itself: after a cut it is as before in any case."""
        before = _below(self._committed(), path)

        def whole() -> None:
            assert self.units.settle(), "nothing was decided"
            self.end(path)
            state = user_view(committed_state(self.bench.store))
            assert _below(state, path) == before, "what is there is not what was"

        self.bench.do("back", whole, late=True, keeps=True)

    def start(self) -> None:
        self.bench.store.fsync_directory(1)
        self.bench.tape.start()


@contextlib.contextmanager
def short_steps() -> Iterator[None]:
    """Every content takes several records to keep, of one reference each."""
    usual = unit_large.REFS_AT_ONCE, unit_keeping._RECORD_PART
    unit_large.REFS_AT_ONCE, unit_keeping._RECORD_PART = 1, 1 << 20
    try:
        yield
    finally:
        unit_large.REFS_AT_ONCE, unit_keeping._RECORD_PART = usual


@contextlib.contextmanager
def short_removals() -> Iterator[None]:
    """Two names in each record that takes apart what was kept."""
    usual, unit_garbage._NAMES_AT_ONCE = unit_garbage._NAMES_AT_ONCE, 2
    try:
        yield
    finally:
        unit_garbage._NAMES_AT_ONCE = usual


def complete_set(bench: Bench) -> Scene:
    """A complete checkpoint of three files and a directory below, and the tape."""
    scene = Scene(bench)
    scene.make(SET)
    scene.begin(SET)
    scene.make(SET + b"/below")
    for name, length in ((b"/a", 6000), (b"/b", 700), (b"/below/c", 5000)):
        scene.save(SET + name, length)
    handle = scene.open(SET + b"/a", os.O_RDWR)
    scene.write_in_place(handle, 50)  # it has three references
    scene.close(handle)
    scene.finish(SET + b"/" + MARKER, 90, SET)
    bench.store.link(bench.inode(SET + b"/b").ino, 1, b"outside")
    bench.store.units.settle(closing=True)
    while bench.store.units.maintain():
        pass
    scene.start()
    return scene
