"""Metadata images: built, loaded, built again; and every field that a hostile one could set."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from operator import itemgetter

import numpy as np
import pytest

from cxlfs.errors import CorruptionError
from cxlfs.format import image, image_columns, layout
from cxlfs.native import crc32c
from cxlfs.native.extents import Engine
from cxlfs.store import Store, export, loading
from cxlfs.store.namespace import Namespace
from tests.support.stores import new_store, write_file

Sections = dict[int, bytearray]
DTYPES = {
    layout.SECTION_INODES: layout.IMAGE_INODE_DTYPE,
    layout.SECTION_NAMES: layout.IMAGE_NAME_DTYPE,
    layout.SECTION_XATTRS: layout.IMAGE_XATTR_DTYPE,
    layout.SECTION_SYMLINKS: layout.IMAGE_XATTR_DTYPE,
    layout.SECTION_EXTENTS: layout.IMAGE_EXTENT_DTYPE,
    layout.SECTION_REFS: layout.REF_DTYPE,
}


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    made = new_store()
    directory = made.make_directory(1, b"dir", 0o755, 1, 2).ino
    for number in range(5):
        write_file(made, directory, b"f%d" % number, os.urandom(number * 5000 + 1))
    ino = made.lookup(directory, b"f3").ino
    made.link(ino, 1, b"link")
    made.make_symlink(1, b"s", b"target", 0, 0)
    made.set_xattr(ino, b"user.k", b"value")
    made.make_node(1, b"fifo", 0o010644, 0, 0, 0)
    handle = made.open_file(ino, os.O_RDWR | os.O_TRUNC)
    made.write(handle, 0, b"aside" * 100)
    made.flush(handle, writer_killed=True)
    made.release(handle)
    yield made
    made.abandon()


def build(store: Store) -> bytes:
    return build_of(store, store.volume.engine, store.namespace)


def build_of(store: Store, engine: Engine, namespace: Namespace) -> bytes:
    return export.build(
        namespace,
        engine,
        uuid=store.superblock.uuid,
        lsn=store.volume.last_lsn,
        next_extent_id=store.volume.next_extent_id,
    )[0]


def load(store: Store, data: bytes) -> tuple[Engine, Namespace]:
    engine = loading.empty_engine(store.media, store.superblock)
    head_crc = int(np.frombuffer(data[:512], dtype=layout.IMAGE_DTYPE)[0]["crc"])
    try:
        namespace, _ = loading.load(data, engine, uuid=store.superblock.uuid, header_crc=head_crc)
    except BaseException:
        engine.close()
        raise
    return engine, namespace


def built_again(store: Store, data: bytes) -> bytes:
    engine, namespace = load(store, data)
    again = build_of(store, engine, namespace)
    engine.close()
    return again


def take_apart(data: bytes) -> tuple[np.ndarray[tuple[int], np.dtype[np.void]], Sections]:
    head = np.frombuffer(bytearray(data[:512]), dtype=layout.IMAGE_DTYPE).copy()
    sections = {
        int(row["kind"]): bytearray(data[int(row["offset"]) :][: int(row["length"])])
        for row in head[0]["sections"]
    }
    return head, sections


def put_together(head: np.ndarray[tuple[int], np.dtype[np.void]], sections: Sections) -> bytes:
    """With right checksums, lengths and counts."""
    body = bytearray()
    for index, (kind, data) in enumerate(sorted(sections.items())):
        count = len(data) // layout.SECTION_ITEM_BYTES[kind]
        offset = 512 + len(body)
        head["sections"][0, index] = (kind, crc32c(bytes(data)), offset, len(data), count)
        body += data + bytes(-len(data) % 64)
    head["crc"] = crc32c(head.tobytes()[:508])
    return head.tobytes() + bytes(body)


def test_round_trip(store: Store) -> None:
    data = build(store)
    again = built_again(store, data)
    assert contents(again) == contents(data)


def contents(data: bytes) -> list[object]:
    """What an image says, in whatever order it stands there."""
    head, _ = take_apart(data)
    data_columns = image_columns.decode_data(
        data, uuid=head[0]["uuid"].tobytes(), header_crc=int(head[0]["crc"])
    )
    columns = image_columns.decode_rest(data_columns)
    of, names = data_columns.contents, columns.names
    references = [
        (owner, size, of.references[first:end].tolist())
        for owner, size, first, end in zip(
            *(of.owners.tolist(), of.sizes.tolist(), of.firsts[:-1].tolist()),
            *(of.firsts[1:].tolist(),),
            strict=True,
        )
    ]
    extents = [
        (number, offset, length, data_columns.checksums[index : index + count].tolist())
        for number, offset, length, index, _, count in data_columns.extents.tolist()
    ]
    return [
        sorted(data_columns.inodes.tolist()),
        sorted(zip(names.rows[["parent", "ino"]].tolist(), names.names, strict=True)),
        sorted(references, key=itemgetter(0)),
        extents,
        sorted(columns.xattrs),
        sorted(columns.targets),
    ]


def test_take_apart_and_put_together(store: Store) -> None:
    data = build(store)
    assert put_together(*take_apart(data)) == data


def test_estimate_is_an_upper_bound(store: Store) -> None:
    assert len(build(store)) <= store.volume.image_bytes_estimate() <= 2 * len(build(store)) + 8192


def test_every_byte_is_covered(store: Store, rng: random.Random) -> None:
    data = build(store)
    head, _ = take_apart(data)
    crc = int(head[0]["crc"])
    used = set(range(512))
    for row in head[0]["sections"]:
        used |= set(range(int(row["offset"]), int(row["offset"]) + int(row["length"])))
    for position in sorted(used):
        changed = bytearray(data)
        changed[position] ^= 1 << rng.randrange(8)
        with pytest.raises(CorruptionError):
            image.check(bytes(changed), uuid=store.superblock.uuid, header_crc=crc)


@pytest.mark.parametrize("length", [0, 1, 511, 512, 1000])
def test_cut_short(store: Store, length: int) -> None:
    data = build(store)
    crc = int(take_apart(data)[0][0]["crc"])
    with pytest.raises(CorruptionError):
        image.check(data[:length], uuid=store.superblock.uuid, header_crc=crc)


def test_of_another_store_or_root(store: Store) -> None:
    data = build(store)
    crc = int(take_apart(data)[0][0]["crc"])
    with pytest.raises(CorruptionError, match="another store"):
        image.check(data, uuid=bytes(16), header_crc=crc)
    with pytest.raises(CorruptionError, match="checksum"):
        image.check(data, uuid=store.superblock.uuid, header_crc=crc ^ 1)


def test_references_that_continue_each_other_become_one(store: Store) -> None:
    """The image made of it counts what there is, not what there was."""
    head, sections = take_apart(build(store))
    inodes = np.frombuffer(sections[layout.SECTION_INODES], dtype=layout.IMAGE_INODE_DTYPE)
    refs = np.frombuffer(sections[layout.SECTION_REFS], dtype=layout.REF_DTYPE)
    row = int(np.flatnonzero((inodes["ref_count"] == 1) & (inodes["size"] > 1))[0])
    place = int(inodes["ref_count"][:row].sum() + inodes["aside_ref_count"][:row].sum())
    halves = np.repeat(refs[place : place + 1], 2)
    halves["length"] = [1, refs["length"][place] - 1]
    halves["file_offset"][1] += 1
    halves["extent_offset"][1] += 1
    inodes["ref_count"][row] = 2
    sections[layout.SECTION_REFS] = bytearray(
        refs[:place].tobytes() + halves.tobytes() + refs[place + 1 :].tobytes()
    )
    again = built_again(store, put_together(head, sections))
    assert contents(again) == contents(build(store))


HOSTILE = [0, 1, 2, 3, 255, 4096, 65535, 1 << 20, 1 << 31, (1 << 32) - 1]
HOSTILE_64 = [*HOSTILE, 1 << 40, 1 << 56, (1 << 56) + 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 4096]


def every_field() -> Iterator[tuple[int, str]]:
    for kind, dtype in DTYPES.items():
        for name in dtype.names or ():
            yield kind, name


@pytest.mark.parametrize(("kind", "field"), list(every_field()))
def test_hostile_fields(store: Store, kind: int, field: str) -> None:
    """Any value in any field of any item: refused, or a state that can be read and built again."""
    data = build(store)
    dtype = DTYPES[kind]
    wide = dtype[field].itemsize == 8
    count = len(take_apart(data)[1][kind]) // dtype.itemsize
    assert count > 0
    for item in range(count):
        for value in HOSTILE_64 if wide else HOSTILE:
            head, sections = take_apart(data)
            rows = np.frombuffer(sections[kind], dtype=dtype)
            signed = dtype[field].kind == "i"
            rows[field][item] = value - (1 << 64) if signed and value >> 63 else value
            _survives(store, put_together(head, sections))


def _survives(store: Store, data: bytes) -> None:
    try:
        engine, namespace = load(store, data)
    except CorruptionError:
        return
    for inode in list(namespace.inodes.values()):
        inode.attributes()
        if inode.live is not None:
            inode.live.export(0, 1 << 56)
    export.build(namespace, engine, uuid=bytes(16), lsn=1, next_extent_id=1 << 40)
    engine.close()


@pytest.mark.parametrize("kind", [*DTYPES, layout.SECTION_CRCS, layout.SECTION_STRINGS])
@pytest.mark.parametrize("change", ["drop", "double", "reverse", "empty"])
def test_hostile_sections(store: Store, kind: int, change: str) -> None:
    head, sections = take_apart(build(store))
    size = layout.SECTION_ITEM_BYTES[kind]
    items = [sections[kind][i : i + size] for i in range(0, len(sections[kind]), size)]
    changes: dict[str, Callable[[], list[bytearray]]] = {
        "drop": lambda: items[:-1],
        "double": lambda: [*items, items[-1]],
        "reverse": lambda: items[::-1],
        "empty": list,
    }
    sections[kind] = bytearray(b"".join(changes[change]()))
    _survives(store, put_together(head, sections))


def test_hostile_header(store: Store) -> None:
    data = build(store)
    for field in ("next_ino", "next_extent_id", "lsn"):
        for value in HOSTILE_64:
            head, sections = take_apart(data)
            head[field] = value
            _survives(store, put_together(head, sections))
    for row in range(8):
        for field in ("kind", "offset", "length", "item_count"):
            for value in HOSTILE if field == "kind" else HOSTILE_64:
                head, _ = take_apart(data)
                if int(head["sections"][field][0, row]) == value:
                    continue
                head["sections"][field][0, row] = value
                head["crc"] = crc32c(head.tobytes()[:508])
                with pytest.raises(CorruptionError):
                    load(store, head.tobytes() + data[512:])


@pytest.mark.parametrize("field", ["next_ino", "next_extent_id"])
def test_counters_that_give_out_zero(field: str) -> None:
    """No inode and no extent has the number 0: an empty store would hand it out."""
    empty = new_store()
    head, sections = take_apart(build(empty))
    head[field] = 0
    with pytest.raises(CorruptionError, match="counter"):
        load(empty, put_together(head, sections))
    empty.close()


@pytest.mark.parametrize("length", [1, 2, 3])
def test_directories_in_a_loop(store: Store, length: int) -> None:
    """An island that no path leads to: refused, and so is what hangs on it."""
    parent = 1
    inos = []
    for number in range(length + 1):
        parent = store.make_directory(parent, b"loop-%d-%d" % (length, number), 0o755, 0, 0).ino
        inos.append(parent)
    head, sections = take_apart(build(store))
    names = np.frombuffer(sections[layout.SECTION_NAMES], dtype=layout.IMAGE_NAME_DTYPE)
    load(store, put_together(head, sections))[0].close()
    names["parent"][names["ino"] == inos[0]] = inos[length - 1]
    with pytest.raises(CorruptionError, match="loop"):
        load(store, put_together(head, sections))
