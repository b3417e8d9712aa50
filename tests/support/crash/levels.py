"""What each level of the campaign consists of: units of work, each with a name that repeats it.

``one/LINE/rename``         one operation (or a situation and one operation)
``two/PAGE/append+rename``  two of them, cut in the second one only: the first is a unit of its own
``three/LINE/a+b+c``        likewise
``program/LINE/17``         a random program
``sliced/LINE/rename``      one operation while a rollover goes on, a step behind each verb
``continued/PAGE/rename``   one operation; recoveries make no image, they continue the journal
``together/LINE/rename``    one operation; recoveries apply all records at once
``recovery/LINE/rename``    one operation; the recovery of each image is cut too
``kill/LINE/rename``        one operation; the daemon is killed, its successor is cut
``damage/LINE/primary``     damage to what is durable
``mkfs/PAGE/over``          mkfs, over an old store
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import time
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
from tests.support.crash.programs import Program
from tests.support.crash.ranges import RANGE_OPERATIONS
from tests.support.crash.runner import FAILURES_MAX, Failure, Limits, Result, cut_everywhere
from tests.support.crash.single import SITUATIONS
from tests.support.crash.unit_operations import UNIT_OPERATIONS, set_the_scene
from tests.support.crash.unit_workloads import LONG_WORKLOADS, UNIT_WORKLOADS
from tests.support.slices import records_together, small_slices, step

LEVELS = ("t0", "t1", "t2")
TRIPLES = PROGRAMS = 10_000
KILLS = 12
STEPS = 6
"""After so many, in the smallest slices, all inodes of the tiny store are taken down."""
SOME_EVERY = {"sliced": 12, "continued": 15, "together": 12}
"""Of long units on each media: one in so many is part of each test run."""
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
    *DIRECT_OPERATIONS,
    *HELD_OPERATIONS,
    *MAPPED_OPERATIONS,
    *LONG_WORKLOADS,
]
_OF_UNITS = {work.__name__ for work in UNIT_OPERATIONS}
_MEDIA = ("LINE", "PAGE")


def units_of(level: str, seed: int) -> list[str]:
    """Names of the units of a level, in the order in which they are worth doing."""
    return list(dict.fromkeys({"t0": _t0, "t1": _t1, "t2": _t2}[level](seed)))


def units_of_each_test_run(seed: int) -> list[str]:
    """Level t0 without most of what is long. Each workload is cut by itself on one kind of media:
    on lines and on pages in turn; of those over checkpoint units every sixth on lines, and none of
    the longest ones. Those on bytes are there, but for checkpoint units. Of those beside a
    rollover, of those that continue the journal, and of those that apply records at once one in
    SOME_EVERY: few of their recoveries have much in common, so that nearly every image costs one.
    """
    on_lines = [work for work in UNIT_WORKLOADS if work not in LONG_WORKLOADS][::6]
    on_lines += [work for work in _EACH if work not in UNIT_WORKLOADS][::2]
    other_media = {
        f"one/{'PAGE' if work in on_lines else 'LINE'}/{work.__name__}" for work in _EACH
    }
    of_units = {work.__name__ for work in UNIT_WORKLOADS}
    by_itself = tuple(f"one/{media}/" for media in _MEDIA)
    units = [
        unit
        for unit in units_of("t0", seed)
        if unit not in other_media
        and (unit.startswith(by_itself) or unit.split("/")[2] not in of_units)
    ]
    for (kind, every), media in itertools.product(SOME_EVERY.items(), _MEDIA):
        of_kind = [unit for unit in units if unit.startswith(f"{kind}/{media}/")]
        left_out = {*of_kind} - {*of_kind[every // 2 :: every]}
        units = [unit for unit in units if unit not in left_out]
    return units


def _t0(_seed: int) -> Iterator[str]:
    for work in _EACH:
        for media in _MEDIA:
            yield f"one/{media}/{work.__name__}"
    yield from (f"one/BYTE/{work.__name__}" for work in (*_ALONE[::3], *OPERATIONS[::4]))
    for number, work in enumerate(_EACH):
        yield f"sliced/{_MEDIA[number % 2]}/{work.__name__}"
        if number % 4 == 0:
            yield f"continued/{_MEDIA[number // 4 % 2]}/{work.__name__}"
    for number, work in enumerate(_EACH):
        if work not in UNIT_WORKLOADS or number % 4 == 0:
            yield f"together/{_MEDIA[number % 2]}/{work.__name__}"
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


def run_unit(
    name: str, seed: int, only: int | None = None, *, failures_max: int = FAILURES_MAX
) -> UnitResult:
    """Record and cut one unit; ``only``: judge no image but the one with that hash."""
    began = time.process_time()
    kind, media, what = name.split("/")
    rng = random.Random(f"{seed}/{name}")
    if kind == "mkfs":
        result = cut_mkfs(Granularity[media], rng, over=what == "over")
    else:
        asked = functools.partial(dataclasses.replace, only=only, failures_max=failures_max)
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
        if kind == "together":
            with records_together():
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
    if kind in ("one", "recovery", "continued", "together"):
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
        return kill_then_cut(bench.tape, rng, kills=KILLS)
    return cut_everywhere(bench.tape, rng, limits)
