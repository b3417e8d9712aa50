"""What each level of the campaign consists of: units of work, each with a name that repeats it.

``one/LINE/rename``         one operation (or a situation and one operation)
``two/PAGE/append+rename``  two of them, cut in the second one only: the first is a unit of its own
``three/LINE/a+b+c``        likewise
``program/LINE/17``         a random program
``sliced/LINE/rename``      one operation while a rollover goes on, a step behind each verb
``continued/PAGE/rename``   one operation; recoveries make no image, they continue the journal
``recovery/LINE/rename``    one operation; the recovery of each image is cut too
``kill/LINE/rename``        one operation; the daemon is killed, its successor is cut
``damage/LINE/primary``     damage to what is durable
``mkfs/PAGE/over``          mkfs, over an old store
``one/LINE/rename/3of8``    the fourth of eight shares of the cuts of ``one/LINE/rename``
"""

from __future__ import annotations

import dataclasses
import functools
import random
import time
import zlib
from collections.abc import Callable, Iterator

from cxlfs.media import Granularity
from tests.support.crash import single
from tests.support.crash.aftermath import RecoveryRun, kill_then_cut
from tests.support.crash.bench import Bench, new_bench
from tests.support.crash.damage import DAMAGES, cut_mkfs, damage
from tests.support.crash.direct_operations import DIRECT_OPERATIONS
from tests.support.crash.direct_situations import DIRECT_SITUATIONS
from tests.support.crash.held_operations import HELD_OPERATIONS
from tests.support.crash.mapped_operations import MAPPED_OPERATIONS
from tests.support.crash.operations import OPERATIONS, SECOND_ONLY
from tests.support.crash.past_operations import PAST_OPERATIONS
from tests.support.crash.pin_operations import PIN_OPERATIONS
from tests.support.crash.programs import Program
from tests.support.crash.ranges import RANGE_OPERATIONS
from tests.support.crash.runner import (
    FAILURES_MAX,
    Failure,
    Limits,
    Result,
    Share,
    cut_everywhere,
)
from tests.support.crash.single import SITUATIONS
from tests.support.crash.unit_operations import UNIT_OPERATIONS, set_the_scene
from tests.support.crash.unit_workloads import LONG_WORKLOADS, UNIT_WORKLOADS
from tests.support.slices import small_slices, step

LEVELS = ("t0", "t1", "t2")
TRIPLES = PROGRAMS = 10_000
KILLS = 12
STEPS = 6
"""After so many, in the smallest slices, all inodes of the tiny store are taken down."""
SOME_EVERY = {"sliced": 12, "continued": 15}
"""One in so many of these kinds is part of each test run: nearly each image costs a recovery."""
SHARES, SHARES_OF_SHORT = 16, 4
"""Each test run makes one of so many shares of a unit's cuts."""
TWICE = 0.002
"""Part of the recoveries of cut recoveries that are cut again: a thousand or more in all."""

_ALONE = [*SITUATIONS, *DIRECT_SITUATIONS, *UNIT_WORKLOADS]
"""Not put before or behind others."""
BY_NAME: dict[str, single.Workload] = {
    work.__name__: work
    for work in (
        *OPERATIONS,
        *RANGE_OPERATIONS,
        *PAST_OPERATIONS,
        *PIN_OPERATIONS,
        *DIRECT_OPERATIONS,
        *SECOND_ONLY,
        *HELD_OPERATIONS,
        *MAPPED_OPERATIONS,
        *_ALONE,
        *UNIT_OPERATIONS,
    )
}
_EACH = [
    *(work for work in _ALONE if work not in LONG_WORKLOADS),
    *OPERATIONS,
    *RANGE_OPERATIONS,
    *PAST_OPERATIONS,
    *PIN_OPERATIONS,
    *DIRECT_OPERATIONS,
    *HELD_OPERATIONS,
    *MAPPED_OPERATIONS,
    *LONG_WORKLOADS,
]
_OF_UNITS = {work.__name__ for work in UNIT_OPERATIONS}
_SHORT = {
    work.__name__
    for work in (
        *OPERATIONS,
        *RANGE_OPERATIONS,
        *DIRECT_OPERATIONS,
        *HELD_OPERATIONS,
        *MAPPED_OPERATIONS,
    )
}
"""Workloads of few cuts and few seconds."""
_MEDIA = ("LINE", "PAGE")


def units_of(level: str, seed: int) -> list[str]:
    """Names of the units of a level, in the order in which they are worth doing."""
    return list(dict.fromkeys({"t0": _t0, "t1": _t1, "t2": _t2}[level](seed)))


