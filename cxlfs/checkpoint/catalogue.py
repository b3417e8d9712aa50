"""The checkpoints in a directory, newest first, and the newest good one.

Never here: what one checkpoint is (``inspection``), changing anything (``tidy``).

Invariants
- A directory that is a checkpoint itself has one entry: itself. Where checkpoints are directories
  (or share prefixes), the files beside them are not taken for checkpoints.
- Newest on a cxlfs mount is what was committed last. Elsewhere it is what had come farthest, where
  the content of every complete one says how far; else what was written last. A name decides only
  between two that are alike in that, and :func:`newer_by` says so.
- Nothing that is only a name for another entry (a symbolic link, a tracker) has an entry. A link to
  somewhere else is the checkpoint that it leads to.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Sequence
from pathlib import Path

from cxlfs.checkpoint.ages import commit_of
from cxlfs.checkpoint.directory import nothing_in, require_directory
from cxlfs.checkpoint.formats import loose
from cxlfs.checkpoint.formats.tensorflow import PART
from cxlfs.checkpoint.inspection import inspect
from cxlfs.checkpoint.model import BeyondLimitsError, Checkpoint, Level, Progress, State
from cxlfs.checkpoint.place import Place
from cxlfs.checkpoint.trackers import sibling_of
from cxlfs.errors import CxlfsError, NoGoodCheckpointError, UnknownCheckpointError

ASIDE = ".cxlfs-aside"
OWN_PREFIX = ".cxlfs-"
"""What a directory keeps for itself, as what was set aside: no checkpoint, and no part of one."""
LINK = "link"
"""What a link is called that leads to nothing."""
_NOT_SEEN = ("unknown", LINK)
_OF_DATA = (*_NOT_SEEN, "numpy", "numpy-archive", "hdf5", "pickle")
"""What lies in directories that belong to no checkpoint, too."""
_BELOW_MAX = 1000
_STEP = re.compile(r"(?:step|steps|iter|iteration)[=_-]?(\d{1,18})", re.IGNORECASE)
_NUMBER = re.compile(r"(?<!\d)\d{1,18}(?!\d)")
_DIGITS = re.compile(r"(\d{1,18})")
_SUFFIX = re.compile(r"(?:\.[A-Za-z]\w{0,15}){1,2}$")


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint among others. ``names``: what it is called in the directory: one name, or the
    files that share a prefix; none: the directory itself is the checkpoint.
    """

    checkpoint: Checkpoint
    names: tuple[str, ...]
    commit: int | None
    written_ns: int

    @property
    def path(self) -> Path:
        return Path(self.checkpoint.path)

    @property
    def moment(self) -> tuple[int, int]:
        """When it was committed, on a scale for one directory."""
        return self.commit or 0, self.written_ns


def catalogue(directory: str | Path) -> tuple[Entry, ...]:
    """Every checkpoint in a directory, newest first, looked at in structure.

    A directory that cannot be listed holds one that is ``State.UNKNOWN``.
    """
    place = Place(Path(directory))
    try:
        names = _candidates(place)
    except BeyondLimitsError:
        names = {}
    found = [_entry(place, path, inside) for path, inside in names.items()]
    entries = [each for each in found if each is not None]
    unknown = [each for each in entries if each.checkpoint.kind in _NOT_SEEN]
    entries = [each for each in entries if each not in unknown]
    groups = [each for each in entries if _is_group(each)]
    if groups:
        return _newest_first(groups + unknown)
    whole = inspect(place.path) if place.is_directory() else None
    if whole is not None and not (entries and whole.kind == loose.KIND):
        return (_made(whole, ()),)
    return _newest_first(entries + unknown)


