"""Over torch.distributed: the key-value store by which a process group came together; and for bytes
connections whose ends meet there (``sockets``), or gloo where they do not reach each other so.

A store and not a collective: who waits for a collective of which one rank is gone learns nothing of
the others, and a collective of a group that training uses may be overtaken by one of its own, which
is a deadlock. A connection of its own (``clone``) keeps waiting here from holding up training.

Each rank says a thing once, by one request; who listens to many asks for all of them by one.

In a large job the leader of each group serves a store of its own, in which the group talks: no
server is asked by more clients than there are leaders, or ranks of a group. Where one of a group
does not reach it that group talks in the store of all.

CXLFS_LINKS has bytes go over gloo in any case, or over NIXL (``nixl``).

Invariants
- All ranks have the same kind of links, or none begins.
- All ranks of a group use the same store: its leader decides, when it has heard whether all reach
  its own.
- Keys of one start of the job are not those of another, also where the store outlives a restart (as
  that of torchrun's agents does): they begin with a word that rank 0 makes of what every rank of
  this start has said anew (``_lead``). What was said in a former start is never heard.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import itertools
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from cxlfs.errors import JobEngineError, JobLinkError
from cxlfs.job.engines import nixl
from cxlfs.job.engines.interface import Link, Pending, World, group_size_of
from cxlfs.job.engines.nixl import NixlLink
from cxlfs.job.engines.sockets import meet, own_address
from cxlfs.job.engines.ticking import TickingStore
from cxlfs.native.client import lent

_INCARNATION_SECONDS = 300.0
LINKS_VARIABLE = "CXLFS_LINKS"
LINKS = ("auto", "gloo", "nixl")
LANES = 2
"""Connections of a link: each has a thread of its own."""
_SECONDS_MIN = 0.001
_WORD_BYTES = 16
_TOKEN_DIGITS = 32
_CALL_SECONDS_MIN = 0.05
_CALL_SECONDS_MAX = 5.0
"""Until a rank looks whether rank 0 calls anew."""
_REACH_SECONDS = 20.0
"""Until a rank gives up to reach its leader's store."""
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
    job, for people. ``groups``: makes the stores of groups; without it all talk
    in ``store``. ``is_new``: nothing of another start was ever said in the store, so that rank 0
    waits for nobody. Raises JobEngineError.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        start: str,
        groups: Groups | None = None,
        *,
        is_new: bool = False,
    ) -> None:
        self._store = store
        self._near = store
        self._groups = groups
        self._world = World(rank, size, "")
        self._prefix = ""
        self._said: dict[str, list[Store]] = {}
        self._spare: list[Store] = []
        """Connections of links that have met."""
        self._links = _links_wanted()
        try:
            if is_new:
                told = _tell(store, rank, self._links)
            elif rank == 0:
                told = _lead(store, size, self._links)
            else:
                told = _follow(store, rank)
        except (RuntimeError, ConnectionError) as error:
            raise JobEngineError(f"the key-value store of the job is gone: {error}") from None
        token, _, links = told.partition(" ")
        if links != self._links:
            raise JobEngineError(
                f"rank 0 copies over {links}, this one, rank {rank}, over {self._links}",
                next_step=f"set {LINKS_VARIABLE} alike for all ranks",
            )
        incarnation = f"{start}.{token}"
        group_size = 0 if groups is None else groups.size
        self._world = World(rank, size, incarnation, group_size)
        self._prefix = f"{token}/"
        if groups is not None and groups.size:
            self._near = self._meet(groups) or store

    def world(self) -> World:
        return self._world

    def say(
        self, key: str, body: bytes, *, to: Sequence[int] | None = None, near: bool = False
    ) -> None:
        del to  # who wants to know, asks
        store = self._near if near else self._store
        self._said.setdefault(key, []).append(store)
        try:
            store.set(f"{self._prefix}{key}/{self._world.rank}", body)
        except (RuntimeError, ConnectionError) as error:
            log.warning("%s: a key-value store of the job is gone: %s", key, error)

    def hear(
        self, key: str, ranks: Sequence[int], seconds: float, *, near: bool = False
    ) -> dict[int, bytes]:
        try:
            name = f"{self._prefix}{key}"
            return _hear(self._near if near else self._store, name, list(ranks), seconds)
        except (RuntimeError, ConnectionError) as error:
            log.warning("%s: a key-value store of the job is gone: %s", key, error)
            return {}

    def link(self, other: int, name: str, seconds: float) -> Link:
        """Of a connection to the key-value store of its own: others may be waiting by this one. It
        is used again for the next link, when both have met.
        """
        own, end = self._world.rank, time.monotonic() + seconds
        name = f"{self._prefix}{name}"
        store = self._taken()
        if self._links == "auto":
            meeting, host = TickingStore(store, seconds), _host_of(store)
            try:
                link = meet(meeting, host, int(own > other), other, name, seconds)
            except RuntimeError as error:
                raise _lost(other, error) from None
            if link is not None:
                self._spare.append(store)
                return link
        store.set_timeout(dt.timedelta(seconds=seconds))
        if self._links == "nixl":
            return NixlLink(store, own, other, name, seconds)
        if self._links == "auto":
            log.info("rank %d: reached over gloo alone, which is slower", other)
        return TorchLink(store, own, other, name, max(end - time.monotonic(), _SECONDS_MIN))

    def _taken(self) -> Store:
        """A connection that no other thread uses."""
        with contextlib.suppress(IndexError):
            return self._spare.pop()
        return self._store.clone()

    def forget(self, key: str) -> None:
        for store in self._said.pop(key, []):
            with contextlib.suppress(RuntimeError, ConnectionError):
                store.delete_key(f"{self._prefix}{key}/{self._world.rank}")

    def _meet(self, groups: Groups) -> Store | None:
        """The store of this rank's group; None: not all of it reach that of its leader."""
        rank, size = self._world.rank, self._world.size
        leader = rank - rank % groups.size
        if rank == leader:
            self.say("group/store", groups.serve())
        where = self.hear("group/store", [leader], _INCARNATION_SECONDS).get(leader, b"")
        near = groups.reach(where)
        self.say("group/reached", b"" if near is None else b"1")
        if rank == leader:
            group = range(leader, min(leader + groups.size, size))
            heard = self.hear("group/reached", group, _INCARNATION_SECONDS)
            is_reached = len(heard) == len(group) and all(heard.values())
            if not is_reached:
                lost = [other for other in group if not heard.get(other)]
                log.warning("the store of this group is not reached by ranks %s", lost)
            self.say("group/used", b"1" if is_reached else b"")
        used = self.hear("group/used", [leader], _INCARNATION_SECONDS).get(leader)
        if used is None:
            raise JobEngineError(f"rank {leader} was not heard")
        return near if used else None


