"""Into a bucket and back, of whatever kind it is; and going on where it broke off."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from cxlfs.errors import (
    CheckpointExistsError,
    CxlfsError,
    NotInTierError,
    NotSendableError,
    TierUnavailableError,
    TierUntrustedError,
    UsageError,
)
from cxlfs.tier import (
    Bucket,
    Options,
    drain,
    fetch,
    keep_newest,
    newest,
    open_bucket,
    split_url,
)
from cxlfs.tier.objects import PART_BYTES, EntityTag
from cxlfs.tier.rate import Rate
from cxlfs.tier.stock import GOING, MANIFEST
from tests.support.cli import PROGRAM, Run
from tests.support.mount import wait_until
from tests.support.object_server import BUCKET, ObjectServer
from tests.support.tier import SIZES, contents, make_checkpoint, removal_ends

LARGE = 2 * PART_BYTES + 12_345
FILES = len(SIZES) + 1


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# --- there and back -----------------------------------------------------------------------------


def test_there_and_back(bucket: Bucket, step: Path, back: Path, rng: random.Random) -> None:
    (step / "large.bin").write_bytes(rng.randbytes(LARGE))
    done = drain(step, bucket)
    assert (done.sent_files, done.found_files) == (FILES + 1, 0)
    assert done.trust.creates
    fetched = fetch(bucket, "step-1", back)
    assert contents(fetched.path) == contents(step)
    assert names_in(back) == ["step-1"]
    again = drain(step, bucket)
    assert (again.sent_files, again.sent_bytes, again.found_files) == (0, 0, FILES + 1)


def test_a_checkpoint_of_one_file(bucket: Bucket, step: Path, back: Path) -> None:
    drain(step / "model.bin", bucket)
    fetch(bucket, "model.bin", back)
    assert (back / "model.bin").read_bytes() == (step / "model.bin").read_bytes()
    assert newest(bucket) == "model.bin"


def test_strange_names(bucket: Bucket, tmp_path: Path, back: Path) -> None:
    """One file is one object, whatever it is called; or it is refused before anything is put."""
    path = tmp_path / "a b#c%41"
    path.mkdir()
    for name in ("p%41", "ä ö", "x+y&z=1", "w\\z", "~q", "s*?[a]{b}", "c:d;e,f", "'\""):
        (path / name).write_bytes(name.encode())
    drain(path, bucket)
    fetch(bucket, path.name, back)
    assert contents(back / path.name) == contents(path)
    assert newest(bucket) == path.name


def test_the_list_for_sha256sum(tmp_path: Path, step: Path) -> None:
    (step / "w\\z").write_bytes(b"a backslash")
    (tmp_path / "bucket").mkdir()
    drain(step, open_bucket(f"file://{tmp_path}/bucket"))
    command = ["sha256sum", "--strict", "-c", "step-1.cxlfs-sha256"]
    done = subprocess.run(command, cwd=tmp_path / "bucket", capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b": OK") == FILES + 1


def test_what_a_server_tells_is_compared_without_reading(
    server: ObjectServer, step: Path, rng: random.Random
) -> None:
    (step / "large.bin").write_bytes(rng.randbytes(LARGE))
    done = drain(step, open_bucket(f"s3://{BUCKET}"))
    assert done.verified == "md5"
    assert ("GET", "step-1/large.bin") not in server.requests
    assert server.objects["step-1/large.bin"].tag.endswith("-3")
    read = drain(step, open_bucket(f"s3://{BUCKET}"), Options(read_back=True))
    assert (read.verified, read.sent_files) == ("read", 0)
    assert ("GET", "step-1/large.bin") in server.requests


def test_a_server_without_md5_is_read_back(server: ObjectServer, step: Path) -> None:
    server.habits.has_md5_tags = False
    assert drain(step, open_bucket(f"s3://{BUCKET}")).verified == "read"
    assert ("GET", "step-1/model.bin") in server.requests


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES])
def test_entity_tags(server: ObjectServer, tmp_path: Path, rng: random.Random, size: int) -> None:
    """As the server makes them of what arrives, in the parts that it arrives in."""
    (tmp_path / "x.bin").write_bytes(rng.randbytes(size))
    drain(tmp_path / "x.bin", open_bucket(f"s3://{BUCKET}"))
    tag = EntityTag(size)
    tag.update((tmp_path / "x.bin").read_bytes())
    assert server.objects["x.bin"].tag == tag.text()
    assert ("GET", "x.bin") not in server.requests


# --- going on -----------------------------------------------------------------------------------


def test_only_what_is_missing_is_sent(bucket: Bucket, step: Path, rng: random.Random) -> None:
    """An object of the same size and another content is sent again, and no other."""
    bucket.put("step-1/model.bin", [(step / "model.bin").read_bytes()], 300_000, parallel=1)
    bucket.put("step-1/optim/state-1.bin", [rng.randbytes(512)], 512, parallel=1)
    done = drain(step, bucket)
    assert (done.found_files, done.sent_files) == (1, FILES - 1)


def test_a_lost_object_is_put_again(bucket: Bucket, step: Path, back: Path) -> None:
    drain(step, bucket)
    bucket.remove("step-1/model.bin")
    with pytest.raises(TierUntrustedError, match=r"step-1/model\.bin is not there"):
        fetch(bucket, "step-1", back)
    assert names_in(back) == [".cxlfs-receiving"]
    assert drain(step, bucket).sent_files == 1
    fetched = fetch(bucket, "step-1", back)
    assert fetched.kept_files + (fetched.fetched_bytes > 0) >= 1
    assert contents(back / "step-1") == contents(step)


def test_an_altered_object_is_never_named(bucket: Bucket, step: Path, back: Path) -> None:
    drain(step, bucket)
    data = bytearray((step / "model.bin").read_bytes())
    data[1234] ^= 1
    bucket.put("step-1/model.bin", [bytes(data)], len(data), parallel=1)
    with pytest.raises(TierUntrustedError, match="its bytes are not what was announced"):
        fetch(bucket, "step-1", back)
    assert not (back / "step-1").exists()


@pytest.mark.parametrize("killed", ["drain", "fetch"])
def test_killed_in_the_middle(
    server: ObjectServer, step: Path, back: Path, rng: random.Random, killed: str
) -> None:
    """SIGKILL while an object is on its way: nothing is there, and the next one goes on."""
    for index in range(6):
        (step / f"shard-{index}.bin").write_bytes(rng.randbytes(200_000))
    url = f"s3://{BUCKET}"
    arguments = (
        ["drain", str(step), url] if killed == "drain" else ["fetch", f"{url}/step-1", str(back)]
    )
    if killed == "fetch":
        drain(step, open_bucket(url))
    reached, go = threading.Event(), threading.Event()
    count = 0

    def hold(key: str) -> None:
        nonlocal count
        count += key.startswith("step-1/")
        if count == 4:
            reached.set()
            go.wait(30)

    server.habits.on_put = hold
    with subprocess.Popen([*PROGRAM, *arguments, "--parallel", "1"]) as process:
        if killed == "drain":
            wait_until(lambda: reached.is_set() or process.poll() is not None, "it is on its way")
        else:
            first = back / ".cxlfs-receiving/step-1/tree/model.bin"
            wait_until(lambda: first.exists() or process.poll() is not None, "a file has come")
        process.send_signal(signal.SIGKILL)
    go.set()
    server.habits.on_put = lambda _key: None
    assert not (back / "step-1").exists()
    if killed == "drain":
        assert "step-1.cxlfs-manifest" not in server.objects
        done = drain(step, open_bucket(url))
        assert done.found_files >= 3
    fetched = fetch(open_bucket(url), "step-1", back)
    assert contents(fetched.path) == contents(step)


def test_two_contents_of_one_name(
    bucket: Bucket, step: Path, back: Path, rng: random.Random
) -> None:
    """The first claim decides; the manifest of one never stands over objects of another."""
    other = step.parent / "other" / "step-1"
    shutil.copytree(step, other)
    (other / "model.bin").write_bytes(rng.randbytes(300_000))
    (other / "bad").symlink_to("model.bin")
    with pytest.raises(NotSendableError):
        drain(other, bucket)
    (other / "bad").unlink()
    bucket.create("step-1.cxlfs-claim", b'{"format": 1, "content_id": "of somebody else"}')
    with pytest.raises(CheckpointExistsError, match="on its way there"):
        drain(step, bucket)
    drain(step, bucket, Options(take_over=True))
    with pytest.raises(CheckpointExistsError, match="is there, with another content"):
        drain(other, bucket)
    assert contents(fetch(bucket, "step-1", back).path) == contents(step)


def test_two_drains_at_once(bucket: Bucket, step: Path, back: Path) -> None:
    """Of the same content: both succeed. Of two: one does, and what is there is its own."""
    other = step.parent / "other" / "step-1"
    shutil.copytree(step, other)
    (other / "model.bin").write_bytes(bytes(300_000))
    outcomes: list[object] = []

    def work(path: Path) -> None:
        try:
            outcomes.append((path, drain(path, bucket)))
        except CxlfsError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=work, args=(path,)) for path in (step, step, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    won = {each[0] for each in outcomes if isinstance(each, tuple)}
    assert len(won) == 1, outcomes
    refused = [each for each in outcomes if not isinstance(each, tuple)]
    assert [each for each in refused if not isinstance(each, CheckpointExistsError)] == []
    assert contents(fetch(bucket, "step-1", back).path) == contents(won.pop())


def test_a_claim_that_its_owner_removes_while_it_is_read(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that goes between look and read is not there, and no fault of the server."""
    look = bucket.look

    def look_and_remove(key: str) -> object:
        found = look(key)
        bucket.remove(key)
        return found

    bucket.put("step-1.cxlfs-claim", [b"ours"], 4, parallel=1)
    monkeypatch.setattr(bucket, "look", look_and_remove)
    assert bucket.read("step-1.cxlfs-claim", 100) is None


