"""The first visitor of a mount: a program that sets things right before anybody else gets in.

It sets checkpoints aside that a crash left unfinished (``-o tidy``). Whoever asked for the mount
names the program, which is run in a process of its own: what it reads there anybody may have
written, and a reader that fails, hangs or takes too much memory must not take the mount along.

Never here: what it does, and how others are kept out meanwhile (``fuse.requests``).

Invariants
- The mount comes up whatever becomes of the visitor; what went wrong is logged, and in the status.
- The visitor has limits: of time, of memory, and of what is taken of its words.
- It says one JSON document in a line: ``cxlfs.tidy/1`` of each directory in which something was
  moved, last ``cxlfs.tidy_all/1``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import resource
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import trio

from cxlfs.daemon.options import MountConfig
from cxlfs.store import Store

log = logging.getLogger(__name__)

SECONDS_MAX = 60.0
"""When the visitor is ended; its command says when it is to begin nothing more."""
MEMORY_BYTES_MAX = 4 << 30
"""Of addresses: what is read of one checkpoint stays below 1 GiB (``checkpoint.limits``)."""
_LINE_BYTES_MAX = 1 << 20
_LOGGED_MAX = 100
_OOM_SCORE = 500


@dataclasses.dataclass(slots=True)
class Visit:
    """What became of it. ``state``: ``not needed``, ``running``, ``done``, ``incomplete`` (some of
    the work is left) or ``failed``. Of the rest the counts of ``cxlfs.tidy_all/1``.
    """

    state: str
    message: str | None = None
    directories: int = 0
    checkpoints: int = 0
    trackers: int = 0
    failed: int = 0
    seconds: float = 0.0


class Doors(Protocol):
    """Of the mount: while ``visitor`` is set, only that process uses names."""

    visitor: int | None


class FirstVisit:
    """Of one mount. From the beginning nobody gets in where a visitor is due."""

    def __init__(self, config: MountConfig, store: Store, doors: Doors) -> None:
        self._config = config
        self._doors = doors
        self._scope = trio.CancelScope()
        self._visit = _visit_for(config, store)
        if self.is_due:
            doors.visitor = os.getpid()

    @property
    def is_due(self) -> bool:
        return self._visit is not None and self._visit.state == "running"

    def describe(self) -> dict[str, object] | None:
        """For the status; None: nobody asked for one."""
        return None if self._visit is None else dataclasses.asdict(self._visit)

    def cancel(self) -> None:
        """The mount is to end."""
        self._scope.cancel()

    async def receive(self) -> None:
        """Let the visitor work, if one is due; then the mount is everybody's. Raises nothing."""
        visit = self._visit
        if visit is None or not self.is_due:
            return
        try:
            with self._scope:
                visitor = _Visitor(visit, [*self._config.visitor, self._config.mountpoint])
                self._doors.visitor = visitor.pid
                await visitor.finish()
        except OSError as error:
            visit.state, visit.message = "failed", str(error)
        finally:
            self._doors.visitor = None
        if self._scope.cancelled_caught:
            visit.state, visit.message = "failed", "the mount was told to end"
        if visit.state != "done":
            log.warning("tidy: not everything was set aside: %s", visit.message)


def _visit_for(config: MountConfig, store: Store) -> Visit | None:
    if config.tidy == "off" or not config.visitor:
        return None
    if store.read_only:
        return Visit("not needed", "nothing can be changed on this mount")
    if config.tidy == "unclean" and store.recovery.clean:
        return Visit("not needed", "the store was closed cleanly")
    return Visit("running")


class _Visitor:
    """A process that was begun, and what it says."""

    def __init__(self, visit: Visit, command: Sequence[str]) -> None:
        """Raises OSError where there is no such program."""
        self._visit = visit
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
        self._is_heard = False
        self._logged = 0
        with contextlib.suppress(OSError, ValueError):
            limits = (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX)
            resource.prlimit(self._process.pid, resource.RLIMIT_AS, limits)
        with contextlib.suppress(OSError):  # the daemon may be protected; this is the one to go
            score = Path(f"/proc/{self._process.pid}/oom_score_adj")
            score.write_text(f"{_OOM_SCORE}\n", encoding="ascii")

    @property
    def pid(self) -> int:
        return self._process.pid

    async def finish(self) -> None:
        """Wait for its end, for so long as it may take. Raises nothing; the visit says how it was.

        Cancelled, it ends the process.
        """
        began = trio.current_time()
        with trio.move_on_after(SECONDS_MAX) as limit:
            try:
                await trio.to_thread.run_sync(self._listen, abandon_on_cancel=True)
            finally:
                self._process.kill()  # where it has not ended by itself
        visit = self._visit
        visit.seconds = round(trio.current_time() - began, 3)
        if limit.cancelled_caught:
            visit.state, visit.message = "failed", f"it took more than {SECONDS_MAX:g} s"
        elif not self._is_heard:
            code = self._process.wait()
            visit.state, visit.message = "failed", f"it ended with code {code}; see the log"

    def _listen(self) -> None:
        """Its words, until it has ended."""
        stream = self._process.stdout
        if stream is None:
            return
        with stream:
            while line := stream.readline(_LINE_BYTES_MAX):
                with contextlib.suppress(ValueError, RecursionError):
                    document = json.loads(line)
                    if isinstance(document, dict):
                        self._take(document)
        self._process.wait()

    def _take(self, document: Mapping[str, object]) -> None:
        schema = document.get("schema")
        if schema == "cxlfs.tidy/1":
            for each in _objects(document.get("checkpoints")):
                self._visit.checkpoints += 1
                words = f"{each.get('path')}, {each.get('state')}: {each.get('reason')}"
                self._log(f"{words}; it is kept in {document.get('aside')}")
            for each in _objects(document.get("trackers")):
                self._visit.trackers += 1
                self._log(f"{document.get('directory')}/{each.get('name')}: it names another now")
        elif schema == "cxlfs.tidy_all/1":
            self._is_heard = True
            failed = _objects(document.get("failed"))
            for each in failed:
                self._log(f"{each.get('directory')} could not be tidied: {each.get('message')}")
            self._visit.failed = len(failed)
            directories = document.get("directories")
            self._visit.directories = directories if isinstance(directories, int) else 0
            left_out = document.get("left_out")
            if failed or left_out is not None:
                self._visit.state = "incomplete"
                self._visit.message = str(left_out or f"{len(failed)} directories are left")
            else:
                self._visit.state = "done"

    def _log(self, text: str) -> None:
        """What was moved where is to be found in the log, and in syslog."""
        self._logged += 1
        if self._logged <= _LOGGED_MAX:
            log.warning("tidy: set aside: %s", text[:2000])


def _objects(value: object) -> list[Mapping[str, object]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
