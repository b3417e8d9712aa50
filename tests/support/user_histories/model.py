"""The tree of a store as its users see it, and what a power cut leaves of it.

Invariants
- A path that the model knows means the same object in the store, by inode number.
- ``committed`` of a file is None until its first content was published.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator

Path = tuple[bytes, ...]
Picture = dict[Path, bytes]
"""Each file: its content."""


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """Who asks."""

    name: str
    uid: int


@dataclasses.dataclass(eq=False, slots=True)
class File:
    """``live``: what readers see. ``held``: the whole content that a torn overwrite replaced."""

    ino: int
    uid: int
    live: bytes = b""
    committed: bytes | None = None
    made: int = 0
    """The moment at which it was created."""
    publishers: set[Hashable] = dataclasses.field(default_factory=set)
    """Who has published it outside of sets."""
    born: int = 0
    """The moment at which its content was published last."""
    is_dirty: bool = False
    """A version of it is not published yet."""
    is_log: bool = False
    """It was opened with O_APPEND."""
    is_emptied: bool = False
    """That version began with an empty file."""
    is_wild: bool = False
    """It is torn and stays, or goes back: nothing is promised of it."""
    is_linked: bool = False
    """It has had several names: which of them go back with a set is open, its contents are not."""
    mode: int = 0o666
    was_found: bool = False
    """It came back with another number: its attributes are not followed."""
    handles: int = 0
    """How many descriptors may write to it."""
    held: bytes | None = None
    overwriters: set[Hashable] = dataclasses.field(default_factory=set)
    closed_at: float = 0.0
    ended_at: float | None = None


@dataclasses.dataclass(eq=False, slots=True)
class Directory:
    ino: int
    uid: int
    name: bytes = b""
    parent: Directory | None = None
    entries: dict[bytes, File | Directory] = dataclasses.field(default_factory=dict)

    @property
    def path(self) -> Path:
        return () if self.parent is None else (*self.parent.path, self.name)

    def below(self, above: Path = ()) -> Iterator[tuple[Path, File]]:
        """Every file, with its path from here."""
        for name, child in self.entries.items():
            if isinstance(child, File):
                yield (*above, name), child
            else:
                yield from child.below((*above, name))

    def directories(self) -> Iterator[Directory]:
        """Itself, and every one below."""
        yield self
        for child in self.entries.values():
            if isinstance(child, Directory):
                yield from child.directories()

    def is_in(self, top: Directory) -> bool:
        """True if the directory is ``top`` or lies below it."""
        here: Directory | None = self
        while here is not None and here is not top:
            here = here.parent
        return here is top

    def find(self, path: Path) -> File | Directory | None:
        here: File | Directory | None = self
        for name in path:
            here = here.entries.get(name) if isinstance(here, Directory) else None
        return here

    def put(self, name: bytes, child: File | Directory) -> None:
        self.entries[name] = child
        if isinstance(child, Directory):
            child.name, child.parent = name, self

    def live(self) -> Picture:
        return {path: file.live for path, file in self.below()}

    def committed(self) -> Picture:
        """What a power cut leaves."""
        return {p: file.committed for p, file in self.below() if file.committed is not None}


def frame(data: bytes) -> bytes:
    """A content that says how long it is, as the formats of checkpoints do."""
    return b"%d|" % len(data) + data


def is_torn(content: bytes) -> bool:
    """True if a framed content is shorter than it says, or has not all of its size."""
    size, bar, data = content.partition(b"|")
    return not content or (size.isdigit() and (not bar or len(data) < int(size)))


def paths_of(path: Path, child: File | Directory) -> set[Path]:
    """A file, or all below a directory, by their paths."""
    if isinstance(child, File):
        return {path}
    return {found for found, _ in child.below(path)}
