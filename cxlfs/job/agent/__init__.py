"""The agent of a node (``cxlfs agent``): it keeps, copies and gives back checkpoints while no rank
of the job does, or where the job knows nothing of copies.

The agents of a job's nodes are a group of their own, whose ranks are those of the nodes. They use
what ranks use: ``Checkpointer``, its files, its engines.

Never: prints, or is needed for what ranks do by themselves.
"""

from cxlfs.job.agent.events import Event, Tell
from cxlfs.job.agent.keeper import Keeper
from cxlfs.job.agent.orbax import OrbaxAgent
from cxlfs.job.agent.service import Pace, serve, serve_once
from cxlfs.job.agent.tending import Settings, Tending

__all__ = [
    "Event",
    "Keeper",
    "OrbaxAgent",
    "Pace",
    "Settings",
    "Tell",
    "Tending",
    "serve",
    "serve_once",
]
