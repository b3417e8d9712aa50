"""PyTorch's zip archive (``torch.save`` since 1.6): a pickle, and a stored record for each storage.

Source: torch/serialization.py, caffe2/serialize/inline_container.cc (torch 2.13). Complete: the
archive's end record is there, its pickle ends, and every storage that the pickle names has a
record of its size. Each record has a CRC-32, which ``torch.load`` does not compare.

An exception that passes ``torch.save`` lets its writer end the archive in good order: what had not
come yet is missing, the pickle or storages, and nothing else is there. That is incomplete, not
damaged.
"""

from __future__ import annotations

import re

from cxlfs.checkpoint import zips
from cxlfs.checkpoint.formats.base import HEAD_BYTES, is_cut
from cxlfs.checkpoint.formats.lightning import refine
from cxlfs.checkpoint.model import (
    BeyondLimitsError,
    Contents,
    DamagedError,
    File,
    IncompleteError,
    Tensor,
)
from cxlfs.checkpoint.pickles import read_pickle
from cxlfs.checkpoint.place import Reader
from cxlfs.checkpoint.torch_values import TensorWalk, progress_of
from cxlfs.checkpoint.zips import Archive, Record

SUFFIXES = (".pt", ".pth", ".ckpt")
_OTHER_NAMES = re.compile(
    r"(?:pytorch_model|adapter_model|optimizer|scheduler|sampler|training_args)[\w-]*\.bin"
    r"|(?:random_states|custom_checkpoint)_\d{1,9}\.pkl"
)
"""What Hugging Face calls files of ``torch.save``."""
_PICKLE = "data.pkl"
_BYTE_ORDER, _BIG = "byteorder", b"big"
_OF_THE_WRITER = frozenset({"version", _BYTE_ORDER, ".data/serialization_id"})
"""Records that it adds when an archive is ended."""


class TorchZip:
    kind = "torch"

    def recognises(self, name: str, head: bytes) -> bool:
        if head.startswith(zips.MAGIC):
            return name.endswith((*SUFFIXES, ".bin", ".pkl")) or _begins_with_pickle(head)
        if name.endswith(SUFFIXES):
            return True  # whatever it begins with: it must not be passed over
        return _OTHER_NAMES.fullmatch(name) is not None and is_cut(head, zips.MAGIC)

    def examine(self, reader: Reader) -> Contents:
        contents = Contents(files=[File(reader.name, reader.size_bytes)])
        if not reader.size_bytes:
            raise IncompleteError("it is empty")
        head = reader.head(HEAD_BYTES)
        if not is_cut(head[:4], zips.MAGIC) and not reader.tail(22).startswith(zips.END_MAGIC):
            raise BeyondLimitsError("it does not begin as a file of torch.save does")
        archive = Archive(reader)
        root = _root_of(archive)
        contents.regions = archive.regions(reader.name)
        try:
            self._take_pickle(archive, root, reader.name, contents)
        except BeyondLimitsError as error:
            contents.notes.append(f"its tensors are not listed: {error}")
        return contents

    def _take_pickle(self, archive: Archive, root: str, file: str, contents: Contents) -> None:
        data = archive.read(archive.records[root + _PICKLE])
        try:
            found = read_pickle(data)
        except IncompleteError as error:
            raise DamagedError("its pickle has no end") from error
        walk = TensorWalk()
        walk.walk(found.value)
        order = _byte_order(archive, root)
        for tensor in walk.tensors:
            storage = tensor.storage
            record = archive.records.get(f"{root}data/{storage.key}")
            if record is None and _is_ended_early(archive, root, walk):
                raise IncompleteError(f"it was ended before tensor {tensor.name} was saved")
            if record is None or record.size_bytes != storage.size_bytes:
                raise DamagedError(f"tensor {tensor.name}: its data is not in the archive")
            offset = record.offset + tensor.offset if _is_plain(record) else None
            contents.tensors.append(
                Tensor(
                    tensor.name,
                    order + tensor.dtype,
                    tensor.shape,
                    file,
                    offset,
                    None if offset is None else tensor.size_bytes,
                    tensor.strides,
                )
            )
        contents.step, contents.epoch = progress_of(found.value)
        contents.root = found.value
        refine(contents)


def _begins_with_pickle(head: bytes) -> bool:
    """Whatever the file is called: its first record is the pickle, in a directory."""
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    return name.endswith(b"/" + _PICKLE.encode())


def _byte_order(archive: Archive, root: str) -> str:
    """``>`` for an archive that a big-endian machine wrote, as NumPy marks types; else nothing."""
    record = archive.records.get(f"{root}{_BYTE_ORDER}")
    if record is None or record.size_bytes != len(_BIG):
        return ""
    return ">" if archive.read(record) == _BIG else ""


def _is_plain(record: Record) -> bool:
    return record.method == zips.STORED


def _root_of(archive: Archive) -> str:
    """The directory of the records: the archive's name when it was saved."""
    for name in archive.records:
        root, _, last = name.rpartition("/")
        if last == _PICKLE and "/" not in root:
            return f"{root}/" if root else ""
    if {name.partition("/")[2] for name in archive.records} <= _OF_THE_WRITER:
        raise IncompleteError("the archive was ended before anything was in it")
    raise BeyondLimitsError(f"the archive has no {_PICKLE}: torch.save has not written it so")


def _is_ended_early(archive: Archive, root: str, walk: TensorWalk) -> bool:
    """Every storage in the archive is of a tensor: no record has come to have another name."""
    begin = f"{root}data/"
    found = {name.removeprefix(begin) for name in archive.records if name.startswith(begin)}
    return found <= walk.storages.keys()