def good(
    directory: str | Path,
    level: Level = Level.CONTENT,
    listed: Sequence[Entry] | None = None,
    *,
    skip: Entry | None = None,
) -> tuple[Entry, tuple[Entry, ...]]:
    """The newest complete checkpoint, verified as ``level`` says, and the newer ones that are not.

    ``listed``: the directory's catalogue, where the caller has it; ``skip``: one of it that is
    passed over however it is. Raises NoCheckpointError: there is none at all (a first start);
    NoGoodCheckpointError: there are some, and none of them is complete; UnknownCheckpointError: of
    one of these nobody knows; and what ``require_directory`` raises.
    """
    if listed is None:
        require_directory(directory)
    passed_over: list[Entry] = []
    for entry in catalogue(directory) if listed is None else listed:
        if entry is skip:
            passed_over.append(entry)
            continue
        found = verified(entry, level)
        if found.checkpoint.state is State.COMPLETE:
            return found, tuple(passed_over)
        passed_over.append(found)
    raise nothing_good(directory, passed_over)


def nothing_good(directory: str | Path, entries: Sequence[Entry]) -> CxlfsError:
    """Why there is no good checkpoint. ``entries``: as they were found to be, newest first."""
    if not entries:
        below = _below(Place(Path(directory)))
        if below is None:
            return nothing_in(directory)
        return NoGoodCheckpointError(
            f"there is no checkpoint in {directory}, and there are some below it, in {below}",
            next_step="name the directory that the checkpoints of the job are in",
        )
    unknown = [each for each in entries if each.checkpoint.state is State.UNKNOWN]
    kind = UnknownCheckpointError if unknown else NoGoodCheckpointError
    first = (unknown or list(entries))[0].checkpoint
    if len(entries) == 1:
        return kind(f"the only checkpoint in {directory}, {first.path}, is {first.words}")
    which = "the newest" if not unknown else "one"
    return kind(
        f"none of the {len(entries)} checkpoints in {directory} is good; "
        f"{which}, {first.path}, is {first.words}"
    )


def _below(place: Place) -> str | None:
    """The first directory in it that holds checkpoints, or is one that nobody knows."""
    for name in [n for n in place.names() if place.is_directory(n)][:_BELOW_MAX]:
        if name.startswith(OWN_PREFIX):
            continue
        if any(map(_is_saved, catalogue(place.path / name))):
            return name
    return None


def _is_saved(entry: Entry) -> bool:
    """A job has saved it, as far as one can tell: arrays and pickles may be what it reads."""
    if entry.checkpoint.kind not in _OF_DATA:
        return True
    return entry.checkpoint.kind not in _NOT_SEEN and bool(loose.NAME.fullmatch(entry.path.name))


def verified(entry: Entry, level: Level) -> Entry:
    """The same entry, its content read where ``level`` asks for that and its structure is good."""
    if level is Level.STRUCTURE or entry.checkpoint.state is not State.COMPLETE:
        return entry
    found = inspect(entry.path, level)
    if found is None:  # it was removed, or replaced by something else, since it was listed
        found = dataclasses.replace(
            entry.checkpoint, state=State.UNKNOWN, reason="it changed while it was looked at"
        )
    return dataclasses.replace(entry, checkpoint=with_step(found))


def step_in(name: str) -> int | None:
    """The step that a file's or directory's name says: ``step=100``, ``iter_0000100``."""
    found = _STEP.findall(name)
    return int(found[-1]) if found else None


def with_step(found: Checkpoint) -> Checkpoint:
    """The step is what the content says, else the name: as a step, or as its only number."""
    step = found.step
    name = Path(found.path).name
    if step is None:
        step = step_in(name)
    if step is None and found.kind != "unknown":
        numbers = _NUMBER.findall(_SUFFIX.sub("", name))
        step = int(numbers[0]) if len(numbers) == 1 else None
    return dataclasses.replace(found, step=step)


# --- entries --------------------------------------------------------------------------------


def _candidates(place: Place) -> dict[Path, tuple[str, ...]]:
    """Paths that may be checkpoints, and the names that each has in the directory."""
    found: dict[Path, tuple[str, ...]] = {}
    for name in place.names():
        path = place.path / name
        if name.startswith(OWN_PREFIX) or sibling_of(path) is not None:
            continue
        match = PART.fullmatch(name)
        if match is not None and place.is_file(name):
            prefix = place.path / match["prefix"]
            found[prefix] = (*found.get(prefix, ()), name)
        else:
            found[path] = (name,)
    return found


