"""Put aside what keeps a framework's own resume from working: the one module that changes anything.

Never here: deletion. What is set aside is renamed into ``.cxlfs-aside/`` in the same directory, or
beside that directory for accelerate, and comes back with :func:`undo`.

Invariants
- Only checkpoints are moved that come before the newest good one, in the order of the catalogue or
  by the number in the name that their framework gave them: it would resume from those. Where there
  is no good one they are moved if all are incomplete: the first save was killed.
- Each move is one rename within the file system; a tracker is replaced by renaming a file over it,
  and what it held is kept. A crash between two steps leaves a directory that tidying again mends.
- What is done is written down before it is done: ``tidy.json`` in the directory of what is aside.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cxlfs.checkpoint.catalogue import ASIDE, Entry, catalogue, nothing_good, verified
from cxlfs.checkpoint.directory import require_directory
from cxlfs.checkpoint.formats import lightning
from cxlfs.checkpoint.jsons import Name, checked, parse_json, prepared
from cxlfs.checkpoint.model import Level, ProblemError, State
from cxlfs.checkpoint.place import Place
from cxlfs.checkpoint.trackers import Tracker, rewritten, trackers_of
from cxlfs.checkpoint.writers import writers_in
from cxlfs.durable import sync_directory
from cxlfs.errors import (
    BusyError,
    NotFoundError,
    NotPermittedError,
    ReadOnlyError,
)

_LIST = "tidy.json"
_READ_ONLY_ERRNOS = frozenset({13, 1, 30})  # EACCES, EPERM, EROFS


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """A checkpoint that is set aside, or back. ``names``: in the directory, and in ``aside``."""

    path: str
    names: tuple[str, ...]
    state: State
    reason: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Retargeted:
    """A tracker that names another checkpoint. ``old`` None: it named nothing that can be.

    ``is_copy``: a file that is a checkpoint itself, of a fixed name; it becomes a copy of ``new``.
    """

    name: str
    old: str | None
    new: str
    is_link: bool
    is_copy: bool = False


@prepared
class _ListedMove(msgspec.Struct):
    names: tuple[Name, ...]
    state: str
    reason: str | None


@prepared
class _ListedTracker(msgspec.Struct):
    name: Name
    new: Name
    is_link: bool
    is_copy: bool = False


@prepared
class _List(msgspec.Struct):
    """What is written down before it is done."""

    moves: list[_ListedMove]
    trackers: list[_ListedTracker]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What tidying does. ``aside`` is where things go; None: nothing is in the way."""

    directory: Path
    good: Entry | None
    moves: tuple[Moved, ...]
    retargets: tuple[Retargeted, ...]
    aside: Path | None


def plan(
    directory: str | Path,
    level: Level = Level.CONTENT,
    listed: Sequence[Entry] | None = None,
) -> Plan:
    """What :func:`tidy` would do. Changes nothing. ``listed``: the directory's catalogue, where
    the caller has it.

    Raises NoCheckpointError: there is none; NoGoodCheckpointError, UnknownCheckpointError: none is
    good, and not all are incomplete; and what ``require_directory`` raises.
    """
    place = Place(Path(directory))
    if listed is None:
        require_directory(directory)
    entries = list(catalogue(directory) if listed is None else listed)
    newest, looked_at = _newest_good(entries, level)
    in_the_way = _in_the_way(looked_at, newest)
    moves = tuple(_moved(each) for each in in_the_way if each.names)
    if newest is None and len(moves) < max(len(entries), 1):
        raise nothing_good(directory, [each for each in looked_at if each not in in_the_way])
    moved = {name for move in moves for name in (*move.names, Path(move.path).name)}
    retargets = (*_retargets(place, newest, entries, moved), *_copies(newest, moves))
    aside = _aside_path(_base_for(place, entries)) if moves or retargets else None
    return Plan(place.path, newest, moves, retargets, aside)


