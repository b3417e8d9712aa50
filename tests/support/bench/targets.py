"""The directories that are measured: mounted stores, and the file systems they are compared with.

Never here: formatting a device. A DAX file system is a peer when somebody mounted one.

Invariants
- Leaving a context unmounts and removes what it made, whatever happened inside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cxlfs.control.client import control_request
from cxlfs.units import MIB
from tests.support.bench.workers import COUNTS

CXLFS = str(Path(sys.executable).with_name("cxlfs"))
PASSTHROUGHS = ("passthrough_hp", "passthrough_ll", "bindfs")
WARM_SHARE = 0.85
"""How much of a store is written once before it is measured: the first touch of a tmpfs page costs
1 to 2 µs on a virtual machine and would otherwise be most of what one measures."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """``sync``: what is written is made durable by fsync, where close does not do it. ``awake``: no
    processor sleeps meanwhile.
    """

    name: str
    directory: Path
    counts: tuple[int, ...] = COUNTS
    sync: bool = False
    awake: bool = False


def run_cxlfs(*arguments: str) -> str:
    return subprocess.run([CXLFS, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def make_store(source: Path, size_bytes: int) -> None:
    run_cxlfs("mkfs", str(source), "--size", str(size_bytes), "--force")


@contextlib.contextmanager
def ended_by(unmount: Callable[[], object], target: Path) -> Iterator[None]:
    """Unmount ``target`` at the end. A failure inside stays the one that is raised: what its frames
    held, a mapping for one, would keep the mount busy, so they let go of it first; a mount that is
    busy all the same is detached, and that is noted on the failure.
    """
    try:
        yield
    except BaseException as failure:
        traceback.clear_frames(failure.__traceback__)
        gc.collect()
        try:
            unmount()
        except (OSError, subprocess.CalledProcessError) as error:
            failure.add_note(f"{target} was detached, because it could not be unmounted: {error}")
            detach = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]
            subprocess.run([*detach, str(target)], check=False)
        raise
    unmount()


@contextlib.contextmanager
def mounted(source: Path, size_bytes: int, *options: str) -> Iterator[tuple[Path, int]]:
    """A new store on ``source``, mounted; yields the mount point and the daemon's pid."""
    make_store(source, size_bytes)
    with served(source, *options) as found:
        yield found


@contextlib.contextmanager
def served(source: Path, *options: str) -> Iterator[tuple[Path, int]]:
    """The store on ``source``, mounted, and removed at the end; yields what ``mounted`` does."""
    try:
        with served_once(source, *options) as found:
            yield found
    finally:
        source.unlink()


@contextlib.contextmanager
def served_once(source: Path, *options: str) -> Iterator[tuple[Path, int]]:
    """The same, but the store stays."""
    target = Path(tempfile.mkdtemp(prefix="cxlfs-bench-"))
    try:
        run_cxlfs("mount", str(source), str(target), *options)
        with ended_by(lambda: run_cxlfs("umount", str(target)), target):
            yield target, int(json.loads(run_cxlfs("status", str(target), "--json"))["pid"])
    finally:
        target.rmdir()


def statistics_of(target: Path) -> dict[str, Any]:
    """What the daemon of a mount counts (``StoreStatistics``); costs no process, to be polled."""
    (message,) = control_request(str(target), "status")
    return dict(message)


def warm(directory: Path, size_bytes: int) -> None:
    """Touch most of a mounted store's pages; the store is empty again afterwards."""
    block = memoryview(os.urandom(MIB))
    path = directory / "warm"
    with path.open("wb", buffering=0) as file:
        for _ in range(int(size_bytes * WARM_SHARE) // MIB):
            file.write(block)
    path.unlink()


@contextlib.contextmanager
def passed_through(program: str, source: Path) -> Iterator[Path]:
    """``source`` through a FUSE program that hands every call on."""
    target = Path(tempfile.mkdtemp(prefix="cxlfs-bench-"))
    if Path(program).name == "passthrough_ll":
        arguments = [program, "-o", f"source={source}", str(target)]
    else:
        arguments = [program, str(source), str(target)]
    try:
        subprocess.run(arguments, check=True)
        umount = ["umount"] if os.geteuid() == 0 else ["fusermount3", "-u"]
        with ended_by(lambda: subprocess.run([*umount, str(target)], check=True), target):
            yield target
    finally:
        target.rmdir()


def find_passthrough(given: str | None) -> str | None:
    """The program to use: the one given, or the first that is installed."""
    for name in (given,) if given else PASSTHROUGHS:
        found = shutil.which(name)
        if found:
            return found
    return None


def file_system_of(directory: Path) -> str:
    """Its type, as the mount table names it: ``ext4``."""
    return _mount_entry(directory.resolve())[1]


def find_dax() -> list[Target]:
    """File systems on persistent memory that are mounted for direct access and may be written."""
    found = []
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        device, directory, kind, options, *_ = line.split()
        is_dax = any(option in {"dax", "dax=always"} for option in options.split(","))
        if device.startswith("/dev/pmem") and is_dax and os.access(directory, os.W_OK):
            found.append(Target(f"{kind}-dax", Path(directory)))
    return found


def _mount_entry(directory: Path) -> tuple[str, str]:
    """Mount point and type of the file system that ``directory`` lies on."""
    best = ("/", "unknown")
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, mountpoint, kind, *_ = line.split()
        if directory.is_relative_to(mountpoint) and len(mountpoint) >= len(best[0]):
            best = (mountpoint, kind)
    return best
