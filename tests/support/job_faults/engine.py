"""Ranks of one start that reach each other through a directory: what each says is a file there.

A rank that ended, or was killed, has let go of its lock: who waits for it gives up at once, as the
deadline may pass at any moment. So a fault costs no time, whatever the deadline is.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from cxlfs.errors import JobLinkError
from cxlfs.job.engines import World
from cxlfs.job.engines.sockets import SocketLink

_POLL_SECONDS = 0.002


class Partition:
    """Ranks of one part do not hear of those of another while this is there; what was said to them
    meanwhile comes late, when it is gone.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "parts"

    def begin(self, parts: Sequence[int]) -> None:
        """``parts[i]``: the part that rank i is in."""
        beside = self._path.with_suffix(".tmp")
        beside.write_text(json.dumps(parts))
        beside.rename(self._path)

    def heal(self) -> None:
        self._path.unlink(missing_ok=True)

    def divides(self, rank: int, other: int) -> bool:
        try:
            parts = json.loads(self._path.read_text())
        except FileNotFoundError:
            return False
        return bool(parts[rank] != parts[other])


class DirectoryEngine:
    def __init__(self, directory: Path, rank: int, size: int) -> None:
        self._directory = directory
        self._world = World(rank, size, directory.name)
        self._partition = Partition(directory)
        self._lock = os.open(self._alive(rank), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (directory / f"began-{rank}").touch()

    def world(self) -> World:
        return self._world

    def say(
        self, key: str, body: bytes, *, to: Sequence[int] | None = None, near: bool = False
    ) -> None:
        del to, near
        path = self._path(key, self._world.rank)
        beside = path.with_name(f"{path.name}.tmp")
        beside.write_bytes(body)
        beside.rename(path)

    def hear(
        self, key: str, ranks: Sequence[int], seconds: float, *, near: bool = False
    ) -> dict[int, bytes]:
        del near
        end = time.monotonic() + seconds
        heard: dict[int, bytes] = {}
        while True:
            missing = [rank for rank in ranks if rank not in heard]
            gone = all(self._is_gone(rank) for rank in missing)
            for rank in missing:
                if not self._partition.divides(self._world.rank, rank):
                    with contextlib.suppress(FileNotFoundError):
                        heard[rank] = self._path(key, rank).read_bytes()
            if len(heard) == len(ranks) or gone or time.monotonic() >= end:
                return heard
            time.sleep(_POLL_SECONDS)

    def forget(self, key: str) -> None:
        self._path(key, self._world.rank).unlink(missing_ok=True)

    def link(self, other: int, name: str, seconds: float) -> SocketLink:
        if self._partition.divides(self._world.rank, other):
            raise JobLinkError(f"rank {other} is not reached")
        end = time.monotonic() + seconds
        ends = sorted((self._world.rank, other))
        path = self._path(name, ends[0]).with_suffix(f".{ends[1]}.socket")
        meet = self._listen if ends[0] == self._world.rank else self._connect
        with contextlib.ExitStack() as stack:
            attempt = meet(path, stack)
            while (connection := attempt()) is None:
                if self._is_gone(other) or time.monotonic() >= end:
                    raise JobLinkError(f"rank {other} is gone")
        link = SocketLink(connection, other, seconds)
        link.is_stream = bool(
            zlib.crc32(name.encode()) % 2
        )  # both ways of copying have their faults
        return link

    def _listen(
        self, path: Path, stack: contextlib.ExitStack
    ) -> Callable[[], socket.socket | None]:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(path))
        stack.callback(path.unlink)
        server.listen(1)
        server.settimeout(0.05)

        def accept() -> socket.socket | None:
            with contextlib.suppress(TimeoutError):
                return server.accept()[0]
            return None

        return accept

    def _connect(
        self, path: Path, _stack: contextlib.ExitStack
    ) -> Callable[[], socket.socket | None]:
        def connect() -> socket.socket | None:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(path))
            except OSError:
                connection.close()
                time.sleep(_POLL_SECONDS)
                return None
            return connection

        return connect

    def _path(self, key: str, rank: int) -> Path:
        return self._directory / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}-{rank}"

    def _alive(self, rank: int) -> Path:
        return self._directory / f"alive-{rank}"

    def _is_gone(self, rank: int) -> bool:
        """It began, and holds its lock no more."""
        if rank == self._world.rank or not (self._directory / f"began-{rank}").exists():
            return False
        descriptor = os.open(self._alive(rank), os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True
