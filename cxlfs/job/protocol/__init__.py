"""Who saves when, when a checkpoint of all ranks is committed, and which one all of them load.

``saving`` and ``restoring`` are machines: events in, actions out. The proof obligations are in
``docs/job.md``; ``tests/job`` runs histories with lost, late and doubled messages, crashes at every
action and lost stores against them.

Never: input, output, clocks, random numbers, frameworks. A deadline is an event.
"""

from cxlfs.job.protocol.machine import (
    Action,
    Collect,
    DeadlinePassed,
    Discard,
    Done,
    Event,
    Failed,
    Gather,
    Heard,
    Load,
    Machine,
    RecordCommit,
    Replicate,
    Save,
    TakeStock,
    TakeStockBelow,
    Tell,
    WriteManifest,
)
from cxlfs.job.protocol.messages import Body, Part, Prepare, Tally, decode, encode
from cxlfs.job.protocol.model import (
    TIER,
    Aborted,
    Attempt,
    Commit,
    Committed,
    Held,
    Inventory,
    Key,
    Nothing,
    NotRestored,
    Outcome,
    Restored,
    Undecided,
    digest_of,
)
from cxlfs.job.protocol.place import Place
from cxlfs.job.protocol.placement import (
    PLACEMENTS,
    Placement,
    Transfer,
    copysets,
    fetches,
    missing_copies,
    place_copies,
    rounds,
)
from cxlfs.job.protocol.planning import Choice, choose, collectable, next_number, recorders_of
from cxlfs.job.protocol.restoring import Restoring
from cxlfs.job.protocol.saving import Saving

__all__ = [
    "PLACEMENTS",
    "TIER",
    "Aborted",
    "Action",
    "Attempt",
    "Body",
    "Choice",
    "Collect",
    "Commit",
    "Committed",
    "DeadlinePassed",
    "Discard",
    "Done",
    "Event",
    "Failed",
    "Gather",
    "Heard",
    "Held",
    "Inventory",
    "Key",
    "Load",
    "Machine",
    "NotRestored",
    "Nothing",
    "Outcome",
    "Part",
    "Place",
    "Placement",
    "Prepare",
    "RecordCommit",
    "Replicate",
    "Restored",
    "Restoring",
    "Save",
    "Saving",
    "TakeStock",
    "TakeStockBelow",
    "Tally",
    "Tell",
    "Transfer",
    "Undecided",
    "WriteManifest",
    "choose",
    "collectable",
    "copysets",
    "decode",
    "digest_of",
    "encode",
    "fetches",
    "missing_copies",
    "next_number",
    "place_copies",
    "recorders_of",
    "rounds",
]
