"""Operations of many records as columns: the same as of one record after the other."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cxlfs.errors import CorruptionError
from cxlfs.format import layout, operation_columns, operations, superblock
from cxlfs.format.operation_columns import OperationColumns
from cxlfs.format.operations import Operation
from tests.support.corrupt import populated_media
from tests.support.fuzz_operations import OperationMaker


@pytest.fixture
def maker(rng: random.Random) -> OperationMaker:
    media = populated_media(closed=True)
    block = superblock.choose(media)[0]
    media.close()
    return OperationMaker(rng, block)


def columns_of(payloads: list[bytes], counts: list[int]) -> tuple[bytes, OperationColumns]:
    """Payloads as they stand in a segment: behind a header each, padded to 64 bytes."""
    data, starts = b"", []
    for payload in payloads:
        starts.append(len(data) + 64)
        data += bytes(64) + payload + bytes(-len(payload) % 64)
    lengths = np.array([len(payload) for payload in payloads], dtype=np.int64)
    arrays = (np.array(starts, dtype=np.int64), lengths, np.array(counts, dtype=np.int64))
    return data, operation_columns.decode(data, *arrays)


def put_together(data: bytes, found: OperationColumns) -> list[list[Operation]]:
    """The operations of each good record again, definitions first."""
    result: list[list[Operation]] = [[] for _ in range(found.good_records)]
    for record, info in zip(found.extent_records.tolist(), found.extents, strict=True):
        first, count = 4 * int(info["crc_index"]), int(info["crc_count"])
        numbers = [int(info[n]) for n in ("id", "media_offset", "length", "first_chunk")]
        crcs = data[first : first + 4 * count]
        result[record].append(operations.ExtentOperation(*numbers, crcs))
    rows = found.attributes(list(range(len(found.inos)))).tolist()
    for kind, record, index in zip(
        found.kinds.tolist(), found.records.tolist(), found.indexes.tolist(), strict=True
    ):
        op: Operation
        if kind == layout.OP_INODE:
            op = operations.InodeOperation(*rows[index][:6], *rows[index][7:])
            assert (op.ino, op.mode) == (found.inos[index], found.modes[index])
        elif kind == layout.OP_CONTENT:
            change = found.changes[index]
            first, count = int(change["refs_offset"]), int(change["ref_count"])
            refs = data[first : first + 32 * count]
            ino, aside = int(found.change_inos[index]), bool(found.asides[index])
            assert found.change_records[index] == record
            op = operations.ContentOperation(
                ino, aside, int(change["cut"]), int(change["size"]), refs
            )
        elif kind == layout.OP_LINK:
            meant = int(found.meant[index])
            op = operations.LinkOperation(int(found.parents[index]), meant, found.names[index])
        elif kind == layout.OP_UNLINK:
            op = operations.UnlinkOperation(int(found.parents[index]), found.names[index])
        elif kind in {layout.OP_SYMLINK, layout.OP_XATTR_SET, layout.OP_XATTR_REMOVE}:
            ino = int(found.string_inos[index])
            name, value = found.string_names[index], found.string_values[index]
            if kind == layout.OP_SYMLINK:
                op = operations.SymlinkOperation(ino, value)
            elif kind == layout.OP_XATTR_SET:
                op = operations.XattrSetOperation(ino, name, value)
            else:
                op = operations.XattrRemoveOperation(ino, name)
        else:
            op = found.others[index]
        result[record].append(op)
    return result


def definitions_first(ops: list[Operation]) -> list[Operation]:
    return sorted(ops, key=lambda op: not isinstance(op, operations.ExtentOperation))


@pytest.mark.parametrize("together", [1, 3, 16])
def test_the_same_as_one_by_one(
    maker: OperationMaker, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operation_columns, "_STEPS_TOGETHER", together)
    for _ in range(100):
        records = [maker.transaction() for _ in range(maker.rng.randrange(12))]
        records = [ops * maker.rng.choice((0, 1, 1, 1, 4)) for ops in records]
        payloads = [operations.encode(ops) for ops in records]
        data, found = columns_of(payloads, [len(ops) for ops in records])
        good = 0
        for ops, payload in zip(records, payloads, strict=True):
            try:
                operations.decode(payload, len(ops), 0)
            except CorruptionError:
                break
            good += 1
        assert found.good_records == good
        assert put_together(data, found) == [definitions_first(ops) for ops in records[:good]]


def test_any_byte_wrong(maker: OperationMaker) -> None:
    """Good records end exactly where ``operations.decode`` refuses one."""
    rng = maker.rng
    refused = 0
    for _ in range(1500):
        records = [maker.transaction() for _ in range(4)]
        payloads = [bytearray(operations.encode(ops)) for ops in records]
        counts = [len(ops) for ops in records]
        for _ in range(rng.choice((1, 1, 3))):
            which = rng.randrange(4)
            kind = rng.randrange(8)
            if kind == 0:
                counts[which] += rng.choice((-1, 1))
                counts[which] = max(counts[which], 0)
            elif kind == 1:
                del payloads[which][rng.randrange(len(payloads[which]) + 1) :]
            elif payloads[which]:
                place = rng.randrange(len(payloads[which]))
                payloads[which][place] = rng.choice((0, 1, 8, 255, rng.randrange(256)))
        plain = [bytes(payload) for payload in payloads]
        data, found = columns_of(plain, counts)
        expected = []
        for payload, count in zip(plain, counts, strict=True):
            try:
                expected.append(definitions_first(operations.decode(payload, count, 0)))
            except CorruptionError:
                refused += 1
                break
        assert put_together(data, found) == expected
    assert refused > 200


def test_definitions_are_counted() -> None:
    """What comes behind how many definitions: what the engine keeps its order by."""
    extents = [operations.ExtentOperation(i, 0, 1, 0, bytes(4)) for i in (1, 2, 3)]
    change = operations.ContentOperation(5, aside=False, cut=0, size=0, refs=b"")
    drop = operations.AsideDropOperation(5)
    records = [[extents[0], change, drop], [change], [extents[1], extents[2], drop, change]]
    payloads = [operations.encode(ops) for ops in records]
    _, found = columns_of(payloads, [len(ops) for ops in records])
    assert found.changes["definitions"].tolist() == [1, 1, 3]
    assert found.other_definitions == [1, 3]


def test_nothing() -> None:
    assert columns_of([], [])[1].good_records == 0
    assert columns_of([b"", b""], [0, 0])[1].good_records == 2
    assert columns_of([b"", b""], [0, 1])[1].good_records == 1
