"""Names for the integers that must not be mixed up, shared by every room.

Nothing here has behaviour; pyfuse3's own aliases are plain ints, so these are the project's.
"""

from __future__ import annotations

from typing import NewType

Ino = NewType("Ino", int)
"""Inode number; 1 is the root directory; never used again after the inode is gone."""

MediaOffset = NewType("MediaOffset", int)
"""Bytes from the start of the media."""

Lsn = NewType("Lsn", int)
"""Journal sequence number, one more for each record over the whole life of a store."""

ExtentId = NewType("ExtentId", int)
"""Number of an extent, unique over the life of a store; 0 stands for a hole."""

SegmentIndex = NewType("SegmentIndex", int)
"""Segment number, counted from 0 at the first segment."""

ROOT_INO = Ino(1)
