"""What a store asks of its history when space is short, and what one without history answers.

Other modules keep history (``past``) and give it back (``past_space``).
"""

from __future__ import annotations

from typing import Protocol


class History(Protocol):
    """What can be had of segments that only history refers to."""

    @property
    def segments(self) -> int:
        """So many would be free without it."""
        ...

    def make_free(self, wanted: int) -> bool:
        """Give some of it back, until so many segments are free; True when one became free."""
        ...


class NoHistory:
    """There is none."""

    segments = 0

    def make_free(self, wanted: int) -> bool:
        del wanted
        return False


NO_HISTORY = NoHistory()
