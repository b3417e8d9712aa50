"""Who has files of a directory open for writing, as far as this user may see (/proc).

Never here: what is done about it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ACCESS_MODES = os.O_WRONLY | os.O_RDWR


class Writer(NamedTuple):
    """A process, what it is called, and a file that it writes to."""

    pid: int
    name: str
    path: str


def writers_in(directory: Path, proc: Path = Path("/proc")) -> Iterator[Writer]:
    """Processes other than this one. On another machine, or of another user: not seen."""
    begin = f"{os.path.realpath(directory)}/"
    for process in proc.iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                path = _written_path(process, descriptor)
                if path is not None and path.startswith(begin):
                    name = (process / "comm").read_text(encoding="utf-8", errors="replace")
                    yield Writer(int(process.name), name.strip(), path)


def _written_path(process: Path, descriptor: Path) -> str | None:
    """What an open descriptor leads to, if it can be written through."""
    with contextlib.suppress(OSError, ValueError):
        path = str(descriptor.readlink())
        if not path.startswith("/"):
            return None
        text = (process / "fdinfo" / descriptor.name).read_text(encoding="ascii")
        flags = next(line.split()[1] for line in text.splitlines() if line.startswith("flags:"))
        return path if int(flags, 8) & _ACCESS_MODES else None
    return None
