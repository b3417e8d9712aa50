"""Agents of a job's nodes, a process each, beside its ranks and behind them: they come together in
a directory, and one that is killed is begun again, as a service is.

Never here: what an agent does (``cxlfs.job.agent``); when one is killed (``campaign``).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cxlfs.job import copying
from cxlfs.job.agent import Event, Pace, Settings, Tending, serve
from cxlfs.job.engines import Engine
from cxlfs.job.engines.rendezvous import Group, came_anew, unheard
from cxlfs.job.tier import Tier
from tests.support.job_faults.engine import DirectoryEngine
from tests.support.job_faults.in_pieces import cut_small
from tests.support.job_faults.judge import BrokenError
from tests.support.job_faults.moments import EVENTS

PAUSE_SECONDS = 0.01
DEADLINE_SECONDS = 10.0
TENDED_SECONDS = 40.0
"""Until all have made whole what there is, once nobody disturbs them."""
_POLL_SECONDS = 0.002
_TICK_SECONDS = 0.02
_PR_SET_PDEATHSIG = 1
_CALLS = {"in its work": 70, "in a copy": 14, "while it drains": 30}
"""Into the file system; as many as it makes, or a few less."""


@dataclasses.dataclass(frozen=True, slots=True)
class Death:
    """An agent kills itself at that ``call`` into the file system, or behind the last: of its work
    in a round, of the copy that it receives, or of what it drains first.
    """

    call: int
    when: str


class DirectoryMeeting:
    """As ``TorchMeeting``, in a directory: who arrives begins a new epoch, which is one of its
    directories; who sees that comes as well.
    """

    def __init__(self, root: Path, rank: int, size: int) -> None:
        self._root, self._rank, self._size = root, rank, size
        self.epoch = 0
        """That this agent is, or was last, together in."""

    def join(self, seconds: float) -> Engine:
        end = time.monotonic() + seconds
        epoch = self._begin()
        while True:
            directory = self._root / f"epoch{epoch}"
            engine = DirectoryEngine(directory, self._rank, self._size)
            while newest_epoch(self._root) == epoch:
                missing = [
                    rank for rank in range(self._size) if not (directory / f"began-{rank}").exists()
                ]
                if not missing:
                    self.epoch = epoch
                    check = functools.partial(_require_newest, self._root, epoch)
                    return Group(engine, check, _TICK_SECONDS)
                if time.monotonic() >= end:
                    raise unheard(missing)
                time.sleep(_POLL_SECONDS)
            epoch = newest_epoch(self._root)

    def _begin(self) -> int:
        with (self._root / "epochs.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            epoch = newest_epoch(self._root) + 1
            (self._root / f"epoch{epoch}").mkdir()
            return epoch


def newest_epoch(root: Path) -> int:
    """0: none was begun."""
    return max((int(path.name[5:]) for path in root.glob("epoch[0-9]*")), default=0)


def _require_newest(root: Path, epoch: int) -> None:
    """Raises UndecidedError."""
    if newest_epoch(root) != epoch:
        raise came_anew()


class Agents:
    """One for each of ``seats``, from :meth:`begin` to :meth:`end`."""

    def __init__(
        self, root: Path, seats: Sequence[Path], replicas: int, tier: str | None = None
    ) -> None:
        root.mkdir(parents=True)
        self._root, self._seats, self._replicas, self._tier = root, seats, replicas, tier
        self._pids: dict[int, int] = {}

    def begin(self, node: int, death: Death | None = None) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                self._live(node, death)
            finally:
                os._exit(1)
        self._pids[node] = pid

    def begin_all(self) -> None:
        for node in range(len(self._seats)):
            self.begin(node)

    def kill(self, node: int) -> None:
        """Whatever it does; it is not begun again here."""
        pid = self._pids.pop(node)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def await_death(self, node: int) -> None:
        """Of one that kills itself. Raises BrokenError: it ends otherwise, or does not."""
        pid, end = self._pids.pop(node), time.monotonic() + TENDED_SECONDS
        while True:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found and os.waitstatus_to_exitcode(status) == -signal.SIGKILL:
                return
            if found or time.monotonic() > end:
                self._pids |= {} if found else {node: pid}
                raise BrokenError(f"agent {node} does not come to its moment: {self.told(node)}")
            time.sleep(_POLL_SECONDS)

    def end(self) -> None:
        """All of them, by SIGKILL: nothing has to be put in order."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._pids.clear()

    # --- what they told ---------------------------------------------------------------------

    def told(self, node: int) -> list[dict[str, Any]]:
        """Of a line that it did not finish nothing."""
        with contextlib.suppress(FileNotFoundError):
            text = (self._root / f"told-{node}").read_text()
            return [json.loads(line) for line in text.splitlines(keepends=True) if "\n" in line]
        return []

    @property
    def epoch(self) -> int:
        """The newest."""
        return newest_epoch(self._root)

    def ends_of(self, epoch: int) -> set[tuple[str, int | None]]:
        """How all say that their work of the newest epoch has ended, if that came behind
        ``epoch``: ``tended`` or ``not-tended``, and of which step. Empty: not all have.
        """
        newest = self.epoch
        found: set[tuple[str, int | None]] = set()
        if newest <= epoch:
            return set()
        for node in range(len(self._seats)):
            said = [line for line in self.told(node) if line["epoch"] == newest]
            ended = [line for line in said if line["state"] in ("tended", "not-tended")]
            if not ended:
                return set()
            found.add((ended[-1]["state"], ended[-1]["step"]))
        return found

    def wait(self, epoch: int) -> set[tuple[str, int | None]]:
        """``ends_of``, once it is there. Raises BrokenError."""
        end = time.monotonic() + TENDED_SECONDS
        while not (found := self.ends_of(epoch)):
            if time.monotonic() > end:
                rows = [self.told(node)[-5:] for node in range(len(self._seats))]
                raise BrokenError(f"agents do not tend: {rows}")
            time.sleep(_POLL_SECONDS)
        return found

    # --- in its process ---------------------------------------------------------------------

    def _live(self, node: int, death: Death | None) -> None:
        logging.disable(logging.CRITICAL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it would live for ever
        meeting = DirectoryMeeting(self._root, node, len(self._seats))
        file = os.open(self._root / f"told-{node}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

        def tell(event: Event) -> None:
            line = {"epoch": meeting.epoch, **dataclasses.asdict(event)}
            os.write(file, json.dumps(line).encode() + b"\n")

        cut_small(lambda: None)
        seat = self._seats[node]
        settings = Settings(self._replicas, seat.name, DEADLINE_SECONDS, tier=self._tier)
        work = Tending(seat, settings, tell)
        if death is not None:
            _die(work, death)
        try:
            serve(meeting, work, tell, Pace(DEADLINE_SECONDS, PAUSE_SECONDS))
        except BaseException as error:  # noqa: BLE001 - the campaign hears of it
            tell(Event("failed", f"{type(error).__name__}: {error}"))


def _die(work: Tending, death: Death) -> None:
    """In the work of a round; behind one that does not come by the place it dies at once."""
    left = 0
    tend, receive, drain = work.tend, copying.receive, Tier._drain

    def audit(event: str, _arguments: object) -> None:
        nonlocal left
        if left and event in EVENTS:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    def tend_and_die() -> None:
        nonlocal left
        left = death.call if death.when == "in its work" else 0
        tend()
        os.kill(os.getpid(), signal.SIGKILL)

    def receive_and_die(*arguments: Any) -> None:
        nonlocal left
        left = death.call
        receive(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    def drain_and_die(*arguments: Any) -> None:
        nonlocal left
        left = death.call
        drain(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    work.tend = tend_and_die  # type: ignore[method-assign]
    if death.when == "in a copy":
        copying.receive = receive_and_die
    elif death.when == "while it drains":
        Tier._drain = drain_and_die  # type: ignore[method-assign]


def a_death(numbers: random.Random, when: str) -> Death:
    return Death(numbers.randint(1, _CALLS[when]), when)