# --- coming together ----------------------------------------------------------------------------
#
#   rank 0     call: a word, new in this start ─►
#   others     ◄─ answer/WORD/RANK: a word of their own, new in this start
#   rank 0     start/WORD/RANK/OWN WORD: the word of this start, made of all ─►
#
# What rank 0 hears answers its new word, and what others hear is kept under theirs: nothing of a
# former start is taken for either. Who has heard the call of a former start answers again, as soon
# as there is another one.


def _lead(store: Store, size: int, links: str) -> str:
    """The word of this start, and the kind of links. Raises JobEngineError, RuntimeError."""
    call = secrets.token_hex(_WORD_BYTES)
    store.set("call", call.encode())
    others = list(range(1, size))
    heard = _hear(store, f"answer/{call}", others, _INCARNATION_SECONDS)
    if len(heard) < len(others):
        missing = ", ".join(str(rank) for rank in others if rank not in heard)
        raise JobEngineError(f"not heard: rank {missing}")
    words = [call, *(heard[rank].decode("ascii", "replace") for rank in others)]
    told = f"{hashlib.sha256(' '.join(words).encode()).hexdigest()[:_TOKEN_DIGITS]} {links}"
    for rank in others:
        store.set(f"start/{call}/{rank}/{words[rank]}", told.encode())
        store.delete_key(f"answer/{call}/{rank}")
    return told


def _follow(store: Store, rank: int) -> str:
    """As ``_lead``, of another rank."""
    own, call = secrets.token_hex(_WORD_BYTES), ""
    end, pause = time.monotonic() + _INCARNATION_SECONDS, _CALL_SECONDS_MIN
    while (left := end - time.monotonic()) > 0:
        latest = _waited(store, "call", left if not call else 0.0)
        if latest and latest != call:
            call, pause = latest, _CALL_SECONDS_MIN
            store.set(f"answer/{call}/{rank}", own.encode())
        said = f"start/{call}/{rank}/{own}"
        if call and (told := _waited(store, said, min(pause, left))):
            store.delete_key(said)
            return told
        pause = min(2 * pause, _CALL_SECONDS_MAX)
    raise JobEngineError("rank 0 was not heard")


