"""What a commit of a whole job takes beside saving: real ranks over the key-value store of torch,
and the protocol alone for more ranks than a machine can run.

Ranks are forked from one process that has imported torch, and meet before each commit. What lies
beyond saving is all of a commit, from the first rank's call to the last one's return, without the
longest save of one rank (its files and its manifest, up to its vote). What is older is removed
behind that, beside training; they meet again when that is done, and how long it took is told apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cxlfs.errors import CxlfsError
from cxlfs.job import Checkpointer, Committed
from cxlfs.job.driver import name_of, tellings
from cxlfs.job.engines import group_size_of
from cxlfs.job.engines.torch import StoreEngine
from cxlfs.job.protocol import (
    Attempt,
    Done,
    Gather,
    Heard,
    Part,
    Place,
    Saving,
    Tally,
    Tell,
    WriteManifest,
    decode,
    encode,
)

SECONDS = 20.0
SHARD_BYTES = 4096
HOPS = 5
"""Messages one behind the other: PREPARE, vote, tally, record, tally; twice with groups."""
RANKS_PER_NODE = 8


@dataclasses.dataclass(frozen=True)
class Commits:
    """Milliseconds, of each commit but the first."""

    ranks: int
    nodes: int
    total: list[float]
    own_save: list[float]
    beyond: list[float]
    removing: list[float]


class _Timed(Checkpointer):
    """Notes when saving begins, and when the vote is there."""

    saving: list[float]

    def _save(self, action: Any, save: Any) -> Any:
        begin = time.monotonic()
        found = super()._save(action, save)
        self.saving += [begin, time.monotonic()] if not self.saving else [time.monotonic()]
        if isinstance(action, WriteManifest):
            self.voted = time.monotonic()
        return found


def fork(ranks: int, task: Callable[[int], None]) -> None:
    """Raises CxlfsError: one of them failed."""
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                task(rank)
                status = 0
            except BaseException:  # noqa: BLE001 - it ends here
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        pids.append(pid)
    failed = [pid for pid in pids if os.waitpid(pid, 0)[1]]
    if failed:
        raise CxlfsError("a rank failed")


@contextlib.contextmanager
def key_value_store() -> Iterator[int]:
    """The port of one on loopback. It has a process of its own: its threads do not survive a fork,
    and what they had locked stays so.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        from torch import distributed

        os.close(reader)
        server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, b"%d\n" % server.port)
        signal.pause()
    os.close(writer)
    try:
        with os.fdopen(reader) as stream:
            yield int(stream.readline())
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def measure_commits(
    roots: Sequence[Path], ranks: int, ranks_per_node: int, commits: int
) -> Commits:
    """In directories below ``roots``, one for each node, in turn. Raises CxlfsError."""
    from torch import distributed

    def meet(store: Any, name: str, rank: int) -> None:
        store.set(f"{name}/{rank}", b"")
        store.wait([f"{name}/{other}" for other in range(ranks)], dt.timedelta(seconds=SECONDS))

    def work(rank: int) -> None:
        store = distributed.TCPStore("127.0.0.1", port, is_master=False)
        own = distributed.PrefixStore("job", store.clone())
        node = rank // ranks_per_node
        made = _Timed(
            roots[node % len(roots)] / f"node{node}",
            engine=StoreEngine(own, rank, ranks, "0"),
            deadline_seconds=SECONDS,
            allow_volatile=True,
        )
        made.restore_from_checkpoint(lambda _path: None)
        rows = []
        for step in range(commits + 1):
            made.saving = []
            meet(store, f"commit{step}", rank)
            begin = time.monotonic()
            outcome = made.distributed_checkpoint(step, _save)
            end = time.monotonic()
            if not isinstance(outcome, Committed) or not outcome.is_cleaned:
                raise CxlfsError(f"rank {rank}: {outcome}")
            made.wait()
            rows.append([begin, made.voted - made.saving[0], end, time.monotonic()])
        (roots[0] / f"times-{rank}.json").write_text(json.dumps(rows))

    with key_value_store() as port:
        fork(ranks, work)
    rows = [json.loads((roots[0] / f"times-{rank}.json").read_text()) for rank in range(ranks)]
    total, own, removing = [], [], []
    for one in list(zip(*rows, strict=True))[1:]:
        begins, saves, ends, removed = zip(*one, strict=True)
        total.append(1000 * (max(ends) - min(begins)))
        own.append(1000 * max(saves))
        removing.append(1000 * (max(removed) - max(ends)))
    beyond = [all_of_it - save for all_of_it, save in zip(total, own, strict=True)]
    return Commits(ranks, -(-ranks // ranks_per_node), total, own, beyond, removing)


def _save(directory: Path) -> None:
    (directory / "shard.bin").write_bytes(bytes(SHARD_BYTES))


# --- the protocol alone -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Network:
    """What messages take. ``requests_per_second``: of the key-value store, to all its clients;
    ``hop_seconds``: to it and back; ``bytes_per_second``: of its link.
    """

    requests_per_second: float
    hop_seconds: float = 100e-6
    bytes_per_second: float = 1e9


def requests_per_second(clients: int = 8, requests: int = 3000) -> float:
    """Of a key-value store on this machine, asked by so many processes at once for what is there:
    the rate that it has while all its clients share these processors with it.
    """
    from torch import distributed

    def ask(rank: int) -> None:
        store = distributed.TCPStore("127.0.0.1", port, is_master=False)
        store.set(f"{rank}", bytes(200))
        for _ in range(requests):
            store.multi_get([f"{rank}"])

    with key_value_store() as port:
        begin = time.monotonic()
        fork(clients, ask)
        return 2 * clients * requests / (time.monotonic() - begin)


@dataclasses.dataclass
class Server:
    """A key-value store, and what it is asked."""

    said: dict[str, bytes] = dataclasses.field(default_factory=dict)
    requests: int = 0
    sent_bytes: int = 0

    def say(self, name: str, data: bytes) -> None:
        """And delete it, four calls later."""
        self.said[name] = data
        self.requests += 2
        self.sent_bytes += len(data)

    def hear(self, names: list[str]) -> list[bytes] | None:
        """None: not all of them have been said. One request waits, another one gets them."""
        if any(name not in self.said for name in names):
            return None
        found = [self.said[name] for name in names]
        self.requests += 2
        self.sent_bytes += sum(map(len, found))
        return found


class Simulation:
    """One commit of all ranks in this process, without files, over the servers that the engine of
    torch has: ``servers[0]`` is that of all, the others those of groups. ``seconds[i]``: what rank
    i computed.
    """

    def __init__(self, ranks: int, group_size: int) -> None:
        attempt = Attempt(1000, 100_000, "0123456789abcdef")
        recorders = frozenset(range(0, ranks, RANKS_PER_NODE))
        self.places = [Place(rank, ranks, "0.ab", 7, group_size) for rank in range(ranks)]
        self._machines = [Saving(place, attempt, recorders=recorders) for place in self.places]
        self._told: list[Gather | None] = [None] * ranks
        groups = -(-ranks // group_size) if group_size else 0
        self.servers = [Server() for _ in range(1 + groups)]
        self.seconds = [0.0] * ranks

    def run(self) -> None:
        """Raises CxlfsError: not all have committed the same."""
        for machine in self._machines:
            machine.start()
        waiting = list(self.places)
        while waiting:
            before = sum(len(server.said) for server in self.servers)
            waiting = [place for place in waiting if not self._advance(place)]
            if waiting and sum(len(server.said) for server in self.servers) == before:
                raise CxlfsError(f"{len(waiting)} ranks wait for nothing")
        outcomes = {machine.outcome for machine in self._machines}
        (outcome,) = outcomes
        if not isinstance(outcome, Committed) or not outcome.is_cleaned:
            raise CxlfsError(f"{outcome}")

    def _server(self, place: Place, *, near: bool) -> Server:
        return self.servers[
            1 + place.leader // place.group_size if near and place.group_size else 0
        ]

    def _advance(self, place: Place) -> bool:
        """As far as it goes; True: to its end."""
        machine = self._machines[place.rank]
        begin = time.perf_counter()
        while (action := machine.action) is not None:
            if isinstance(action, Gather):
                if not self._gather(place, action):
                    break
            elif isinstance(action, Tell):
                data, name = encode(action.body), name_of(action.key, type(action.body))
                for _, near in tellings(place, action):
                    self._server(place, near=near).say(f"{name}/{place.rank}", data)
                machine.on(Done(action))
            else:
                value = f"{place.rank:064x}" if isinstance(action, WriteManifest) else None
                machine.on(Done(action, value))
        self.seconds[place.rank] += time.perf_counter() - begin
        return machine.action is None

    def _gather(self, place: Place, action: Gather) -> bool:
        """As the driver does where nothing fails."""
        name = name_of(action.key)
        if action.body is not None and self._told[place.rank] is not action:
            self._told[place.rank] = action
            near = action.to is not None
            self._server(place, near=near).say(f"{name}/{place.rank}", encode(action.body))
        if action.above is not None:
            name, ranks = name_of(action.key, Tally), [action.above]
        else:
            name, ranks = name_of(action.key, Part) if action.of_leaders else name, [*action.wanted]
        near = not action.of_leaders and place.is_near(ranks)
        found = self._server(place, near=near).hear([f"{name}/{rank}" for rank in ranks])
        for rank, data in zip(ranks, found or (), strict=found is not None):
            self._machines[place.rank].on(Heard(action.key, rank, decode(data)))
        return found is not None


def measure_model(ranks: int, runs: int, network: Network) -> dict[str, float]:
    """Milliseconds: what rank 0, a leader and another rank compute one behind the other, and what
    messages take: first the server of all is asked for everything, then that of a group.
    """
    group_size = group_size_of(ranks)
    seconds: list[tuple[float, float, float]] = []
    for _ in range(runs):
        simulation = Simulation(ranks, group_size)
        simulation.run()
        rows = list(zip(simulation.places, simulation.seconds, strict=True))
        leaders = [one for place, one in rows if place.leads and place.rank] or [0.0]
        others = [one for place, one in rows if not place.leads]
        seconds.append((rows[0][1], statistics.median(leaders), statistics.median(others)))
    root, *groups = simulation.servers
    busiest = max(groups, key=lambda server: server.requests, default=Server())
    requests = root.requests + busiest.requests
    messages = (
        HOPS * (2 if groups else 1) * network.hop_seconds
        + requests / network.requests_per_second
        + (root.sent_bytes + busiest.sent_bytes) / network.bytes_per_second
    )
    lead, leader, other = (statistics.median(column) for column in zip(*seconds, strict=True))
    return {
        "ranks": ranks,
        "groups": len(groups),
        "rank_0_ms": 1000 * lead,
        "leader_ms": 1000 * leader,
        "other_rank_ms": 1000 * other,
        "requests_of_all": root.requests,
        "requests_of_a_group": busiest.requests,
        "requests_per_second": network.requests_per_second,
        "messages_ms": 1000 * messages,
        "total_ms": 1000 * (messages + lead + leader + other),
    }
