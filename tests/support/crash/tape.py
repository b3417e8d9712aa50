"""A workload while it is recorded: each verb is marked, with what it promises and what it commits.

The states that a cut may leave come from the running store's own DRAM (what it holds committed),
not from a recovery: the judge compares two independent tellings.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator

from cxlfs.errors import NamespaceError, NoSpaceError
from cxlfs.format import layout
from cxlfs.media import Granularity, SimulatedMedia
from cxlfs.native.maps import FileMap
from cxlfs.store import Store
from cxlfs.store.namespace import DIRECTORY_SIZE_BYTES, Inode
from cxlfs.store.room import Room
from cxlfs.store.volume import Volume
from tests.support.stores import CHUNK_BYTES, SEGMENT_BYTES, Entry

SEGMENTS = 22
MEDIA_BYTES = SEGMENTS * SEGMENT_BYTES + 4 * layout.UNIT_BYTES_TEST
READ_BYTES = 1 << 16
DIGESTED_BYTES_MAX = 1 << 30
"""No workload makes a larger file: one that has become larger by damage is told by its size."""

State = dict[bytes, Entry]


class PowerCutError(AssertionError):
    """A cut left a state that was not promised; the message repeats it."""


def format_tiny(media: SimulatedMedia, *, uuid: bytes = bytes(range(16))) -> None:
    """22 segments of 64 KiB, the least that leaves room to work in."""
    Store.format(
        media,
        segment_size_bytes=SEGMENT_BYTES,
        unit_bytes=layout.UNIT_BYTES_TEST,
        chunk_bytes=CHUNK_BYTES,
        uuid=uuid,
    )


class Tape:
    """``states[i]``: what is committed after i verbs; ``between[i]``: what may be seen while verb
    i runs, when its contract allows steps. ``durable[i]``: verb i survives a cut when it returned.
    """

    def __init__(self, media: SimulatedMedia, store: Store) -> None:
        self.media = media
        self.store = store
        self.names: list[str] = []
        self.durable: list[bool] = []
        self.states: list[State] = []
        self.between: list[list[State]] = []
        self.base = b""
        """The media where the tape begins."""
        self.committed: Callable[[], State] = lambda: committed_state(store)
        """What a recovery now must show."""
        self.view: Callable[[State], State] = lambda state: state
        """What of a state is compared."""
        self.past: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        """Name and content of each row of history that a batch may have."""
        self._page = media.granularity is Granularity.PAGE
        self._made_room = False

    def start(self) -> None:
        """From here on; what was recorded before counts as durable."""
        self.media.restart()
        self.base = self.media.image()
        self.states = [self.committed()]
        for part in (self.names, self.durable, self.between):
            part.clear()

    def verb(
        self,
        name: str,
        action: Callable[[], object],
        *,
        commits: bool = False,
        late: bool = False,
        steps: bool = False,
        keeps: bool = False,
    ) -> bool:
        """Run one verb; False when it was refused. ``commits``: a commit point on every media.
        ``late``: none on any. ``steps``: more than one record, each a state of its own.
        ``keeps``: nothing that is committed may change, unless room had to be made (with
        ``steps``): what is open is committed then, a file after the other.
        """
        seen: list[State] = []
        done = True
        self._made_room = False
        with self._watch(seen) if steps else contextlib.nullcontext():
            try:
                action()
            except (NamespaceError, NoSpaceError) as error:
                name += f" ({error.id})"
                done = False
        self.durable.append(done and (commits or not (late or self._page)))
        self.names.append(name)
        self.states.append(self.committed())
        if keeps and not self._made_room:
            changed = difference(self.states[-1], self.states[-2])
            assert not changed, f"{name} committed something: {changed}"
        self.between.append(seen)
        self.media.mark(len(self.names))
        return done

    @contextlib.contextmanager
    def _watch(self, seen: list[State]) -> Iterator[None]:
        """Note what is committed before each record: what the one before it has made."""
        original, make = Volume.commit, Room.make

        def make_room(room: Room, needed_bytes: int) -> bool:
            self._made_room = True
            return make(room, needed_bytes)

        def commit(volume: Volume, *args: object, **options: object) -> tuple[int, int]:
            seen.append(self.committed())
            return original(volume, *args, **options)  # type: ignore[arg-type]

        Volume.commit = commit  # type: ignore[method-assign,assignment]
        Room.make = make_room  # type: ignore[method-assign]
        try:
            yield
        finally:
            Volume.commit = original  # type: ignore[method-assign]
            Room.make = make  # type: ignore[method-assign]

    def allowed(self, finished: int) -> list[State]:
        """After ``finished`` verbs returned: from the last durable one to the end of the next."""
        first = max((i + 1 for i in range(finished) if self.durable[i]), default=0)
        last = min(finished + 1, len(self.names))
        found = list(self.states[first : last + 1])
        for steps in self.between[first:last]:
            found.extend(steps)
        return found


# --- states ---------------------------------------------------------------------------------


def recovered_state(store: Store) -> State:
    """Everything a user can see of a store that nobody has changed since it was opened."""
    return _state(store, live=True)


def committed_state(store: Store) -> State:
    """What a recovery now must show, as the running store's DRAM has it."""
    return _state(store, live=False)


