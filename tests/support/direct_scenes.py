"""What tests of programs do that store file data by themselves, on real mounts: an open file with a
program in this process, and looks at it from other ones.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from cxlfs.control.client import control_request
from tests.support.direct_client import DirectFile, ask
from tests.support.mount import Workplace
from tests.support.repository import ROOT

CREATE = os.O_RDWR | os.O_CREAT

OVERWRITE = """
import os, sys
from tests.support.direct_client import DirectFile
flags = os.O_RDWR | os.O_CREAT | (os.O_TRUNC if sys.argv[2] == "anew" else 0)
file = DirectFile(os.open(sys.argv[1], flags, 0o644))
file.write_all(0, b"new" * 500_000)
file.count_copying(1)
file.store(b"half of a write")
print("written", flush=True)
sys.stdin.read()
"""
"""A program that waits in the middle of a write, to be killed there."""


class Writer:
    """An open file of the mount, and what this process stores of it by itself."""

    def __init__(self, path: Path, flags: int = CREATE) -> None:
        self.path = path
        self.descriptor = os.open(path, flags, 0o644)
        self.direct = DirectFile(self.descriptor)

    def close(self) -> None:
        """The descriptor, and all that was mapped."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            try:
                os.close(descriptor)
            finally:
                self.direct.medium.close()


def number_of(action: Callable[[], object]) -> int | None:
    """The errno that it ends with."""
    try:
        action()
    except OSError as error:
        return error.errno
    return None


def can_begin(direct: DirectFile) -> bool:
    """It has a lease, a fresh one, if there is room and nobody else has the file open."""
    direct.settle(done=True)
    number = number_of(direct.begin)
    assert number in (None, errno.ENOSPC, errno.EBUSY)
    return number is None


def refused(descriptor: int, command: int, request: bytes = b"") -> int | None:
    """The errno that a request ends with."""
    return number_of(lambda: ask(descriptor, command, request))


def run(code: str, *arguments: object) -> bytes:
    """Python in another process, until it ends; its output."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout


def read_elsewhere(path: Path) -> bytes:
    return run("import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())", path)


def size_elsewhere(path: Path) -> int:
    return int(run("import os, sys; print(os.stat(sys.argv[1]).st_size)", path))


def free_bytes(place: Workplace) -> int:
    report = os.statvfs(place.mountpoint)
    return report.f_bfree * report.f_frsize


def count(place: Workplace, name: str) -> int:
    """One of the transport's."""
    for message in control_request(str(place.mountpoint), "status"):
        return int(message["transport"][name])  # type: ignore[index]
    raise AssertionError("no answer")
