"""Random programs, each played on tmpfs, on a mount, and on it under ``cxlfs run``: what their
calls return, and what they leave, must be the same.

The programs are in C (``tests/support/fuzz_run``); a seed and a list of steps make one. Here they
are started in batches, compared, and shortened where they differ. ``kills`` kills the daemon under
programs that save files: there calls may fail, but nothing wrong is read, and what was published is
there afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from cxlfs.cli.run import environment_for, library_path
from cxlfs.control.client import control_request
from tests.support.mount import MIB, Workplace, fast_directory, workplace
from tests.support.repository import ROOT

STORE_BYTES = 768 * MIB
STEPS = 100
DIRECT_FROM_BYTES = 64 << 10
"""What is shorter goes through the kernel: the default is too long for programs that are short."""
PATIENCE_SECONDS = 300.0
"""Of one batch. The programs have alarms of their own."""
SOURCES = ROOT / "tests" / "support" / "fuzz_run"
WAYS = ("tmpfs", "mount", "run")
_SIGNALLED = 1000
_PLAYER = re.compile(r"^(\d+)[ab] ")
"""What the code of a program killed by a signal begins with; then the number of the signal."""


@dataclasses.dataclass(frozen=True)
class Said:
    """What one program reported, and how it ended."""

    code: int
    lines: tuple[str, ...]

    def ending(self) -> str:
        if self.code >= _SIGNALLED:
            return f"killed by signal {self.code - _SIGNALLED}"
        return f"ended with {self.code}"


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first line in which a program differs between two ways."""

    seed: int
    ways: tuple[str, str]
    expected: str
    found: str
    kind: str
    """Of the step that differs."""

    def lines(self) -> Iterator[str]:
        yield f"seed {self.seed}, {self.kind}"
        yield f"  {self.ways[0]:5}  {self.expected}"
        yield f"  {self.ways[1]:5}  {self.found}"


def build(directory: Path) -> Path:
    """Compile the programs. Returns the executable."""
    program = directory / "fuzz"
    flags = ["-D_GNU_SOURCE", "-D_FILE_OFFSET_BITS=64", "-O1", "-w", "-pthread"]
    sources = sorted(SOURCES.glob("*.c"))
    subprocess.run(
        [os.environ.get("CC", "gcc"), *flags, "-o", program, *sources], check=True, timeout=300
    )
    return program


class Playground:
    """A program, and a directory for each way; several threads may use it."""

    def __init__(self, program: Path, place: Workplace, scratch: Path) -> None:
        self.program = program
        self.place = place
        self.scratch = scratch
        self.direct_bytes_before = 0
        """As daemons said that were killed."""
        self.environments: Mapping[str, Mapping[str, str]] = {
            "tmpfs": {**os.environ},
            "mount": {**os.environ},
            "run": {
                **environment_for(library_path(), os.environ),
                "CXLFS_RUN_FROM": str(DIRECT_FROM_BYTES),
            },
        }
        self._lock = threading.Lock()
        self._used = 0

    def start(
        self, way: str, directory: Path, seeds: Sequence[int], options: Sequence[str]
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.program, directory, *options, *map(str, seeds)],
            env=self.environments[way],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @contextlib.contextmanager
    def directory(self, way: str) -> Iterator[Path]:
        with self._lock:
            self._used += 1
            name = f"{way}-{self._used}"
        parent = self.scratch if way == "tmpfs" else self.place.mountpoint
        directory = parent / name
        directory.mkdir()
        yield directory
        shutil.rmtree(directory)

    def play(self, way: str, seeds: Sequence[int], options: Sequence[str] = ()) -> dict[int, Said]:
        """Play all programs in one way, in a directory of their own."""
        with self.directory(way) as directory:
            return self.play_in(way, directory, seeds, options)

    def play_in(
        self, way: str, directory: Path, seeds: Sequence[int], options: Sequence[str] = ()
    ) -> dict[int, Said]:
        """Play all programs in one way. What does not end is killed, and reported as such."""
        process = self.start(way, directory, seeds, options)
        try:
            text, _ = process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
        said = parse(text)
        return {seed: said.get(seed, Said(-1, ("nothing",))) for seed in seeds}

    def compare(
        self, seeds: Sequence[int], options: Sequence[str] = (), ways: Sequence[str] = WAYS
    ) -> list[Difference]:
        """Play all programs in all ways; the first one is what is expected."""
        expected = self.play(ways[0], seeds, options)
        found = []
        for way in ways[1:]:
            other = self.play(way, seeds, options)
            for seed in seeds:
                difference = first_difference(seed, (ways[0], way), expected[seed], other[seed])
                if difference is not None:
                    found.append(difference)
        return found

    def direct_bytes(self) -> int:
        """Bytes that programs stored directly, as the daemons of this place say."""
        for message in control_request(str(self.place.mountpoint), "status"):
            direct = message["direct"]
            if isinstance(direct, dict):
                return self.direct_bytes_before + int(direct["bytes_written"])
        raise AssertionError("the daemon does not answer")


