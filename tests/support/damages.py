"""Damage done to a checkpoint on purpose, and what is then said of it: by this project's readers,
and by the library that wrote it (``tests/frameworks/libraries.py``).

Never here: a library; which damage is to be found.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from cxlfs.checkpoint import Level, State, catalogue
from cxlfs.checkpoint.catalogue import verified

PROGRAM = Path(__file__).parent.parent / "frameworks" / "libraries.py"
ALIKE, WRONG, FAILS = "as it was", "wrong", "an error"
_PIECE_BYTES = 512
"""What is not written when a file is torn: a block of a disk."""


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """``kind`` of ``file``: removed, cut (at ``offset``), torn (zeros from there on, or a block of
    them), flipped (one bit of that byte).
    """

    kind: str
    file: str
    offset: int = 0
    bit: int = 0

    def of(self, data: bytes) -> bytes | None:
        """What is then in the file; None: it is gone."""
        before, after = data[: self.offset], data[self.offset :]
        match self.kind:
            case "removed":
                return None
            case "cut":
                return before
            case "zeros":
                return before + bytes(len(after))
            case "block of zeros":
                return before + bytes(min(_PIECE_BYTES, len(after))) + after[_PIECE_BYTES:]
            case _:
                return before + bytes([after[0] ^ 1 << self.bit]) + after[1:]


KINDS = ("removed", "cut", "zeros", "block of zeros", "flipped")


def damages(files: dict[str, bytes], count: int, seed: int) -> Iterator[Damage]:
    """Each file removed, and emptied; then ``count`` of others, in turn of all kinds and files."""
    chosen = random.Random(seed)
    for name in sorted(files):
        yield Damage("removed", name)
        if files[name]:
            yield Damage("cut", name, 0)
            yield Damage("cut", name, len(files[name]) - 1)
    names = sorted(name for name in files if len(files[name]) > 1)
    sizes = [len(files[name]) ** 0.5 for name in names]
    for number in range(count):
        (name,) = chosen.choices(names, sizes)
        offset = chosen.randrange(len(files[name]))
        if chosen.random() < 0.5:  # most of what is not an array lies at the ends
            offset = min(int(chosen.expovariate(1 / 150)), len(files[name]) - 1)
            if chosen.random() < 0.5:
                offset = len(files[name]) - 1 - offset
        yield Damage(KINDS[1 + number % 4], name, offset, chosen.randrange(8))


class Library:
    """The program that loads with the real library."""

    def __init__(self, python: Path, name: str) -> None:
        self._words = [str(python), str(PROGRAM), name]
        self._process: subprocess.Popen[str] | None = None

    def make(self, place: Path) -> None:
        done = subprocess.run(
            [*self._words, "make", str(place)], check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]

    def load(self, place: Path) -> dict[str, str]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{place}\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, "the library's program is gone"
        found: dict[str, str] = json.loads(line)
        return found

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [*self._words, "load"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What came of one damage. ``structure`` and ``content``: the states of ``cxlfs list`` and
    ``cxlfs good``; ``library``: ALIKE, WRONG or FAILS.
    """

    damage: Damage
    structure: str
    content: str
    library: str
    reason: str | None
    error: str | None


def files_below(place: Path) -> dict[str, bytes]:
    found = [path for path in place.rglob("*") if path.is_file()]
    return {str(path.relative_to(place)): path.read_bytes() for path in found}


def said_of(place: Path) -> tuple[str, str, str | None]:
    """State in structure, state in content, why."""
    entries = catalogue(place)
    if not entries:
        return "none", "none", "no checkpoint is there"
    (entry,) = entries
    whole = verified(entry, Level.CONTENT)
    return entry.checkpoint.state.value, whole.checkpoint.state.value, whole.checkpoint.reason


def try_damages(library: Library, place: Path, count: int, seed: int) -> Iterator[Seen]:
    """``place`` is empty, and is removed at the end. The undamaged checkpoint must be complete."""
    library.make(place)
    files = files_below(place)
    with library:
        before = library.load(place)
        assert "digest" in before, before
        assert said_of(place)[:2] == (State.COMPLETE, State.COMPLETE), said_of(place)
        for damage in damages(files, count, seed):
            data = damage.of(files[damage.file])
            if data == files[damage.file]:
                continue
            path = place / damage.file
            if data is None:
                path.unlink()
            else:
                path.write_bytes(data)
            structure, content, reason = said_of(place)
            found = library.load(place)
            library_says = FAILS if "error" in found else ALIKE if found == before else WRONG
            yield Seen(damage, structure, content, library_says, reason, found.get("error"))
            path.write_bytes(files[damage.file])
    shutil.rmtree(place)


def counted(seen: list[Seen]) -> collections.Counter[tuple[str, str]]:
    """By what the library does and what ``cxlfs good`` says."""
    return collections.Counter((each.library, each.content) for each in seen)
