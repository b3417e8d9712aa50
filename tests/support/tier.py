"""Checkpoints to be taken elsewhere, and what lies in a directory."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest

from cxlfs.errors import TierUnavailableError
from cxlfs.tier import Bucket, Had, send
from cxlfs.tier.stock import begin_removal

SIZES = {"model.bin": 300_000, "optim/state-0.bin": 70_001, "optim/state-1.bin": 512, "empty": 0}
LONG = "x" * 120 + "/" + "ä" * 60


def make_checkpoint(path: Path, rng: random.Random, **more: int) -> Path:
    """A directory with files of several sizes, an empty directory, and long names."""
    for name, size in {**SIZES, LONG: 3, **more}.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(rng.randbytes(size))
    (path / "nothing").mkdir()
    return path


def contents(path: Path) -> dict[str, bytes | None]:
    """Of everything below it by name; None: a directory. Nothing where nothing is."""
    found = sorted(path.rglob("*"))
    return {str(p.relative_to(path)): None if p.is_dir() else p.read_bytes() for p in found}


def stream_of(path: Path, had: tuple[Had, ...] = ()) -> bytes:
    stream = io.BytesIO()
    send(path, stream, had)
    return stream.getvalue()


def removal_ends(bucket: Bucket, name: str, monkeypatch: pytest.MonkeyPatch, at: int) -> bool:
    """Begin the removal of a checkpoint, of which the request ``at`` breaks off; it had fewer."""
    calls, original = 0, Bucket.remove

    def failing(self: Bucket, key: str) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise TierUnavailableError("planted")
        original(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "remove", failing)
        try:
            begin_removal(bucket, name)
        except TierUnavailableError:
            return False
    return True


class Dribble(io.RawIOBase):
    """A pipe that gives what it has in small pieces, as pipes do."""

    def __init__(self, data: bytes, rng: random.Random) -> None:
        self._file = io.BytesIO(data)
        self._rng = rng
        self.taken = 0

    def read(self, size: int = -1) -> bytes:
        piece = self._file.read(min(size, self._rng.randint(1, 70_000)))
        self.taken += len(piece)
        return piece
