"""What can go wrong with a job, and when.

At a moment of a rank something is done: to that rank, to its node, to all. ``deed`` says what the
rank itself does there (see ``ranks.Start``); ``campaign`` does the rest.
"""

from __future__ import annotations

import dataclasses

from tests.support.job_faults.moments import COMMIT, DRAIN, PHASES, PREPARED
from tests.support.job_faults.nodes import Beside

AGENT, AGENT_DRAIN = "agent", "agent-drain"


@dataclasses.dataclass(frozen=True)
class Kind:
    """``phases``: when it may come; ``what``: which action it always comes at; ``replicas``: with
    how many; ``errors``: what ranks may raise beside what the protocol raises.
    """

    name: str
    says: str
    deed: str = "kill"
    phases: tuple[str, ...] = PHASES
    what: str = ""
    replicas: tuple[int, ...] = (1, 2)
    needs_stores: bool = False
    beside: Beside = Beside.NOTHING
    errors: frozenset[str] = frozenset()


_DEAD_MOUNT = frozenset({"OSError", "FileNotFoundError", "ConnectionAbortedError"})

_ALL = (
    Kind("kill", "a rank is killed"),
    Kind("daemon", "a node's daemon is killed", "hold", needs_stores=True, errors=_DEAD_MOUNT),
    Kind(
        "power",
        "power fails on a node, or on all: of what no msync had covered nothing is left, or all, "
        "or some pages, sectors or words",
        "go",
        beside=Beside.KEPT,
        errors=_DEAD_MOUNT,
    ),
    Kind(
        "power-lines",
        "the same of media that are mapped directly: of what was not written back by line, and "
        "fenced, nothing is left, or all, or some of it",
        "go",
        needs_stores=True,
        beside=Beside.LINES_KEPT,
        errors=_DEAD_MOUNT,
    ),
    Kind("wipe", "a rank is killed, and its node's store is a new one"),
    Kind(
        "full",
        "a node's store has no room",
        "hold",
        needs_stores=True,
        errors=frozenset({"OSError"}),
    ),
    Kind("corrupt-shard", "a bit of what a rank saved is another one", "hold"),
    Kind("corrupt-copy", "a bit of a copy is another one", "hold", replicas=(2,)),
    Kind("corrupt-manifest", "a bit of a manifest is another one", "hold"),
    Kind("corrupt-commit", "a bit of a record of the commit is another one", "hold"),
    Kind("slow", "a rank, or a daemon, stands still for longer than the others wait", "stop"),
    Kind(
        "partition", "ranks are in two parts that do not hear of each other, or each alone", "part"
    ),
    Kind("permute", "ranks come back on other nodes, and one is killed"),
    Kind("world", "the job comes back in one rank more, or less, and one is killed"),
    Kind("redo", "steps are saved again, or the job goes back, and a rank is killed"),
    Kind(
        "clock",
        "clocks of ranks and daemons go back by a year, a rank is killed",
        beside=Beside.CLOCK,
    ),
    Kind(
        "collection",
        "a rank is killed while older ones are given back",
        phases=(COMMIT,),
        what="Collect",
    ),
    Kind(
        "replication",
        "a rank is killed while copies are made",
        phases=(PREPARED,),
        what="Replicate",
        replicas=(2,),
    ),
    Kind(
        "drain",
        "a rank is killed while it drains to a tier; in half of them all stores are lost, too",
        phases=(COMMIT,),
        what=DRAIN,
        errors=frozenset({"JobTierError"}),
    ),
    Kind(
        AGENT,
        "a rank is killed, and an agent: beside the ranks, in a copy, in its work, at any time, or "
        "behind its work; stores are lost before and behind that",
    ),
    Kind(
        AGENT_DRAIN,
        "a rank is killed, and an agent: beside the ranks, while it drains, in its work, at any "
        "time, or behind its work; in half of them all stores are lost behind that",
    ),
)
KINDS = {kind.name: kind for kind in _ALL}
