"""A program that overwrites one checkpoint for ever, and says before and after each save which.

    python -m tests.support.saver DIRECTORY SEED FIRST_VERSION

It is what gets killed; ``kill_campaign`` reads what it said and compares. It never imports cxlfs.

Each line is ``begin N HOW``, ``end N`` (close or rename returned) or ``error N ERRNO``. The
contents come from seed and version alone: whoever reads the files can make them again.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

MIB = 1 << 20
SIZE_MAX = 8 * MIB
CHECKPOINT = "checkpoint.pt"
POINTER = "latest"
TEMPORARY = "checkpoint.pt.tmp"
WAYS = ("truncate", "truncate", "ftruncate", "rename")
"""How a version is saved: half of them as torch.save does it."""


@functools.cache
def _pool(seed: int) -> bytes:
    """What all versions are cut from: making each anew would take longer than saving it."""
    return random.Random(seed).randbytes(2 * SIZE_MAX)


def content(seed: int, version: int) -> bytes:
    """All bytes of a version: between 256 KiB and 8 MiB, not a round number of them."""
    source = random.Random(f"{seed} {version}")
    start = source.randrange(SIZE_MAX)
    return b"%020d" % version + _pool(seed)[start : start + source.randrange(MIB // 4, SIZE_MAX)]


def way(seed: int, version: int) -> str:
    return random.Random(f"way {seed} {version}").choice(WAYS)


def pieces(data: bytes, seed: int) -> Iterator[memoryview]:
    """As writers cut it: headers of 64 bytes, tensors of a few KiB to MiB, a tail."""
    source = random.Random(f"pieces {seed} {len(data)}")
    view, position = memoryview(data), 0
    while position < len(data):
        size = source.choice([64, 4096, 65_537, MIB, 3 * MIB])
        yield view[position : position + size]
        position += size


def save(directory: Path, seed: int, version: int, data: bytes) -> None:
    """Raises OSError."""
    how = way(seed, version)
    target = directory / (TEMPORARY if how == "rename" else CHECKPOINT)
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if how != "ftruncate" else 0)
    descriptor = os.open(target, flags, 0o644)
    if how == "ftruncate":
        os.ftruncate(descriptor, 0)
    for piece in pieces(data, seed):
        done = 0
        while done < len(piece):  # a short write is followed by an error, or by the rest
            done += os.write(descriptor, piece[done:])
    os.close(descriptor)
    if how == "rename":
        target.rename(directory / CHECKPOINT)
    (directory / POINTER).write_text(f"{version}\n")  # as trackers do: opened with "w"


def say(line: str) -> None:
    """With one system call: a kill cuts no line."""
    os.write(1, line.encode() + b"\n")


def main() -> None:
    directory, seed, version = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    while True:
        data = content(seed, version)
        say(f"begin {version} {way(seed, version)}")
        try:
            save(directory, seed, version, data)
        except OSError as error:
            say(f"error {version} {error.errno}")
            sys.exit(1)
        say(f"end {version}")
        version += 1


if __name__ == "__main__":
    main()
