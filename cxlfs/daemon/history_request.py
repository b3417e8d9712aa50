"""The control requests about history: what a name meant before, and bringing it back.

``history``: ``path``. The answer: one ``version`` for each version of the name, and for a directory
of each name that was removed from it, the oldest death first.
``restore``: ``path``, ``at`` (a commit number, a time in ns, or null: the newest version that
history has) and ``to`` (a path, or null: the same); a directory with everything below it.
``undelete``: ``path``; a directory with what was removed with it. ``forget``: ``path``; what
history has of it and of everything below it. Each answers with one ``done``: ``path`` and ``count``
(and of a restored file ``state``, ``size_bytes``; ``forget``: ``pins`` that hold some of it). Of a
directory ``progress`` comes meanwhile.

Other modules keep history (``store.past``) and bring it back (``store.past_restore``,
``store.past_trees``), and know who asks (``callers``).

Invariants
- A user sees and gets back what was his, and writes only where the mount would let him. What
  another user has, or had, is neither shown nor brought back nor replaced.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping

from cxlfs.daemon.callers import MANAGER, READ, Caller
from cxlfs.daemon.control_server import Message
from cxlfs.errors import ExistsError, NotFoundError, UsageError
from cxlfs.format import layout
from cxlfs.store import Store
from cxlfs.store.attributes import content_state
from cxlfs.store.hidden import require_shown
from cxlfs.store.namespace import FileKind, Inode
from cxlfs.store.past_rows import LAST_NAMES, NEVER, Row
from cxlfs.store.past_state import SHOWN_NS, TIME_NS_MIN, PastState
from cxlfs.types import ROOT_INO

_TURNS_MAX = 500
"""Of others, that the kernel has to forget names."""
_PROGRESS_EVERY = 100
_LOOKS_PER_STEP = 64


def history(
    store: Store, parameters: Mapping[str, object], caller: Caller = MANAGER
) -> Iterator[Message]:
    """See the module. Raises UsageError, NotFoundError, NotPermittedError."""
    path = _text(parameters, "path")
    caller.require_reach(store, path, READ)
    inode, rows = _versions(store, path, caller)
    found = [(path, row) for row in rows]
    if inode is not None and inode.entries is not None:
        base = path.rstrip(b"/") + b"/"
        removed = (row for row in store.past.died_in(inode.ino) if row.death in LAST_NAMES)
        found += [(base + row.name, row) for row in removed]
    for each, row in sorted(found, key=lambda item: item[1].key):
        if not caller.owns(row):
            continue
        yield {
            "message_type": "version",
            "path": os.fsdecode(each),
            "kind": row.kind.name.lower(),
            "size_bytes": row.size,
            "commit": row.born_lsn,
            "commit_time_ns": row.born_ns or row.birth_ns,
            "ended_commit": row.died_lsn,
            "ended_time_ns": row.died_ns,
            "how": layout.DEATHS[row.death],
            "state": "incomplete" if row.is_incomplete else "complete",
            "uid": row.uid,
            "stored": row.archived is not None,
        }


def restore(
    store: Store, parameters: Mapping[str, object], caller: Caller = MANAGER
) -> Iterator[Message]:
    """See the module. Raises UsageError, NotFoundError, NotPermittedError, ExistsError, BusyError,
    StaleError, NoSpaceError.
    """
    path = _text(parameters, "path")
    to = parameters.get("to")
    target = path if to is None else os.fsencode(str(to))
    above, _, name = target.rstrip(b"/").rpartition(b"/")
    caller.require_reach(store, path)
    caller.require_reach(store, above)
    directory = _live(store, above)
    parent = directory.ino
    if not name:
        raise UsageError(
            "the top of the mount stays as it is",
            next_step="name a directory below it, or another one with --to",
        )
    at = parameters.get("at")
    if at is not None and not isinstance(at, int):
        raise UsageError("history: at must be a number")
    there = store.namespace.find(parent, name)
    caller.require_writable(directory, target, there)
    steps = _restored_tree(store, path, at, parent, name, caller)
    if steps is not None:
        yield from _progress(store, target, itertools.chain(_owned(there, store, caller), steps))
        return
    row = _chosen(store, path, at, caller)
    caller.require_owned(row, path)
    inode = store.history.restore(row, parent, name)
    yield {
        "message_type": "done",
        "path": os.fsdecode(target),
        "count": 1,
        "state": content_state(inode),
        "size_bytes": inode.attributes().size,
    }


def _restored_tree(
    store: Store, path: bytes, at: int | None, parent: int, name: bytes, caller: Caller
) -> Iterator[int] | None:
    """The steps that bring a directory back; None: the path was none."""
    if at is None:
        rows = [row for row in _versions(store, path, caller)[1] if row.death in LAST_NAMES]
        if not rows or rows[-1].kind is not FileKind.DIRECTORY:
            return None
        _require_tree(store, rows[-1], path, caller)
        return store.trees.bring_back(rows[-1], parent, name)
    with contextlib.suppress(NotFoundError):
        state = store.state_at(store.moments.commit(at))
        ino = state.follow(filter(None, path.split(b"/")))
        fact = None if ino is None else state.fact(ino)
        if ino is not None and fact is not None and fact.kind is FileKind.DIRECTORY:
            checked = _owned_then(state, ino, path, caller)
            return itertools.chain(checked, store.trees.restore(path, state, parent, name))
    return None


def _require_tree(store: Store, top: Row, path: bytes, caller: Caller) -> None:
    """A directory that is gone, and all that died in it, are the caller's."""
    if not caller.manages:
        for row in (top, *store.trees.died_below(top.ino)):
            caller.require_owned(row, path)


