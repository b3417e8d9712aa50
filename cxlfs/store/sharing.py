"""Contents that become those of another file: references are copied, never bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cxlfs.errors import invariant

if TYPE_CHECKING:
    from cxlfs.native.maps import FileMap
    from cxlfs.store.leases import Leases


def share_whole(
    leases: Leases, source: FileMap, target: FileMap, *, close_slips: Callable[[], object]
) -> None:
    """Let an empty content refer to what another one has. The last extent may still be written to:
    by whoever fills the source, by whoever goes on with a content that shares it, or (what
    ``close_slips`` ends) by a program that stores by itself. They go on in another one.
    """
    size = source.size
    closing = (lambda: leases.close(source), leases.close_all, close_slips)
    shared = source.share(0, size, target, 0) if size else 0
    for close in closing:
        if shared is None:
            close()
            shared = source.share(0, size, target, 0)
    invariant(shared == size, "only leases and slips keep an extent of a content open")
    target.truncate(size)
