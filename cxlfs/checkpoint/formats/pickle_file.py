"""A file of pickles (``pickle.dump``; states of random numbers and data loaders; logs of them).

Complete: a pickle ends where the file does, or further pickles follow up to there. It has no
checksum, and nothing is listed of it. Libraries of their own put other bytes between opcodes or
behind a pickle (joblib: arrays), and compress the whole: such a file is not understood, and so is
one that is no pickle at all.
"""

from __future__ import annotations

from cxlfs.checkpoint.model import (
    BeyondLimitsError,
    Contents,
    DamagedError,
    File,
    IncompleteError,
)
from cxlfs.checkpoint.pickles import read_pickle
from cxlfs.checkpoint.place import Reader
from cxlfs.checkpoint.torch_values import progress_of

_SUFFIXES = (".pkl", ".pickle")
_OF_TORCH = (".pt", ".pth", ".bin")
_PROTO = 0x80
_PROTOCOL_MAX = 5
_OWN_UNPICKLERS = (b"joblib",)
"""Named in pickles that only these libraries can read."""


class PickleFile:
    kind = "pickle"

    def recognises(self, name: str, head: bytes) -> bool:
        return name.endswith(_SUFFIXES) or (name.endswith(_OF_TORCH) and _is_begun(head))

    def examine(self, reader: Reader) -> Contents:
        if not reader.size_bytes:
            raise IncompleteError("it is empty")
        contents = Contents(files=[File(reader.name, reader.size_bytes)])
        data = reader.read(0, reader.size_bytes)
        if not data.strip(b"\0"):
            raise IncompleteError("it is filled with zeros")
        contents.step, contents.epoch = progress_of(read_pickles(data))
        return contents


def read_pickles(data: bytes) -> object:
    """The value of the first pickle; others may follow it.

    Raises IncompleteError: one that was begun has no end; DamagedError: the first is none that
    Python reads; BeyondLimitsError: something is in it that is no pickle.
    """
    first: object = None
    at = 0
    while at < len(data):
        try:
            found = read_pickle(data, at)
        except (IncompleteError, DamagedError) as error:
            is_begun = _is_begun(data[at : at + 2])
            is_plain = is_begun and not any(name in data for name in _OWN_UNPICKLERS)
            if is_plain and (at == 0 or isinstance(error, IncompleteError)):
                raise
            where = f"bytes follow its pickle at {at}" if at else "it is no plain pickle"
            raise BeyondLimitsError(f"{where}: {error}") from error
        first = found.value if at == 0 else first
        at = found.end
    return first


def _is_begun(head: bytes) -> bool:
    return bool(head) and head[0] == _PROTO and all(each <= _PROTOCOL_MAX for each in head[1:2])
