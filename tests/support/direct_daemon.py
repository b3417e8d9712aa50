"""A daemon without a kernel: a store in memory, who serves it, and its programs."""

from __future__ import annotations

import os
import struct
from typing import Any

from cxlfs.fuse import kernel
from cxlfs.fuse.direct import Direct
from cxlfs.fuse.direct_wire import Command, size_of
from cxlfs.fuse.handles import Caller
from cxlfs.fuse.kernel import Opcode
from cxlfs.fuse.operations import Operations
from cxlfs.native.transport import Answer, Upcall
from cxlfs.store import Store
from tests.support.direct_client import lease_request, leases_of
from tests.support.slips import Locks, Program

ROOT = 1
TID = os.getpid()
ATTRIBUTES_SECONDS = struct.Struct("=Q")


class Plane:
    """A data plane that lets all files be mapped, and remembers what it is told."""

    direct_mapping = True
    writes_past_store = True

    def __init__(self) -> None:
        self.allowed: list[int] = []

    def opened(self, handle: int, ino: int, *, readable: bool) -> None: ...

    def released(self, handle: int, ino: int) -> None: ...

    def allow_writes(self, handle: int, _tid: int) -> None:
        self.allowed.append(handle)

    def describe(self) -> dict[str, object]:
        return {}

    def invalidate(self, ino: int, attributes_only: bool) -> None: ...

    def invalidate_name(self, parent: int, name: bytes) -> None: ...


class Replies:
    """Stands for the transport: answers that are given while the lock is held."""

    def __init__(self) -> None:
        self.given: list[bytes] = []

    def reply(self, _unique: int, data: bytes | memoryview) -> None:
        self.given.append(bytes(data))


class Daemon:
    """A store in memory and those who serve it, as far as direct access goes."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.locks = Locks(store.media)
        self.plane = Plane()
        self.requests = Operations(store, data_plane=self.plane)
        self.replies = Replies()
        transport: Any = self.replies
        self.direct = Direct(self.requests, transport)
        self.access = self.requests.direct_access
        self.time = 1000.0
        self.access._clock = lambda: self.time
        self.programs: list[Program] = []

    def call(self, opcode: int, inode: int, arguments: bytes, *, uid: int = 0) -> Answer:
        """Whatever way the answer goes."""
        upcall = Upcall(opcode, 1, inode, uid, 0, TID, memoryview(arguments), 0, False)
        del self.replies.given[:]
        answer = self.direct.serve(upcall)
        if answer is None and self.replies.given:
            return Answer(1, 0, self.replies.given[0])
        assert isinstance(answer, Answer)
        return answer

    def ask(self, handle: int, command: int, data: bytes = b"", *, uid: int = 0) -> Answer:
        """An ioctl, its data filled up with zeros where it is too short."""
        data = data.ljust(size_of(command), b"\0")
        head = kernel.IOCTL.pack(handle, 0, command, 0, len(data), len(data))
        answer = self.call(Opcode.IOCTL, 1, head + data, uid=uid)
        if answer.error:
            return answer
        assert answer.data[: kernel.IOCTL_ANSWER.size] == bytes(kernel.IOCTL_ANSWER.size)
        return answer._replace(data=answer.data[kernel.IOCTL_ANSWER.size :])

    def create(self, name: bytes = b"file", flags: int = os.O_RDWR) -> tuple[int, int]:
        """Inode and handle."""
        with self.requests.lock:
            caller = Caller(0, 0, TID)
            attributes, opened = self.requests.create_file(ROOT, name, 0o644, flags, caller)
        return attributes.ino, opened.handle

    def open(self, ino: int, flags: int) -> Answer:
        return self.call(Opcode.OPEN, ino, kernel.OPEN.pack(flags, 0))

    def opened(self, ino: int, flags: int) -> int:
        answer = self.open(ino, flags)
        assert answer.error == 0
        return int.from_bytes(answer.data[:8], "little")

    def close(self, handle: int) -> None:
        assert self.call(Opcode.FLUSH, 0, kernel.NUMBER.pack(handle)).error == 0
        assert self.call(Opcode.RELEASE, 0, kernel.NUMBER.pack(handle)).error == 0

    def program(self, handle: int) -> Program:
        """One that has asked for room, through the kernel, and has it locked."""
        made = Program(self.store, handle, self.locks)
        self.programs.append(made)
        answer = self.ask(handle, Command.LEASE, lease_request(4096))
        assert answer.error == 0
        [made.lease] = leases_of(answer.data)
        assert made.take(made.lease)
        return made

    def attributes_seconds(self, ino: int) -> tuple[int, bool]:
        """How long the kernel may keep the answer to GETATTR, and whether it has it already."""
        answer = self.call(Opcode.GETATTR, ino, bytes(16))
        return int(ATTRIBUTES_SECONDS.unpack_from(answer.data)[0]), bool(self.replies.given)
