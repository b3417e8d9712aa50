"""A program that saves for ever as ``saver`` does, and says the same, but stores file data into the
medium by itself; and one that goes on storing when nobody wants it any more.

    python -m tests.support.direct_saver DIRECTORY SEED ROLE FIRST [PAUSE_MS [on]]
    python -m tests.support.direct_saver DIRECTORY SEED hung NUMBER

The first writes through ``cxlfs.client``; in some versions several threads write one file.
``PAUSE_MS``: after each piece at most. ``on``: an error does not end it: it says so once, and
stores into its open file until it is killed.

The second begins to overwrite file NUMBER, stops in the middle of a copy, and waits for a line.
Then it stores random bytes anywhere into all of its room, checksums and slip, until it is killed.

Never here: a commit of what the second stores.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from cxlfs import client
from tests.support import saver
from tests.support.saver import MIB, say

if TYPE_CHECKING:
    from tests.support.direct_client import DirectFile, Lease

HUNG = "hung"
HUNG_PATTERN = "hung-{}.pt"
THREADS = 3
SLOW_PIECE_BYTES = 192 * saver.KIB
LEASES_MAX = 3


class Saver:
    """One, on the mount that it began on: a later one at the same place is not its own."""

    def __init__(self, directory: Path, seed: int, role: str, pause_ms: float, *, on: bool) -> None:
        descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        self.directory = Path(f"/proc/self/fd/{descriptor}")
        self.seed = seed
        self.role = role
        self.pause_seconds = pause_ms / 1000
        self.goes_on = on
        self.random = random.Random(f"direct {seed} {role}")

    def save(self, version: int) -> None:
        """Raises OSError."""
        data = saver.content(self.seed, self.role, version)
        final = self.directory / saver.name(self.seed, self.role, version)
        renames = saver.way(self.seed, self.role, version) == "rename"
        target = final.with_name(f"{final.name}.tmp") if renames else final
        say(f"begin {version}")
        file = client.open(target, "wb")
        try:
            self._fill(file, data, version)
            file.close()
            if renames:
                target.rename(final)
        except OSError as error:
            say(f"error {version} {error.errno}")
            self._fail(file, data)
        say(f"end {version}")

    def _fill(self, file: client.File, data: bytes, version: int) -> None:
        threads = random.Random(f"threads {self.seed} {version}").choice([1, 1, THREADS])
        pieces = list(_pieces(data, self.seed, slow=self.pause_seconds > 0))
        if threads == 1:
            for _, piece in pieces:
                file.write(piece)
                self._pause()
            return
        errors: list[OSError] = []

        def fill(part: list[tuple[int, memoryview]]) -> None:
            try:
                for offset, piece in part:
                    file.write_at(piece, offset)
                    self._pause()
            except OSError as error:
                errors.append(error)

        workers = [
            threading.Thread(target=fill, args=(pieces[first::threads],))
            for first in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if errors:
            raise errors[0]

    def _pause(self) -> None:
        if self.pause_seconds:
            time.sleep(self.random.uniform(0, self.pause_seconds))

    def _fail(self, file: client.File, data: bytes) -> NoReturn:
        if not self.goes_on:
            sys.exit(1)
        while True:
            for offset, piece in _pieces(data, self.seed, slow=True):
                with contextlib.suppress(OSError, ValueError):
                    file.write_at(piece, offset)
                time.sleep(0.001)


def _pieces(data: bytes, seed: int, *, slow: bool) -> list[tuple[int, memoryview]]:
    view, place = memoryview(data), 0
    if slow:
        cuts = [view[at : at + SLOW_PIECE_BYTES] for at in range(0, len(data), SLOW_PIECE_BYTES)]
    else:
        cuts = list(saver.pieces(data, seed))
    placed = []
    for piece in cuts:
        placed.append((place, piece))
        place += len(piece)
    return placed


def _begin(file: DirectFile, wanted_bytes: int) -> Lease:
    """Until what others have removed has come back."""
    while True:
        try:
            return file.begin(wanted_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EBUSY):
                raise
            time.sleep(0.05)


def hang(directory: Path, seed: int, number: int) -> NoReturn:
    """See the module."""
    from tests.support.direct_client import DirectFile  # what takes longest to import

    source = random.Random(f"hung {seed} {number} {os.getpid()}")
    file = DirectFile(os.open(directory / HUNG_PATTERN.format(number), os.O_RDWR | os.O_TRUNC))
    ranges = []
    for place in range(source.randint(1, LEASES_MAX)):
        lease = _begin(file, source.choice([MIB, 4 * MIB, 16 * MIB]))
        assert file.write(place * MIB, source.randbytes(source.randrange(1, MIB // 2)))
        ranges.append((lease.media_offset, lease.length_bytes))
    file.count_copying(1)
    slip = (file.held.slip_offset, file.held.slip_bytes)
    file.store(b"half of a write")
    say("begin 1")
    sys.stdin.readline()
    noise = source.randbytes(MIB)
    for count in itertools.count():
        for offset, length in (*ranges, slip):
            size = source.choice([8, 64, 4096, 100_000])
            at = source.randrange(length - min(size, length) + 1)
            piece = noise[count % 4096 :][: min(size, length)]
            file.medium.bytes[offset + at : offset + at + len(piece)] = piece
        if count % 16 == 0:
            for offset, length in (*ranges, slip):
                for at in range(0, length, MIB):
                    piece = noise[: min(MIB, length - at)]
                    file.medium.bytes[offset + at : offset + at + len(piece)] = piece
            time.sleep(0.01)
    raise AssertionError


def main() -> None:
    directory, seed, role, first = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5]
    if role == HUNG:
        hang(directory, seed, int(first))
    pause_ms = float(sys.argv[5]) if len(sys.argv) > 5 else 0
    program = Saver(directory, seed, role, pause_ms, on=sys.argv[6:] == ["on"])
    for version in itertools.count(int(first)):
        try:
            program.save(version)
        except OSError as error:  # it could not even be opened
            say(f"error {version} {error.errno}")
            if not program.goes_on:
                sys.exit(1)
            time.sleep(1000)


if __name__ == "__main__":
    main()
