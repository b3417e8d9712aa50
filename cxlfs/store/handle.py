"""One open file description as the store knows it, and a write that is done in steps.

Never here: what its verbs do (``files``).
"""

from __future__ import annotations

import dataclasses

from cxlfs.store.namespace import Inode


@dataclasses.dataclass(slots=True, eq=False)
class Handle:
    """One open file description. ``truncated``: it began the overwrite; ``ordinary``: see above;
    ``redirected``: a shell made it for another program, or for several.
    """

    id: int
    inode: Inode
    readable: bool
    writable: bool
    truncated: bool = False
    ordinary: bool = False
    redirected: bool = False
    wrote: bool = False
    killed: bool = False


class UnfinishedError(Exception):
    """Room is being made for the rest of a write, step by step: others may have their turn before
    it is called again with ``done``.
    """

    def __init__(self, done: int) -> None:
        super().__init__(done)
        self.done = done
