"""Agents that come and go: who belongs together is an *epoch* in a key-value store of torch, which
the agent of rank 0 holds (or torchrun's own agent, where that started them).

Who arrives, or has lost the others, begins a new epoch. The others see it wherever they wait, and
come as well; the group is together when all have arrived in the newest one.

Never: what agents say to each other; a port or a protocol of its own.

Invariants
- What was said in one epoch is never heard in another.
- Every wait ends: together, by its deadline, or because the epoch is over.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from cxlfs.errors import JobEngineError, UndecidedError
from cxlfs.job.engines.interface import Engine, Link, World
from cxlfs.job.engines.local import LocalEngine
from cxlfs.job.engines.torch import Store, StoreEngine

TICK_SECONDS = 1.0
"""How long a wait may not see that the epoch is over."""
_EPOCH = "epoch"
_PREFIX = "cxlfs-agent"
_REQUEST_SECONDS = 60.0
_TORCHRUN_HOLDS_STORE = "TORCHELASTIC_USE_AGENT_STORE"


class Meeting(Protocol):
    """Where the agents of a job's nodes come together."""

    def join(self, seconds: float) -> Engine:
        """The group, when all are there. Its calls raise UndecidedError when it is one no more.

        Raises UndecidedError (who was not there in time), JobEngineError.
        """
        ...


class Alone:
    """A job of one node."""

    def join(self, seconds: float) -> Engine:
        del seconds
        return LocalEngine()


class _Shared(Store, Protocol):
    """What is used of ``torch.distributed.TCPStore`` beside."""

    def add(self, key: str, amount: int) -> int: ...
    def wait(self, keys: list[str], timeout: dt.timedelta) -> None: ...


class TorchMeeting:
    """At the address of rank 0's node. Of ``size`` agents this is the one of ``rank``.

    Raises JobEngineError.
    """

    def __init__(self, host: str, port: int, rank: int, size: int) -> None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # a stack for each try to connect
        try:
            from torch import distributed  # noqa: PLC0415 - asked for by several nodes alone
        except ImportError:
            raise JobEngineError(
                "agents of several nodes reach each other through torch, which is not installed",
                next_step="pip install 'cxlfs[torch]'",
            ) from None
        self._distributed = distributed
        self._address = f"{host}:{port}"
        self._host, self._port = host, port
        self._rank, self._size = rank, size
        self._holds_store = rank == 0 and os.environ.get(_TORCHRUN_HOLDS_STORE) != "True"
        self._store: _Shared | None = self._held() if self._holds_store else None

    def join(self, seconds: float) -> Engine:
        end = time.monotonic() + seconds
        try:
            store = self._reached(end)
            epoch = store.add(_EPOCH, 1)
            while True:
                engine = self._arrive(store, epoch)
                newest = self._together(store, epoch, end)
                if newest == epoch:
                    own = self._engine(store, epoch) if engine is None else engine
                    return Group(own, functools.partial(_require_newest, store, epoch))
                epoch = newest
        except (RuntimeError, ConnectionError) as error:
            raise self._lost(error) from None

    # --- the store --------------------------------------------------------------------------

    def _held(self) -> _Shared:
        try:
            return self._opened(is_master=True, seconds=_REQUEST_SECONDS)
        except RuntimeError as error:
            raise JobEngineError(
                f"{self._address} cannot be listened on: {_first_line(error)}",
                next_step="name an address of this node, and a port that is free",
            ) from None

    def _opened(self, *, is_master: bool, seconds: float) -> _Shared:
        store = self._distributed.TCPStore(
            self._host,
            self._port,
            None,
            is_master,
            timeout=dt.timedelta(seconds=seconds),
            wait_for_workers=False,
        )
        return cast("_Shared", self._distributed.PrefixStore(_PREFIX, store))

    def _reached(self, end: float) -> _Shared:
        """Rank 0's may have ended, and begun again, since it was reached."""
        if self._holds_store and self._store is not None:
            return self._store
        while True:
            left = end - time.monotonic()
            try:
                return self._opened(is_master=False, seconds=min(max(left, 0.1), TICK_SECONDS))
            except RuntimeError as error:
                if left <= 0:
                    raise self._lost(error) from None

    def _lost(self, error: Exception) -> UndecidedError:
        return UndecidedError(
            f"rank 0 at {self._address}: {_first_line(error)}",
            next_step="start cxlfs agent on node 0, or look at the network",
        )

    # --- epochs -----------------------------------------------------------------------------

    def _engine(self, store: _Shared, epoch: int) -> StoreEngine:
        """Of an epoch, in which nothing was said before."""
        own = cast("Store", self._distributed.PrefixStore(str(epoch), store.clone()))
        return StoreEngine(own, self._rank, self._size, str(epoch), is_new=True)

    def _arrive(self, store: _Shared, epoch: int) -> Engine | None:
        """Rank 0 has said all that the others ask for at once before it is there."""
        engine = self._engine(store, epoch) if self._rank == 0 else None
        store.set(self._here(epoch, self._rank), b"")
        return engine

    @staticmethod
    def _here(epoch: int, rank: int) -> str:
        return f"{epoch}/here/{rank}"

    def _together(self, store: _Shared, epoch: int, end: float) -> int:
        """The newest epoch: this one, with all in it, or another. Raises UndecidedError."""
        names = [self._here(epoch, rank) for rank in range(self._size)]
        while True:
            with contextlib.suppress(RuntimeError):  # not yet; or gone, as the next request tells
                store.wait(names, dt.timedelta(seconds=TICK_SECONDS))
            newest = store.add(_EPOCH, 0)
            if newest != epoch or store.check(names):
                return newest
            if time.monotonic() >= end:
                missing = [rank for rank, name in enumerate(names) if not store.check([name])]
                raise unheard(missing)


