"""The root rings: which metadata image and which journal make up the store now.

Never here: what an image or a journal contains.

Invariants
- A root is written to ring A, fenced, then to ring B, fenced: one valid ring is always enough.
- Generation g lies in slot g modulo the number of slots of both rings; generations only grow.
- A slot that was never written is all zero; any other slot without a valid root is damage, or a
  write that a crash interrupted (then the other ring's slot is valid).
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import numpy as np

from cxlfs.errors import MediaError, UnsupportedFormatError, invariant
from cxlfs.format import layout
from cxlfs.native import crc32c

if TYPE_CHECKING:
    from cxlfs.format.superblock import Superblock
    from cxlfs.media import Media

_SUMMED_BYTES = layout.ROOT_DTYPE.itemsize - 4
_NUMBERS = (
    "generation",
    "flags",
    "image_bytes",
    "image_lsn",
    "image_header_crc",
    "journal_segment",
    "journal_mirror",
    "journal_epoch",
    "journal_first_lsn",
    "next_epoch",
    "dirty_shutdown_known",
    "dirty_shutdown_count",
    "device_hash",
    "written_ns",
)
_COUNTERS = ("generation", "image_lsn", "journal_epoch", "journal_first_lsn", "next_epoch")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """One root; ``journal_segment`` is None after a clean close."""

    generation: int
    flags: int
    image_bytes: int
    image_lsn: int
    image_header_crc: int
    image_segments: tuple[int, ...]
    journal_segment: int | None
    journal_mirror: int | None
    journal_epoch: int
    journal_first_lsn: int
    next_epoch: int
    dirty_shutdown_known: int = 0
    dirty_shutdown_count: int = 0
    device_hash: int = 0
    written_ns: int = 0

    @property
    def in_use(self) -> bool:
        return bool(self.flags & layout.ROOT_IN_USE)

    @property
    def segments(self) -> tuple[int, ...]:
        """Every segment that the root names."""
        journal = (self.journal_segment, self.journal_mirror)
        return self.image_segments + tuple(index for index in journal if index is not None)


NOTHING = Root(
    generation=0,
    flags=0,
    image_bytes=0,
    image_lsn=0,
    image_header_crc=0,
    image_segments=(),
    journal_segment=None,
    journal_mirror=None,
    journal_epoch=0,
    journal_first_lsn=1,
    next_epoch=1,
)
"""What mkfs begins with: it is never written."""


@dataclasses.dataclass(frozen=True, slots=True)
class SlotState:
    """What reading one slot gave; neither root nor problem: never written."""

    ring: int
    slot: int
    media_offset: int
    root: Root | None
    problem: str | None


def encode(root: Root, uuid: bytes) -> bytes:
    row = np.zeros(1, dtype=layout.ROOT_DTYPE)
    row["magic"] = layout.ROOT_MAGIC
    row["uuid"] = np.void(uuid)
    for name in _NUMBERS:
        value = getattr(root, name)
        row[name] = layout.NO_SEGMENT if value is None else value
    invariant(len(root.image_segments) <= layout.IMAGE_SEGMENTS_MAX, "image has too many segments")
    row["image_segment_count"] = len(root.image_segments)
    row["image_segments"][0, : len(root.image_segments)] = root.image_segments
    row["crc"] = crc32c(row.tobytes()[:_SUMMED_BYTES])
    return row.tobytes()


def decode(data: bytes, superblock: Superblock, slot: int) -> Root | str:
    """The root, or what is wrong with it."""
    row = np.frombuffer(data, dtype=layout.ROOT_DTYPE, count=1)[0]
    if row["magic"] != layout.ROOT_MAGIC:
        return "no root magic"
    if int(row["crc"]) != crc32c(data[:_SUMMED_BYTES]):
        return "root checksum mismatch"
    if row["uuid"].tobytes() != superblock.uuid:
        return "the root belongs to another store"
    numbers = {name: int(row[name]) for name in _NUMBERS}
    if numbers["generation"] % superblock.ring_slots != slot:
        return f"generation {numbers['generation']} does not belong into slot {slot}"
    if any(numbers[name] >= layout.NUMBER_LIMIT for name in _COUNTERS):
        return "a counter beyond the limit"
    count = int(row["image_segment_count"])
    if count > layout.IMAGE_SEGMENTS_MAX:
        return "too many image segments"
    primary, mirror = (
        None if value == layout.NO_SEGMENT else value
        for value in (numbers.pop("journal_segment"), numbers.pop("journal_mirror"))
    )
    root = Root(
        image_segments=tuple(row["image_segments"][:count].tolist()),
        journal_segment=primary,
        journal_mirror=mirror,
        **numbers,
    )
    return _contradiction(root, superblock) or root


def _contradiction(root: Root, superblock: Superblock) -> str | None:
    """Why the segments that a root names cannot be right, if so."""
    named = root.segments
    if any(index >= superblock.segment_count for index in named) or len(set(named)) != len(named):
        return "the root names a segment that does not exist, or one twice"
    if (root.journal_segment is None) != (root.journal_mirror is None):
        return "the root names half a journal"
    room = len(root.image_segments) * superblock.segment_payload_bytes
    if not 0 < root.image_bytes <= room:
        return "the image is larger than its segments"
    return None


def read_slots(media: Media, superblock: Superblock) -> list[SlotState]:
    """Both rings, every slot."""
    states = []
    for ring, start in enumerate(superblock.ring_offsets):
        for slot in range(superblock.ring_slots):
            offset = start + slot * layout.SLOT_BYTES
            root: Root | None = None
            problem: str | None = None
            try:
                data = media.read(offset, layout.ROOT_DTYPE.itemsize)
            except MediaError as error:
                problem = error.message
            else:
                if data.count(0) != len(data):
                    found = decode(data, superblock, slot)
                    root, problem = (None, found) if isinstance(found, str) else (found, None)
            states.append(SlotState(ring, slot, offset, root, problem))
    return states


def candidates(states: list[SlotState]) -> list[Root]:
    """Valid roots, newest first, each generation once."""
    found = {state.root.generation: state.root for state in states if state.root is not None}
    return [found[generation] for generation in sorted(found, reverse=True)]


def require_known(root: Root) -> None:
    """Raise UnsupportedFormatError if a later program has written flags that are not known here."""
    unknown = root.flags & ~layout.ROOT_IN_USE
    if unknown:
        raise UnsupportedFormatError(
            f"root {root.generation} has flags that this program does not know ({unknown:#x})"
        )


def newer_root_may_be_lost(states: list[SlotState]) -> bool:
    """A slot is unreadable in both rings: the newest root may have been there."""
    damaged = [{s.slot for s in states if s.ring == ring and s.problem} for ring in (0, 1)]
    return bool(damaged[0] & damaged[1])


def complete(media: Media, superblock: Superblock, states: list[SlotState], root: Root) -> None:
    """Make ``root`` durable in both rings: a crash may have come between the two.

    The good copy is written back and fenced before the other one is touched: after a mere kill of
    the daemon it can be readable without being durable. Durable when it returns.
    """
    data = encode(root, superblock.uuid)
    slot = root.generation % superblock.ring_slots
    mine = [state for state in states if state.slot == slot]
    for state in mine:
        if state.root == root:
            media.write_back(state.media_offset, len(data))
    media.fence()
    for state in mine:
        if state.root != root:
            media.store(state.media_offset, data)
            media.write_back(state.media_offset, len(data))
            media.fence()


def spoil_torn(
    media: Media, superblock: Superblock, states: list[SlotState], generation: int
) -> None:
    """Keep what a crash left half written, where ``generation`` is to go, from being completed.

    A torn root and the next one in its place agree in most words: a second crash, in the middle of
    writing that one, could make the torn one whole, whose image is overwritten by then. Its
    checksum is therefore taken away first. The slot still counts as damaged. Durable when it
    returns.
    """
    slot = generation % superblock.ring_slots
    torn = [state for state in states if state.slot == slot and state.problem is not None]
    for state in torn:
        offset = state.media_offset + _SUMMED_BYTES
        media.store(offset, bytes(layout.ROOT_DTYPE.itemsize - _SUMMED_BYTES))
        media.write_back(offset, layout.ROOT_DTYPE.itemsize - _SUMMED_BYTES)
    if torn:
        media.fence()


def write(media: Media, superblock: Superblock, root: Root) -> None:
    """Write to ring A, fence, ring B, fence. Durable in both when it returns."""
    data = encode(dataclasses.replace(root, written_ns=time.time_ns()), superblock.uuid)
    slot = root.generation % superblock.ring_slots
    for start in superblock.ring_offsets:
        offset = start + slot * layout.SLOT_BYTES
        media.store(offset, data)
        media.write_back(offset, len(data))
        media.fence()