def _state(store: Store, *, live: bool) -> State:
    namespace = store.namespace
    result: State = {}
    pending = [(b"/", 1)]
    while pending:
        path, ino = pending.pop()
        inode = namespace.get(ino)
        if inode.uncommitted and not live:
            continue
        result[path] = _entry(inode, live=live)
        if inode.entries:
            above = path.rstrip(b"/") + b"/"
            pending.extend((above + name, child) for name, child in inode.entries.items())
    return result


def _entry(inode: Inode, *, live: bool) -> Entry:
    content, size, state = inode.target, len(inode.target), b""
    if inode.entries is not None:
        size = DIRECTORY_SIZE_BYTES
    elif inode.live is not None:
        shown = inode.live if live or inode.committed is None else inode.committed
        size = shown.size
        content = _digest(shown)
        state = b"incomplete" if inode.flags & layout.INODE_INCOMPLETE else b"complete"
        if inode.held is not None and inode.aside is not None:
            state += b", held: " + _digest(inode.aside)[:8].hex().encode()
    return Entry(
        inode.kind,
        inode.mode,
        inode.uid,
        inode.gid,
        inode.rdev,
        inode.nlink,
        size,
        inode.atime_ns,
        inode.mtime_ns if live else inode.committed_mtime_ns,
        inode.ctime_ns if live else inode.committed_ctime_ns,
        inode.ino,
        tuple(sorted((inode.xattrs or {}).items())),
        content,
        state,
    )


def _digest(content: FileMap) -> bytes:
    """All bytes of a file, verified; as they are when few, else their hash."""
    size = content.size
    if size <= READ_BYTES:
        data = bytes(content.read(0, size)) if size else b""
        return data if size <= 32 else hashlib.blake2b(data, digest_size=16).digest()
    digest = hashlib.blake2b(digest_size=16)
    for offset in range(0, min(size, DIGESTED_BYTES_MAX), READ_BYTES):
        digest.update(content.read(offset, READ_BYTES))
    return digest.digest()


def describe(state: State) -> dict[str, str]:
    """Short enough for a message."""
    return {
        path.decode(errors="replace")[-40:]: f"{e.kind.name} {e.ino} {e.size} {e.state.decode()} "
        f"n{e.nlink} {e.content[:4].hex()} c{e.ctime_ns % 10**9} m{e.mtime_ns % 10**9} "
        f"{e.mode:o} x{len(e.xattrs)}"
        for path, e in state.items()
    }


def difference(found: State, expected: State) -> dict[str, str]:
    """Only what differs between two states."""
    paths = [path for path in {*found, *expected} if found.get(path) != expected.get(path)]
    left, right = describe(found), describe(expected)
    keys = [path.decode(errors="replace")[-40:] for path in paths]
    return {key: f"{left.get(key)} instead of {right.get(key)}" for key in keys}
