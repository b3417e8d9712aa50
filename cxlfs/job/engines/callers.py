"""Whoever connects to a port says half a word: the one who says the right half is served.

All callers are heard at once, each with one deadline of its own, so that a stranger who is silent,
or says a byte now and then, holds up nobody.

Never: where a port is, or who is told of it (``sockets``).

Invariants
- Nothing waits without a deadline, and at most ``CALLERS_MAX`` are heard at once.
- All connections but the one that is returned are closed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import selectors
import socket
import time
from typing import Self, cast

WORD_SECONDS = 5.0
"""For a caller to say half a word, from when it was accepted."""
CALLERS_MAX = 64
"""Of whom the oldest is sent away for one more."""


@dataclasses.dataclass(slots=True)
class _Caller:
    """``said``: so far; ``end``: when it is sent away."""

    end: float
    said: bytes = b""


class Callers:
    """Of a listening socket, which stays the owner's to close."""

    def __init__(self, server: socket.socket, half: bytes) -> None:
        self._server = server
        self._half = half
        self._selector = selectors.DefaultSelector()
        self._callers: dict[socket.socket, _Caller] = {}
        server.settimeout(0.0)
        self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for caller in list(self._callers):
            self._send_away(caller)
        self._selector.close()

    def wait(self, end: float) -> socket.socket:
        """The caller who says the right half. Raises TimeoutError, OSError."""
        while True:
            now = time.monotonic()
            for caller, kept in list(self._callers.items()):
                if kept.end <= now:
                    self._send_away(caller)
            if now >= end:
                raise TimeoutError
            first = min([end, *(kept.end for kept in self._callers.values())])
            for key, _ in self._selector.select(max(first - now, 0.0)):
                if key.fileobj is self._server:
                    self._accept()
                elif self._is_right(cast("socket.socket", key.fileobj)):
                    return self._taken(cast("socket.socket", key.fileobj))

    def _accept(self) -> None:
        if len(self._callers) == CALLERS_MAX:
            self._send_away(next(iter(self._callers)))
        with contextlib.suppress(OSError):  # it is gone already
            caller, _ = self._server.accept()
            caller.settimeout(0.0)
            self._callers[caller] = _Caller(time.monotonic() + WORD_SECONDS)
            self._selector.register(caller, selectors.EVENT_READ)

    def _is_right(self, caller: socket.socket) -> bool:
        """What it has said by now. Who has ended, or says something else, is sent away."""
        kept = self._callers.get(caller)
        if kept is None:
            return False
        try:
            more = caller.recv(len(self._half) - len(kept.said))
        except BlockingIOError:
            return False
        except OSError:
            more = b""
        kept.said += more
        if more and len(kept.said) < len(self._half):
            return False
        if more and hmac.compare_digest(kept.said, self._half):
            return True
        self._send_away(caller)
        return False

    def _taken(self, caller: socket.socket) -> socket.socket:
        del self._callers[caller]
        self._selector.unregister(caller)
        return caller

    def _send_away(self, caller: socket.socket) -> None:
        self._taken(caller).close()
