"""How a store is opened.

Other modules act on the options.
"""

from __future__ import annotations

import dataclasses

from cxlfs.store.overwrites import TornMode
from cxlfs.store.unit_rules import UnitsMode


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How to open a store.

    ``commit_interval_s``: what stays open longer is committed that often. With
    ``allow_incomplete_overwrite`` an overwrite gives up the old content at once. ``history``: what
    was overwritten or removed stays until its room is needed, or the store is closed. ``dedup``:
    parts of files that are the same are kept once.
    """

    read_only: bool = False
    verify_reads: bool = True
    commit_interval_s: float = 30.0
    allow_incomplete_overwrite: bool = False
    units: UnitsMode = UnitsMode.POLICY
    torn: TornMode = TornMode.OFF
    history: bool = True
    dedup: bool = False
