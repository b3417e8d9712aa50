"""A connection to torch's key-value store for a thread that may be left waiting when the process
ends.

A thread inside a call of torch while the interpreter ends is unwound through C++ that does not
allow it: the process aborts ("terminate called without an active exception"). So calls here wait
for a short time each, none begins once the end has begun, and the end waits for those under way.

Never: what is said there.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime as dt
import threading
import time
from collections.abc import Iterator
from typing import Protocol

TICK_SECONDS = 0.5
_END_SECONDS = 4 * TICK_SECONDS


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: bytes) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def set_timeout(self, timeout: dt.timedelta) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def delete_key(self, key: str) -> bool: ...


class _Calls:
    """Those under way, of all connections of this process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._has_ended = False

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Raises RuntimeError: the process ends."""
        with self._changed:
            if self._has_ended:
                raise RuntimeError("the process ends")
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.wait_for(lambda: not self._count, _END_SECONDS)


_calls = _Calls()
# The interpreter has joined all threads but daemons then: a checkpoint in flight is done.
atexit.register(_calls.end)


class TickingStore:
    """``seconds``: how long ``multi_get`` waits. Used by one thread at a time."""

    def __init__(self, store: Store, seconds: float) -> None:
        self.store = store
        self._seconds = seconds

    def set(self, key: str, value: bytes) -> None:
        with _calls.one():
            self.store.set(key, value)

    def delete_key(self, key: str) -> bool:
        with _calls.one():
            return self.store.delete_key(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Raises RuntimeError: they were not there in time, or the store or the process is gone."""
        end = time.monotonic() + self._seconds
        while True:
            left = end - time.monotonic()
            with _calls.one():
                self.store.set_timeout(dt.timedelta(seconds=max(min(left, TICK_SECONDS), 0.001)))
                try:
                    return self.store.multi_get(keys)
                except RuntimeError:
                    if left <= TICK_SECONDS:
                        raise
                    self.store.check(keys)  # raises, where the store is gone