def test_a_file_that_changes_on_the_way(bucket: Bucket, step: Path) -> None:
    def alter(activity: str, _done: int, _total: int) -> None:
        if activity == "draining":
            (step / "optim/state-0.bin").write_bytes(bytes(70_001))

    with pytest.raises(NotSendableError, match="changed while it was read"):
        drain(step, bucket, Options(parallel=1), progress=alter)
    assert bucket.look("step-1.cxlfs-manifest") is None


# --- policies -----------------------------------------------------------------------------------


def test_older_ones_go_by_policy_alone(bucket: Bucket, step: Path, back: Path) -> None:
    for number in (1, 2, 3, 10, 9):
        path = step.parent / f"step-{number}"
        if number != 1:
            shutil.copytree(step, path)
        drain(path, bucket)
    bucket.put("step-1/somebody's", [b"own"], 3, parallel=1)
    assert keep_newest(bucket, "step-9", 3) == ["step-2", "step-1"]
    assert bucket.objects_below("step-1").keys() == {"step-1/somebody's"}
    assert bucket.objects_below("step-2") == {}
    assert newest(bucket) == "step-10"
    assert contents(fetch(bucket, "step-3", back).path) == contents(step)
    with pytest.raises(NotInTierError, match="it has step-10, step-9, step-3"):
        fetch(bucket, "step-2", back)


