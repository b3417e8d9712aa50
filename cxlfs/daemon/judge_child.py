"""The process that looks at bytes for the judge: anybody may have written them.

It has one socket to the daemon (descriptor 0), opens nothing, and gives up what rights it has
before the first question. ``judge`` starts it, and ends it when it takes too long.

Messages are a length (u32, little-endian) and that many bytes.
- question: JSON with ``name``, ``new_bytes``, ``old_bytes``;
- from here, as often as needed: READ, which content, offset, length; the answer is a status byte
  (0: good) and the bytes;
- the last one from here: VERDICT, evidence and reason as JSON.

Invariants
- Memory, processor time and descriptors are limited, whatever the bytes are.
- An error of its own is the verdict "unknown".
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import socket
import struct
import types

from cxlfs.checkpoint.judge import Evidence, Verdict, judge
from cxlfs.units import MIB

LENGTH = struct.Struct("<L")
READ = struct.Struct("<cBQL")
READ_MARK, VERDICT_MARK, READY_MARK = b"R", b"V", b"S"
QUESTION_SECONDS = 2.0
"""Of processor time, for one question."""
MEMORY_BYTES_MAX = 512 * MIB
_ANSWER_BYTES_MAX = 2 * MIB
_NOBODY = 65_534


class TooLongError(MemoryError):
    """A question took more than QUESTION_SECONDS."""


class Channel:
    """Whole messages over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: bytes) -> None:
        self._connection.sendall(LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes:
        """Raises EOFError."""
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        if length > _ANSWER_BYTES_MAX:
            raise EOFError
        return self._exactly(length)

    def _exactly(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            piece = self._connection.recv(length - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)


class _Remote:
    """One of the two contents, as the daemon has it."""

    def __init__(self, channel: Channel, which: int, size_bytes: int) -> None:
        self._channel = channel
        self._which = which
        self.size_bytes = size_bytes

    def fetch(self, offset: int, length: int) -> bytes:
        self._channel.send(READ.pack(READ_MARK, self._which, offset, length))
        answer = self._channel.receive()
        if not answer or answer[0]:
            raise OSError("it cannot be read")
        return answer[1:]


def main() -> None:
    """Answer questions until the daemon closes its end."""
    channel = Channel(socket.socket(fileno=0))
    with contextlib.suppress(ImportError):  # a part of the package is missing: it is not read then
        importlib.import_module("h5py")  # nothing can be opened later on
    _give_up_rights()
    channel.send(READY_MARK)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            question = json.loads(channel.receive())
            verdict = _answer(channel, question)
            text = json.dumps([verdict.evidence.value, verdict.reason])
            channel.send(VERDICT_MARK + text.encode())


def _answer(channel: Channel, question: dict[str, object]) -> Verdict:
    new, old = (
        _Remote(channel, which, int(str(question[key])))
        for which, key in enumerate(("new_bytes", "old_bytes"))
    )
    late: list[int] = []

    def too_long(number: int, _frame: types.FrameType | None) -> None:
        late.append(number)
        raise TooLongError("it takes too long")

    signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, QUESTION_SECONDS)
    try:
        found = judge(str(question["name"]), new, old)
        # Libraries make errors of their own of one that comes while they call back.
        return Verdict(Evidence.UNKNOWN, "it takes too long") if late else found
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:  # noqa: BLE001  a reader's own mistake takes nothing back
        return Verdict(Evidence.UNKNOWN, type(error).__name__)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _give_up_rights() -> None:
    """What a hostile file could do with this process from here on is think, within limits."""
    with open("/proc/self/statm") as text:  # noqa: PTH123  before descriptors are refused
        used = int(text.read().split()[0]) * resource.getpagesize()
    for limit, value in (
        (resource.RLIMIT_AS, used + MEMORY_BYTES_MAX),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)


if __name__ == "__main__":
    main()
