"""A training program as its harness sees it: a server that imported the framework, and one life
after another, each with what it said. ``fresh``: each life is a new process that imports it anew.

Never here: what a framework is, mounting, judging.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.matrix.catalogue import Framework
from tests.support.matrix.trainers.life import FRESH

ROOT = Path(__file__).parents[3]
IMPORT_SECONDS = 300.0
PATIENCE_SECONDS = 60.0


@dataclasses.dataclass(slots=True)
class Life:
    """What a life has said. ``found``: ``nothing``, or steps and wrong tensors; ``failure``: of its
    resuming; ``error``: of its training.
    """

    pid: int = 0
    found: dict[str, list[int]] | str | None = None
    failure: str | None = None
    begun: int = -1
    saved: int = -1
    """Steps; -1 where there is none in this life."""
    begins: int = 0
    held: bool = False
    error: str | None = None
    ended: bool = False
    begin_seconds: float = 0.0
    save_seconds: list[float] = dataclasses.field(default_factory=list)

    def hear(self, word: str, rest: str) -> None:
        match word:
            case "pid":
                self.pid = int(rest)
            case "nothing":
                self.found = word
            case "resumed":
                self.found = json.loads(rest)
            case "failed":
                self.failure = json.loads(rest)
            case "begin":
                self.begun = int(rest)
                self.begin_seconds = time.monotonic()
                self.begins += 1
            case "end":
                self.saved = int(rest)
                self.save_seconds.append(time.monotonic() - self.begin_seconds)
            case "held":
                self.held = True
            case "error":
                self.error = json.loads(rest)
            case "ended":
                self.ended = True

    @property
    def has_begun_well(self) -> bool:
        """It has resumed, or said that it could not."""
        return self.found is not None or self.failure is not None or self.ended


class Trainer:
    """The server; ``log`` gets what the framework prints."""

    def __init__(
        self, framework: Framework, python: Path, log: Path, *, fresh: bool = False
    ) -> None:
        self.life = Life(ended=True)
        self.versions: dict[str, str] = {}
        self._changed = threading.Condition()
        self._fresh = fresh
        self._framework = framework
        self._python = python
        self._log = log
        self._spawn()

    def _spawn(self) -> None:
        module, *arguments = self._framework.program
        environment = os.environ | {
            FRESH: "1" if self._fresh else "",
            "PYTHONNOUSERSITE": "1",
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "JAX_PLATFORMS": "cpu",
        }
        self.versions = {}
        with self._log.open("ab") as sink:
            self._process = subprocess.Popen(
                [self._python, "-m", f"tests.support.matrix.trainers.{module}", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.wait_for(lambda: bool(self.versions), "it is imported", IMPORT_SECONDS)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, _, rest = line.decode().strip().partition(" ")
            with self._changed:
                if word == "versions":
                    self.versions = json.loads(rest)
                else:
                    self.life.hear(word, rest)
                self._changed.notify_all()
        with self._changed:
            self.life.ended = True
            self._changed.notify_all()

    def wait_for(
        self, condition: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS
    ) -> None:
        with self._changed:
            came = self._changed.wait_for(lambda: condition() or self._is_gone, seconds)
        assert not self._is_gone, f"the trainer is gone before {what}"
        assert came, f"a trainer does not go on: waited in vain until {what}"

    @property
    def _is_gone(self) -> bool:
        """The server; with fresh processes one that could not even import its framework."""
        is_over = self._fresh and bool(self.versions)
        return self._process.poll() is not None and not is_over

    def start(self, directory: Path, **order: object) -> Life:
        """Begin a life, and wait until it has resumed or said that it could not."""
        assert self.life.ended
        if self._fresh and self.life.pid:
            self._let_go()
            self._spawn()
        life = self.life = Life()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"directory": str(directory), **order}).encode())
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        self.wait_for(lambda: life.has_begun_well, "it has resumed")
        if life.failure is not None:
            self.wait_until_ended()
        return life

    def signal(self, number: int) -> None:
        """To the life and all that it has started, but not to the server."""
        if self.life.pid:  # 0 would be this process' own group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.life.pid, number)

    def wait_until_ended(self, seconds: float = PATIENCE_SECONDS) -> bool:
        """False: it had to be killed, after ``seconds``."""
        life = self.life
        try:
            self.wait_for(lambda: life.ended, "it has ended", seconds)
        except AssertionError:
            self.signal(signal.SIGKILL)
            self.wait_for(lambda: life.ended, "it has ended")
            return False
        return True

    def close(self) -> None:
        """Whatever happened, leave nothing behind."""
        if not self.life.ended:
            self.signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._let_go()

    def _let_go(self) -> None:
        self._process.wait()
        self._listener.join(PATIENCE_SECONDS)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
