"""What a store takes from another rank: what it expects, all of it, in its place alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cxlfs.errors import JobFilesError, JobLinkError, JobMessageError
from cxlfs.job import copying, files
from cxlfs.job.files import Manifest, Medium, Shard
from cxlfs.job.protocol import Attempt, Held
from cxlfs.native import crc32c
from tests.support import job_copy_mutants
from tests.support.job_links import Switch
from tests.support.job_ranks import SECONDS

ATTEMPT = Attempt(3, 100, "0123456789abcdef")
SHARDS = (Shard("a/b.pt", 7, crc32c(b"weights")), Shard("empty", 0, 0))
MANIFEST = Manifest(ATTEMPT, 1, 2, "node", "store", Medium(), SHARDS)


def offered(root: Path, data: bytes, *, digest: str = "", size: int = -1) -> str:
    """Why a store refuses what comes with that manifest; empty: it does not."""
    switch = Switch()
    sender, receiver = (switch.link(own, 1 - own, "offer", SECONDS) for own in (0, 1))
    copying._tell(sender, len(data) if size < 0 else size)
    sender.send(bytearray(data))
    sender.send(bytearray(b"weights"))
    refusal = ""
    try:
        copying.receive(receiver, root, copying.Wanted(ATTEMPT, 1, 2, digest))
    except (JobFilesError, JobMessageError, OSError) as error:
        refusal = f"{type(error).__name__}: {error}"[:500]
    assert copying._hear(sender)[1] == refusal
    assert bool(list(root.glob("step-*/*"))) == (not refusal)
    return refusal


def test_a_manifest_is_the_one_that_is_expected(tmp_path: Path) -> None:
    digest = files.digest_of_bytes(MANIFEST.encode())
    for number, known in enumerate(("", digest)):
        assert offered(tmp_path / str(number), MANIFEST.encode(), digest=known) == ""
        (held,), _ = take_stock(tmp_path / str(number))
        assert (held.attempt, held.rank, held.manifest) == (ATTEMPT, 1, digest)
    for changes in (
        {"attempt": Attempt(3, 100, "f" * 16)},
        {"rank": 0},
        {"world": 3},
    ):
        other = dataclasses.replace(MANIFEST, **changes).encode()  # type: ignore[arg-type]
        assert "what came is of" in offered(tmp_path / "x", other)
    assert "another manifest" in offered(tmp_path / "x", MANIFEST.encode(), digest="0" * 64)
    assert "damaged" in offered(tmp_path / "x", MANIFEST.encode() + b" ")
    in_other_words = files._summed(MANIFEST.encode().rpartition(files._SUM)[0] + b" ")
    assert "not written as" in offered(tmp_path / "x", in_other_words)
    assert "a manifest of" in offered(tmp_path / "x", b"", size=files.MANIFEST_BYTES_MAX + 1)
    assert offered(tmp_path / "x", b"[" * 1000)


def take_stock(root: Path) -> tuple[tuple[Held, ...], tuple[str, ...]]:
    inventory, problems = files.take_stock(root, "")
    return inventory.held, problems


@pytest.mark.parametrize(
    "names",
    [
        ("../a",),
        ("/etc/cxlfs-never",),
        ("a", "a"),
        ("a", "a/b"),
        ("a/b", "a"),
        ("manifest.json",),
        ("x" * 300,),
    ],
    ids=str,
)
def test_no_name_leads_out_or_twice_to_one_place(tmp_path: Path, names: tuple[str, ...]) -> None:
    shards = tuple(Shard(name, 7, crc32c(b"weights")) for name in names)
    assert offered(tmp_path, dataclasses.replace(MANIFEST, shards=shards).encode())
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("step-")] == []


@pytest.mark.parametrize("size", [1 << 50, (1 << 63) - 1])
def test_no_size_is_too_large_to_be_refused(tmp_path: Path, size: int) -> None:
    shards = (Shard("a", size, 0),)
    assert "OSError" in offered(tmp_path, dataclasses.replace(MANIFEST, shards=shards).encode())


def test_answers_that_are_none(tmp_path: Path) -> None:
    switch = Switch()
    sender, receiver = (switch.link(own, 1 - own, "offer", SECONDS) for own in (0, 1))
    sender.send(bytearray(b"{" * 4096))
    with pytest.raises(JobMessageError):
        copying.receive(receiver, tmp_path, copying.Wanted(ATTEMPT, 1, 2))
    copying.refuse(sender, ValueError("nothing to send"))
    with pytest.raises(JobLinkError, match="refused: ValueError: nothing to send"):
        copying.receive(receiver, tmp_path, copying.Wanted(ATTEMPT, 1, 2))


def test_that_it_is_believed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted mistake."""
    job_copy_mutants.another_generation_is_taken_for_it(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_manifest_is_the_one_that_is_expected(tmp_path)
