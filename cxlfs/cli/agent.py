"""``cxlfs agent``: one on each node of a training job, beside it and behind it.

Never here: what an agent does (``job.agent``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import ClassVar

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style, quote, time_or_none
from cxlfs.errors import TierUnavailableError, UsageError
from cxlfs.job.agent import (
    Event,
    Keeper,
    OrbaxAgent,
    Pace,
    Settings,
    Tell,
    Tending,
    serve,
    serve_once,
)
from cxlfs.job.agent.service import Work
from cxlfs.job.checkpointer import domain_of
from cxlfs.job.engines import Engine
from cxlfs.job.engines.rendezvous import Alone, Meeting, TorchMeeting
from cxlfs.job.protocol import PLACEMENTS
from cxlfs.tier import open_bucket

HELP = """Keep, copy and give back the checkpoints that a training job saves in DIR, on this node's
store. One on each node of the job; they reach each other through torch, at the address of the node
with rank 0.

With --orbax DIR is what an unchanged JAX job saves to with Orbax's multi-tier checkpoints: steps
that all nodes have whole are kept and copied at the job's backup interval, and a job that begins
gets the newest one, on a node with an empty store from another node's copy.

Else DIR is that of cxlfs.job.Checkpointer. When all ranks are gone, what they had committed gets
the copies that it lacks, also in the empty store of a node that was replaced, and is drained.

\b
Examples:
  cxlfs agent /mnt/ckpt/run1 --orbax --nodes 4 --node-rank 1 --rendezvous node0:29400 --replicas 2
  cxlfs agent /mnt/ckpt/run1 --once --nodes 4 --node-rank 1 --rendezvous node0:29400 --replicas 2
  cxlfs agent /mnt/ckpt/run1 --once --tier s3://bucket/run1
"""
_PORT_MAX = 65535


@dataclasses.dataclass(frozen=True, slots=True)
class AgentReport(Report):
    """What has changed; one document for each."""

    schema: ClassVar[str] = "cxlfs.agent/1"

    path: bytes
    time: str | None
    state: str
    text: str
    next_step: str | None
    step: int | None
    ranks: tuple[int, ...]

    def lines(self, style: Style, /) -> Iterator[str]:
        yield f"{style.strong(self.state)}: {quote(self.text)}"
        if self.next_step is not None:
            yield f"    next: {quote(self.next_step)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where this node is among those of the job."""

    nodes: int
    rank: int
    address: str


def place_of(nodes: int | None, rank: int | None, address: str | None) -> Place:
    """What was not said is what torchrun, or Slurm, says of this process. Raises UsageError."""
    said: dict[str, str | None] = {}
    if "TORCHELASTIC_RUN_ID" in os.environ:
        said = {"nodes": os.environ.get("WORLD_SIZE"), "rank": os.environ.get("RANK")}
        said["address"] = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    elif "SLURM_JOB_ID" in os.environ:
        said = {"nodes": os.environ.get("SLURM_NNODES"), "rank": os.environ.get("SLURM_NODEID")}
    nodes = _count(said.get("nodes"), 1) if nodes is None else nodes
    rank = _count(said.get("rank"), 0) if rank is None else rank
    address = said.get("address") or "" if address is None else address
    if not 0 <= rank < nodes:
        raise UsageError(
            f"there is no node {rank} of {nodes}",
            next_step="count from 0: --node-rank 0 to one less than --nodes",
        )
    if nodes > 1 and not address:
        raise UsageError(
            f"the agents of {nodes} nodes need an address to meet at",
            next_step="name that of node 0 and a free port: --rendezvous HOST:PORT",
        )
    return Place(nodes, rank, address)


def _count(said: str | None, otherwise: int) -> int:
    if said and not said.isdecimal():
        raise UsageError(
            f"{quote(said)} is no number of nodes", next_step="say --nodes N --node-rank N"
        )
    return int(said or otherwise)


def _meeting_of(place: Place) -> Meeting:
    if place.nodes == 1:
        return Alone()
    host, port = _host_and_port(place.address)
    return TorchMeeting(host.strip("[]"), port, place.rank, place.nodes)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= _PORT_MAX:
        raise UsageError(f"{quote(address)} is not an address", next_step="write it as HOST:PORT")
    return host, int(port)


