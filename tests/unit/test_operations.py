"""Operations of a journal record: what was encoded comes back, anything else is refused."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlfs.errors import CorruptionError
from cxlfs.format import layout, operations
from cxlfs.format.operations import Operation

u64 = st.integers(0, (1 << 64) - 1)
number = st.integers(0, layout.NUMBER_LIMIT - 1)
u32 = st.integers(0, (1 << 32) - 1)
i64 = st.integers(-(1 << 63), (1 << 63) - 1)
names = st.binary(min_size=1, max_size=255).filter(
    lambda n: b"/" not in n and b"\0" not in n and n not in (b".", b"..")
)
crcs = st.lists(u32, max_size=20).map(lambda v: b"".join(x.to_bytes(4, "little") for x in v))
refs = st.binary(max_size=320).map(lambda v: v[: len(v) // 32 * 32])

OPERATIONS: st.SearchStrategy[Operation] = st.one_of(
    st.builds(
        operations.InodeOperation,
        st.integers(1, layout.NUMBER_LIMIT - 1),
        u32,
        u32,
        u32,
        u32,
        st.sampled_from([0, layout.INODE_INCOMPLETE]),
        i64,
        i64,
        i64,
        i64,
    ),
    st.builds(operations.LinkOperation, u64, u64, names),
    st.builds(operations.UnlinkOperation, u64, names),
    st.builds(operations.SymlinkOperation, u64, st.binary(min_size=1, max_size=4095)),
    st.builds(
        operations.XattrSetOperation,
        u64,
        st.binary(min_size=1, max_size=255).filter(lambda n: b"\0" not in n),
        st.binary(max_size=3000),
    ),
    st.builds(operations.XattrRemoveOperation, u64, st.binary(min_size=1, max_size=255)),
    st.builds(operations.ExtentOperation, number, u64, u64, u32, crcs),
    st.builds(operations.ContentOperation, u64, st.booleans(), u64, st.integers(0, 1 << 56), refs),
    st.builds(operations.PromoteOperation, u64),
    st.builds(operations.AsideDropOperation, u64),
    st.builds(
        operations.MoveOperation, u64, u64, u64, u64, u64, st.lists(u64, max_size=9).map(tuple)
    ),
)


@given(st.lists(OPERATIONS, max_size=8))
def test_round_trip(ops: list[Operation]) -> None:
    payload = operations.encode(ops)
    assert len(payload) % 8 == 0
    assert operations.decode(payload, len(ops), 0) == ops


@given(st.lists(OPERATIONS, min_size=1, max_size=4), st.data())
def test_cut_short_is_refused(ops: list[Operation], data: st.DataObject) -> None:
    payload = operations.encode(ops)
    cut = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(CorruptionError) as caught:
        operations.decode(payload[:cut], len(ops), 4711)
    assert caught.value.media_offset == 4711


@given(st.lists(OPERATIONS, max_size=3), st.integers(-2, 3).filter(bool))
def test_wrong_count_is_refused(ops: list[Operation], off: int) -> None:
    if len(ops) + off >= 0:
        with pytest.raises(CorruptionError):
            operations.decode(operations.encode(ops), len(ops) + off, 0)


@given(st.binary(max_size=400), st.integers(0, 100))
def test_noise(payload: bytes, count: int) -> None:
    try:
        decoded = operations.decode(payload, count, 0)
    except CorruptionError:
        return
    assert len(decoded) == count


@given(st.lists(OPERATIONS, min_size=1, max_size=3), st.data())
def test_flipped_bits_never_do_more_than_refuse(ops: list[Operation], data: st.DataObject) -> None:
    payload = bytearray(operations.encode(ops))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        operations.decode(bytes(payload), len(ops), 0)
    except CorruptionError:
        return


def test_noise_with_true_headers(rng: random.Random) -> None:
    """Right types and lengths, any body."""
    refused = 0
    for _ in range(4000):
        body = rng.randbytes(rng.randrange(25) * 8)
        if rng.random() < 0.5:
            body = bytes(b if rng.random() < 0.3 else 0 for b in body)
        head = rng.randrange(1, 13).to_bytes(2, "little") + bytes(2)
        payload = head + (len(body) + 8).to_bytes(4, "little") + body
        try:
            operations.decode(payload, 1, 0)
        except CorruptionError:
            refused += 1
    assert 500 < refused < 4000


@pytest.mark.parametrize(
    "op",
    [
        operations.LinkOperation(1, 2, b"a/b"),
        operations.LinkOperation(1, 2, b"."),
        operations.LinkOperation(1, 2, b""),
        operations.LinkOperation(1, 2, b"n" * 256),
        operations.UnlinkOperation(1, b"a\0"),
        operations.SymlinkOperation(1, b""),
        operations.SymlinkOperation(1, b"x" * 4096),
        operations.XattrSetOperation(1, b"", b"v"),
        operations.XattrSetOperation(1, b"n" * 256, b"v"),
        operations.InodeOperation(0, 0o100644, 0, 0, 0, 0, 0, 0, 0, 0),
        operations.InodeOperation(layout.NUMBER_LIMIT, 0o100644, 0, 0, 0, 0, 0, 0, 0, 0),
        operations.ExtentOperation(layout.NUMBER_LIMIT, 0, 0, 0, b""),
        operations.InodeOperation(5, 0o100644, 0, 0, 0, 0x80, 0, 0, 0, 0),
        operations.ContentOperation(1, aside=False, cut=0, size=(1 << 56) + 1, refs=b""),
    ],
    ids=str,
)
def test_impossible_values_are_refused(op: Operation) -> None:
    with pytest.raises(CorruptionError):
        operations.decode(operations.encode([op]), 1, 0)
