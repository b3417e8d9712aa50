"""Sources a store can live on, mapped: read, store, copy, write back, fence.

Never: the media format. What a store is made of begins in :mod:`cxlfs.format.layout`.
"""

from __future__ import annotations

from cxlfs.media.base import Media
from cxlfs.media.memory import MemoryMedia
from cxlfs.media.open import open_media
from cxlfs.media.simulated import SimulatedMedia
from cxlfs.native import Granularity

__all__ = ["Granularity", "Media", "MemoryMedia", "SimulatedMedia", "open_media"]
