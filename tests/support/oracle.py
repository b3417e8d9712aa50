"""The libraries that load checkpoints as judges of what ``cxlfs good`` says of them.

Each format is written by its library, changed as kills, full disks, lost ranks, wrong copies, left
overs and bit flips change files, loaded by its library, and compared with what was written. Two
things must hold: what is called complete loads, bit for bit; what loads is called neither
incomplete nor damaged.

Never here: what the readers of this project look at.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import os
import random
import shutil
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

from cxlfs.checkpoint import Level, State, inspect
from tests.support.oracle_libraries import LIBRARIES
from tests.support.oracle_training import TRAINING
from tests.support.oracle_values import Format, digest

_BLOCK_BYTES = 512
_LOAD_SECONDS_MAX = 20
FORMATS = (*LIBRARIES, *TRAINING)


class Loaded(enum.Enum):
    """What the library made of it."""

    SAME = "loads as it was"
    OTHER = "loads other values"
    FAILS = "fails"


# --- what happens to files ----------------------------------------------------------------------

CHANGES = (
    *("cut", "emptied", "removed", "zeros to the end", "block of zeros", "bit", "byte", "bits"),
    *("longer by zeros", "longer by bytes", "of another save", "a directory", "a dangling link"),
    *("left over", "two removed", "cut and grown", "holes"),
)
_CONTENT = (
    *("block of zeros", "bit", "byte", "bits", "of another save", "holes", "zeros to the end"),
    "cut and grown",
)
"""Changes after which every length is what it was."""


def files_of(path: Path) -> list[Path]:
    """Those of a checkpoint; of a prefix all that share it."""
    if path.is_dir():
        return sorted(each for each in path.rglob("*") if each.is_file())
    return [path] if path.is_file() else sorted(path.parent.glob(f"{path.name}.*"))


def change(path: Path, other: Path, rng: random.Random) -> str:
    """Change a checkpoint in place; ``other`` is one of another save. What was done."""
    file = rng.choice(files_of(path))
    data = file.read_bytes()
    kind = rng.choice(CHANGES)
    at = rng.choice((rng.randrange(len(data) + 1), rng.randrange(min(len(data), 200) + 1)))
    if kind in ("removed", "a directory", "a dangling link", "two removed"):
        file.unlink()
    if kind == "a directory":
        file.mkdir()
    elif kind == "a dangling link":
        file.symlink_to("gone")
    elif kind == "two removed" and files_of(path):
        rng.choice(files_of(path)).unlink()
    elif kind == "of another save":
        root = path if path.is_dir() else path.parent
        theirs = (other if path.is_dir() else other.parent) / file.relative_to(root)
        if theirs.is_file():
            shutil.copyfile(theirs, file)
    elif kind == "left over":
        name = file.name.replace("0", "9").replace("1", "8")
        name = name if name != file.name else f"9-{name}"
        (file.parent / name).write_bytes(data[:at])
    elif file.exists():
        _write(file, _changed(data, kind, at, rng), holes=kind == "holes")
    name = file.relative_to(path) if path.is_dir() and file != path else file.name
    return f"{kind}: {name} at {at}"


def _changed(data: bytes, kind: str, at: int, rng: random.Random) -> bytes:
    match kind:
        case "cut":
            return data[:at]
        case "emptied":
            return b""
        case "zeros to the end":
            return data[:at] + bytes(len(data) - at)
        case "block of zeros" | "holes":
            begin = at // _BLOCK_BYTES * _BLOCK_BYTES
            return data[:begin] + bytes(len(data[begin : begin + 4096])) + data[begin + 4096 :]
        case "cut and grown":
            return data[:at] + bytes(max(0, len(data) - at))
        case "longer by zeros":
            return data + bytes(rng.choice((1, 8, 512, 70_000)))
        case "longer by bytes":
            return data + rng.randbytes(rng.choice((1, 8, 512, 70_000)))
    changed = bytearray(data)
    for _ in range(1 if kind in ("bit", "byte") else rng.randrange(2, 8)):
        if changed:
            where = min(at, len(changed) - 1) if kind != "bits" else rng.randrange(len(changed))
            changed[where] = (
                rng.randrange(256) if kind == "byte" else changed[where] ^ 1 << rng.randrange(8)
            )
    return bytes(changed)


def _write(file: Path, data: bytes, *, holes: bool) -> None:
    with file.open("wb") as target:
        for begin in range(0, len(data), 4096):
            block = data[begin : begin + 4096]
            if not holes or block.strip(b"\0"):
                target.seek(begin)
                target.write(block)
        target.truncate(len(data))


# --- judging ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One changed checkpoint: what was done, what ``good`` says, what the library says."""

    number: int
    done: str
    state: str
    reason: str | None
    loaded: Loaded

    def contradiction(self, found: Format) -> str | None:
        """Why this must not be; None: it may."""
        if self.state == "complete" and self.loaded is not Loaded.SAME:
            return self.explained(found) or f"called complete, and it {self.loaded.value}"
        if self.loaded is Loaded.SAME and self.state in ("incomplete", "damaged"):
            return self.explained(found) or f"it loads, and is called {self.state}"
        return None

    def explained(self, found: Format) -> str | None:
        kind = self.done.partition(":")[0]
        if self.state == "complete" and kind in _CONTENT and not found.checked:
            return "explained: the format has no checksum of what was changed"
        if self.state == "complete" and kind == "of another save":
            return "explained: nothing in the files says of which save they are"
        words = self.reason or ""
        last = words.rpartition(": ")[2]
        is_checksum = last.startswith("the checksum of ") or "differs" in last
        is_checksum |= words.startswith("tensor ") and last == words
        if self.state == "damaged" and is_checksum:
            return "explained: a checksum that the library does not compare"
        if self.state == "damaged" and ("the header of" in words or "its tree is" in words):
            return "explained: a structure that the library does not look at"
        if found.name == "saved-model" and self.state == "complete" and ": assets/" in self.done:
            return "explained: nothing says what an asset holds"
        if found.name == "hugging-face" and "rng_state" in self.done:
            return "explained: the Trainer resumes with other random numbers"
        is_metadata = ": .metadata" in self.done or ": metadata.json" in self.done
        if found.name in ("dcp", "megatron-dist") and self.state == "complete" and is_metadata:
            return "explained: the format has no checksum of what was changed"
        if found.name == "accelerate" and self.state == "complete" and "removed" in kind:
            return "explained: nothing says how many objects accelerate had"
        if found.name == "accelerate" and kind == "left over":
            return "explained: it may be the state of another rank"
        return None


