"""Contents that become those of another file: references are copied, never bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxlfs.errors import invariant

if TYPE_CHECKING:
    from cxlfs.native.maps import FileMap
    from cxlfs.store.leases import Leases


def share_whole(leases: Leases, source: FileMap, target: FileMap) -> None:
    """Let an empty content refer to what another one has."""
    size = source.size
    if size and source.share(0, size, target, 0) is None:
        leases.close(source)  # its last extent may still be written to
        shared = source.share(0, size, target, 0)
        invariant(shared == size, "only its own lease keeps an extent of a content open")
    target.truncate(size)