def test_one_that_is_not_whole_keeps_its_elder(step: Path) -> None:
    bucket = Bucket(MemoryStore(), "memory://")
    for number in (2, 3, 4):
        shutil.copytree(step, step.parent / f"step-{number}")
    for number in (1, 2, 3, 4):
        drain(step.parent / f"step-{number}", bucket)
    bucket.remove("step-3/model.bin")
    assert keep_newest(bucket, "step-4", 2) == ["step-1"]
    assert bucket.look("step-2.cxlfs-manifest") is not None


def test_a_removal_that_broke_off_is_finished(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each of its requests: it is there as a whole, or nothing of it is."""
    bucket = Bucket(MemoryStore(), "memory://")
    newer = step.parent / "step-2"
    shutil.copytree(step, newer)
    drain(newer, bucket)
    for at in range(1, 20):
        drain(step, bucket)
        ended = removal_ends(bucket, "step-1", monkeypatch, at)
        assert keep_newest(bucket, "step-2", 5) == []
        assert bucket.look("step-1" + GOING) is None
        is_there = bucket.look("step-1.cxlfs-manifest") is not None
        assert len(bucket.objects_below("step-1")) == (FILES if is_there else 0)
        if ended:
            return
    pytest.fail("the requests never came to an end")


def test_a_bucket_that_may_not_delete(server: ObjectServer, step: Path) -> None:
    server.habits.may_delete = False
    done = drain(step, open_bucket(f"s3://{BUCKET}"))
    assert done.sent_files == FILES


def test_rate() -> None:
    now, slept = 0.0, []

    def sleep(seconds: float) -> None:
        slept.append(seconds)

    rate = Rate(1000, clock=lambda: now, sleep=sleep)
    for size in (500, 500, 1000):
        rate.wait_for(size)
    assert slept == [0.5, 1.0]
    now = 10.0
    rate.wait_for(100)
    assert slept == [0.5, 1.0]


# --- the command line ---------------------------------------------------------------------------


def test_the_commands(run: Run, tmp_path: Path, step: Path, back: Path) -> None:
    (tmp_path / "bucket").mkdir()
    url = f"file://{tmp_path}/bucket"
    said = run("drain", step, url, "--keep", "1", "--rate", "1G/s", "--json").document
    assert (said["schema"], said["url"], said["sent_files"], said["removed"], said["recorded"]) == (
        "cxlfs.drain/1",
        f"{url}/step-1",
        FILES,
        [],
        True,
    )
    shutil.copytree(step, step.with_name("step-2"))
    assert (
        "removed there: step-1" in run("drain", step.with_name("step-2"), url, "--keep", "1").stdout
    )
    said = run("fetch", "--newest", url, back, "--json").document
    assert (said["schema"], said["path"], said["files"]) == (
        "cxlfs.fetch/1",
        f"{back}/step-2",
        FILES,
    )
    assert contents(back / "step-2") == contents(step)
    assert run("fetch", f"{url}/step-2", back).code == CheckpointExistsError.exit_code
    assert run("fetch", f"{url}/step-1", back).code == NotInTierError.exit_code
    assert run("drain", step, "nonsense").code == 2
    assert run("drain", step, "ftp://host/x").code == 2
    assert run("drain", step, f"file://{tmp_path}/not-there").code == TierUnavailableError.exit_code


def test_urls() -> None:
    assert split_url("s3://bucket/run1/step%201/") == ("s3://bucket/run1", "step 1")
    assert split_url("file:///mnt/nas/step-1") == ("file:///mnt/nas", "step-1")
    for url in ("s3://bucket", "step-1", "file:///"):
        with pytest.raises(UsageError):
            split_url(url)
    for url in ("s3://bucket/run#1", "s3://bucket/run?1", "file://nas/run1", "memory://"):
        with pytest.raises(UsageError, match=re.escape(url)):
            open_bucket(url)


@pytest.mark.parametrize("name", ["step%41", "step#1", "step?1", "step 1 ä"])
def test_the_url_of_a_checkpoint_leads_to_it(run: Run, step: Path, back: Path, name: str) -> None:
    path = step.rename(step.with_name(name))
    (back.parent / "bucket").mkdir()
    url = run("drain", path, f"file://{back.parent}/bucket", "--json").document["url"]
    assert run("fetch", url, back).code == 0
    assert contents(back / name) == contents(path)


def test_a_checkpoint_is_no_copy_of_itself(run: Run, step: Path) -> None:
    """The same place by another name: each of its objects would be there."""
    (step.parent.parent / "also").symlink_to(step.parent)
    before = contents(step.parent)
    said = run("drain", step, f"file://{step.parent.parent}/also", "--keep", "1")
    assert (said.code, "no second copy" in said.stderr) == (25, True)
    assert contents(step.parent) == before


def test_without_obstore(step: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    said = run("drain", step, f"file://{step.parent}")
    assert (said.code, "pip install 'cxlfs[tier]'" in said.stderr) == (2, True)


def test_a_hostile_manifest(bucket: Bucket, back: Path, step: Path) -> None:
    plain = json.loads(drain(step, bucket).manifest.encode())
    for change in (
        {"name": "step-2"},
        {"files": [{**plain["files"][0], "name": "../../x"}]},
        {"files": [{**plain["files"][0], "base": "step-0", "sha256": "f" * 64}]},
        {"format": 2},
    ):
        data = json.dumps({**plain, **change}).encode()
        bucket.put("step-1.cxlfs-manifest", [data], len(data), parallel=1)
        with pytest.raises(TierUntrustedError):
            fetch(bucket, "step-1", back)
    for name in ("..", ".cxlfs-aside"):  # no names to fetch
        bucket.put(f"{name}{MANIFEST}", [b"{}"], 2, parallel=1)
    assert newest(bucket) == "step-1"
    assert names_in(back) == []


def test_a_directory_as_a_bucket_is_synced(
    tmp_path: Path, step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Obstore leaves that to the system: each object was synced before its manifest was put."""
    (tmp_path / "bucket").mkdir()
    synced: list[str] = []
    original = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    drain(step, open_bucket(f"file://{tmp_path}/bucket"))
    place = tmp_path / "bucket"
    manifest = synced.index(f"{place}/step-1.cxlfs-manifest")
    for path in (place / "step-1").rglob("*"):
        if path.is_file():
            assert str(path) in synced[:manifest], path
            assert str(path.parent) in synced[:manifest]


@pytest.mark.mounted
def test_the_list_says_where_a_checkpoint_lies(
    run: Run, mnt: Path, tmp_path: Path, rng: random.Random
) -> None:
    """Until something else lies under the name."""
    step = make_checkpoint(mnt / "step-1", rng)
    (tmp_path / "bucket").mkdir()
    url = f"file://{tmp_path}/bucket"
    assert " IN " not in run("list", mnt).stdout
    assert run("drain", step, url).code == 0
    assert "  cxl+tier  " in run("list", mnt).stdout
    found = run("list", mnt, "--json").document["checkpoints"]
    places = {each["path"]: each["places"] for each in found}
    assert places == {"/step-1": ["cxl", "tier"]}  # and what says so is not listed
    (step / "model.bin").write_bytes(b"another one")
    assert "cxl+tier" not in run("list", mnt).stdout
    shutil.rmtree(step)
    assert run("fetch", f"{url}/step-1", mnt).code == 0
    assert "  cxl+tier  " in run("list", mnt).stdout
