"""Contents that programs have verified where they lie, so that who maps one next need not, and what
is left of one that is being verified.

A program that maps a file compares all of it with its checksums before it looks at it. Those that
map one content at the same time, as the ranks of a job do, do that together: each is given a piece
and says when it is right. What all of was compared is remembered for a while.

A content is known by its exact parts: numbers, places and lengths of its extents, which never
change and are never used again, and their checksums. What was overwritten, moved or repaired is
another one.

Never here: comparing, a file or its name, anything on the media.

Invariants
- A content is verified when each piece of it was compared by a program to which it was given, and
  for the time that the mount says, from before the first of them was.
- Damage that anybody meets, in whatever file, ends all that is remembered.
- CONTENTS_MAX of them, some hundred bytes each and one for each piece; those that were asked for
  the longest time ago go first.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from cxlfs.errors import InvalidArgumentError
from cxlfs.units import MIB

if TYPE_CHECKING:
    from cxlfs.native.direct import HeldContent
    from cxlfs.store.health import Health

CONTENTS_MAX = 256
PIECES = 64
"""Of a content: a request for one costs as much as comparing 2 MiB, and the last of them is waited
for."""
PIECE_BYTES_MIN, PIECE_BYTES_MAX = 8 * MIB, 64 * MIB
PATIENCE_SECONDS = 5.0
"""With which the others wait for a piece that was given to somebody: compared in milliseconds,
unless its program was stopped."""


class Piece(NamedTuple):
    """What to compare next. ``length_bytes`` 0: nothing; ``done``: since all of it is verified,
    else others are at work.
    """

    offset: int
    length_bytes: int
    done: bool = False


@dataclasses.dataclass(slots=True)
class _Given:
    """A piece that was given to these handles, last ``at``, on the clock."""

    handle_ids: set[int]
    at: float


class _Content:
    """How far one content is. ``began``: before anything of it was compared."""

    def __init__(self, size_bytes: int, piece_bytes_min: int, began: float) -> None:
        share = size_bytes // PIECES // MIB * MIB
        self.size_bytes = size_bytes
        self.began = began
        self.piece_bytes = min(max(share, piece_bytes_min), PIECE_BYTES_MAX)
        self.count = -(-size_bytes // self.piece_bytes)
        self.left = self.count
        self.given: dict[int, _Given] = {}
        self._next = 0
        self._returned: list[int] = []

    def piece(self, index: int) -> Piece:
        start = index * self.piece_bytes
        return Piece(start, min(self.piece_bytes, self.size_bytes - start))

    def give(self, handle_id: int, now: float) -> Piece:
        if not self.left:
            return Piece(0, 0, done=True)
        index = self._choose(now)
        if index is None:
            return Piece(0, 0)
        given = self.given.setdefault(index, _Given(set(), now))
        given.handle_ids.add(handle_id)
        given.at = now
        return self.piece(index)

    def _choose(self, now: float) -> int | None:
        if self._returned:
            return self._returned.pop()
        if self._next < self.count:
            self._next += 1
            return self._next - 1
        late = (i for i, given in self.given.items() if given.at + PATIENCE_SECONDS <= now)
        return next(late, None)

    def compared(self, handle_id: int, offset: int, length_bytes: int) -> None:
        """Nothing where it was not given this piece, or others were quicker."""
        index = offset // self.piece_bytes
        given = self.given.get(index)
        if given is None or handle_id not in given.handle_ids:
            return
        if (offset, length_bytes) == self.piece(index)[:2]:
            del self.given[index]
            self.left -= 1

    def drop(self, handle_id: int) -> None:
        """It compares nothing any more."""
        for index, given in list(self.given.items()):
            given.handle_ids.discard(handle_id)
            if not given.handle_ids:
                del self.given[index]
                self._returned.append(index)


class VerifiedContents:
    """One for each store. ``for_seconds``: how long a content that was verified counts as that, as
    the mount says; 0: nothing is remembered.
    """

    def __init__(self, health: Health, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.for_seconds = 0.0
        self.piece_bytes_min = PIECE_BYTES_MIN
        self._health = health
        self._clock = clock
        self._sightings = health.sightings
        self._contents: collections.OrderedDict[bytes, _Content] = collections.OrderedDict()
        self.compared_bytes = 0

    @property
    def count(self) -> int:
        """Contents that need not be verified just now."""
        self._forget_where_damaged()
        return sum(not each.left and self._is_in_time(each) for each in self._contents.values())

    def begin(self, held: HeldContent) -> tuple[bytes, bool]:
        """Somebody maps this content: by what it is known from here on, and whether all of it was
        verified lately. Raises OutOfMemoryError.
        """
        self._forget_where_damaged()
        key = hashlib.blake2b(held.identity(), digest_size=32).digest()
        content = self._contents.get(key)
        if content is None or not self._is_in_time(content):
            content = self._contents[key] = _Content(
                held.size_bytes, self.piece_bytes_min, self._clock()
            )
        self._contents.move_to_end(key)
        while len(self._contents) > CONTENTS_MAX:
            self._contents.popitem(last=False)
        return key, not content.left

    def next(self, key: bytes, handle_id: int, done: tuple[int, int]) -> Piece:
        """``done``: offset and length of what was compared through this handle, and is right; then
        what to compare next. Raises InvalidArgumentError: nothing is known of it any more.
        """
        self._forget_where_damaged()
        content = self._contents.get(key)
        if content is None or not self._is_in_time(content):
            raise InvalidArgumentError("what was compared of this content is forgotten")
        offset, length_bytes = done
        if length_bytes:
            left = content.left
            content.compared(handle_id, offset, length_bytes)
            self.compared_bytes += length_bytes if content.left < left else 0
        return content.give(handle_id, self._clock())

    def drop(self, key: bytes, handle_id: int) -> None:
        """This handle compares nothing any more."""
        content = self._contents.get(key)
        if content is not None:
            content.drop(handle_id)

    def forget(self) -> None:
        """Whatever was verified, nobody is to believe it."""
        self._contents.clear()

    def _is_in_time(self, content: _Content) -> bool:
        return self._clock() < content.began + self.for_seconds

    def _forget_where_damaged(self) -> None:
        if self._sightings != self._health.sightings:
            self._sightings = self._health.sightings
            self.forget()