def _owned(top: Inode | None, store: Store, caller: Caller) -> Iterator[int]:
    """All that is there is the caller's: it may be replaced. Steps of a progress."""
    if top is None or top.entries is None or caller.manages:
        return
    for count, inode in enumerate(store.namespace.walk(top.ino)):
        caller.require_owned(inode, store.path_of(inode.ino) or inode.name)
        if count % _LOOKS_PER_STEP == 0:
            yield 0


def _owned_then(state: PastState, top: int, path: bytes, caller: Caller) -> Iterator[int]:
    """All that was there is the caller's. Steps of a progress."""
    pending = [] if caller.manages else [top]
    while pending:
        ino = pending.pop()
        fact = state.fact(ino)
        if fact is not None:
            caller.require_owned(fact, path)
        if fact is not None and fact.kind is FileKind.DIRECTORY:
            pending += state.names(ino).values()
        yield 0


def _progress(store: Store, path: bytes, steps: Iterator[int]) -> Iterator[Message]:
    count = 0
    for step, made in enumerate(steps):
        count = max(count, made)
        if step % _PROGRESS_EVERY == 0:
            yield {"message_type": "progress", "count": count}
    for _ in range(_TURNS_MAX):  # who asks next by the path is to find what is there now
        if not store.history.is_telling():
            break
        yield {"message_type": "progress", "count": count}
    yield {"message_type": "done", "path": os.fsdecode(path), "count": count}


def undelete(
    store: Store, parameters: Mapping[str, object], caller: Caller = MANAGER
) -> Iterator[Message]:
    """See the module. Raises as :func:`restore`."""
    path = _text(parameters, "path")
    caller.require_reach(store, path)
    inode, rows = _versions(store, path, caller)
    gone = [row for row in rows if row.death in LAST_NAMES]
    if inode is not None:
        raise ExistsError(
            f"{os.fsdecode(path)} is there",
            next_step="replace it with the one that was removed: cxlfs restore"
            if gone
            else "see its earlier versions with cxlfs history",
        )
    if not gone:
        raise NotFoundError(f"history has nothing of {os.fsdecode(path)}")
    _require_place(store, path, gone[-1], caller)
    if gone[-1].kind is FileKind.DIRECTORY:
        _require_tree(store, gone[-1], path, caller)
        yield from _progress(store, path, store.trees.undelete(gone[-1]))
        return
    store.history.undelete(gone[-1])
    yield {"message_type": "done", "path": os.fsdecode(path), "count": 1}


