"""Links over NIXL: one-sided writes into the other rank's memory, by RDMA where there is a fabric,
else by what UCX finds (shared memory, TCP). For host memory, in which shards lie; no GPU is needed.

    sender      piece n into slot n of the other's ring, "piece n, of so many bytes" ─►
    receiver    ◄─ "taken up to n"                        who has given up: "ended" to the other

Each end is a NIXL agent of its own, gone with the link. The key-value store of the job tells each
where the other's ring is.

Never: a thread of its own, beside those of NIXL.

Invariants
- A slot is written to again only when the other has said that it took what was there.
- The other writes into a link's own ring alone, and that is there as long as its agent is: what a
  rank that is late still sends never comes into memory that is used for something else.
- Nothing waits without a deadline. NIXL does not tell that a process is gone: that, too, is seen at
  the deadline.
"""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import struct
import time
from typing import Protocol

from cxlfs.errors import JobEngineError, JobLinkError
from cxlfs.job.engines.interface import Pending

SLOT_BYTES = 4 << 20
SLOTS = 4
"""So much memory each end takes, twice."""
LINGER_SECONDS = 10.0
"""An agent stays so long behind its link: the last that it said may still be on its way."""
_POLL_SECONDS_MIN = 20e-6
_POLL_SECONDS_MAX = 1e-3
_NOTE = struct.Struct("<cQQ")
_PIECE, _TAKEN, _ENDED = b"P", b"T", b"E"
_WHERE = struct.Struct("<Q")

_lingering: collections.deque[tuple[float, object, object]] = collections.deque()
"""When it was closed, an agent, and the memory that it knows: the agent goes first."""


class Store(Protocol):
    """What is used of a key-value store of torch. What is asked for is waited for."""

    def set(self, key: str, value: bytes) -> None: ...
    def set_timeout(self, timeout: dt.timedelta) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def delete_key(self, key: str) -> bool: ...


def require() -> None:
    """Raises JobEngineError: there is no NIXL, or none that talks over UCX."""
    try:
        from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415 - the one asked for

        agent = nixl_agent("cxlfs", nixl_agent_config(backends=[]))
        if "UCX" not in agent.get_plugin_list():
            raise JobEngineError("this NIXL has no UCX")
    except (ImportError, RuntimeError) as error:
        raise JobEngineError(f"nixl: {error}", next_step="pip install 'cxlfs[nixl]'") from None