def units_of_each_test_run(seed: int, sample: int) -> list[str]:
    """Return the part of level t0 that each test run cuts; ``sample`` draws it.

    Each workload is there by itself: a share of its cuts, on lines or on pages. On bytes each that
    t0 has is there with a share. Of the kinds in SOME_EVERY one workload in so many is there.
    Consecutive samples draw one media after the other, then the next share.
    """
    units: list[str] = []
    for work in _EACH:
        number = _number(sample, work.__name__)
        units.append(_share_of(f"one/{_MEDIA[number % 2]}/{work.__name__}", number // 2))
    seen: dict[str, int] = {}
    for unit in units_of("t0", seed):
        kind, media, _ = unit.split("/")
        if kind == "one" and media in _MEDIA:
            continue
        every = SOME_EVERY.get(kind, 1)
        seen[kind] = number = seen.get(kind, sample) + 1
        if number % every == 0:
            units.append(_share_of(unit, _number(sample // every, unit)))
    return units


def _number(sample: int, name: str) -> int:
    """Return ``sample``, counted from a place that depends on the name."""
    return sample + zlib.crc32(name.encode())


def _share_of(unit: str, number: int) -> str:
    """Return the name of a share of a unit; what makes no tape has no shares."""
    kind, _, what = unit.split("/")
    if kind in ("mkfs", "damage"):
        return unit
    is_short = kind == "one" and what in _SHORT
    every = SHARES_OF_SHORT if is_short else SHARES
    return f"{unit}/{number % every}of{every}"


def _t0(_seed: int) -> Iterator[str]:
    for work in _EACH:
        for media in _MEDIA:
            yield f"one/{media}/{work.__name__}"
    yield from (f"one/BYTE/{work.__name__}" for work in (*_ALONE[::3], *OPERATIONS[::4]))
    for number, work in enumerate(_EACH):
        yield f"sliced/{_MEDIA[number % 2]}/{work.__name__}"
        if number % 4 == 0:
            yield f"continued/{_MEDIA[number // 4 % 2]}/{work.__name__}"
    for media in _MEDIA:
        yield from (f"mkfs/{media}/{what}" for what in ("empty", "over"))
    yield from (f"damage/LINE/{what}" for what in DAMAGES)


def _t1(_seed: int) -> Iterator[str]:
    """Every pair; where one order is on lines the other one is on pages."""
    for i, first in enumerate(OPERATIONS):
        for j, second in enumerate((*OPERATIONS, *SECOND_ONLY)):
            media = _MEDIA[(i + j + (i < j)) % 2]
            yield f"two/{media}/{first.__name__}+{second.__name__}"
    for i, first in enumerate(RANGE_OPERATIONS):
        for second in (*RANGE_OPERATIONS, *OPERATIONS[i % 4 :: 4]):
            yield f"two/{_MEDIA[i % 2]}/{first.__name__}+{second.__name__}"
    yield from _pairs_of(DIRECT_OPERATIONS)
    yield from _pairs_of(HELD_OPERATIONS)
    yield from _pairs_of(MAPPED_OPERATIONS)
    yield from _pairs_of(PAST_OPERATIONS)
    yield from _pairs_of(PIN_OPERATIONS)
    others = [*OPERATIONS, *RANGE_OPERATIONS]
    for i, unit in enumerate(UNIT_OPERATIONS):
        for j, other in enumerate((*UNIT_OPERATIONS, *others, *SECOND_ONLY)):
            yield f"two/{_MEDIA[(i + j) % 2]}/{unit.__name__}+{other.__name__}"
        for j, other in enumerate(others):
            yield f"two/{_MEDIA[(i + j + 1) % 2]}/{other.__name__}+{unit.__name__}"


def _pairs_of(operations: list[single.Workload]) -> Iterator[str]:
    """Each of them before each other one of them, and before and behind all ordinary ones."""
    for i, first in enumerate(operations):
        for j, second in enumerate((*operations, *OPERATIONS, *SECOND_ONLY)):
            yield f"two/{_MEDIA[(i + j) % 2]}/{first.__name__}+{second.__name__}"
        for j, second in enumerate(OPERATIONS):
            yield f"two/{_MEDIA[(i + j + 1) % 2]}/{second.__name__}+{first.__name__}"


def _t2(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    firsts = [*OPERATIONS, *RANGE_OPERATIONS]
    for work in _EACH:
        for media in _MEDIA:
            yield f"kill/{media}/{work.__name__}"
    for number in range(PROGRAMS):
        media = _MEDIA[number % 2]
        yield f"program/{media}/{number}"
        first, second = rng.choice(firsts), rng.choice(firsts)
        third = rng.choice([*firsts, *SECOND_ONLY])
        names = "+".join(work.__name__ for work in (first, second, third))
        yield f"three/{media}/{names}"
    for work in _EACH:
        for media in _MEDIA:
            yield f"recovery/{media}/{work.__name__}"


@dataclasses.dataclass(slots=True)
class UnitResult:
    """Of one unit; ``seconds`` of a processor, ``images``: hashes of the distinct images."""

    name: str
    seconds: float
    points: int
    images: list[int]
    recoveries: int
    failures: list[Failure]


def split_share(name: str) -> tuple[str, Share]:
    """Return the name of the whole unit, and the share of its cuts that ``name`` asks for."""
    whole, _, share = name.rpartition("/")
    first, of, every = share.partition("of")
    if not (of and first.isdecimal() and every.isdecimal()):
        return name, Share()
    return whole, Share(int(first), int(every))


def run_unit(
    name: str, seed: int, only: int | None = None, *, failures_max: int = FAILURES_MAX
) -> UnitResult:
    """Record and cut one unit; ``only``: judge no image but the one with that hash."""
    began = time.process_time()
    whole, share = split_share(name)
    kind, media, what = whole.split("/")
    rng = random.Random(f"{seed}/{whole}")
    if kind == "mkfs":
        result = cut_mkfs(Granularity[media], rng, over=what == "over")
    else:
        asked = functools.partial(
            dataclasses.replace, only=only, failures_max=failures_max, share=share
        )
        result = _run_bench(kind, media, what, rng, asked)
    seconds = time.process_time() - began
    return UnitResult(
        name,
        seconds,
        result.points,
        sorted(result.images),
        result.work.recoveries,
        result.failures,
    )


def _run_bench(
    kind: str, media: str, what: str, rng: random.Random, asked: Callable[[Limits], Limits]
) -> Result:
    bench: Bench | None = None
    try:
        bench = new_bench(Granularity[media])
        if kind == "continued":
            with small_slices():
                return _cut(bench, kind, what, rng, asked(_record(bench, kind, what, rng)))
        limits = _record(bench, kind, what, rng)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        problem = f"while it was recorded: {type(error).__name__}: {error}"
        return Result(failures=[Failure(0, "", problem)])
    else:
        return _cut(bench, kind, what, rng, asked(limits))
    finally:
        if bench is not None:
            bench.store.abandon()
            bench.tape.media.close()


def _record(bench: Bench, kind: str, what: str, rng: random.Random) -> Limits:
    """Run the workload; says where and how to cut it."""
    if kind == "program":
        Program(bench, rng).run()
        return Limits(random_masks=4, pairs_max=20)
    if kind == "sliced":
        with small_slices():
            _record_sliced(bench, BY_NAME[what], rng)
        return Limits(random_masks=4, pairs_max=6)
    if kind == "damage":
        what = "append_fsync+rename_into+change_mode"
    *before, last = what.split("+")
    if not _OF_UNITS.isdisjoint((*before, last)):
        set_the_scene(bench)
    for name in before:
        BY_NAME[name](bench)
    first_event = len(bench.tape.media.events()) if before else 0
    BY_NAME[last](bench)
    if kind in ("one", "recovery", "continued"):
        thorough = kind == "recovery"
        return Limits(
            headers=bench.tape.media.granularity is Granularity.LINE,
            random_masks=8 if thorough else 4,
            pairs_max=12 if thorough else 6,
        )
    return Limits(first_event=first_event, random_masks=6, pairs_max=24)


def _record_sliced(bench: Bench, work: single.Workload, rng: random.Random) -> None:
    """A rollover is under way, somewhere; it goes on behind each verb, and to its end."""
    rollovers = bench.store.volume.rollovers
    rollovers.begin()
    for _ in range(rng.randrange(STEPS)):
        rollovers.step()
    bench.tape.start()

    def behind() -> None:
        for _ in range(rng.choice((1, 1, 3))):
            bench.tape.verb("step", lambda: step(bench.store), late=True, keeps=True)

    bench.after_each = behind
    work(bench)
    bench.after_each = None
    behind()
    bench.do("finish", rollovers.finish, late=True, keeps=True)


def _cut(bench: Bench, kind: str, what: str, rng: random.Random, limits: Limits) -> Result:
    if kind == "recovery":
        return RecoveryRun(bench.tape, rng, limits, twice=TWICE).cut_everywhere()
    if kind == "damage":
        return damage(bench, what, rng)
    if kind == "kill":
        return kill_then_cut(bench.tape, rng, limits, kills=KILLS)
    return cut_everywhere(bench.tape, rng, limits)
