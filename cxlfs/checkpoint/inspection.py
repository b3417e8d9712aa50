"""What lies at a path: which format it has, and how it is.

Never here: a format (``formats``), more than one checkpoint (``catalogue``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.ages import STATE_XATTR, attribute
from cxlfs.checkpoint.content import verify_content
from cxlfs.checkpoint.formats import FORMATS
from cxlfs.checkpoint.formats.base import FileFormat
from cxlfs.checkpoint.formats.files import format_of
from cxlfs.checkpoint.hdf5_apart import list_hdf5
from cxlfs.checkpoint.model import (
    BeyondLimitsError,
    Checkpoint,
    Contents,
    DamagedError,
    File,
    IncompleteError,
    Level,
    ProblemError,
    State,
)
from cxlfs.checkpoint.place import Place


def recognise(path: str | Path) -> str | None:
    """The kind of checkpoint that a path is, whatever its state; None: none that is known."""
    try:
        found = _format_at(Place(Path(path)))
    except ProblemError:
        return None
    return found.kind if found is not None else None


def inspect(path: str | Path, level: Level = Level.STRUCTURE) -> Checkpoint | None:
    """One checkpoint as it lies there; None: it is none of a format that is known.

    Reads headers only, or everything (``Level.CONTENT``); writes nothing, runs nothing of what it
    reads. Raises nothing for what the bytes may hold; what cannot be judged is ``State.UNKNOWN``.
    """
    try:
        examined = examine(path)
    except ProblemError as error:
        return _unknown(path, error)
    if examined is None:
        return None
    home, contents = examined.home, examined.contents
    state, _ = contents.state()
    if level is Level.CONTENT and state is State.COMPLETE:
        list_hdf5(home, contents)
        verify_content(home, contents)
    elif contents.hdf5:
        contents.notes.append("its groups of HDF5 were not looked into: that takes its content")
    return checkpoint_of(path, examined, level)


def checkpoint_of(
    path: str | Path, examined: Examined, level: Level = Level.STRUCTURE
) -> Checkpoint:
    """What was found, as it is said of a checkpoint that was read to ``level``."""
    contents = examined.contents
    state, reason = contents.state()
    return Checkpoint(
        kind=examined.kind,
        path=str(path),
        step=contents.named_step if contents.step is None else contents.step,
        state=state,
        reason=reason,
        files=tuple(contents.files),
        tensors=tuple(contents.tensors),
        content_verified=level is Level.CONTENT and state is State.COMPLETE,
        notes=tuple(contents.notes),
        progress=contents.progress,
        named_step=contents.named_step,
        committed_ns=contents.committed_ns,
    )


class Examined(NamedTuple):
    """What a reader has found. ``home``: what the names of files are relative to."""

    kind: str
    home: Place
    contents: Contents


def examine(path: str | Path, *, lists_all: bool = False) -> Examined | None:
    """The structure of one checkpoint; None: it is none of a format that is known. ``lists_all``:
    also of files that a library has to list.

    Raises ProblemError where not even the format can be told.
    """
    place = Place(Path(path))
    found = _format_at(place)
    if found is None:
        return None
    contents = _examined(place, found)
    home = Place(place.path.parent, place.budget) if contents.beside else place
    _ask_store(home, contents)
    if lists_all:
        list_hdf5(home, contents)
    return Examined(contents.kind or found.kind, home, contents)


def _unknown(path: str | Path, error: ProblemError) -> Checkpoint:
    return Checkpoint("unknown", str(path), None, error.state, str(error), (), ())


class _Found(NamedTuple):
    """A format, and how it looks at the place."""

    kind: str
    examine: Callable[[Place], Contents]


def _format_at(place: Place) -> _Found | None:
    for each in FORMATS:
        if each.recognises(place):
            return _Found(each.kind, each.examine)
    if not place.is_file():
        return None
    with place.open() as reader:
        found = format_of(reader, place.name)
    return None if found is None else _Found(found.kind, partial(_examine_file, found))


def _examine_file(found: FileFormat, place: Place) -> Contents:
    with place.open() as reader:
        return found.examine(reader)


def _examined(place: Place, found: _Found) -> Contents:
    try:
        return found.examine(place)
    except ProblemError as error:
        failed = Contents(problems=[error])
    except (RecursionError, MemoryError):
        failed = Contents(problems=[BeyondLimitsError("it is nested deeper than what is read")])
    if place.is_file():
        failed.files.append(File("", place.size_of()))
    return failed


def _ask_store(home: Place, contents: Contents) -> None:
    """A cxlfs mount knows of each file whether its writer closed it, and of damage seen in it."""
    for file in contents.files[: limits.FILES_MAX]:
        if file.size_bytes is None or not file.is_needed:
            continue
        path = home.path / file.name if file.name else home.path
        state = attribute(path, STATE_XATTR)
        if state is None:
            return
        name = file.name or home.name
        if state == State.INCOMPLETE.value:
            text = f"the writer of {name} has not closed it, or was killed"
            contents.problems.append(IncompleteError(text))
        elif state == State.DAMAGED.value:
            contents.problems.append(_damage_of(home, contents, file))


def _damage_of(home: Place, contents: Contents, file: File) -> ProblemError:
    """Which tensor of a damaged file it is: a read that fails says where. Without the checksums of
    its format: the store has found what it has found.
    """
    if (file.size_bytes or 0) <= limits.DAMAGED_READ_BYTES_MAX:
        part = Contents(files=[file], tensors=list(contents.tensors))
        part.hdf5 = [each for each in contents.hdf5 if each.file == file.name]
        list_hdf5(home, part)
        verify_content(home, part)
        for problem in part.problems:
            if problem.state is State.DAMAGED:
                return problem
    return DamagedError(f"{file.name or home.name} has bytes that cannot be read")