class Group:
    """An engine of one epoch: who waits in it when it is over is told so. ``check`` is asked each
    ``tick_seconds``, and raises UndecidedError then.
    """

    def __init__(
        self, engine: Engine, check: Callable[[], None], tick_seconds: float = TICK_SECONDS
    ) -> None:
        self._engine = engine
        self._check = check
        self._tick_seconds = tick_seconds

    def world(self) -> World:
        return self._engine.world()

    def say(
        self, key: str, body: bytes, *, to: Sequence[int] | None = None, near: bool = False
    ) -> None:
        self._engine.say(key, body, to=to, near=near)

    def hear(
        self, key: str, ranks: Sequence[int], seconds: float, *, near: bool = False
    ) -> dict[int, bytes]:
        """Raises UndecidedError."""
        end = time.monotonic() + seconds
        while True:
            left = max(end - time.monotonic(), 0.0)
            heard = self._engine.hear(key, ranks, min(left, self._tick_seconds), near=near)
            if len(heard) == len(ranks):
                return heard
            self._check()
            if left <= self._tick_seconds:
                return heard

    def link(self, other: int, name: str, seconds: float) -> Link:
        return self._engine.link(other, name, seconds)

    def forget(self, key: str) -> None:
        self._engine.forget(key)


def _require_newest(store: _Shared, epoch: int) -> None:
    """Raises UndecidedError."""
    try:
        newest = store.add(_EPOCH, 0)
    except (RuntimeError, ConnectionError) as error:
        raise UndecidedError(
            f"rank 0 was lost: {_first_line(error)}",
            next_step="start cxlfs agent on node 0, if it does not come back by itself",
        ) from None
    if newest != epoch:
        raise came_anew()


def came_anew() -> UndecidedError:
    """The epoch is over."""
    return UndecidedError("an agent came anew", next_step="none: the agents come together again")


def unheard(ranks: Sequence[int]) -> UndecidedError:
    nodes = ", ".join(map(str, ranks))
    return UndecidedError(
        f"not heard: rank {nodes}", next_step=f"start cxlfs agent on node {nodes}, if it is gone"
    )


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split("\n", 1)[0].split())[:200]
