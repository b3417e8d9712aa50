"""A bare FUSE server (bare_server.c), compiled and mounted: the least that such a server has to do.

Never here: what is measured on it (``fuse``).

Invariants
- Leaving a context unmounts, ends the server and removes what it made, whatever happened inside.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cxlfs.daemon import linux
from tests.support.bench.measure import MissingError
from tests.support.bench.targets import ended_by
from tests.support.repository import ROOT

THREADS = 2
PROGRAM = Path(__file__).with_name("bare_server.c")
PERSIST = ROOT / "csrc" / "persist"
PARTS = ("copy", "copy_x86", "crc32c", "crc32c_x86", "crc32c_arm", "dispatch", "faults")
PATIENCE_SECONDS = 30.0


@contextlib.contextmanager
def bare_mount(directory: Path, processor: int | None = None) -> Iterator[Path]:
    """Files lie in ``directory``, on tmpfs; yields the mount point. The server's threads are bound
    to ``processor``, where one is named. Raises MissingError.
    """
    if not linux.is_root():
        raise MissingError("a bare FUSE server is mounted as root only")
    with tempfile.TemporaryDirectory(dir=directory, prefix="bare-") as work:
        program, target = Path(work) / "bare_server", Path(tempfile.mkdtemp(prefix="cxlfs-bench-"))
        try:
            _compile(program)
            with _served(program, target, Path(work) / "memory", processor):
                yield target
        finally:
            target.rmdir()


@contextlib.contextmanager
def _served(program: Path, target: Path, memory: Path, processor: int | None) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    if processor is not None:
        os.sched_setaffinity(0, {processor})
    server = subprocess.Popen([program, target, memory, str(THREADS)])
    os.sched_setaffinity(0, before)
    try:
        until = time.monotonic() + PATIENCE_SECONDS
        while not target.is_mount():
            if server.poll() is not None or time.monotonic() > until:
                raise MissingError(f"{program.name} could not mount on {target}")
            time.sleep(0.01)
        with ended_by(lambda: subprocess.run(["umount", str(target)], check=True), target):
            yield
    finally:
        # It has ended where it was unmounted.
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(PATIENCE_SECONDS)
        server.kill()
        server.wait()


def _compile(program: Path) -> None:
    arch = "persist_arm" if os.uname().machine == "aarch64" else "persist_x86"
    sources = [PROGRAM, *(PERSIST / f"{name}.c" for name in (*PARTS, arch))]
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{ROOT / 'csrc'}"]
    compiler = os.environ.get("CC", "gcc")
    try:
        subprocess.run(
            [compiler, *flags, "-o", program, *sources], check=True, capture_output=True, text=True
        )
    except FileNotFoundError as error:
        raise MissingError(f"no {compiler} to compile a bare FUSE server with") from error
    except subprocess.CalledProcessError as error:
        raise MissingError(f"a bare FUSE server cannot be compiled: {error.stderr}") from error
