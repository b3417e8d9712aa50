"""One history: drawn from a seed, played, judged, and made shorter when it breaks a promise.

    python -m tests.support.user_histories.run SEED...         play some; a violation is minimised
    python -m tests.support.user_histories.run --count 10000   many, from seed 0 on

Never here: what programs do (``programs``), what a verb means (``world``).
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import sys
from collections.abc import Sequence

from cxlfs.daemon.history_request import HANDLERS
from cxlfs.errors import BusyError, NotFoundError, StaleError, UsageError
from cxlfs.store.unit_rules import Ending
from cxlfs.verify import run_passes
from tests.support.stores import read_file
from tests.support.user_histories import programs
from tests.support.user_histories.expected import Violation, require, say, show
from tests.support.user_histories.found import everything_in
from tests.support.user_histories.model import Path, Process
from tests.support.user_histories.world import Refused, World

USERS = (1000, 1001)
VERIFIED = 0.3
"""That part of the histories ends with a verify of all bytes, which takes a quarter of one."""
TRIES_MAX = 300
"""Times that a history is played to make it shorter."""
Entry = tuple[str, int, str]
"""What is done, the number of the program (or seconds), and how."""
_ENDINGS = ("killed", "killed", "killed", "badly", "interrupted", "well")


@dataclasses.dataclass(frozen=True)
class Plan:
    """``kinds``: of each program what it is, of which user, and where."""

    seed: int
    kinds: list[tuple[str, int, bytes]]
    entries: list[Entry]
    crosses: bool = False
    """Names cross the border of a saver's directory."""


def plan(seed: int, *, crosses: bool = False) -> Plan:
    rng = random.Random(f"history {seed}")
    kinds: list[tuple[str, int, bytes]] = []
    entries: list[Entry] = []
    layouts = rng.sample(sorted(programs.SAVERS), rng.choice([1, 1, 2]))
    tops = [b"run", rng.choice([b"run", b"other"])]
    for _ in range(rng.randrange(1, 4)):
        first = len(kinds)
        for index, layout in enumerate(layouts):
            kinds.append((layout, USERS[index and rng.randrange(2)], tops[index]))
        for _ in range(rng.randrange(3)):
            kind = rng.choice(["log", "meddle", "meddle"])
            kinds.append((kind, rng.choice(USERS), rng.choice(tops)))
        here = range(first, len(kinds))
        for _ in range(rng.randrange(6, 45)):
            entries.append(("step", rng.choice([*here, first]), ""))
            if rng.random() < 0.03:
                entries.append(("wait", rng.choice([1, 11, 31]), ""))
        entries += _end_of_phase(rng, here)
    return Plan(seed, kinds, entries, crosses)


def _end_of_phase(rng: random.Random, here: range) -> list[Entry]:
    how = rng.choice(["finish", "end", "end", "end", "cut", "unmount"])
    if how in {"cut", "unmount"}:
        return [(how, 0, "")]
    entries: list[Entry] = []
    for number in sorted(here, key=lambda _: rng.random()):
        entries += [("step", number, "")] * rng.randrange(4)
        ending = "finish" if how == "finish" else rng.choice(_ENDINGS)
        entries.append(("end", number, ending))
    if rng.random() < 0.3:
        entries.append(("wait", rng.choice([11, 31]), ""))
    return entries


class Run:
    """A history on its way."""

    def __init__(self, plan: Plan) -> None:
        self.world = World(crosses=plan.crosses)
        self.plan = plan
        self.running: dict[int, tuple[Process, programs.Program]] = {}
        self.over: set[int] = set()

    def play(self) -> None:
        """Raises Violation."""
        for what, number, how in self.plan.entries:
            if what == "step":
                self._step(number)
            elif what == "end":
                self._end(number, how)
            elif what == "wait":
                self.world.wait(number)
            else:
                self._restart(clean=what == "unmount")
        for number in list(self.running):
            self._end(number, "finish")
        self.world.settle()
        judge(self.world, random.Random(f"end {self.plan.seed}"))

    def _program(self, number: int) -> tuple[Process, programs.Program]:
        if number not in self.running:
            kind, uid, top = self.plan.kinds[number]
            process = Process(f"{kind}-{number}", uid)
            rng = random.Random(f"program {self.plan.seed} {number}")
            writer = programs.Writer(self.world, process, rng)
            made = {"log": programs.logger, "meddle": programs.meddler}.get(kind)
            program = made(top) if made is not None else programs.saver(kind, top)
            self.running[number] = process, program(writer)
        return self.running[number]

    def _step(self, number: int) -> bool:
        """False: the program is over."""
        if number in self.over:
            return False
        process, program = self._program(number)
        try:
            next(program)
        except StopIteration:
            self._gone(number, process, Ending.WELL)
            return False
        except Refused:
            self._gone(number, process, Ending.BADLY)
            return False
        return True

    def _end(self, number: int, how: str) -> None:
        if how == "finish":
            while self._step(number):
                pass
        elif number in self.running:
            self._gone(number, self.running[number][0], Ending(how))

    def _gone(self, number: int, process: Process, ending: Ending) -> None:
        self.over.add(number)
        del self.running[number]
        self.world.exit(process, ending)

    def _restart(self, *, clean: bool) -> None:
        self.over |= set(self.running)
        self.running.clear()
        named = set(self.world.root.committed().values())
        self.world.restart(clean=clean)
        there = everything_in(self.world.store)
        require(named if not clean else self.world.ever_committed, there)
        if not clean:
            self.world.ever_committed &= there
            self.world.ever_committed |= named


