"""What is said of a checkpoint: its state, its files, its tensors; and what the readers raise.

Never here: reading bytes, deciding which format something has, formatting for people.

Invariants
- A name of a file is relative to the checkpoint's path; "" is that path itself, when it is a file.
  Where the path is only a prefix (TensorFlow), it is relative to the directory.
- What a checkpoint holds comes from bytes that anybody may have written: names are text of bounded
  length, numbers are what the file claims and were compared with the size of the file.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple


class State(enum.StrEnum):
    """How a checkpoint is."""

    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    """Something that belongs to it is not there: its saving was not finished."""
    DAMAGED = "damaged"
    """Everything is there, and something of it is not what was written."""
    UNKNOWN = "unknown"
    """It could not be judged: too large for the limits, or not readable by this user."""


class Progress(NamedTuple):
    """How far training had come, as the content of a checkpoint says. Steps may begin anew with
    each epoch: of two that say both, the epoch (or how often it was saved) decides first.
    """

    epoch: int | None
    step: int | None

    def is_comparable(self, other: Progress) -> bool:
        """True if both say the same things."""
        return [part is None for part in self] == [part is None for part in other]


class Level(enum.IntEnum):
    """How much is read."""

    STRUCTURE = 0
    """Names, sizes and headers."""
    CONTENT = 1
    """Every byte, and every checksum that the format has."""


@dataclasses.dataclass(frozen=True, slots=True)
class File:
    """A file that belongs to a checkpoint. ``size_bytes`` is None for one that is missing.
    ``is_needed`` False: it lies there, and the checkpoint is loaded without it.
    """

    name: str
    size_bytes: int | None
    is_needed: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """``[offset, offset + size_bytes)`` of ``file`` holds it; both None where the format does not
    say so (compressed, or kept in pieces). ``strides``: in items; None: C order without gaps.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int | None
    size_bytes: int | None
    strides: tuple[int, ...] | None = None


class Algorithm(enum.Enum):
    """Of the checksums that formats have."""

    CRC32 = "crc32"
    CRC32C = "crc32c"
    CRC32C_MASKED = "crc32c masked"
    """Rotated right by 15 bits, plus 0xa282ead8 (LevelDB, util/crc32c.h)."""
    STRINGS = "crc32c masked, of strings"
    """TensorFlow's: over lengths of four bytes each that lie there as varints."""
    ZSTD = "frame of Zstandard"
    """One frame and nothing else; its own checksum, where it has one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """Bytes of a file with a checksum of their own. ``label`` names them where no tensor does."""

    file: str
    offset: int
    size_bytes: int
    algorithm: Algorithm
    expected: int
    label: str
    deflated: bool = False
    """The checksum is that of what they inflate to."""
    items: int = 1
    """How many strings there are."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hdf5Part:
    """An HDF5 file in ``[base, base + length)`` of ``file``: HDF5's library lists what it holds."""

    file: str
    base: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint as it lies there.

    ``path`` is a file, a directory, or (TensorFlow) the prefix that its files share. ``reason`` is
    None where ``state`` is complete. ``content_verified``: every byte was read, and every checksum
    in it compared. ``notes`` are true of a complete one too.
    """

    kind: str
    path: str
    step: int | None
    """What the content says; else what the framework's own name for it does."""
    state: State
    reason: str | None
    files: tuple[File, ...]
    tensors: tuple[Tensor, ...]
    content_verified: bool = False
    notes: tuple[str, ...] = ()
    progress: Progress | None = None
    named_step: int | None = None
    """From a name that the framework itself gives, and resumes by."""
    committed_ns: int | None = None

    @property
    def words(self) -> str:
        """``incomplete: shard 3 of 8 is missing``."""
        return self.state.value if self.reason is None else f"{self.state.value}: {self.reason}"

    @property
    def size_bytes(self) -> int:
        """Of its files together."""
        return sum(file.size_bytes or 0 for file in self.files)


class ProblemError(Exception):
    """Why a checkpoint is not complete: what readers of formats raise, and ``inspect`` catches."""

    state = State.UNKNOWN


class IncompleteError(ProblemError):
    """Something is missing."""

    state = State.INCOMPLETE


class DamagedError(ProblemError):
    """Something is not what was written."""

    state = State.DAMAGED


class BeyondLimitsError(ProblemError):
    """More of something than is read (``limits``), not readable, or not understood: what no
    reader here knows proves no damage.
    """

    state = State.UNKNOWN


@dataclasses.dataclass(slots=True)
class Contents:
    """What a reader of a format has found so far; the first problem of the worst state counts."""

    step: int | None = None
    """From the content."""
    epoch: int | None = None
    named_step: int | None = None
    """From a name that the framework itself gives: a step, where the content says none."""
    committed_ns: int | None = None
    """When it was committed, where the content says so."""
    files: list[File] = dataclasses.field(default_factory=list)
    tensors: list[Tensor] = dataclasses.field(default_factory=list)
    attributes: list[str] = dataclasses.field(default_factory=list)
    """Names of small values beside the tensors, where the format has such."""
    regions: list[Region] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    hdf5: list[Hdf5Part] = dataclasses.field(default_factory=list)
    problems: list[ProblemError] = dataclasses.field(default_factory=list)
    kind: str | None = None
    """A name that says more than that of the format, where the content does."""
    beside: bool = False
    """Its files lie beside each other, and their names are relative to the path's directory."""
    root: object = None
    """What the format's header holds, for a format that is built on it."""

    @property
    def progress(self) -> Progress | None:
        """None: the content says nothing of it."""
        found = Progress(self.epoch, self.step)
        return None if found == (None, None) else found

    def doubt(self, reason: str) -> None:
        """Whether it is whole is not known."""
        self.problems.append(BeyondLimitsError(reason))

    def state(self) -> tuple[State, str | None]:
        """What is missing counts before what is damaged: the save was not finished then."""
        for state in (State.INCOMPLETE, State.DAMAGED, State.UNKNOWN):
            for problem in self.problems:
                if problem.state is state:
                    return state, str(problem)
        return State.COMPLETE, None
