"""References that nobody wants any more, where they are many: dropped in steps, which others wait
for, instead of at once.

Never here: what is many, when a step is due (``store.room``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxlfs._native import lib

if TYPE_CHECKING:
    from cxlfs.native.extents import Engine


def discard_in_steps(engine: Engine, refs_min: int) -> None:
    """From now on, where a content ends or is cut and more references than that go, they wait:
    their bytes count as before, and their extents live, until :func:`drop_discarded` drops them.
    """
    lib.cxl_engine_discard(engine.handle, refs_min)


def drop_discarded(engine: Engine, count: int) -> bool:
    """One step: as much work as dropping ``count`` of them; False: there are none."""
    return bool(lib.cxl_engine_drop_discarded(engine.handle, count))
