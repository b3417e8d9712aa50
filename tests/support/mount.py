"""A store, mounted as its users mount it, with everything cleaned up behind it.

One ``Workplace`` is a private directory with a source, a mount point, a runtime directory and the
daemon's log. Leaving it unmounts, ends every process it started, and checks that the daemon's log
holds no warning that the test did not announce and that the store is clean.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cxlfs.control import discovery, mountinfo
from cxlfs.control.client import find_daemons
from cxlfs.daemon import preflight
from cxlfs.daemon.mount import make_config, mount_background, unmount
from cxlfs.errors import CxlfsError
from cxlfs.media import open_media
from cxlfs.media.room import VOLATILE_TEXT, file_system_of
from cxlfs.store import Store, StoreOptions
from cxlfs.verify import run_passes
from tests.support.nursery import mount_forked

MIB = 1 << 20
STORE_BYTES = 64 * MIB
"""Of a store that is made for one test, unless it asks for more."""
PATIENCE_SECONDS = 20.0
_CAP_SYS_ADMIN = 1 << 21
_SUSPICIOUS = re.compile(r"WARNING|ERROR|CRITICAL|Traceback|Fatal|exception", re.IGNORECASE)


def why_not_mountable() -> str | None:
    """Why this machine cannot mount; None when it can."""
    try:
        preflight.check_fuse()
    except CxlfsError as error:
        return error.message
    if os.geteuid() == 0 and not _capabilities() & _CAP_SYS_ADMIN:
        return "root without CAP_SYS_ADMIN"
    return None


def require_allow_other() -> None:
    """Skip the test where this user may not let others in."""
    try:
        preflight.check_allow_other(make_config("/source", "/mountpoint", allow_other=True))
    except CxlfsError as error:
        pytest.skip(error.message)


def _capabilities() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return int(match[1], 16) if match else 0


def assert_store_clean(source: Path, *, damaged_history: bool = False) -> None:
    """The unmounted store opens without recovery, verify finds nothing, and every byte of every
    file can be read. ``damaged_history``: a test has damaged a version that only history has.
    """
    media = open_media(source, read_only=True)
    try:
        findings = list(run_passes(media, structure_only=False))
        if damaged_history:
            findings = [each for each in findings if each.id != "data-unused-damaged"]
        assert not findings, findings
        store = Store.open(media, StoreOptions(read_only=True))
        assert store.statistics().recovery.clean, "the store was not closed cleanly"
        for ino in _walk(store, 1):
            _read_everything(store, ino)
        assert store.statistics().checksum_errors == 0
        store.close()
    finally:
        media.close()


def recover(source: Path) -> None:
    """Open the store as a mount would, and close it cleanly."""
    media = open_media(source)
    try:
        Store.open(media).close()
    finally:
        media.close()


def _walk(store: Store, directory: int) -> Iterator[int]:
    handle = store.open_directory(directory)
    for entry in list(store.read_directory(handle, 0)):
        mode = store.get_attributes(entry.ino).mode
        if stat.S_ISDIR(mode):
            yield from _walk(store, entry.ino)
        elif stat.S_ISREG(mode):
            yield entry.ino
    store.release_directory(handle)


def _read_everything(store: Store, ino: int) -> None:
    size = store.get_attributes(ino).size
    handle = store.open_file(ino, os.O_RDONLY)
    offset = 0
    while offset < size:
        piece = len(store.read(handle, offset, MIB))
        assert piece > 0, f"inode {ino} ends at {offset} of {size}"
        offset += piece
    store.release(handle)


def is_in_memory(source: Path) -> bool:
    """It lies on tmpfs, and commands that look at it say so."""
    with source.open("rb") as file:
        return file_system_of(file.fileno()) == "tmpfs"


def caution_of(place: Workplace) -> str:
    """What ``cxlfs mount`` writes to stderr about the source."""
    return f"warning: {VOLATILE_TEXT}\n" if is_in_memory(place.source) else ""


def wait_until(condition: Callable[[], bool], what: str, interval_seconds: float = 0.01) -> None:
    """Poll ``condition``; fail when it does not come true in time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(interval_seconds)


