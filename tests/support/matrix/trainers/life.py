"""One life of a training program after another, in a process that has its framework imported.

The server (``serve``) reads a line of JSON for each life, forks, and lets the child train. A life
resumes as its framework does, says what it found, and saves step after step until it is ended.
Importing a framework takes seconds, a fork a few milliseconds: so a hundred kills take half a
minute. With FRESH in the environment the process that was started lives that one life itself.

What is saved is a function of the step: each tensor says which step it belongs to, and a tensor
with bytes of two steps belongs to none. So a state that is mixed is told bit for bit.

Runs with the Python of the framework's environment: nothing but NumPy and the framework is there.
Never here: killing, mounting, judging.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

FRESH = "MATRIX_FRESH_PROCESS"
TENSORS = 8
TENSOR_ITEMS = 65_536
"""Of 4 bytes each: 2 MiB of state."""
EXIT_CODES = {"exit-0": 0, "exit-143": 143}
"""Of programs that end by ``sys.exit`` when they are told to (SIGTERM)."""
EVENTS = "events.out.tfevents.0.host"
_RANGE = 1 << 23
"""Whole numbers below it are exact in float32."""


class InjectedError(RuntimeError):
    """What a training program may meet in mid-save: raised at a random instant, by a signal."""


def tensor(step: int, number: int) -> np.ndarray:
    """float32 of shape (TENSOR_ITEMS,): the first item is the step, the others follow from it."""
    value = np.arange(TENSOR_ITEMS, dtype=np.int64) * 2_654_435 + step * 40_503 + number * 97
    value %= _RANGE
    value[0] = step
    return value.astype(np.float32)


def step_of(value: Any, number: int) -> int | None:
    """Which step a tensor is of; None when it is not, bit for bit, of any."""
    array = np.asarray(value)
    if array.dtype != np.float32 or array.size != TENSOR_ITEMS:
        return None
    array = array.reshape(-1)
    first = float(array[0])
    if not (first.is_integer() and 0 <= first < _RANGE):
        return None
    return int(first) if np.array_equal(array, tensor(int(first), number)) else None


def state(step: int) -> dict[str, np.ndarray]:
    return {f"tensor-{number}": tensor(step, number) for number in range(TENSORS)}


class Life:
    """What one child is to do, and its voice. Lines on its descriptor, one system call each:

    ``pid N``, then ``nothing`` or ``resumed JSON`` or ``failed JSON``; ``begin N`` and ``end N``
    around each save; ``held`` where it waits for SIGCONT; ``error JSON``.
    """

    def __init__(self, order: Mapping[str, Any], descriptor: int) -> None:
        self.directory = Path(order["directory"])
        self.first: int = order["first"]
        """The step before the first one, where there is nothing to resume from."""
        self.saves: int = order.get("saves", 1 << 30)
        self.pause_seconds: float = order["pause_seconds"]
        self._hold: int = order.get("hold", -1)
        self._descriptor = descriptor
        self._events = os.open(self.directory / EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        """A log beside the checkpoints, open for as long as the program lives."""
        self._saved = 0
        self.has_resumed = False

    def say(self, line: str) -> None:
        os.write(self._descriptor, line.encode() + b"\n")

    def _log(self, line: str) -> None:
        with contextlib.suppress(OSError):  # there may be no room
            os.write(self._events, line.encode())

    # --- resuming ---------------------------------------------------------------------------

    def nothing(self) -> int:
        """There is nothing to resume from, says the framework."""
        self.say("nothing")
        self.has_resumed = True
        self._let_go()
        return self.first

    def resumed(self, tensors: Mapping[str, Any], numbers: Mapping[str, int]) -> int:
        """``tensors``: by the names of ``state``; ``numbers``: what says the step by itself. Judged
        by whoever listens; returns the step to go on from.
        """
        steps = {int(number) for number in numbers.values()}
        wrong = [f"tensor-{n}" for n in range(TENSORS) if f"tensor-{n}" not in tensors]
        for name, value in tensors.items():
            step = step_of(value, int(name.rsplit("-", 1)[1]))
            if step is None:
                wrong.append(name)
            else:
                steps.add(step)
        self.say("resumed " + json.dumps({"steps": sorted(steps), "wrong": wrong}))
        self.has_resumed = True
        self._let_go()
        return max(steps)

    def _let_go(self) -> None:
        if self.saves == 0:
            raise SystemExit(0)

    # --- saving -----------------------------------------------------------------------------

    @property
    def goes_on(self) -> bool:
        return self._saved < self.saves

    def begin(self, step: int) -> None:
        self._log(f"begin {step}\n")
        self.say(f"begin {step}")

    def end(self, step: int) -> None:
        self.say(f"end {step}")
        self._log(f"end {step}\n")
        self._saved += 1
        if self._saved == self._hold:
            self.say("held")
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.goes_on:
            time.sleep(self.pause_seconds)


def save_steps(life: Life, step: int, save: Callable[[int, dict[str, np.ndarray]], None]) -> None:
    """The loop of a program that has one of its own: ``save`` gets each step and its state."""
    while life.goes_on:
        step += 1
        content = state(step)
        life.begin(step)
        save(step, content)
        life.end(step)


def serve(versions: Mapping[str, str], train: Callable[[Life], None]) -> None:
    """Read orders until the input ends. Says ``versions JSON`` at first, ``ended STATUS`` (of
    waitpid) after each life. What frameworks print goes where stderr goes.
    """
    voice = os.dup(1)
    os.dup2(2, 1)
    if not os.environ.get(FRESH):
        rehearse(train)
    os.write(voice, f"versions {json.dumps(dict(versions))}\n".encode())
    if os.environ.get(FRESH):
        live(json.loads(sys.stdin.buffer.raw.readline()), voice, train)
        return
    for line in sys.stdin.buffer.raw:  # unbuffered: a child must not inherit half of the orders
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            live(order, voice, train)
            return
        _, status = os.waitpid(child, 0)
        os.write(voice, f"ended {status}\n".encode())


def rehearse(train: Callable[[Life], None]) -> None:
    """Import what a child imports when it first saves and resumes, so that no life has to; in this
    process nothing else is done: what has threads must not be forked.
    """
    with tempfile.TemporaryDirectory() as scratch:
        directory, modules = Path(scratch, "directory"), Path(scratch, "modules")
        directory.mkdir()
        for saves in (2, 0):
            child = os.fork()
            if child == 0:
                order = {"directory": directory, "first": 0, "saves": saves, "pause_seconds": 0}
                with contextlib.suppress(SystemExit), Path(os.devnull).open("wb") as nobody:
                    train(Life(order, nobody.fileno()))
                modules.write_text("\n".join(list(sys.modules)))
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if status:
                raise RuntimeError(f"a rehearsal ended with {status}: the log says why")
            for name in modules.read_text().splitlines():
                if name not in sys.modules:
                    with contextlib.suppress(Exception):  # made by its parent, or for one use
                        importlib.import_module(name)


def live(order: Mapping[str, Any], voice: int, train: Callable[[Life], None]) -> None:
    """As any program: what is raised ends the process, with its traceback and its exit code."""

    def interrupt(_number: int, _frame: object) -> None:
        raise InjectedError("CUDA error: an illegal memory access was encountered")

    if "TMPDIR" in order:
        os.environ["TMPDIR"] = order["TMPDIR"]
    ending = order.get("ending")
    signal.signal(signal.SIGUSR1, interrupt)
    if ending in EXIT_CODES:
        signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(EXIT_CODES[ending]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # as a shell does with a job: what ends it ends all that it has started
    life = Life(order, voice)
    life.say(f"pid {os.getpid()}")
    try:
        train(life)
    except BaseException as error:
        if not isinstance(error, SystemExit):
            kind = "error" if life.has_resumed else "failed"
            text = f"{type(error).__name__}: {error}"
            life.say(f"{kind} {json.dumps(text[:2000])}")
        if not (ending == "caught" and isinstance(error, InjectedError)):
            raise
    finally:
        gc.collect()
