"""What a rank has saved, and what it loads, is compared on the medium: in place where it may be.
Damage there is found, whichever way it is looked at.
"""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from cxlfs import client
from cxlfs.job import files, reading_back
from cxlfs.job.files import Manifest, Medium, Shard
from cxlfs.job.protocol import Attempt
from cxlfs.native import crc32c
from tests.support.mount import MIB, Workplace

pytestmark = pytest.mark.usefixtures("nothing_stays_mapped")

ATTEMPT = Attempt(3, 100, "0123456789abcdef")
SIZE_BYTES = 5 * MIB + 4321


class Saved:
    """A rank's shards, voted for."""

    def __init__(self, place: Workplace, data: bytes) -> None:
        self.place = place
        self.root = place.mountpoint / "job"
        self.root.mkdir()
        self.data = data
        staged = files.begin(self.root, ATTEMPT, 0)
        (staged / "a.pt").write_bytes(data)
        (staged / "small").write_bytes(data[:4000])
        self.shards = files.measure(staged)
        manifest = Manifest(ATTEMPT, 0, 1, "node", "store", Medium(), self.shards)
        self.digest = files.seal(self.root, manifest)
        self.path = files.rank_path(self.root, ATTEMPT, 0) / "a.pt"

    def flip(self) -> None:
        """One bit of it on the medium."""
        content = self.place.source.read_bytes()
        at = content.index(self.data[3 * MIB : 3 * MIB + 64])
        with self.place.source.open("r+b") as medium:
            medium.seek(at)
            medium.write(bytes([content[at] ^ 1]))

    def assert_damage_is_found(self) -> None:
        """By either look, and the mount hears of it."""
        self.place.announced.append("checksum-error")
        self.flip()
        try:
            for look in (
                lambda: files.measured(self.path, "a.pt"),
                lambda: files.verify(self.root, ATTEMPT, 0, self.digest),
            ):
                with pytest.raises(OSError, match=f"Errno {errno.EIO}"):
                    look()
            assert os.getxattr(self.path, "user.cxlfs.state") == b"damaged"
        finally:
            self.flip_back()

    def flip_back(self) -> None:
        content = self.place.source.read_bytes()
        wanted = self.data[3 * MIB : 3 * MIB + 64]
        at = content.index(bytes([wanted[0] ^ 1]) + wanted[1:])
        with self.place.source.open("r+b") as medium:
            medium.seek(at)
            medium.write(wanted[:1])


@pytest.fixture
def saved(place: Workplace, rng: random.Random) -> Saved:
    return Saved(place, rng.randbytes(SIZE_BYTES))


@pytest.fixture
def _by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("cxlfs.client.mapped.StoredContent", refuse)


def test_it_is_compared_in_place(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its manifest says of which commits of the store it is."""
    crcs = crc32c(saved.data), crc32c(saved.data[:4000])
    assert [(s.name, s.size_bytes, s.crc32c) for s in saved.shards] == [
        ("a.pt", SIZE_BYTES, crcs[0]),
        ("small", 4000, crcs[1]),
    ]
    assert [s.commit for s in saved.shards] == [
        int(os.getxattr(saved.path.with_name(name), "user.cxlfs.commit"))
        for name in ("a.pt", "small")
    ]
    compared: list[int] = []
    verify = client.StoredFile.verify

    def watched(self: client.StoredFile, offset: int, length: int) -> None:
        verify(self, offset, length)
        compared.append(length)

    monkeypatch.setattr(client.StoredFile, "verify", watched)
    assert files.verify(saved.root, ATTEMPT, 0, saved.digest) == saved.path.parent
    assert files.measured(saved.path, "a.pt") == saved.shards[0]
    assert compared == [SIZE_BYTES] * 2


@pytest.mark.usefixtures("_by_the_kernel")
def test_who_may_not_look_reads(saved: Saved) -> None:
    assert reading_back._in_place(saved.path) is None
    assert files.verify(saved.root, ATTEMPT, 0, saved.digest) == saved.path.parent
    assert files.measured(saved.path, "a.pt") == saved.shards[0]


def test_what_is_replaced_meanwhile_is_read(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    promised = iter([1, 2])
    monkeypatch.setattr(reading_back, "promised_crc32c", lambda _path: next(promised))
    assert reading_back.read_back(saved.path) == (SIZE_BYTES, crc32c(saved.data))


def test_damage_is_found_in_place(saved: Saved) -> None:
    saved.assert_damage_is_found()


@pytest.mark.usefixtures("_by_the_kernel")
def test_damage_is_found_by_the_kernel(saved: Saved) -> None:
    saved.assert_damage_is_found()


def test_that_pages_are_not_compared_is_found(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.StoredFile, "verify", lambda *_: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        saved.assert_damage_is_found()


def test_elsewhere_there_are_no_commits(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"weights")
    assert files.measured(tmp_path / "a", "a") == Shard("a", 7, crc32c(b"weights"), 0)
