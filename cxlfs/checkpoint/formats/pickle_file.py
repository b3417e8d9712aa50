"""A file that is one pickle (``pickle.dump``; states of random numbers and data loaders).

Complete: the pickle ends where the file does. It has no checksum, and nothing is listed of it.
"""

from __future__ import annotations

from cxlfs.checkpoint.model import Contents, DamagedError, File, IncompleteError
from cxlfs.checkpoint.pickles import read_pickle
from cxlfs.checkpoint.place import Reader
from cxlfs.checkpoint.torch_values import step_of

_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth", ".bin")
_PROTO = 0x80


class PickleFile:
    kind = "pickle"

    def recognises(self, name: str, head: bytes) -> bool:
        return name.endswith(_SUFFIXES) and len(head) > 1 and head[0] == _PROTO and head[1] < 6

    def examine(self, reader: Reader) -> Contents:
        if not reader.size_bytes:
            raise IncompleteError("it is empty")
        found = read_pickle(reader.read(0, reader.size_bytes))
        if found.end != reader.size_bytes:
            raise DamagedError("bytes follow its pickle")
        contents = Contents(files=[File(reader.name, reader.size_bytes)])
        contents.step = step_of(found.value)
        return contents
