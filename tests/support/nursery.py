"""Daemons of tests are born here: forked from a process that has imported what a daemon imports.

Importing it (numpy, trio, pyfuse3, cxlfs) takes two thirds of what a mount costs a processor, and
a run of the tests mounts hundreds of times. What is forked goes the whole way of a daemon that
``cxlfs mount`` starts, from ``cxlfs.daemon.start.main`` on: its configuration on standard input, a
session of its own, the report.

Never here: for tests about the start itself (``Workplace.mount(afresh=True)``), nor for what a test
runs as a program: those begin with a Python of their own.

Invariants
- The process that forks has one thread, has opened nothing, and ends with the one that tests.
- What is forked has environment, directory, umask and standard files of its caller.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from cxlfs.daemon import mount, start
from cxlfs.daemon.options import MountConfig
from tests.support.repository import ROOT

REQUEST_BYTES_MAX = 1 << 17
_STANDARD_FILES = 3
ROOM_FOR_TITLE = "-" * 200
"""The title of a process has as much room as its command line had."""


def mount_forked(config: MountConfig) -> None:
    """As ``mount_background``, with a daemon from the nursery of this process."""
    with mock.patch.object(mount, "_launch", _nursery().launch):
        mount.mount_background(config)


@functools.cache
def _nursery() -> Nursery:
    return Nursery()


@dataclasses.dataclass(frozen=True)
class Launched:
    """What ``mount_background`` needs of the process that forks the daemon."""

    pid: int
    status: int

    def wait(self) -> int:
        return self.status


class Nursery:
    """The side of the caller."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-m", "tests.support.nursery", str(number), ROOM_FOR_TITLE]
            # Nobody waits for it: it ends when the last copy of the channel is closed.
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[number],
                start_new_session=True,
            )

    def launch(self, config: MountConfig, writer: int) -> Launched:
        """In the place of ``mount._launch``, which it does all the same for the caller."""
        arguments = ["--report-fd", str(writer), "--", config.source, config.mountpoint]
        umask = os.umask(0)
        os.umask(umask)
        request = {
            "arguments": arguments,
            "environment": dict(os.environ),
            "directory": str(Path.cwd()),
            "umask": umask,
        }
        reader, stdin = os.pipe()
        with self._lock:
            with os.fdopen(stdin, "wb") as stream:
                try:
                    text = json.dumps(request).encode()
                    socket.send_fds(self._channel, [text], [reader, 1, 2, writer])
                finally:
                    os.close(reader)
                stream.write(config.to_json().encode())
            return Launched(self._answer(), self._answer())

    def _answer(self) -> int:
        answer = self._channel.recv(REQUEST_BYTES_MAX)
        assert answer, "the nursery is gone"
        return int(answer)


# --- the process that forks ---------------------------------------------------------------------


def serve(number: int) -> int:
    """Fork until nobody can ask any more; returns the exit status of the process it runs in."""
    # As in start.py, for the same reason: no threads.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import cxlfs.daemon.service  # noqa: F401

    assert len(list(Path("/proc/self/task").iterdir())) == 1, "threads would not survive a fork"
    gc.freeze()  # as a daemon does with what stays; what is not looked at is not copied
    with socket.socket(fileno=number) as channel:
        while True:
            text, descriptors, _, _ = socket.recv_fds(channel, REQUEST_BYTES_MAX, 8)
            if not text:
                return 0
            pid = os.fork()
            if pid == 0:
                channel.close()
                return _become(json.loads(text), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            channel.send(b"%d" % pid)
            _, status = os.waitpid(pid, 0)
            channel.send(b"%d" % os.waitstatus_to_exitcode(status))


def _become(request: dict[str, Any], descriptors: Sequence[int]) -> int:
    """What ``mount._launch`` starts."""
    os.setsid()
    *standard, report = descriptors
    for target, source in enumerate(standard[:_STANDARD_FILES]):
        os.dup2(source, target)
        os.close(source)
    os.set_inheritable(report, True)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    os.umask(request["umask"])
    _, _, *rest = request["arguments"]
    launcher = os.getpid()
    status = start.main(["--report-fd", str(report), *rest])
    if os.getpid() == launcher:  # taking down all that was imported is half of what a mount costs
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1])))
