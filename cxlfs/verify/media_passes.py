"""Passes 1 to 3: superblock copies, root rings, segment headers.

Never here: what records or images contain.

Invariants
- What a crash may leave behind and the next opening overwrites is no finding: the second ring one
  root behind, and a torn slot where the next root goes. On a mounted store both are findings.
"""

from __future__ import annotations

import collections
import dataclasses

from cxlfs.errors import CxlfsError, MediaError
from cxlfs.format import frame, image_search, journal_reader, layout, segments, superblock
from cxlfs.format.roots import Root, SlotState
from cxlfs.format.segments import SegmentHeader
from cxlfs.format.superblock import Superblock
from cxlfs.media import Media
from cxlfs.store.space import State
from cxlfs.verify.context import Amount, Context, Steps
from cxlfs.verify.findings import ERROR, WARNING, Finding, make

HEADERS_AT_ONCE = 256
_NUMBER_BYTES = 4

# --- 1: superblock --------------------------------------------------------------------------


def check_superblock(context: Context) -> Steps:
    """Finds the superblock that the copies agree on, and those that do not agree."""
    try:
        block, _ = superblock.choose(context.media)
    except CxlfsError as error:
        yield make("superblock-unusable", error.message)
        if context.superblock is None:
            return
        block = context.superblock
    context.superblock = block
    good = good_superblock_bytes(context.media, block)
    for number, offset in enumerate(block.copy_offsets):
        problem = _copy_problem(context.media, offset, number, good)
        if problem is not None:
            message = f"superblock copy {number}: {problem}"
            yield make("superblock-copy-damaged", message, media_offset=offset)
    yield Amount(layout.SUPERBLOCK_COPIES, layout.SUPERBLOCK_COPIES)


def good_superblock_bytes(media: Media, block: Superblock) -> bytes:
    """What most copies of this superblock say, without the copy number."""
    votes: collections.Counter[bytes] = collections.Counter()
    for offset in block.copy_offsets:
        try:
            data = frame.read_bytes(media, offset)
            if superblock.decode(data, media_size_bytes=media.size_bytes) == block:
                votes[data[:-_NUMBER_BYTES]] += 1
        except CxlfsError:
            continue
    if not votes:
        return superblock.encode(block, 0)[:-_NUMBER_BYTES]
    return votes.most_common(1)[0][0]


def _copy_problem(media: Media, offset: int, number: int, good: bytes) -> str | None:
    try:
        data = frame.read_bytes(media, offset)
    except MediaError as error:
        return error.message
    return superblock_problem(data, number, good, media.size_bytes)


def superblock_problem(data: bytes, number: int, good: bytes, media_bytes: int) -> str | None:
    """Why these bytes are not copy ``number`` of the superblock ``good``; None when they are."""
    if data == good + number.to_bytes(_NUMBER_BYTES, "little"):
        return None
    try:
        superblock.decode(data, media_size_bytes=media_bytes)
    except CxlfsError as error:
        return error.message
    if data[:-_NUMBER_BYTES] == good:
        stored = int.from_bytes(data[-_NUMBER_BYTES:], "little")
        return f"it says that it is copy {stored}"
    return "it describes another store than most copies do"


# --- 2: roots -------------------------------------------------------------------------------


def check_roots(context: Context) -> Steps:
    """Finds the newest root, and every slot that does not hold what it should."""
    block = context.superblock
    if block is None:
        return
    context.read_roots()
    newest = context.newest
    if newest is None:
        yield _no_root(context.media, block)
        return
    count = block.ring_slots
    for slot in range(count):
        pair = (context.slots[slot], context.slots[count + slot])
        finding = _judge_slot(context, newest, pair)
        if finding is not None:
            yield finding
    yield from _check_continuation(context, block, newest)
    yield Amount(2 * count, 2 * count)


def _no_root(media: Media, block: Superblock) -> Finding:
    found = image_search.find_root(media, block)
    if found is None:
        return make("root-missing", "no valid root in either ring")
    offset = block.segment_offset(found.image_segments[0])
    message = f"no valid root in either ring; an image of record {found.image_lsn} is there"
    return make("root-missing", message, severity=WARNING, media_offset=offset)


