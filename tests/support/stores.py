"""Small stores in memory, and a full picture of a store's state to compare two of them."""

from __future__ import annotations

import dataclasses
import os

from cxlfs.format import layout
from cxlfs.media import Granularity, MemoryMedia
from cxlfs.store import Store, StoreOptions
from cxlfs.store.namespace import FileKind, Inode

SMALL_BYTES = 4 << 20
SEGMENT_BYTES = 64 << 10
CHUNK_BYTES = 4096


def make_media(
    size_bytes: int = SMALL_BYTES, granularity: Granularity = Granularity.LINE
) -> MemoryMedia:
    return MemoryMedia(size_bytes, granularity)


def format_small(media: MemoryMedia) -> None:
    """The small geometry: 64 KiB segments, 4 KiB chunks."""
    Store.format(
        media,
        segment_size_bytes=SEGMENT_BYTES,
        unit_bytes=layout.UNIT_BYTES_TEST,
        chunk_bytes=CHUNK_BYTES,
        label="test",
    )


def new_store(
    size_bytes: int = SMALL_BYTES,
    granularity: Granularity = Granularity.LINE,
    **options: object,
) -> Store:
    media = make_media(size_bytes, granularity)
    format_small(media)
    return Store.open(media, StoreOptions(**options))  # type: ignore[arg-type]


def reopen(store: Store, *, clean: bool, **options: object) -> Store:
    """Close it, or drop it as a kill of the daemon would, and open it again."""
    if clean:
        store.close()
    else:
        store.abandon()
    return Store.open(store.media, StoreOptions(**options))  # type: ignore[arg-type]


def write_file(store: Store, parent: int, name: bytes, data: bytes, *, mode: int = 0o644) -> int:
    """Create or overwrite, write, close; returns the inode number."""
    inode = store.namespace.find(parent, name)
    if inode is None:
        attributes, handle = store.create(parent, name, mode, 1000, 1000, os.O_RDWR)
        ino = attributes.ino
    else:
        ino = inode.ino
        handle = store.open_file(ino, os.O_WRONLY | os.O_TRUNC)
    if data:
        store.write(handle, 0, data)
    store.flush(handle, writer_killed=False)
    store.release(handle)
    return ino


def read_file(store: Store, ino: int) -> bytes:
    handle = store.open_file(ino, os.O_RDONLY)
    try:
        parts = []
        offset = 0
        while piece := bytes(store.read(handle, offset, 1 << 20)):
            parts.append(piece)
            offset += len(piece)
        return b"".join(parts)
    finally:
        store.release(handle)


def clean_round(store: Store, used_max: float) -> bool:
    """Compact a few segments, then roll over; False when there are none."""
    cleaner, counters = store.cleaner, store.volume.counters
    before = counters.cleaned_segments
    while counters.cleaned_segments == before and cleaner.compact(used_max):
        pass
    cleaner._free_dead()
    return counters.cleaned_segments > before


@dataclasses.dataclass(frozen=True)
class Entry:
    kind: FileKind
    mode: int
    uid: int
    gid: int
    rdev: int
    nlink: int
    size: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    ino: int
    xattrs: tuple[tuple[bytes, bytes], ...]
    content: bytes
    state: bytes


def picture(store: Store) -> dict[bytes, Entry]:
    """Every path with everything a user can see of it."""
    result: dict[bytes, Entry] = {}
    pending: list[tuple[bytes, int]] = [(b"/", 1)]
    while pending:
        path, ino = pending.pop()
        inode = store.namespace.get(ino)
        result[path] = _entry(store, inode)
        for name, child in (inode.entries or {}).items():
            pending.append((path.rstrip(b"/") + b"/" + name, child))
    return result


def _entry(store: Store, inode: Inode) -> Entry:
    attributes = inode.attributes()
    content = inode.target
    state = b""
    if inode.live is not None:
        content = read_file(store, inode.ino)
        state = store.get_xattr(inode.ino, b"user.cxlfs.state")
    return Entry(
        inode.kind,
        attributes.mode,
        attributes.uid,
        attributes.gid,
        attributes.rdev,
        attributes.nlink,
        attributes.size,
        attributes.atime_ns,
        attributes.mtime_ns,
        attributes.ctime_ns,
        inode.ino,
        tuple(sorted((inode.xattrs or {}).items())),
        content,
        state,
    )
