"""Asks a process of its own whether overwritten files are torn (``judge_child``), and ends it when
it takes too long or is not needed.

Other modules know which files these are (``judging``).

Invariants
- Every question has an answer within bounded time; where the child fails it is "unknown".
- One question at a time. The child runs from the first question until a minute after the last.
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from collections.abc import Callable

import trio

from cxlfs.checkpoint.judge import Evidence, Verdict
from cxlfs.daemon.judge_child import LENGTH, READ, READ_MARK, READY_MARK, VERDICT_MARK
from cxlfs.errors import CxlfsError
from cxlfs.units import KIB, MIB

log = logging.getLogger(__name__)

IDLE_SECONDS = 60.0
QUESTION_SECONDS = 10.0
"""Of a clock: the child limits its processor time, and others may use the processors."""
_START_SECONDS = 30.0
_MESSAGE_BYTES_MAX = 64 * KIB
_READS_MAX = 100_000
_READ_BYTES_MAX = 256 * MIB
"""Of one file and the version before."""
_UNKNOWN = Verdict(Evidence.UNKNOWN, "it could not be looked at")

Read = Callable[[str, int, int], bytes]
"""Which content ("new" or "old"), offset and length to bytes. Raises CxlfsError."""


class _ChildError(Exception):
    """The child said what makes no sense, or nothing."""


class Judge:
    """One for each mount. ``command`` starts the child with its socket as descriptor 0."""

    def __init__(self, command: tuple[str, ...] | None = None) -> None:
        self._command = command or (sys.executable, "-I", "-m", "cxlfs.daemon.judge_child")
        self._process: trio.Process | None = None
        self._stream: trio.SocketStream | None = None
        self._used = 0.0

    async def judge(self, name: bytes, new_bytes: int, old_bytes: int, read: Read) -> Verdict:
        """The verdict about new content, compared with old content. Raises nothing."""
        try:
            if self._stream is None:
                await self._start()
            with trio.fail_after(QUESTION_SECONDS):
                return await self._ask(name, new_bytes, old_bytes, read)
        except (_ChildError, OSError, trio.TooSlowError, trio.BrokenResourceError) as error:
            log.warning("a file could not be judged: %s", repr(error))
            await self.aclose()
            return _UNKNOWN
        except trio.Cancelled:  # a question that was given up half way
            with trio.CancelScope(shield=True):
                await self.aclose()
            raise
        finally:
            self._used = trio.current_time()

    async def rest(self) -> None:
        """End a child that nobody has needed for a while."""
        if self._process is not None and trio.current_time() - self._used > IDLE_SECONDS:
            await self.aclose()

    async def aclose(self) -> None:
        """End the child, if there is one."""
        process, self._process = self._process, None
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.socket.close()
        if process is not None:
            process.kill()
            await process.wait()

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        with theirs:
            self._process = await trio.lowlevel.open_process(
                self._command,
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        with trio.fail_after(_START_SECONDS):
            if await self._receive() != READY_MARK:
                raise _ChildError("the judge did not start")

    async def _ask(self, name: bytes, new_bytes: int, old_bytes: int, read: Read) -> Verdict:
        text = name.decode("utf-8", "replace")
        question = {"name": text, "new_bytes": new_bytes, "old_bytes": old_bytes}
        await self._send(json.dumps(question).encode())
        left_bytes = _READ_BYTES_MAX
        for _ in range(_READS_MAX):
            message = await self._receive()
            if message[:1] == VERDICT_MARK:
                return _verdict(message[1:])
            if len(message) != READ.size or message[:1] != READ_MARK:
                break
            _, which, offset, length = READ.unpack(message)
            left_bytes -= length
            if which > 1 or length > MIB or left_bytes < 0:
                break
            await self._send(_read(read, ("new", "old")[which], offset, length))
        raise _ChildError("the judge asks for too much")

    async def _send(self, message: bytes) -> None:
        if self._stream is None:
            raise _ChildError("the judge is gone")
        await self._stream.send_all(LENGTH.pack(len(message)) + message)

    async def _receive(self) -> bytes:
        (length,) = LENGTH.unpack(await self._exactly(LENGTH.size))
        if length > _MESSAGE_BYTES_MAX:
            raise _ChildError("the judge says too much")
        return await self._exactly(length)

    async def _exactly(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            if self._stream is None:
                raise _ChildError("the judge is gone")
            piece = await self._stream.receive_some(length - len(data))
            if not piece:
                raise _ChildError("the judge is gone")
            data += piece
        return bytes(data)


def _read(read: Read, which: str, offset: int, length: int) -> bytes:
    try:
        return b"\0" + read(which, offset, length)
    except CxlfsError:
        return b"\1"


def _verdict(text: bytes) -> Verdict:
    """Raises _ChildError."""
    try:
        evidence, reason = json.loads(text)
        return Verdict(Evidence(evidence), str(reason)[:_MESSAGE_BYTES_MAX])
    except (ValueError, TypeError) as error:
        raise _ChildError("the judge makes no sense") from error
