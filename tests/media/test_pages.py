"""Large pages: where a mapping begins, what the kernel says it has got, what each file system in
memory gives, and how a pool of huge pages that is too small is told.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cxlfs.cli import main
from cxlfs.cli.output import Style
from cxlfs.cli.status import look
from cxlfs.errors import MediaUnavailableError, NoSpaceError
from cxlfs.media import Granularity, open_media
from cxlfs.media.pages import SMALL_PAGE_BYTES, MappedPages, Pool, huge_page_bytes, pool_of
from cxlfs.media.room import mount_options_of
from cxlfs.native import MappedRegion
from cxlfs.native.mapped_pages import PART_PAGES, PARTS, MappedBytes, mapped_bytes
from cxlfs.store import Store
from cxlfs.units import GIB, MIB
from cxlfs.verify import inspect
from tests.support.bench.apart import apart
from tests.support.memory_mounts import NotHereError, enter, reserved
from tests.support.stores import read_file, write_file

PAGE = SMALL_PAGE_BYTES
HUGE = huge_page_bytes()
STORE_BYTES = 64 * MIB
DATA_BYTES = 5 * MIB + 123


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def base_of(region: MappedRegion) -> int:
    return int(np.frombuffer(region.unguarded_memory(), dtype=np.uint8).ctypes.data)


def address_space() -> list[str]:
    """All of it that is taken, without names: neighbours that are alike are one line or two."""
    taken: list[list[int]] = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if "[" in line:  # heap and stack grow by themselves
            continue
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if taken and taken[-1][1] == start:
            taken[-1][1] = end
        else:
            taken.append([start, end])
    return [f"{start:x}-{end:x}" for start, end in taken]


# ---------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize("alignment", [1, PAGE, 16 * PAGE, 2 * MIB, GIB])
@pytest.mark.parametrize("size_bytes", [1, PAGE - 1, PAGE + 1, 2 * MIB, 3 * MIB + 5])
@pytest.mark.parametrize("read_only", [False, True])
def test_a_mapping_begins_where_it_was_asked_to(
    descriptor: int, alignment: int, size_bytes: int, *, read_only: bool
) -> None:
    os.ftruncate(descriptor, size_bytes)
    region = MappedRegion(
        MappedRegion.map_handle(
            descriptor,
            size_bytes,
            granularity=Granularity.PAGE,
            alignment_bytes=alignment,
            read_only=read_only,
        ),
        read_only=read_only,
    )
    assert base_of(region) % max(alignment, PAGE) == 0
    if not read_only:
        region.store(size_bytes - 1, b"z")
    assert region.read(size_bytes - 1, 1) == (b"\0" if read_only else b"z")
    region.close()


def test_nothing_of_the_address_space_stays_taken(descriptor: int) -> None:
    os.ftruncate(descriptor, 3 * MIB + 1)

    def map_and_close() -> None:
        for alignment in (PAGE, 2 * MIB, GIB):
            MappedRegion(
                MappedRegion.map_handle(
                    descriptor,
                    3 * MIB + 1,
                    granularity=Granularity.PAGE,
                    alignment_bytes=alignment,
                )
            ).close()

    map_and_close()
    before = address_space()
    for _ in range(20):
        map_and_close()
    assert len(address_space()) <= len(before) + 2  # twenty would leave dozens


def test_without_address_space_for_it_a_mapping_begins_anywhere(descriptor: int) -> None:
    os.ftruncate(descriptor, PAGE)
    region = MappedRegion(
        MappedRegion.map_handle(
            descriptor, PAGE, granularity=Granularity.PAGE, alignment_bytes=1 << 62
        )
    )
    assert region.read(0, 1) == b"\0"
    region.close()


@pytest.mark.parametrize("alignment", [0, 3, 12288, (1 << 63) + 1])
def test_an_alignment_is_a_power_of_two(descriptor: int, alignment: int) -> None:
    os.ftruncate(descriptor, PAGE)
    with pytest.raises(MediaUnavailableError, match="cannot be mapped"):
        MappedRegion.map_handle(
            descriptor, PAGE, granularity=Granularity.PAGE, alignment_bytes=alignment
        )


@pytest.mark.parametrize(
    ("size_bytes", "alignment"), [(HUGE - 1, PAGE), (HUGE, HUGE), (HUGE + 1, HUGE)]
)
def test_files_are_aligned_like_huge_pages(tmp_path: Path, size_bytes: int, alignment: int) -> None:
    with_size = tmp_path / "image"
    media = open_media(with_size, create_size_bytes=size_bytes)
    assert media.alignment_bytes == alignment
    assert base_of(media) % alignment == 0
    media.close()


def test_the_size_of_a_huge_page_is_the_kernels(tmp_path: Path) -> None:
    said = tmp_path / "kernel/mm/transparent_hugepage/hpage_pmd_size"
    said.parent.mkdir(parents=True)
    for text, size_bytes in [("33554432\n", 32 * MIB), ("0", 2 * MIB), ("3", 2 * MIB)]:
        said.write_text(text)
        assert huge_page_bytes(tmp_path) == size_bytes
    assert huge_page_bytes(tmp_path / "nowhere") == 2 * MIB


# --------------------------------------------------------------------------- what was got


def scanned(region: MappedRegion) -> MappedBytes:
    found = mapped_bytes(region)
    if found is None:
        pytest.skip("the kernel does not tell which pages are mapped (PAGEMAP_SCAN, Linux 6.7)")
    return found


def test_pages_count_once_they_are_touched() -> None:
    size_bytes = PARTS * 16 * PAGE
    region = MappedRegion(MappedRegion.anonymous_handle(size_bytes, granularity=Granularity.LINE))
    assert scanned(region).mapped == 0
    for number in range(5):
        region.store(number * 100 * PAGE, b"x")
    assert scanned(region).mapped in (5 * PAGE, size_bytes)  # huge pages, where they are for all
    region.close()


def test_a_part_of_what_is_mapped_is_looked_at(descriptor: int) -> None:
    """Of each part the first pages that are mapped, wherever in it they lie."""
    size_bytes = PARTS * 2 * PART_PAGES * PAGE
    os.ftruncate(descriptor, size_bytes)
    region = MappedRegion(
        MappedRegion.map_handle(descriptor, size_bytes, granularity=Granularity.PAGE)
    )
    part = size_bytes // PARTS
    assert scanned(region) == (0, 0)
    for place in range(part // 2, part, PAGE):
        region.store(place, b"x")
    region.store(7 * part + part - PAGE, b"x")
    assert scanned(region).mapped >= part // 2 + PAGE
    for place in range(0, part // 2, PAGE):
        region.store(place, b"x")
    assert part // 2 + PAGE <= scanned(region).mapped
    assert scanned(region).mapped <= PARTS * PART_PAGES * PAGE
    region.close()


def test_a_kernel_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))

    media = open_media(tmp_path / "image", create_size_bytes=4 * MIB)
    media.store(0, b"x")
    monkeypatch.setattr("cxlfs.native.mapped_pages.fcntl.ioctl", refuse)
    assert media.mapped_pages() == MappedPages(None, None)
    facts = inspect.media_facts(media)
    assert (facts["page_size_bytes"], facts["huge_page_share"]) == (None, None)
    media.close()


# ------------------------------------------------------------------------------------ the pool


def fake_pool(
    root: Path, descriptor: int, *, pages: int, free: int, promised: int, surplus: tuple[int, int]
) -> tuple[Path, Path]:
    """A sysfs and a proc in which ``descriptor`` lies on hugetlbfs."""
    folder = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
    folder.mkdir(parents=True)
    numbers = {
        "nr_hugepages": pages,
        "free_hugepages": free,
        "resv_hugepages": promised,
        "nr_overcommit_hugepages": surplus[0],
        "surplus_hugepages": surplus[1],
    }
    for name, number in numbers.items():
        (folder / name).write_text(f"{number}\n")
    device = os.fstat(descriptor).st_dev
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(
        f"22 1 {os.major(device)}:{os.minor(device)} / /h rw - hugetlbfs none rw,pagesize=2M\n"
    )
    return root / "sys", root / "proc"


def pool(
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    descriptor: int,
    *,
    limit: tuple[int, int] = (0, 0),
    **numbers: Any,
) -> Pool:
    sysfs, proc = fake_pool(root, descriptor, **numbers)
    system = SimpleNamespace(f_frsize=2 * MIB, f_blocks=limit[0], f_bavail=limit[1])
    monkeypatch.setattr(os, "fstatvfs", lambda _descriptor: system)
    found = pool_of(descriptor, sysfs=sysfs, proc=proc)
    assert found is not None
    return found


def test_what_is_free_in_a_pool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, descriptor: int
) -> None:
    found = pool(monkeypatch, tmp_path, descriptor, pages=100, free=40, promised=10, surplus=(5, 2))
    assert (found.page_size_bytes, found.pages) == (2 * MIB, 100)
    assert found.free_bytes == 33 * 2 * MIB
    found.require("h", 66 * MIB)
    with pytest.raises(
        NoSpaceError, match=r"68\.0 MiB more.* pool of them has 66\.0 MiB"
    ) as caught:
        found.require("h", 68 * MIB)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (68 * MIB, 66 * MIB)
    assert f"echo 101 > {found.setting} (now 100)" in caught.value.next_step


def test_a_mount_may_be_smaller_than_its_pool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, descriptor: int
) -> None:
    found = pool(
        monkeypatch,
        tmp_path,
        descriptor,
        pages=100,
        free=100,
        promised=0,
        surplus=(0, 0),
        limit=(50, 7),
    )
    assert found.free_bytes == 14 * MIB
    with pytest.raises(NoSpaceError, match=r"its mount has 14\.0 MiB free") as caught:
        found.require("h", 16 * MIB)
    assert "larger size=" in caught.value.next_step


@pytest.mark.parametrize(
    ("size_bytes", "named"), [(MIB, "2097152"), (3 * MIB, "2097152 or 4194304")]
)
def test_no_part_of_a_huge_page(size_bytes: int, named: str) -> None:
    found = Pool(2 * MIB, 0, 0, Path("nr_hugepages"), is_limited_by_mount=False)
    found.require_whole_pages("h", 4 * MIB)
    with pytest.raises(MediaUnavailableError, match="no whole number") as caught:
        found.require_whole_pages("h", size_bytes)
    assert caught.value.next_step.endswith(f": {named}")


def test_a_file_elsewhere_has_no_pool(descriptor: int) -> None:
    assert pool_of(descriptor) is None


def test_options_of_the_file_system(tmp_path: Path, descriptor: int) -> None:
    device = os.fstat(descriptor).st_dev
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text(
        f"22 1 {os.major(device)}:{os.minor(device)} / /m rw shared:1 - tmpfs t rw,huge=advise\n"
    )
    assert mount_options_of(descriptor, tmp_path) == ("rw", "huge=advise")
    assert mount_options_of(descriptor, tmp_path / "nowhere") == ()


# ------------------------------------------------------------------- real file systems in memory


def _use_store(kind: str, options: str, at: str) -> dict[str, Any]:
    """Make, fill, read and verify a store there, in a process and a mount namespace of its own."""
    try:
        enter(kind, options, Path(at))
    except NotHereError as error:
        return {"missing": str(error)}
    source = Path(at) / "store"
    main(["mkfs", str(source), "--size", str(STORE_BYTES)])
    data = os.urandom(DATA_BYTES)
    media = open_media(source)
    aligned = base_of(media) % media.alignment_bytes == 0
    store = Store.open(media)
    ino = write_file(store, 1, b"checkpoint", data)
    same = read_file(store, ino) == data
    facts = inspect.media_facts(media)
    store.close()
    media.close()
    shown = look(str(source))
    verified = main(["verify", str(source)])
    return {
        **facts,
        "aligned": aligned,
        "same": same,
        "verified": verified,
        "weakened": shown.weakened,
        "row": next(line for line in shown.lines(Style()) if line.strip().startswith("media")),
    }


def use_store(kind: str, options: str, at: Path) -> dict[str, Any]:
    at.mkdir()
    found = apart(_use_store, kind, options, str(at), quick=False)
    assert found is not None
    if "missing" in found:
        pytest.skip(str(found["missing"]))
    assert (found["same"], found["aligned"], found["verified"]) == (True, True, 0)
    assert found["volatile"]
    assert len(found["weakened"]) == 1
    return found


@pytest.mark.parametrize("option", ["always", "within_size", "advise"])
def test_tmpfs_with_huge_pages(tmp_path: Path, option: str) -> None:
    found = use_store("tmpfs", f"size=128M,huge={option}", tmp_path / "mounted")
    if found["page_size_bytes"] is None:
        pytest.skip("the kernel does not tell which pages are mapped (PAGEMAP_SCAN, Linux 6.7)")
    assert (found["alignment_bytes"], found["page_size_bytes"]) == (HUGE, HUGE)
    assert found["huge_page_share"] > 0.5  # less than all where memory is in pieces
    assert "2.0 MiB pages" in found["row"] or HUGE != 2 * MIB


def test_tmpfs_without_huge_pages(tmp_path: Path) -> None:
    found = use_store("tmpfs", "size=128M,huge=never", tmp_path / "mounted")
    assert found["page_size_bytes"] in (PAGE, None)
    assert not found["huge_page_share"]
    assert found["alignment_bytes"] == HUGE


@pytest.fixture
def reserve(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    return lambda count: reserved(count, tmp_path_factory.getbasetemp().parent)


def test_hugetlbfs(tmp_path: Path, reserve: Callable[[int], Any]) -> None:
    try:
        with reserve(STORE_BYTES // (2 * MIB) + 4):
            found = use_store("hugetlbfs", "pagesize=2M", tmp_path / "mounted")
            refused = apart(_refused_on_hugetlbfs, str(tmp_path / "mounted"), quick=False)
    except NotHereError as error:
        pytest.skip(str(error))
    assert (found["alignment_bytes"], found["page_size_bytes"]) == (2 * MIB, 2 * MIB)
    assert found["huge_page_share"] == 1.0
    assert refused is not None
    assert "no whole number" in refused["odd"]
    assert "reserve more pages: echo " in refused["too_large"]
    assert "reserve more pages: echo " in refused["sparse"]
    assert refused["left"] == ["sparse"]
    assert refused["free"] == refused["free_before"]


def _refused_on_hugetlbfs(at: str) -> dict[str, Any]:
    """What is no store there, and that nothing of the pool is kept by it."""
    enter("hugetlbfs", "pagesize=2M", Path(at))
    folder = Path(at)
    with (folder / "probe").open("w+b") as probe:
        (folder / "probe").unlink()
        before = pool_of(probe.fileno())
        said = {
            "odd": _message(folder / "odd", 3 * MIB),
            "too_large": _message(folder / "too_large", 1 << 40),
        }
        (folder / "sparse").touch()
        os.truncate(folder / "sparse", 1 << 40)
        said["sparse"] = _message(folder / "sparse", None)
        after = pool_of(probe.fileno())
    assert before is not None
    assert after is not None
    return {
        **said,
        "left": sorted(path.name for path in folder.iterdir()),
        "free_before": before.free_bytes,
        "free": after.free_bytes,
    }


def _message(path: Path, create_size_bytes: int | None) -> str:
    try:
        open_media(path, create_size_bytes=create_size_bytes).close()
    except (MediaUnavailableError, NoSpaceError) as error:
        return f"{error.message}; {error.next_step}"
    return "made"
