"""A training job of many nodes, event by event: what share of its time is training.

Each node fails by a clock of its own; a failure stops the whole job, which starts again from the
newest checkpoint that counts and whose shards are all still held by somebody. Nothing is taken from
the formulas of ``cxlfs.job.advice``, which is what makes the two worth comparing.

Never: the network, stragglers, silent corruption; what gathering the votes of many ranks costs is a
part of ``save_seconds``.

Invariants
- The same job and the same seed give the same run.
- Every second of a run is training that was kept, overhead, standing still, done in vain, or
  starting again: they add up to the time that has passed.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """Times in seconds. ``shape``: of the Weibull distribution of a node's times between failures
    (1: exponential; below 1: they come in bursts). ``store_lost``: the share of failures with which
    the node's store is gone; ``replicas``: how many nodes hold each shard; ``tier_seconds``: how
    often the newest checkpoint is copied to a tier below that no failure reaches, at once.
    """

    nodes: int
    node_mtbf_seconds: float
    save_seconds: float
    stall_seconds: float
    interval_seconds: float
    restart_seconds: float
    overhead: float = 0.0
    shape: float = 1.0
    store_lost: float = 0.0
    replicas: int = 1
    tier_seconds: float = math.inf

    @property
    def mtbf_seconds(self) -> float:
        return self.node_mtbf_seconds / self.nodes


@dataclasses.dataclass(slots=True)
class Run:
    """Seconds by what they went to, and what happened. ``fallbacks``: restarts from the tier, or
    from nothing, as no node had all of the newest any more.
    """

    training: float = 0.0
    overhead: float = 0.0
    stalls: float = 0.0
    redone: float = 0.0
    restarts: float = 0.0
    failures: int = 0
    saves: int = 0
    fallbacks: int = 0
    lost_most: float = 0.0
    elapsed: float = 0.0

    @property
    def seconds(self) -> float:
        return self.training + self.overhead + self.stalls + self.redone + self.restarts

    @property
    def efficiency(self) -> float:
        return self.training / self.seconds


class _Failures:
    """When nodes fail. A failed node is replaced by one that is as new."""

    def __init__(self, job: Job, rng: random.Random) -> None:
        self._rng = rng
        self._shape = job.shape
        self._scale = job.node_mtbf_seconds / math.gamma(1 + 1 / job.shape)
        self._next = [(self._draw(), node) for node in range(job.nodes)]
        heapq.heapify(self._next)

    def _draw(self) -> float:
        return self._rng.weibullvariate(self._scale, self._shape)

    @property
    def time(self) -> float:
        return self._next[0][0]

    def take(self) -> int:
        """The node that fails at ``time``."""
        time, node = self._next[0]
        heapq.heapreplace(self._next, (time + self._draw(), node))
        return node


@dataclasses.dataclass(frozen=True, slots=True)
class _Checkpoint:
    """``work``: seconds of training that it holds; ``stalls``: that were spent for them."""

    work: float = 0.0
    stalls: float = 0.0


class _Simulation:
    def __init__(self, job: Job, seed: int) -> None:
        self._job = job
        self._rng = random.Random(seed)
        self._failures = _Failures(job, self._rng)
        self._run = Run()
        self._now = 0.0
        self._state = _Checkpoint()
        self._newest = _Checkpoint()
        self._in_tier = _Checkpoint()
        self._tier_due = job.tier_seconds
        self._lost: set[int] = set()

    def until(self, failures: int) -> Run:
        while self._run.failures < failures:
            self._train()
            self._restart()
        run, kept = self._run, self._state
        run.training = kept.work * (1 - self._job.overhead)
        run.overhead = kept.work * self._job.overhead
        run.stalls = kept.stalls
        run.elapsed = self._now
        return run

    def _train(self) -> None:
        """From a start to the failure that ends it."""
        job, end = self._job, self._failures.time
        work_seconds = job.interval_seconds - job.stall_seconds
        pending: list[tuple[float, _Checkpoint]] = []
        stalled = job.stall_seconds
        while stalled == job.stall_seconds:
            self._pass_over(pending, end)
            worked = min(work_seconds, end - self._now)
            self._add(worked, 0.0)
            if worked < work_seconds:
                break
            stalled = min(job.stall_seconds, end - self._now)
            self._add(0.0, stalled)
            pending.append(self._begun(stalled))
            self._count(pending, self._now)
        self._now = end
        self._count(pending, end)

    def _add(self, worked: float, stalled: float) -> None:
        self._now += worked + stalled
        self._state = _Checkpoint(self._state.work + worked, self._state.stalls + stalled)

    def _begun(self, stalled: float) -> tuple[float, _Checkpoint]:
        """A save whose stall has just passed, and when it will count."""
        return self._now - stalled + self._job.save_seconds, self._state

    def _pass_over(self, pending: list[tuple[float, _Checkpoint]], end: float) -> None:
        """Intervals in which nothing happens but what happens in each, at once."""
        job = self._job
        count = int((min(end, self._tier_due) - self._now) / job.interval_seconds) - 1
        if count < 2:
            return
        self._run.saves += len(pending) + count - 1
        self._lost.clear()
        before_last = (count - 1) * job.interval_seconds
        self._now += before_last
        stalls = (count - 1) * job.stall_seconds
        self._state = self._newest = _Checkpoint(
            self._state.work + before_last - stalls, self._state.stalls + stalls
        )
        self._add(job.interval_seconds - job.stall_seconds, job.stall_seconds)
        pending[:] = [self._begun(job.stall_seconds)]
        self._count(pending, self._now)

    def _count(self, pending: list[tuple[float, _Checkpoint]], now: float) -> None:
        """Saves that count by now: whoever lost a store has one again, and holds its shards."""
        while pending and pending[0][0] <= now:
            time, saved = pending.pop(0)
            self._newest = saved
            self._lost.clear()
            self._run.saves += 1
            if time >= self._tier_due:
                self._in_tier = self._newest
                self._tier_due = time + self._job.tier_seconds

    def _restart(self) -> None:
        begun = self._now
        self._fail()
        while self._failures.time < self._now + self._job.restart_seconds:
            self._now = self._failures.time
            self._fail()
        self._now += self._job.restart_seconds
        self._run.restarts += self._now - begun
        if not self._is_held():
            self._newest = self._in_tier
            self._lost.clear()
            self._run.fallbacks += 1
        work = self._state.work - self._newest.work
        self._run.redone += work + self._state.stalls - self._newest.stalls
        self._run.lost_most = max(self._run.lost_most, work)
        self._state = self._newest

    def _fail(self) -> None:
        node = self._failures.take()
        self._run.failures += 1
        if self._job.store_lost and self._rng.random() < self._job.store_lost:
            self._lost.add(node)

    def _is_held(self) -> bool:
        """Each shard lies with its node and those that follow it."""
        nodes, copies = self._job.nodes, range(self._job.replicas)
        touched = {(lost - copy) % nodes for lost in self._lost for copy in copies}
        return not any(
            all((node + copy) % nodes in self._lost for copy in copies) for node in touched
        )


def simulate(job: Job, *, failures: int, seed: int) -> Run:
    """Until so many failures have happened."""
    if job.interval_seconds < job.save_seconds:
        raise ValueError("saves would overtake each other")
    return _Simulation(job, seed).until(failures)
