"""What an open store knows of its rollovers: how long an image may be to be made at once, and whom
it asks for one.

Never here: making an image, or deciding when (``rollover``).
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cxlfs.format.operations import Operation

AT_ONCE_BYTES = 1 << 20
"""An image of up to so many bytes is made at once: it takes no longer than a few saves."""
JOURNAL_SEGMENTS = 2
"""Its two copies."""


def is_short(image_bytes: int) -> bool:
    """Making an image of that size need not be spread over steps."""
    return image_bytes <= AT_ONCE_BYTES


class RolloverUnderWay(Protocol):
    """What the reserve depends on while an image is being made (``rollover``)."""

    @property
    def dead(self) -> Sized:
        """Segments that its root will free."""
        ...

    @property
    def image_segments(self) -> int: ...

    @property
    def journals_before(self) -> int:
        """Journal segments of the current set that lie before the image."""
        ...


class RollsOver(Protocol):
    """Who makes new images, and decides when (``rollover.Rollovers``)."""

    due: bool

    @property
    def running(self) -> RolloverUnderWay | None: ...

    def run(self, *, closing: bool = False) -> None: ...

    def step(self, *, apart: bool = False) -> bool: ...

    def step_apart(self) -> bool: ...

    def make_journal_room(self) -> None: ...

    def keep(self, ops: Sequence[Operation]) -> None: ...
