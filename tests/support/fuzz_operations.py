"""Operations of journal records at random: impossible ones, possible ones, and those in between.

Never here: putting them into an image (``fuzz``).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np

from cxlfs.format import layout, operations
from cxlfs.format.superblock import Superblock

_HEADER = layout.SEGMENT_HEADER_BYTES
_U64 = 1 << 64
_MEDIA_BYTES = 2 << 20


def some_number(rng: Random, bits: int, current: int) -> int:
    """Borders of the type, neighbours of what stands there, powers of two, anything."""
    top = 1 << bits
    kind = rng.randrange(8)
    if kind == 0:
        value = rng.choice((0, 1, 2, 3, top - 1, top - 2, top // 2, top // 2 - 1))
    elif kind == 1:
        value = current + rng.choice((-1, 1, -8, 8, -64, 64, -4096, 4096))
    elif kind == 2:
        value = (1 << rng.randrange(bits)) + rng.choice((-1, 0, 1))
    elif kind == 3:
        value = current ^ 1 << rng.randrange(bits)
    elif kind == 4:
        value = rng.randrange(40)
    elif kind == 5:
        value = rng.randrange(_MEDIA_BYTES)
    elif kind == 6:
        value = current * rng.choice((2, 3, 1000))
    else:
        value = rng.randrange(top)
    return value % top


class OperationMaker:
    """Of transactions for a store of this geometry."""

    def __init__(self, rng: Random, block: Superblock) -> None:
        self.rng = rng
        self.block = block

    def transaction(self) -> list[operations.Operation]:
        """Any operations, or those that make something, with one of them left out or doubled."""
        if self.rng.random() < 0.6:
            return [self._operation() for _ in range(self.rng.choice((1, 2, 3, 8)))]
        ops = self._creation()
        place = self.rng.randrange(len(ops))
        kind = self.rng.randrange(4)
        if kind == 0:
            del ops[place]
        elif kind == 1:
            ops.insert(self.rng.randrange(len(ops)), ops[place])
        elif kind == 2:
            ops[place] = self._operation()
        return ops

    def _creation(self) -> list[operations.Operation]:
        """A new file with a version kept aside that is promoted, or a new symbolic link."""
        ino, block = 200 + self.rng.randrange(6), self.block
        name = b"made-%d" % ino
        times = (1, 2, 3, 4)
        mode = self.rng.choice((0o100644, 0o120777))
        ops: list[operations.Operation] = [
            operations.InodeOperation(ino, mode, 1, 2, 0, 0, *times),
            operations.LinkOperation(1, ino, name),
        ]
        if mode == 0o120777:
            return [*ops, operations.SymlinkOperation(ino, b"somewhere")]
        extent_id = 300 + ino
        offset = block.segment_offset(self.rng.randrange(block.segment_count)) + _HEADER
        refs = np.zeros(1, dtype=layout.REF_DTYPE)
        refs[0] = (0, 5000, extent_id, 0)
        return [
            *ops,
            operations.ExtentOperation(extent_id, offset, 5056, 0, self.rng.randbytes(8)),
            operations.ContentOperation(ino, aside=True, cut=0, size=5000, refs=refs.tobytes()),
            operations.PromoteOperation(ino),
        ]

    def _ino(self) -> int:
        kind = self.rng.random()
        if kind < 0.85:
            return self.rng.randrange(1, 24)
        return some_number(self.rng, 64, 3)

    def _name(self) -> bytes:
        known = (b"checkpoints", b"runs", b"latest", b"state-link", b"late-1", b"new", b"new-2")
        return self.rng.choice((*known, self.rng.randbytes(self.rng.randrange(1, 40))))

    def _operation(self) -> operations.Operation:
        makers: tuple[Callable[[], operations.Operation], ...] = (
            self._inode_operation,
            lambda: operations.LinkOperation(self._ino(), self._ino(), self._name()),
            lambda: operations.LinkOperation(self._ino(), self._ino(), self._name()),
            lambda: operations.UnlinkOperation(self._ino(), self._name()),
            lambda: operations.SymlinkOperation(self._ino(), self._name() * 3),
            lambda: operations.XattrSetOperation(self._ino(), b"user.a", self.rng.randbytes(9)),
            lambda: operations.XattrRemoveOperation(self._ino(), b"user.a"),
            self._extent_operation,
            self._extent_operation,
            self._content_operation,
            self._content_operation,
            lambda: operations.PromoteOperation(self._ino()),
            lambda: operations.AsideDropOperation(self._ino()),
            self._move_operation,
        )
        return self.rng.choice(makers)()

    def _inode_operation(self) -> operations.Operation:
        kinds = (0o100644, 0o100644, 0o040755, 0o120777, 0o010600, 0o060600, 0, 0o170000)
        mode = self.rng.choice(kinds)
        times = [self.rng.randrange(-(1 << 63), 1 << 63) for _ in range(4)]
        flags = self.rng.choice((0, 0, 1, 2, 1 << 31))
        return operations.InodeOperation(self._ino(), mode, 1, 2, 0, flags, *times)

    def _extent_id(self) -> int:
        if self.rng.random() < 0.9:
            return self.rng.randrange(0, 40)
        return some_number(self.rng, 64, 3)

    def _small(self) -> int:
        if self.rng.random() < 0.8:
            return self.rng.choice((0, 1, 64, 4096, 8192, self.rng.randrange(20_000)))
        return some_number(self.rng, 64, 4096)

    def _extent_operation(self) -> operations.Operation:
        block = self.block
        segment = block.segment_offset(self.rng.randrange(block.segment_count))
        offset = segment + self.rng.choice((_HEADER, _HEADER, 0, 40_000, self._small())) % _U64
        if self.rng.random() < 0.05:
            offset = some_number(self.rng, 64, segment)
        length = self._small()
        chunks = min(-(-length // block.chunk_bytes), 64)
        if self.rng.random() < 0.1:
            chunks = self.rng.randrange(8)
        first = 0 if self.rng.random() < 0.8 else self.rng.randrange(1 << 32)
        crcs = self.rng.randbytes(4 * chunks)
        return operations.ExtentOperation(self._extent_id(), offset % _U64, length, first, crcs)

    def _content_operation(self) -> operations.Operation:
        refs = np.zeros(self.rng.choice((0, 1, 1, 2, 5)), dtype=layout.REF_DTYPE)
        for row in refs:
            row["file_offset"] = self._small()
            row["length"] = self._small()
            row["extent_id"] = self._extent_id()
            row["extent_offset"] = self._small()
        aside = self.rng.random() < 0.3
        return operations.ContentOperation(
            self._ino(), aside, self._small(), self._small(), refs.tobytes()
        )

    def _move_operation(self) -> operations.Operation:
        inos = tuple(self._ino() for _ in range(self.rng.randrange(4)))
        numbers = (self._extent_id(), self._small(), self._small(), self._extent_id())
        return operations.MoveOperation(*numbers, self._small(), inos)
