"""A checkpoint, a place for it to come back to, and buckets of every kind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from cxlfs.tier import (
    Bucket,
    objects,
    open_bucket,
)
from tests.support.cli import Run, make_run
from tests.support.mount import why_not_mountable, workplace
from tests.support.object_server import BUCKET, ObjectServer, object_server
from tests.support.tier import make_checkpoint


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    return make_run(capfd)


@pytest.fixture
def step(tmp_path: Path, rng: random.Random) -> Path:
    return make_checkpoint(tmp_path / "run1" / "step-1", rng)


@pytest.fixture
def back(tmp_path: Path) -> Path:
    (tmp_path / "back").mkdir()
    return tmp_path / "back"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """And the environment that leads to it, with little patience."""
    monkeypatch.setattr(objects, "_RETRY_SECONDS", 3)
    monkeypatch.setattr(objects, "_REQUEST_SECONDS", 5)
    monkeypatch.setattr(objects, "_RETRIES", 2)
    with object_server() as found:
        for name, value in {
            "AWS_ENDPOINT_URL": found.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "something",
            "AWS_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        yield found


@pytest.fixture(params=["memory", "file", "s3"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    if request.param == "memory":
        return Bucket(MemoryStore(), "memory://")
    if request.param == "file":
        (tmp_path / "bucket").mkdir()
        return open_bucket(f"file://{tmp_path}/bucket")
    request.getfixturevalue("server")
    return open_bucket(f"s3://{BUCKET}/some/where")


@pytest.fixture
def there(tmp_path: Path) -> Path:
    (tmp_path / "there").mkdir()
    return tmp_path / "there"


@pytest.fixture
def mnt() -> Iterator[Path]:
    reason = why_not_mountable()
    if reason is not None:
        pytest.skip(f"cannot mount here: {reason}")
    with workplace() as place:
        place.mount()
        yield place.mountpoint
