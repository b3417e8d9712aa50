"""The checkpoints in a directory, newest first, and the newest good one.

Never here: what one checkpoint is (``inspection``), changing anything (``tidy``).

Invariants
- A directory that is a checkpoint itself has one entry: itself. Where checkpoints are directories
  (or share prefixes), the files beside them are not taken for checkpoints.
- Newest is the highest step where every complete checkpoint says one, else the last commit: the
  number of the commit on a cxlfs mount, the time of the last write elsewhere.
- Nothing that is only a name for another entry (a symbolic link, a tracker) has an entry.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from cxlfs.checkpoint.ages import commit_of
from cxlfs.checkpoint.formats.tensorflow import PART
from cxlfs.checkpoint.inspection import inspect
from cxlfs.checkpoint.model import BeyondLimitsError, Checkpoint, Level, State
from cxlfs.checkpoint.place import Place
from cxlfs.errors import NoCheckpointError, NoGoodCheckpointError

ASIDE = ".cxlfs-aside"
OWN_PREFIX = ".cxlfs-"
"""What a directory keeps for itself, as what was set aside: no checkpoint, and no part of one."""
_STEP = re.compile(r"(?:step|steps|iter|iteration)[=_-]?(\d{1,18})", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(?<![.\d])(\d{1,18})(?!.*\d)")
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
    entries = [_entry(place, path, inside) for path, inside in names.items()]
    groups = [each for each in entries if each is not None and _is_group(each)]
    if groups:
        return _newest_first(groups)
    whole = inspect(place.path)
    if whole is not None and place.is_directory():
        return (_made(whole, ()),)
    return _newest_first([each for each in entries if each is not None])


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
    NoGoodCheckpointError: there are some, and none of them is complete.
    """
    passed_over: list[Entry] = []
    for entry in catalogue(directory) if listed is None else listed:
        if entry is skip:
            passed_over.append(entry)
            continue
        found = verified(entry, level)
        if found.checkpoint.state is State.COMPLETE:
            return found, tuple(passed_over)
        passed_over.append(found)
    if not passed_over:
        raise NoCheckpointError(f"there is no checkpoint in {directory}")
    first = passed_over[0].checkpoint
    raise NoGoodCheckpointError(
        f"none of the {len(passed_over)} checkpoints in {directory} is good; "
        f"the newest, {first.path}, is {first.words}"
        if len(passed_over) > 1
        else f"the only checkpoint in {directory}, {first.path}, is {first.words}"
    )


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
    """The step is what the name says, else the content, else the last number of the name."""
    name = Path(found.path).name
    step = step_in(name)
    if step is None:
        step = found.step
    if step is None and found.kind != "unknown":
        match = _LAST_NUMBER.search(_SUFFIX.sub("", name))
        step = int(match[1]) if match is not None else None
    return dataclasses.replace(found, step=step)


# --- entries --------------------------------------------------------------------------------


def _candidates(place: Place) -> dict[Path, tuple[str, ...]]:
    """Paths that may be checkpoints, and the names that each has in the directory."""
    found: dict[Path, tuple[str, ...]] = {}
    for name in place.names():
        path = place.path / name
        if name.startswith(OWN_PREFIX) or path.is_symlink():
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
    if found is None or (found.kind == "unknown" and not place.is_directory(path.name)):
        return None
    return _made(found, names)


def _made(found: Checkpoint, names: tuple[str, ...]) -> Entry:
    path = Path(found.path)
    home = path.parent if names and names != (path.name,) else path
    written_ns = 0
    commit: int | None = None
    for file in found.files:
        if file.size_bytes is None:
            continue
        each = home / file.name if file.name else path
        try:
            written_ns = max(written_ns, each.stat().st_mtime_ns)
        except OSError:
            continue
        number = commit_of(each)
        commit = commit if number is None else max(commit or 0, number)
    if not written_ns:
        try:
            written_ns = path.stat().st_mtime_ns
        except OSError:
            written_ns = 0
    return Entry(with_step(found), names, commit, written_ns)


def _is_group(entry: Entry) -> bool:
    """A directory, or files that share a prefix."""
    return entry.names != (entry.path.name,) or entry.path.is_dir()


def _newest_first(entries: list[Entry]) -> tuple[Entry, ...]:
    complete = [each for each in entries if each.checkpoint.state is State.COMPLETE]
    if all(each.checkpoint.step is not None for each in complete):

        def newness(entry: Entry) -> tuple[int, ...]:
            step = entry.checkpoint.step
            return (-1 if step is None else step, *entry.moment)
    else:

        def newness(entry: Entry) -> tuple[int, ...]:
            return entry.moment

    return tuple(sorted(entries, key=newness, reverse=True))
