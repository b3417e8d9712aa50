"""Files of a job's checkpoint: what is written is read, and what comes from anywhere is refused."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from cxlfs.errors import JobFilesError
from cxlfs.job import aside, files, medium
from cxlfs.job.files import Manifest, Medium, Shard
from cxlfs.job.protocol import Attempt, Commit
from cxlfs.native import crc32c

ATTEMPT = Attempt(3, 100, "0123456789abcdef")


def sealed(root: Path, rank: int = 0, data: bytes = b"weights") -> str:
    directory = files.begin(root, ATTEMPT, rank)
    (directory / "a").mkdir()
    (directory / "a" / "b.pt").write_bytes(data)
    shards = files.measure(directory)
    assert shards == (Shard("a/b.pt", len(data), crc32c(data)),)
    return files.seal(
        root, Manifest(ATTEMPT, rank, 1, "node", "store", Medium("u", "k", "w"), shards)
    )


def test_what_is_sealed_is_found_and_verified(tmp_path: Path) -> None:
    digest = sealed(tmp_path)
    files.record_commit(tmp_path, ATTEMPT, 0, "votes")
    inventory, problems = files.take_stock(tmp_path, "store")
    assert problems == ()
    assert [(h.attempt, h.rank, h.world, h.manifest) for h in inventory.held] == [
        (ATTEMPT, 0, 1, digest)
    ]
    assert inventory.commits == (Commit(ATTEMPT, "votes"),)
    assert (files.verify(tmp_path, ATTEMPT, 0, digest) / "a" / "b.pt").read_bytes() == b"weights"
    with pytest.raises(JobFilesError):
        files.verify(tmp_path, ATTEMPT, 0, "another")
    files.remove_rank(tmp_path, ATTEMPT, 0)
    assert list(tmp_path.iterdir()) == []


def test_what_is_being_saved_does_not_count(tmp_path: Path) -> None:
    files.begin(tmp_path, ATTEMPT, 0)
    assert files.take_stock(tmp_path / "none", "s")[0].held == ()
    assert files.take_stock(tmp_path, "s")[0].held == ()


def test_a_damaged_commit_does_not_count(tmp_path: Path) -> None:
    """One of another digest would speak against what all have voted for, and its copies."""
    sealed(tmp_path)
    files.record_commit(tmp_path, ATTEMPT, 0, "votes")
    path = tmp_path / files.attempt_name(ATTEMPT) / "commit-00000.json"
    path.write_bytes(path.read_bytes().replace(b"votes", b"vores"))
    inventory, problems = files.take_stock(tmp_path, "store")
    assert inventory.commits == ()
    assert "damaged" in problems[0]


def test_a_manifest_of_which_a_byte_was_changed_does_not_count(tmp_path: Path) -> None:
    """Nobody could say whether it or its copy was voted for."""
    sealed(tmp_path)
    path = files.rank_path(tmp_path, ATTEMPT, 0) / "manifest.json"
    data = path.read_bytes()
    for at, byte in enumerate(data):
        for other in {byte ^ 1, ord(" "), ord("7")} - {byte}:
            with pytest.raises(JobFilesError):
                files.decode_manifest(data[:at] + bytes([other]) + data[at + 1 :], path)
    path.write_bytes(data.replace(b'"node": "node"', b'"node": "nude"'))
    assert "its manifest is damaged" in files.take_stock(tmp_path, "store")[1][0]


def test_what_is_set_aside_counts_no_more_and_then_goes(tmp_path: Path) -> None:
    other = Attempt(2, 90, "e" * 16)
    sealed(tmp_path)
    files.begin(tmp_path, other, 0)
    files.record_commit(tmp_path, ATTEMPT, 0, "votes")
    assert set(files.attempts_in(tmp_path)) == {ATTEMPT, other}
    for attempt in (ATTEMPT, other):
        aside.set_aside(tmp_path, attempt)
    assert files.take_stock(tmp_path, "s") == files.take_stock(tmp_path / "none", "s")
    assert aside.is_anything_aside(tmp_path)
    aside.remove_aside(tmp_path)
    assert not aside.is_anything_aside(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_removed_is_waited_for_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed(tmp_path)
    aside.set_aside(tmp_path, ATTEMPT)

    def refuse(_path: object) -> None:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(aside.shutil, "rmtree", refuse)
        with pytest.raises(PermissionError):
            aside.remove_aside(tmp_path)
    assert not aside.is_anything_aside(tmp_path)
    aside.remove_aside(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_was_never_finished_goes_and_what_is_whole_stays(tmp_path: Path) -> None:
    """Shards that were being copied into an attempt that stays."""
    digests = {rank: sealed(tmp_path, rank) for rank in (0, 1)}
    files.record_commit(tmp_path, ATTEMPT, 1, "votes")
    for rank in (1, 2):  # rank 1 has a whole part, and a second copy of it in the making
        files.begin(tmp_path, ATTEMPT, rank)
    files.remove_unfinished(tmp_path, ATTEMPT, lambda rank: rank == 1)
    names = sorted(path.name for path in tmp_path.glob("step-*/*"))
    assert names == ["commit-00001.json", "rank-00000", "rank-00001", "rank-00002.tmp"]
    for rank, digest in digests.items():
        files.verify(tmp_path, ATTEMPT, rank, digest)


def test_what_a_kill_left_in_an_attempt_goes_with_it(tmp_path: Path) -> None:
    sealed(tmp_path)
    commit = tmp_path / files.attempt_name(ATTEMPT) / "commit-00000.json.77.tmp"
    commit.touch()
    files.remove_ranks(tmp_path, ATTEMPT, lambda rank: rank == 1)
    assert commit.exists()
    files.remove_ranks(tmp_path, ATTEMPT, lambda rank: rank == 0)
    assert list(tmp_path.iterdir()) == []


def test_whether_shards_lie_in_other_stores(tmp_path: Path) -> None:
    sealed(tmp_path)
    directory = tmp_path / files.attempt_name(ATTEMPT)
    files.record_commit(tmp_path, ATTEMPT, 0, "votes")
    assert not files.has_copies(directory)
    files.record_commit(tmp_path, ATTEMPT, 0, "votes", ["another"])
    assert files.has_copies(directory)
    assert files.take_stock(tmp_path, "s")[0].commits == (Commit(ATTEMPT, "votes"),)
    path = directory / "commit-00000.json"
    path.write_bytes(path.read_bytes().replace(b"another", b"anather"))
    assert not files.has_copies(directory)
    assert not files.has_copies(tmp_path)


def test_only_files_can_be_saved(tmp_path: Path) -> None:
    directory = files.begin(tmp_path, ATTEMPT, 0)
    (directory / "link").symlink_to("/etc/passwd")
    with pytest.raises(JobFilesError):
        files.measure(directory)
    (directory / "link").unlink()
    (directory / "manifest.json").touch()
    with pytest.raises(JobFilesError):
        files.measure(directory)


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a//b", "a/./b", "", "a\0b", "a/..", "."])
def test_no_name_leads_elsewhere(tmp_path: Path, name: str) -> None:
    manifest = Manifest(ATTEMPT, 0, 1, "n", "s", Medium(), (Shard(name, 1, 1),))
    with pytest.raises(JobFilesError):
        files.decode_manifest(manifest.encode(), tmp_path)


def test_links_and_pipes_in_the_place_of_files_are_not_opened(tmp_path: Path) -> None:
    digest = sealed(tmp_path)
    path = files.rank_path(tmp_path, ATTEMPT, 0) / "a" / "b.pt"
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic"):
        files.verify(tmp_path, ATTEMPT, 0, digest)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(JobFilesError):
        files.verify(tmp_path, ATTEMPT, 0, digest)
    manifest = path.parents[1] / "manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    assert files.take_stock(tmp_path, "s")[0].held == ()


def test_hostile_manifests_and_commits(tmp_path: Path, rng: random.Random) -> None:
    sealed(tmp_path)
    files.record_commit(tmp_path, ATTEMPT, 0, "votes")
    directory = files.rank_path(tmp_path, ATTEMPT, 0)
    places = (directory / "manifest.json", directory.with_name("commit-00000.json"))
    for path in places:
        data = path.read_bytes()
        for _ in range(150):
            changed = bytearray(data[: rng.randrange(1, len(data) + 1)])
            for _ in range(rng.randrange(4)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            path.write_bytes(changed)
            inventory, _ = files.take_stock(tmp_path, "s")
            assert len(inventory.held) + len(inventory.commits) in {1, 2}
        path.write_bytes(b"[" * 100_000)
        assert files.take_stock(tmp_path, "s")[1] != ()
        with path.open("wb") as file:
            file.truncate(1 << 40)
        assert files.take_stock(tmp_path, "s")[1] != ()
        path.write_bytes(data)
    manifest = files.decode_manifest(places[0].read_bytes(), tmp_path)
    other = dataclasses.replace(manifest, attempt=Attempt(3, 101, ATTEMPT.id))
    places[0].write_bytes(other.encode())
    assert "its manifest is of step 101" in files.take_stock(tmp_path, "s")[1][0]


def test_names_that_are_no_attempts_are_left_alone(tmp_path: Path) -> None:
    for name in ("step-1", "step-000000000001.000001-xyz", "step-0000000000001.000001-" + "0" * 16):
        (tmp_path / name).mkdir()
    (tmp_path / files.attempt_name(ATTEMPT)).touch()
    assert files.take_stock(tmp_path, "s") == files.take_stock(tmp_path / "none", "s")


def test_a_store_is_known_by_what_it_holds(tmp_path: Path) -> None:
    first = medium.identity(tmp_path / "new")
    assert medium.identity(tmp_path / "new") == first
    assert medium.identity(tmp_path / "other") != first
    assert [path.name for path in (tmp_path / "new").iterdir()] == [medium.IDENTITY_NAME]
    for _ in range(2):
        medium.mark_lines(tmp_path / "new")
        assert medium.identity(tmp_path / "new") == first
    marked = (tmp_path / "new" / medium.IDENTITY_NAME).read_bytes()
    for size in range(36, len(marked)):  # power was lost on the way
        (tmp_path / "new" / medium.IDENTITY_NAME).write_bytes(marked[:size])
        assert medium.identity(tmp_path / "new") == first
    with pytest.raises(ValueError, match="badly formed"):  # as versions before read it
        uuid.UUID(marked[:37].decode())
    (tmp_path / "new" / medium.IDENTITY_NAME).write_bytes(marked + b"x")
    with pytest.raises(JobFilesError):
        medium.identity(tmp_path / "new")
    (tmp_path / "new" / medium.IDENTITY_NAME).write_bytes(b"x" * 1000)
    with pytest.raises(JobFilesError):
        medium.identity(tmp_path / "new")


def test_no_framework_is_imported() -> None:
    code = (
        "import sys, cxlfs.job; cxlfs.job.Checkpointer; "
        "print({'torch', 'mpi4py', 'trio', 'pyfuse3'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
