"""The power-cut tests must fail when durability is broken on purpose: each bug is caught."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from cxlfs import journal, journal_reader, roots, segments
from cxlfs.errors import CorruptionError
from cxlfs.media import Granularity, SimulatedMedia
from cxlfs.operations import LinkOperation, Operation
from cxlfs.store import versions, volume
from tests.support.power_cut import PowerCutError, cut_everywhere
from tests.support.workloads import WORKLOADS, record

Plant = Callable[[pytest.MonkeyPatch], None]


def record_not_fenced(patch: pytest.MonkeyPatch) -> None:
    """A verb returns before its record is durable."""

    def fence(self: journal.Journal) -> None:
        self.fenced_lsn = self.last_lsn

    patch.setattr(journal.Journal, "fence", fence)


def record_not_written_back(patch: pytest.MonkeyPatch) -> None:
    original = journal.Journal.append

    def append(self: journal.Journal, payload: bytes, count: int) -> tuple[int, int]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(type(self.media), "write_back", lambda *_: None)
            return original(self, payload, count)

    patch.setattr(journal.Journal, "append", append)


def data_after_record(patch: pytest.MonkeyPatch) -> None:
    """On page media the record may be durable before the data it names."""
    patch.setattr(versions.Versions, "fence_data", lambda _self: None)


def image_not_fenced(patch: pytest.MonkeyPatch) -> None:
    """The root is stored while the image it names is still on its way."""
    original = volume.Volume._write_set
    fence = SimulatedMedia.fence

    def write_set(self: volume.Volume, *, closing: bool) -> None:
        calls = iter(range(100))

        def every_but_second(media: SimulatedMedia) -> None:
            if next(calls) != 1:
                fence(media)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(SimulatedMedia, "fence", every_but_second)
            original(self, closing=closing)

    patch.setattr(volume.Volume, "_write_set", write_set)


def root_not_written_back(patch: pytest.MonkeyPatch) -> None:
    original = roots.write

    def write(media: SimulatedMedia, *rest: object) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(SimulatedMedia, "write_back", lambda *_: None)
            original(media, *rest)  # type: ignore[arg-type]

    patch.setattr(roots, "write", write)


def space_reused_early(patch: pytest.MonkeyPatch) -> None:
    """The segments of the image in force are free before the next root is durable."""
    original = volume.Volume._write_set

    def write_set(self: volume.Volume, *, closing: bool) -> None:
        self.space._free[:0] = self.current.segments + self.fallback.segments
        original(self, closing=closing)

    patch.setattr(volume.Volume, "_write_set", write_set)


def header_not_stored(patch: pytest.MonkeyPatch) -> None:
    """Journal headers reach the media only by luck."""
    original = segments.store

    def store(media: SimulatedMedia, *rest: object) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(SimulatedMedia, "write_back", lambda *_: None)
            original(media, *rest)  # type: ignore[arg-type]

    patch.setattr(segments, "store", store)


def transaction_in_two_records(patch: pytest.MonkeyPatch) -> None:
    """What belongs together is stored one after the other."""
    original = volume.Volume.commit

    def commit(
        self: volume.Volume, ops: Sequence[Operation], *, durable: bool = True
    ) -> tuple[int, int]:
        links = [op for op in ops if isinstance(op, LinkOperation)]
        rest = [op for op in ops if not isinstance(op, LinkOperation)]
        if links and rest:
            original(self, rest, durable=durable)
            return original(self, links, durable=durable)
        return original(self, ops, durable=durable)

    patch.setattr(volume.Volume, "commit", commit)


def checksums_not_compared(patch: pytest.MonkeyPatch) -> None:
    """Recovery takes any bytes with a record's magic for a record."""

    class Anything:
        def __eq__(self, _other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

        def __and__(self, _other: object) -> int:
            return 0

    patch.setattr(journal_reader, "crc32c", lambda *_: Anything())


CASES: list[tuple[Plant, Granularity, str]] = [
    (record_not_fenced, Granularity.LINE, "unlink"),
    (record_not_written_back, Granularity.LINE, "attributes"),
    (record_not_written_back, Granularity.PAGE, "overwrite"),
    (data_after_record, Granularity.PAGE, "overwrite"),
    (image_not_fenced, Granularity.LINE, "rollover"),
    (image_not_fenced, Granularity.PAGE, "rollover"),
    (root_not_written_back, Granularity.LINE, "rollover"),
    (space_reused_early, Granularity.LINE, "rollover"),
    (header_not_stored, Granularity.LINE, "rollover"),
    (transaction_in_two_records, Granularity.LINE, "rename_over"),
    (checksums_not_compared, Granularity.LINE, "rename_over"),
]


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as made:
        yield made


@pytest.mark.parametrize(
    ("plant", "granularity", "name"), CASES, ids=lambda v: getattr(v, "__name__", str(v))
)
def test_caught(
    plant: Plant,
    granularity: Granularity,
    name: str,
    patch: pytest.MonkeyPatch,
    rng: random.Random,
) -> None:
    workload = next(w for w in WORKLOADS if w.__name__ == name)
    plant(patch)
    tape = record(workload, granularity)
    if plant is not checksums_not_compared:
        patch.undo()
    with pytest.raises((PowerCutError, CorruptionError)):
        cut_everywhere(tape, rng, name)
    tape.media.close()
