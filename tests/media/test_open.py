"""Opening a source: every kind of thing a path may name, and one clear error for each misuse."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxlfs.errors import (
    BusyError,
    CxlfsError,
    InvariantError,
    MediaError,
    MediaUnavailableError,
    NoSpaceError,
    NotPersistentError,
    ReadOnlyError,
    UsageError,
)
from cxlfs.media import Granularity, Media, open_media
from cxlfs.native import FaultKind, MappedRegion, set_fault
from tests.media.tree import CXL, CXL_VOLATILE, Sysfs

SIZE = 1 << 20
ZERO = "/dev/zero"  # a character device that can be mapped shared: stands in for /dev/dax0.0
ZERO_NUMBER = "1:5"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "store.img"
    path.write_bytes(b"old" + bytes(SIZE - 3))
    return path


def open_descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


# ----------------------------------------------------------------------------------------- files


def test_file_is_page_media(image: Path) -> None:
    media = open_media(image)
    assert (media.kind, media.path, media.size_bytes) == ("file", str(image), SIZE)
    assert media.granularity is Granularity.PAGE
    assert media.write_back_name == "msync"
    assert media.persistence_domain is None
    assert media.dirty_shutdown() == (False, 0, 0)
    assert media.read(0, 4) == b"old\0"
    media.store(0, b"new")
    media.persist(0, 3)
    media.close()
    assert image.read_bytes()[:4] == b"new\0"


def test_source_may_be_a_string_or_a_link(image: Path) -> None:
    link = image.with_name("link")
    link.symlink_to(image)
    for source in (str(image), link):
        open_media(source).close()


def test_created_file_is_private_and_allocated(tmp_path: Path) -> None:
    path = tmp_path / "new.img"
    media = open_media(path, create_size_bytes=SIZE)
    status = path.stat()
    assert media.size_bytes == status.st_size == SIZE
    assert status.st_blocks * 512 >= SIZE
    assert stat.S_IMODE(status.st_mode) == 0o600
    media.close()


def test_empty_or_smaller_file_grows_and_keeps_its_content(image: Path) -> None:
    open_media(image, create_size_bytes=2 * SIZE).close()
    assert image.stat().st_size == 2 * SIZE
    assert image.read_bytes()[:3] == b"old"


def test_larger_file_is_not_cut(image: Path) -> None:
    with pytest.raises(UsageError, match="more than"):
        open_media(image, create_size_bytes=SIZE - 1)
    assert image.stat().st_size == SIZE


def test_sparse_file_can_be_preallocated(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, SIZE)
    media = open_media(path)
    assert path.stat().st_blocks == 0
    media.preallocate()
    assert path.stat().st_blocks * 512 >= SIZE
    media.close()


def test_what_does_not_fit_is_refused_before_a_byte_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: int) -> None:
        pytest.fail("the file system was filled to find out")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    path = tmp_path / "new.img"
    size_bytes = 1 << 60
    with pytest.raises(NoSpaceError, match=r"cannot be 1024\.0 PiB long.* free, and ") as caught:
        open_media(path, create_size_bytes=size_bytes)
    assert caught.value.needed_bytes == size_bytes
    assert 0 < caught.value.available_bytes < size_bytes
    assert "at most" in caught.value.next_step
    assert not path.exists()


def test_a_file_that_is_there_keeps_its_length_when_it_cannot_grow(
    image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_halfway(descriptor: int, _offset: int, length: int) -> None:
        os.ftruncate(descriptor, length // 2)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "posix_fallocate", fail_halfway)
    with pytest.raises(NoSpaceError, match="quota"):
        open_media(image, create_size_bytes=8 * SIZE)
    assert image.stat().st_size == SIZE
    assert image.read_bytes()[:3] == b"old"


def test_file_larger_than_the_file_system_allows(tmp_path: Path) -> None:
    path = tmp_path / "new.img"
    before = open_descriptors()
    with pytest.raises((NoSpaceError, MediaError)):
        open_media(path, create_size_bytes=(1 << 63) - 1)
    assert not path.exists()
    assert open_descriptors() == before


def test_read_only_file_refuses_stores(image: Path) -> None:
    media = open_media(image, read_only=True)
    assert media.read_only
    assert media.read(0, 3) == b"old"
    with pytest.raises(ReadOnlyError):
        media.store(0, b"x")
    media.close()


def test_source_that_shrank_says_so(image: Path) -> None:
    media = open_media(image)
    os.truncate(image, 4096)
    with pytest.raises(MediaError, match=f"shrank from {SIZE} to 4096 bytes") as caught:
        media.read(0, SIZE)
    assert caught.value.offset is not None
    assert 4096 <= caught.value.offset < SIZE
    assert caught.value.next_step
    with pytest.raises(MediaError, match="shrank"):
        media.store(8192, b"x")
    assert media.read(0, 3) == b"old"
    os.truncate(image, 0)
    with pytest.raises(MediaError, match="to 0 bytes"):
        media.read(0, 1)
    media.close()


def test_closing_releases_everything(image: Path) -> None:
    before = open_descriptors()
    media = open_media(image)
    media.close()
    media.close()
    assert open_descriptors() == before
    with pytest.raises(InvariantError, match="closed"):
        media.fence()


def test_failure_to_map_releases_everything(image: Path, tmp_path: Path) -> None:
    before = open_descriptors()
    for source, size_bytes in ((image, None), (tmp_path / "new.img", SIZE)):
        set_fault(FaultKind.MAP, 1)
        with pytest.raises(CxlfsError):
            open_media(source, create_size_bytes=size_bytes)
    assert open_descriptors() == before
    assert not (tmp_path / "new.img").exists()


# ------------------------------------------------------------------------------------ wrong kinds


def refused(source: str | Path, message: str, **options: object) -> MediaUnavailableError:
    before = open_descriptors()
    with pytest.raises(MediaUnavailableError, match=message) as caught:
        open_media(source, **options)  # type: ignore[arg-type]
    assert caught.value.next_step
    assert "\n" not in str(caught.value)
    assert open_descriptors() == before
    return caught.value


def test_missing_source(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "does not exist")
    refused(tmp_path / "nothing" / "new.img", "cannot be created", create_size_bytes=SIZE)


def test_directory(tmp_path: Path) -> None:
    error = refused(tmp_path, "is a directory")
    assert "store.img" in error.next_step


def test_fifo_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    refused(tmp_path / "fifo", "is a FIFO")


def test_socket(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        refused(tmp_path / "socket", "is a socket")


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    error = refused(tmp_path / "empty", "is empty")
    assert "mkfs --size" in error.next_step


def test_character_device_that_is_not_dax() -> None:
    refused("/dev/null", "not of the dax subsystem")


@pytest.mark.parametrize("source", ["bad\0name", "x" * 5000])
def test_impossible_path(source: str) -> None:
    refused(source, "null byte|too long")


def test_loop_of_links(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    refused(tmp_path / "loop", "symbolic links")


@pytest.fixture
def others_image() -> Iterator[Path]:
    """A file that belongs to somebody else; root becomes nobody meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.img"
        path.write_bytes(bytes(SIZE))
        path.chmod(0)
        Path(folder).chmod(0o755)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        yield path
        os.seteuid(user)


