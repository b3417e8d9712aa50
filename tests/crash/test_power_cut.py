"""The short level of the crash campaign, and a little of the long ones (docs/crash-testing.md)."""

from __future__ import annotations

import contextlib
import random

import pytest

from cxlfs.media import Granularity
from tests.support.crash import campaign, examiner, operations, readings
from tests.support.crash.bench import new_bench
from tests.support.crash.direct_operations import DIRECT_OPERATIONS
from tests.support.crash.direct_situations import DIRECT_SITUATIONS
from tests.support.crash.held_operations import HELD_OPERATIONS
from tests.support.crash.levels import (
    SHARES,
    SHARES_OF_SHORT,
    SOME_EVERY,
    TRIPLES,
    UnitResult,
    split_share,
    units_of,
    units_of_each_test_run,
)
from tests.support.crash.mapped_operations import MAPPED_OPERATIONS
from tests.support.crash.operations import OPERATIONS
from tests.support.crash.past_operations import PAST_OPERATIONS
from tests.support.crash.pin_operations import PIN_OPERATIONS
from tests.support.crash.ranges import RANGE_OPERATIONS
from tests.support.crash.runner import Share
from tests.support.crash.single import SITUATIONS
from tests.support.crash.tape import PowerCutError, committed_state, recovered_state
from tests.support.crash.unit_workloads import UNIT_WORKLOADS
from tests.support.crash.world import fixed_world
from tests.support.stores import read_file

T0_IMAGES_MIN = 1_600
"""Far below what any sample makes: some 15 000."""
T0_PARTS = 8
"""Which processes that test side by side share."""
SOME_RECOVERIES = ["rename", "rollover"]
SOME_KILLS = ["append", "overwrite", "create_big", "rollovers_around_the_ring"]
LONG_UNITS = 2
"""Of each kind and media: so many tell whether the long levels run at all."""
RECOVERY_SHARES, KILL_SHARES = 8, 3
"""Each test run makes one of so many shares of the cuts."""
MEDIA = ["LINE", "PAGE"]


def by_turns(names: list[str]) -> list[tuple[str, str]]:
    """Return name and media of all cases; each second one has each name once, and both media."""
    return [
        (name, MEDIA[(number + other) % 2]) for number, name in enumerate(names) for other in (0, 1)
    ]


def share(unit: str, sample: int, every: int) -> str:
    """Return the name of the share of a unit's cuts that this run makes."""
    return f"{unit}/{sample // 2 % every}of{every}"


def must_be_right(result: UnitResult) -> None:
    print(f"{result.name}: {result.points} points, {len(result.images)} images")
    if result.failures:
        raise PowerCutError("\n".join(failure.problem for failure in result.failures))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(T0_PARTS))
def test_one_operation(part: int, base_seed: int, sample: int) -> None:
    """Level t0, a share: the power cut at fences of every operation."""
    done = campaign.Campaign("t0", base_seed)
    distinct: set[int] = set()
    units = units_of_each_test_run(base_seed, sample)
    random.Random(T0_PARTS).shuffle(units)  # long ones beside short ones
    for result in campaign.run_units(units[part::T0_PARTS], base_seed, jobs=1):
        done.add(result)
        distinct.update(result.images)
    print(f"{done.images} images, {len(distinct)} distinct, {done.seconds:.0f} s of one core")
    assert [
        (unit, failure.problem, done.command(unit, failure))
        for unit, failures in done.failures.items()
        for failure in failures
    ] == []
    assert min(points for points, _, _ in done.done.values()) > 0
    assert len(distinct) >= T0_IMAGES_MIN // T0_PARTS


