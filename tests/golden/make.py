"""Makes the golden image of format version 1. Run once; the image is never made again.

``python -m tests.golden.make`` writes ``version-1.img.xz`` and ``version-1.json`` beside this file.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import stat
from collections.abc import Callable
from pathlib import Path

from cxlfs.format import layout
from cxlfs.media import Granularity, MemoryMedia
from cxlfs.store import Store, StoreOptions
from tests.support.stores import CHUNK_BYTES, SEGMENT_BYTES, picture, write_file

HERE = Path(__file__).parent
IMAGE = HERE / "version-1.img.xz"
EXPECTED = HERE / "version-1.json"
UUID = bytes.fromhex("c0ffee00112233445566778899aabbcc")
SEGMENTS = 24
DIRECTORIES = (b"/", b"/step-0001")
SIZE_BYTES = SEGMENTS * SEGMENT_BYTES + 4 * layout.UNIT_BYTES_TEST


def text(length: int, word: bytes) -> bytes:
    """Content that compresses well and differs everywhere."""
    line = b"".join(b"%s %06d\n" % (word, number) for number in range(length // 8))
    return line[:length]


def populate(store: Store) -> None:
    """One of everything; half of it before the image, half in the journal behind it."""
    write_file(store, 1, b"plain", text(9000, b"plain"))
    directory = store.make_directory(1, b"step-0001", 0o2750, 1000, 100).ino
    for shard in range(3):
        write_file(store, directory, b"shard-%d" % shard, text(5000 + shard, b"shard"))
    store.make_symlink(1, b"latest", b"step-0001", 1000, 100)
    store.link(store.lookup(directory, b"shard-0").ino, 1, b"hard link")
    store.make_node(1, b"fifo", stat.S_IFIFO | 0o600, 0, 1, 2)
    store.make_node(1, b"device", stat.S_IFCHR | 0o640, os.makedev(5, 1), 0, 0)
    store.set_xattr(directory, b"user.step", b"1")
    write_file(store, 1, "umlaut-ä".encode(), b"")
    store.volume.rollover()
    write_file(store, 1, b"plain", text(12_345, b"overwritten"))
    attributes, handle = store.create(1, b"sparse", 0o600, 7, 8, os.O_RDWR)
    store.write(handle, 300_000, b"far away")
    store.write(handle, 70_000, b"in the middle")
    store.flush(handle, writer_killed=False)
    store.release(handle)
    store.set_xattr(attributes.ino, b"user.note", bytes(range(256)))
    shard = store.lookup(directory, b"shard-1").ino
    handle = store.open_file(shard, os.O_WRONLY | os.O_TRUNC)
    store.write(handle, 0, text(3000, b"killed"))
    store.flush(handle, writer_killed=True)
    store.release(handle)
    _, handle = store.create(1, b"log", 0o644, 9, 9, os.O_WRONLY)
    store.write(handle, 0, b"a writer that was killed\n")
    store.flush(handle, writer_killed=True)
    store.release(handle)
    write_file(store, 1, b"gone", b"deleted")
    store.unlink(1, b"gone")
    store.rename(directory, b"shard-2", 1, b"moved")
    store.set_attributes(directory, mtime_ns=1_700_000_000_000_000_001)
    handle = store.open_file(store.lookup(1, b"moved").ino, os.O_RDWR)
    store.write(handle, 100, b"changed in place")
    store.fsync(handle)
    store.release(handle)


def describe(store: Store, directories: tuple[bytes, ...] = DIRECTORIES) -> dict[str, object]:
    """Everything that a user can see, as JSON."""
    entries = {
        os.fsdecode(path): {
            "kind": entry.kind.name,
            "mode": oct(entry.mode),
            "uid": entry.uid,
            "gid": entry.gid,
            "rdev": entry.rdev,
            "nlink": entry.nlink,
            "size": entry.size,
            "mtime_ns": entry.mtime_ns,
            "ctime_ns": entry.ctime_ns,
            "ino": entry.ino,
            "xattrs": {name.decode(): value.hex() for name, value in entry.xattrs},
            "content": _spell(entry.content),
            "state": entry.state.decode(),
        }
        for path, entry in sorted(picture(store).items())
    }
    aside = [
        {"path": os.fsdecode(entry.path), "size": entry.size_bytes, "state": entry.state}
        for directory in directories
        for entry in store.list_checkpoints(directory)
        if entry.kept_aside
    ]
    return {
        "uuid": store.superblock.uuid.hex(),
        "label": store.superblock.label,
        "last_lsn": store.volume.last_lsn,
        "entries": entries,
        "kept aside": aside,
    }


def _spell(content: bytes) -> dict[str, str]:
    """Enough to compare, and to see what it is about."""
    begin = content.lstrip(b"\0")[:30].decode("latin-1")
    return {"sha256": hashlib.sha256(content).hexdigest(), "begins": begin}


def make_image(
    image: Path,
    label: str,
    uuid: bytes,
    populate: Callable[[Store], None],
    directories: tuple[bytes, ...] = DIRECTORIES,
) -> None:
    """Write an image and, beside it, what a reader must find in it.

    Refuses to replace an image that exists: stores of that version exist too.
    """
    if image.exists():
        raise SystemExit(f"{image} exists; it stands for stores that users have")
    media = MemoryMedia(SIZE_BYTES, Granularity.LINE)
    Store.format(
        media,
        label=label,
        segment_size_bytes=SEGMENT_BYTES,
        uuid=uuid,
        unit_bytes=layout.UNIT_BYTES_TEST,
        chunk_bytes=CHUNK_BYTES,
    )
    store = Store.open(media)
    populate(store)
    store.abandon()  # as a kill would: the journal has records that the image does not
    content = bytes(media.unguarded_memory())
    image.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    reader = Store.open(media, StoreOptions(read_only=True))
    told = json.dumps(describe(reader, directories), indent=1) + "\n"
    image.with_name(image.name.replace(".img.xz", ".json")).write_text(told, encoding="utf-8")
    reader.close()


def main() -> None:
    make_image(IMAGE, "golden", UUID, populate)


if __name__ == "__main__":
    main()
