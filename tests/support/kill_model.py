"""What the files of a killed saver, or of a saver whose daemon was killed, may be; and the process.

The model lies outside the store: versions are numbers, their bytes come from the seed. After a kill
each file must be, bit for bit, what the last save of it that returned had left, or what the one in
flight was writing. What was said to be saved and is gone, what is mixed, short or unreadable, is a
finding.

Never here: killing, mounting.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from tests.support import saver
from tests.support.mount import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
LOG_BYTES_MAX = 4 * saver.MIB
"""The next kill finds a new log after this."""


@dataclasses.dataclass(slots=True)
class Ledger:
    """What a saver has said."""

    saved: int
    """The last version whose save returned; of a log, its last size that fsync returned for."""
    begun: int
    """The last one that was begun; the same as ``saved`` when none was in flight."""
    error: int | None = None

    def hear(self, line: str) -> None:
        word, number, *rest = line.split()
        if word == "begin":
            self.begun = int(number)
        elif word == "end":
            self.saved = int(number)
        else:
            self.error = int(rest[0])


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """``was_new``: which version is there of the one in flight; None when there was none."""

    was_new: bool | None = None
    problem: str | None = None


class Process:
    """A saver that runs; a thread listens to it."""

    def __init__(
        self, arguments: list[object], ledger: Ledger, program: str = "tests.support.saver"
    ) -> None:
        self.ledger = ledger
        self._begun = 0
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-m", program, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        self.pid = self._process.pid
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.ledger.hear(line)
                self._begun += line.startswith("begin")
                self._changed.notify_all()

    def wait_until_begun(self, count: int) -> None:
        """Until it has begun to save ``count`` times."""
        with self._changed:
            reached = self._changed.wait_for(
                lambda: self._begun >= count or self.ledger.error is not None, PATIENCE_SECONDS
            )
        assert reached, "a saver does not go on"
        assert self.ledger.error is None, f"a save failed: {os.strerror(self.ledger.error or 0)}"

    def tell(self, line: str) -> None:
        """Give it a line to read."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def wait(self) -> Ledger:
        """Until it has ended; what it said."""
        self._process.wait(PATIENCE_SECONDS)
        self._listener.join(PATIENCE_SECONDS)
        assert not self._listener.is_alive()
        return self.ledger

    def end(self) -> None:
        """Whatever happened, leave nothing behind."""
        self._process.kill()
        self._process.wait()
        self._listener.join()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()


class Checkpoints:
    """The files of one role in a directory: which version each is."""

    def __init__(
        self, directory: Path, seed: int, role: str, program: str = "tests.support.saver"
    ) -> None:
        self.directory = directory
        self.seed = seed
        self.role = role
        self.program = program
        self.version = 0
        """The last one that was saved, of any file."""
        self.versions: dict[str, int] = {}
        self.pointer = 0
        """Which version the pointer names."""
        while self.version < saver.ROLES[role].slots:
            self.version += 1
            data = saver.content(seed, role, self.version)
            saver.save(directory, seed, role, self.version, data)
            self.versions[self._name(self.version)] = self.version
        self.pointer = self.version

    def _name(self, version: int) -> str:
        return saver.name(self.seed, self.role, version)

    def start(self, *options: object) -> Process:
        """``options``: more arguments of the program."""
        ledger = Ledger(saved=self.version, begun=self.version)
        arguments = [self.directory, self.seed, self.role, self.version + 1, *options]
        return Process(arguments, ledger, self.program)

    def check(self) -> str | None:
        """What is wrong while nobody writes."""
        return self.judge(Ledger(saved=self.version, begun=self.version)).problem

    def progress(self, ledger: Ledger) -> int:
        """Saves that returned."""
        return ledger.saved - self.version

    def judge(self, ledger: Ledger) -> Verdict:
        """Compare every file; what is there is from now on what must be there."""
        before = self.version
        for version in range(before + 1, ledger.saved + 1):
            self.versions[self._name(version)] = version
        in_flight = ledger.begun if ledger.begun > ledger.saved else None
        was_new = None
        for name, version in self.versions.items():
            allowed = [version]
            if in_flight is not None and name == self._name(in_flight):
                allowed.append(in_flight)
            found = self._find(
                name, {saver.content(self.seed, self.role, each): each for each in allowed}
            )
            if found is None:
                expected = " or ".join(map(str, allowed))
                return Verdict(problem=f"{name} is not version {expected}: {self._describe(name)}")
            self.versions[name] = found
            if len(allowed) > 1:
                was_new = found == in_flight
        self.version = ledger.begun if was_new else ledger.saved
        return Verdict(was_new, self._judge_pointer(ledger, before))

    def _judge_pointer(self, ledger: Ledger, before: int) -> str | None:
        """It is written after the checkpoint: it may be a version behind, never ahead."""
        if not saver.ROLES[self.role].has_pointer:
            return None
        behind = ledger.saved if ledger.saved > before else self.pointer
        pointer = self._find(saver.POINTER, {b"%d\n" % v: v for v in (behind, self.version)})
        if pointer is None:
            return (
                f"{saver.POINTER} is {_read(self.directory / saver.POINTER)!r} beside version "
                f"{self.version} of {ledger.saved}, {ledger.begun}"
            )
        self.pointer = pointer
        return None

    def _find(self, name: str, allowed: Mapping[bytes, int]) -> int | None:
        """The kernel releases a dead writer's files a moment after the writer is gone, so that a
        revert may be waited for; but not for long.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            version = allowed.get(_read(self.directory / name))
            if version is not None:
                return version
            time.sleep(0.005)
        return None

    def _describe(self, name: str) -> str:
        data = _read(self.directory / name)
        return f"{len(data)} bytes beginning with {data[:20]!r}"


class Log:
    """A file that is appended to, with fsync: a prefix of what was written, with all that fsync
    returned for.
    """

    role = saver.LOG

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.seed = seed
        self.number = 0
        self.size_bytes = 0

    @property
    def _path(self) -> Path:
        return self.directory / saver.log_name(self.number)

    def start(self) -> Process:
        if self.size_bytes > LOG_BYTES_MAX:
            self._begin_anew()
        ledger = Ledger(saved=self.size_bytes, begun=self.size_bytes)
        arguments = [self.directory, self.seed, self.role, self.size_bytes, self.number]
        return Process(arguments, ledger)

    def _begin_anew(self) -> None:
        self._path.unlink()
        self.number += 1
        self.size_bytes = 0

    def progress(self, ledger: Ledger) -> int:
        return int(ledger.saved > self.size_bytes)

    def judge(self, ledger: Ledger) -> Verdict:
        data = _read(self._path) if ledger.saved or self._path.exists() else b""
        if not ledger.saved <= len(data) <= ledger.begun:
            return Verdict(
                problem=f"{self._path.name} has {len(data)} bytes; fsync returned for "
                f"{ledger.saved}, {ledger.begun} were being written"
            )
        if data != saver.log_content(self.seed, self.number, 0, len(data)):
            return Verdict(problem=f"{self._path.name} holds bytes that nobody wrote there")
        self.size_bytes = len(data)
        return Verdict(len(data) > ledger.saved if ledger.begun > ledger.saved else None)


Model = Checkpoints | Log


def _read(path: Path) -> bytes:
    """What it holds; what an error is about stands in its place, and is never equal."""
    try:
        return path.read_bytes()
    except OSError as error:
        return f"<{error}>".encode()
