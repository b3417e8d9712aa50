"""Where the frameworks save: a store mounted without options, one with policies, ext4, tmpfs.

Each place is small (``SIZE_BYTES``) and of its own, so that it can be full. Needs root for ext4 (a
loop device) and tmpfs; where that is not to be had, a directory stands in that is never full.
Never here: training, judging.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cxlfs.control import mountinfo
from tests.support.cli import run_program
from tests.support.matrix.catalogue import Framework
from tests.support.mount import MIB, Workplace, workplace

SIZE_BYTES = 192 * MIB
FILLER = "filler"
_ANNOUNCED = (
    r"reverted: the previous version is back",
    r"torn|restored|taken-away|given-up",
    r"unit-back: what was (there before|removed) is back",
    r"no room|No space|ENOSPC|not-published",
)
"""What a store says of killed writers and of being full."""


@dataclasses.dataclass(slots=True)
class Place:
    """``root``: of the file system; the trainer saves below it."""

    name: str
    root: Path
    can_be_full: bool = True
    store: Workplace | None = None
    has_policies: bool = False
    """The framework's policy of docs/frameworks.md is set."""

    @property
    def directory(self) -> Path:
        return self.root / "train"

    def prepare(self, framework: Framework) -> None:
        """An empty directory for a trainer."""
        self.directory.mkdir()
        if self.has_policies and framework.unit:
            said = run_program("policy", "set", self.directory, *framework.unit)
            assert said.code == 0, said.stderr

    def wipe(self) -> None:
        """What somebody does who starts anew; the directory itself keeps its policy."""
        for path in list(self.directory.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    # --- the daemon -------------------------------------------------------------------------

    def kill_daemon(self) -> None:
        assert self.store is not None
        self.store.kill_daemon()

    def mount_again(self) -> None:
        assert self.store is not None
        assert mountinfo.is_dead(str(self.store.mountpoint))
        self.store.mount()

    # --- room -------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """Of the trainer's files."""
        found = [path for path in self.directory.rglob("*") if path.is_file()]
        return sum(path.stat().st_size for path in found if not path.is_symlink())

    def fill(self, free_bytes: int) -> None:
        """Until no more than about ``free_bytes`` are free for an ordinary user."""
        piece = os.urandom(MIB // 4)
        with contextlib.suppress(OSError), (self.root / FILLER).open("wb", buffering=0) as file:
            while self._free_bytes() > free_bytes + len(piece):
                file.write(piece)
                if self.store is None:
                    os.fsync(file.fileno())

    def _free_bytes(self) -> int:
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def empty(self) -> None:
        (self.root / FILLER).unlink()


@contextlib.contextmanager
def open_place(name: str) -> Iterator[Place]:
    """One of PLACES; unmounted and removed at the end, a store verified before."""
    with _MAKERS[name](name) as place:
        yield place


@contextlib.contextmanager
def _store(name: str) -> Iterator[Place]:
    with contextlib.redirect_stdout(io.StringIO()), workplace(size_bytes=SIZE_BYTES) as store:
        store.announced += _ANNOUNCED
        store.mount()
        yield Place(name, store.mountpoint, store=store, has_policies=name == "cxlfs-policies")


@contextlib.contextmanager
def _ext4(name: str) -> Iterator[Place]:
    base = Path(tempfile.mkdtemp(prefix="matrix-", dir="/var/tmp"))
    image, root = base / "image", base / "mnt"
    root.mkdir()
    try:
        with image.open("wb") as file:
            file.truncate(SIZE_BYTES)
        made = shutil.which("mkfs.ext4") and _run("mkfs.ext4", "-q", "-F", "-m", "0", image)
        if made and _run("mount", "-o", "loop", image, root):
            yield Place(name, root)
        else:
            yield Place(name, root, can_be_full=False)
    finally:
        _remove(base, root)


@contextlib.contextmanager
def _tmpfs(name: str) -> Iterator[Place]:
    base = Path(tempfile.mkdtemp(prefix="matrix-", dir="/dev/shm"))
    root = base / "mnt"
    root.mkdir()
    try:
        mounted = _run("mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs", root)
        yield Place(name, root, can_be_full=mounted)
    finally:
        _remove(base, root)


def _run(*words: object) -> bool:
    done = subprocess.run([*map(str, words)], check=False, capture_output=True)
    return done.returncode == 0


def _remove(base: Path, root: Path) -> None:
    for _ in range(50):  # a killed trainer's files are closed a moment later
        if not root.is_mount() or _run("umount", root):
            break
        time.sleep(0.1)
    shutil.rmtree(base, ignore_errors=True)


_MAKERS = {"cxlfs": _store, "cxlfs-policies": _store, "ext4": _ext4, "tmpfs": _tmpfs}
PLACES = tuple(_MAKERS)
