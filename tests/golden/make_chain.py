"""Makes the golden image with a chain of journals. Run once; the image is never made again.

``python -m tests.golden.make_chain`` writes ``version-1-chain.img.xz`` and ``.json`` beside this
file: a store that a crash left while an image was being written. Its newest root names a journal,
which goes on in a successor that no root names. In them: moves, an open checkpoint unit, and a
version that is held.
"""

from __future__ import annotations

import os
from pathlib import Path

from cxlfs.store import Store
from cxlfs.store.overwrites import TornMode
from cxlfs.store.unit_rules import Ending, UnitsMode
from tests.golden.make import make_image, text
from tests.support.slices import small_slices, step
from tests.support.stores import write_file
from tests.support.unit_scenes import open_writing, saved

HERE = Path(__file__).parent
IMAGE = HERE / "version-1-chain.img.xz"
EXPECTED = HERE / "version-1-chain.json"
DIRECTORIES = (b"/", b"/checkpoint-5")
UUID = bytes.fromhex("c0ffee00112233445566778899aabbdd")


def populate(store: Store) -> None:
    """What needs the journals; the successor begins half-way."""
    saved(store)
    for number in range(12):
        write_file(store, 1, b"file-%d" % number, text(15_000 + number, b"n%03d" % number))
    for number in range(0, 12, 2):
        store.unlink(1, b"file-%d" % number)
    store.volume.rollover()
    assert store.cleaner.compact(0.9)
    store.fsync_directory(1)
    step(store)  # an image begins to be written, and records go on in the successor
    step(store)
    write_file(store, 1, b"in the successor", text(5000, b"next"))
    assert store.cleaner.compact(0.9)
    store.overwrites.mode = TornMode.BACK
    store.overwrites.writer = lambda: "a writer"
    store.overwrites.ending_of = lambda _writer: Ending.ALIVE
    write_file(store, 1, b"file-1", text(3000, b"torn"))
    store.units.policies.mode = UnitsMode.AUTO
    store.units.active = True
    directory = store.lookup(1, b"checkpoint-5").ino
    handle = open_writing(store, directory, b"shard-0", text(9000, b"new"))
    store.flush(handle, writer_killed=False)
    store.release(handle)
    store.link(store.lookup(1, b"file-3").ino, 1, b"last")
    store.fsync(store.open_file(store.lookup(1, b"file-3").ino, os.O_RDWR))


def main() -> None:
    with small_slices():
        make_image(IMAGE, "golden chain", UUID, populate, DIRECTORIES)


if __name__ == "__main__":
    main()
