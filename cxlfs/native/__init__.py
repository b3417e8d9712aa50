"""The C extension behind typed Python: nothing outside this package imports ``cxlfs._native``.

Never: policy, the media format, or a decision about what kind of source a mapping has.

Invariants
- A negative return code of C becomes an error of :mod:`cxlfs.errors` here, and nowhere else;
  of what stands for a file of the program itself (:mod:`cxlfs.native.client`) an OSError.
- ``Any`` stands in this package only, because cffi objects have no types.
- What needs NumPy is imported when it is first asked for: programs that save files do without.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("cxlfs.native.primitives"), name)
    globals()[name] = value
    return value
