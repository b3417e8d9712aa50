"""A job's checkpoint on a real mount: what its manifest says of the store and of the bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cxlfs.job import Aborted, Checkpointer, Committed, Restored, medium
from cxlfs.native import crc32c
from tests.support.mount import Workplace

DATA = os.urandom(300_001)


def save(directory: Path) -> None:
    (directory / "shard.bin").write_bytes(DATA)


def test_what_a_manifest_says(place: Workplace) -> None:
    made = Checkpointer(place.mountpoint / "job", allow_volatile=True)
    made.restore_from_checkpoint(lambda _path: None)
    outcome = made.distributed_checkpoint(7, save)
    assert isinstance(outcome, Committed)
    (path,) = place.mountpoint.glob("job/step-*/rank-00000/manifest.json")
    manifest = json.loads(path.read_text())
    crc = crc32c(DATA)
    commit = int(os.getxattr(path.parent / "shard.bin", "user.cxlfs.commit"))
    assert commit > 0
    shard = {"name": "shard.bin", "size_bytes": len(DATA), "crc32c": crc, "commit": commit}
    assert manifest["shards"] == [shard]
    assert manifest["domain"] == os.uname().nodename
    assert os.getxattr(path.parent / "shard.bin", "user.cxlfs.crc32c") == b"%08x" % crc
    assert manifest["medium"]["kind"]
    assert len(manifest["medium"]["uuid"]) == 36
    made.close()  # else it keeps the mount busy
    place.remount()
    loaded: list[bytes] = []
    again = Checkpointer(place.mountpoint / "job", allow_volatile=True)
    found = again.restore_from_checkpoint(
        lambda path: loaded.append((path / "shard.bin").read_bytes())
    )
    assert isinstance(found, Restored)
    again.close()
    assert (found.attempt, found.digest, loaded) == (outcome.attempt, outcome.digest, [DATA])


def test_a_store_in_memory_is_refused(place: Workplace) -> None:
    if not medium.medium_of(place.mountpoint)[1]:
        pytest.skip("the source does not lie in memory")
    made = Checkpointer(place.mountpoint / "job")
    made.restore_from_checkpoint(lambda _path: None)
    assert isinstance(made.distributed_checkpoint(1, save), Aborted)


def test_a_full_store_aborts_and_the_step_before_stays(place: Workplace) -> None:
    place.announced.append("no-space")
    made = Checkpointer(place.mountpoint / "job", allow_volatile=True)
    made.restore_from_checkpoint(lambda _path: None)
    assert isinstance(made.distributed_checkpoint(1, save), Committed)

    def too_much(directory: Path) -> None:
        with (directory / "shard.bin").open("wb") as file:
            for _ in range(10_000):
                file.write(os.urandom(1 << 20))

    outcome = made.distributed_checkpoint(2, too_much)
    assert isinstance(outcome, Aborted)
    assert "No space left on device" in outcome.reasons[0][1]
    assert isinstance(made.distributed_checkpoint(3, save), Committed)
    made.close()
    with Checkpointer(place.mountpoint / "job", allow_volatile=True) as again:
        found = again.restore_from_checkpoint(lambda _path: None)
    assert isinstance(found, Restored)
    assert found.step == 3


def test_a_checkpointer_is_dropped_when_its_daemon_is_gone(place: Workplace) -> None:
    """Without a word from its finalizers, which pytest would take for an error."""
    made = Checkpointer(place.mountpoint / "job", allow_volatile=True)
    place.kill_daemon()
    del made
