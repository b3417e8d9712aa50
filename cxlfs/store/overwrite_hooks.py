"""What publishing tells whoever decides about overwrites, and what a store without that is told.

Never here: anything that is done about it (``overwrites``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cxlfs.store.held import Held
    from cxlfs.store.namespace import Inode
    from cxlfs.store.version import Version


class OverwriteHooks(Protocol):
    """What publishing tells, and asks, whoever decides about overwrites. See ``overwrites``."""

    def to_hold(self, inode: Inode, version: Version) -> Held | None: ...

    def keeps(self, inode: Inode, version: Version) -> bool: ...

    def is_one_change(self, inode: Inode) -> bool: ...

    def published(self, inode: Inode, held: Held) -> None: ...

    def written(self, inode: Inode) -> None: ...

    def forget(self, inode: Inode) -> None: ...

    def give_up_oldest(self) -> bool: ...


class NoOverwrites:
    """Nothing is held."""

    def to_hold(self, inode: Inode, version: Version) -> Held | None:
        del inode, version
        return None

    def keeps(self, inode: Inode, version: Version) -> bool:
        del inode, version
        return False

    def is_one_change(self, inode: Inode) -> bool:
        del inode
        return False

    def published(self, inode: Inode, held: Held) -> None: ...

    def written(self, inode: Inode) -> None: ...

    def forget(self, inode: Inode) -> None: ...

    def give_up_oldest(self) -> bool:
        return False