def judged(found: Format, seed: int, numbers: range, scratch: Path) -> Iterator[Verdict]:
    """Each changed checkpoint of a range; yields one without a library's word first, so that what
    makes it crash is known.
    """
    warnings.simplefilter("ignore")
    whole, other = scratch / "whole" / found.file, scratch / "other" / found.file
    for path, of in ((whole, 7), (other, 8)):
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
            found.save(path, of)
    expected = digest(found.load(whole))
    first = inspect(whole, Level.CONTENT)
    assert first is None or first.state in (State.COMPLETE, State.UNKNOWN), first.words
    for number in numbers:
        rng = random.Random(f"{seed} {found.name} {number}")
        place = scratch / f"{number}"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(whole.parent, place, symlinks=True)
        path = place / found.file
        done = change(path, other, rng)
        seen = inspect(path, Level.CONTENT)
        said = ("none", None) if seen is None else (seen.state.value, seen.reason)
        yield Verdict(number, done, *said, Loaded.FAILS)
        signal.alarm(_LOAD_SECONDS_MAX)  # what never comes back ends this process, and has failed
        try:
            loaded = Loaded.SAME if digest(found.load(path)) == expected else Loaded.OTHER
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001  whatever a library raises: that of DCP is none of these
            loaded = Loaded.FAILS
        signal.alarm(0)
        yield Verdict(number, done, *said, loaded)
        shutil.rmtree(place, ignore_errors=True)


def counted(found: Format, verdicts: dict[int, Verdict]) -> collections.Counter[str]:
    """How often each state met each outcome, and each contradiction."""
    counts: collections.Counter[str] = collections.Counter()
    for verdict in verdicts.values():
        counts[f"{verdict.state} / {verdict.loaded.value}"] += 1
        problem = verdict.contradiction(found)
        if problem is not None:
            counts[problem] += 1
    return counts


def format_named(name: str) -> Format:
    return next(each for each in FORMATS if each.name == name)


def quiet() -> None:
    """Libraries say much of what is broken."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
