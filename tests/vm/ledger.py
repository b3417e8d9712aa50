"""What must be on a store after a power cut: the model the recovered files are compared with.

The guest announces each operation before it begins and after it has returned; it does one at a
time. So after a cut the store must show all operations that had returned, in full, and the one in
flight either wholly or not at all. Two things are allowed beyond that, as the promises of cxlfs
say: a file that was being created may be there in part if it says of itself that it is incomplete.

Knows nothing of virtual machines; both the guest and the host use it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

BLOCK_BYTES = 1 << 16  # contents repeat after 4 GiB, when all rotations are used up
Outcome = Literal["nothing in flight", "before", "after", "incomplete"]


class Entry(NamedTuple):
    """A file with its size in bytes and its digest, or a directory (size -1, no digest)."""

    size: int
    digest: str

    @property
    def is_directory(self) -> bool:
        return self.size < 0


DIRECTORY = Entry(-1, "")
State = dict[str, Entry]


class Found(NamedTuple):
    """What the recovered store shows under a path; ``state`` is the file's user.cxlfs.state."""

    entry: Entry
    state: str


class Operation(NamedTuple):
    """``kind``: write, rename, remove, make_directory or remove_directory. ``seed`` and ``size``
    give the content that a write writes, ``target`` the new name that a rename gives.
    """

    number: int
    kind: str
    path: str
    target: str = ""
    seed: str = ""
    size: int = 0


def content(seed: str, size: int) -> bytes:
    """The bytes of the version ``seed``, the same on every machine: one random block, in each
    place rotated otherwise, which is quickly made and repeats nowhere.
    """
    block = random.Random(seed).randbytes(BLOCK_BYTES)
    count = -(-size // BLOCK_BYTES)
    data = b"".join(block[turn:] + block[:turn] for turn in range(1, count + 1))
    return data[:size]


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def apply(state: State, operation: Operation) -> State:
    """The state after ``operation`` has been done."""
    after = dict(state)
    match operation.kind:
        case "write":
            data = content(operation.seed, operation.size)
            after[operation.path] = Entry(len(data), digest(data))
        case "rename":
            old, new = operation.path, operation.target
            after[new] = after.pop(old)
            for path in [path for path in after if path.startswith(old + "/")]:
                after[new + path.removeprefix(old)] = after.pop(path)
        case "make_directory":
            after[operation.path] = DIRECTORY
        case "remove" | "remove_directory":
            del after[operation.path]
        case other:
            raise ValueError(f"no such operation: {other}")
    return after


def differences(expected: State, found: Mapping[str, Found]) -> list[str]:
    """One line for each path where ``found`` is not ``expected``, sorted by path."""
    lines = []
    for path in sorted({*expected, *found}):
        want, have = expected.get(path), found.get(path)
        if have is None:
            lines.append(f"{path}: committed, but not there")
        elif want is None:
            lines.append(f"{path}: there, but never committed ({have.entry.size} bytes)")
        elif want != have.entry:
            lines.append(
                f"{path}: {have.entry.size} bytes, digest {have.entry.digest}; "
                f"committed were {want.size} bytes, digest {want.digest}"
            )
        elif not want.is_directory and have.state != "complete":
            lines.append(f"{path}: has the right content but calls itself {have.state!r}")
    return lines


@dataclass(slots=True)
class Ledger:
    """Follows the operations, and judges what a recovery made of them."""

    committed: State = field(default_factory=dict)
    in_flight: Operation | None = None
    operations_done: int = 0

    def begin(self, operation: Operation) -> None:
        if self.in_flight is not None:
            raise ValueError(f"operation {self.in_flight.number} has not ended")
        self.in_flight = operation

    def done(self, number: int) -> None:
        if self.in_flight is None or self.in_flight.number != number:
            raise ValueError(f"operation {number} is not the one in flight")
        self.committed = apply(self.committed, self.in_flight)
        self.in_flight = None
        self.operations_done += 1

    def judge(self, found: Mapping[str, Found]) -> tuple[Outcome | None, list[str]]:
        """(what became of the operation in flight, problems). Without problems what was found is
        the committed state from here on.
        """
        operation = self.in_flight
        before = differences(self.committed, found)
        if operation is None:
            return (None, before) if before else ("nothing in flight", [])
        after_state = apply(self.committed, operation)
        after = differences(after_state, found)
        outcome: Outcome
        if not before:
            outcome = "before"
        elif not after:
            outcome, self.committed = "after", after_state
        elif self._is_partial(operation, found):
            outcome = "incomplete"
            self.committed = {**self.committed, operation.path: found[operation.path].entry}
        else:
            title = f"operation {operation.number} ({operation.kind} {operation.path}) in flight"
            lines = [f"as if not done: {line}" for line in before]
            return None, [title, *lines, *(f"as if done: {line}" for line in after)]
        self.in_flight = None
        return outcome, []

    def _is_partial(self, operation: Operation, found: Mapping[str, Found]) -> bool:
        """Whether all is as before but for a new file that calls itself incomplete and holds a
        beginning of what was written.
        """
        part = found.get(operation.path)
        if operation.kind != "write" or operation.path in self.committed or part is None:
            return False
        others = {path: have for path, have in found.items() if path != operation.path}
        beginning = content(operation.seed, operation.size)[: part.entry.size]
        return (
            not differences(self.committed, others)
            and part.state == "incomplete"
            and part.entry == Entry(len(beginning), digest(beginning))
        )
