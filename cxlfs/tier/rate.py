"""No more bytes a second than were asked for, of several threads together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Rate:
    """``bytes_per_second`` None: as fast as it goes."""

    def __init__(
        self,
        bytes_per_second: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait_for(self, size_bytes: int) -> None:
        """Until these may go: behind all that were asked about before."""
        if self._bytes_per_second is None:
            return
        with self._lock:
            now = self._clock()
            begins = max(now, self._free_at)
            self._free_at = begins + size_bytes / self._bytes_per_second
        if begins > now:
            self._sleep(begins - now)
