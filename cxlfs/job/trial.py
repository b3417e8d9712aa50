"""How long a save of so many bytes takes in a directory: one is made, read back and removed.

Never: keeps anything; says what to do about it (``advice``).
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

_PIECE_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """``save_seconds``: until it was durable; ``load_seconds``: read anew, from the medium where
    the directory keeps no pages in memory (a cxlfs mount does not).
    """

    size_bytes: int
    save_seconds: float
    load_seconds: float


def try_save(directory: Path, size_bytes: int, progress: Callable[[str, int, int], None]) -> Trial:
    """Raises OSError, also for what does not fit; nothing of it stays in any case."""
    path = directory / f".cxlfs-trial-{secrets.token_hex(4)}"
    piece = secrets.token_bytes(min(_PIECE_BYTES, size_bytes))
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        begun = time.monotonic()
        done = 0
        while done < size_bytes:
            done += os.write(descriptor, memoryview(piece)[: size_bytes - done])
            progress("saving", done, size_bytes)
        os.fsync(descriptor)
        save_seconds = time.monotonic() - begun
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        begun = time.monotonic()
        done = 0
        while read := os.pread(descriptor, _PIECE_BYTES, done):
            done += len(read)
            progress("loading", done, size_bytes)
        return Trial(size_bytes, save_seconds, time.monotonic() - begun)
    finally:
        os.close(descriptor)
        path.unlink()
