"""Buckets that are full, slow, gone or lying: an error that says so, and no checkpoint less."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from cxlfs.errors import (
    TierFullError,
    TierUnavailableError,
    TierUntrustedError,
)
from cxlfs.tier import (
    Bucket,
    Options,
    drain,
    fetch,
    objects,
    open_bucket,
)
from cxlfs.tier.stock import MANIFEST
from tests.support.cli import Run
from tests.support.object_server import BUCKET, ObjectServer
from tests.support.tier import SIZES, contents

FILES = len(SIZES) + 1


def test_a_second_create_that_is_accepted(server: ObjectServer, step: Path, back: Path) -> None:
    server.habits.accepts_second_create = True
    bucket = open_bucket(f"s3://{BUCKET}")
    with pytest.raises(TierUntrustedError, match="accepts a second create"):
        drain(step, bucket)
    assert server.objects == {}
    done = drain(step, bucket, Options(single_writer=True))
    assert not done.trust.creates
    assert contents(fetch(bucket, "step-1", back).path) == contents(step)


def test_a_create_whose_answer_was_lost_is_its_own(
    server: ObjectServer, step: Path, back: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked again, and told that the name is there already."""
    create, lost = Bucket.create, list[str]()

    def twice(self: Bucket, key: str, data: bytes) -> bool:
        if ".cxlfs-probe" in key and not lost:
            lost.append(key)
            assert create(self, key, data)
        return create(self, key, data)

    monkeypatch.setattr(Bucket, "create", twice)
    bucket = open_bucket(f"s3://{BUCKET}")
    assert drain(step, bucket).trust.creates
    assert lost
    assert contents(fetch(bucket, "step-1", back).path) == contents(step)
    del server


def test_what_is_not_listed(server: ObjectServer, step: Path) -> None:
    server.habits.lists = False
    with pytest.raises(TierUntrustedError, match="is not listed"):
        drain(step, open_bucket(f"s3://{BUCKET}"))


@pytest.mark.parametrize("what", ["lost", "truncated", "altered"])
@pytest.mark.parametrize("name", ["step-1/model.bin", "step-1.cxlfs-manifest"])
@pytest.mark.parametrize("has_md5_tags", [True, False])
def test_a_bucket_that_lies(
    server: ObjectServer, step: Path, what: str, name: str, has_md5_tags: bool
) -> None:
    """Put is answered with success, and what was asked is not there. (What a server tells the MD5
    of, and then alters, is found when it is read: by fetch, or with --read-back.)
    """

    def alters(key: str, data: bytes) -> bytes | None:
        if key != name:
            return data
        return {"lost": None, "truncated": data[:-7], "altered": b"?" + data[1:]}[what]

    server.habits.alters = alters
    server.habits.has_md5_tags = has_md5_tags
    bucket = open_bucket(f"s3://{BUCKET}")
    with pytest.raises(TierUntrustedError):
        drain(step, bucket, Options(read_back=what == "altered"))
    if not name.endswith(MANIFEST):
        assert "step-1.cxlfs-manifest" not in server.objects
        server.habits.alters = lambda _key, data: data
        again = drain(step, bucket, Options(read_back=what == "altered"))
        assert again.sent_files + again.found_files == FILES
        assert server.objects[name].data == (step / "model.bin").read_bytes()


def test_a_put_that_fails_once_is_repeated(server: ObjectServer, step: Path) -> None:
    lost: list[str] = []

    def alters(key: str, data: bytes) -> bytes | None:
        if key == "step-1/model.bin" and not lost:
            lost.append(key)
            return None
        return data

    server.habits.alters = alters
    assert drain(step, open_bucket(f"s3://{BUCKET}")).sent_files == FILES
    assert server.puts_of("step-1/model.bin") == 2


def test_a_full_bucket(server: ObjectServer, step: Path, run: Run) -> None:
    server.habits.full_after_bytes = 150_000
    said = run("drain", step, f"s3://{BUCKET}")
    assert said.code == TierFullError.exit_code, said
    assert "507" in said.stderr
    assert not any(key.endswith(MANIFEST) for key in server.objects)
    server.habits.full_after_bytes = None
    assert run("drain", step, f"s3://{BUCKET}").code == 0


def test_a_burst_of_503(server: ObjectServer, step: Path, back: Path) -> None:
    server.habits.busy = 2
    bucket = open_bucket(f"s3://{BUCKET}")
    drain(step, bucket)
    server.habits.busy = 2
    assert contents(fetch(bucket, "step-1", back).path) == contents(step)


def test_what_is_read_for_longer_than_a_request_may_take(
    server: ObjectServer, step: Path, back: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or is cut off, again and again: it goes on behind what came, as long as something comes."""
    monkeypatch.setattr(objects, "_RETRIES", 0)
    (step / "large").write_bytes(step.name.encode() * 800_000)
    bucket = open_bucket(f"s3://{BUCKET}")
    server.habits.cuts_after_bytes = 1_500_000
    drain(step, bucket, Options(read_back=True))
    assert contents(fetch(bucket, "step-1", back).path) == contents(step)
    server.habits.cuts_after_bytes = 0
    with pytest.raises(TierUnavailableError):
        drain(step, bucket, Options(read_back=True))


def test_no_more_is_read_than_has_to_be_there(server: ObjectServer, step: Path, back: Path) -> None:
    bucket = open_bucket(f"s3://{BUCKET}")
    drain(step, bucket)
    kept = server.objects["step-1/model.bin"]
    kept.data += bytes(10_000_000)
    with pytest.raises(TierUntrustedError, match="has more than 300000 bytes"):
        fetch(bucket, "step-1", back)
    assert [path.name for path in back.iterdir()] == [".cxlfs-receiving"]
    assert sum(p.stat().st_size for p in back.rglob("partial*")) < 2 * sum(SIZES.values())


def test_a_bucket_that_is_busy_for_good(
    server: ObjectServer, step: Path, back: Path, run: Run
) -> None:
    drain(step, open_bucket(f"s3://{BUCKET}"))
    server.habits.busy = 10**9
    before = contents(step)
    said = run("drain", step, f"s3://{BUCKET}")
    assert (said.code, "503" in said.stderr) == (TierUnavailableError.exit_code, True)
    assert run("fetch", f"s3://{BUCKET}/step-1", back).code == TierUnavailableError.exit_code
    assert (contents(step), contents(back)) == (before, {})


def test_a_bucket_that_is_gone(step: Path, server: ObjectServer) -> None:
    bucket = open_bucket(f"s3://{BUCKET}")
    server.server_close()
    with pytest.raises(TierUnavailableError):
        drain(step, bucket)


def test_a_bucket_that_hangs(
    server: ObjectServer, step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_REQUEST_SECONDS", 0.3)
    go = threading.Event()
    server.habits.on_put = lambda key: None if "probe" in key else (go.wait(30), None)[1]
    try:
        with pytest.raises(TierUnavailableError):
            drain(step, open_bucket(f"s3://{BUCKET}"))
    finally:
        go.set()
