"""Random mixtures of direct, cached and mapped access to one file, against a model in memory.

The kernel caches what some descriptors see and lets others pass: whatever the mixture, each must
see what the last one wrote. CXLFS_TEST_SEED repeats a failing run.
"""

from __future__ import annotations

import mmap
import os
import random
from pathlib import Path

import pytest

from tests.support.mount import Workplace

SIZE_BYTES_MAX = 300_000
STEPS = 300


class Mixture:
    """One file, its model, and one descriptor of each kind."""

    def __init__(self, path: Path, rng: random.Random) -> None:
        self.path = path
        self.rng = rng
        self.model = bytearray()
        path.touch()
        self.writer = os.open(path, os.O_WRONLY)
        self.appender = os.open(path, os.O_WRONLY | os.O_APPEND)
        self.both = os.open(path, os.O_RDWR)
        self.reader = os.open(path, os.O_RDONLY)

    def close(self) -> None:
        for descriptor in (self.writer, self.appender, self.both, self.reader):
            os.close(descriptor)

    def data(self) -> tuple[int, bytes]:
        """An offset, a little beyond the end at most, and new bytes for it."""
        offset = self.rng.randrange(min(len(self.model) + 5000, SIZE_BYTES_MAX))
        length = self.rng.choice([1, 100, 4096, 5000, 70_000])
        return offset, self.rng.randbytes(min(length, SIZE_BYTES_MAX - offset))

    def put(self, offset: int, data: bytes) -> None:
        if offset > len(self.model):
            self.model.extend(bytes(offset - len(self.model)))
        self.model[offset : offset + len(data)] = data

    def write_directly(self) -> None:
        offset, data = self.data()
        assert os.pwrite(self.writer, data, offset) == len(data)
        self.put(offset, data)

    def write_cached(self) -> None:
        offset, data = self.data()
        assert os.pwrite(self.both, data, offset) == len(data)
        self.put(offset, data)

    def append(self) -> None:
        data = self.rng.randbytes(self.rng.choice([1, 333, 4096]))
        if len(self.model) + len(data) <= SIZE_BYTES_MAX:
            assert os.write(self.appender, data) == len(data)
            self.model.extend(data)

    def write_mapped(self) -> None:
        if not self.model:
            return
        with mmap.mmap(self.both, 0) as mapping:
            assert len(mapping) == len(self.model)
            offset = self.rng.randrange(len(self.model))
            data = self.rng.randbytes(min(5000, len(self.model) - offset))
            mapping[offset : offset + len(data)] = data
            self.model[offset : offset + len(data)] = data
            if self.rng.random() < 0.5:
                mapping.flush()

    def truncate(self) -> None:
        size = self.rng.randrange(SIZE_BYTES_MAX)
        if self.rng.random() < 0.5:
            os.truncate(self.path, size)
        else:
            os.ftruncate(self.rng.choice([self.writer, self.both]), size)
        if size < len(self.model):
            del self.model[size:]
        else:
            self.model.extend(bytes(size - len(self.model)))

    def read(self) -> None:
        descriptor = self.rng.choice([self.both, self.reader])
        offset = self.rng.randrange(SIZE_BYTES_MAX)
        length = self.rng.choice([1, 4096, 100_000])
        assert os.pread(descriptor, length, offset) == self.model[offset : offset + length]

    def read_mapped(self) -> None:
        if self.model:
            with mmap.mmap(self.reader, 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
                assert mapping[:] == self.model

    def read_anew(self) -> None:
        assert self.path.read_bytes() == self.model

    def close_one(self) -> None:
        os.close(self.writer)
        self.writer = os.open(self.path, os.O_WRONLY)

    def sync(self) -> None:
        os.fsync(self.both)


@pytest.mark.parametrize("round_number", range(3))
def test_every_way_of_access_sees_the_others(place: Workplace, round_number: int) -> None:
    seed = os.environ.get("CXLFS_TEST_SEED", f"mixture-{round_number}")
    print(f"CXLFS_TEST_SEED={seed}")
    rng = random.Random(seed)
    mixture = Mixture(place.mountpoint / "file", rng)
    steps = [
        *(mixture.write_directly, mixture.write_cached, mixture.append, mixture.write_mapped),
        *(mixture.truncate, mixture.read, mixture.read, mixture.read_mapped, mixture.read_anew),
        *(mixture.close_one, mixture.sync),
    ]
    try:
        for _ in range(STEPS):
            rng.choice(steps)()
            assert mixture.path.stat().st_size == len(mixture.model)
    finally:
        mixture.close()
    place.remount()
    mixture.read_anew()
