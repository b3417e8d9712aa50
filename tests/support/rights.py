"""Rights of a file of the whole machine, widened while some test process needs that.

Several processes test side by side: the first one widens them, the last one puts them back.
"""

from __future__ import annotations

import contextlib
import fcntl
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def widened(path: Path, mode: int, folder: Path) -> Iterator[None]:
    """``path`` has the bits of ``mode`` as well. ``folder``: the same for all who do that; two
    locks lie there: one is held for a moment by who changes anything, the other is shared by all
    who need it so.
    """
    with (
        (folder / f"{path.name}.changing").open("a") as changing,
        (folder / f"{path.name}.needing").open("a+") as needing,
    ):
        with _locked(changing):
            if _nobody_else(needing):
                before = stat.S_IMODE(path.stat().st_mode)
                needing.truncate(0)
                needing.write(f"{before:o}")
                needing.flush()
                path.chmod(before | mode)
            fcntl.flock(needing, fcntl.LOCK_SH)
        try:
            yield
        finally:
            with _locked(changing):
                fcntl.flock(needing, fcntl.LOCK_UN)
                if _nobody_else(needing):
                    needing.seek(0)
                    path.chmod(int(needing.read(), 8))


@contextlib.contextmanager
def _locked(file: IO[str]) -> Iterator[None]:
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _nobody_else(needing: IO[str]) -> bool:
    try:
        fcntl.flock(needing, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