def set_mode(path: Path, mode: int) -> None:
    user = os.geteuid()
    os.seteuid(os.getuid())
    path.chmod(mode)
    os.seteuid(user)


def test_unwritable_source_names_the_read_only_way(others_image: Path) -> None:
    set_mode(others_image, 0o444)
    error = refused(others_image, "may only be read")
    assert "-o ro" in error.next_step
    open_media(others_image, read_only=True).close()


def test_unreadable_source(others_image: Path) -> None:
    refused(others_image, "cannot be opened: Permission denied")
    refused(others_image, "cannot be opened: Permission denied", read_only=True)


@pytest.mark.parametrize(
    "options", [{"read_only": True, "create_size_bytes": SIZE}, {"create_size_bytes": 0}]
)
def test_contradictory_arguments(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        open_media(tmp_path / "new.img", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "new.img").exists()


# ------------------------------------------------------------------------------------- DAX devices


@pytest.fixture
def without_map_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps plainly what asks for MAP_SYNC, which this machine's devices do not have."""
    real = MappedRegion.map_handle

    def plain(descriptor: int, size_bytes: int, **options: object) -> object:
        options["synchronous"] = False
        return real(descriptor, size_bytes, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(MappedRegion, "map_handle", staticmethod(plain))


@pytest.mark.usefixtures("without_map_sync")
@pytest.mark.parametrize(
    ("domain", "granularity"),
    [
        ("memory_controller", Granularity.LINE),
        (None, Granularity.LINE),
        ("cpu_cache", Granularity.BYTE),
    ],
)
def test_persistent_device(tmp_path: Path, domain: str | None, granularity: Granularity) -> None:
    sysfs = Sysfs(tmp_path)
    region = sysfs.region(CXL, domain=domain)
    sysfs.dax(region, number=ZERO_NUMBER, size_bytes=4 << 20)
    sysfs.device(region, 0, kind="cxl", identity="17", shutdowns=3)
    media = open_media(ZERO, sysfs=tmp_path, exclusive=False)
    assert (media.kind, media.size_bytes, media.alignment_bytes) == ("devdax", 4 << 20, 2 << 20)
    assert media.granularity is granularity
    assert media.persistence_domain == domain
    assert media.write_back_name != "msync"
    assert (media.write_back_name == "none") == (domain == "cpu_cache")
    assert media.dirty_shutdown()[:2] == (True, 3)
    media.copy(5, b"data")
    media.fence()
    assert media.read(5, 4) == b"data"
    media.close()


@pytest.mark.usefixtures("without_map_sync")
@pytest.mark.parametrize("read_only", [False, True])
def test_volatile_device_is_refused(tmp_path: Path, *, read_only: bool) -> None:
    Sysfs(tmp_path).dax(CXL_VOLATILE + "/dax_region0", number=ZERO_NUMBER)
    with pytest.raises(NotPersistentError, match="is volatile memory") as caught:
        open_media(ZERO, sysfs=tmp_path, exclusive=False, read_only=read_only)
    assert "cxl create-region" in caught.value.next_step


def test_device_that_somebody_uses_without_a_lock_is_refused(tmp_path: Path) -> None:
    sysfs = Sysfs(tmp_path / "sys")
    sysfs.dax(sysfs.region(CXL), number=ZERO_NUMBER)
    process = tmp_path / "proc" / "71"
    (process / "fd").mkdir(parents=True)
    (process / "fd" / "5").symlink_to(ZERO)
    (process / "fdinfo").mkdir()
    (process / "fdinfo" / "5").write_text("pos:\t0\nflags:\t02\nmnt_id:\t30\nino:\t5\n")
    (process / "mountinfo").write_text("30 1 0:6 / /dev rw - devtmpfs dev rw\n")
    (process / "stat").write_text("71 (qemu) S 1 71 71")
    (process / "cmdline").write_bytes(b"qemu\0-object\0memory-backend-file\0")
    places = {"sysfs": tmp_path / "sys", "proc": tmp_path / "proc"}
    with pytest.raises(BusyError, match=r"process 71 \(qemu -object .*\), which has it open"):
        open_media(ZERO, **places)
    with pytest.raises(NotPersistentError):  # as far as the mapping, which /dev/zero has not
        open_media(ZERO, **places, read_only=True)


def test_device_without_map_sync_is_refused(tmp_path: Path) -> None:
    """/dev/zero has none: the real mapping call says so."""
    sysfs = Sysfs(tmp_path)
    sysfs.dax(sysfs.region(CXL), number=ZERO_NUMBER)
    with pytest.raises(NotPersistentError, match="line by line"):
        open_media(ZERO, sysfs=tmp_path, exclusive=False)


@as_root
@pytest.mark.parametrize(
    ("parent", "driver", "error", "words"),
    [
        (CXL_VOLATILE, None, NotPersistentError, "volatile"),
        (CXL_VOLATILE, "kmem", NotPersistentError, "volatile"),
        (None, None, MediaUnavailableError, "no driver"),
        (None, "kmem", BusyError, "in use as system memory"),
    ],
)
def test_node_that_no_driver_answers_for(
    tmp_path: Path, parent: str | None, driver: str | None, error: type[CxlfsError], words: str
) -> None:
    """Linux binds no driver to a volatile region by itself: the advice must not be to bind one."""
    node, major, minor = tmp_path / "dax0.0", 240, 77  # 240 to 254: for experiments, no driver
    try:
        os.mknod(node, 0o600 | stat.S_IFCHR, os.makedev(major, minor))
    except PermissionError:
        pytest.skip("this root may not make device nodes")
    sysfs = Sysfs(tmp_path)
    folder = sysfs.dax(parent or sysfs.region(CXL), number=f"{major}:{minor}")
    if driver is not None:
        sysfs.link(f"{folder}/driver", f"bus/dax/drivers/{driver}")
    with pytest.raises(error, match=words):
        open_media(node, sysfs=tmp_path)


def test_device_without_a_driver(tmp_path: Path) -> None:
    sysfs = Sysfs(tmp_path)
    sysfs.dax(sysfs.region(CXL), number=ZERO_NUMBER, size_bytes=0)
    error = refused(ZERO, "no size", sysfs=tmp_path, exclusive=False)
    assert "daxctl" in error.next_step


@pytest.mark.usefixtures("without_map_sync")
def test_size_is_not_for_devices(tmp_path: Path) -> None:
    sysfs = Sysfs(tmp_path)
    sysfs.dax(sysfs.region(CXL), number=ZERO_NUMBER)
    before = open_descriptors()
    with pytest.raises(UsageError, match="is a device of"):
        open_media(ZERO, sysfs=tmp_path, exclusive=False, create_size_bytes=SIZE)
    assert open_descriptors() == before


@pytest.mark.usefixtures("without_map_sync")
@pytest.mark.parametrize(
    ("domain", "granularity"),
    [("memory_controller", Granularity.LINE), ("cpu_cache", Granularity.BYTE)],
)
def test_file_on_a_dax_file_system(
    image: Path, tmp_path: Path, domain: str, granularity: Granularity
) -> None:
    sysfs = Sysfs(tmp_path / "sys")
    device = image.stat().st_dev
    region = sysfs.region(CXL, domain=domain)
    sysfs.link(
        f"dev/block/{os.major(device)}:{os.minor(device)}", f"{region}/namespace0.0/block/pmem0"
    )
    media = open_media(image, sysfs=sysfs.root)
    assert (media.kind, media.granularity) == ("fsdax", granularity)
    assert media.persistence_domain == domain
    media.close()


# ------------------------------------------------------------------------------------ block devices


@as_root
def test_block_device_is_page_media(image: Path) -> None:
    media, device = open_loop(image)
    assert (media.kind, media.size_bytes) == ("block", SIZE)
    assert media.granularity is Granularity.PAGE
    media.store(0, b"new")
    media.persist(0, 3)
    with pytest.raises(BusyError, match=f"process {os.getpid()} |held by another program"):
        open_media(device)
    media.close()


@pytest.mark.parametrize("number", [errno.EBUSY, errno.ETXTBSY])
def test_a_device_in_use_says_how_to_find_who_has_it(
    image: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Mounted as something else, or part of a volume: the kernel refuses it, and names nobody."""
    real = os.open

    def refuse(path: str, flags: int, *arguments: int) -> int:
        if path == str(image):
            raise OSError(number, os.strerror(number), path)
        return real(path, flags, *arguments)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(BusyError, match="is in use") as caught:
        open_media(image)
    assert caught.value.next_step == f"see who has it: findmnt -S {image}, lsof {image}"


def open_loop(image: Path) -> tuple[Media, str]:
    """A loop device over ``image`` that goes away with its last descriptor."""
    attach = subprocess.run(
        ["losetup", "--find", "--show", str(image)], capture_output=True, text=True, check=False
    )
    if attach.returncode != 0:
        pytest.skip(f"no loop device: {attach.stderr.strip()}")
    device = attach.stdout.strip()
    try:
        return open_media(device), device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)
