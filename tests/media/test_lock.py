"""One writer at a time, and the name of whoever it is."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cxlfs.errors import BusyError
from cxlfs.media import lock, locks, open_media
from cxlfs.media.lock import describe_owner, refuse_other_users

ROOT = Path(__file__).resolve().parents[2]
SIZE = 1 << 16

HOLDER = """
import os, sys
from cxlfs.media import open_media
media = open_media(sys.argv[1], read_only=sys.argv[2] == "ro")
if sys.argv[3] == "fork" and os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "store.img"
    path.write_bytes(bytes(SIZE))
    return path


@contextmanager
def held(image: Path, mode: str = "rw", how: str = "plain") -> Iterator[int]:
    """Another process has ``image`` open; yields its pid."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(image), mode, how, "some-argument"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    with process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        if how == "fork":
            process.wait()  # until then the one that ended is still to be seen
        yield pid


def test_owner_is_named_with_pid_and_command(image: Path) -> None:
    with held(image) as pid:
        with pytest.raises(BusyError) as caught:
            open_media(image)
        assert f"process {pid} (" in str(caught.value)
        assert "some-argument)" in str(caught.value)
        assert caught.value.next_step
    open_media(image).close()


def test_owner_that_forked_is_named_by_its_heir(image: Path) -> None:
    """A daemon took the lock before it went into the background; the process that did is gone."""
    with held(image, how="fork") as pid, pytest.raises(BusyError, match=f"process {pid} \\("):
        open_media(image)


def test_an_owner_whose_lock_is_not_shown_is_named_by_what_is_open(
    image: Path, tmp_path: Path
) -> None:
    """As in a container, where /proc/locks leaves out the locks of processes that have ended."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "locks").write_text("")
    with held(image, how="fork") as pid, image.open("rb") as file:
        assert describe_owner(file.fileno(), proc) == (
            "another process, which cannot be seen from here"
        )
        (proc / str(pid)).symlink_to(f"/proc/{pid}")
        said = describe_owner(file.fileno(), proc)
    assert said.startswith(f"process {pid} (")
    assert said.endswith("), which has it open")


def test_readers_share_and_keep_writers_out(image: Path) -> None:
    with held(image, mode="ro"):
        open_media(image, read_only=True).close()
        with pytest.raises(BusyError):
            open_media(image)
    with held(image), pytest.raises(BusyError):
        open_media(image, read_only=True)


def test_without_lock_everything_opens(image: Path) -> None:
    with held(image):
        open_media(image, exclusive=False, read_only=True).close()


def test_lock_within_one_process(image: Path) -> None:
    media = open_media(image)
    with pytest.raises(BusyError, match=f"process {os.getpid()} \\("):
        open_media(image)
    media.close()
    open_media(image).close()


def test_lock_is_refused_before_the_source_changes(image: Path) -> None:
    with held(image):
        with pytest.raises(BusyError):
            open_media(image, create_size_bytes=2 * SIZE)
        assert image.stat().st_size == SIZE


STRANGER = """
import mmap, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR)
if sys.argv[2] == "mapped":
    mapping = mmap.mmap(descriptor, 4096)
    os.closerange(3, 64)  # the one that the mapping keeps, too
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_a_stranger_without_a_lock_is_seen(how: str) -> None:
    """On tmpfs: as of device nodes, its numbers are the same in stat and among the mappings."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(SIZE)
        refuse_other_users(file.fileno(), file.name)
        with subprocess.Popen(
            [sys.executable, "-c", STRANGER, file.name, how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            with pytest.raises(BusyError, match=f"(?s)process {process.pid} .*has it {how}$"):
                refuse_other_users(file.fileno(), file.name)
        refuse_other_users(file.fileno(), file.name)


@pytest.mark.parametrize("in_memory", [True, False])
def test_no_file_system_that_may_hang_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    """Whose files other processes have open: only what lies in memory is asked what it is."""
    folder = Path("/dev/shm") if in_memory else tmp_path  # noqa: S108
    asked: list[str] = []
    original = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        process, what = path.parents[1], path.parent.name
        if what == "fd":
            place = lock._place_of(process, path.name, lock._mounts_of(process))
            asked.append("" if place is None else place.file_system_type)
        return original(path, **options)

    with (
        tempfile.NamedTemporaryFile(dir=folder) as file,
        subprocess.Popen(
            [sys.executable, "-c", STRANGER, file.name, "open"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", stat)
            with pytest.raises(BusyError, match=f"process {process.pid} "):
                refuse_other_users(file.fileno(), file.name)
    assert set(asked) <= lock._IN_MEMORY


HEIR = """
import fcntl, os, struct, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY)
lock = struct.pack("=hh4xqqi4x", fcntl.F_RDLCK, 0, 4096, 4096, 0)
fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
child = os.fork()
if child:
    print(child, flush=True)
else:
    sys.stdin.read()
"""


def test_the_child_of_a_program_that_has_locked_what_it_mapped_is_no_stranger() -> None:
    """It has no mark of its own, and outlives its parent."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(SIZE)
        with subprocess.Popen(
            [sys.executable, "-c", HEIR, file.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            child = int(process.stdout.readline())
            process.wait()
            assert Path(f"/proc/{child}/fd").exists()
            assert locks.locked_ranges(file.fileno(), 0, SIZE) == [(4096, 8192)]
            refuse_other_users(file.fileno(), file.name)


def fake_proc(folder: Path, image: Path, *, pid: int, where: str | None = None) -> Path:
    status = image.stat()
    device = where or f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    folder.mkdir()
    (folder / "locks").write_text(
        "1: POSIX  ADVISORY  WRITE 70 00:01:1 0 EOF\n"
        "2: FLOCK  ADVISORY  WRITE 71 00:01:1 0 EOF\n"
        "2: -> FLOCK  ADVISORY  WRITE 72 00:01:1 0 EOF\n"
        f"3: FLOCK  ADVISORY  WRITE {pid} {device}:{status.st_ino} 0 EOF\n"
        "garbage\n"
    )
    return folder


def described(image: Path, proc: Path) -> str:
    with image.open("rb") as file:
        return describe_owner(file.fileno(), proc)


def test_owner_in_another_pid_namespace(image: Path, tmp_path: Path) -> None:
    proc = fake_proc(tmp_path / "proc", image, pid=0)
    assert described(image, proc) == "another process, which cannot be seen from here"


def test_owner_that_is_gone(image: Path, tmp_path: Path) -> None:
    proc = fake_proc(tmp_path / "proc", image, pid=73)
    assert described(image, proc).startswith("process 73, which has ended")


@pytest.mark.parametrize("where", [None, "00:99"])
def test_owner_of_a_device_number_shown_differently(
    image: Path, tmp_path: Path, where: str | None
) -> None:
    proc = fake_proc(tmp_path / "proc", image, pid=73, where=where)
    (proc / "73").mkdir()
    (proc / "73" / "stat").write_text("73 (a) Z (b) S 1 73 73")
    (proc / "73" / "cmdline").write_bytes(b"cxlfs\0mount\0/dev/dax0.0\0")
    assert described(image, proc) == "process 73 (cxlfs mount /dev/dax0.0)"


def test_no_list_of_locks(image: Path, tmp_path: Path) -> None:
    assert described(image, tmp_path) == "another process, which cannot be seen from here"
