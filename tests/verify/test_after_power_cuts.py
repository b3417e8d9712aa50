"""What a power cut leaves is not taken for damage, and recovery leaves nothing of it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cxlfs.media import Granularity, SimulatedMedia
from cxlfs.media.simulated import CrashTarget
from cxlfs.store import Store
from cxlfs.verify import run_passes
from tests.support.corrupt import IMAGE_BYTES
from tests.support.stores import format_small, write_file

CUTS = 60


def _workload(granularity: Granularity, rng: random.Random) -> SimulatedMedia:
    media = SimulatedMedia(IMAGE_BYTES, granularity)
    format_small(media)
    media.restart()
    store = Store.open(media)
    for number in range(12):
        write_file(store, 1, b"file-%d" % (number % 5), rng.randbytes(rng.randrange(9000)))
        if number % 4 == 3:
            store.volume.rollover()
        if number % 6 == 5:
            store.unlink(1, b"file-%d" % (number % 5))
    store.close()
    return media


@pytest.mark.parametrize("granularity", [Granularity.LINE, Granularity.PAGE])
def test_crash_images_are_no_damage(granularity: Granularity, rng: random.Random) -> None:
    """At any moment, with any of the words in flight durable. Only of a root that closing the store
    tore in one ring it cannot be known: that is a warning.
    """
    media = _workload(granularity, rng)
    target = CrashTarget(media.cursor())
    count = len(media.events())
    for event in sorted(rng.sample(range(1, count), min(CUTS, count - 1))):
        in_flight = target.advance(event)
        durable = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        mask = np.array([rng.random() < durable for _ in range(len(in_flight))], dtype=np.bool_)
        with target.crashed(in_flight, mask) as crashed:
            found = list(run_passes(crashed, structure_only=False))
            assert {finding.id for finding in found} <= {"root-copy-damaged"}, (event, found)
            assert len(found) <= 1
            store = Store.open(crashed)
            found = list(run_passes(crashed, structure_only=False, store=store))
            assert found == [], event
            store.close()
            found = list(run_passes(crashed, structure_only=False))
            assert found == [], event
    target.close()
