"""Many references that are counted at once: as many bytes as one after the other, for less work."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from cxlfs.errors import OutOfMemoryError
from cxlfs.native import FaultKind, fault_count, set_fault
from cxlfs.native.extents import REF_DTYPE, Counting, Engine, FileMap, Rows
from tests.native.test_extent_memory import one_extent
from tests.native.test_extent_writes import refs_of
from tests.support.extents import Room, import_maps, nothing_held, room, seeds

KINDS = tuple(Counting)
EXTENTS = 6
EXTENT_BYTES = 20_000
MIB = 1 << 20


class Counted:
    """Contents with how each counts; what should be counted is found byte by byte."""

    def __init__(self, place: Room) -> None:
        self.engine = place.engine
        self.contents: dict[FileMap, Counting] = {}
        self.known = set(range(1, EXTENTS + 1))
        """Extents that history has not had for itself: an image has them, if anything has."""
        for number in range(EXTENTS):
            one_extent(self.engine, EXTENT_BYTES, extent_id=number + 1, segment=number)

    def add(self, rows: Rows, counting: Counting = Counting.KEPT) -> FileMap:
        content = new_content(self.engine, rows)
        content.count_as(counting)
        self.contents[content] = counting
        return content

    def expected(self) -> npt.NDArray[np.uint8]:
        """The kind of each byte of each extent; the number of kinds: nothing refers to it."""
        kinds = np.full((EXTENTS, EXTENT_BYTES), len(KINDS), dtype=np.uint8)
        for content, counting in self.contents.items():
            for _, length, extent_id, offset in refs_of(content):
                part = kinds[extent_id - 1, offset : offset + length]
                np.minimum(part, int(counting), out=part)
        return kinds

    def check(self) -> None:
        kinds, found = self.expected(), self.engine.statistics()
        counted = [found.kept_bytes, found.replaced_bytes, found.aside_bytes]
        counted += [found.held_bytes, found.past_bytes]
        assert counted == [int((kinds == kind).sum()) for kind in KINDS]
        used = (kinds < Counting.PAST).sum(axis=1).tolist()
        assert self.engine.usage().tolist()[:EXTENTS] == used
        assert found.uncounted_extents == 0
        self.check_history(kinds)

    def check_history(self, kinds: npt.NDArray[np.uint8]) -> None:
        """What history alone refers to is in no image and no estimate of one; the rest is."""
        past = [c for c, counting in self.contents.items() if counting >= Counting.HELD]
        past_refs = sum(content.ref_count for content in past)
        assert self.engine.statistics().past_refs == past_refs
        alone = {
            number + 1
            for number, row in enumerate(kinds)
            if (row >= Counting.HELD).all() and (row < len(KINDS)).any()
        }
        others = len(self.engine.list()) - len(alone)
        refs = self.engine.statistics().refs - past_refs
        assert self.engine.table_bytes(1000, 1, 0) == 1000 * others + refs
        self.known -= alone
        covered = {number + 1 for number, row in enumerate(kinds) if (row < len(KINDS)).any()}
        assert set(self.engine.export_maps([])[2]["id"].tolist()) == self.known & covered
        for number in range(EXTENTS):
            there = {
                content.address
                for content, counting in self.contents.items()
                if counting is Counting.PAST and any(r[2] == number + 1 for r in refs_of(content))
            }
            found = self.engine.past_contents(number)
            assert len(found) == len(set(found))
            assert set(found) == there
        unused = (kinds >= Counting.PAST).all(axis=1).sum()
        assert self.engine.past_segments == unused

    def end(self) -> None:
        for content in self.contents:
            content.close()
        self.contents.clear()
        self.engine.drop_unreferenced()
        assert nothing_held(self.engine)


@pytest.fixture
def counted() -> Iterator[Counted]:
    with room() as place:
        made = Counted(place)
        yield made
        made.end()


def new_content(engine: Engine, rows: Rows) -> FileMap:
    size = int((rows["file_offset"] + rows["length"]).max(initial=0))
    first = np.array([0, len(rows)], dtype=np.uint64)
    owners, sizes = np.array([7], dtype=np.uint64), np.array([size], dtype=np.uint64)
    return import_maps(engine, owners, sizes, first, rows)[0]


def references(rng: np.random.Generator, count: int, *, extents: int, unit: int) -> Rows:
    """With holes between them, to places that may overlap; places are multiples of ``unit``."""
    rows = np.zeros(count, dtype=REF_DTYPE)
    rows["length"] = rng.integers(1, 1 + rng.choice([3, 60, 700]), count) * unit
    gaps = rng.integers(0, 2, count).astype(np.uint64) * 10
    ends = np.cumsum(rows["length"] + gaps, dtype=np.uint64)
    rows["file_offset"] = ends - rows["length"]
    rows["extent_id"] = rng.integers(1, extents + 1, count)
    places = (EXTENT_BYTES - rows["length"]) // unit
    rows["extent_offset"] = rng.integers(0, places + 1) * unit
    return rows


@pytest.mark.parametrize("seed", seeds(6), ids="CXLFS_SEED={}".format)
def test_every_byte_counts_as_it_would_one_by_one(counted: Counted, seed: int) -> None:
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    for _ in range(60):
        contents = list(counted.contents)
        content = rng.choice(contents) if contents else None
        step = rng.choice(("add", "clone", "count", "truncate", "punch", "close"))
        if content is None or (step == "add" and len(contents) < 8):
            rows = references(
                numbers,
                rng.choice([1, 15, 16, 17, 40, 300]),
                extents=rng.randrange(1, EXTENTS + 1),
                unit=rng.choice([1, 16]),
            )
            counted.add(rows, rng.choice(KINDS))
        elif step == "clone" and len(contents) < 8:
            counting = rng.choice(KINDS)
            clone = content.clone(counting)
            assert refs_of(clone) == refs_of(content)
            counted.contents[clone] = counting
        elif step == "count":
            counted.contents[content] = rng.choice(KINDS)
            content.count_as(counted.contents[content])
        elif step == "truncate":
            content.truncate(rng.randrange(content.size + 1))
        elif step == "punch" and content.size:
            offset = rng.randrange(content.size)
            content.punch(offset, rng.randrange(1, content.size + 1 - offset))
        else:
            del counted.contents[content]
            content.close()
        counted.check()


def test_the_same_bytes_a_thousand_times(counted: Counted) -> None:
    """Ranges of one extent that overlap are covered as often as they are referred to."""
    rows = np.zeros(3000, dtype=REF_DTYPE)
    rows["file_offset"] = np.arange(3000) * 100
    rows["length"] = 90
    rows["extent_id"] = 1 + np.arange(3000) % 2
    rows["extent_offset"] = np.arange(3000) % 3 * 45
    content = counted.add(rows)
    counted.check()
    assert counted.engine.statistics().kept_bytes == 2 * 180
    twin = content.clone(Counting.REPLACED)
    counted.contents[twin] = Counting.REPLACED
    content.truncate(100)
    counted.check()
    assert counted.engine.statistics().kept_bytes == 90
    twin.truncate(0)
    counted.check()


# --- no memory ----------------------------------------------------------------------------------

ALWAYS: dict[str, Callable[[FileMap], object]] = {
    "close": FileMap.close,
    "truncate": lambda content: content.truncate(5),
    "count": lambda content: content.count_as(Counting.ASIDE),
}


@pytest.mark.parametrize("name", ALWAYS)
@pytest.mark.parametrize("later", [False, True], ids=["first", "second"])
def test_it_needs_no_memory(name: str, later: bool) -> None:
    """Without any, the same is counted; without enough of it, no byte less than there is."""
    failures = 0
    for nth in range(1, 1000):
        with room() as place:
            counted = Counted(place)
            numbers = np.random.default_rng(5)
            rows = references(numbers, 400, extents=EXTENTS, unit=1)
            content, other = counted.add(rows), counted.add(rows[:200].copy())
            target = other if later else content
            set_fault(FaultKind.ALLOCATE, nth)
            ALWAYS[name](target)
            reached = fault_count(FaultKind.ALLOCATE) >= nth
            set_fault(FaultKind.ALLOCATE, 0)
            if name == "close":
                del counted.contents[target]
            elif name == "count":
                counted.contents[target] = Counting.ASIDE
            found = counted.engine.statistics()
            if found.uncounted_extents == 0:
                counted.check()
            used = int((counted.expected() < len(KINDS)).sum())
            counted_bytes = found.kept_bytes + found.replaced_bytes + found.aside_bytes
            assert counted_bytes + found.held_bytes + found.past_bytes >= used
            failures += reached
            counted.end()
        if not reached:
            break
    else:
        pytest.fail("it never had memory enough")
    assert failures


def test_a_clone_without_memory_counts_nothing() -> None:
    failures = 0
    for nth in range(1, 1000):
        with room() as place:
            counted = Counted(place)
            rows = references(np.random.default_rng(9), 400, extents=EXTENTS, unit=1)
            content = counted.add(rows, Counting.ASIDE)
            set_fault(FaultKind.ALLOCATE, nth)
            try:
                counted.contents[content.clone(Counting.REPLACED)] = Counting.REPLACED
                failed = False
            except OutOfMemoryError:
                failed = True
            set_fault(FaultKind.ALLOCATE, 0)
            counted.check()
            failures += failed
            counted.end()
        if not failed:
            break
    else:
        pytest.fail("it never succeeded")
    assert failures > 3


# --- work ---------------------------------------------------------------------------------------


def crosswise(count: int, extents: int, *, every: int) -> Rows:
    """Pieces of 4 KiB, each in another extent than the one before; ``every``: one block of so many
    of an extent is referred to.
    """
    rows = np.zeros(count, dtype=REF_DTYPE)
    rows["file_offset"] = np.arange(count, dtype=np.uint64) * 4096
    rows["length"] = 4096
    places = np.random.default_rng(count).permutation(count).astype(np.uint64)
    rows["extent_id"] = 1 + places % extents
    rows["extent_offset"] = places // extents * (4096 * every)
    return rows


@pytest.mark.parametrize("every", [1, 2])
def test_pieces_of_an_extent_are_passed_once(every: int) -> None:
    """However many references of a content there are to it, in whatever order; each verb that
    walks over all of them.
    """
    count, extents = 40_000, 20
    with room(segments=extents, segment_bytes=16 * MIB + 4096) as place:
        engine = place.engine
        for number in range(extents):
            one_extent(engine, 16 * MIB, extent_id=number + 1, segment=number)
        found: dict[str, float] = {}

        def measure(name: str, verb: Callable[[], object]) -> None:
            before = engine.statistics().pieces_visited
            verb()
            found[name] = (engine.statistics().pieces_visited - before) / count

        made: list[FileMap] = []
        rows = crosswise(count, extents, every=every)
        measure("import", lambda: made.append(new_content(engine, rows)))
        measure("clone", lambda: made.append(made[0].clone()))
        measure("count as replaced", lambda: made[1].count_as(Counting.REPLACED))
        made.append(made[0].clone())
        measure("truncate", lambda: made[2].truncate(0))
        measure("close one of two", made[1].close)
        measure("punch", lambda: made[0].punch(4096, 4096 * (count // 2)))
        measure("close", made[0].close)
        print(f"pieces looked at for each of {count} references: {found}")
        assert max(found.values()) <= 8
        made[2].close()
        engine.drop_unreferenced()
        assert nothing_held(engine)