def _newest_good(entries: list[Entry], level: Level) -> tuple[Entry | None, list[Entry]]:
    """The newest good one, and all entries as they were found to be."""
    looked_at = list(entries)
    for index, entry in enumerate(entries):
        looked_at[index] = verified(entry, level)
        if looked_at[index].checkpoint.state is State.COMPLETE:
            return looked_at[index], looked_at
    return None, looked_at


def _in_the_way(looked_at: Sequence[Entry], newest: Entry | None) -> list[Entry]:
    """What is not whole, and newer than the newest good one. ``looked_at``: newest first."""
    if newest is None:
        return [each for each in looked_at if each.checkpoint.state is State.INCOMPLETE]
    found, is_newer = [], True
    best = newest.checkpoint
    for entry in looked_at:
        each = entry.checkpoint
        is_newer = is_newer and entry.path != newest.path
        is_named_newer = each.kind == best.kind and (each.named_step or -1) > (
            best.named_step or -1
        )
        if each.state in (State.INCOMPLETE, State.DAMAGED) and (is_newer or is_named_newer):
            found.append(entry)
    return found


def _moved(entry: Entry) -> Moved:
    found = entry.checkpoint
    return Moved(found.path, entry.names, found.state, found.reason)


def _retargets(
    place: Place, newest: Entry | None, entries: list[Entry], moved: set[str]
) -> tuple[Retargeted, ...]:
    """Trackers that name what is moved, what is not there, or nothing."""
    if newest is None or not newest.names:
        return ()
    target = newest.path.name
    stays = {each.path.name for each in entries} - moved
    found = []
    for tracker in trackers_of(place):
        if not _is_wrong(tracker, moved, stays):
            continue
        new = target if tracker.is_link else rewritten(place, tracker, target, stays)
        if new is not None:
            found.append(Retargeted(tracker.name, tracker.target, new, tracker.is_link))
    return tuple(found)


def astray(
    directory: str | Path, newest: Entry, looked_at: Sequence[Entry]
) -> tuple[Retargeted, ...]:
    """Trackers beside the newest good checkpoint with which a framework's own resume would fail:
    what :func:`tidy` would make of each. ``looked_at``: the catalogue, as far as it was verified.
    """
    in_the_way = _in_the_way(looked_at, newest)
    moved = {name for each in in_the_way for name in (*each.names, each.path.name)}
    return _retargets(Place(Path(directory)), newest, list(looked_at), moved)


def _copies(newest: Entry | None, moves: tuple[Moved, ...]) -> tuple[Retargeted, ...]:
    """Lightning's ``ckpt_path="last"`` knows one name, and starts anew where it is missing. Not a
    link: the next save may write through it.
    """
    if newest is None or newest.checkpoint.kind != lightning.KIND or not newest.path.is_file():
        return ()
    names = [name for move in moves for name in move.names if lightning.LAST.fullmatch(name)]
    return tuple(
        Retargeted(name, None, newest.path.name, is_link=False, is_copy=True) for name in names
    )


def _is_wrong(tracker: Tracker, moved: set[str], stays: set[str]) -> bool:
    if tracker.is_link:
        return tracker.target in moved
    return tracker.target not in stays and tracker.target != "release"


def _base_inside(directory: Path) -> Path:
    return directory / ASIDE


def _base_beside(directory: Path) -> Path:
    whole = directory.resolve()
    return whole.parent / ASIDE / whole.name


def _base_for(place: Place, entries: list[Entry]) -> Path:
    """What things set aside lie in. accelerate takes every directory beside a checkpoint for one,
    and deletes the one with the lowest number (accelerator.py, ``load_state``, ``save_state``).
    """
    if all(entry.checkpoint.kind != "accelerate" for entry in entries):
        return _base_inside(place.path)
    base = _base_beside(place.path)
    if place.path.is_mount():
        raise NotPermittedError(
            f"{place.path} is a mount point, and accelerate takes all in it for checkpoints",
            next_step="keep checkpoints in a directory below it",
        )
    return base