def _tell(store: Store, rank: int, links: str) -> str:
    """As ``_lead`` and ``_follow``, in a store of this start alone."""
    if rank == 0:
        store.set("start", f"{secrets.token_hex(_WORD_BYTES)} {links}".encode())
    told = _waited(store, "start", _INCARNATION_SECONDS)
    if not told:
        raise JobEngineError("rank 0 was not heard")
    return told


def _waited(store: Store, key: str, seconds: float) -> str:
    """What is said there, or will be within that time; empty: nothing. Raises RuntimeError."""
    found = _hear_one(store, key, seconds)
    return found.decode("ascii", "replace")


def _hear_one(store: Store, key: str, seconds: float) -> bytes:
    if seconds > 0:
        store.set_timeout(dt.timedelta(seconds=max(seconds, _SECONDS_MIN)))
        with contextlib.suppress(RuntimeError):  # not yet; or gone, as the next request tells
            return bytes(store.multi_get([key])[0])
    store.set_timeout(dt.timedelta(seconds=_GET_SECONDS))
    return bytes(store.multi_get([key])[0]) if store.check([key]) else b""


def _links_wanted() -> str:
    """Raises JobEngineError."""
    wanted = os.environ.get(LINKS_VARIABLE) or LINKS[0]
    if wanted not in LINKS:
        raise JobEngineError(
            f"{LINKS_VARIABLE} is {wanted}", next_step=f"set it to one of {', '.join(LINKS)}"
        )
    if wanted == "nixl":
        nixl.require()
    return wanted


class Groups:
    """The stores of groups of ``size`` ranks (0: there are none). ``host``: of the store of all."""

    def __init__(self, host: str, size: int) -> None:
        self._host = host
        self.size = size
        self._server: Store | None = None

    def serve(self) -> bytes:
        """One of this process, on any port, and how it is reached; nothing: there is none."""
        from torch import distributed  # noqa: PLC0415

        try:
            host = own_address((self._host, socket.gethostname(), self._host))
            server = distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        except (OSError, RuntimeError) as error:
            log.warning("no store for this group: %s", error)
            return b""
        self._server = cast("Store", server)
        token = secrets.token_hex(8)
        server.set("token", token)
        return f"{host} {server.port} {token}".encode()

    def reach(self, where: bytes) -> Store | None:
        """None: it is not reached, or another one lies there."""
        from torch import distributed  # noqa: PLC0415

        if not where:
            return None
        host, port, token = where.decode().split()
        seconds = dt.timedelta(seconds=_REACH_SECONDS)
        try:
            store = distributed.TCPStore(host, int(port), is_master=False, timeout=seconds)
            is_it = store.get("token") == token.encode()
        except RuntimeError as error:
            log.warning("the store of this group, %s port %s: %s", host, port, error)
            return None
        return cast("Store", store) if is_it else None


def _hear(store: Store, key: str, ranks: list[int], seconds: float) -> dict[int, bytes]:
    if seconds > 0:
        store.set_timeout(dt.timedelta(seconds=max(seconds, _SECONDS_MIN)))
        with contextlib.suppress(RuntimeError):  # DistStoreError; and a store that is gone
            return _get(store, key, ranks)
        store.set_timeout(dt.timedelta(seconds=_GET_SECONDS))
    return _get(store, key, _there(store, key, ranks))


def _get(store: Store, key: str, ranks: list[int]) -> dict[int, bytes]:
    bodies = store.multi_get([f"{key}/{rank}" for rank in ranks]) if ranks else []
    return dict(zip(ranks, map(bytes, bodies), strict=True))


def _there(store: Store, key: str, ranks: list[int]) -> list[int]:
    """Who has said it: halves are asked for as long as not all of them have."""
    if store.check([f"{key}/{rank}" for rank in ranks]):
        return ranks
    if len(ranks) == 1:
        return []
    half = len(ranks) // 2
    return _there(store, key, ranks[:half]) + _there(store, key, ranks[half:])


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
        rank, size = distributed.get_rank(), distributed.get_world_size()
        groups = Groups(_host_of(store), group_size_of(size))
        super().__init__(own, rank, size, restart, groups)


def _host_of(store: object) -> str:
    """Where it is served; this machine, where it is another kind of store."""
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    return str(getattr(store, "host", "localhost"))


class TorchLink:
    """Over gloo groups of two ranks, which nothing else knows and which are gone with it: one whose
    other end died, or was too slow, is never used again. Raises JobLinkError.
    """

    is_stream = False

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
        if isinstance(data, memoryview) and data.readonly:
            data = lent(data)
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
