"""The store: log-structured, checksummed, crash-atomic; all above talk to ``Store`` only."""

from __future__ import annotations

from cxlfs.store.core import Store
from cxlfs.store.directories import DirectoryEntry
from cxlfs.store.events import StoreEvent
from cxlfs.store.handle import UnfinishedError
from cxlfs.store.making import format_store
from cxlfs.store.options import StoreOptions
from cxlfs.store.recovery import RecoveryReport
from cxlfs.store.report import CheckpointEntry, SpaceReport, StoreStatistics

__all__ = [
    "CheckpointEntry",
    "DirectoryEntry",
    "RecoveryReport",
    "SpaceReport",
    "Store",
    "StoreEvent",
    "StoreOptions",
    "StoreStatistics",
    "UnfinishedError",
    "format_store",
]
