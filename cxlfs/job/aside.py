"""Attempts that a store gives back: they count no more at once, and are removed behind that.

Never: which (``protocol.collectable``), or who removes them (``room``).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path

from cxlfs.durable import sync_directory
from cxlfs.job import files
from cxlfs.job.protocol import Attempt

GOING_NAME = ".cxlfs-job-going"
"""What was an attempt, until all of it is removed."""
_GOING = re.compile(re.escape(GOING_NAME) + r"(?:\.[0-9a-f]{8})?", re.ASCII)


def is_there(root: Path, attempt: Attempt) -> bool:
    return os.path.lexists(root / files.attempt_name(attempt))


def set_aside(root: Path, attempt: Attempt) -> None:
    """Nothing of it counts any more. Raises OSError."""
    aside = root / GOING_NAME
    with contextlib.suppress(FileNotFoundError):
        (root / files.attempt_name(attempt)).rename(_beside(aside) if aside.exists() else aside)


def _beside(aside: Path) -> Path:
    return aside.with_name(f"{GOING_NAME}.{secrets.token_hex(4)}")


def is_anything_aside(root: Path) -> bool:
    return os.path.lexists(root / GOING_NAME)


def remove_aside(root: Path) -> None:
    """The first of them last: its name says whether all are gone. What cannot be removed is left
    for the next time, and nobody waits for it. Raises OSError.
    """
    sync_directory(root)
    names = (entry.name for entry in files.entries(root))
    try:
        for name in sorted(filter(_GOING.fullmatch, names), reverse=True):
            shutil.rmtree(root / name)
    except OSError:
        aside = root / GOING_NAME
        with contextlib.suppress(FileNotFoundError):
            aside.rename(_beside(aside))
        raise
