"""The log of a daemon mounted with ``-o debug``, read while it works and after it was killed: the
daemon writes each line at once, so the last one tells what it was doing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from tests.support.mount import PATIENCE_SECONDS

NEITHER = "neither"
CLEANING = {
    "compacting segment": "compacting",
    "is left as it is": NEITHER,
    "is empty": NEITHER,
    "rolling over to": "rolling over",
    "is durable": NEITHER,
}
"""Words of a line, and what the daemon is doing from there on."""

STARTING = "starting"
MOUNTING = {
    " opening ": "recovering",
    "rolling over to": "rolling over",
    "is durable": "recovering",
    "process protection": "attaching",
    " mounted ": "answering",
}

_POLL_SECONDS = 0.0003


class DaemonLog:
    """See the module. A log that does not exist is empty."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> str:
        return self.path.read_text(encoding="ascii", errors="replace") if self.path.exists() else ""

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def wait_for(self, *words: str, position: int) -> bool:
        """Until a line behind ``position`` holds one of ``words``; False when none comes."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            said = self.read()[position:]
            if any(word in said for word in words):
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def last(self, moments: Mapping[str, str], at_first: str) -> str:
        """What the daemon was doing in the end."""
        moment = at_first
        for line in self.read().splitlines():
            moment = next((said for word, said in moments.items() if word in line), moment)
        return moment

    def clear(self) -> None:
        """No daemon may be writing to it."""
        if self.path.exists():
            os.truncate(self.path, 0)
