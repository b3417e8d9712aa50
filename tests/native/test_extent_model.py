"""Random programs against the model: after every step the engine says what the model says."""

from __future__ import annotations

import random

import pytest

from cxlfs.native import Granularity
from cxlfs.native.discards import discard_in_steps
from tests.native.extent_machine import SEGMENT, SEGMENTS, Machine
from tests.support.extents import nothing_held, room, seeds

STEPS = {
    Machine.write: 30,
    Machine.write_sequence: 15,
    Machine.read: 10,
    Machine.punch: 8,
    Machine.share: 12,
    Machine.look: 8,
    Machine.truncate: 5,
    Machine.take_delta: 20,
    Machine.replace_live: 2,
    Machine.copy_live: 2,
    Machine.clean: 6,
    Machine.copy_in_parts: 4,
    Machine.give_up_copy: 2,
    Machine.drop_some: 4,
    Machine.drop_file: 1,
    Machine.restart_replay: 2,
}


def run(machine: Machine, steps: int) -> None:
    names, weights = zip(*STEPS.items(), strict=True)
    for number in range(steps):
        step = machine.rng.choices(names, weights)[0]
        file = machine.rng.choice(machine.files)
        machine.counts[step.__name__] += 1
        step(machine, file)
        if file in machine.files:
            machine.check_file(file)
        if number % 5 == 0:
            machine.check_engine()
        if number % 20 == 0:
            machine.check_segment(machine.rng.randrange(SEGMENTS))
            for other in machine.files:
                machine.check_file(other)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, id=f"CXLFS_SEED={seed}", marks=[pytest.mark.campaign] * (number > 0))
        for number, seed in enumerate(seeds(2))
    ],
)
@pytest.mark.parametrize("chunk", [256, 4096, 16384])
@pytest.mark.parametrize("granularity", list(Granularity))
def test_random_programs(seed: int, chunk: int, granularity: Granularity) -> None:
    rng = random.Random(seed * 1000 + chunk + granularity)
    with room(granularity, segments=SEGMENTS, segment_bytes=SEGMENT, chunk=chunk) as place:
        discard_in_steps(place.engine, rng.choice([0, 3, 1 << 30]))
        machine = Machine(place, rng)
        run(machine, 400)
        for file in list(machine.files):
            if file.pending is not None:
                machine.end_delta(file)
            for content in (file.live, file.committed, file.replayed):
                content.close()
        machine.replay.drop_unreferenced()
        assert nothing_held(machine.replay)
        machine.replay.close()
        machine.drop_all()
        assert nothing_held(place.engine)
