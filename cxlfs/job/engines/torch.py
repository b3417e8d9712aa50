"""Over torch.distributed: the key-value store by which a process group came together, and gloo
for bytes.

A store and not a collective: who waits for a collective of which one rank is gone learns nothing of
the others, and a collective of a group that training uses may be overtaken by one of its own, which
is a deadlock. A connection of its own (``clone``) keeps waiting here from holding up training.

Each rank says a thing once, by one request; who listens to many asks for all of them by one.

A link is made of gloo groups of two ranks, which nothing else knows and which are gone with it: one
whose other end died, or was too slow, is never used again.

Invariants
- Keys of one start of the job are not those of another, where the store outlives a restart (as that
  of torchrun's agent does): they begin with TORCHELASTIC_RESTART_COUNT, where one agent has started
  all. Of several each counts for itself: one whose processes were well, and begin again because
  those of another node failed, counts none.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from cxlfs.errors import JobEngineError, JobLinkError
from cxlfs.job.engines.interface import Link, Pending, World

_INCARNATION_SECONDS = 300.0
LANES = 2
"""Connections of a link: each has a thread of its own."""
_SECONDS_MIN = 0.001
_GET_SECONDS = 60.0
"""For what is there already to be brought."""
_serials = itertools.count()

log = logging.getLogger(__name__)


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: bytes) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def set_timeout(self, timeout: dt.timedelta) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def delete_key(self, key: str) -> bool: ...
    def clone(self) -> Store: ...


class _Work(Protocol):
    def wait(self, timeout: dt.timedelta) -> bool: ...


class _Group(Protocol):
    """What is used of ``torch.distributed.ProcessGroupGloo``."""

    def send(self, tensors: list[object], rank: int, tag: int) -> _Work: ...
    def recv(self, tensors: list[object], rank: int, tag: int) -> _Work: ...


class StoreEngine:
    """Over any key-value store of torch that waits. ``start``: another one for each start of the
    job, where the store outlives that. Raises JobEngineError.
    """

    def __init__(self, store: Store, rank: int, size: int, start: str) -> None:
        self._store = store
        if rank == 0:
            self._set("incarnation/0", secrets.token_hex(8).encode())
        token = self.hear("incarnation", [0], _INCARNATION_SECONDS).get(0)
        if token is None:
            raise JobEngineError("rank 0 was not heard")
        self._world = World(rank, size, f"{start}.{token.decode()}")

    def world(self) -> World:
        return self._world

    def say(self, key: str, body: bytes, *, to_all: bool = True) -> None:
        del to_all  # who wants to know, asks
        self._set(f"{key}/{self._world.rank}", body)

    def hear(self, key: str, ranks: Sequence[int], seconds: float) -> dict[int, bytes]:
        try:
            return self._hear(key, list(ranks), seconds)
        except (RuntimeError, ConnectionError) as error:
            log.warning("%s: the key-value store of the job is gone: %s", key, error)
            return {}

    def link(self, other: int, name: str, seconds: float) -> Link:
        """Of a connection to the key-value store of its own: others may be waiting by this one."""
        store = self._store.clone()
        store.set_timeout(dt.timedelta(seconds=seconds))
        return TorchLink(store, self._world.rank, other, name, seconds)

    def forget(self, key: str) -> None:
        with contextlib.suppress(RuntimeError, ConnectionError):
            self._store.delete_key(f"{key}/{self._world.rank}")

    def _set(self, name: str, body: bytes) -> None:
        try:
            self._store.set(name, body)
        except (RuntimeError, ConnectionError) as error:
            log.warning("%s: the key-value store of the job is gone: %s", name, error)

    def _hear(self, key: str, ranks: list[int], seconds: float) -> dict[int, bytes]:
        if seconds > 0:
            self._store.set_timeout(dt.timedelta(seconds=max(seconds, _SECONDS_MIN)))
            with contextlib.suppress(RuntimeError):  # DistStoreError; and a store that is gone
                return self._get(key, ranks)
            self._store.set_timeout(dt.timedelta(seconds=_GET_SECONDS))
        return self._get(key, self._there(key, ranks))

    def _get(self, key: str, ranks: list[int]) -> dict[int, bytes]:
        bodies = self._store.multi_get([f"{key}/{rank}" for rank in ranks]) if ranks else []
        return dict(zip(ranks, map(bytes, bodies), strict=True))

    def _there(self, key: str, ranks: list[int]) -> list[int]:
        """Who has said it: halves are asked for as long as not all of them have."""
        if self._store.check([f"{key}/{rank}" for rank in ranks]):
            return ranks
        if len(ranks) == 1:
            return []
        half = len(ranks) // 2
        return self._there(key, ranks[:half]) + self._there(key, ranks[half:])


class TorchEngine(StoreEngine):
    """Of the default process group. Made on all ranks, in the same order where there are several.

    Raises JobEngineError.
    """

    def __init__(self) -> None:
        from torch import distributed  # noqa: PLC0415 - nothing else here imports a framework
        from torch.distributed import distributed_c10d  # noqa: PLC0415

        if not distributed.is_initialized():
            raise JobEngineError("there is no process group")
        store = distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way
        has_one_agent = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if has_one_agent else "0"
        prefix = f"cxlfs/{restart}/{next(_serials)}"
        own = cast("Store", distributed.PrefixStore(prefix, store.clone()))
        super().__init__(own, distributed.get_rank(), distributed.get_world_size(), restart)


class TorchLink:
    """See ``TorchEngine.link``. Raises JobLinkError."""

    def __init__(self, store: Store, own: int, other: int, name: str, seconds: float) -> None:
        import torch  # noqa: PLC0415
        from torch import distributed  # noqa: PLC0415

        self._torch = torch
        self._side = int(own > other)
        self._other = other
        self._taken = itertools.cycle(range(LANES))
        self._given = itertools.cycle(range(LANES))
        self._stores = [distributed.PrefixStore(f"{name}/{lane}", store) for lane in range(LANES)]
        end = time.monotonic() + seconds
        self._groups: list[_Group] = []
        try:
            for prefixed in self._stores:
                left = dt.timedelta(seconds=max(end - time.monotonic(), 0.001))
                self._groups.append(distributed.ProcessGroupGloo(prefixed, self._side, 2, left))
        except RuntimeError as error:
            raise _lost(other, error) from None
        self._end = time.monotonic() + seconds

    def send(self, data: bytearray | memoryview) -> Pending:
        group, tensor = self._groups[next(self._given)], self._tensor(data)
        return self._pending(lambda: group.send([tensor], 1 - self._side, 0))

    def receive(self, into: bytearray | memoryview) -> Pending:
        group, tensor = self._groups[next(self._taken)], self._tensor(into)
        return self._pending(lambda: group.recv([tensor], 1 - self._side, 0))

    def close(self, *, is_done: bool) -> None:
        """What was told to connect is forgotten, unless the other may have still to read it."""
        self._groups.clear()
        for prefixed in self._stores if is_done else []:
            with contextlib.suppress(RuntimeError):
                prefixed.delete_key(f"0/{self._side}")

    def _tensor(self, data: bytearray | memoryview) -> object:
        """The same bytes, as gloo takes them."""
        return self._torch.frombuffer(data, dtype=self._torch.uint8)

    def _pending(self, begin: Callable[[], _Work]) -> Pending:
        try:
            return _TorchPending(begin(), self._other, self._end)
        except RuntimeError as error:
            raise _lost(self._other, error) from None


class _TorchPending:
    def __init__(self, work: _Work, other: int, end: float) -> None:
        self._work = work
        self._other = other
        self._end = end

    def wait(self) -> None:
        left = max(self._end - time.monotonic(), 0.001)
        try:
            self._work.wait(dt.timedelta(seconds=left))
        except RuntimeError as error:
            raise _lost(self._other, error) from None


def _lost(rank: int, error: RuntimeError) -> JobLinkError:
    """Without the place in gloo's source and the advice that its messages begin and end with."""
    said = str(error).partition("] ")[2] or str(error)
    said = said.partition(". This is typically")[0]
    return JobLinkError(f"rank {rank}: {' '.join(said.split())}")