def _aside_path(base: Path) -> Path:
    """A new name, later in order than those that are there."""
    now = f"{dt.datetime.now(dt.UTC):%Y%m%dT%H%M%SZ}"
    number = 0
    while (base / f"{now}-{number:03d}").exists():
        number += 1
    return base / f"{now}-{number:03d}"


# --- doing it -------------------------------------------------------------------------------


def tidy(
    directory: str | Path,
    level: Level = Level.CONTENT,
    listed: Sequence[Entry] | None = None,
) -> Plan:
    """Set aside what is in the way and put trackers right; what was done.

    Durable when it returns. What is made belongs to the directory's owner, a tracker to who had it
    before. Raises what :func:`plan` raises; BusyError: a process is writing to what would be moved;
    ReadOnlyError: this user may not rename here; NotPermittedError: what was set aside before lies
    behind a symbolic link.
    """
    found = plan(directory, level, listed)
    if found.aside is None:
        return found
    _refuse_writers(found)
    try:
        _carry_out(found, found.aside)
    except OSError as error:
        raise _refused(found.directory, error) from error
    return found


def _carry_out(found: Plan, aside: Path) -> None:
    owner = found.directory.stat()
    _make_aside(aside, owner)
    _write(aside / _LIST, json.dumps(_listed(found), indent=2) + "\n", like=owner)
    for tracker in found.retargets:
        _retarget(found.directory, tracker, aside)
    replaced = {tracker.name for tracker in found.retargets if tracker.is_copy}
    for move in found.moves:
        for name in move.names:
            if name not in replaced:
                (found.directory / name).rename(aside / name)
    for each in (aside, aside.parent, found.directory):
        sync_directory(each)


def _make_aside(aside: Path, owner: os.stat_result) -> None:
    """The directory, and those above it that are missing, for whoever owns the checkpoints: root
    may do this for them. Whoever put a link there would have it made somewhere else.
    """
    wanted = [aside]
    while ASIDE in (wanted[0].parent.name, wanted[0].parent.parent.name):
        wanted.insert(0, wanted[0].parent)
    for directory in wanted:
        if directory.is_symlink():
            raise NotPermittedError(
                f"{directory} is a symbolic link", next_step="remove it, or rename it"
            )
        if directory != aside and directory.is_dir():
            continue
        directory.mkdir()
        _own_like(directory, owner)
        directory.chmod(stat.S_IMODE(owner.st_mode))


def _own_like(path: Path, like: os.stat_result) -> None:
    if os.geteuid() == 0:
        os.chown(path, like.st_uid, like.st_gid, follow_symlinks=False)


def _listed(found: Plan) -> dict[str, object]:
    return {
        "schema": "cxlfs.aside/1",
        "moves": [
            {"names": list(m.names), "state": m.state.value, "reason": m.reason}
            for m in found.moves
        ],
        "trackers": [
            {"name": t.name, "new": t.new, "is_link": t.is_link, "is_copy": t.is_copy}
            for t in found.retargets
        ],
    }


def _retarget(directory: Path, tracker: Retargeted, aside: Path) -> None:
    """The old one is copied aside, then replaced in one step: it is never missing."""
    path, new = directory / tracker.name, aside / f"{tracker.name}.new"
    before = path.lstat()
    if tracker.is_link:
        (aside / tracker.name).symlink_to(path.readlink())
        new.symlink_to(tracker.new)
        _own_like(aside / tracker.name, before)
    elif tracker.is_copy:
        shutil.copyfile(directory / tracker.new, new)
        new.chmod(stat.S_IMODE(before.st_mode))
        (aside / tracker.name).hardlink_to(path)
    else:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
        _write(aside / tracker.name, text, like=before)
        _write(new, tracker.new, like=before)
        new.chmod(stat.S_IMODE(before.st_mode))
    _own_like(new, before)
    new.replace(path)


