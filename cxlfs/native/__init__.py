"""The C extension behind typed Python: nothing outside this package imports ``cxlfs._native``.

Never: policy, the media format, or a decision about what kind of source a mapping has.

Invariants
- A negative return code of C becomes an error of :mod:`cxlfs.errors` here, and nowhere else.
- ``Any`` stands in this package only, because cffi objects have no types.
"""

from __future__ import annotations

from cxlfs.native.primitives import (
    EventKind,
    FaultKind,
    Granularity,
    MappedRegion,
    MediaHandle,
    Routines,
    Source,
    Target,
    crc32c,
    crc32c_each,
    fault_count,
    routines,
    set_fault,
)

__all__ = [
    "EventKind",
    "FaultKind",
    "Granularity",
    "MappedRegion",
    "MediaHandle",
    "Routines",
    "Source",
    "Target",
    "crc32c",
    "crc32c_each",
    "fault_count",
    "routines",
    "set_fault",
]