def _require_place(store: Store, path: bytes, row: Row, caller: Caller) -> None:
    """Something that is gone may come back where it was. Directories above that are gone come back
    with it.
    """
    caller.require_owned(row, path)
    while not caller.manages:
        above = store.namespace.inodes.get(row.parent)
        if above is not None and above.entries is not None and above.links:
            caller.require_writable(above, path, None)
            return
        gone = [each for each in store.past.of_inode(row.parent) if each.death in LAST_NAMES]
        if not gone:
            return  # which is found out below
        row = gone[-1]
        caller.require_owned(row, path)


def forget(
    store: Store, parameters: Mapping[str, object], caller: Caller = MANAGER
) -> Iterator[Message]:
    """See the module. Raises UsageError, NotFoundError, NotPermittedError."""
    path = _text(parameters, "path")
    caller.require_reach(store, path)
    inode, rows = _versions(store, path, caller)
    wanted = {row.key: row for row in rows}
    tops = {row.ino for row in rows if row.kind is FileKind.DIRECTORY}
    living = [] if inode is None else list(store.namespace.walk(inode.ino))
    tops |= {each.ino for each in living if each.entries is not None}
    for top in tops:
        wanted |= {row.key: row for row in store.trees.died_below(top)}
    wanted = {key: row for key, row in wanted.items() if caller.owns(row)}
    living = [each for each in living if caller.owns(each)]
    count = len(wanted)
    births = {row.birth_ns for row in wanted.values()} | {each.birth_ns for each in living}
    pins = [pin for pin in store.pins.holding([path], births) if caller.owns(pin)]
    if wanted:
        store.history.forget(wanted.values())
    tops &= {each.ino for each in living} | {row.ino for row in wanted.values()}
    store.past.name_ends.forget({row.ino for row in wanted.values()} | tops)
    if inode in living and inode.aside is not None and not store.read_only:
        store.versions.drop_aside(inode)
        count += 1
        store.history.forget(row for row in store.past.of_inode(inode.ino) if caller.owns(row))
    if inode is None and not count and not pins:
        raise NotFoundError(
            f"history has nothing of {os.fsdecode(path)}",
            next_step="name it as it is called now, if it was renamed or linked",
        )
    yield {
        "message_type": "done",
        "path": os.fsdecode(path),
        "count": count,
        "pins": [{"name": os.fsdecode(pin.name), "uid": pin.uid} for pin in pins],
    }


def _text(parameters: Mapping[str, object], key: str) -> bytes:
    value = parameters.get(key)
    if not isinstance(value, str):
        raise UsageError(f"history: {key} must be text")
    return os.fsencode(value)


def _live(store: Store, path: bytes) -> Inode:
    """A directory that is there. Raises NotFoundError."""
    inode = store.namespace.get(ROOT_INO)
    for part in filter(None, path.split(b"/")):
        require_shown(inode.ino, part)
        found = store.namespace.find(inode.ino, part)
        if found is None:
            raise NotFoundError(f"no such path: {os.fsdecode(path)}")
        inode = found
    return store.namespace.directory(inode.ino)


def _versions(store: Store, path: bytes, caller: Caller) -> tuple[Inode | None, list[Row]]:
    """What the path means now, and what it meant before, in the order of death. Directories above
    it may be gone: then it is what the last of them held. Raises NotFoundError.
    """
    parts = [part for part in path.split(b"/") if part]
    if not parts:
        return store.namespace.get(ROOT_INO), []
    require_shown(ROOT_INO, parts[0])
    directory: int = ROOT_INO
    for part in parts[:-1]:
        directory = _directory_in(store, directory, part, path)
    above = store.namespace.inodes.get(directory)
    is_there = above is not None and above.entries is not None and above.links
    inode = store.namespace.find(directory, parts[-1]) if is_there else None
    rows = {row.key: row for row in store.past.versions_of(directory, parts[-1])}
    if inode is not None:  # also what it was under other names
        rows |= {row.key: row for row in store.past.of_inode(inode.ino)}
    return inode, [rows[key] for key in sorted(rows) if caller.owns(rows[key])]


