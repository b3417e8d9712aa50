"""Where on the medium room lies that a program fills front to back: as the file does, modulo the
largest page, so that the file can be mapped in such pages.
"""

from __future__ import annotations

import os
import random

from cxlfs.store import Store
from cxlfs.store.direct import Lease
from cxlfs.units import KIB, MIB
from tests.support.shop import Shop
from tests.support.slips import Locks, Program
from tests.support.stores import read_file, write_file


def _lies_as_the_file_does(leases: list[Lease], at: int, unit: int, page: int) -> tuple[int, int]:
    """Of leases that are filled in order from ``at`` on: how many bytes lie so, and where the last
    of them ends. What does not is less than half a unit, or the end of a segment.
    """
    placed = 0
    at -= at % unit if at % unit < unit // 32 + page else at % page
    for lease in leases:
        if (lease.media_offset - at) % unit == 0:
            placed += lease.capacity_bytes
        else:
            assert lease.capacity_bytes <= 2 * unit
        at += lease.capacity_bytes // page * page
    return placed, at


def test_what_is_filled_in_order_lies_as_the_file_does(shop: Shop, rng: random.Random) -> None:
    """And what was passed over to get there is handed out, or comes back."""
    store = shop.new_ordinary(1536 * MIB, segment_size_bytes=16 * MIB)
    locks = Locks(store.media)
    for number in range(8):
        ino = write_file(store, 1, b"file", rng.randbytes(rng.randrange(MIB)))
        handle = store.open_file(ino, os.O_RDWR)
        at = begin = rng.randrange(4 * MIB)
        placed = 0
        returned: list[int] = []
        before_bytes = store.volume.space.available_bytes
        for _ in range(rng.randrange(1, 3)):
            leases = store.direct.lease(
                handle, 64 * MIB, file_offset=at, count_max=16, returned_lease_ids=returned
            )
            returned = [lease.lease_id for lease in leases]
            locks.take("program", leases[0].slip_offset, leases[0].slip_bytes)
            bytes_, at = _lies_as_the_file_does(leases, at, 2 * MIB, 4096)
            placed += bytes_
        assert placed > (at - begin) * 0.97, number
        store.direct.settle(handle, done=True)
        assert store.volume.space.available_bytes >= before_bytes - 128 * KIB
        store.flush(handle, writer_killed=False)
        store.release(handle)


def test_leases_of_one_request_are_filled_one_behind_the_other(
    shop: Shop, store: Store, rng: random.Random
) -> None:
    unit, page = store.superblock.unit_bytes, store.volume.space.align_bytes
    attributes, handle = store.create(1, b"file", 0o644, 1, 1, os.O_RDWR)
    program = Program(store, handle, Locks(store.media))
    content, placed, at = b"", 0, 0
    while len(content) < 300 * KIB:
        leases = store.direct.lease(handle, 200 * KIB, file_offset=at, count_max=16)
        placed += _lies_as_the_file_does(leases, at, unit, page)[0]
        for lease in leases:
            program.take(lease)
            piece = rng.randbytes(lease.capacity_bytes // page * page)
            assert program.write(at, piece)
            content += piece
            at += len(piece)
    assert placed > len(content) * 0.9
    store.flush(handle, writer_killed=False)
    store.release(handle)
    program.die()
    again = shop.reopen(store, clean=False)
    assert read_file(again, attributes.ino) == content
