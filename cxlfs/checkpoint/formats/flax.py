"""flax's msgpack file: ``checkpoint_N``, or ``*.msgpack``; a tree with arrays as extensions.

Source: flax/serialization.py (0.12), https://github.com/msgpack/msgpack/blob/master/spec.md.
Complete: the tree ends where the file does, and each array has the size that its shape and type
need. It has no checksums.
"""

from __future__ import annotations

import math
import re

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.formats.msgpack import Item, MsgpackReader, scalar_items
from cxlfs.checkpoint.jsons import number_or_none
from cxlfs.checkpoint.model import (
    BeyondLimitsError,
    Contents,
    DamagedError,
    File,
    IncompleteError,
    ProblemError,
    Tensor,
)
from cxlfs.checkpoint.place import Reader

NAME = re.compile(r"checkpoint_(\d{1,18})")
_OTHER_NAME = re.compile(r"[^.]*_\d{1,18}")
"""With a prefix of the program's own: many files are called so."""
_ARRAY, _SCALAR = 1, 3
_TYPE = re.compile(
    r"bool|(?:u?int|float|bfloat|complex|str|bytes|void)\d+\w*|(?:datetime|timedelta)64(?:\[\w+\])?"
)
"""Names of NumPy's types, and of those that ml_dtypes adds."""
_ITEM_BYTES = {
    "bool": 1,
    "bfloat16": 2,
    **{f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": bits // 8 for bits in (16, 32, 64, 128)},
    **{f"complex{bits}": bits // 8 for bits in (64, 128)},
}
_HEAD_BYTES = 4096
_MAPS = (*range(0x81, 0x90), 0xDE, 0xDF)


class Flax:
    kind = "flax"

    def recognises(self, name: str, head: bytes) -> bool:
        if name.endswith(".msgpack"):
            return True
        is_begun = bool(head) and head[0] in _MAPS
        if NAME.fullmatch(name):
            return is_begun or not head.strip(b"\0")
        return is_begun and _OTHER_NAME.fullmatch(name) is not None

    def examine(self, reader: Reader) -> Contents:
        try:
            return self._examine(reader)
        except (IncompleteError, DamagedError) as error:
            if _OTHER_NAME.fullmatch(reader.name.rpartition("/")[2]):
                raise BeyondLimitsError(f"if it is of flax: {error}") from error
            raise

    @staticmethod
    def _examine(reader: Reader) -> Contents:
        contents = Contents(files=[File(reader.name, reader.size_bytes)])
        match = NAME.fullmatch(reader.name.rpartition("/")[2])
        contents.named_step = int(match[1]) if match is not None else None
        if not reader.size_bytes:
            raise IncompleteError("it is empty")
        found = MsgpackReader(reader)
        for item in found.items():
            if item.extension == _ARRAY:
                contents.tensors.append(_tensor(reader, item))
            elif item.extension == _SCALAR:
                _tensor(reader, item)  # packed alike
            elif item.name == "step" and contents.step is None:
                contents.step = number_or_none(item.value)
        if found.end != reader.size_bytes:
            raise BeyondLimitsError("bytes follow its tree")
        return contents


def _tensor(reader: Reader, item: Item) -> Tensor:
    """The extension holds ``[shape, type, bytes]``."""
    head = reader.read(item.offset, min(item.size_bytes, _HEAD_BYTES))
    try:
        values, data = scalar_items(head, item.size_bytes)
    except ProblemError as error:
        raise DamagedError(f"tensor {item.name}: {error}") from error
    if not values or not isinstance(values[-1], str):
        raise DamagedError(f"tensor {item.name} has no type")
    shape = tuple(each for each in values[:-1] if isinstance(each, int) and each >= 0)
    if len(shape) != len(values) - 1 or len(shape) > limits.DIMENSIONS_MAX:
        raise DamagedError(f"the shape of tensor {item.name} cannot be")
    if not _TYPE.fullmatch(values[-1]):
        raise DamagedError(f"the type of tensor {item.name} cannot be")
    item_bytes = _ITEM_BYTES.get(values[-1])
    if item_bytes is not None and math.prod(shape) * item_bytes != item.size_bytes - data:
        raise DamagedError(f"the size of tensor {item.name} does not fit its shape")
    return Tensor(
        item.name,
        values[-1],
        shape,
        reader.name,
        item.offset + data,
        item.size_bytes - data,
    )
