"""What a power cut leaves is not taken for damage, and recovery leaves nothing of it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cxlfs.format import layout
from cxlfs.media import Granularity, MemoryMedia, SimulatedMedia
from cxlfs.media.simulated import CrashTarget
from cxlfs.store import Store, recovery
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


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("torn_copy", [0, 1])
def test_torn_beginning_of_a_journal_is_mended(
    monkeypatch: pytest.MonkeyPatch, torn_copy: int, continues: bool
) -> None:
    """A crash tears one header of a journal and one copy of the continuation that leads there. The
    next opening replaces both, whether it makes an image or continues the journal.
    """
    if continues:
        monkeypatch.setattr(recovery, "is_short", lambda _bytes: False)
    media = MemoryMedia(IMAGE_BYTES)
    format_small(media)
    store = Store.open(media)
    write_file(store, 1, b"file", b"content")
    before = store.volume.journal
    assert before is not None
    store.volume.continue_journal()
    following = store.volume.journal
    assert following is not None
    store.abandon()
    block = store.superblock
    indexes = (before.header.index, before.header.partner)
    end = before.used_bytes + layout.SEGMENT_HEADER_BYTES
    media.store(block.segment_offset(indexes[torn_copy]) + end, bytes(8))
    media.store(
        block.segment_offset((following.header.index, following.header.partner)[torn_copy]),
        bytes(8),
    )
    for number in range(2):
        store = Store.open(media)
        assert store.recovery.problems == []
        assert list(run_passes(media, structure_only=False, store=store)) == []
        write_file(store, 1, b"later-%d" % number, b"content")
        store.abandon()
        assert list(run_passes(media, structure_only=False)) == []
    media.close()