def expected_generation(newest: Root, slot: int, count: int) -> int:
    """Of the root that the slot holds when nothing is wrong; below 1: none was written there."""
    return newest.generation - (newest.generation - slot) % count


def _judge_slot(
    context: Context, newest: Root, pair: tuple[SlotState, SlotState]
) -> Finding | None:
    first, second = pair
    a, b = first.root, second.root
    count = len(context.slots) // 2
    generation = expected_generation(newest, first.slot, count)
    newest_found = max((root.generation for root in (a, b) if root is not None), default=-1)
    if newest_found < generation and generation > 0:
        # Blank in both: nothing was there, or repairing took it away. Roots that were lost so are
        # missed by what they lead to (passes 4 to 6, and _check_continuation).
        is_blank = all(state.root is None and state.problem is None for state in pair)
        return None if is_blank else _judge_lost_slot(context, pair, generation)
    if generation <= 0:
        return _judge_unused_slot(context, newest, pair)
    if a == b:
        return None
    if a is not None and b is not None and a.generation == b.generation:
        message = f"the rings hold two different roots of generation {a.generation}"
        return make("root-rings-contradict", message, media_offset=second.media_offset)
    bad = first if a is None or a.generation < newest_found else second
    if _may_be_torn(context, newest, bad, count) or (
        newest_found == newest.generation and _may_be_missing(context, bad, count)
    ):
        return None
    reason = bad.problem or ("it is outdated" if bad.root is not None else "it was never written")
    message = f"root {newest_found} in ring {'AB'[bad.ring]}: {reason}"
    return make("root-copy-damaged", message, media_offset=bad.media_offset)


def _may_be_torn(context: Context, newest: Root, bad: SlotState, count: int) -> bool:
    """The store was not closed, and its last root, or the next one, was being written there."""
    following = bad.ring == 0 and bad.slot == (newest.generation + 1) % count
    last = bad.ring == 1 and bad.slot == newest.generation % count
    crashed = newest.in_use and not context.live
    return crashed and bad.problem is not None and (following or last)


def _may_be_missing(context: Context, bad: SlotState, count: int) -> bool:
    """The newest root was not written to the second ring any more: what was there before is."""
    newest, before = context.newest, bad.root
    if context.live or newest is None or bad.ring == 0 or bad.problem is not None:
        return False
    generation = newest.generation - count
    return generation < 1 if before is None else before.generation == generation


