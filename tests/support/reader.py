"""The reader of docs/, on images in memory, and its states in the words of the tests.

The reader imports nothing of cxlfs. What it says is therefore a second opinion about every image.
"""

from __future__ import annotations

import collections
import hashlib
import importlib
import io
import stat
import sys
from types import ModuleType
from typing import Any

from cxlfs.media import Media
from cxlfs.store import Store, StoreOptions
from cxlfs.store.namespace import FileKind, kind_of
from cxlfs.store.unit_aside import ASIDE_NAME
from tests.support.crash.tape import READ_BYTES, State, difference, recovered_state
from tests.support.repository import ROOT
from tests.support.stores import Entry

_KEPT = b"/" + ASIDE_NAME + b"/"
"""Names there are none for users: the product tells as many fewer links."""
_KEPT_DEPTH = 4
NAMES = ("reader_structures", "reader_state", "reader")


def load(name: str = "reader") -> ModuleType:
    """A module of the reader, which stand beside each other in docs/."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def read(image: bytes) -> Any:
    """A store of the reader. Raises its ReaderError."""
    return load().Store(io.BytesIO(image))


def state_of(store: Any) -> State:
    """What the reader found, as ``recovered_state`` tells it of the product."""
    kept = collections.Counter(
        inode.ino
        for path, inode in store.state.walk()
        if path.startswith(_KEPT) and path.count(b"/") <= _KEPT_DEPTH
    )
    return {
        path: _entry(store.state, inode, kept[inode.ino])
        for path, inode in store.state.walk()
        if not (path + b"/").startswith(_KEPT)
    }


def _entry(state: Any, inode: Any, kept_links: int) -> Entry:
    kind = kind_of(inode.mode)
    assert kind is not None
    content, told = inode.target, b""
    if kind is FileKind.FILE:
        content = _digest(state.read(inode.content))
        told = b"incomplete" if inode.flags & 1 else b"complete"
        if inode.aside is not None and _is_held(inode):
            told += b", held: " + _digest(state.read(inode.aside))[:8].hex().encode()
    inside = [state.inodes[ino].kind for ino in inode.entries.values()]
    links = 2 + inside.count("directory")
    if not stat.S_ISDIR(inode.mode):
        links = inode.links - kept_links
    return Entry(
        kind,
        *(inode.mode, inode.uid, inode.gid, inode.rdev, links, inode.size),
        *(inode.atime_ns, inode.mtime_ns, inode.ctime_ns, inode.ino),
        tuple(sorted(inode.xattrs.items())),
        content,
        told,
    )


def _is_held(inode: Any) -> bool:
    value = inode.xattrs.get(b"trusted.cxlfs.held", b"")
    return len(value) == 32 and value[0] in (0, 1)


def _digest(data: bytes) -> bytes:
    """See tape._digest: a hash but for little."""
    if len(data) <= min(32, READ_BYTES):
        return data
    return hashlib.blake2b(data, digest_size=16).digest()


def contradiction(media: Media, image: bytes) -> str | None:
    """What the reader and the product say differently of one image, without changing it."""
    try:
        store = Store.open(media, StoreOptions(read_only=True))
    except Exception as error:  # noqa: BLE001 - whatever it is, the reader must refuse it too
        return _refused(image, f"{type(error).__name__}: {error}")
    try:
        found = recovered_state(store)
        expected = {path: e for path, e in found.items() if not (path + b"/").startswith(_KEPT)}
        lsn = store.volume.last_lsn
    finally:
        store.abandon()
    store_found = read(image)
    if store_found.problems:
        return f"the reader complains: {store_found.problems}"
    if store_found.state.last_lsn != lsn:
        return f"the reader ends at record {store_found.state.last_lsn} instead of {lsn}"
    state = state_of(store_found)
    return f"the reader differs: {difference(state, expected)}" if state != expected else None


def _refused(image: bytes, why: str) -> str | None:
    try:
        read(image)
    except load("reader_structures").ReaderError:
        return None
    return f"the reader reads what the product refuses: {why}"
