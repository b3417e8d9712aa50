"""Agents of which one is killed: beside the ranks, in a copy or while it drains, in its work, at
any time, or behind its work. Of them is asked then what is asked of agents that nobody disturbs:
they make whole what the ranks left, so that one more store can be lost, and drain it.

Never here: what ranks do meanwhile (``campaign``).
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.job_faults.agents import TENDED_SECONDS, Agents, Death, a_death
from tests.support.job_faults.judge import BrokenError, Judge
from tests.support.job_faults.nodes import Nodes

WHENS = ("beside ranks", "in a copy", "in its work", "any time", "behind its work")
DRAINING = "while it drains"
WHENS_OF_DRAINING = ("beside ranks", DRAINING, "in its work", "any time", "behind its work")
ANY_TIME_SECONDS = 0.3
_IN_TIER = re.compile(r"step-\d+\.(\d+)-[0-9a-f]+\.cxlfs-job")
_POLL_SECONDS = 0.002


def newest_in(tier: Path) -> int:
    """The number of the newest attempt that is there as a whole; 0: none is."""
    found = (_IN_TIER.fullmatch(path.name) for path in tier.glob("*.cxlfs-job"))
    return max((int(each[1]) for each in found if each), default=0)


class AgentFault:
    """One: its agents live from before the ranks of a start until behind those of the next."""

    def __init__(
        self,
        root: Path,
        seats: Sequence[Path],
        replicas: int,
        seed: float,
        tier: Path | None = None,
    ) -> None:
        self._numbers = random.Random(seed)
        self._replicas = replicas
        self._victim = self._numbers.randrange(len(seats))
        self._tier = tier
        self.when = self._numbers.choice(WHENS if tier is None else WHENS_OF_DRAINING)
        self._has_come = False
        self._epoch = 0
        """Behind this one is what they do behind the last disturbance."""
        self.agents = Agents(root, seats, replicas, None if tier is None else tier.as_uri())
        self.agents.begin_all()

    def at_moment(self) -> None:
        """Of a rank."""
        if self.when == WHENS[0]:
            self._again()
            self._has_come = True

    def behind_ranks(self, nodes: Nodes, judge: Judge, node_of_rank: Sequence[int]) -> None:
        """Raises BrokenError."""
        if self._replicas > 1 and self._numbers.random() < 0.6:
            replaced = self._numbers.randrange(len(node_of_rank))
            self._replace(replaced, nodes, judge, node_of_rank)
            self._epoch = self.agents.epoch
            self.agents.begin(replaced)
            if self.when == "in a copy":
                self._victim = replaced
        if not self._has_come:
            self._kill_behind_ranks()
        ends = self.agents.wait(self._epoch)
        safe = judge.newest_safe()
        if safe is None:
            return
        of_safe = all(state == "tended" and (step or 0) >= safe[1] for state, step in ends)
        if len(ends) != 1 or not of_safe:
            raise BrokenError(f"{safe} is safe, and agents end with {ends}")
        judge.mended()
        if self._tier is not None:
            self._require_drained(self._tier, safe[0])
            return
        if self._replicas > 1 and self._numbers.random() < 0.5:
            lost = self._numbers.randrange(len(node_of_rank))
            self._replace(lost, nodes, judge, node_of_rank)

    def _require_drained(self, tier: Path, number: int) -> None:
        """What is safe is in the tier as a whole, or comes there."""
        end = time.monotonic() + TENDED_SECONDS
        while newest_in(tier) < number:
            if time.monotonic() > end:
                raise BrokenError(f"attempt {number} is safe, and the tier has {newest_in(tier)}")
            time.sleep(_POLL_SECONDS)

    def _kill_behind_ranks(self) -> None:
        if self.when in ("in a copy", DRAINING, "in its work"):
            self._again(a_death(self._numbers, self.when))
            self.agents.await_death(self._victim)
            self._epoch = self.agents.epoch
            self.agents.begin(self._victim)
            return
        if self.when == "any time":
            time.sleep(self._numbers.random() * ANY_TIME_SECONDS)
        elif self.when == "behind its work":
            self._again()  # what they do from here on they do behind the ranks
            self.agents.wait(self._epoch)
        self._again()

    def _again(self, death: Death | None = None) -> None:
        self._epoch = self.agents.epoch
        self.agents.kill(self._victim)
        self.agents.begin(self._victim, death)

    def _replace(self, index: int, nodes: Nodes, judge: Judge, node_of_rank: Sequence[int]) -> None:
        """The node, and its agent with it: the store is empty."""
        self.agents.kill(index)
        nodes.empty(node_of_rank[index])
        judge.lose(node_of_rank[index])
