"""Media in anonymous memory: for tests, and for trying things out. Nothing survives the process."""

from __future__ import annotations

from cxlfs.media.base import Media
from cxlfs.native import Granularity, MappedRegion


class MemoryMedia(Media):
    """``size_bytes`` of zeros that behave at ``granularity``."""

    def __init__(
        self, size_bytes: int, granularity: Granularity = Granularity.LINE, *, kind: str = "memory"
    ) -> None:
        handle = MappedRegion.anonymous_handle(size_bytes, granularity=granularity)
        super().__init__(handle, kind=kind, path=f"({kind})")
