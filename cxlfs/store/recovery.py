"""Opening a store: superblock, best root, image, journal, and a state that may be built upon.

Never here: what records mean (``replay``), changing the media beyond what recovery must.

Invariants
- Recovery may itself be cut off anywhere: until its last step, a new root, it changes nothing that
  the roots name; running it again gives the same state.
- Every record that was accepted is written back and fenced before anything is built upon it: after
  a mere kill of the daemon a record can be readable without being durable.
- A journal that breaks off where a record is known to have been durable is never cut silently: the
  store is opened read-only and says so.
- File data is never read here.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import time
from typing import TYPE_CHECKING

import numpy as np

from cxlfs.errors import (
    ContradictionError,
    CorruptionError,
    NoSpaceError,
    invariant,
)
from cxlfs.format import (
    image_search,
    journal,
    journal_chain,
    journal_reader,
    layout,
    roots,
    segments,
    superblock,
)
from cxlfs.native.extents import Engine
from cxlfs.store import loading
from cxlfs.store.past_loading import LoadedHistory, Loader
from cxlfs.store.replay import Replayer
from cxlfs.store.rolling import is_short
from cxlfs.store.rollover import Rollovers
from cxlfs.store.space import State
from cxlfs.store.volume import JournalEnd, MetadataSet, Volume

if TYPE_CHECKING:
    import numpy.typing as npt

    from cxlfs.media import Media
    from cxlfs.store.namespace import Namespace

log = logging.getLogger(__name__)
FREEZE_INODES = 50_000
"""The garbage collector never looks at the objects of a larger store: all of them stay, none is in
a cycle, and a million take it a second, in which every request waits."""
_JOURNALS_MAX = 16
"""Openings that were each followed by a crash, before an image was made, each leave one."""


_NAMED_MAX = 3
_NO_LSN = 1 << 62
"""Beyond every record."""


@dataclasses.dataclass(slots=True)
class RecoveryReport:
    """What opening found; ``seconds`` of the whole opening, ``mirror_used`` counts records."""

    clean: bool = True
    records: int = 0
    seconds: float = 0.0
    mirror_used: int = 0
    dirty_shutdown: bool = False
    older_root_used: bool = False
    lost: str | None = None
    """Why changes that were committed cannot be read; the store is read-only then."""
    problems: list[str] = dataclasses.field(default_factory=list)
    open_units: int = 0
    """Checkpoint units that the last mount left open. They are rolled back, or stay open in a
    read-only store."""
    open_unit_paths: list[str] = dataclasses.field(default_factory=list)
    """Directories of the first of them."""

    def note_open_units(self, paths: list[bytes]) -> None:
        """Record the directories of units that the last mount left open."""
        self.open_units = len(paths)
        self.open_unit_paths = [os.fsdecode(path) for path in paths[:_NAMED_MAX]]


@dataclasses.dataclass(slots=True)
class _State:
    """What image and journal gave."""

    root: roots.Root
    engine: Engine
    namespace: Namespace
    last_lsn: int
    next_extent_id: int
    last_time_ns: int = 0
    chain: list[segments.SegmentHeader] = dataclasses.field(default_factory=list)
    scans: list[journal_reader.SegmentScan] = dataclasses.field(default_factory=list)
    headers: list[segments.SegmentHeader] = dataclasses.field(default_factory=list)
    records: int = 0
    lost: str | None = None
    problems: list[str] = dataclasses.field(default_factory=list)


def open_volume(
    media: Media, *, read_only: bool, history: bool
) -> tuple[Volume, RecoveryReport, LoadedHistory]:
    """Open the store on ``media``; ``history`` False: its archive counts as free segments.

    Raises NotACxlfsError, UnsupportedFormatError, CorruptionError (nothing consistent is left),
    MediaError. A store with damage that may hide later changes is opened read-only.
    """
    began = time.perf_counter()
    gc_was_enabled = gc.isenabled()
    gc.disable()  # 100 000 young objects that all stay: collecting them costs half the mount time
    try:
        volume, report, found = _open(media, read_only=read_only, history=history)
        if len(volume.namespace.inodes) > FREEZE_INODES:
            gc.freeze()
    finally:
        if gc_was_enabled:
            gc.enable()
    report.seconds = time.perf_counter() - began
    return volume, report, found


def _open(
    media: Media, *, read_only: bool, history: bool
) -> tuple[Volume, RecoveryReport, LoadedHistory]:
    report = RecoveryReport()
    block, _copies = superblock.choose(media)
    slots = roots.read_slots(media, block)
    found = roots.candidates(slots)
    if not found:
        raise CorruptionError("no valid root is left in either ring", structure="root")
    lost_root = roots.newer_root_may_be_lost(slots)
    state = _load_best(media, block, found, report, follow=lost_root)
    newest = found[0]
    report.clean = not newest.in_use and state.root is newest and not lost_root
    report.records = state.records
    report.problems += state.problems
    report.mirror_used = sum(scan.mirror_used for scan in state.scans)
    report.older_root_used = state.root is not newest
    _check_reaches(state, newest, lost_root=lost_root, report=report)
    states = _used_segments(state)
    volume = Volume(
        media,
        block,
        state.engine,
        state.namespace,
        newest,
        next_extent_id=state.next_extent_id,
        next_epoch=_next_epoch(media, block, state, newest, clean=report.clean),
        last_lsn=state.last_lsn,
        rollovers=Rollovers,
    )
    volume.last_commit_ns = state.last_time_ns or newest.written_ns
    _adopt_sets(volume, state, found, states)
    past = _adopt_history(volume, state, states, history=history)
    _check_dirty_shutdown(volume, report)
    volume.needs_check = "; ".join(report.problems) or None
    report.lost = state.lost
    if state.lost is not None:
        volume.read_only_reason = state.lost
    elif read_only or media.read_only:
        volume.read_only_reason = "it was opened read-only"
    elif block.must_be_read_only():
        volume.read_only_reason = "it has features that this program can read but not write"
    if not volume.read_only:
        _take_over(volume, state, report, slots)
    return volume, report, past


# --- image and journal ----------------------------------------------------------------------


def _load_best(
    media: Media,
    block: superblock.Superblock,
    found: list[roots.Root],
    report: RecoveryReport,
    *,
    follow: bool,
) -> _State:
    first_error: CorruptionError | None = None
    for root in found:
        roots.require_known(root)
        in_doubt = follow or first_error is not None or root.in_use
        try:
            state = _load_until_contradiction(media, block, root, follow=in_doubt)
        except CorruptionError as error:
            report.problems.append(f"root {root.generation} cannot be used: {error.message}")
            first_error = first_error or error
            continue
        return state
    raise first_error or CorruptionError("there is no root", structure="root")


def _load_until_contradiction(
    media: Media, block: superblock.Superblock, root: roots.Root, *, follow: bool
) -> _State:
    """Load the image and the journal of a root, up to the first record that contradicts the state.

    A contradiction leaves nothing of the state to build upon, so replay begins anew and ends before
    that record. Names are applied before contents, so an earlier record can be wrong then too.
    """
    until_lsn, message = _NO_LSN, ""
    while True:
        state = _load_root(media, block, root)
        try:
            _replay(media, block, state, follow=follow, until_lsn=until_lsn)
        except ContradictionError as error:
            state.engine.close()
            invariant(error.lsn < until_lsn, "a record was read that replay ends before")
            until_lsn, message = error.lsn, error.message
            continue
        if message:
            state.lost = f"{message}; it and later changes are not applied"
        return state


def _load_root(media: Media, block: superblock.Superblock, root: roots.Root) -> _State:
    engine = loading.empty_engine(media, block)
    data = image_search.read_image(media, block, root)
    namespace, info = loading.load(data, engine, uuid=block.uuid, header_crc=root.image_header_crc)
    if info.lsn != root.image_lsn:
        raise CorruptionError("root and image disagree about the LSN", structure="metadata image")
    return _State(root, engine, namespace, info.lsn, info.next_extent_id)


def _read_headers(
    media: Media, block: superblock.Superblock, state: _State
) -> list[segments.SegmentHeader]:
    """Return every good segment header; they are read once."""
    if not state.headers:
        state.headers = segments.read_all(media, block)
    return state.headers


def _replay(
    media: Media,
    block: superblock.Superblock,
    state: _State,
    *,
    follow: bool,
    until_lsn: int = _NO_LSN,
) -> None:
    """Apply the root's journal and, with ``follow``, every journal segment begun after it; of them
    the records in front of ``until_lsn``.
    """
    root = state.root
    replayer = Replayer(state.namespace, state.engine, next_extent_id=state.next_extent_id)
    if follow:
        _read_headers(media, block, state)
    epoch = root.next_epoch - 1
    header: segments.SegmentHeader | None = None
    if root.journal_segment is not None and root.journal_mirror is not None:
        epoch = root.journal_epoch
        header = journal_reader.read_header(
            media, block, root.journal_segment, root.journal_mirror, epoch
        )
        if header is None:
            state.lost = (
                f"both headers of journal segment {root.journal_segment} are damaged: "
                "changes since the last image may be missing"
            )
    elif follow:
        header = journal_reader.find_successor(
            state.headers, after_epoch=epoch, first_lsn=state.last_lsn + 1
        )
    while header is not None:
        _replay_segment(media, block, state, replayer, header, until_lsn)
        if not follow or state.lost is not None or state.last_lsn + 1 >= until_lsn:
            break
        header = _next_journal(media, block, state)
    if follow and state.chain and state.lost is None and until_lsn == _NO_LSN:
        _check_chain_end(media, block, state)
    if state.lost is None:
        _drop_unused_journals(state)
    state.engine.drop_unreferenced()
    state.next_extent_id = replayer.next_extent_id
    state.last_time_ns = replayer.last_time_ns


def _next_journal(
    media: Media, block: superblock.Superblock, state: _State
) -> segments.SegmentHeader | None:
    """Return the journal that continues the last one of the chain, or None."""
    header = journal_chain.find_next(media, block, state.headers, state.scans[-1])
    if header is not None and all(known.epoch != header.epoch for known in state.headers):
        state.problems.append(
            f"both headers of journal segment {header.index} are damaged; "
            "the journal before it leads there"
        )
    return header


def _replay_segment(
    media: Media,
    block: superblock.Superblock,
    state: _State,
    replayer: Replayer,
    header: segments.SegmentHeader,
    until_lsn: int,
) -> None:
    state.chain.append(header)
    reader = journal_reader.SegmentReader(media, block, header, expected_lsn=state.last_lsn + 1)
    for batch in reader.batches():
        if len(before := batch.before(until_lsn)):
            replayer.apply(before)
            state.records += len(before)
    state.last_lsn = min(reader.scan.last_lsn, until_lsn - 1)
    state.scans.append(reader.scan)
    if reader.scan.lost_lsn is not None:
        state.lost = (
            f"journal record {reader.scan.lost_lsn} is damaged in both copies: "
            "later changes cannot be applied"
        )
    elif reader.scan.unknown_type is not None:
        state.lost = (
            f"journal record {reader.scan.last_lsn + 1} has the unknown type "
            f"{reader.scan.unknown_type}: it and later changes are not applied"
        )


def _drop_unused_journals(state: _State) -> None:
    """Take journals without a record off the end of the chain.

    A crash may have torn their headers and the continuation that leads to them. The next journal
    continues the last one that was used, and its continuation replaces the torn one.
    """
    while len(state.chain) > 1 and state.scans[-1].last_lsn < state.chain[-1].first_lsn:
        state.chain.pop()
        state.scans.pop()


def _check_chain_end(media: Media, block: superblock.Superblock, state: _State) -> None:
    """A later journal that holds a record proves that the one before it was durable to its end."""
    last = state.chain[-1]
    for header in state.headers:
        follows = (
            header.role == layout.ROLE_JOURNAL
            and header.predecessor == last.index
            and header.predecessor_epoch == last.epoch
            and header.predecessor_last_lsn > state.last_lsn
        )
        if not follows:
            continue
        first = journal_reader.as_primary(header)
        reader = journal_reader.SegmentReader(media, block, first, expected_lsn=first.first_lsn)
        if next(iter(reader), None) is not None:
            state.lost = (
                f"journal record {state.last_lsn + 1} is damaged in both copies: "
                "later changes cannot be applied"
            )
            return


# --- judging --------------------------------------------------------------------------------


def _check_reaches(
    state: _State, newest: roots.Root, *, lost_root: bool, report: RecoveryReport
) -> None:
    """An older root counts only if its journal reaches the newest root."""
    if state.root is newest and not lost_root:
        return
    reached = state.last_lsn >= newest.image_lsn
    if newest.journal_segment is not None and state.root is not newest:
        reached = reached and any(h.epoch == newest.journal_epoch for h in state.chain)
    if lost_root and state.root is newest:
        reached = bool(state.chain) or not newest.in_use
        if not state.chain or not any(s.last_lsn >= s.header.first_lsn for s in state.scans):
            report.problems.append("a root is damaged in both rings; nothing newer was found")
    if not reached and state.lost is None:
        state.lost = "the newest root is damaged and an older one does not reach it"


def _used_segments(state: _State) -> dict[int, State]:
    """No two extents share media bytes, none lies in a header or in metadata."""
    block_first = state.engine.first
    size = state.engine.segment_size
    infos = state.engine.list()
    starts = infos["media_offset"].astype(np.int64)
    ends = starts + infos["length"].astype(np.int64)
    if (starts[1:] < ends[:-1]).any():
        raise CorruptionError("two extents overlap on the media", structure="extent")
    inside = (starts - block_first) % size
    if (inside < layout.SEGMENT_HEADER_BYTES).any():
        raise CorruptionError("an extent lies over a segment header", structure="extent")
    return dict.fromkeys(_segments_of(state.engine, starts), State.DATA)


def _segments_of(engine: Engine, offsets: npt.NDArray[np.int64]) -> list[int]:
    used: list[int] = np.unique((offsets - engine.first) // engine.segment_size).tolist()
    return used


def _next_epoch(
    media: Media,
    block: superblock.Superblock,
    state: _State,
    newest: roots.Root,
    *,
    clean: bool,
) -> int:
    """Beyond every epoch in use: after a crash segments may be newer than any root."""
    epoch = max(newest.next_epoch, state.root.next_epoch)
    if clean:
        return epoch
    headers = _read_headers(media, block, state)
    named = [header for scan in state.scans for header in scan.continuations]
    return max([epoch, *(header.epoch + 1 for header in (*headers, *state.chain, *named))])


def _adopt_sets(
    volume: Volume, state: _State, found: list[roots.Root], states: dict[int, State]
) -> None:
    """Mark what the newest root, the one used and the one before need as in use."""
    root = state.root
    chain = tuple(index for header in state.chain for index in (header.index, header.partner))
    volume.current = MetadataSet(root.image_segments, chain)
    older = next(
        (r for r in found if r.image_segments != root.image_segments and r is not volume.root),
        None,
    )
    metadata = set(volume.current.segments)
    if state.root is not volume.root:
        metadata.update(volume.root.segments)
    fallback: tuple[int, ...] = ()
    between: list[segments.SegmentHeader] = []
    if older is not None and state.root is volume.root:
        between = _journals_between(volume, state, older)
        named = {
            *older.segments,
            *(index for header in between for index in (header.index, header.partner)),
        }
        if named.isdisjoint(states) and named.isdisjoint(metadata):
            fallback = tuple(sorted(named))
    volume.fallback = MetadataSet((), fallback)
    if metadata & set(states):
        raise CorruptionError("an extent lies in a metadata segment", structure="extent")
    for index in volume.current.segments:
        states[index] = State.JOURNAL if index in chain else State.IMAGE
    for index in fallback:
        states[index] = State.IMAGE
    if root.journal_segment is None and not state.chain:
        volume.journal_end = _end_of(older, root, between)
    elif state.chain:
        last = state.chain[-1]
        volume.journal_end = JournalEnd(
            last.index, last.epoch, state.last_lsn, last, state.scans[-1].end
        )


def _adopt_history(
    volume: Volume, state: _State, states: dict[int, State], *, history: bool
) -> LoadedHistory:
    """Take in history, where nothing else needs its segments; then all segments have their state.

    Raises OutOfMemoryError.
    """
    found = LoadedHistory()
    if history:
        headers = _read_headers(volume.media, volume.superblock, state)
        loader = Loader(
            volume.media,
            volume.superblock,
            state.engine,
            headers,
            last_lsn=state.last_lsn,
            next_extent_id=state.next_extent_id,
        )
        found = loader.load(frozenset(states))
        offsets = state.engine.list()["media_offset"].astype(np.int64)
        for index in _segments_of(state.engine, offsets):
            states.setdefault(index, State.DATA)
        for segment in found.segments:
            states[segment.index] = State.HISTORY
        volume.space.epochs = loader.epochs.tolist()
    volume.space.adopt(states)
    return found


def _journals_between(
    volume: Volume, state: _State, older: roots.Root
) -> list[segments.SegmentHeader]:
    """Those that continue the journal of ``older`` up to the image of the newest root."""
    newest = volume.root
    if older.journal_segment is None:
        return []
    headers = _read_headers(volume.media, volume.superblock, state)
    end = newest.next_epoch if newest.journal_segment is None else newest.journal_epoch
    found = (
        journal_reader.as_primary(header)
        for header in headers
        if header.role == layout.ROLE_JOURNAL
        and older.journal_epoch < header.epoch < end
        and older.image_lsn < header.first_lsn <= newest.image_lsn
    )
    return sorted(found, key=lambda header: header.epoch)


def _end_of(
    older: roots.Root | None, root: roots.Root, between: list[segments.SegmentHeader]
) -> JournalEnd | None:
    if between:
        return JournalEnd(between[-1].index, between[-1].epoch, root.image_lsn)
    if older is None or older.journal_segment is None:
        return None
    return JournalEnd(older.journal_segment, older.journal_epoch, root.image_lsn)


def _check_dirty_shutdown(volume: Volume, report: RecoveryReport) -> None:
    """The device lost its contents' guarantee since the store was opened, and it was in use."""
    volume.dirty_shutdown = volume.media.dirty_shutdown()
    known, count, device_hash = volume.dirty_shutdown
    root = volume.root
    if (
        root.in_use
        and known
        and root.dirty_shutdown_known
        and root.device_hash == device_hash
        and root.dirty_shutdown_count != count
    ):
        report.dirty_shutdown = True
        report.problems.append(
            "the device reports a dirty shutdown while the store was in use: "
            "what was written last may be lost"
        )


