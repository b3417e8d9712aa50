"""How often a job should save: what saving costs against what a failure costs.

A job saves every ``interval``, from the begin of one save to that of the next, and stands still for
``stall`` each time. A save counts once it has taken ``save``. Failures come at random, one in
``mtbf`` on average, also while the job starts again, which takes ``restart``; it goes on with what
the last save had that counts. Of that model (exponential times between failures, nothing else
assumed) the shares below are exact, not a first order: see docs/advice.md.

Never: input, output, random numbers (``scripts/simulate-job`` tries it), what a checkpoint is.
"""

from __future__ import annotations

import dataclasses
import math

from cxlfs.errors import UsageError


@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """Of one job, in seconds. ``stall``: how long training stands still for a save; the whole save
    where it is a blocking one. ``restart``: from a failure until training goes on, loading
    included. ``overhead``: the share of training time that is lost to other things.

    Raises UsageError where these contradict each other.
    """

    mtbf_seconds: float
    save_seconds: float
    stall_seconds: float
    restart_seconds: float
    overhead: float = 0.0

    def __post_init__(self) -> None:
        times = (self.save_seconds, self.stall_seconds, self.restart_seconds)
        if not all(math.isfinite(time) and time >= 0 for time in (*times, self.mtbf_seconds)):
            raise UsageError("times are 0 or more", next_step="write them like 1.5s, 20min or 54d")
        if self.mtbf_seconds <= 0:
            raise UsageError("a job that always fails trains nothing", next_step="give an MTBF")
        if self.stall_seconds > self.save_seconds:
            raise UsageError(
                "training stands still for longer than the save takes",
                next_step="--stall is a part of --save; a blocking save has both alike",
            )
        if not 0 <= self.overhead < 1:
            raise UsageError("an overhead is a share below 1", next_step="3.7 % is 0.037")


@dataclasses.dataclass(frozen=True, slots=True)
class Shares:
    """Where all the time goes, which they add up to: 1. ``redone``: training that was lost with a
    failure and is done again, and the stalls in it.
    """

    training: float
    overhead: float
    stalls: float
    redone: float
    restarts: float


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """What one costs: seconds until the job is where it was."""

    restart_seconds: float
    redone_seconds: float
    redone_seconds_max: float


def shares(costs: Costs, interval_seconds: float) -> Shares:
    """Raises UsageError: the next save would begin before the one before it has ended."""
    _check(costs, interval_seconds)
    mtbf, stall = costs.mtbf_seconds, costs.stall_seconds
    running = math.exp(-costs.restart_seconds / mtbf)
    # From a start to the failure that ends it, every save that counts by then keeps the training
    # in front of it: the k-th does k intervals and (save - stall) behind the start.
    counted = math.exp(-(costs.save_seconds - stall) / mtbf) / math.expm1(interval_seconds / mtbf)
    kept = running * counted * (interval_seconds - stall) / mtbf
    stalls = running * counted * stall / mtbf
    return Shares(
        training=kept * (1 - costs.overhead),
        overhead=kept * costs.overhead,
        stalls=stalls,
        redone=max(0.0, running - kept - stalls),
        restarts=-math.expm1(-costs.restart_seconds / mtbf),
    )


def failure(costs: Costs, interval_seconds: float) -> Failure:
    """Of those that hit the job while it trains; a restart that fails is a part of the restart."""
    found = shares(costs, interval_seconds)
    between = costs.mtbf_seconds * math.exp(costs.restart_seconds / costs.mtbf_seconds)
    return Failure(
        restart_seconds=found.restarts * between,
        redone_seconds=found.redone * between,
        redone_seconds_max=interval_seconds + costs.save_seconds - costs.stall_seconds,
    )


def best_interval(costs: Costs) -> float:
    """The interval with the largest share of training, in seconds.

    u = interval / mtbf solves u + exp(-u) = 1 + stall / mtbf. Neither the restart nor the time
    that a save takes beside training moves it; but saves do not overtake each other, so it is
    never shorter than a save.
    """
    target = costs.stall_seconds / costs.mtbf_seconds
    u = math.sqrt(2 * target) + target  # above the root, where the step of Newton stays above
    for _ in range(100):
        if u == 0:
            break
        step = (u + math.expm1(-u) - target) / -math.expm1(-u)
        u -= step
        if abs(step) <= 1e-12 * u:
            break
    return max(u * costs.mtbf_seconds, costs.save_seconds, _SHORTEST_SECONDS)


_SHORTEST_SECONDS = 1e-3
"""A save that costs nothing at all could come as often as one likes."""


def young(costs: Costs) -> float:
    """Seconds between two checkpoints: sqrt(2 C M). doi:10.1145/361147.361115"""
    return math.sqrt(2 * costs.stall_seconds * costs.mtbf_seconds)


def daly(costs: Costs) -> float:
    """Seconds from one begin to the next: the higher order. doi:10.1016/j.future.2004.11.016"""
    stall, mtbf = costs.stall_seconds, costs.mtbf_seconds
    if stall >= 2 * mtbf:
        return mtbf + stall
    part = stall / (2 * mtbf)
    return math.sqrt(2 * stall * mtbf) * (1 + math.sqrt(part) / 3 + part / 9)


def saxena(costs: Costs) -> float:
    """Seconds from one begin to the next, for most availability. arXiv:2410.18124"""
    stall, mtbf = costs.stall_seconds, costs.mtbf_seconds
    return stall + math.sqrt(2 * (mtbf + costs.restart_seconds) * stall + stall**2)


def first_order(costs: Costs, interval_seconds: float) -> float:
    """The share of training as it is often estimated: all that is lost, added up; exact only where
    it is little. Below 0 where it is more than there is.
    """
    lost = costs.save_seconds - costs.stall_seconds + interval_seconds / 2 + costs.restart_seconds
    stalls = costs.stall_seconds / interval_seconds
    return 1 - costs.overhead - stalls - lost / costs.mtbf_seconds


def _check(costs: Costs, interval_seconds: float) -> None:
    if not math.isfinite(interval_seconds) or interval_seconds < costs.save_seconds:
        raise UsageError(
            f"a save every {interval_seconds:g} s, when each takes {costs.save_seconds:g} s",
            next_step="save less often, or faster",
        )
    if interval_seconds <= 0:
        raise UsageError("an interval is more than none")
