"""Pages mapped ahead of the writer: where that costs memory alone, and nothing else."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cxlfs.errors import InvariantError
from cxlfs.native import Granularity, MappedRegion
from tests.support.extents import pattern

SIZE = 16 << 20
PAGE = os.sysconf("SC_PAGESIZE")


def file_system(path: Path) -> str:
    command = ["stat", "-f", "-c", "%T", str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def region_in(folder: Path) -> Iterator[MappedRegion]:
    path = folder / f"cxlfs-populate-{os.getpid()}"
    with path.open("w+b") as file:
        path.unlink()
        os.posix_fallocate(file.fileno(), 0, SIZE)
        region = MappedRegion(
            MappedRegion.map_handle(file.fileno(), SIZE, granularity=Granularity.PAGE)
        )
        yield region
        region.close()


def faults_of_writing(region: MappedRegion, offset: int, length: int) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for place in range(offset, offset + length, PAGE):
        region.store(place, b"x")
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.fixture
def shared_memory() -> Path:
    folder = Path("/dev/shm")  # noqa: S108 - a file system, not a place for files
    if not folder.is_dir() or file_system(folder) != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    return folder


def test_a_writer_meets_no_faults(shared_memory: Path) -> None:
    with region_in(shared_memory) as region:
        if not region.populate(0, 1):
            pytest.skip("the kernel has no MADV_POPULATE_WRITE")
        assert region.populate(0, SIZE // 2 - 100) == SIZE // 2
        without = faults_of_writing(region, SIZE // 2, SIZE // 2)
        ahead = faults_of_writing(region, 0, SIZE // 2)
        assert ahead < without / 3 + 20  # some are of other memory, most under a sanitizer


def test_it_changes_nothing_and_is_not_recorded(shared_memory: Path) -> None:
    with region_in(shared_memory) as region:
        data = pattern(3 * PAGE, 1)
        region.store(PAGE // 2, data)
        region.record(on=True)
        region.populate(0, SIZE)
        assert region.recorded() == b""
        region.record(on=False)
        assert region.read(PAGE // 2, len(data)) == data
        assert region.read(5 * PAGE, PAGE) == bytes(PAGE)


def test_it_is_left_alone_elsewhere(tmp_path: Path) -> None:
    """Touched pages of a disk's file would be written to it."""
    with region_in(tmp_path) as region:
        in_memory = file_system(tmp_path) in ("tmpfs", "ramfs")
        assert region.populates == in_memory
        if not in_memory:
            assert region.populate(0, SIZE) == 0
    region = MappedRegion(MappedRegion.anonymous_handle(SIZE, granularity=Granularity.LINE))
    assert not region.populates
    assert region.populate(0, SIZE) == 0
    region.close()


@pytest.mark.parametrize(("offset", "length"), [(SIZE, 1), (0, SIZE + 1), (SIZE + 1, 0)])
def test_ranges_beyond_the_media(tmp_path: Path, offset: int, length: int) -> None:
    with region_in(tmp_path) as region, pytest.raises(InvariantError):
        region.populate(offset, length)
