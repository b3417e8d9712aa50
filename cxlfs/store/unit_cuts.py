"""Markers that were cut: an exception, or a handler of signals that ends the program, closes a file
half written like a whole one.

Never here: archives of PyTorch (``unit_archives``), what becomes of a unit then.

Invariants
- A file is called cut only where its own bytes show it: JSON whose brackets stay open, a pickle
  without its last opcode, the beginning of a directory's name. What is none of these is not.
- At most JSON_BYTES_MAX are read.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Final

from cxlfs.errors import CxlfsError
from cxlfs.units import KIB, MIB

if TYPE_CHECKING:
    from cxlfs.native.maps import FileMap

JSON_BYTES_MAX: Final = 4 * MIB
"""Brackets of so much are counted in 30 ms, in which others wait."""
_NAME_BYTES_MAX = 4 * KIB
_OPENING = {b"{": b"}", b"[": b"]"}
_PICKLE, _STOP = b"\x80", b"."
"""The first opcode of protocol 2 and newer, and the last one (pickletools.py, ``opcodes``)."""


def is_cut(content: FileMap) -> bool:
    """JSON or a pickle that ends too early."""
    size = content.size
    try:
        first = bytes(content.read(0, 1))
        if first == _PICKLE:
            return bytes(content.read(size - 1, 1)) != _STOP
        if first not in _OPENING or size > JSON_BYTES_MAX:
            return False
        return not _is_whole(bytes(content.read(0, size)).strip())
    except CxlfsError:
        return False


def _is_whole(text: bytes) -> bool:
    if text[-1:] != _OPENING[text[:1]]:
        return False
    pieces = text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    outside = b"".join(pieces[::2])  # of strings
    counts = (outside.count(opening) - outside.count(end) for opening, end in _OPENING.items())
    return len(pieces) % 2 == 1 and not any(counts)


def is_beginning_of(content: FileMap, name: bytes, others: Container[bytes]) -> bool:
    """It names a directory by the beginning of ``name``, or of the number at its end, and is not
    the name of one of the ``others``.
    """
    if not 0 < content.size <= _NAME_BYTES_MAX:
        return False
    try:
        text = bytes(content.read(0, content.size)).strip()
    except CxlfsError:
        return False
    stem = name.rstrip(b"0123456789")
    number = name[len(stem) :]
    if text != name and name.startswith(text):
        return text not in others
    digits = number.lstrip(b"0")
    if text == digits or not digits.startswith(text):
        return False
    return stem + text.rjust(len(number), b"0") not in others