# --- in the end -----------------------------------------------------------------------------------


def judge(world: World, rng: random.Random) -> None:
    require(world.ever_committed, everything_in(world.store))
    for path, file in world.root.below():
        mode = world.store.namespace.get(file.ino).mode & 0o777
        if mode != file.mode and not file.was_found:
            raise Violation(f"{show(path)}: mode {mode:o}, expected {file.mode:o}")
    _judge_history(world, rng)
    if rng.random() < 0.5:
        world.store.close()
    else:
        world.store.abandon()
    findings = rng.random() < VERIFIED and list(run_passes(world.media, structure_only=False))
    if findings:
        raise Violation(f"verify: {findings[0]}")


def _judge_history(world: World, rng: random.Random) -> None:
    """What restore brings from a commit is what the name meant there, or what the file was that it
    means now.
    """
    paths = sorted(world.meant)
    if not paths:
        return
    moments = sorted(world.pictures)
    for number in range(6):
        path, commit = rng.choice(paths), rng.choice(moments)
        if any(file.was_found for file in world.meant[path]):
            continue  # what it was before it came back is another file's history
        new = b"restored-%d" % number
        parameters = {"path": "/".join(map(bytes.decode, path)), "at": commit, "to": new.decode()}
        try:
            list(HANDLERS["restore"](world.store, parameters))
        except (NotFoundError, StaleError, BusyError, UsageError):
            continue  # it, or something in it, is not known any more
        restored = world.store.namespace.get(world.store.lookup(1, new).ino)
        if restored.entries is not None:
            continue  # the number is that of a directory which had the name
        found = read_file(world.store, restored.ino)
        allowed = allowed_at(world, path, commit)
        if found not in allowed:
            wanted = " or ".join(map(say, allowed))
            raise Violation(f"restore --at {commit} {show(path)}: {say(found)}, not {wanted}")


def allowed_at(world: World, path: Path, commit: int) -> set[bytes]:
    """What the path had. A number also names the version that was published with it. If the path
    meant nothing, or history has lost what it meant, it may be what a file had then that the path
    meant at any time.
    """
    meant, contents = world.pictures[commit].get(path), world.contents[commit]
    files = set(world.meant[path])
    for ino in world.directories_at.get(path[:-1], ()):
        files |= world.meant_in.get((ino, path[-1]), set())
    if meant is not None and meant not in everything_in(world.store):
        return {meant, *(contents[file] for file in files if file in contents)}
    before = world.contents.get(max((lsn for lsn in world.contents if lsn < commit), default=0), {})
    found = {
        contents[file]
        for file in files
        if file in contents and (meant is None or contents[file] != before.get(file))
    }
    return found if meant is None else {*found, meant}


# --- a shorter one --------------------------------------------------------------------------------


def problem_of(plan: Plan) -> tuple[str, list[str]] | None:
    """What a history breaks, and what was done; None: nothing."""
    run = Run(plan)
    try:
        run.play()
    except Exception as error:  # noqa: BLE001 - whatever breaks it
        return f"{type(error).__name__}: {error}", run.world.trace
    finally:
        run.world.media.close()
    return None


_DETAILS = re.compile(r"[0-9]+ bytes b('[^']*'|\"[^\"]*\")|[^ ]*/[^ ]*|[0-9]+")


def kind_of(problem: str) -> str:
    """What is wrong, without names and contents."""
    return _DETAILS.sub("", problem.partition(";")[0])


def shortest(plan: Plan) -> Plan:
    """Leave out what is not needed to break the same promise."""
    kind = kind_of((problem_of(plan) or ("", []))[0])
    size, tries = max(1, len(plan.entries) // 2), 0
    while size:
        at = 0
        while at < len(plan.entries) and tries < TRIES_MAX:
            tries += 1
            less = dataclasses.replace(plan, entries=plan.entries[:at] + plan.entries[at + size :])
            found = problem_of(less)
            if found is not None and kind_of(found[0]) == kind:
                plan = less
            else:
                at += size
        size //= 2
    return plan


def report(seed: int, *, crosses: bool = False) -> str | None:
    """None: the history of this seed breaks nothing."""
    drawn = plan(seed, crosses=crosses)
    if problem_of(drawn) is None:
        return None
    found = problem_of(shortest(drawn))
    assert found is not None
    return "\n".join([f"history {seed}: {found[0]}", *(f"    {line}" for line in found[1])])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--crosses", action="store_true")
    chosen = parser.parse_args(arguments)
    failed = 0
    for seed in [*chosen.seeds, *range(chosen.count)]:
        found = report(seed, crosses=chosen.crosses)
        if found is not None:
            failed += 1
            print(found, flush=True)
    print(f"{failed} of {len(chosen.seeds) + chosen.count} histories broke a promise")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
