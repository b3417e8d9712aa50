"""flax's msgpack file: ``checkpoint_N``, or ``*.msgpack``; a tree with arrays as extensions.

Source: flax/serialization.py (0.12), https://github.com/msgpack/msgpack/blob/master/spec.md.
Complete: the tree ends where the file does. It has no checksums.
"""

from __future__ import annotations

import re

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.formats.msgpack import Item, MsgpackReader, scalar_items
from cxlfs.checkpoint.jsons import number_or_none
from cxlfs.checkpoint.model import (
    Contents,
    DamagedError,
    File,
    IncompleteError,
    ProblemError,
    Tensor,
)
from cxlfs.checkpoint.place import Reader

NAME = re.compile(r".*?_(\d{1,18})")
_ARRAY = 1
_HEAD_BYTES = 4096
_MAPS = (*range(0x81, 0x90), 0xDE, 0xDF)


class Flax:
    kind = "flax"

    def recognises(self, name: str, head: bytes) -> bool:
        if name.endswith(".msgpack"):
            return True
        return (
            bool(NAME.fullmatch(name))
            and "." not in name
            and (not head.strip(b"\0") or head[0] in _MAPS)
        )

    def examine(self, reader: Reader) -> Contents:
        contents = Contents(files=[File(reader.name, reader.size_bytes)])
        if not reader.size_bytes:
            raise IncompleteError("it is empty")
        found = MsgpackReader(reader)
        for item in found.items():
            if item.extension == _ARRAY:
                contents.tensors.append(_tensor(reader, item))
            elif item.name == "step" and contents.step is None:
                contents.step = number_or_none(item.value)
        if found.end != reader.size_bytes:
            raise DamagedError("bytes follow its tree")
        match = NAME.fullmatch(reader.name.rpartition("/")[2])
        if match is not None and contents.step is None:
            contents.step = int(match[1])
        return contents


def _tensor(reader: Reader, item: Item) -> Tensor:
    """The extension holds ``[shape, type, bytes]``."""
    head = reader.read(item.offset, min(item.size_bytes, _HEAD_BYTES))
    try:
        values, data = scalar_items(head, item.size_bytes)
    except ProblemError as error:
        raise DamagedError(f"tensor {item.name}: {error}") from error
    if len(values) < 2 or not isinstance(values[-1], str):
        raise DamagedError(f"tensor {item.name} has no type")
    shape = tuple(each for each in values[:-1] if isinstance(each, int) and each >= 0)
    if len(shape) != len(values) - 1 or len(shape) > limits.DIMENSIONS_MAX:
        raise DamagedError(f"the shape of tensor {item.name} cannot be")
    return Tensor(
        item.name,
        values[-1],
        shape,
        reader.name,
        item.offset + data,
        item.size_bytes - data,
    )