@pytest.mark.slow
@pytest.mark.parametrize("media", MEDIA)
@pytest.mark.parametrize("kind", ["two", "three", "program"])
def test_some_of_the_long_levels(kind: str, media: str, base_seed: int, sample: int) -> None:
    level = "t1" if kind == "two" else "t2"
    units = [u for u in units_of(level, base_seed) if u.startswith(f"{kind}/{media}/")]
    every = len(units) // LONG_UNITS
    for unit in units[sample % every :: every]:
        must_be_right(campaign.repeat(unit, base_seed, None))


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "media"), by_turns(SOME_RECOVERIES))
def test_recovery_is_cut(name: str, media: str, base_seed: int, sample: int) -> None:
    unit = share(f"recovery/{media}/{name}", sample, RECOVERY_SHARES)
    must_be_right(campaign.repeat(unit, base_seed, None))


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "media"), by_turns(SOME_KILLS))
def test_daemon_is_killed_before_the_cut(
    name: str, media: str, base_seed: int, sample: int
) -> None:
    """Stores that were never fenced survive the first and not the second."""
    unit = share(f"kill/{media}/{name}", sample, KILL_SHARES)
    must_be_right(campaign.repeat(unit, base_seed, None))


def test_levels_are_as_large_as_promised(base_seed: int, sample: int) -> None:
    of_this_run = units_of_each_test_run(base_seed, sample)
    each, all_of_it = {split_share(unit)[0] for unit in of_this_run}, units_of("t0", base_seed)
    assert each < {*all_of_it}
    assert {unit.split("/")[2] for unit in each} == {unit.split("/")[2] for unit in all_of_it}
    drawn = [u for u in all_of_it if not u.startswith((*SOME_EVERY, "one/LINE/", "one/PAGE/"))]
    assert each >= {*drawn}, "what is not drawn is there each time"
    assert len({*OPERATIONS, *SITUATIONS}) >= 60
    assert len(units_of("t1", base_seed)) >= 56 * 56
    t2 = units_of("t2", base_seed)
    assert sum(unit.startswith("program/") for unit in t2) >= TRIPLES
    assert sum(unit.startswith("three/") for unit in t2) >= TRIPLES * 0.9  # some are drawn twice
    kinds = (OPERATIONS, RANGE_OPERATIONS, SITUATIONS, UNIT_WORKLOADS)
    held = HELD_OPERATIONS, MAPPED_OPERATIONS, PAST_OPERATIONS, PIN_OPERATIONS
    everything = sum(map(len, (*kinds, DIRECT_OPERATIONS, DIRECT_SITUATIONS, *held)))
    assert sum(unit.startswith("recovery/") for unit in t2) == 2 * everything


def test_consecutive_samples_are_the_whole_level(base_seed: int) -> None:
    """Each share of each workload on each media is drawn in its turn."""
    turns = 2 * SHARES
    drawn = {unit for n in range(turns) for unit in units_of_each_test_run(base_seed, n)}
    by_itself = [unit for unit in units_of("t0", base_seed) if unit.startswith("one/")]
    shares: dict[str, set[int]] = {}
    for unit in drawn:
        whole, part = split_share(unit)
        shares.setdefault(whole, set()).add(part.first)
        assert part.every in (1, SHARES_OF_SHORT, SHARES)
    assert {whole for whole in shares if whole.startswith("one/")} == {*by_itself}
    assert {len(shares[unit]) for unit in by_itself} == {SHARES_OF_SHORT, SHARES}


def test_shares_are_all_cuts() -> None:
    for count in (1, 2, 5, 8, 9, 30):
        shares = [Share(first, 8).of(range(count)) for first in range(8)]
        assert {cut for share in shares for cut in share} == {*range(count)}
        assert all(shares)


def test_a_share_is_repeated_by_its_name(base_seed: int) -> None:
    """A failure names it: the image must be found again, among the same ones."""
    unit = "one/PAGE/append/3of4"
    part = campaign.repeat(unit, base_seed, None)
    assert 0 < part.points < campaign.repeat("one/PAGE/append", base_seed, None).points
    last = part.images[-1]
    assert campaign.repeat(unit, base_seed, last).images == [last]


