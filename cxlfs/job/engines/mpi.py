"""Over MPI, through mpi4py: messages from rank to rank, in a communicator of their own.

Point to point and never collective: who waits in a collective for a rank that is stopped waits for
ever. What has come is taken when somebody listens, and kept by its key until it is asked for.

A rank that dies takes the job with it, as mpirun ends all processes then; one that is stopped, or
too slow, is not heard.

Invariants
- Nothing waits without a deadline. A request of a link whose time has passed is cancelled, and the
  memory that it was given is not touched afterwards.
- What is told goes to those alone who have to hear it, so that a poll of n ranks is n messages and
  as many tallies, and not n * n; in a large job none sends, or receives, more than a few hundred.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast

from cxlfs.errors import JobEngineError, JobLinkError
from cxlfs.job.engines.interface import Link, Pending, World, group_size_of

_INCARNATION_SECONDS = 300.0
_TAG = 0
_LINK_TAGS = 1 << 14
"""MPI promises tags up to 32767."""
_POLL_SECONDS_MIN = 20e-6
_POLL_SECONDS_MAX = 1e-3
_serials = itertools.count()


class _Request(Protocol):
    def Test(self) -> bool: ...  # noqa: N802 - the names are those of mpi4py
    def Cancel(self) -> None: ...  # noqa: N802
    def Wait(self) -> bool: ...  # noqa: N802


class _Status(Protocol):
    def Get_source(self) -> int: ...  # noqa: N802
    def Get_count(self) -> int: ...  # noqa: N802


class _Message(Protocol):
    def Recv(self, buffer: bytearray) -> None: ...  # noqa: N802


class _Communicator(Protocol):
    """What is used of ``mpi4py.MPI.Comm``."""

    def Get_rank(self) -> int: ...  # noqa: N802
    def Get_size(self) -> int: ...  # noqa: N802
    def Isend(self, data: object, dest: int, tag: int) -> _Request: ...  # noqa: N802
    def Irecv(self, data: object, source: int, tag: int) -> _Request: ...  # noqa: N802
    def Improbe(self, source: int, tag: int, status: _Status) -> _Message | None: ...  # noqa: N802


class MpiEngine:
    """Of all processes that mpirun started. Made on all of them, in the same order where there are
    several. Raises JobEngineError.
    """

    def __init__(self) -> None:
        try:
            from mpi4py import MPI  # noqa: PLC0415 - nothing else here imports it
        except (ImportError, RuntimeError) as error:  # and where there is no library of MPI
            raise JobEngineError(
                f"mpi4py: {error}", next_step="pip install 'cxlfs[mpi]', and start with mpirun"
            ) from None
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise JobEngineError(
                "this MPI serves one thread alone, and checkpoints are made beside training",
                next_step="start it with MPI_THREAD_MULTIPLE (mpi4py asks for that by itself)",
            )
        self._any = MPI.ANY_SOURCE
        self._status = MPI.Status
        self._messages = cast("_Communicator", MPI.COMM_WORLD.Dup())
        self._bytes = cast("_Communicator", MPI.COMM_WORLD.Dup())
        self._lock = threading.Lock()
        self._come: dict[str, dict[int, bytes]] = {}
        self._sent: list[tuple[_Request, bytes]] = []
        self._tags: dict[int, Iterator[int]] = {}
        """Of links to each rank."""
        rank, size = self._messages.Get_rank(), self._messages.Get_size()
        self._world = World(rank, size, "")
        if rank == 0:
            self.say("incarnation", secrets.token_hex(8).encode())
        token = self.hear("incarnation", [0], _INCARNATION_SECONDS).get(0)
        if token is None:
            raise JobEngineError("rank 0 was not heard")
        incarnation = f"{next(_serials)}.{token.decode()}"
        self._world = World(rank, size, incarnation, group_size_of(size))

    def world(self) -> World:
        return self._world

    def say(
        self, key: str, body: bytes, *, to: Sequence[int] | None = None, near: bool = False
    ) -> None:
        del near  # each message goes its own way
        own = self._world.rank
        others = range(self._world.size) if to is None else to
        with self._lock:
            self._come.setdefault(key, {})[own] = body
            for rank in others:
                if rank != own:
                    self._send(key, body, rank)

    def hear(
        self, key: str, ranks: Sequence[int], seconds: float, *, near: bool = False
    ) -> dict[int, bytes]:
        del near

        def found() -> bool:
            return self._come.get(key, {}).keys() >= set(ranks)

        self._wait(found, seconds)
        with self._lock:
            come = self._come.pop(key, {})
        return {rank: come[rank] for rank in ranks if rank in come}

    def forget(self, key: str) -> None:
        with self._lock:
            self._come.pop(key, None)

    def link(self, other: int, name: str, seconds: float) -> Link:
        """The lower of the two ranks says its tag."""
        with self._lock:
            own = next(self._tags.setdefault(other, itertools.cycle(range(1, _LINK_TAGS))))
            self._send(f"link/{name}", b"%d" % own, other)
        said = self.hear(f"link/{name}", [other], seconds).get(other)
        if said is None:
            raise JobLinkError(f"rank {other} was not heard within {seconds:g} s")
        if not (said.isdigit() and 0 < int(said) < _LINK_TAGS):
            raise JobLinkError(f"rank {other} said no tag")
        tag = own if self._world.rank < other else int(said)
        return MpiLink(self, self._bytes, other, name, seconds=seconds, tag=tag)

    # --- for links --------------------------------------------------------------------------

    def end_link(self, name: str, other: int) -> None:
        with self._lock:
            self._send(f"ended/{name}", b"", other)

    def is_ended(self, name: str, other: int) -> bool:
        """By the other rank."""
        with self._lock:
            self._take()
            return other in self._come.get(f"ended/{name}", {})

    # --- with the lock ----------------------------------------------------------------------

    def _send(self, key: str, body: bytes, rank: int) -> None:
        data = key.encode() + b"\0" + body
        self._sent = [(request, kept) for request, kept in self._sent if not request.Test()]
        self._sent.append((self._messages.Isend(data, rank, _TAG), data))

    def _take(self) -> None:
        """All that has come."""
        status = self._status()
        while (message := self._messages.Improbe(self._any, _TAG, status)) is not None:
            data = bytearray(status.Get_count())
            message.Recv(data)
            key, _, body = bytes(data).partition(b"\0")
            with contextlib.suppress(UnicodeDecodeError):
                self._come.setdefault(key.decode(), {})[status.Get_source()] = body

    def _wait(self, found: Callable[[], bool], seconds: float) -> None:
        end, pause = time.monotonic() + seconds, _POLL_SECONDS_MIN
        while True:
            with self._lock:
                self._take()
                if found():
                    return
            if time.monotonic() >= end:
                return
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS_MAX)


class MpiLink:
    """See ``MpiEngine.link``. No two links of a pair of ranks have one tag at once."""

    is_stream = False

    def __init__(
        self,
        engine: MpiEngine,
        bytes_: _Communicator,
        other: int,
        name: str,
        *,
        seconds: float,
        tag: int,
    ) -> None:
        self._engine = engine
        self._bytes = bytes_
        self._other = other
        self._name = name
        self._tag = tag
        self._end = time.monotonic() + seconds

    def send(self, data: bytearray | memoryview) -> Pending:
        return self._pending(self._bytes.Isend(data, self._other, self._tag))

    def receive(self, into: bytearray | memoryview) -> Pending:
        return self._pending(self._bytes.Irecv(into, self._other, self._tag))

    def close(self, *, is_done: bool) -> None:
        if not is_done:
            self._engine.end_link(self._name, self._other)

    def _pending(self, request: _Request) -> Pending:
        return _MpiPending(self._engine, request, self._other, self._name, self._end)


class _MpiPending:
    def __init__(
        self, engine: MpiEngine, request: _Request, other: int, name: str, end: float
    ) -> None:
        self._engine = engine
        self._request = request
        self._other = other
        self._name = name
        self._end = end

    def wait(self) -> None:
        pause = _POLL_SECONDS_MIN
        while not self._request.Test():
            is_ended = self._engine.is_ended(self._name, self._other)
            if is_ended and self._request.Test():  # it came before the other gave up
                return
            if is_ended or time.monotonic() >= self._end:
                self._request.Cancel()
                why = "gave up" if is_ended else "was not heard in time"
                raise JobLinkError(f"rank {self._other} {why}")
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS_MAX)
