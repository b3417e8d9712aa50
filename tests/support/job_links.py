"""Links between ranks that are threads of one process: queues, with a time limit and an end."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from cxlfs.errors import JobLinkError

Tap = Callable[[str, int, bytes], bytes]
"""What is sent by a link of that name, as a rank's piece of that number: what comes out."""


class Switch:
    """All links of one start of the job. ``tap``: looks at what is sent, and may change it, or
    raise. ``made``: the names of those that were made, at both ends. ``is_stream``: see ``Link``.
    """

    def __init__(self, *, is_stream: bool = False) -> None:
        self.is_stream = is_stream
        self._lock = threading.Lock()
        self._queues: dict[tuple[str, int], queue.SimpleQueue[bytes | None]] = {}
        self.made: list[str] = []
        self.tap: Tap = lambda _name, _number, data: data

    def link(self, own: int, other: int, name: str, seconds: float) -> QueueLink:
        with self._lock:
            self.made.append(name)
            out, into = (
                self._queues.setdefault((name, side), queue.SimpleQueue()) for side in (own, other)
            )
        return QueueLink(self, name, other, out, into, time.monotonic() + seconds)


class QueueLink:
    def __init__(
        self,
        switch: Switch,
        name: str,
        other: int,
        out: queue.SimpleQueue[bytes | None],
        into: queue.SimpleQueue[bytes | None],
        end: float,
    ) -> None:
        self._switch = switch
        self.is_stream = switch.is_stream
        self._rest = b""
        self.name = name
        self._other = other
        self._out = out
        self._into = into
        self._end = end
        self._sent = 0

    def send(self, data: bytearray | memoryview) -> Arrival:
        self._out.put(self._switch.tap(self.name, self._sent, bytes(data)))
        self._sent += 1
        return Arrival(lambda: None)

    def receive(self, into: bytearray | memoryview) -> Arrival:
        def take() -> None:
            data = self._rest
            while len(data) < len(into):
                data += self._come()
                if not self.is_stream and len(data) != len(into):
                    raise JobLinkError(f"rank {self._other}: connection closed")
            into[:], self._rest = data[: len(into)], data[len(into) :]

        return Arrival(take)

    def _come(self) -> bytes:
        try:
            data = self._into.get(timeout=max(self._end - time.monotonic(), 0.001))
        except queue.Empty:
            raise JobLinkError(f"rank {self._other}: timed out") from None
        if data is None:
            raise JobLinkError(f"rank {self._other}: connection closed")
        return data

    def close(self, *, is_done: bool) -> None:
        if not is_done:
            self._out.put(None)


class Arrival:
    def __init__(self, take: Callable[[], None]) -> None:
        self._take = take

    def wait(self) -> None:
        self._take()
