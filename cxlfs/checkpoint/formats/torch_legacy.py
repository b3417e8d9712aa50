"""PyTorch's older archive (``_use_new_zipfile_serialization=False``, DeepSpeed's default): four
pickles, a list of storages, and the storages one after the other. It has no checksums.

Source: torch/serialization.py, ``_legacy_save`` (torch 2.13). Complete: the last storage ends in
the file.
"""

from __future__ import annotations

import struct

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.formats.lightning import refine
from cxlfs.checkpoint.formats.torch_zip import SUFFIXES
from cxlfs.checkpoint.model import (
    BeyondLimitsError,
    Contents,
    DamagedError,
    File,
    IncompleteError,
    Tensor,
)
from cxlfs.checkpoint.pickles import Unpickled, read_pickle
from cxlfs.checkpoint.place import Reader
from cxlfs.checkpoint.torch_values import Storage, TensorWalk, progress_of

_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
MAGIC = b"\x80\x02\x8a\x0a" + _MAGIC_NUMBER.to_bytes(10, "little") + b"."
_PROTOCOL = 1001
_FIRST_READ_BYTES = 256 << 10
_COUNT = struct.Struct("<q")


class TorchLegacy:
    kind = "torch-legacy"

    def recognises(self, name: str, head: bytes) -> bool:
        if len(head) < len(MAGIC):
            return bool(head) and name.endswith(SUFFIXES) and MAGIC.startswith(head)
        return head.startswith(MAGIC)

    def examine(self, reader: Reader) -> Contents:
        contents = Contents(files=[File(reader.name, reader.size_bytes)])
        value, keys, end = _read_head(reader)
        walk = TensorWalk()
        try:
            walk.walk(value)
            places = _places_of(reader, keys, walk.storages, end)
        except BeyondLimitsError as error:
            contents.notes.append(f"its tensors are not listed: {error}")
            return contents
        for tensor in walk.tensors:
            begin = places.get(tensor.storage.key)
            if begin is None:
                raise DamagedError(f"tensor {tensor.name}: its data is not in the file")
            contents.tensors.append(
                Tensor(
                    tensor.name,
                    tensor.dtype,
                    tensor.shape,
                    reader.name,
                    begin + tensor.offset,
                    tensor.size_bytes,
                    tensor.strides,
                )
            )
        contents.step, contents.epoch = progress_of(value)
        contents.root = value
        refine(contents)
        return contents


def _read_head(reader: Reader) -> tuple[object, list[str], int]:
    """The saved value, the keys of its storages in their order, and where they begin."""
    length = _FIRST_READ_BYTES
    while True:
        data = reader.head(min(length, limits.HEADER_BYTES_MAX))
        try:
            return _parse_head(data)
        except IncompleteError:
            if len(data) == reader.size_bytes:
                raise
            if length > limits.HEADER_BYTES_MAX:
                raise BeyondLimitsError("its pickle is larger than what is read") from None
        length *= 4


def _parse_head(data: bytes) -> tuple[object, list[str], int]:
    magic = read_pickle(data)
    protocol = read_pickle(data, magic.end)
    if magic.value != _MAGIC_NUMBER or protocol.value != _PROTOCOL:
        raise DamagedError("it does not begin as such a file does")
    system = read_pickle(data, protocol.end)
    value = read_pickle(data, system.end)
    keys = read_pickle(data, value.end)
    return value.value, _keys_of(keys), keys.end


def _keys_of(found: Unpickled) -> list[str]:
    keys = found.value
    names = [key for key in keys if isinstance(key, str)] if isinstance(keys, list) else []
    if not isinstance(keys, list) or len(names) != len(keys):
        raise DamagedError("the list of its storages is damaged")
    return names


def _places_of(
    reader: Reader, keys: list[str], storages: dict[str, Storage], at: int
) -> dict[str, int]:
    """Where each storage's bytes begin. Each follows its number of items, 8 bytes."""
    places: dict[str, int] = {}
    total = len(keys)
    for number, key in enumerate(keys, 1):
        storage = storages.get(key)
        if storage is None:
            raise BeyondLimitsError("a storage belongs to no tensor that was found")
        if at + _COUNT.size > reader.size_bytes:
            raise IncompleteError(f"it ends before storage {number} of {total}")
        items = int(_COUNT.unpack(reader.read(at, _COUNT.size))[0])
        if items != storage.items:
            raise DamagedError(f"the size of storage {number} of {total} differs")
        places[key] = at + _COUNT.size
        at += _COUNT.size + storage.size_bytes
        if at > reader.size_bytes:
            raise IncompleteError(f"it ends in storage {number} of {total}")
    return places
