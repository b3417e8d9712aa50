"""Rollovers in steps: the image is of the moment at which it began, whatever happens in between."""

from __future__ import annotations

import random
import typing
from collections.abc import Iterator

import pytest

from cxlfs.format import operations
from cxlfs.media import Granularity
from cxlfs.store import Store, export
from cxlfs.store.rollover import Rollover
from cxlfs.store.volume import Volume
from cxlfs.verify.columns import columns_of_media, columns_of_store
from tests.support.crash.bench import Bench, new_bench
from tests.support.crash.operations import OPERATIONS, clean, drop_aside, overwrite_killed
from tests.support.crash.programs import Program
from tests.support.crash.ranges import RANGE_OPERATIONS
from tests.support.crash.tape import committed_state, difference, recovered_state
from tests.support.crash.world import fixed_world
from tests.support.slices import Told, small_slices, step, told_by


class Watched:
    """Compares every image with what was committed when its rollover began."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench = bench
        self.images = 0
        self._expected: Told | None = None
        begin, adopt = Rollover.__init__, Volume.adopt_root

        def watched_begin(rolling: Rollover, volume: Volume, **how: bool) -> None:
            begin(rolling, volume, **how)
            self._expected = told_by(columns_of_store(bench.store))

        def watched_adopt(volume: Volume, *args: object, **how: object) -> None:
            adopt(volume, *args, **how)  # type: ignore[arg-type]
            self.compare(volume)

        monkeypatch.setattr(Rollover, "__init__", watched_begin)
        monkeypatch.setattr(Volume, "adopt_root", watched_adopt)

    def compare(self, volume: Volume) -> None:
        columns = columns_of_media(volume.media, volume.superblock, volume.root)
        assert columns is not None
        found, expected = told_by(columns), self._expected
        assert expected is not None
        for part in Told.__dataclass_fields__:
            assert getattr(found, part) == getattr(expected, part), part
        self.images += 1


@pytest.fixture(params=[Granularity.LINE, Granularity.PAGE], ids=lambda g: g.name)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with fixed_world(), small_slices():
        made = new_bench(request.param)
        yield made
        made.store.abandon()
        made.tape.media.close()


def reopened_equals_committed(bench: Bench) -> None:
    """A kill of the daemon here: image and journals lead to what is committed."""
    expected = committed_state(bench.store)
    bench.store.abandon()
    again = Store.open(bench.tape.media)
    assert not again.recovery.problems
    assert not again.read_only
    assert difference(recovered_state(again), expected) == {}
    again.abandon()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(40))
def test_an_image_is_of_one_moment(
    bench: Bench, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random programs; between any two verbs a few steps, the same number all along."""
    rng = random.Random(seed)
    watched = Watched(bench, monkeypatch)
    steps = rng.choice([1, 1, 2, 3, 7])

    def between() -> None:
        for _ in range(steps):
            step(bench.store)

    bench.after_each = between
    program = Program(bench, rng)
    program.run(verbs=60)
    for _ in range(5):
        rng.choice([*OPERATIONS, *RANGE_OPERATIONS])(bench)
    bench.after_each = None
    bench.store.volume.rollovers.finish()
    assert watched.images > 0
    reopened_equals_committed(bench)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("work", [*OPERATIONS, *RANGE_OPERATIONS], ids=lambda work: work.__name__)
def test_every_operation_while_nothing_is_taken_down(
    bench: Bench, work: typing.Callable[[Bench], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it happens before the first slice: every change must be preceded by its inodes."""
    watched = Watched(bench, monkeypatch)
    bench.store.volume.rollovers.begin()
    running = bench.store.volume.rollovers.running
    work(bench)
    if bench.store.volume.rollovers.running is running:
        assert watched.images == 0
    bench.store.volume.rollovers.finish()
    assert watched.images > 0
    reopened_equals_committed(bench)


def test_a_move_and_what_is_kept_aside(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that name inodes in one operation only."""
    overwrite_killed(bench)
    watched = Watched(bench, monkeypatch)
    bench.store.volume.rollovers.begin()
    drop_aside(bench)
    bench.store.volume.rollovers.finish()
    bench.store.volume.rollovers.begin()
    monkeypatch.setattr(Volume, "release_dead", Volume.free_dead)
    clean(bench)
    assert bench.store.volume.counters.moved_bytes > 0
    bench.store.volume.rollovers.finish()
    assert watched.images == 2
    reopened_equals_committed(bench)


def test_every_kind_of_operation_names_its_inodes() -> None:
    assert set(export.NAMED_BY) == set(typing.get_args(operations.Operation))
