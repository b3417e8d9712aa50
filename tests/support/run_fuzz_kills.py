"""Random programs that save files under ``cxlfs run``, and the daemon killed under each of them.

Calls may fail then. What a program read before is what it reads on tmpfs; it ends; and after the
next mount each file has what was published last, or what was being published.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from tests.support.mount import wait_for_exit
from tests.support.run_fuzzing import Playground, Said, kind_of, parse, step_of

STEPS = 60
KILL_SECONDS_MAX = 0.8
PATIENCE_SECONDS = 90.0
NAMES = range(4)
LINES_OF_THE_END = 16
"""A program stops at the first error; children of its last step may say more."""
_DEAD_MOUNT = re.compile(r"-(?:107|103|5)\b")
"""ENOTCONN, ECONNABORTED, EIO."""
_CONTENT = re.compile(r": (publishing|state) (\d): (\d+) bytes, last 0, sum (\w+)")
_PUBLISHED = re.compile(r": published (\d) = 0$")
_FILE = re.compile(r": file (\d): (?:(\d+) bytes, last 0, sum (\w+)|(-2)$)")

Content = tuple[str, str] | None
"""Size and sum of a file; None: it is not there."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one program did wrong."""

    seed: int
    text: str
    kind: str

    def lines(self) -> list[str]:
        return [f"seed {self.seed}, {self.kind}", f"  {self.text}"]


def kill_under(ground: Playground, seed: int, options: Sequence[str] = ()) -> Finding | None:
    """Start a program, kill the daemon at an instant that the seed draws, mount again, compare."""
    chosen = [f"steps={STEPS}", *options, "mode=saves"]
    expected = ground.play("tmpfs", [seed], chosen)[seed]
    directory = ground.place.mountpoint / "killed"
    directory.mkdir()
    process = ground.start("run", directory, [seed], chosen)
    time.sleep(random.Random(seed).uniform(0, KILL_SECONDS_MAX))
    kill_daemon(ground)
    try:
        text, _ = process.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Finding(seed, "does not end after the daemon was killed", "hang")
    ground.place.mount()
    said = parse(text).get(seed, Said(-1, ()))
    looked = ground.play_in("mount", directory, [seed], ["mode=look"])[seed]
    shutil.rmtree(directory)
    return judge(seed, expected, said, looked)


def kill_daemon(ground: Playground) -> None:
    place = ground.place
    ground.direct_bytes_before = ground.direct_bytes()
    pid = place.daemon_pid
    watch = os.pidfd_open(pid)
    place.ends_clean = False
    os.kill(pid, signal.SIGKILL)
    wait_for_exit(watch)


def judge(seed: int, expected: Said, said: Said, looked: Said) -> Finding | None:
    """What is wrong with what a program said, or with what it left."""
    same = 0
    for one, other in zip(expected.lines, said.lines, strict=False):
        if one != other:
            break
        same += 1
    rest = said.lines[same:]
    if said.code != 0:
        return Finding(seed, said.ending(), kind_of(said.lines[-1]) if said.lines else "begin")
    if rest and not any(_DEAD_MOUNT.search(line) for line in rest[:LINES_OF_THE_END]):
        return Finding(seed, f"{rest[0]} | expected: {expected.lines[same]}", kind_of(rest[0]))
    stopped = step_of(said.lines[-1]) if said.lines else -1
    found = contents_of(looked.lines)
    for name in NAMES:
        allowed = may_be(name, said.lines[:same], expected.lines, stopped)
        if name not in found:
            return Finding(seed, f"file {name} cannot be read: {looked.lines}", "content")
        if found[name] not in allowed:
            return Finding(seed, f"file {name} has {found[name]}, not of {allowed}", "content")
    return None


def contents_of(lines: Sequence[str]) -> Mapping[int, Content]:
    """What mode=look reported."""
    found: dict[int, Content] = {}
    for line in lines:
        match = _FILE.search(line)
        if match is not None:
            found[int(match[1])] = None if match[4] else (match[2], match[3])
    return found


def may_be(name: int, said: Sequence[str], expected: Sequence[str], stopped: int) -> list[Content]:
    """The contents of a file that a crash may leave: the published one, and what came after it."""
    last = -1
    for at, line in enumerate(said):
        match = _PUBLISHED.search(line)
        if match is not None and int(match[1]) == name:
            last = at
    allowed: list[Content] = []
    before: Content = None
    for at, line in enumerate(expected):
        match = _CONTENT.search(line)
        if match is None or int(match[2]) != name or step_of(line) > stopped:
            continue
        if at < last:
            before = (match[3], match[4])
        else:
            allowed.append((match[3], match[4]))
    return [before, *allowed, *([("0", "0")] if last < 0 else [])]
