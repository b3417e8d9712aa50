"""What operations work on: a tiny recorded store with a bit of everything in it.

Every operation is total: where what it wants is not there any more (an earlier operation took it
away), the verb is refused, which is a result like any other.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from cxlfs.errors import NotFoundError
from cxlfs.media import Granularity, SimulatedMedia
from cxlfs.store import Store
from cxlfs.store.files import Handle
from cxlfs.store.namespace import Inode
from tests.support.crash.tape import MEDIA_BYTES, Tape, format_tiny
from tests.support.crash.world import WORLD
from tests.support.model import truncate_bytes as truncate_model
from tests.support.model import write_bytes as write_model
from tests.support.slips import Locks
from tests.support.stores import write_file

STAGE_BASE = 1
STAGE_OPEN = 2
PATTERN = bytes(range(1, 256)) * 129  # 32 895 bytes: no zeros, no two lines alike


def data(length: int, salt: int = 0) -> bytes:
    """``length`` bytes that are not those of another ``salt``."""
    return PATTERN[salt : salt + length]


class Bench:
    """``store`` and ``tape`` of one workload, and the verbs that operations are written in."""

    def __init__(self, store: Store, tape: Tape) -> None:
        self.store = store
        self.tape = tape
        self.salt = 0
        self.contents: dict[int, bytearray] = {}
        """What programs wrote, by inode number: what readers must see, and what is committed."""
        self.left_open: list[int] = []
        """Handles that an operation did not close: others may go on with them."""
        self.after_each: Callable[[], None] | None = None
        """What happens behind every verb."""
        self.locks: Locks | None = None
        """What programs that store by themselves have locked; None: there was none."""
        self.left_by_killed: set[int] = set()
        """Inodes with content that a killed program left: others publish it if they wrote, too."""

    # --- finding ----------------------------------------------------------------------------

    def inode(self, path: bytes) -> Inode:
        """Raises NotFoundError."""
        inode = self.store.namespace.get(1)
        for part in path.split(b"/"):
            found = (
                self.store.namespace.find(inode.ino, part) if inode.entries is not None else None
            )
            if found is None:
                raise NotFoundError(f"no {path!r}")
            inode = found
        return inode

    def place(self, path: bytes) -> tuple[int, bytes]:
        """Directory and name; raises NotFoundError."""
        above, _, name = path.rpartition(b"/")
        return (self.inode(above).ino if above else 1), name

    def fresh(self, length: int) -> bytes:
        """Other bytes at each call."""
        self.salt += 1
        return data(length, self.salt % 97)

    # --- verbs ------------------------------------------------------------------------------

    def do(self, name: str, action: Callable[[], object], **promises: bool) -> bool:
        done = self.tape.verb(name, action, **promises)
        if self.after_each is not None:
            self.after_each()
        return done

    def create(self, path: bytes, flags: int = os.O_RDWR) -> int | None:
        """A handle on a new file, or on the one that is there."""
        made: list[int] = []

        def action() -> None:
            attributes, handle = self.store.create(*self.place(path), 0o644, 1, 1, flags)
            made.append(handle)
            self.contents[attributes.ino] = bytearray()

        done = self.do("create", action, late=True, keeps=True)
        return made[0] if done else self.open(path, flags)

    def open(self, path: bytes, flags: int = os.O_RDWR) -> int | None:
        made: list[int] = []

        def action() -> None:
            inode = self.inode(path)
            made.append(self.store.open_file(inode.ino, flags))
            if flags & os.O_TRUNC:
                self.contents[inode.ino] = bytearray()
                self.left_by_killed.discard(inode.ino)

        return made[0] if self.do("open", action, late=True, keeps=True) else None

    def content(self, inode: Inode) -> bytearray:
        """Of a file that nobody wrote so far: what is there."""
        if inode.ino not in self.contents:
            self.contents[inode.ino] = bytearray(_bytes_of(inode))
        return self.contents[inode.ino]

    def write(self, handle: int | None, offset: int, length: int) -> bool:
        if handle is None:
            return False
        payload = self.fresh(length)
        inode = self.store.files.get(handle).inode
        content = self.content(inode)
        write = functools.partial(self.store.write, handle, offset, payload)
        done = self.do("write", write, late=True, keeps=True, steps=True)
        if done:
            write_model(content, offset, payload)
        else:
            self.contents.pop(inode.ino)  # part of it may have been written
        return done

    def ftruncate(self, handle: int | None, size: int) -> None:
        if handle is None:
            return
        inode = self.store.files.get(handle).inode
        content = self.content(inode)
        store = self.store
        change = functools.partial(store.set_attributes, inode.ino, size=size, handle=handle)
        if self.do("ftruncate", change, late=True, keeps=True):
            truncate_model(content, size)
            if size == 0:
                self.left_by_killed.discard(inode.ino)

    def fsync(self, handle: int | None) -> None:
        if handle is not None:
            opened = self.store.files.get(handle)
            commits = opened.inode.links > 0 and not self._is_only_beside(opened)
            self.do("fsync", lambda: self.store.fsync(handle), commits=commits, late=not commits)
            if commits:
                self._must_be_committed(opened.inode)

    def close(self, handle: int | None, *, killed: bool = False) -> None:
        """As a process does: FLUSH, then RELEASE. A killed one that truncated leaves nothing."""
        if handle is None:
            return
        opened = self.store.files.get(handle)
        inode = opened.inode
        is_beside = self._is_only_beside(opened)
        commits = not killed and inode.links > 0 and opened.writable and not is_beside
        if killed and inode.version is not None and (opened.wrote or opened.truncated):
            self.left_by_killed.add(inode.ino)
        flush = functools.partial(self.store.flush, handle, writer_killed=killed)
        name = "killed" if killed else "close"
        keeps = killed or is_beside
        done = self.do(name, flush, commits=commits, late=not commits, keeps=keeps)
        if commits and done:
            self._must_be_committed(inode)
        reverts = is_beside or (killed and opened.truncated and not opened.ordinary)
        reverts = reverts and not inode.uncommitted and getattr(inode.version, "atomic", False)
        if killed:
            self.contents.pop(inode.ino, None)
        self.do("release", lambda: self.store.release(handle), late=True, keeps=reverts)

    def _is_only_beside(self, opened: Handle) -> bool:
        """A killed program left what is not committed, and this one has no part in it."""
        inode = opened.inode
        if inode.version is None:
            self.left_by_killed.discard(inode.ino)
        has_part = opened.wrote or (opened.truncated and inode.content.size == 0)
        return inode.ino in self.left_by_killed and not has_part

    def _must_be_committed(self, inode: Inode) -> None:
        """What programs wrote is what readers see, and nothing of it waits."""
        if inode.links:
            assert inode.version is None, "a commit point left something unpublished"
            expected = self.content(inode)
            assert _bytes_of(inode) == expected, "the file is not what was written"

    def save(self, path: bytes, length: int) -> None:
        """Open as an overwrite (or create), write, close."""
        handle = self.open(path, os.O_RDWR | os.O_TRUNC)
        if handle is None:
            handle = self.create(path)
        self.write(handle, 0, length)
        self.close(handle)

    def rename(self, old: bytes, new: bytes, **how: bool) -> None:
        def action() -> None:
            self.store.rename(*self.place(old), *self.place(new), **how)

        steps = bool(how.get("exchange"))  # what both files hold is published first
        self.do("rename", action, commits=not self._same(old, new), steps=steps)

    def _same(self, old: bytes, new: bytes) -> bool:
        """A rename between two names of one file does nothing."""
        try:
            return self.inode(old) is self.inode(new)
        except NotFoundError:
            return False

    def link(self, old: bytes, new: bytes) -> None:
        self.do(
            "link",
            lambda: self.store.link(self.inode(old).ino, *self.place(new)),
            commits=True,
        )

    def unlink(self, path: bytes) -> None:
        try:
            late = self.inode(path).uncommitted
        except NotFoundError:
            late = True
        self.do("unlink", lambda: self.store.unlink(*self.place(path)), late=late)

    def attributes(self, path: bytes, **changes: int) -> None:
        """With ``size``: truncate(2), which commits unless somebody is writing."""
        try:
            inode = self.inode(path)
        except NotFoundError:
            return
        sized = "size" in changes
        if sized and inode.live is not None:
            truncate_model(self.content(inode), changes["size"])
        busy = inode.uncommitted or (sized and inode.version is not None)
        self.do(
            "attributes",
            lambda: self.store.set_attributes(inode.ino, **changes),
            commits=sized and not busy,
            late=busy,
            steps=sized and len(changes) > 1,
        )

    def xattr(self, path: bytes, name: bytes, value: bytes | None) -> None:
        try:
            inode = self.inode(path)
        except NotFoundError:
            return
        store = self.store
        if value is None:
            self.do(
                "removexattr", lambda: store.remove_xattr(inode.ino, name), late=inode.uncommitted
            )
        else:
            self.do(
                "setxattr", lambda: store.set_xattr(inode.ino, name, value), late=inode.uncommitted
            )


def _bytes_of(inode: Inode) -> bytes:
    """What readers see, verified."""
    size = inode.content.size
    return bytes(inode.content.read(0, size)) if size else b""


# --- stores ---------------------------------------------------------------------------------


def populate(store: Store) -> None:
    """Files of one and of several chunks, directories, links, attributes, and holes to clean."""
    write_file(store, 1, b"old", data(6000, 11))
    write_file(store, 1, b"other", b"other")
    directory = store.make_directory(1, b"dir", 0o755, 0, 0).ino
    write_file(store, directory, b"below", data(500, 12))
    store.make_directory(1, b"empty", 0o755, 0, 0)
    store.make_symlink(1, b"symlink", b"old", 0, 0)
    store.link(store.lookup(1, b"other").ino, 1, b"second")
    store.set_xattr(store.lookup(1, b"old").ino, b"user.a", b"1")
    for number in range(6):
        write_file(store, 1, b"junk", data(9000, number))
    store.unlink(1, b"junk")


@functools.cache
def base_image(granularity: Granularity) -> bytes:
    """The store that workloads begin with, as it is in use: an image and a few records."""
    WORLD.enter(STAGE_BASE)
    media = SimulatedMedia(MEDIA_BYTES, granularity)
    format_tiny(media)
    store = Store.open(media)
    populate(store)
    store.volume.rollover()
    store.unlink(1, b"symlink")
    store.make_symlink(1, b"symlink", b"other", 0, 0)
    store.fsync_directory(1)
    store.abandon()
    image = media.image()
    media.close()
    return image


def new_bench(granularity: Granularity) -> Bench:
    """A bench over a store that was in use, was cut off and recovered."""
    media = SimulatedMedia(MEDIA_BYTES, granularity, image=base_image(granularity))
    WORLD.enter(STAGE_OPEN)
    store = Store.open(media)
    store.make_node(1, b"fifo", 0o010600, 0, 5, 5)
    store.fsync_directory(1)
    store.past.is_on = False  # but for workloads about it: it would keep segments from others
    bench = Bench(store, Tape(media, store))
    bench.tape.start()
    return bench
