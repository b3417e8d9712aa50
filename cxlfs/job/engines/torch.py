"""Over torch.distributed: the key-value store by which a process group came together.

A store and not a collective: who waits for a collective of which one rank is gone learns nothing of
the others, and a collective of a group that training uses may be overtaken by one of its own, which
is a deadlock. A connection of its own (``clone``) keeps waiting here from holding up training.

Invariants
- Keys of one start of the job are not those of another, where the store outlives a restart (as that
  of torchrun's agent does): they begin with TORCHELASTIC_RESTART_COUNT.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import os
import secrets
import time
from typing import Protocol, cast

from cxlfs.errors import JobEngineError
from cxlfs.job.engines.interface import World

_INCARNATION_SECONDS = 300.0
_serials = itertools.count()


class _Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: dt.timedelta) -> None: ...
    def delete_key(self, key: str) -> bool: ...


class TorchEngine:
    """Made on all ranks, in the same order where there are several. Raises JobEngineError."""

    def __init__(self) -> None:
        from torch import distributed  # noqa: PLC0415 - nothing else here imports a framework
        from torch.distributed import distributed_c10d  # noqa: PLC0415

        if not distributed.is_initialized():
            raise JobEngineError("there is no process group")
        store = distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"cxlfs/{restart}/{next(_serials)}"
        own = distributed.PrefixStore(prefix, store.clone())
        self._store = cast("_Store", own)
        rank, size = distributed.get_rank(), distributed.get_world_size()
        if rank == 0:
            self._store.set("incarnation", secrets.token_hex(8).encode())
        token = self._get("incarnation", time.monotonic() + _INCARNATION_SECONDS)
        if token is None:
            raise JobEngineError("rank 0 was not heard")
        self._world = World(rank, size, f"{restart}.{token.decode()}")

    def world(self) -> World:
        return self._world

    def gather(self, key: str, body: bytes, seconds: float) -> dict[int, bytes]:
        rank, end = self._world.rank, time.monotonic() + seconds
        self._store.set(f"{key}/{rank}", body)
        heard = {rank: body}
        for other in range(self._world.size):
            found = body if other == rank else self._get(f"{key}/{other}", end)
            if found is not None:
                heard[other] = found
        return heard

    def broadcast(self, key: str, body: bytes | None, seconds: float) -> bytes | None:
        if body is not None:
            self._store.set(f"{key}/0", body)
            return body
        return self._get(f"{key}/0", time.monotonic() + seconds)

    def forget(self, key: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(f"{key}/{self._world.rank}")

    def _get(self, key: str, end: float) -> bytes | None:
        """None: not there at that time. A deadline that has passed still takes what is there."""
        left = max(end - time.monotonic(), 0.001)
        try:
            self._store.wait([key], dt.timedelta(seconds=left))
            return bytes(self._store.get(key))
        except (RuntimeError, ConnectionError):  # DistStoreError, and a store that is gone
            return None
