"""A reader that never stops, as a program of its own: ``python -m tests.support.run_reader FILE
WORDS HOW``. What it reads has to be as new as what its writer has been told is written.

The file is in blocks, each of which begins with the number of the writing that wrote it. WORDS is
memory that both share: the last writing that was answered, the last one that has begun, how many
times this has looked, and whether it is to end. A writing that has begun and is not answered may
show or not.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

BLOCK_BYTES = 64 << 10
BLOCKS = 160
ANSWERED, BEGUN, LOOKS, END = range(4)


def look(path: str, words: memoryview, how: str) -> None:
    """Reads all of the file, again and again. Raises AssertionError."""
    buffer = mmap.mmap(-1, BLOCKS * BLOCK_BYTES)
    numbers = memoryview(buffer).cast("Q")[:: BLOCK_BYTES // 8]
    descriptor = os.open(path, os.O_RDONLY)
    while not words[END]:
        answered = words[ANSWERED]
        if how == "renamed":
            os.close(descriptor)
            descriptor = os.open(path, os.O_RDONLY)
        count = os.preadv(descriptor, [buffer], 0)
        begun = words[BEGUN]
        found = numbers[: count // BLOCK_BYTES].tolist()
        assert all(answered <= number <= begun for number in found), (answered, found, begun)
        assert count == len(buffer) or begun > answered, (answered, count, begun)
        words[LOOKS] += 1


def main() -> None:
    path, shared, how = sys.argv[1:]
    with Path(shared).open("r+b") as file, mmap.mmap(file.fileno(), 4096) as memory:
        words = memoryview(memory).cast("Q")
        look(path, words, how)
        words.release()


if __name__ == "__main__":
    main()
