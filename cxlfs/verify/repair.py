"""Repairing what can be undone: damaged copies of structures that have a good copy, and metadata
that can be written anew.

Never here: file data; anything on a mounted store; printing.

Invariants
- An action says which bytes it changes before anything is changed; a store into other bytes fails.
- Before the first store a saved copy of all those bytes is durable; ``undo`` puts them back.
- A good copy is only read. What is written in its twin's place equals it, or is what the store
  would write there itself.
- Interrupted anywhere, the store is no worse than before, and ``apply`` may be run again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from cxlfs.errors import CxlfsError, ReadOnlyError
from cxlfs.format import (
    image_search,
    journal_chain,
    journal_reader,
    layout,
    roots,
    segments,
    superblock,
)
from cxlfs.format.roots import Root
from cxlfs.format.segments import SegmentHeader
from cxlfs.format.superblock import Superblock
from cxlfs.media import Media
from cxlfs.store import Store, StoreOptions
from cxlfs.store.health import VerifyOutcome
from cxlfs.verify.findings import Finding
from cxlfs.verify.image_pass import Damage, sum_image
from cxlfs.verify.media_passes import (
    expected_generation,
    good_superblock_bytes,
    header_problem,
    headers_of_journal,
    headers_of_root,
)
from cxlfs.verify.overlay import GuardedMedia, OverlayMedia, Range
from cxlfs.verify.record import outcome_of
from cxlfs.verify.saved_copy import restore_saved_copy, write_saved_copy

_ROOTS_OF_RENEWAL = 2
"""Opening a store writes one root, closing it another."""
REWRITE_COPY: Final = "rewrite-copy"
BLANK_SLOT: Final = "blank-root-slot"
RENEW: Final = "renew-metadata"
RECORD: Final = "record-outcome"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RepairAction:
    """One thing that repairing does. ``ranges``: (media offset, length) of all that it changes.

    ``data``: what is written into the only range; None for RENEW and RECORD, which open and close
    the store; ``outcome``: what RECORD lets it remember. ``repairs``: ids of the findings that it
    answers.
    """

    id: str
    text: str
    ranges: tuple[Range, ...]
    repairs: tuple[str, ...]
    data: bytes | None = None
    outcome: VerifyOutcome | None = None

    @property
    def media_offset(self) -> int:
        """The lowest byte that is changed."""
        return min(offset for offset, _ in self.ranges)

    @property
    def length(self) -> int:
        """Bytes that are changed."""
        return sum(length for _, length in self.ranges)


# --- planning -------------------------------------------------------------------------------


def plan(media: Media, findings: Iterable[Finding]) -> list[RepairAction]:
    """What would be done about ``findings``, in this order; empty when nothing can be.

    Findings only say where to look: everything is read anew from ``media``, which may be open
    read-only and is not changed.
    """
    findings = list(findings)
    wanted = {finding.id for finding in findings if finding.repairable}
    if not wanted:
        return []
    overlay = OverlayMedia(media)
    places = {action.media_offset: action for action in _copies(media, wanted)}
    actions = [_as_if_done(overlay, action) for action in places.values()]
    if wanted & _RENEWED:
        renewal = _renewal(overlay, wanted)
        if renewal is not None:
            actions.append(renewal)
            if "root-lost" in wanted:
                actions.extend(_as_if_done(overlay, each) for each in _blank_slots(overlay))
    if actions:
        actions.extend(_recording(overlay, [f for f in findings if not f.repairable]))
    return actions


def _as_if_done(overlay: OverlayMedia, action: RepairAction) -> RepairAction:
    if action.data is not None:
        overlay.store(action.media_offset, action.data)
    return action


_RENEWED = {
    "root-lost",
    "fallback-journal-incomplete",
    "image-damaged",
    "image-fallback-damaged",
    "root-unusable",
}
"""Findings that go away when image, journal and root are written anew."""


def _copies(media: Media, wanted: set[str]) -> Iterator[RepairAction]:
    try:
        block, _ = superblock.choose(media)
    except CxlfsError:
        return
    if "superblock-copy-damaged" in wanted:
        yield from _superblock_copies(media, block)
    if "root-copy-damaged" in wanted:
        yield from _root_copies(media, block)
    if "root-missing" in wanted:
        yield from _rebuilt_root(media, block)
    found = roots.candidates(roots.read_slots(media, block))
    for root in found[:1] + [r for r in found if r.image_segments != found[0].image_segments][:1]:
        if "segment-header-damaged" in wanted:
            yield from _headers(media, block, root)
        if wanted & {"journal-copy-damaged", "journal-header-damaged"}:
            yield from _journals(media, block, root, wanted)
    if "segment-header-damaged" in wanted:
        yield from _data_headers(media, block)


def _rewrite(text: str, offset: int, data: bytes, finding_id: str) -> RepairAction:
    return RepairAction(
        id=REWRITE_COPY,
        text=f"{text}: {len(data)} bytes at media offset {offset:#x}",
        ranges=((offset, len(data)),),
        repairs=(finding_id,),
        data=data,
    )


def _differs(media: Media, offset: int, data: bytes) -> bool:
    try:
        return media.read(offset, len(data)) != data
    except CxlfsError:
        return True


def _superblock_copies(media: Media, block: Superblock) -> Iterator[RepairAction]:
    good = good_superblock_bytes(media, block)
    for number, offset in enumerate(block.copy_offsets):
        data = good + number.to_bytes(4, "little")
        if _differs(media, offset, data):
            text = f"rewrite superblock copy {number} from the others"
            yield _rewrite(text, offset, data, "superblock-copy-damaged")


def _root_copies(media: Media, block: Superblock) -> Iterator[RepairAction]:
    """Each slot that is good in one ring only; an unused one that is not blank in both."""
    slots = roots.read_slots(media, block)
    newest = max((s.root.generation for s in slots if s.root is not None), default=0)
    count = block.ring_slots
    for slot in range(count):
        pair = (slots[slot], slots[count + slot])
        good = max((s.root for s in pair if s.root), key=lambda r: r.generation, default=None)
        for state in pair:
            if good is not None and state.root != good:
                if state.root is not None and state.root.generation == good.generation:
                    continue  # they contradict each other: nobody knows which one is right
                data = roots.encode(good, block.uuid)
                ring = "AB"[state.ring]
                text = f"rewrite root {good.generation} in ring {ring} from the other ring"
                yield _rewrite(text, state.media_offset, data, "root-copy-damaged")
            elif good is None and state.problem is not None and _is_unused(newest, slot, count):
                data = bytes(layout.ROOT_DTYPE.itemsize)
                text = f"blank slot {slot} of ring {'AB'[state.ring]}, which was never used"
                yield _rewrite(text, state.media_offset, data, "root-copy-damaged")


def _rebuilt_root(media: Media, block: Superblock) -> Iterator[RepairAction]:
    """Yield rewrites of every root slot: one for the image that was found, all others blank."""
    slots = roots.read_slots(media, block)
    root = None if roots.candidates(slots) else image_search.find_root(media, block)
    if root is None:
        return
    for state in slots:
        ring, size = "AB"[state.ring], layout.ROOT_DTYPE.itemsize
        if state.slot == root.generation % block.ring_slots:
            data = roots.encode(root, block.uuid)
            text = f"write a root for the image of record {root.image_lsn} to ring {ring}"
        else:
            data, text = bytes(size), f"blank slot {state.slot} of ring {ring}"
        if _differs(media, state.media_offset, data):
            yield _rewrite(text, state.media_offset, data, "root-missing")


def _is_unused(newest: int, slot: int, count: int) -> bool:
    """No root was written there yet: generations begin with 1, in slot 1."""
    return newest - (newest - slot) % count <= 0


def _headers(media: Media, block: Superblock, root: Root) -> Iterator[RepairAction]:
    """Of a journal from its other copy; of an image when the image itself is good."""
    expected = headers_of_root(root)
    journal = None
    if root.journal_segment is not None and root.journal_mirror is not None:
        journal = journal_reader.read_header(
            media, block, root.journal_segment, root.journal_mirror, root.journal_epoch
        )
    image_is_good = not any(isinstance(item, Damage) for item in sum_image(media, block, root))
    for index, wanted in expected.items():
        if header_problem(media, block, wanted) is None:
            continue
        if wanted.role == layout.ROLE_JOURNAL:
            if journal is None:
                continue
            header = dataclasses.replace(
                journal,
                index=index,
                partner=wanted.partner,
                copy_number=wanted.copy_number,
            )
        elif image_is_good:
            header = _image_header(media, block, root, wanted)
        else:
            continue
        role = layout.ROLE_NAMES[wanted.role]
        text = f"rewrite the header of {role} segment {index}"
        data = segments.encode(header, block.uuid)
        yield _rewrite(text, block.segment_offset(index), data, "segment-header-damaged")


def _image_header(
    media: Media, block: Superblock, root: Root, wanted: SegmentHeader
) -> SegmentHeader:
    """Return the header of a part of an image, by that of another part if one is good."""
    for part, index in enumerate(root.image_segments):
        other = segments.read(media, block, index)
        if isinstance(other, SegmentHeader) and (other.role, other.first_lsn) == (
            wanted.role,
            part,
        ):
            epoch = other.epoch - part + wanted.first_lsn
            return dataclasses.replace(wanted, epoch=epoch, nonce=other.nonce)
    return dataclasses.replace(wanted, epoch=_plausible_epoch(media, block, wanted.index, root))


def _data_headers(media: Media, block: Superblock) -> Iterator[RepairAction]:
    """Nothing but their role is read from them."""
    try:
        store = Store.open(media, StoreOptions(read_only=True))
    except CxlfsError:
        return
    try:
        indexes = store.volume.space.data_segments()
        newest = store.volume.root
    finally:
        store.close()
    for index in indexes:
        wanted = SegmentHeader(role=layout.ROLE_DATA, index=index, epoch=0, nonce=0)
        if header_problem(media, block, wanted) is not None:
            header = dataclasses.replace(
                wanted, epoch=_plausible_epoch(media, block, index, newest)
            )
            text = f"rewrite the header of data segment {index}"
            data = segments.encode(header, block.uuid)
            yield _rewrite(text, block.segment_offset(index), data, "segment-header-damaged")


def _plausible_epoch(media: Media, block: Superblock, index: int, root: Root) -> int:
    """The epoch that still stands in the damaged header if it can be right, else 0."""
    field = layout.SEGMENT_DTYPE.fields
    offset = 0 if field is None else field["epoch"][1]
    try:
        data = media.read(block.segment_offset(index) + offset, 8)
    except CxlfsError:
        return 0
    epoch = int.from_bytes(data, "little")
    return epoch if epoch < root.next_epoch else 0


def _journals(
    media: Media, block: Superblock, root: Root, wanted: set[str]
) -> Iterator[RepairAction]:
    """Yield rewrites along the journals of a root.

    They replace records and continuations that are bad in one copy, and bad headers of journals
    that the root does not name.
    """
    if root.journal_segment is None or root.journal_mirror is None:
        return
    header = journal_reader.read_header(
        media, block, root.journal_segment, root.journal_mirror, root.journal_epoch
    )
    headers = segments.read_all(media, block)
    lsn = root.image_lsn + 1
    while header is not None:
        if header.epoch != root.journal_epoch and "journal-header-damaged" in wanted:
            yield from _journal_headers(media, block, header)
        reader = journal_reader.SegmentReader(media, block, header, expected_lsn=lsn, compare=True)
        for _record in reader:
            pass
        if "journal-copy-damaged" in wanted:
            yield from _records(media, reader.scan)
        lsn = reader.scan.last_lsn + 1
        header = journal_chain.find_next(media, block, headers, reader.scan)


def _journal_headers(
    media: Media, block: Superblock, header: SegmentHeader
) -> Iterator[RepairAction]:
    """Yield rewrites of bad headers from the other copy or the continuation before them."""
    for wanted in headers_of_journal(header):
        if header_problem(media, block, wanted) is not None:
            text = f"rewrite the header of journal segment {wanted.index}"
            data = segments.encode(wanted, block.uuid)
            offset = block.segment_offset(wanted.index)
            yield _rewrite(text, offset, data, "journal-header-damaged")


def _records(media: Media, scan: journal_reader.SegmentScan) -> Iterator[RepairAction]:
    for bad in (*scan.bad_copies, *scan.bad_continuations):
        if bad.contradicts:
            continue
        data = media.read(bad.good_media_offset, bad.length)
        what = f"record {bad.lsn}" if bad in scan.bad_copies else "the continuation"
        name = ("primary", "mirror")[bad.copy_number]
        text = f"rewrite {what} in the {name} copy of the journal"
        yield _rewrite(text, bad.media_offset, data, "journal-copy-damaged")


# --- writing metadata anew ------------------------------------------------------------------


def _renewal(overlay: OverlayMedia, wanted: set[str]) -> RepairAction | None:
    """Opening and closing the store, tried on a copy in memory; None when it does not come up."""
    ranges = _tried(overlay, None)
    if ranges is None:
        return None
    return RepairAction(
        id=RENEW,
        text="write metadata image, journal and root anew, into free segments: "
        f"{_amount_of(ranges)}",
        ranges=ranges,
        repairs=tuple(sorted(wanted & _RENEWED)),
    )


def _recording(overlay: OverlayMedia, remaining: list[Finding]) -> Iterator[RepairAction]:
    """What a store that remembers findings of structure has to remember instead, if it does."""
    try:
        store = Store.open(overlay, StoreOptions(read_only=True))
    except CxlfsError:
        return
    remembered = store.health.last_verify
    store.close()
    if remembered is None or not remembered.structure_findings:
        return
    outcome = outcome_of(remaining, structure_only=True, complete=True)
    ranges = _tried(overlay, outcome)
    if ranges is not None:
        yield RepairAction(
            id=RECORD,
            text="let the store remember what is left instead of what it remembers: "
            f"{_amount_of(ranges)}",
            ranges=ranges,
            repairs=(),
            outcome=outcome,
        )


def _tried(overlay: OverlayMedia, outcome: VerifyOutcome | None) -> tuple[Range, ...] | None:
    """What opening and closing the store changes; it stays changed in the copy in memory."""
    overlay.ranges.clear()
    try:
        _renew(overlay, outcome)
    except CxlfsError:
        return None
    return tuple(merge_ranges(overlay.ranges))


def _amount_of(ranges: tuple[Range, ...]) -> str:
    return f"{sum(length for _, length in ranges)} bytes in {len(ranges)} places"


def _renew(media: Media, outcome: VerifyOutcome | None) -> None:
    """Raises ReadOnlyError when the store may not be written, and what opening raises."""
    store = Store.open(media)
    try:
        if store.read_only:
            raise ReadOnlyError(f"the store is read-only: {store.read_only_reason}")
        if outcome is not None:
            store.health.verified(outcome)
    finally:
        store.close()


def _blank_slots(media: Media) -> Iterator[RepairAction]:
    """Slots without the root they should have in either ring; newer ones are durable by now."""
    block, _ = superblock.choose(media)
    slots = roots.read_slots(media, block)
    newest = roots.candidates(slots)[0]
    count = block.ring_slots
    for slot in range(count):
        pair = (slots[slot], slots[count + slot])
        generation = expected_generation(newest, slot, count)
        if any(state.root is not None and state.root.generation == generation for state in pair):
            continue
        for state in pair:
            if state.problem is not None or state.root is not None:
                offset, data = state.media_offset, bytes(layout.ROOT_DTYPE.itemsize)
                text = f"blank the lost slot {slot} of ring {'AB'[state.ring]}"
                yield RepairAction(
                    id=BLANK_SLOT,
                    text=f"{text}: {len(data)} bytes at media offset {offset:#x}",
                    ranges=((offset, len(data)),),
                    repairs=("root-lost",),
                    data=data,
                )


# --- doing ----------------------------------------------------------------------------------


def apply(media: Media, actions: list[RepairAction], save_path: Path) -> None:
    """Save what the actions change to ``save_path`` (which must not exist), then do them. Durable.

    The media must be open for writing by this process alone. Raises SavedCopyError,
    MediaError, and what opening a store raises; then ``undo`` puts back what was changed.
    """
    if not actions:
        return
    ranges = merge_ranges(r for action in actions for r in action.ranges)
    write_saved_copy(
        media,
        ranges,
        [action.text for action in actions],
        save_path,
        roots_written=_ROOTS_OF_RENEWAL * sum(action.data is None for action in actions),
    )
    guarded = GuardedMedia(media, ranges)
    for action in actions:
        if action.data is None:
            _renew(guarded, action.outcome)
        else:
            ((offset, _),) = action.ranges
            guarded.store(offset, action.data)
            guarded.persist(offset, len(action.data))


def undo(media: Media, save_path: Path) -> int:
    """Put back what :func:`apply` saved; returns how many bytes. Durable when it returns.

    Raises SavedCopyError when the file is damaged or of another store, or when the store was
    written after the repair: nothing was changed then.
    """
    return restore_saved_copy(media, save_path)


def merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Sorted, without overlap; ranges that touch become one."""
    merged: list[Range] = []
    for offset, length in sorted(ranges):
        if merged and offset <= merged[-1][0] + merged[-1][1]:
            start = merged[-1][0]
            merged[-1] = (start, max(merged[-1][1], offset + length - start))
        else:
            merged.append((offset, length))
    return merged