def _write(path: Path, text: str, *, like: os.stat_result) -> None:
    """``like``: its owner, as far as this user may say so."""
    with path.open("x", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _own_like(path, like)


def _refuse_writers(found: Plan) -> None:
    """One look at all processes, however much is moved: it takes 0.1 ms for each that there is."""
    directory = os.path.realpath(found.directory)
    wanted = {f"{directory}/{name}" for move in found.moves for name in move.names}
    for writer in writers_in(found.directory) if wanted else ():
        first, _, _ = writer.path.removeprefix(f"{directory}/").partition("/")
        if f"{directory}/{first}" in wanted:
            raise BusyError(
                f"{writer.path} is being written by process {writer.pid} ({writer.name})",
                next_step="wait until it has ended; tidy before a job, not beside it",
            )


def _refused(directory: Path, error: OSError) -> Exception:
    if error.errno in _READ_ONLY_ERRNOS:
        return ReadOnlyError(
            f"nothing can be set aside in {directory}: {error.strerror}",
            next_step="run it as who may write there",
        )
    return error


# --- taking it back -------------------------------------------------------------------------


def undo(directory: str | Path, *, dry_run: bool = False) -> Plan:
    """Put back what was set aside last: checkpoints, and what trackers held.

    A checkpoint whose name is taken again stays aside. Raises NotFoundError: nothing is aside.
    """
    place = Place(Path(directory))
    aside = _last_aside(place.path)
    moves, retargets = _read_list(place.path, aside)
    copies = {tracker.name for tracker in retargets if tracker.is_copy}
    back = [m for m in moves if copies.issuperset(m.names) or _can_come_back(place.path, aside, m)]
    done = Plan(place.path, None, tuple(back), tuple(retargets), aside)
    if dry_run:
        return done
    try:
        for move in back:
            for name in move.names:
                if name not in copies and (aside / name).exists():
                    (aside / name).rename(place.path / name)
        for tracker in retargets:
            if os.path.lexists(aside / tracker.name):
                (aside / tracker.name).replace(place.path / tracker.name)
        if len(back) == len(moves):
            _remove_empty(aside)
        sync_directory(place.path)
    except OSError as error:
        raise _refused(place.path, error) from error
    return done


def _remove_empty(aside: Path) -> None:
    """Nothing but the list is left in it, or it stays."""
    if [each.name for each in aside.iterdir()] == [_LIST]:
        (aside / _LIST).unlink()
        aside.rmdir()
    base = aside.parent
    while ASIDE in (base.name, base.parent.name):
        if any(base.iterdir()):
            break
        base.rmdir()
        base = base.parent


def _can_come_back(directory: Path, aside: Path, move: Moved) -> bool:
    return not any(
        os.path.lexists(directory / name) for name in move.names if os.path.lexists(aside / name)
    )


def _last_aside(directory: Path) -> Path:
    bases = (_base_inside(directory), _base_beside(directory))
    found = [each for base in bases for each in base.glob("*") if (each / _LIST).is_file()]
    if not found:
        raise NotFoundError(
            f"nothing is set aside of {directory}", next_step=f"look into {bases[0]}"
        )
    return max(found, key=lambda each: each.name)


def _read_list(directory: Path, aside: Path) -> tuple[list[Moved], list[Retargeted]]:
    try:
        with Place(aside).open(_LIST) as reader:
            data = checked(parse_json(reader.head(1 << 20), _LIST), _List, _LIST)
        moves = [_read_move(directory, each) for each in data.moves]
        trackers = [
            Retargeted(_plain(each.name), None, each.new, each.is_link, each.is_copy)
            for each in data.trackers
        ]
    except ProblemError as error:
        raise NotFoundError(
            f"{aside / _LIST} cannot be read: {error}", next_step=f"move back what is in {aside}"
        ) from error
    return moves, trackers


def _read_move(directory: Path, found: _ListedMove) -> Moved:
    names = tuple(map(_plain, found.names))
    state = next((each for each in State if each.value == found.state), State.UNKNOWN)
    return Moved(str(directory / names[0]) if names else "", names, state, found.reason)


def _plain(name: str) -> str:
    """A name in the directory, and nothing that leads out of it."""
    if "/" in name or name in ("", ".", "..") or "\0" in name:
        raise ProblemError("a name in it leads elsewhere")
    return name
