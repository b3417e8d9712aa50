"""What a format is to the rest of the room.

Never here: a format.
"""

from __future__ import annotations

from typing import Protocol

from cxlfs.checkpoint.model import Contents
from cxlfs.checkpoint.place import Place, Reader


class Format(Protocol):
    """Of a directory, or of files that share a prefix."""

    @property
    def kind(self) -> str:
        """What reports call it."""
        ...

    def recognises(self, place: Place) -> bool:
        """Whether names, sizes and first bytes say that it is one; complete or not."""
        ...

    def examine(self, place: Place) -> Contents:
        """Its structure. Raises ProblemError where nothing more can be said than that."""
        ...


class FileFormat(Protocol):
    """Of one file."""

    @property
    def kind(self) -> str:
        """What reports call it."""
        ...

    def recognises(self, name: str, head: bytes) -> bool:
        """By the file's name and its first :data:`HEAD_BYTES` bytes, or as many as there are."""
        ...

    def examine(self, reader: Reader) -> Contents:
        """Its structure. Raises ProblemError. Tensors name the file as the reader does."""
        ...


HEAD_BYTES = 320
"""With the name of the first file in a zip archive."""


def is_cut(head: bytes, magic: bytes) -> bool:
    """The file is a beginning of ``magic``, or room that nothing was written to."""
    return magic.startswith(head) or not head.strip(b"\0")
