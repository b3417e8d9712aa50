"""What is known of the tensors of a checkpoint before any of their bytes is read.

Other modules find it out (``layout``) and use it.

Invariants
- ``[offset, offset + size_bytes)`` of a part lies inside its file. If the part is not compressed,
  every item that ``shape`` and ``strides`` lead to lies inside that range.
- A tensor without ``reason`` has an item type, and parts that lie inside it and have as many
  items together as it has.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math

from cxlfs.checkpoint.model import Algorithm, File, State
from cxlfs.checkpoint.place import Place
from cxlfs.checkpoint.tensors.dtypes import ItemType, item_type


class Codec(enum.Enum):
    """How bytes are compressed."""

    DEFLATE = "deflate"
    ZSTD = "zstd"


@dataclasses.dataclass(frozen=True, slots=True)
class Digest:
    """A checksum that the format keeps of the bytes around a part: two parts with equal digests
    have equal bytes, as far as that checksum can tell.
    """

    algorithm: Algorithm
    value: int
    size_bytes: int
    ahead_bytes: int
    """Where the part begins in them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a file that hold a box of a tensor. ``start``: where in the tensor the box begins.
    ``strides``: in items. ``codec``: what the bytes are compressed with, as one stream, in which
    ``ahead_bytes`` come before the items.
    """

    file: str
    offset: int
    size_bytes: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    codec: Codec | None = None
    ahead_bytes: int = 0
    digest: Digest | None = None

    @property
    def items(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """``dtype``: as the format says it. ``reason``: why its items cannot be looked at; None: they
    can. ``size_bytes``: what its parts take in the files.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    reason: str | None = None

    @property
    def type(self) -> ItemType | None:
        return item_type(self.dtype)

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def items(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Where the tensors of one checkpoint are. Names of files are relative to ``home``."""

    path: str
    kind: str
    home: Place
    state: State
    state_reason: str | None
    step: int | None
    files: tuple[File, ...]
    tensors: tuple[StoredTensor, ...]
    notes: tuple[str, ...]

    def named(self) -> dict[str, StoredTensor]:
        """By name. Where several have one name (each rank has its own) their files tell them
        apart: ``FILE:NAME``.
        """
        often = collections.Counter(tensor.name for tensor in self.tensors)
        found: dict[str, StoredTensor] = {}
        for tensor in self.tensors:
            name = tensor.name
            if often[name] > 1:
                name = f"{tensor.parts[0].file if tensor.parts else ''}:{name}"
            found.setdefault(name, tensor)
        return found


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of C order, in items."""
    found, step = [], 1
    for dimension in reversed(shape):
        found.append(step)
        step *= max(dimension, 1)
    return tuple(reversed(found))


def span_items(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """From the first item to behind the last; 0 where there is none."""
    if not all(shape):
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