class Workplace:
    """See the module."""

    def __init__(self, root: Path, *, size_bytes: int) -> None:
        self.root = root
        self.source = root / "source"
        self.mountpoint = root / "mnt"
        self.log = root / "log"
        self.runtime = root / "run"
        self.announced: list[str] = []
        self.damaged_history = False
        """Patterns of lines that the log may hold."""
        self.ends_clean = True
        """False: the daemon was killed, and the store needs recovery before it is checked."""
        self.starts_afresh = False
        """Daemons begin with a Python of their own, as users' do, instead of in the nursery."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self.mountpoint.mkdir()
        self.runtime.mkdir(mode=0o700)
        media = open_media(self.source, create_size_bytes=size_bytes)
        Store.format(media)
        media.close()

    # --- mounting ---------------------------------------------------------------------------

    def mount(self, *options: str, mountpoint: Path | None = None) -> Path:
        start = mount_background if self.starts_afresh else mount_forked
        start(
            make_config(
                str(self.source),
                str(mountpoint or self.mountpoint),
                options=options,
                log_path=str(self.log),
            )
        )
        return mountpoint or self.mountpoint

    def unmount(self) -> None:
        unmount(str(self.mountpoint))

    def remount(self, *options: str) -> None:
        self.unmount()
        self.mount(*options)

    @property
    def is_mounted(self) -> bool:
        return mountinfo.find_mount(str(self.mountpoint)) is not None

    @property
    def daemon_pid(self) -> int:
        return find_daemons(str(self.mountpoint))[0][1].pid

    def kill_daemon(self) -> None:
        """SIGKILL, as the OOM killer would; the mount is dead afterwards."""
        pid = self.daemon_pid
        watch = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        wait_for_exit(watch)
        self.ends_clean = False

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""

    # --- other processes --------------------------------------------------------------------

    def python(self, code: str, *arguments: object, **options: object) -> subprocess.Popen[bytes]:
        """A Python process in a group of its own, with pipes to its standard files."""
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            **options,  # type: ignore[call-overload]
        )
        self._processes.append(process)
        return process

    # --- the end ----------------------------------------------------------------------------

    def finish(self) -> None:
        for process in self._processes:
            _end_group(process)
        if self.is_mounted and not mountinfo.is_dead(str(self.mountpoint)):
            self.unmount()
        self.assert_quiet_log()
        if not self.ends_clean:
            recover(self.source)
        assert_store_clean(self.source, damaged_history=self.damaged_history)

    def tear_down(self) -> None:
        """Whatever happened, leave nothing behind; the log is shown when the test failed."""
        sys.stdout.write(self.log_text())
        for process in self._processes:
            _end_group(process)
        for registration in discovery.registrations(self.runtime):
            with contextlib.suppress(ProcessLookupError):
                os.kill(registration.pid, signal.SIGKILL)
        for mount in mountinfo.read_mounts():
            if mount.mountpoint.startswith(f"{self.root}/"):
                umount = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]
                subprocess.run([*umount, mount.mountpoint], check=False)
        shutil.rmtree(self.root, ignore_errors=True)

    def assert_quiet_log(self) -> None:
        loud = [
            line
            for line in self.log_text().splitlines()
            if _SUSPICIOUS.search(line)
            and not any(re.search(pattern, line) for pattern in self.announced)
        ]
        assert not loud, "the daemon's log:\n" + self.log_text()


def wait_for_exit(watch: int) -> None:
    """Until the process behind a pidfd is gone; closes it."""
    import select

    ready, _, _ = select.select([watch], [], [], PATIENCE_SECONDS)
    os.close(watch)
    assert ready, "the process does not end"


def wait_for_line(process: subprocess.Popen[bytes], line: bytes = b"ready") -> None:
    """Until the process has printed ``line``."""
    assert process.stdout is not None
    got = process.stdout.readline().strip()
    assert got == line, f"expected {line!r}, got {got!r}"


def tell(process: subprocess.Popen[bytes], line: bytes = b"go") -> None:
    assert process.stdin is not None
    process.stdin.write(line + b"\n")
    process.stdin.flush()


def kill(process: subprocess.Popen[bytes], number: int = signal.SIGKILL) -> None:
    """End it by a signal, and wait until it is gone with its open files."""
    process.send_signal(number)
    process.wait(PATIENCE_SECONDS)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_SECONDS)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


@contextlib.contextmanager
def workplace(*, size_bytes: int = STORE_BYTES, below: Path | None = None) -> Iterator[Workplace]:
    """A fresh store in a fresh place; on a clean exit of the block everything is checked."""
    # Not pytest's directory: its names are too long for sockets, and other users cannot enter it.
    root = Path(tempfile.mkdtemp(prefix="cxlfs-", dir=below or fast_directory()))
    root.chmod(0o755)
    before = os.environ.get(discovery.ENVIRONMENT_OVERRIDE)
    os.environ[discovery.ENVIRONMENT_OVERRIDE] = str(root / "run")
    place = None
    try:
        place = Workplace(root, size_bytes=size_bytes)
        yield place
        place.finish()
    finally:
        if place is not None:
            place.tear_down()
        if before is None:
            del os.environ[discovery.ENVIRONMENT_OVERRIDE]
        else:
            os.environ[discovery.ENVIRONMENT_OVERRIDE] = before


def fast_directory() -> str | None:
    """In memory where there is room: msync of a file on a disk would make the tests slow."""
    memory = Path("/dev/shm")  # noqa: S108  the directory made there is private
    if memory.is_dir() and shutil.disk_usage(memory).free > 4 << 30:
        return str(memory)
    return None
