"""Small writes one behind the other become one large one: pickle and zip archives make many.

Never: writes; knows a file. Whoever has it does, when it says so.

Invariants
- What was put in is in ``pending`` until it is taken, one range of the file without gaps.
"""

from __future__ import annotations

GATHER_BYTES = 1 << 20
"""Of one large write. From 1 MiB on the requests of a write no longer show in its time."""
PASS_FROM_BYTES = 128 << 10
"""A piece of this size costs more to copy here than to write as it is."""


class Gathering:
    """Bytes that wait, and where in the file they begin."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self.offset = 0

    @property
    def end(self) -> int:
        """Where in the file the byte behind the last one that waits goes."""
        return self.offset + len(self._bytes)

    def __bool__(self) -> bool:
        return bool(self._bytes)

    def accepts(self, data: memoryview, offset: int) -> bool:
        """It is small, and goes on where the others end."""
        if len(data) >= PASS_FROM_BYTES:
            return False
        return not self._bytes or (self.end == offset and len(self._bytes) < GATHER_BYTES)

    def put(self, data: memoryview, offset: int) -> None:
        """Keep a copy of what was accepted."""
        if not self._bytes:
            self.offset = offset
        self._bytes += data

    @property
    def is_full(self) -> bool:
        """It is worth a write."""
        return len(self._bytes) >= GATHER_BYTES

    def take(self) -> tuple[int, memoryview]:
        """All that waits, and where it goes."""
        taken, self._bytes = self._bytes, bytearray()
        return self.offset, memoryview(taken)
