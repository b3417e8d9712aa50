"""What a commit of a whole job takes beside saving: real ranks over the key-value store of torch,
and the protocol alone for more ranks than a machine can run.

Ranks are forked from one process that has imported torch, and meet before each commit. What lies
beyond saving is all of a commit, from the first rank's call to the last one's return, without the
longest save of one rank (its files and its manifest, up to its vote).
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cxlfs.errors import CxlfsError
from cxlfs.job import Checkpointer, Committed
from cxlfs.job.engines.torch import StoreEngine
from cxlfs.job.protocol import (
    Attempt,
    DeadlinePassed,
    Done,
    Gather,
    Heard,
    Key,
    Place,
    Saving,
    Tell,
    WriteManifest,
    decode,
    encode,
)

SECONDS = 20.0
SHARD_BYTES = 4096
REQUESTS_EACH = 10
"""Of a rank to the key-value store in a commit: PREPARE 2, vote 1, tally 2, record 1, tally 2, and
2 keys of before are deleted."""
HOPS = 5
"""Messages one behind the other: PREPARE, vote, tally, record, tally."""


@dataclasses.dataclass(frozen=True)
class Commits:
    """Milliseconds, of each commit but the first."""

    ranks: int
    nodes: int
    total: list[float]
    own_save: list[float]
    beyond: list[float]


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


def measure_commits(root: Path, ranks: int, ranks_per_node: int, commits: int) -> Commits:
    """In directories below ``root``, one for each node. Raises CxlfsError."""
    from torch import distributed

    def meet(store: Any, name: str, rank: int) -> None:
        store.set(f"{name}/{rank}", b"")
        store.wait([f"{name}/{other}" for other in range(ranks)], dt.timedelta(seconds=SECONDS))

    def work(rank: int) -> None:
        store = distributed.TCPStore("127.0.0.1", port, is_master=False)
        own = distributed.PrefixStore("job", store.clone())
        made = _Timed(
            root / f"node{rank // ranks_per_node}",
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
            rows.append([begin, made.voted - made.saving[0], end])
        (root / f"times-{rank}.json").write_text(json.dumps(rows))

    with key_value_store() as port:
        fork(ranks, work)
    rows = [json.loads((root / f"times-{rank}.json").read_text()) for rank in range(ranks)]
    total, own = [], []
    for one in list(zip(*rows, strict=True))[1:]:
        begins, saves, ends = zip(*one, strict=True)
        total.append(1000 * (max(ends) - min(begins)))
        own.append(1000 * max(saves))
    beyond = [all_of_it - save for all_of_it, save in zip(total, own, strict=True)]
    return Commits(ranks, -(-ranks // ranks_per_node), total, own, beyond)


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


class Simulation:
    """One commit of all ranks in this process, without files. ``seconds[i]``: what rank i computed;
    ``sent_bytes``: what all have said, and heard.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        attempt = Attempt(1000, 100_000, "0123456789abcdef")
        self._machines = [Saving(Place(rank, ranks, "0.ab", 7), attempt) for rank in range(ranks)]
        self._said: dict[tuple[Key, int, bool], bytes] = {}
        self._told: list[Gather | None] = [None] * ranks
        self.seconds = [0.0] * ranks
        self.sent_bytes = 0

    def run(self) -> None:
        """Raises CxlfsError: not all have committed the same."""
        for machine in self._machines:
            machine.start()
        waiting = list(range(self.ranks))
        while waiting:
            before = len(self._said)
            waiting = [rank for rank in waiting if not self._advance(rank)]
            if waiting and len(self._said) == before:
                raise CxlfsError(f"{len(waiting)} ranks wait for nothing")
        outcomes = {machine.outcome for machine in self._machines}
        (outcome,) = outcomes
        if not isinstance(outcome, Committed) or not outcome.is_cleaned:
            raise CxlfsError(f"{outcome}")

    def _advance(self, rank: int) -> bool:
        """As far as it goes; True: to its end."""
        machine = self._machines[rank]
        begin = time.perf_counter()
        while (action := machine.action) is not None:
            if isinstance(action, Gather):
                if not self._gather(rank, action):
                    break
            elif isinstance(action, Tell):
                self._say((action.key, 0, True), encode(action.body))
                machine.on(Done(action))
            else:
                value = f"{rank:064x}" if isinstance(action, WriteManifest) else None
                machine.on(Done(action, value))
        self.seconds[rank] += time.perf_counter() - begin
        return machine.action is None

    def _gather(self, rank: int, action: Gather) -> bool:
        machine, key = self._machines[rank], action.key
        if action.body is not None and self._told[rank] is not action:
            self._told[rank] = action
            self._say((key, rank, False), encode(action.body))
        hears_tally = action.is_poll and rank != 0
        one = hears_tally or action.from_rank_0
        names = [(key, other, hears_tally) for other in range(1 if one else self.ranks)]
        if any(name not in self._said for name in names):
            return False
        for name in names:
            data = self._said[name]
            self.sent_bytes += len(data)
            machine.on(Heard(key, name[1], decode(data)))
        if machine.action is action:
            machine.on(DeadlinePassed(key))
        return True

    def _say(self, name: tuple[Key, int, bool], data: bytes) -> None:
        self._said[name] = data
        self.sent_bytes += len(data)


def measure_model(ranks: int, runs: int, network: Network) -> dict[str, float]:
    """Milliseconds: what rank 0 and the slowest of the others compute, and what messages take."""
    lead, other, sent = [], [], 0
    for _ in range(runs):
        simulation = Simulation(ranks)
        simulation.run()
        lead.append(simulation.seconds[0])
        other.append(statistics.median(simulation.seconds[1:]))
        sent = simulation.sent_bytes
    messages = (
        HOPS * network.hop_seconds
        + ranks * REQUESTS_EACH / network.requests_per_second
        + sent / network.bytes_per_second
    )
    return {
        "ranks": ranks,
        "rank_0_ms": 1000 * statistics.median(lead),
        "other_rank_ms": 1000 * statistics.median(other),
        "sent_bytes": sent,
        "requests_per_second": network.requests_per_second,
        "messages_ms": 1000 * messages,
        "total_ms": 1000 * (messages + statistics.median(lead) + statistics.median(other)),
    }
