"""Keras' ``.keras``: a zip archive with two descriptions in JSON and the weights as HDF5.

Source: keras/src/saving/saving_lib.py (3.15). Complete: the archive has its end, the three records
are there, the descriptions are JSON, and the weights end where they say. Each has a CRC-32.
"""

from __future__ import annotations

from cxlfs.checkpoint import zips
from cxlfs.checkpoint.formats.base import is_cut
from cxlfs.checkpoint.formats.hdf5 import take_hdf5
from cxlfs.checkpoint.jsons import parse_json
from cxlfs.checkpoint.model import Contents, DamagedError, File, IncompleteError
from cxlfs.checkpoint.place import Reader
from cxlfs.checkpoint.zips import Archive

_DESCRIPTIONS = ("metadata.json", "config.json")
_WEIGHTS = ("model.weights.h5", "model.weights.npz")


class Keras:
    kind = "keras"

    def recognises(self, name: str, head: bytes) -> bool:
        return name.endswith(".keras") and (
            head.startswith(zips.MAGIC) or is_cut(head[:4], zips.MAGIC)
        )

    def examine(self, reader: Reader) -> Contents:
        contents = Contents(files=[File(reader.name, reader.size_bytes)])
        if not reader.size_bytes:
            raise IncompleteError("it is empty")
        archive = Archive(reader)
        contents.regions = archive.regions(reader.name)
        for name in _DESCRIPTIONS:
            if name not in archive.records:
                raise DamagedError(f"the archive has no {name}")
            parse_json(archive.read(archive.records[name]), name)
        weights = next((archive.records[n] for n in _WEIGHTS if n in archive.records), None)
        sharded = any(name.startswith("model.weights.h5") for name in archive.records)
        if weights is None and not sharded:
            raise DamagedError(f"the archive has no {_WEIGHTS[0]}")
        if weights is not None and weights.name.endswith(".h5") and weights.method == zips.STORED:
            try:
                take_hdf5(reader, weights.offset, weights.stored_bytes, contents)
            except IncompleteError as error:
                raise DamagedError(f"{weights.name}: {error}") from error
        return contents
