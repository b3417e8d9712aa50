"""What goes from a tier: never what is newer, nor what was drained again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from cxlfs.tier import Bucket, drain, fetch, keep_newest
from cxlfs.tier.stock import begin_removal, stored
from tests.support.tier import contents, removal_ends


def _names(bucket: Bucket) -> list[str]:
    return [each.name for each in stored(bucket)]


@pytest.mark.parametrize(("keep", "left"), [(1, [300, 100]), (2, [300, 200, 100]), (9, None)])
def test_an_elder_that_is_drained_removes_nothing_newer(
    step: Path, keep: int, left: list[int] | None
) -> None:
    bucket = Bucket(MemoryStore(), "memory://")
    for number in (50, 300, 200, 100):
        path = step.parent / f"step-{number}"
        shutil.copytree(step, path)
        drain(path, bucket)
    gone = keep_newest(bucket, "step-100", keep)
    assert _names(bucket) == [f"step-{number}" for number in left or (300, 200, 100, 50)]
    assert len(gone) == 4 - len(_names(bucket))


@pytest.mark.parametrize("at", [1, 2, 4])
def test_what_was_drained_again_is_not_removed_by_the_removal_before(
    step: Path, back: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    bucket = Bucket(MemoryStore(), "memory://")
    drain(step, bucket)
    removal_ends(bucket, "step-1", monkeypatch, at)
    drain(step, bucket)
    assert keep_newest(bucket, "step-1", 5) == []
    assert _names(bucket) == ["step-1"]
    assert contents(fetch(bucket, "step-1", back).path) == contents(step)
    assert not [key for key in bucket.objects_here() if key.endswith("going")]


@pytest.mark.parametrize("at", [2, 4])
def test_a_removal_that_is_begun_again_leaves_nothing(
    step: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """As a job begins it, which asks for each rank's by name."""
    bucket = Bucket(MemoryStore(), "memory://")
    drain(step, bucket)
    removal_ends(bucket, "step-1", monkeypatch, at)
    begin_removal(bucket, "step-1")
    assert bucket.objects_here() == {}
    assert bucket.objects_below("step-1") == {}


def test_what_is_named_again_while_it_goes_is_not_there(
    step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another drain had found all objects there, and puts the manifest in the middle of it."""
    bucket, original = Bucket(MemoryStore(), "memory://"), Bucket.remove
    drain(step, bucket)
    manifest = bucket.read("step-1.cxlfs-manifest", 1 << 20)
    assert manifest is not None

    def naming(self: Bucket, key: str) -> None:
        original(self, key)
        if key == "step-1/empty":
            assert bucket.create("step-1.cxlfs-manifest", manifest)

    monkeypatch.setattr(Bucket, "remove", naming)
    begin_removal(bucket, "step-1")
    assert bucket.objects_here() == {}
