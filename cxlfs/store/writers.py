"""Those who read and write file data beside the store's own verbs, as an inode knows them: a port
of the data plane, and the slip of a program that has room of its own.

Never here: what they do (``native/transport``, ``direct``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cxlfs.native.maps import FileMap


class Port(Protocol):
    """Where a data plane reads and writes the live content of an open file by itself."""

    def stop(self) -> int:
        """It writes no more until allowed to; returns as ``written``."""
        ...

    def written(self) -> int:
        """Time of its last write, ns since the epoch; 0: none since the last question."""
        ...

    def set_content(self, content: FileMap) -> None: ...

    def ask(self, asks: bool) -> None:  # noqa: FBT001
        """Whether the store is asked before each read and write, allowed or not."""
        ...


class Slip(Protocol):
    """Where a program that writes to the file by itself says what it wrote. Neither raises."""

    def absorb(self) -> None:
        """What it has said so far is live content."""
        ...

    def close(self) -> None:
        """That, and it says no more: it must ask for another one."""
        ...


class Writer(Protocol):
    """A handle that may write past the store before the store has seen it write."""

    wrote: bool
