"""Overwrite one checkpoint under SIGKILLs, of the writer or of the daemon, and compare each time.

After each kill the checkpoint must be, bit for bit, the last version whose save had returned, or
the one in flight; the pointer file beside it likewise. What was said to be saved and is gone, what
is mixed, short or unreadable, is a finding.

``scripts/kill-test`` runs it long, ``tests/mounted/test_kills.py`` short.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.support import saver
from tests.support.cli import run_program
from tests.support.mount import PATIENCE_SECONDS, Workplace, workplace

ROOT = Path(__file__).parents[2]
ERRORS_OF_A_DEAD_MOUNT = {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO}
"""Afterwards, waiting for an answer, and while the request was being handed to the dying daemon."""
SAVE_SECONDS_MAX = 0.03
"""Kills come at a random time up to this after a save began: about as long as the longest takes."""


@dataclasses.dataclass(slots=True)
class Outcome:
    """Counts of one campaign. ``in_flight``: kills that hit a save; ``old`` and ``new`` say which
    version was there then, ``between`` are the kills that hit none.
    """

    kind: str
    kills: int = 0
    saves: int = 0
    in_flight: int = 0
    old: int = 0
    new: int = 0
    between: int = 0
    errors_seen: int = 0
    """Saves that failed with an error, as they must when the daemon is killed."""
    verified: bool = False
    problems: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Ledger:
    """What a saver has said."""

    saved: int
    """The last version whose save returned."""
    begun: int
    """The last version whose save began; the same as ``saved`` when none was in flight."""
    error: int | None = None


class Campaign:
    """One store, one seed; ``say`` gets a line now and then."""

    def __init__(
        self, place: Workplace, seed: int, say: Callable[[str], None] = lambda _line: None
    ) -> None:
        self.place = place
        self.seed = seed
        self.random = random.Random(seed)
        self.say = say
        self.version = 1
        """Which one the checkpoint is."""
        self.pointer = 1
        """Which one the pointer names."""
        saver.save(place.mountpoint, seed, 1, saver.content(seed, 1))

    def run(self, kind: str, kills: int) -> Outcome:
        """``kind``: "writer" or "daemon". The store is mounted before and unmounted afterwards."""
        outcome = Outcome(kind)
        for number in range(1, kills + 1):
            ledger = self._save_until_killed(kind)
            outcome.kills += 1
            outcome.saves += ledger.saved - self.version
            outcome.errors_seen += ledger.error is not None
            self._judge(outcome, ledger, f"{kind} kill {number}")
            if outcome.problems:
                break
            if number % 100 == 0:
                self.say(f"{number} {kind} kills, {outcome.old} old, {outcome.new} new")
        self.place.unmount()
        verified = run_program("verify", self.place.source)
        outcome.verified = verified.code == 0
        if verified.code != 0:
            outcome.problems.append(f"verify exits {verified.code}:\n{verified.stdout}")
        return outcome

    # --- one kill ---------------------------------------------------------------------------

    def _save_until_killed(self, kind: str) -> Ledger:
        saves_before = self.random.randrange(3)
        delay = self.random.uniform(0, SAVE_SECONDS_MAX)
        writer = self._start()
        try:
            lines = self._read_until_begin(writer, self.version + 1 + saves_before)
            time.sleep(delay)
            if kind == "writer":
                os.kill(writer.pid, signal.SIGKILL)
            else:
                self.place.kill_daemon()
            rest, _ = writer.communicate(timeout=PATIENCE_SECONDS)
        finally:
            writer.kill()
            writer.wait()
        ledger = self._ledger([*lines, *rest.decode().splitlines()])
        if kind == "daemon":
            self._expect_dead_mount()
            self.place.mount()
        return ledger

    def _start(self) -> subprocess.Popen[bytes]:
        arguments = [self.place.mountpoint, self.seed, self.version + 1]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.saver", *map(str, arguments)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )

    def _read_until_begin(self, writer: subprocess.Popen[bytes], version: int) -> list[str]:
        """What it said up to the beginning of ``version``; raw reads, so that nothing said later
        stays in a buffer here.
        """
        assert writer.stdout is not None
        said = b""
        while f"begin {version} ".encode() not in said:
            part = os.read(writer.stdout.fileno(), 4096)
            assert part, f"the saver ended by itself: {said.decode()}"
            said += part
        # Whole lines only: the saver writes each with one system call.
        assert said.endswith(b"\n")
        return said.decode().splitlines()

    def _ledger(self, lines: list[str]) -> Ledger:
        ledger = Ledger(saved=self.version, begun=self.version)
        for line in lines:
            word, version, *rest = line.split()
            if word == "begin":
                ledger.begun = int(version)
            elif word == "end":
                ledger.saved = int(version)
            else:
                ledger.error = int(rest[0])
        return ledger

    def _expect_dead_mount(self) -> None:
        """A dead mount point says so: it never looks empty."""
        with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
            list(self.place.mountpoint.iterdir())

    # --- comparing --------------------------------------------------------------------------

    def _judge(self, outcome: Outcome, ledger: Ledger, where: str) -> None:
        if ledger.error is not None and (
            outcome.kind == "writer" or ledger.error not in ERRORS_OF_A_DEAD_MOUNT
        ):
            outcome.problems.append(f"{where}: a save failed: {os.strerror(ledger.error)}")
            return
        found = self._find_version(ledger)
        if found is None:
            outcome.problems.append(
                f"{where}: neither version {ledger.saved} nor {ledger.begun} is there, but "
                f"{self._describe()} (saved with {saver.way(self.seed, ledger.begun)})"
            )
            return
        pointer = self._find_pointer(ledger, found)
        if pointer is None:
            outcome.problems.append(
                f"{where}: {saver.POINTER} holds {self._read(saver.POINTER)!r} beside version "
                f"{found} of {ledger.saved}, {ledger.begun}"
            )
            return
        self.version, self.pointer = found, pointer
        if ledger.saved == ledger.begun:
            outcome.between += 1
        else:
            outcome.in_flight += 1
            outcome.old += found == ledger.saved
            outcome.new += found == ledger.begun

    def _find_version(self, ledger: Ledger) -> int | None:
        """Which version the checkpoint is, of those it may be."""
        allowed = {
            saver.content(self.seed, version): version for version in (ledger.saved, ledger.begun)
        }
        return self._find(saver.CHECKPOINT, allowed)

    def _find_pointer(self, ledger: Ledger, found: int) -> int | None:
        """It is written after the checkpoint: it may be a version behind, never ahead."""
        before = ledger.saved if ledger.saved > self.version else self.pointer
        return self._find(saver.POINTER, {b"%d\n" % v: v for v in (before, found)})

    def _find(self, name: str, allowed: Mapping[bytes, int]) -> int | None:
        """The kernel releases a dead writer's files a moment after the writer is gone, so that a
        revert may be waited for; but not for long.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            version = allowed.get(self._read(name))
            if version is not None:
                return version
            time.sleep(0.005)
        return None

    def _read(self, name: str) -> bytes:
        return (self.place.mountpoint / name).read_bytes()

    def _describe(self) -> str:
        data = self._read(saver.CHECKPOINT)
        return f"{len(data)} bytes beginning with {data[:20]!r}"


REVERTED = r"reverted: the previous version is back: the writer was killed"


def run_campaign(
    kind: str, kills: int, seed: int, say: Callable[[str], None] = lambda _line: None
) -> Outcome:
    """A campaign on a store of its own, cleaned up behind it; the daemon's log is a problem's."""
    with (
        contextlib.redirect_stdout(io.StringIO()),  # where a workplace shows its log in the end
        workplace(size_bytes=128 * saver.MIB) as place,
    ):
        place.announced.append(REVERTED)
        place.mount()
        outcome = Campaign(place, seed, say).run(kind, kills)
        place.ends_clean = not outcome.problems
        if outcome.problems:
            outcome.problems.append(place.log_text())
    return outcome