def _judge_unused_slot(
    context: Context, newest: Root, pair: tuple[SlotState, SlotState]
) -> Finding | None:
    bad = next((state for state in pair if state.problem is not None), None)
    if bad is None:
        return None
    if _may_be_torn(context, newest, bad, len(context.slots) // 2):
        return None
    message = f"slot {bad.slot} of ring {'AB'[bad.ring]} was never used: {bad.problem}"
    return make("root-copy-damaged", message, media_offset=bad.media_offset)


def _judge_lost_slot(
    context: Context, pair: tuple[SlotState, SlotState], generation: int
) -> Finding:
    store = context.store()
    harmless = store is not None and store.recovery.lost is None
    reasons = " / ".join(
        state.problem or ("blank" if state.root is None else f"root {state.root.generation}")
        for state in pair
    )
    message = f"root {generation} is good in neither ring ({reasons})"
    return make(
        "root-lost",
        message,
        severity=None if harmless else ERROR,
        media_offset=pair[0].media_offset,
    )


def _check_continuation(context: Context, block: Superblock, newest: Root) -> Steps:
    """A store that was closed has no journal behind its newest root: else that root is outdated."""
    if newest.in_use or context.live:
        return
    headers = [
        header
        for header in segments.read_all(context.media, block)
        if header.role == layout.ROLE_JOURNAL
        and header.epoch >= newest.next_epoch
        and header.first_lsn == newest.image_lsn + 1
    ]
    for header in headers:
        primary = journal_reader.as_primary(header)
        reader = journal_reader.SegmentReader(
            context.media, block, primary, expected_lsn=header.first_lsn
        )
        if next(iter(reader), None) is not None:
            message = (
                f"root {newest.generation} says that the store was closed, but records from "
                f"{header.first_lsn} on follow in segment {header.index}"
            )
            offset = block.segment_offset(header.index)
            yield make("root-outdated", message, media_offset=offset)
            return


# --- 3: segment headers ---------------------------------------------------------------------


def check_segment_headers(context: Context) -> Steps:
    """Every segment in use has a header that says what it is used for."""
    block = context.superblock
    if block is None or context.newest is None:
        return
    expected = _expected_of_roots(context)
    for index in range(block.segment_count):
        if index % HEADERS_AT_ONCE == 0 and index:
            yield Amount(index, block.segment_count)
            context.require_open()
            if context.live:
                context.read_roots()
                expected = _expected_of_roots(context)
        wanted = expected.get(index)
        if wanted is None and _is_data(context, index):
            wanted = SegmentHeader(role=layout.ROLE_DATA, index=index, epoch=0, nonce=0)
        if wanted is not None:
            problem = header_problem(context.media, block, wanted)
            if problem is not None:
                role = layout.ROLE_NAMES[wanted.role]
                message = f"header of {role} segment {index}: {problem}"
                offset = block.segment_offset(index)
                yield make("segment-header-damaged", message, media_offset=offset)
    yield Amount(block.segment_count, block.segment_count)


def _is_data(context: Context, index: int) -> bool:
    store = context.store()
    return store is not None and store.volume.space.states[index] is State.DATA


def _expected_of_roots(context: Context) -> dict[int, SegmentHeader]:
    """What the segments of the newest and of the fallback root must say of themselves."""
    kept = [context.newest]
    if context.keeps_fallback():
        kept.append(context.fallback)
    expected: dict[int, SegmentHeader] = {}
    for root in kept:
        if root is not None:
            expected.update(headers_of_root(root))
    return expected


def headers_of_root(root: Root) -> dict[int, SegmentHeader]:
    """Headers that a root's segments must have; epoch 0 and nonce 0 where any will do."""
    expected: dict[int, SegmentHeader] = {}
    for part, index in enumerate(root.image_segments):
        expected[index] = SegmentHeader(
            role=layout.ROLE_IMAGE, index=index, epoch=0, nonce=0, first_lsn=part
        )
    if root.journal_segment is not None and root.journal_mirror is not None:
        pair = (root.journal_segment, root.journal_mirror)
        for copy_number in (0, 1):
            expected[pair[copy_number]] = SegmentHeader(
                role=layout.ROLE_JOURNAL,
                index=pair[copy_number],
                partner=pair[1 - copy_number],
                copy_number=copy_number,
                epoch=root.journal_epoch,
                nonce=0,
                first_lsn=root.journal_first_lsn,
            )
    return expected


def headers_of_journal(header: SegmentHeader) -> tuple[SegmentHeader, SegmentHeader]:
    """Return the headers that both copies of a journal must have, given that of the primary."""
    mirror = dataclasses.replace(header, index=header.partner, partner=header.index, copy_number=1)
    return header, mirror


def header_problem(media: Media, block: Superblock, wanted: SegmentHeader) -> str | None:
    """Why the header of a segment is not what it must be; None when it is."""
    try:
        found = segments.read(media, block, wanted.index)
    except MediaError as error:
        return error.message
    if isinstance(found, str):
        return found
    if found.role != wanted.role:
        return f"it says that it is one of role {layout.ROLE_NAMES[found.role]}"
    if wanted.role == layout.ROLE_IMAGE and found.first_lsn != wanted.first_lsn:
        return f"it says that it is part {found.first_lsn} of an image, not {wanted.first_lsn}"
    if wanted.role == layout.ROLE_JOURNAL:
        for name in ("epoch", "copy_number", "partner", "first_lsn"):
            if getattr(found, name) != getattr(wanted, name):
                return f"{name} is {getattr(found, name)}, not {getattr(wanted, name)}"
    return None
