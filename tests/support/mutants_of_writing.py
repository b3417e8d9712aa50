"""Planted bugs in what a running store writes: stores, write-backs, fences, and their order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from cxlfs.format import image, journal, layout, roots, segments
from cxlfs.format.operations import (
    Operation,
)
from cxlfs.media import SimulatedMedia
from cxlfs.native import EventKind
from cxlfs.store import export, rollover, versions, volume
from tests.support.mutants import (
    Event,
    Patch,
    during,
    every_but,
    mutant,
    nothing,
    on_log,
    on_result,
)

LINE_BYTES = 64
WRITE_BACK = SimulatedMedia.write_back


# --- write-backs ----------------------------------------------------------------------------


@mutant("one/LINE/change_mode", 1)
def record_not_written_back(patch: Patch) -> None:
    """A record is fenced but never written back."""
    during(patch, journal.Journal, "append", (SimulatedMedia, "write_back", nothing))


@mutant("one/LINE/rename_over", 1)
def record_payload_not_written_back(patch: Patch) -> None:
    """Of a record only the header is written back."""

    def write_back(media: SimulatedMedia, offset: int, _length: int) -> None:
        WRITE_BACK(media, offset, LINE_BYTES)

    during(patch, journal.Journal, "append", (SimulatedMedia, "write_back", write_back))


@mutant("one/LINE/rollovers_around_the_ring", 1, 17)
def root_not_written_back(patch: Patch) -> None:
    """Roots are fenced but never written back."""
    during(patch, roots, "write", (SimulatedMedia, "write_back", nothing))


@mutant("one/LINE/rollover/11of16", 1, 17)
def segment_header_not_written_back(patch: Patch) -> None:
    """Segment headers reach the media by luck."""
    during(patch, segments, "store", (SimulatedMedia, "write_back", nothing))


@mutant("one/LINE/create_long_name", 20)
def write_back_one_line_short(patch: Patch) -> None:
    """The last line of a range of several is left out."""

    def write_back(media: SimulatedMedia, offset: int, length: int) -> None:
        lines = -(-(offset % LINE_BYTES + length) // LINE_BYTES)
        if lines > 1:
            length = (lines - 1) * LINE_BYTES - offset % LINE_BYTES
        WRITE_BACK(media, offset, length)

    patch.setattr(SimulatedMedia, "write_back", write_back)


@mutant("one/LINE/change_mode", 20)
def write_back_of_the_next_line(patch: Patch) -> None:
    """The lines behind the ones that were stored are written back."""

    def write_back(media: SimulatedMedia, offset: int, length: int) -> None:
        WRITE_BACK(media, offset + LINE_BYTES, min(length, media.size_bytes - offset - LINE_BYTES))

    patch.setattr(SimulatedMedia, "write_back", write_back)


@mutant("one/LINE/change_mode", 20)
def write_back_does_nothing(patch: Patch) -> None:
    """The routine for this processor is empty."""
    patch.setattr(SimulatedMedia, "write_back", nothing)


# --- fences ---------------------------------------------------------------------------------


@mutant("one/LINE/unlink", 2)
def record_not_fenced(patch: Patch) -> None:
    """A verb returns before its record is durable."""

    def fence(self: journal.Journal) -> None:
        self.fenced_lsn = self.last_lsn

    patch.setattr(journal.Journal, "fence", fence)


@mutant("one/PAGE/rename", 2)
def rename_not_fenced_on_pages(patch: Patch) -> None:
    """On page media rename and link return before their record is synchronised."""
    patch.setattr(volume.Volume, "fence", nothing)


@mutant("one/PAGE/overwrite", 2)
def close_not_fenced_on_pages(patch: Patch) -> None:
    """On page media close only queues its record."""
    original = volume.Volume.commit

    def commit(
        self: volume.Volume, ops: Sequence[Operation], *, durable: bool = True
    ) -> tuple[int, int]:
        del durable
        return original(self, ops, durable=False)

    patch.setattr(volume.Volume, "commit", commit)


@mutant("one/LINE/rollovers_around_the_ring", 3)
def rings_written_together(patch: Patch) -> None:
    """Ring B is stored before ring A is durable."""
    original = roots.write

    def write(media: SimulatedMedia, *rest: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(SimulatedMedia, "fence", every_but(0))
            original(media, *rest)

    patch.setattr(roots, "write", write)


@mutant("damage/LINE/primary", 1, 3, 7)
def mirror_not_written_back(patch: Patch) -> None:
    """Of the two copies of a record only the first is made durable."""

    def append(self: journal.Journal, payload: bytes, count: int) -> tuple[int, int]:
        def write_back(media: SimulatedMedia, offset: int, length: int) -> None:
            if offset < self._bases[1]:
                WRITE_BACK(media, offset, length)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(SimulatedMedia, "write_back", write_back)
            return original(self, payload, count)

    original = journal.Journal.append
    patch.setattr(journal.Journal, "append", append)


@mutant("one/LINE/rollover", 3, 16)
def root_written_before_its_image(patch: Patch) -> None:
    """A rollover writes the root first, then the image that it names."""
    original, copy, write = rollover.Rollovers.run, SimulatedMedia.copy, roots.write

    def run(self: rollover.Rollovers, *, closing: bool = False) -> None:
        waiting: list[tuple[int, Any]] = []

        def early(media: Any, *rest: Any) -> None:
            write(media, *rest)
            for offset, data in waiting:
                copy(media, offset, data)
            media.fence()

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(SimulatedMedia, "copy", lambda _, *args: waiting.append(args))
            inner.setattr(roots, "write", early)
            original(self, closing=closing)

    patch.setattr(rollover.Rollovers, "run", run)


@mutant("one/LINE/rollover", 3)
def image_not_fenced(patch: Patch) -> None:
    """The root is stored while the image that it names is still on its way."""
    during(patch, rollover.Rollover, "_store_piece", (SimulatedMedia, "fence", nothing))


@mutant("one/PAGE/overwrite", 8, 16)
def data_not_fenced_on_pages(patch: Patch) -> None:
    """On page media a record may be durable before the data that it names."""
    patch.setattr(versions.Versions, "fence_data", lambda _self: None)


@mutant("one/LINE/overwrite", 8, 16)
def data_not_fenced_on_lines(patch: Patch) -> None:
    """C answers a write before its copy is fenced."""

    def change(events: list[Event]) -> Iterator[Event]:
        previous = 0
        for event in events:
            if not (event[0] == EventKind.FENCE and previous == EventKind.COPY):
                yield event
            previous = event[0]

    on_log(patch, change)


@mutant("one/LINE/overwrite", 2)
def fence_by_another_thread(patch: Patch) -> None:
    """Data is copied by one thread and fenced by another."""

    def change(events: list[Event]) -> Iterator[Event]:
        for kind, thread, offset, length, payload in events:
            other = thread ^ 1 if kind == EventKind.COPY else thread
            yield kind, other, offset, length, payload

    on_log(patch, change)


# --- ragged copies --------------------------------------------------------------------------


@mutant("one/LINE/append_byte", 4)
def short_copies_stay_in_the_cache(patch: Patch) -> None:
    """Copies of less than a line are stored and not written back."""

    def change(events: list[Event]) -> Iterator[Event]:
        for kind, thread, offset, length, payload in events:
            short = kind == EventKind.COPY and length < LINE_BYTES
            yield EventKind.STORE if short else kind, thread, offset, length, payload

    on_log(patch, change)


@mutant("one/LINE/create_unaligned", 4)
def ragged_head_stays_in_the_cache(patch: Patch) -> None:
    """The first, partial line of a copy is stored and not written back."""

    def change(events: list[Event]) -> Iterator[Event]:
        for event in events:
            kind, thread, offset, length, payload = event
            if kind != EventKind.COPY:
                yield event
                continue
            head = min(-offset % LINE_BYTES, length)
            if head:
                yield EventKind.STORE, thread, offset, head, payload[:head]
            if head < length:
                yield kind, thread, offset + head, length - head, payload[head:]

    on_log(patch, change)


# --- checksums ------------------------------------------------------------------------------


@mutant("one/LINE/change_mode", 8)
def checksum_stored_after_the_record(patch: Patch) -> None:
    """A record is written with a checksum of zero, which is mended after its fence."""
    original = journal.Journal.fence

    def fence(self: journal.Journal) -> None:
        original(self)
        last = getattr(self, "_last", None)
        if last is not None:
            for base in self._bases:
                self.media.store(base + last[0], last[1])
                self.media.write_back(base + last[0], len(last[1]))

    append = journal.Journal.append

    def append_without(self: Any, payload: bytes, count: int) -> tuple[int, int]:
        position = self._position
        result = append(self, payload, count)
        for base in self._bases:
            whole = self.media.read(base + position, layout.RECORD_DTYPE.itemsize)
            self._last = (position, whole)
            self.media.store(base + position, whole[:-4] + bytes(4))
            self.media.write_back(base + position, len(whole))
        return result

    patch.setattr(journal.Journal, "fence", fence)
    patch.setattr(journal.Journal, "append", append_without)


@mutant("one/LINE/change_mode", 9)
def record_checksum_from_another_seed(patch: Patch) -> None:
    """The writer of records seeds their checksums with zero."""
    during(patch, journal.Journal, "__init__", (segments, "record_seed", lambda *_: 0))


@mutant("one/LINE/rollover", 9)
def image_checksum_of_another_image(patch: Patch) -> None:
    """The root names the checksum of the image before."""
    previous = [0]

    def change(made: image.Image) -> image.Image:
        right = made.info.header_crc
        made.info = dataclasses.replace(made.info, header_crc=previous[0])
        previous[0] = right
        return made

    on_result(patch, export.Export, "assemble", change)
