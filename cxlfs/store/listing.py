"""The names of a directory in an order that stays: what any number of readers go through at once.

Never here: what a name means (``namespace``), who reads.

Invariants
- Every name has one place, and its cookie, a number that only grows from place to place, does not
  change while the name exists. One that is made again soon has its old place.
- A reader that goes from cookie to cookie meets each name that is there all the time exactly once,
  whatever comes and goes meanwhile, as POSIX wants it of readdir.
- There is one listing for a directory, however many handles are open; none before somebody reads.

Cost: a change appends, or notes; what was removed is swept out some hundred places at a time. The
first reader after a mount pays for one copy of the list of names (5 ms for a million).
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterable, Iterator, Sequence

_CHUNK_NAMES = 1024
_SWEEP_EVERY = 64
"""So many removals for each chunk that is swept."""


class _Chunk:
    """Names in a row, from ``begin``, and their cookies."""

    __slots__ = ("begin", "cookies", "names")

    def __init__(self, cookies: Sequence[int], names: list[bytes]) -> None:
        self.begin = 0
        self.cookies = cookies
        self.names = names

    def __len__(self) -> int:
        return len(self.names) - self.begin


class Listing:
    """Of one directory, whose ``names`` are given once and kept up to date from then on."""

    __slots__ = ("_chunks", "_cursor", "_firsts", "_next_cookie", "_places", "_removed")

    def __init__(self, names: Iterable[bytes]) -> None:
        first = list(names)
        self._next_cookie = len(first) + 1
        self._chunks = [_Chunk(range(1, self._next_cookie), first)]
        self._firsts = [1]
        """The first cookie of each chunk."""
        self._places = len(first)
        self._removed: set[bytes] = set()
        """Names that still have a place."""
        self._cursor = 0

    @property
    def end(self) -> int:
        """The cookie that the next new name gets."""
        return self._next_cookie

    @property
    def places(self) -> int:
        """Of names that are there, and of some that were."""
        return self._places

    def add(self, name: bytes) -> None:
        """It is new in the directory."""
        if name in self._removed:
            self._removed.discard(name)
            return
        chunk = self._chunks[-1]
        if not isinstance(chunk.cookies, array) or len(chunk) >= _CHUNK_NAMES:
            chunk = _Chunk(array("Q"), [])
            self._chunks.append(chunk)
            self._firsts.append(self._next_cookie)
        chunk.names.append(name)
        chunk.cookies.append(self._next_cookie)  # type: ignore[attr-defined]
        self._next_cookie += 1
        self._places += 1

    def remove(self, name: bytes) -> None:
        """It is not in the directory any more."""
        self._removed.add(name)
        count = len(self._removed)
        if count % _SWEEP_EVERY == 0 and count * 2 > self._places:
            self._sweep()

    def after(self, cookie: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Cookies and names behind ``cookie`` (0: all) and before ``end``, in their order."""
        index = max(bisect.bisect_right(self._firsts, cookie) - 1, 0)
        while index < len(self._chunks):
            chunk = self._chunks[index]
            start = bisect.bisect_right(chunk.cookies, cookie, chunk.begin)
            for position in range(start, len(chunk.names)):
                name = chunk.names[position]
                if chunk.cookies[position] >= end:
                    return
                if name not in self._removed:
                    yield chunk.cookies[position], name
            index += 1

    def _sweep(self) -> None:
        """Forget the places of names that are gone, in one chunk: the next one each time."""
        if self._cursor >= len(self._chunks):
            self._cursor = 0
        chunk = self._chunks[self._cursor]
        end = min(chunk.begin + _CHUNK_NAMES, len(chunk.names))
        kept = [
            (cookie, name)
            for cookie, name in zip(
                chunk.cookies[chunk.begin : end], chunk.names[chunk.begin : end], strict=True
            )
            if name not in self._removed
        ]
        self._removed.difference_update(chunk.names[chunk.begin : end])
        self._places -= end - chunk.begin - len(kept)
        chunk.begin = end
        if len(chunk):
            self._firsts[self._cursor] = chunk.cookies[end]
        elif len(self._chunks) > 1:
            del self._chunks[self._cursor], self._firsts[self._cursor]
        else:
            chunk.begin = 0
            chunk.cookies, chunk.names = array("Q"), []
            self._firsts[self._cursor] = self._next_cookie
        if kept:
            self._keep(kept)

    def _keep(self, kept: list[tuple[int, bytes]]) -> None:
        """Put what was kept before the cursor: behind its neighbour if that has room."""
        cookies = array("Q", [cookie for cookie, _ in kept])
        names = [name for _, name in kept]
        before = self._chunks[self._cursor - 1] if self._cursor else None
        if (
            before is not None
            and isinstance(before.cookies, array)
            and len(before) + len(kept) <= _CHUNK_NAMES
        ):
            before.cookies.extend(cookies)
            before.names.extend(names)
            return
        self._chunks.insert(self._cursor, _Chunk(cookies, names))
        self._firsts.insert(self._cursor, cookies[0])
        self._cursor += 1