class NixlLink:
    """See ``interface.Link``. Raises JobLinkError."""

    is_stream = False

    def __init__(self, store: Store, own: int, other: int, name: str, seconds: float) -> None:
        import torch  # noqa: PLC0415 - memory that NIXL takes as it is
        from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415 - as above

        _forget_old()
        self._other = other
        self._store = store
        self._key = f"{name}/nixl/{own}"
        self._memory = torch.zeros(2 * SLOTS * SLOT_BYTES, dtype=torch.uint8)
        self._ring = memoryview(self._memory.numpy())
        self._out: collections.deque[tuple[int, memoryview]] = collections.deque()
        self._into: collections.deque[tuple[int, memoryview]] = collections.deque()
        self._flying: dict[int, object] = {}
        self._come: dict[int, int] = {}
        """Of pieces that have come: their sizes."""
        self._asked_out = self._asked_into = 0
        self._sent = self._taken = self._freed = 0
        self._is_ended = False
        try:
            self._agent = nixl_agent(self._key, nixl_agent_config(backends=["UCX"]))
            self._agent.register_memory(self._memory)
            here = _WHERE.pack(self._memory.data_ptr())
            store.set(self._key, here + self._agent.get_agent_metadata())
            store.set_timeout(dt.timedelta(seconds=seconds))
            (there,) = map(bytes, store.multi_get([f"{name}/nixl/{other}"]))
            (self._address,) = _WHERE.unpack_from(there)
            found = self._agent.add_remote_agent(there[_WHERE.size :])
            self._remote = found.decode() if isinstance(found, bytes) else str(found)
        except (RuntimeError, struct.error) as error:
            raise _lost(other, error) from None
        self._end = time.monotonic() + seconds

    def send(self, data: bytearray | memoryview) -> Pending:
        for piece in _pieces(memoryview(data)):
            self._out.append((self._asked_out, piece))
            self._asked_out += 1
        self._go_on()
        return _NixlPending(self, self._asked_out, is_sent=True)

    def receive(self, into: bytearray | memoryview) -> Pending:
        for piece in _pieces(memoryview(into)):
            self._into.append((self._asked_into, piece))
            self._asked_into += 1
        return _NixlPending(self, self._asked_into, is_sent=False)

    def close(self, *, is_done: bool) -> None:
        with contextlib.suppress(RuntimeError):
            if not is_done:
                self._note(_ENDED, 0, 0)
            self._store.delete_key(self._key)
        self._flying.clear()
        _lingering.append((time.monotonic(), self._agent, self._memory))
        del self._agent

    def wait_until(self, number: int, *, is_sent: bool) -> None:
        """So many pieces were sent, or have come."""
        pause = _POLL_SECONDS_MIN
        while True:
            before = self._sent, self._taken, len(self._flying)
            self._go_on()
            landed = min(self._flying, default=self._sent)
            if (landed if is_sent else self._taken) >= number:
                return
            if self._is_ended:
                raise JobLinkError(f"rank {self._other} gave up")
            if time.monotonic() >= self._end:
                raise JobLinkError(f"rank {self._other} was not heard in time")
            if before != (self._sent, self._taken, len(self._flying)):
                pause = _POLL_SECONDS_MIN
                continue
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS_MAX)

    # --- what can be done now ---------------------------------------------------------------

    def _go_on(self) -> None:
        try:
            for note in self._agent.get_new_notifs().get(self._remote, ()):
                self._hear(bytes(note))
            for number in [n for n, handle in self._flying.items() if self._has_landed(handle)]:
                del self._flying[number]
            while self._out and self._may_post(self._out[0][0]):
                self._post(*self._out.popleft())
            while self._into and self._into[0][0] in self._come:
                self._take(*self._into.popleft())
        except (RuntimeError, struct.error) as error:
            raise _lost(self._other, error) from None

    def _hear(self, note: bytes) -> None:
        kind, number, size = _NOTE.unpack(note)
        if kind == _PIECE:
            self._come[number] = size
        elif kind == _TAKEN:
            self._freed = max(self._freed, number)
        elif kind == _ENDED:
            self._is_ended = True

    def _may_post(self, number: int) -> bool:
        return number < self._freed + SLOTS and number - SLOTS not in self._flying

    def _post(self, number: int, piece: memoryview) -> None:
        slot = number % SLOTS * SLOT_BYTES
        own = (SLOTS * SLOT_BYTES) + slot
        self._ring[own : own + len(piece)] = piece
        agent, size = self._agent, len(piece)
        here = agent.get_xfer_descs([(self._memory.data_ptr() + own, size, 0)], "DRAM")
        there = agent.get_xfer_descs([(self._address + slot, size, 0)], "DRAM")
        note = _NOTE.pack(_PIECE, number, size)
        handle = agent.initialize_xfer("WRITE", here, there, self._remote, note)
        if agent.transfer(handle) == "ERR":
            raise JobLinkError(f"rank {self._other}: a write failed")
        self._flying[number] = handle
        self._sent += 1

    def _has_landed(self, handle: object) -> bool:
        state = self._agent.check_xfer_state(handle)
        if state == "ERR":
            raise JobLinkError(f"rank {self._other}: a write failed")
        return bool(state == "DONE")

    def _take(self, number: int, into: memoryview) -> None:
        if self._come.pop(number) != len(into):
            raise JobLinkError(f"rank {self._other}: a piece of another size than was expected")
        slot = number % SLOTS * SLOT_BYTES
        into[:] = self._ring[slot : slot + len(into)]
        self._taken += 1
        self._note(_TAKEN, self._taken, 0)

    def _note(self, kind: bytes, number: int, size: int) -> None:
        self._agent.send_notif(self._remote, _NOTE.pack(kind, number, size))


class _NixlPending:
    def __init__(self, link: NixlLink, number: int, *, is_sent: bool) -> None:
        self._link = link
        self._number = number
        self._is_sent = is_sent

    def wait(self) -> None:
        self._link.wait_until(self._number, is_sent=self._is_sent)


def _pieces(data: memoryview) -> list[memoryview]:
    flat = data.cast("B")
    return [flat[at : at + SLOT_BYTES] for at in range(0, len(flat), SLOT_BYTES)]


def _forget_old() -> None:
    now = time.monotonic()
    while _lingering and _lingering[0][0] + LINGER_SECONDS < now:
        with contextlib.suppress(IndexError):  # another link's thread was quicker
            _, agent, memory = _lingering.popleft()
            del agent  # before the memory that others may still write to
            del memory


def _lost(other: int, error: Exception) -> JobLinkError:
    return JobLinkError(f"rank {other}: {' '.join(str(error).split())}")