# --- taking over ----------------------------------------------------------------------------


def _take_over(
    volume: Volume, state: _State, report: RecoveryReport, slots: list[roots.SlotState]
) -> None:
    """Make what was accepted durable, then begin a new journal (after a crash: a new image too)."""
    media = volume.media
    try:
        with volume.writing:
            for scan in state.scans:
                more = journal.CONTINUATION_BYTES if scan.continuations else 0
                for index in (scan.header.index, scan.header.partner):
                    offset = volume.superblock.segment_offset(index)
                    media.write_back(offset, scan.end + more)
            if state.scans:
                media.fence()
            roots.complete(media, volume.superblock, slots, volume.root)
            roots.spoil_torn(media, volume.superblock, slots, volume.root.generation + 1)
        volume.refresh_reserve()
        if report.clean:
            volume.begin_journal()
        elif _may_continue(volume, state, report, slots):
            volume.continue_journal()
            volume.rollovers.due = True
        else:
            _roll_over(volume)
    except NoSpaceError as error:
        volume.read_only_reason = f"there is no room to open it for writing: {error.message}"


def _may_continue(
    volume: Volume, state: _State, report: RecoveryReport, slots: list[roots.SlotState]
) -> bool:
    """Nothing was lost or damaged, and a new image would take long: it is made while the store is
    in use, and until then one more journal follows those that were read.
    """
    whole = (
        volume.root.in_use
        and state.root is volume.root
        and not report.problems
        and not report.mirror_used
        and all(slot.problem is None for slot in slots)
    )
    return (
        whole
        and not is_short(volume.image_bytes_estimate())
        and len(state.chain) < _JOURNALS_MAX
        and volume.space.free_count > volume.refresh_reserve()
    )


def _roll_over(volume: Volume) -> None:
    """A new image at once. Where the metadata is too large for one, names can still be removed."""
    try:
        volume.rollover()
    except NoSpaceError:
        if not volume.root.in_use:
            raise
        volume.continue_journal()
