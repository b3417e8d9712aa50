"""A store against a plain model: any verbs in any order, with crashes and clean remounts between.

``CXLFS_PROPERTY=long`` runs far more and longer programs.
"""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from cxlfs.errors import BusyError, NoSpaceError
from cxlfs.media import Granularity, SimulatedMedia
from cxlfs.store import Store
from cxlfs.verify import run_passes
from tests.support.model import ModelFile, ModelHandle, truncate, write
from tests.support.stores import clean_round, format_small, read_file, reopen

LONG = os.environ.get("CXLFS_PROPERTY") == "long"
pytestmark = [pytest.mark.timeout(0)] if LONG else []
NAMES = [b"a", b"b", b"c", b"d"]
names = st.sampled_from(NAMES)
pieces = st.builds(
    lambda seed, size: (bytes([seed]) + bytes(range(256))) * (size // 257 + 1),
    st.integers(0, 255),
    st.sampled_from([1, 300, 5000, 70_000]),
)
offsets = st.sampled_from([0, 1, 63, 4096, 5000, 100_000])


class StoreMachine(RuleBasedStateMachine):
    """Directories are names of directories at the root; each holds the same four names."""

    writers = Bundle("writers")

    def __init__(self) -> None:
        super().__init__()
        media = SimulatedMedia(4 << 20, self.granularity)
        format_small(media)
        self.store = Store.open(media)
        media.restart()
        self.directories: dict[bytes, int] = {b"": 1}
        self.files: dict[tuple[bytes, bytes], ModelFile] = {}
        self.handles: dict[int, ModelHandle] = {}
        self.once_committed: set[bytes] = set()
        """Contents that files had committed after some step."""
        self.died: dict[tuple[int, int], bytes] = {}
        """What rows of history said when they came."""

    granularity = Granularity.LINE

    # --- helpers ----------------------------------------------------------------------------

    def parent(self, directory: bytes) -> int:
        return self.directories[directory]

    def opened(self, file: ModelFile) -> list[ModelHandle]:
        return [handle for handle in self.handles.values() if handle.file is file]

    def drop_name(self, place: tuple[bytes, bytes]) -> None:
        file = self.files.pop(place, None)
        if file is not None:
            file.names -= 1

    def some(self, data: st.DataObject) -> tuple[bytes, bytes]:
        return data.draw(st.sampled_from(sorted(self.files)))

    # --- files ------------------------------------------------------------------------------

    @rule(target=writers, data=st.data(), name=names)
    def create(self, data: st.DataObject, name: bytes) -> object:
        directory = data.draw(st.sampled_from(sorted(self.directories)))
        if (directory, name) in self.files or (not directory and name in self.directories):
            return multiple()
        _, handle = self.store.create(self.parent(directory), name, 0o644, 0, 0, os.O_RDWR)
        file = self.files[directory, name] = ModelFile()
        self.handles[handle] = ModelHandle(file, truncated=False)
        return handle

    @precondition(lambda self: self.files)
    @rule(target=writers, data=st.data(), cut=st.booleans())
    def open_writer(self, data: st.DataObject, cut: bool) -> object:
        directory, name = self.some(data)
        file = self.files[directory, name]
        if self.opened(file):
            return multiple()
        ino = self.store.lookup(self.parent(directory), name).ino
        handle = self.store.open_file(ino, os.O_RDWR | (os.O_TRUNC if cut else 0))
        if cut:
            file.live.clear()
        self.handles[handle] = ModelHandle(file, truncated=cut)
        return handle

    @rule(handle=writers, offset=offsets, piece=pieces)
    def write(self, handle: int, offset: int, piece: bytes) -> None:
        if handle in self.handles:
            self.store.write(handle, offset, piece)
            write(self.handles[handle].file, offset, piece)

    @rule(handle=writers, size=st.sampled_from([1, 64, 4097, 200_000]))
    def cut(self, handle: int, size: int) -> None:
        if handle in self.handles:
            inode = self.store.files.get(handle).inode
            self.store.set_attributes(inode.ino, size=size, handle=handle)
            truncate(self.handles[handle].file, size)

    @rule(
        handle=writers,
        offset=offsets,
        length=st.sampled_from([1, 4096, 60_000]),
        kind=st.sampled_from(["punch", "zero", "zero and keep", "allocate"]),
    )
    def allocate(self, handle: int, offset: int, length: int, kind: str) -> None:
        if handle not in self.handles:
            return
        file, keep = self.handles[handle].file, kind in ("punch", "zero and keep")
        zero = kind.startswith("zero")
        self.store.allocate(
            handle, offset, length, keep_size=keep, punch=kind == "punch", zero=zero
        )
        if not keep:
            truncate(file, max(len(file.live), offset + length))
        if kind != "allocate":
            end = min(offset + length, len(file.live))
            file.live[offset:end] = bytes(max(0, end - offset))

    @rule(
        source=writers,
        goal=writers,
        place=st.tuples(offsets, offsets),
        length=st.sampled_from([1, 4096, 60_000, 1 << 40]),
    )
    def copy(self, source: int, goal: int, place: tuple[int, int], length: int) -> None:
        if source not in self.handles or goal not in self.handles:
            return
        files = self.handles[source].file, self.handles[goal].file
        taken = bytes(files[0].live[place[0] : place[0] + length])
        if files[0] is files[1] and abs(place[0] - place[1]) < len(taken):
            return
        done = self.store.ranges.copy(source, place[0], goal, place[1], length)
        assert done == len(taken)
        if taken:
            write(files[1], place[1], taken)

    @rule(handle=writers)
    def fsync(self, handle: int) -> None:
        if handle in self.handles:
            self.store.fsync(handle)
            self.handles[handle].file.publish()

    @rule(handle=consumes(writers), killed=st.booleans())
    def close(self, handle: int, killed: bool) -> None:
        if handle not in self.handles:
            return
        wrote = self.store.files.get(handle).wrote
        unpublished = self.store.files.get(handle).inode.version is not None
        self.store.flush(handle, writer_killed=killed)
        self.store.release(handle)
        opened = self.handles.pop(handle)
        file = opened.file
        if not killed:
            file.publish()
        elif opened.truncated and file.committed is not None and (wrote or unpublished):
            file.live = bytearray(file.committed)
        elif unpublished:
            file.incomplete = file.committed is None or file.incomplete
            file.committed = bytes(file.live)

    @rule(everything=st.booleans())
    def periodic_commit(self, everything: bool) -> None:
        if everything:
            self.store.sync()
        else:
            self.store.commits.commit_old(older_than=1e18)
        for opened in self.handles.values():
            file = opened.file
            if not opened.truncated or file.committed is None:
                file.incomplete = file.committed is None or file.incomplete
                file.committed = bytes(file.live)
                opened.truncated = False

    # --- names ------------------------------------------------------------------------------

    @precondition(lambda self: self.files)
    @rule(data=st.data())
    def unlink(self, data: st.DataObject) -> None:
        directory, name = self.some(data)
        self.store.unlink(self.parent(directory), name)
        self.drop_name((directory, name))

    @precondition(lambda self: self.files)
    @rule(data=st.data(), name=names)
    def link(self, data: st.DataObject, name: bytes) -> None:
        directory, old = self.some(data)
        target = data.draw(st.sampled_from(sorted(self.directories)))
        if (target, name) in self.files or (not target and name in self.directories):
            return
        file = self.files[directory, old]
        ino = self.store.lookup(self.parent(directory), old).ino
        self.store.link(ino, self.parent(target), name)
        file.publish()
        file.names += 1
        self.files[target, name] = file

    @precondition(lambda self: self.files)
    @rule(data=st.data(), name=names)
    def rename(self, data: st.DataObject, name: bytes) -> None:
        source = self.some(data)
        directory = data.draw(st.sampled_from(sorted(self.directories)))
        if not directory and name in self.directories:
            return
        file = self.files[source]
        self.store.rename(self.parent(source[0]), source[1], self.parent(directory), name)
        if self.files.get((directory, name)) is file:
            return
        file.publish()
        self.drop_name((directory, name))
        self.files[directory, name] = self.files.pop(source)

    @precondition(lambda self: len(self.directories) < 3)
    @rule(name=names)
    def make_directory(self, name: bytes) -> None:
        if name not in self.directories and (b"", name) not in self.files:
            self.directories[name] = self.store.make_directory(1, name, 0o755, 0, 0).ino

    @precondition(lambda self: len(self.directories) > 1)
    @rule(data=st.data(), name=names)
    def rename_directory(self, data: st.DataObject, name: bytes) -> None:
        old = data.draw(st.sampled_from(sorted(set(self.directories) - {b""})))
        if name in self.directories or (b"", name) in self.files:
            return
        self.store.rename(1, old, 1, name)
        self.directories[name] = self.directories.pop(old)
        for place in [p for p in self.files if p[0] == old]:
            self.files[name, place[1]] = self.files.pop(place)

    @precondition(lambda self: len(self.store.past))
    @rule(data=st.data(), name=names)
    def restore(self, data: st.DataObject, name: bytes) -> None:
        row = data.draw(st.sampled_from(list(self.store.past)))
        directory = data.draw(st.sampled_from(sorted(self.directories)))
        if not directory and name in self.directories:
            return
        file = self.files.get((directory, name))
        if file is not None and bytes(file.live) != file.committed:
            return
        try:
            self.store.history.restore(row, self.parent(directory), name)
        except BusyError:
            return
        file = self.files.setdefault((directory, name), ModelFile())
        file.live = bytearray(self.died[row.key])
        file.publish()
        file.incomplete = row.is_incomplete

    # --- the store --------------------------------------------------------------------------

    @rule()
    def rollover(self) -> None:
        self.store.volume.rollover()

    @rule()
    def clean(self) -> None:
        try:
            clean_round(self.store, 0.97)
        except NoSpaceError:
            return

    @rule()
    def crash(self) -> None:
        self._restart(clean=False)

    @rule(
        during=st.sampled_from(["nothing", "rollover", "clean", "commit"]),
        where=st.floats(0, 1),
        subset=st.randoms(use_true_random=False),
    )
    def power_cut(self, during: str, where: float, subset: random.Random) -> None:
        """At a random event of something that changes no state, with random words of those in
        flight. What was committed is there; on page media that is what a commit point covered.
        """
        self.store.fsync_directory(1)
        media = self.store.media
        assert isinstance(media, SimulatedMedia)
        begin = len(media.events())
        if during == "rollover":
            self.rollover()
        elif during == "clean":
            self.clean()
        elif during == "commit":
            self._stage_overwrites()
        self.store.abandon()
        cursor = media.cursor()
        cursor.advance(begin + int(where * (len(cursor.log) - begin)))
        in_flight = cursor.in_flight()
        share = subset.choice([0.0, 0.1, 0.5, 0.9, 1.0])
        mask = np.array([subset.random() < share for _ in range(len(in_flight))], dtype=np.bool_)
        media.load(cursor.image(mask))
        media.restart()
        self._opened(Store.open(media))

    def _stage_overwrites(self) -> None:
        """Of the periodic commit only what changes no committed state."""
        for inode in list(self.store.versions.open_versions.values()):
            if getattr(inode.version, "atomic", False) and not inode.uncommitted:
                self.store.versions.stage(inode)

    @rule()
    def remount(self) -> None:
        for opened in self.handles.values():
            file = opened.file
            if not opened.truncated or file.committed is None:
                unpublished = file.committed is None or bytes(file.live) != file.committed
                file.incomplete |= file.committed is None and unpublished
                file.committed = bytes(file.live)
        self._restart(clean=True)

    def _restart(self, *, clean: bool) -> None:
        self._opened(reopen(self.store, clean=clean))

    def _opened(self, store: Store) -> None:
        self.store = store
        assert self.store.read_only_reason is None
        assert self.store.recovery.problems == []
        self.handles.clear()
        self.files = {p: f for p, f in self.files.items() if f.committed is not None}
        for file in self.files.values():
            file.live = bytearray(file.committed or b"")

    # --- what must hold ---------------------------------------------------------------------

    @invariant()
    def same_history(self) -> None:
        """A row is what was committed after some step before, and stays as it was."""
        for row in self.store.past:
            data = b"" if row.data is None else bytes(row.data.read(0, row.data.size))
            if row.key not in self.died:
                assert data in self.once_committed, row.key
            assert self.died.setdefault(row.key, data) == data
        for file in self.files.values():
            if file.committed is not None:
                self.once_committed.add(file.committed)

    @invariant()
    def same_state(self) -> None:
        found: dict[tuple[bytes, bytes], tuple[bytes, int]] = {}
        for directory, ino in self.directories.items():
            for name, child in (self.store.namespace.get(ino).entries or {}).items():
                inode = self.store.namespace.get(child)
                if inode.entries is None:
                    found[directory, name] = read_file(self.store, child), inode.links
        expected = {place: (bytes(f.live), f.names) for place, f in self.files.items()}
        assert found == expected
        for (directory, name), file in self.files.items():
            ino = self.store.lookup(self.parent(directory), name).ino
            state = self.store.get_xattr(ino, b"user.cxlfs.state")
            incomplete = file.committed is None or file.incomplete
            assert state == (b"incomplete" if incomplete else b"complete"), (directory, name)

    def teardown(self) -> None:
        media = self.store.media
        self.store.abandon()
        assert list(run_passes(media, structure_only=False)) == []
        media.close()


class PageStoreMachine(StoreMachine):
    """The same on an ordinary file's granularity."""

    granularity = Granularity.PAGE


BUDGET = settings(
    max_examples=500 if LONG else 25,
    stateful_step_count=150 if LONG else 40,
    suppress_health_check=list(HealthCheck),
)
TestLine = StoreMachine.TestCase
TestLine.settings = BUDGET
TestPage = PageStoreMachine.TestCase
TestPage.settings = BUDGET
