"""What a store tells of itself as it happens: each thing once, and how often it went on.

Never here: what is worth telling (whoever tells it), words for the terminal.

Invariants
- What is the same (kind, file, place on the media) and goes on is an *episode*: its first event is
  told, the others are counted, and the count is told when it is over, or every ten minutes. A
  program that writes to a full store again and again makes two lines, not 600 a second.
- Of one kind only so many episodes are told apart; further ones are counted together.
- What changes the store (read-only, reverted) is told each time: listeners act on it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

QUIET_SECONDS = 30.0
"""An episode is over when nothing came for so long."""
REPEAT_SECONDS = 600.0
EPISODES_MAX = 64
"""Of one kind at once."""
_GOES_ON = frozenset(
    {
        *("no-space", "checksum-error", "media-error", "not-published"),
        *("record-refused", "aside-refused"),
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class StoreEvent:
    """Something the operator should know; ``path`` and ``media_offset`` where they are known."""

    kind: str
    message: str
    ino: int | None = None
    path: str | None = None
    media_offset: int | None = None


@dataclasses.dataclass(slots=True)
class _Episode:
    """``more``: events since one was told, at ``told``; ``last``: when the last one came."""

    event: StoreEvent
    level: int
    told: float
    last: float
    more: int = 0


class Events:
    """One for each volume. ``find_path``: a path of an inode, if one is found without much work."""

    def __init__(
        self,
        find_path: Callable[[int], bytes | None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.listener: Callable[[StoreEvent], None] | None = None
        self._find_path = find_path
        self._clock = clock
        self._episodes: dict[tuple[object, ...], _Episode] = {}
        self._count: dict[str, int] = {}
        """Episodes of each kind."""

    def tell(
        self, kind: str, message: str, *, ino: int | None, media_offset: int | None, level: int
    ) -> None:
        """Log it and tell whoever listens, or count it."""
        if kind not in _GOES_ON:
            self._send(self._event(kind, message, ino, media_offset), level)
            return
        now = self._clock()
        key: tuple[object, ...] = (kind, ino, media_offset)
        if key not in self._episodes and self._count.get(kind, 0) >= EPISODES_MAX:
            key = (kind,)
        episode = self._episodes.get(key)
        if episode is not None and now - episode.last > QUIET_SECONDS:
            self._end(key)
            episode = None
        if episode is None:
            alone = len(key) > 1
            event = self._event(kind, message, ino if alone else None, media_offset)
            self._episodes[key] = _Episode(event, level, now, now)
            self._count[kind] = self._count.get(kind, 0) + 1
            self._send(event, level)
            return
        episode.more += 1
        episode.last = now
        if message != episode.event.message:
            episode.event = dataclasses.replace(episode.event, message=message)

    def maintain(self) -> None:
        """Tell how often went on what is over by now, or has gone on for long."""
        now = self._clock()
        for key, episode in list(self._episodes.items()):
            if now - episode.last > QUIET_SECONDS:
                self._end(key)
            elif now - episode.told > REPEAT_SECONDS:
                self._tell_more(episode)
                episode.told = now

    def end_all(self) -> None:
        """The store is being closed."""
        for key in list(self._episodes):
            self._end(key)

    def _end(self, key: tuple[object, ...]) -> None:
        episode = self._episodes.pop(key)
        self._count[episode.event.kind] -= 1
        self._tell_more(episode)

    def _tell_more(self, episode: _Episode) -> None:
        if episode.more == 0:
            return
        seconds = max(1, round(episode.last - episode.told))
        text = f"{episode.more} more in {seconds} s, the last one: {episode.event.message}"
        episode.more = 0
        self._send(dataclasses.replace(episode.event, message=text), episode.level)

    def _event(
        self, kind: str, message: str, ino: int | None, media_offset: int | None
    ) -> StoreEvent:
        found = self._find_path(ino) if ino is not None else None
        path = os.fsdecode(found) if found is not None else None
        return StoreEvent(kind, message, ino, path, media_offset)

    def _send(self, event: StoreEvent, level: int) -> None:
        place = "" if event.path is None else f" ({event.path})"
        if event.path is None and event.ino is not None:
            place = f" (inode {event.ino})"
        log.log(level, "%s: %s%s", event.kind, event.message, place)
        if self.listener is not None:
            self.listener(event)
