"""The superblock: what a store is and where its parts lie; written by mkfs, read at every open.

Never here: anything that changes during the life of a store (that is ``roots``).

Invariants
- Four copies in four different units, two at each end; all equal but for the copy number.
- mkfs writes copy 0 last: a store without a valid copy 0 and with older copies elsewhere is an
  interrupted mkfs or a damaged one, and is opened only when two copies agree.
- A copy counts only if its checksum, magic, own place and the geometry's arithmetic are right.
- A copy of a later version is told from a damaged one by its frame (see ``frame``), and of two
  versions the later one counts as soon as two copies have it: an upgrade that was interrupted is
  either not begun or to be finished, never undecided.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import time
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from cxlfs.errors import (
    CorruptionError,
    MediaError,
    NotACxlfsError,
    UnsupportedFormatError,
    UsageError,
)
from cxlfs.format import layout
from cxlfs.format.frame import (
    COPY_NUMBER_BYTES,
    TAIL_BYTES,
    Frame,
    claimed_version,
    read_bytes,
    read_frame,
    unsupported,
)
from cxlfs.native import crc32c
from cxlfs.units import MIB, format_size

if TYPE_CHECKING:
    from cxlfs.media import Media

_BYTES = layout.SUPERBLOCK_DTYPE.itemsize
_SUMMED_BYTES = _BYTES - TAIL_BYTES
_NUMBERS = (
    "format_version",
    "compat",
    "read_only_compat",
    "incompat",
    "created_ns",
    "size_bytes",
    "segment_size_bytes",
    "first_segment_offset",
    "segment_count",
    "unit_bytes",
    "chunk_bytes",
    "ring_slots",
)
"""Fields with one name in the structure and in a Superblock, taken over as they are."""
_QUORUM = 2
"""So many copies of a later version make it the store's version."""
_VERSION_MAX = 255
"""What a copy with a wrong checksum says beyond this is damage, not a later version."""
SEGMENTS_MIN = 16
"""Three metadata sets of three segments (two kept, one being written), the cleaner's, and data."""
SEGMENTS_PER_STORE = 512
"""A segment is this part of a store: metadata then takes below 3 % of it (docs/format.md)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Superblock:
    """One valid superblock; ``uuid`` 16 bytes, sizes and offsets in bytes."""

    uuid: bytes
    label: str
    created_ns: int
    size_bytes: int
    segment_size_bytes: int
    first_segment_offset: int
    segment_count: int
    unit_bytes: int
    chunk_bytes: int
    ring_slots: int
    compat: int = 0
    read_only_compat: int = 0
    incompat: int = 0
    format_version: int = layout.FORMAT_VERSION
    device_uuid: bytes = bytes(16)

    @property
    def segment_payload_bytes(self) -> int:
        return self.segment_size_bytes - layout.SEGMENT_HEADER_BYTES

    @property
    def copy_offsets(self) -> tuple[int, int, int, int]:
        return copy_offsets(self.size_bytes, self.unit_bytes)

    @property
    def ring_offsets(self) -> tuple[int, int]:
        """Where the two root rings begin: in the second unit and in the last but one."""
        copies = self.copy_offsets
        return copies[1] + layout.SLOT_BYTES, copies[2] + layout.SLOT_BYTES

    def segment_offset(self, index: int) -> int:
        return self.first_segment_offset + index * self.segment_size_bytes

    def must_be_read_only(self) -> bool:
        """The store has a feature that this program may read with but not write."""
        return bool(self.read_only_compat & ~layout.KNOWN_READ_ONLY_COMPAT)


@dataclasses.dataclass(frozen=True, slots=True)
class CopyState:
    """What reading one superblock copy gave: ``problem`` is None for a good one.

    ``frame``: of a copy that counts; there is no ``superblock`` where this program lacks what the
    rest of it needs. ``claimed_version``: what a damaged one says.
    """

    number: int
    media_offset: int
    superblock: Superblock | None
    problem: str | None
    frame: Frame | None = None
    claimed_version: int = 0


def copy_offsets(size_bytes: int, unit_bytes: int) -> tuple[int, int, int, int]:
    """Where the four copies lie: the first two units and the last two."""
    return 0, unit_bytes, size_bytes - 2 * unit_bytes, size_bytes - unit_bytes


def plan_geometry(
    media_size_bytes: int,
    *,
    label: str = "",
    uuid: bytes | None = None,
    segment_size_bytes: int | None = None,
    unit_bytes: int = layout.UNIT_BYTES,
    chunk_bytes: int = layout.CHUNK_BYTES,
) -> Superblock:
    """The superblock of a new store; raises UsageError when the media is too small for one."""
    size_bytes = media_size_bytes // unit_bytes * unit_bytes
    if segment_size_bytes is None:
        part = max(size_bytes // SEGMENTS_PER_STORE, 1)
        segment_size_bytes = 1 << (part - 1).bit_length()
        segment_size_bytes = max(segment_size_bytes, layout.SEGMENT_SIZE_MIN)
        segment_size_bytes = min(segment_size_bytes, layout.SEGMENT_SIZE_MAX)
    _check_segment_size(segment_size_bytes, unit_bytes)
    count = (size_bytes - 4 * unit_bytes) // segment_size_bytes
    if count < SEGMENTS_MIN:
        least = SEGMENTS_MIN * segment_size_bytes + 4 * unit_bytes
        raise UsageError(
            f"{format_size(media_size_bytes)} is too small for a store",
            next_step=f"use at least {format_size(least)}",
        )
    if len(label.encode()) > layout.LABEL_BYTES:
        raise UsageError(
            f"the label is longer than {layout.LABEL_BYTES} bytes", next_step="choose a shorter one"
        )
    return Superblock(
        uuid=uuid if uuid is not None else os.urandom(16),
        label=label,
        created_ns=time.time_ns(),
        size_bytes=size_bytes,
        segment_size_bytes=segment_size_bytes,
        first_segment_offset=2 * unit_bytes,
        segment_count=count,
        unit_bytes=unit_bytes,
        chunk_bytes=chunk_bytes,
        ring_slots=min(layout.RING_SLOTS_MAX, unit_bytes // layout.SLOT_BYTES - 1),
        device_uuid=os.urandom(16),
    )


def _check_segment_size(segment_size_bytes: int, unit_bytes: int) -> None:
    least = layout.SEGMENT_SIZE_MIN
    if unit_bytes == layout.UNIT_BYTES_TEST:
        least = layout.SEGMENT_SIZE_TEST_MIN
    power_of_two = segment_size_bytes & (segment_size_bytes - 1) == 0
    if not power_of_two or not least <= segment_size_bytes <= layout.SEGMENT_SIZE_MAX:
        raise UsageError(
            f"a segment cannot have {segment_size_bytes} bytes",
            next_step=f"use a power of two from {least // MIB} MiB to 64 MiB",
        )


def encode(superblock: Superblock, number: int) -> bytes:
    """The 512 bytes of copy ``number``."""
    row = np.zeros(1, dtype=layout.SUPERBLOCK_DTYPE)
    row["magic"] = layout.SUPERBLOCK_MAGIC
    row["structure_bytes"] = layout.SUPERBLOCK_DTYPE.itemsize
    row["label"] = np.void(superblock.label.encode().ljust(layout.LABEL_BYTES, b"\0"))
    row["uuid"] = np.void(superblock.uuid)
    for name in _NUMBERS:
        row[name] = getattr(superblock, name)
    row["device_count"] = 1
    row["devices"][0, 0] = (superblock.device_uuid, 0, superblock.size_bytes)
    row["crc"] = crc32c(row.tobytes()[:_SUMMED_BYTES])
    row["copy_number"] = number
    return row.tobytes()


def decode(data: bytes, *, media_size_bytes: int) -> Superblock:
    """Check and read one copy.

    Raises NotACxlfsError (no magic), CorruptionError (checksum, arithmetic),
    UnsupportedFormatError (version, features), MediaError (the source is smaller than the store).
    """
    frame = read_frame(data)
    if frame.format_version > layout.FORMAT_VERSION or frame.incompat & ~layout.KNOWN_INCOMPAT:
        raise unsupported(frame)
    row = np.frombuffer(data, dtype=layout.SUPERBLOCK_DTYPE, count=1)[0]
    if int(row["device_count"]) != 1:
        raise unsupported(frame)
    superblock = Superblock(
        uuid=row["uuid"].tobytes(),
        label=row["label"].tobytes().rstrip(b"\0").decode(errors="replace"),
        device_uuid=row["devices"][0]["device_uuid"].tobytes(),
        **{name: int(row[name]) for name in _NUMBERS},
    )
    _check_arithmetic(superblock)
    if superblock.size_bytes > media_size_bytes:
        raise MediaError(
            f"the source has {media_size_bytes} bytes, but the store on it needs "
            f"{superblock.size_bytes}: it shrank or was cut",
            next_step="restore the source to its full size; no data was changed",
        )
    return superblock


def _check_arithmetic(superblock: Superblock) -> None:
    s = superblock
    unit_known = s.unit_bytes in (layout.UNIT_BYTES, layout.UNIT_BYTES_TEST)
    end = s.first_segment_offset + s.segment_count * s.segment_size_bytes
    right = (
        unit_known
        and s.size_bytes % s.unit_bytes == 0
        and s.first_segment_offset == 2 * s.unit_bytes
        and s.segment_count >= SEGMENTS_MIN
        and end <= s.size_bytes - 2 * s.unit_bytes
        and 2 <= s.ring_slots <= layout.RING_SLOTS_MAX
        and s.ring_slots * layout.SLOT_BYTES + layout.SLOT_BYTES <= s.unit_bytes
        and 4096 <= s.chunk_bytes <= (1 << 20)
        and s.chunk_bytes & (s.chunk_bytes - 1) == 0
    )
    if right:
        try:
            _check_segment_size(s.segment_size_bytes, s.unit_bytes)
        except UsageError:
            right = False
    if not right:
        raise CorruptionError("superblock geometry contradicts itself", structure="superblock")


def read_copies(media: Media) -> list[CopyState]:
    """Every place where a copy may lie, good or bad; the place found first fixes the others."""
    size = media.size_bytes
    states: list[CopyState] = []
    seen: set[int] = set()
    for unit in (layout.UNIT_BYTES, layout.UNIT_BYTES_TEST):
        end = size // unit * unit
        for number, offset in enumerate(copy_offsets(end, unit)):
            _read_copy_once(media, number, offset, seen, states)
    for found in [s.superblock for s in states if s.superblock is not None]:
        for number, offset in enumerate(found.copy_offsets):
            _read_copy_once(media, number, offset, seen, states)
    good = next((s.superblock for s in states if s.superblock is not None), None)
    if good is None:
        return states
    places = {offset: number for number, offset in enumerate(good.copy_offsets)}
    kept = [s for s in states if s.media_offset in places]
    return sorted(kept, key=lambda s: s.number)


def _read_copy_once(
    media: Media, number: int, offset: int, seen: set[int], states: list[CopyState]
) -> None:
    if offset in seen or offset < 0 or offset + layout.SUPERBLOCK_DTYPE.itemsize > media.size_bytes:
        return
    seen.add(offset)
    data, frame = b"", None
    try:
        data = read_bytes(media, offset)
        frame = read_frame(data)
        superblock = decode(data, media_size_bytes=media.size_bytes)
        stored = int.from_bytes(data[_BYTES - COPY_NUMBER_BYTES : _BYTES], "little")
        if offset not in superblock.copy_offsets:
            states.append(CopyState(number, offset, None, "a copy in a place where none belongs"))
            return
        number = superblock.copy_offsets.index(offset)
        problem = None if stored == number else f"copy number {stored}, expected {number}"
        states.append(CopyState(number, offset, superblock, problem, frame))
    except UnsupportedFormatError as error:
        states.append(CopyState(number, offset, None, error.message, frame))
    except (NotACxlfsError, CorruptionError) as error:
        claimed = claimed_version(data) if isinstance(error, CorruptionError) else 0
        states.append(CopyState(number, offset, None, error.message, claimed_version=claimed))
    except MediaError as error:
        if error.offset is None:
            raise
        states.append(CopyState(number, offset, None, error.message))


def choose(media: Media) -> tuple[Superblock, list[CopyState]]:
    """The superblock that the copies agree on, and the state of each copy.

    Raises NotACxlfsError, UnsupportedFormatError, MediaError, CorruptionError (they disagree).
    """
    if media.size_bytes < 4 * layout.UNIT_BYTES_TEST:
        raise NotACxlfsError(f"{format_size(media.size_bytes)} is too small to hold a store")
    states = read_copies(media)
    good = [state for state in states if state.frame is not None]
    if not good:
        raise _nothing_good(states)
    best = _elect(good)
    if isinstance(best, Frame):
        error = unsupported(best)
        if any(s.frame is not None and s.frame.rank < best.rank for s in good):
            raise UnsupportedFormatError(
                f"{error.message}; its upgrade was interrupted",
                next_step="use a newer cxlfs: it finishes the upgrade",
            )
        raise error
    return best, states


def _nothing_good(states: list[CopyState]) -> NotACxlfsError | UnsupportedFormatError:
    claimed = [s.claimed_version for s in states]
    later = [each for each in claimed if layout.FORMAT_VERSION < each <= _VERSION_MAX]
    if any(later.count(version) >= _QUORUM for version in later):
        return UnsupportedFormatError(
            f"the store says that it has format version {later[0]}, and this program knows "
            f"versions up to {layout.FORMAT_VERSION}",
            next_step="use a newer cxlfs; if it finds the superblock damaged: cxlfs dump SOURCE "
            "superblock",
        )
    if any(s.problem and "checksum" in s.problem for s in states):
        return NotACxlfsError(
            "every superblock copy is damaged",
            next_step="keep the source as it is and run cxlfs dump SOURCE superblock",
        )
    return NotACxlfsError("this is not a cxlfs store")


def _elect(good: list[CopyState]) -> Superblock | Frame:
    """What the copies agree on. Raises CorruptionError when they contradict each other.

    Of one store, the latest version that two copies have: an upgrade in place writes one copy after
    the other. Without two alike of any, the earliest: nothing has been changed for a later one.
    """
    stores = collections.Counter(s.frame.uuid for s in good if s.frame is not None)
    uuid = _most_common(stores)
    frames = [s.frame for s in good if s.frame is not None and s.frame.uuid == uuid]
    ranks = collections.Counter(frame.rank for frame in frames)
    agreed = [rank for rank, count in ranks.items() if count >= _QUORUM]
    rank = max(agreed) if agreed else min(ranks)
    return _most_common(
        collections.Counter(
            s.superblock or s.frame
            for s in good
            if s.frame is not None and s.frame.uuid == uuid and s.frame.rank == rank
        )
    )


_Voted = TypeVar("_Voted")


def _most_common(votes: collections.Counter[_Voted]) -> _Voted:
    """Raises CorruptionError for a tie."""
    (best, count), *others = votes.most_common()
    if others and others[0][1] == count:
        raise CorruptionError(
            "the superblock copies belong to different stores",
            structure="superblock",
            next_step="run cxlfs dump SOURCE superblock; mkfs --force makes a new store",
        )
    return best


def write(media: Media, superblock: Superblock) -> None:
    """Write all copies, copy 0 last and after a fence. Durable when it returns."""
    offsets = superblock.copy_offsets
    for number in (3, 2, 1):
        media.store(offsets[number], encode(superblock, number))
        media.write_back(offsets[number], layout.SUPERBLOCK_DTYPE.itemsize)
    media.fence()
    media.store(offsets[0], encode(superblock, 0))
    media.write_back(offsets[0], layout.SUPERBLOCK_DTYPE.itemsize)
    media.fence()


def erase(media: Media, superblock: Superblock) -> None:
    """Take away all copies, then both rings, before a new store is made over an old one.

    Rings last: an old superblock over half a ring would show the old store as it was once.
    """
    blank = bytes(layout.SUPERBLOCK_DTYPE.itemsize)
    for offset in superblock.copy_offsets:
        media.store(offset, blank)
        media.write_back(offset, len(blank))
    media.fence()
    for ring in superblock.ring_offsets:
        blank_ring = bytes(superblock.ring_slots * layout.SLOT_BYTES)
        media.store(ring, blank_ring)
        media.write_back(ring, len(blank_ring))
    media.fence()
