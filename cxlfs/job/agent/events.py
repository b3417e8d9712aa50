"""What an agent says of itself: one event when something has changed, never the same one twice in
a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """``state``: one word; ``next_step``: empty, or what somebody has to do."""

    state: str
    text: str
    next_step: str = ""
    step: int | None = None
    ranks: tuple[int, ...] = ()


Tell = Callable[[Event], None]


def changes_only(tell: Tell) -> Tell:
    """Of equal ones in a row the first alone."""
    last: list[Event] = []

    def told(event: Event) -> None:
        if last != [event]:
            last[:] = [event]
            tell(event)

    return told
