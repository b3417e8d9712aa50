"""Many files, or many pieces of one, made past the verbs and the journal for the image that
follows: a million in some seconds instead of some minutes. Nothing is written of what files say
they hold, but of pieces.

Never here: anything that is measured.
"""

from __future__ import annotations

import os
import random
import time

import numpy as np

from cxlfs.format import layout
from cxlfs.native.extents import EXTENT_INFO_DTYPE, REF_DTYPE
from cxlfs.native.maps import FileMap
from cxlfs.store import Store
from cxlfs.store.namespace import Inode
from cxlfs.store.space import State

_BLOCK_BYTES = 4096
_BLOCKS_AT_ONCE = 256
_SOURCE_BLOCKS = 1 << 14


def put_files(store: Store, parent: int, name: bytes, count: int) -> list[int]:
    """Empty files of the caller, their names made of ``name`` and a number (``b"file-%07d"``),
    or (one) ``name``; returns their inode numbers. They are lost unless a rollover follows.
    """
    namespace, now_ns, inos = store.namespace, time.time_ns(), []
    owner = namespace.get(parent)
    for index in range(count):
        ino = namespace.allocate_ino()
        inode = Inode(ino, 0o100644, owner.uid, owner.gid, 0, 0, *[now_ns + index] * 4)
        inode.live = FileMap(store.volume.engine, owner=ino)
        inode.live.take_delta().apply(inode.live, None)
        namespace.add(inode)
        namespace.link(parent, name % index if b"%" in name else name, ino)
        inos.append(ino)
    return inos


def put_content(store: Store, inos: list[int], size_bytes: int) -> None:
    """So many bytes in each of these empty files, in an extent of its own, of data that nobody can
    read: their checksums are of nothing.
    """
    volume = store.volume
    of_segment = volume.superblock.segment_payload_bytes // size_bytes
    chunks = -(-size_bytes // volume.superblock.chunk_bytes)
    for first in range(0, len(inos), of_segment):
        some = inos[first : first + of_segment]
        segment = volume.space.take(State.DATA)
        begin = volume.superblock.segment_offset(segment) + layout.SEGMENT_HEADER_BYTES
        extents = np.zeros(len(some), dtype=EXTENT_INFO_DTYPE)
        extents["id"] = volume.next_extent_id + np.arange(len(some), dtype=np.uint64)
        extents["media_offset"] = begin + size_bytes * np.arange(len(some), dtype=np.uint64)
        extents["length"], extents["crc_count"] = size_bytes, chunks
        extents["crc_index"] = chunks * np.arange(len(some), dtype=np.uint64)
        volume.next_extent_id += len(some)
        volume.engine.define(extents, np.zeros(chunks * len(some), dtype=np.uint32))
        for ino, extent_id in zip(some, extents["id"].tolist(), strict=True):
            row = np.array([(0, size_bytes, extent_id, 0)], dtype=REF_DTYPE)
            store.namespace.get(ino).content.replay(0, row.tobytes(), size_bytes)
    volume.engine.drop_unreferenced()


def put_pieces(store: Store, parent: int, name: bytes, count: int) -> int:
    """A file of so many blocks that lie in another order on the media than in it, some of them in
    several places of it; returns its inode number. It is lost unless a rollover follows.
    """
    owner, rng = store.namespace.get(parent), random.Random(7)
    source = store.create(1, b"source of " + name, 0o600, owner.uid, owner.gid, os.O_RDWR)[1]
    blocks = min(count, _SOURCE_BLOCKS)
    for number in range(0, blocks, _BLOCKS_AT_ONCE):
        store.write(source, number * _BLOCK_BYTES, rng.randbytes(_BLOCKS_AT_ONCE * _BLOCK_BYTES))
    store.flush(source, writer_killed=False)
    content = store.files.content_of(source)
    store.versions.leases.close(content)
    [ino] = put_files(store, parent, name, 1)
    made = store.namespace.get(ino).content
    order = list(range(blocks))
    for number in range(count):
        if number % blocks == 0:
            rng.shuffle(order)
        content.share(
            order[number % blocks] * _BLOCK_BYTES, _BLOCK_BYTES, made, number * _BLOCK_BYTES
        )
    made.take_delta().apply(made, None)
    store.release(source)
    return ino