def _directory_in(store: Store, directory: int, name: bytes, path: bytes) -> int:
    above = store.namespace.inodes.get(directory)
    if above is not None and above.entries is not None and name in above.entries:
        return above.entries[name]
    rows = store.past.versions_of(directory, name)
    gone = [row for row in rows if row.kind is FileKind.DIRECTORY]
    if not gone:
        raise NotFoundError(f"no such path, and history has none: {os.fsdecode(path)}")
    return gone[-1].ino


def _chosen(store: Store, path: bytes, at: int | None, caller: Caller) -> Row:
    """The version that was there at a commit or a time; without one the newest that was his."""
    row = _newest(store, path, caller) if at is None else _row_at(store, path, at, caller)
    if row is None:
        when = "" if at is None else " of that time"
        raise NotFoundError(
            f"history has no version{when}: {os.fsdecode(path)}",
            next_step="run cxlfs history PATH to see what there is",
        )
    return row


def _newest(store: Store, path: bytes, caller: Caller) -> Row | None:
    _, rows = _versions(store, path, caller)
    return rows[-1] if rows else None


def _row_at(store: Store, path: bytes, at: int, caller: Caller) -> Row | None:
    """The version that has that number or time itself; else what the path had then."""
    with contextlib.suppress(NotFoundError):
        for row in reversed(_versions(store, path, caller)[1]):
            if _is_named(row, at):
                return row
    try:
        commit = store.moments.commit(at)
    except NotFoundError:
        return None
    state = store.state_at(commit)
    ino = state.follow(filter(None, path.split(b"/")))
    if ino is None:
        return _only_row_at(store, path, commit)
    fact = state.fact(ino)
    return fact.source if fact is not None and isinstance(fact.source, Row) else None


def _is_named(row: Row, at: int) -> bool:
    """The number, or the time as it is shown, is that of the commit of a version."""
    is_time = at >= TIME_NS_MIN
    return row.born_ns // SHOWN_NS * SHOWN_NS == at if is_time else row.born_lsn == at


def _only_row_at(store: Store, path: bytes, commit: int) -> Row | None:
    """Which file the path meant then is not known. What the one file had then that it may have
    been, in any directory that the path may have led to. None: it may have been several.
    """
    *above, name = filter(None, path.split(b"/"))
    require_shown(ROOT_INO, [*above, name][0])
    directories: set[int] = {ROOT_INO}
    for part in above:
        directories = {ino for each in directories for ino in _maybe(store, each, part, commit)}
    files = {ino for each in directories for ino in _maybe(store, each, name, commit)}
    there: list[Row] = []
    for ino in list(files):
        rows, living = store.past.of_inode(ino), store.namespace.inodes.get(ino)
        births = [row.born_lsn for row in rows]
        births += [] if living is None or living.is_removed else [living.commit_lsn]
        if min(births, default=NEVER) > commit:
            files.discard(ino)
        there += [row for row in rows if row.was_there(commit)]
    return there[-1] if there and files == {there[-1].ino} else None


def _maybe(store: Store, directory: int, name: bytes, commit: int) -> set[int]:
    """What a name in a directory may have meant: all that ever had it and did not end before. What
    may have lost it before, got it later, or got another one later counts only beside others.
    """
    since: dict[int, int] = {}
    for row in store.past.versions_of(directory, name):
        if row.death not in LAST_NAMES:
            since[row.ino] = 0 if row.died_lsn > commit else NEVER
        elif row.died_lsn > commit:
            since[row.ino] = row.named_lsn if row.named_lsn != NEVER else 0
        else:
            since.pop(row.ino, None)
    for end in store.past.name_ends.of_directory(directory):
        if end.name == name and end.until > commit:
            since[end.ino] = end.since
    above = store.namespace.inodes.get(directory)
    ino = None if above is None else (above.entries or {}).get(name)
    if ino is not None:
        since[ino] = store.namespace.get(ino).named_lsn
    are_later = min(since.values(), default=NEVER) > commit
    return set() if are_later else set(since)


HANDLERS = {"history": history, "restore": restore, "undelete": undelete, "forget": forget}