def test_states_are_what_the_workload_means() -> None:
    """The states that the judge allows: the old content before, the new one after."""
    with fixed_world():
        bench = new_bench(Granularity.LINE)
        old = bytes(bench.content(bench.inode(b"old")))
        before = committed_state(bench.store)
        operations.overwrite(bench)
        ino = bench.inode(b"old").ino
        tape = bench.tape
        assert tape.names == ["open", "write", "close", "release"]
        assert tape.states[:3] == [before] * 3
        assert tape.states[3] == tape.states[4] == recovered_state(bench.store)
        assert tape.states[3][b"/old"].size == 5000
        assert tape.states[3][b"/other"] == before[b"/other"]
        assert tape.allowed(3) == tape.states[3:]
        assert read_file(bench.store, ino) == bytes(bench.content(bench.inode(b"old"))) != old
        bench.store.abandon()
        tape.media.close()


def test_a_verb_that_commits_too_early_is_noticed() -> None:
    with fixed_world():
        bench = new_bench(Granularity.LINE)
        with pytest.raises(AssertionError, match="committed something"):
            bench.do("write", lambda: bench.store.make_directory(1, b"d", 0o755, 0, 0), keeps=True)
        bench.store.abandon()
        bench.tape.media.close()


def test_a_unit_is_the_same_each_time(base_seed: int) -> None:
    """Equal hashes, in another order of runs too: what is printed can be repeated."""
    first = campaign.repeat("one/PAGE/append", base_seed, None)
    again = campaign.repeat("one/PAGE/append", base_seed, None)
    assert first.images == again.images
    one = campaign.repeat("one/PAGE/append", base_seed, first.images[0])
    assert one.images == first.images[:1]


@pytest.mark.parametrize("unit", ["one/LINE/append", "one/PAGE/set_large_xattr"])
def test_answers_of_readers_stand_for_the_words_they_read(
    unit: str, base_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same images are chosen, and found good, as when each is recovered; with fewer of them."""
    short = campaign.repeat(unit, base_seed, None)
    monkeypatch.setattr(campaign, "noted_readers", contextlib.nullcontext)
    long = campaign.repeat(unit, base_seed, None)
    assert short.images == long.images
    assert short.failures == long.failures == []
    assert short.recoveries < long.recoveries


def test_an_answer_that_says_too_little_is_noticed(
    base_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images with different records would be taken for the same."""
    monkeypatch.setattr(readings, "_told", lambda *_: b"anything")
    assert campaign.repeat("one/LINE/append", base_seed, None).failures
    monkeypatch.setattr(examiner, "IN_FULL_EVERY", 1)
    problems = [f.problem for f in campaign.repeat("one/LINE/append", base_seed, None).failures]
    assert any("equal words and equal records" in problem for problem in problems)


@pytest.mark.parametrize("unit", ["one/LINE/rename", "one/PAGE/held_left"])
def test_the_reader_is_asked(unit: str, base_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1, before every recovery: it agrees, and would be heard if it did not."""
    monkeypatch.setattr(examiner, "READER_EVERY", 1)
    asked: list[bytes] = []

    def disagree(_media: object, image: bytes) -> str | None:
        asked.append(image)
        return None if len(asked) < 5 else "the reader differs"

    assert campaign.repeat(unit, base_seed, None).failures == []
    monkeypatch.setattr(examiner, "contradiction", disagree)
    failures = campaign.repeat(unit, base_seed, None).failures
    assert {"the reader differs" in failure.problem for failure in failures} == {True}


def test_a_part_of_a_level_by_name(base_seed: int) -> None:
    done, distinct = campaign.run_campaign(
        "t0", base_seed, jobs=1, quiet=True, only="one/PAGE/make_dir"
    )
    assert list(done.done) == ["one/PAGE/make_directory"]
    assert not done.failures
    assert 0 < distinct <= done.images
    with pytest.raises(ValueError, match="has 'no such' in its name"):
        campaign.run_campaign("t0", base_seed, jobs=1, quiet=True, only="no such")
