"""One checkpoint of a whole training job, over many nodes with a store each.

``protocol`` decides, without input or output, what each rank does and what all of them agree on. It
knows neither files nor messages' ways. ``Checkpointer`` drives it: ``files`` says how a checkpoint
lies in a directory, ``engines`` how ranks reach each other.

Never: opens a store or knows its format. A checkpoint lies in a mounted directory. No framework is
imported before an engine over it is made.
"""

from cxlfs.errors import (
    AbortedError,
    ForkError,
    JobBusyError,
    JobConfigurationError,
    JobTierError,
    NotRestoredError,
    NotWholeError,
    UndecidedError,
)
from cxlfs.job.agreed import agreed_checkpoint
from cxlfs.job.checkpointer import Checkpointer
from cxlfs.job.pending import PendingCheckpoint
from cxlfs.job.protocol import Aborted, Committed, Nothing, Restored
from cxlfs.job.reachable import Reachable
from cxlfs.job.resharding import Resharded
from cxlfs.job.schedule import Schedule, every

__all__ = [
    "Aborted",
    "AbortedError",
    "Checkpointer",
    "Committed",
    "ForkError",
    "JobBusyError",
    "JobConfigurationError",
    "JobTierError",
    "NotRestoredError",
    "NotWholeError",
    "Nothing",
    "PendingCheckpoint",
    "Reachable",
    "Resharded",
    "Restored",
    "Schedule",
    "UndecidedError",
    "agreed_checkpoint",
    "every",
]