@click.command("agent", help=HELP, context_settings=CONTEXT_SETTINGS, epilog=epilog())
@click.argument("directory", metavar="DIR", type=ANY_PATH)
@click.option("--orbax", is_flag=True, help="An Orbax job saves there, multi-tier.")
@click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="Of the job (1).")
@click.option("--node-rank", type=click.IntRange(min=0), metavar="N", help="This node's (0).")
@click.option("--rendezvous", metavar="HOST:PORT", help="Where agents meet: node 0, a free port.")
@click.option(
    "--replicas",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="In how many stores each node's checkpoints lie, its own among them (1).",
)
@click.option(
    "--domain", metavar="NAME", help="With what else this node fails (CXLFS_DOMAIN, or its name)."
)
@click.option(
    "--placement",
    type=click.Choice(PLACEMENTS),
    default="groups",
    help="Where copies lie: in groups of stores, or in one ring of all (groups).",
)
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    default=2,
    metavar="N",
    help="With --orbax: steps that stay, and of those that were copied as many (2).",
)
@click.option("--tier", metavar="URL", help="Drain what is kept, or was committed, to there.")
@click.option(
    "--tier-every",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Only each Nth, as the job itself does (1).",
)
@click.option(
    "--tier-keep", type=click.IntRange(min=1), metavar="N", help="How many stay there (all)."
)
@click.option(
    "--coordinator",
    metavar="HOST:PORT",
    help="With --orbax: of the job's process 0; its processes take their numbers from here.",
)
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    metavar="SECONDS",
    help="How long others are waited for; the slowest copy has to fit (600).",
)
@click.option("--allow-volatile", is_flag=True, help="Keep steps on a store in memory, too.")
@click.option("--once", is_flag=True, help="Do what is to be done now, and end.")
@common_options
def command(
    directory: str,
    *,
    orbax: bool,
    nodes: int | None,
    node_rank: int | None,
    rendezvous: str | None,
    replicas: int,
    domain: str | None,
    placement: str,
    keep: int,
    tier: str | None,
    tier_every: int,
    tier_keep: int | None,
    coordinator: str | None,
    deadline: float,
    allow_volatile: bool,
    once: bool,
    as_json: bool,
) -> None:
    """See HELP."""
    root = Path(directory).absolute()
    if coordinator is not None:
        _host_and_port(coordinator)
    if tier is not None:  # a wrong one is said now; one that is not there is tried again
        with contextlib.suppress(TierUnavailableError):
            open_bucket(tier)
    place = place_of(nodes, node_rank, rendezvous)
    tell = _telling(Output(as_json=as_json), root)
    settings = Settings(
        *(replicas, domain_of(domain), deadline, tier, tier_every, tier_keep, placement)
    )

    def keeper_of(kept: Path, engine: Engine) -> Keeper:
        return Keeper(
            kept,
            engine=engine,
            replicas=settings.replicas,
            domain=settings.domain,
            placement=settings.placement,
            keep=keep,
            tier=settings.tier,
            tier_every=settings.tier_every,
            tier_keep=settings.tier_keep,
            deadline_seconds=settings.deadline_seconds,
            allow_volatile=allow_volatile,
        )

    work: Work
    if orbax:
        work = OrbaxAgent(root, place.rank, keeper_of, tell, coordinator or "")
    else:
        work = Tending(root, settings, tell)
    _live(place, work, tell, Pace(deadline), once=once)


def _live(place: Place, work: Work, tell: Tell, pace: Pace, *, once: bool) -> None:
    """To its end. SIGTERM ends it at any moment: threads that copy, or drain, are not waited for,
    nor may they meet an interpreter that is being taken down.
    """
    before = signal.signal(signal.SIGTERM, _end)
    try:
        meeting = _meeting_of(place)
        if once:
            serve_once(meeting, work, tell, pace)
        else:
            serve(meeting, work, tell, pace)
    except SystemExit:
        tell(Event("ended", "by SIGTERM; what was begun goes on when an agent is started again"))
        sys.stderr.flush()
        os._exit(0)
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def _telling(output: Output, root: Path) -> Tell:
    def tell(event: Event) -> None:
        output.report(
            AgentReport(
                path=os.fsencode(root),
                time=time_or_none(time.time_ns()),
                state=event.state,
                text=event.text,
                next_step=event.next_step or None,
                step=event.step,
                ranks=event.ranks,
            )
        )
        output.flush()

    return tell