def _entry(place: Place, path: Path, names: tuple[str, ...]) -> Entry | None:
    found = inspect(path)
    if path.is_symlink() and (found is None or found.kind == "unknown") and not path.is_dir():
        target = path.readlink()
        reason = f"it is a link to {target}, which is not there or cannot be looked at"
        found = Checkpoint(LINK, str(path), None, State.UNKNOWN, reason, (), ())
        return None if path.is_file() else _made(found, names)
    if found is None or (found.kind == "unknown" and not place.is_directory(path.name)):
        return None
    return _made(found, names)


def _made(found: Checkpoint, names: tuple[str, ...]) -> Entry:
    path = Path(found.path)
    home = path.parent if names and names != (path.name,) else path
    written_ns = 0
    commit: int | None = None
    for file in found.files:
        if file.size_bytes is None or not file.is_needed:
            continue
        each = home / file.name if file.name else path
        try:
            written_ns = max(written_ns, each.stat().st_mtime_ns)
        except OSError:
            continue
        number = commit_of(each)
        commit = commit if number is None else max(commit or 0, number)
    if found.committed_ns is not None:
        written_ns = found.committed_ns
    if not written_ns:
        try:
            written_ns = (path.lstat() if found.kind == LINK else path.stat()).st_mtime_ns
        except OSError:
            written_ns = 0
    return Entry(with_step(found), names, commit, written_ns)


def _is_group(entry: Entry) -> bool:
    """A directory, or files that share a prefix."""
    return entry.names != (entry.path.name,) or entry.path.is_dir()


# --- which is newest ------------------------------------------------------------------------


class By(enum.StrEnum):
    """Why one checkpoint is held for newer than another."""

    COMMIT = "commit"
    """Order of commits, on a cxlfs mount."""
    STEP = "step"
    """What both say in their content of how far training had come."""
    TIME = "time"
    """Time of commit that the content says, or time of the last write."""
    NAME = "name"
    """Nothing but their names tells them apart."""


def newer_by(one: Entry, other: Entry) -> By:
    """What tells two entries of one catalogue apart, the newer one first."""
    if one.commit is not None and one.commit != other.commit:
        return By.COMMIT
    mine, its = one.checkpoint.progress, other.checkpoint.progress
    is_known = mine is not None and its is not None and mine.is_comparable(its)
    if one.commit is None and is_known and _progress(one)[0] > _progress(other)[0]:
        return By.STEP
    return By.TIME if one.written_ns != other.written_ns else By.NAME


def _newest_first(entries: list[Entry]) -> tuple[Entry, ...]:
    """By commits; elsewhere by what the contents say, if all whole ones say it, else by time. Names
    decide between those that are alike in that, numbers in them as numbers.
    """
    by_time = sorted(entries, key=_moment, reverse=True)
    if any(each.commit is not None for each in entries):
        return tuple(by_time)
    known = [each for each in entries if each.checkpoint.progress is not None]
    whole = [each for each in entries if each.checkpoint.state is State.COMPLETE]
    parts = [each.checkpoint.progress for each in known]
    if not known or any(each.checkpoint.progress is None for each in whole):
        return tuple(by_time)
    if not all(part is not None and part.is_comparable(parts[0] or part) for part in parts):
        return tuple(by_time)
    ordered = sorted(known, key=_progress, reverse=True)
    # One that is torn and says nothing comes before the first that was written before it.
    for entry in reversed([each for each in by_time if each.checkpoint.progress is None]):
        older = (n for n, each in enumerate(ordered) if _moment(each) <= _moment(entry))
        ordered.insert(next(older, len(ordered)), entry)
    return tuple(ordered)


_Key = tuple[int, int, tuple[tuple[int, int, str], ...]]


def _moment(entry: Entry) -> _Key:
    return (*entry.moment, _natural(entry.path.name))


def _progress(entry: Entry) -> tuple[tuple[int, ...], _Key]:
    found = entry.checkpoint.progress
    return (() if found is None else _numbers(found)), _moment(entry)


def _numbers(progress: Progress) -> tuple[int, ...]:
    return tuple(part for part in progress if part is not None)


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A name as people order it: numbers by their size."""
    parts = _DIGITS.split(name)
    return tuple((1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts)
