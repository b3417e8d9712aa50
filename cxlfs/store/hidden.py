"""Names of the top directory that the store keeps for itself, and that no listing shows.

Other modules put things there: ``unit_aside``, ``pins``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cxlfs.errors import NotFoundError
from cxlfs.store.unit_aside import ASIDE_NAME
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode

PAST_NAME: Final = b".cxlfs"
"""What the daemon answers for: the view of the past. The store's own directory of pins has this
name, too, so that the mount shows nobody the way to it.
"""


def is_unlisted(directory: Inode, name: bytes) -> bool:
    """True for a name that listings leave out."""
    return directory.ino == ROOT_INO and name in {ASIDE_NAME, PAST_NAME}


def is_past(parent: int, name: bytes) -> bool:
    """True for the name of the view of the past."""
    return name == PAST_NAME and parent == ROOT_INO


def require_shown(parent: int, name: bytes) -> None:
    """Raises NotFoundError: the name leads to the past, which no verb of the store reaches."""
    if is_past(parent, name):
        raise NotFoundError(
            "what is below .cxlfs is no part of the store",
            next_step="read it with ordinary tools, or use cxlfs history",
        )