def parse(text: str) -> dict[int, Said]:
    """What a batch printed, by seed."""
    found: dict[int, Said] = {}
    seed, code = None, 0
    lines: list[str] = []
    for line in [*text.splitlines(), "program"]:
        if not line.startswith("program"):
            lines.append(line)
            continue
        if seed is not None:
            found[seed] = Said(code, tuple(lines))
            lines = []
        if line != "program":
            seed, code = (int(word) for word in line.split()[1:])
    return found


def first_difference(
    seed: int, ways: tuple[str, str], expected: Said, found: Said
) -> Difference | None:
    ends = f"{expected.ending()}", f"{found.ending()}"
    for one, other in zip((*expected.lines, ends[0]), (*found.lines, ends[1]), strict=False):
        if one != other:
            kind = kind_of(one) if _PLAYER.match(one) else kind_of(other)
            return Difference(seed, ways, one, other, kind)
    return None


def kind_of(line: str) -> str:
    """The kind of the step that reported a line."""
    words = line.split()
    return words[1].rstrip(":") if len(words) > 1 and _PLAYER.match(line) else line


def step_of(line: str) -> int:
    match = _PLAYER.match(line)
    return int(match[1]) if match else STEPS


def shorten(
    ground: Playground,
    difference: Difference,
    options: Sequence[str] = (),
    say: Callable[[str], None] = lambda _line: None,
    *,
    tries_max: int = 200,
) -> tuple[list[int], Difference]:
    """Leave out steps while the program still differs; returns the steps that are left."""
    seed, ways = difference.seed, difference.ways
    tries = 0

    def differs(steps: Sequence[int]) -> Difference | None:
        nonlocal tries
        tries += 1
        keep = f"keep={','.join(map(str, steps)) or STEPS * 10}"
        return next(iter(ground.compare([seed], [*options, keep], ways)), None)

    last = max(step_of(difference.expected), step_of(difference.found))
    steps = list(range(min(last, STEPS - 1) + 1))
    best = differs(steps)
    if best is None:
        steps, best = list(range(STEPS)), difference
    size = max(len(steps) // 2, 1)
    while tries < tries_max:
        at = 0
        while at < len(steps) and tries < tries_max:
            rest = steps[:at] + steps[at + size :]
            again = differs(rest)
            if again is None:
                at += size
            else:
                steps, best = rest, again
                say(f"{len(steps)} steps still differ")
        if size == 1:
            break
        size = max(size // 2, 1)
    return steps, best


# --- the place ------------------------------------------------------------------------------------


@contextlib.contextmanager
def playground(*, store_bytes: int = STORE_BYTES) -> Iterator[Playground]:
    """A mounted store, on large pages where that is possible, and a directory in memory."""
    with contextlib.ExitStack() as stack:
        below = fast_directory()
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=below)))
        huge = stack.enter_context(large_pages(store_bytes + 64 * MIB))
        place = stack.enter_context(workplace(size_bytes=store_bytes, below=huge))
        place.announced.append(r"reverted: the previous version is back: the writer was killed")
        place.mount()
        yield Playground(build(scratch), place, scratch)


@contextlib.contextmanager
def large_pages(size_bytes: int) -> Iterator[Path | None]:
    """A tmpfs of large pages, or None for who may not mount one."""
    if os.geteuid() != 0:
        yield None
        return
    directory = Path(tempfile.mkdtemp(prefix="cxlfs-huge-"))
    options = f"huge=always,size={size_bytes}"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", directory], check=False
    ).returncode
    try:
        yield directory if done == 0 else None
    finally:
        if done == 0:
            subprocess.run(["umount", "-l", directory], check=True)
        directory.rmdir()
