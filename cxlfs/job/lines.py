"""Records of lines in a directory of checkpoints, who owns it, and what an operator is asked.

    .cxlfs-job/lines/LINE.json      one start of the job: see ``protocol.Line``
    .cxlfs-job/owner.json           the line that may vote here, and the process that recorded it
    .cxlfs-job/question.json        what the last start could not decide
    .cxlfs-job/decision.json        what an operator answered

Never: decides anything (``protocol.lineage``); removes a record of a line.

Invariants
- A record is written once, durable before any vote of its line, and has a checksum of it all.
- What is read may come from anywhere: sizes and fields are checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from cxlfs.durable import opened_file, sync_directory, write_durably
from cxlfs.errors import JobFilesError
from cxlfs.job.protocol import Attempt, Decision, Line
from cxlfs.job.protocol.messages import attempt_of, decision_of, line_of
from cxlfs.native import crc32c
from cxlfs.plain import Plain, PlainError, constant, fields, number, parse, row, text

log = logging.getLogger(__name__)

DIRECTORY_NAME = ".cxlfs-job"
LINES_NAME = "lines"
OWNER_NAME = "owner.json"
QUESTION_NAME = "question.json"
DECISION_NAME = "decision.json"
FORMAT = 1
_BYTES_MAX = 64 << 20
_LINE = re.compile(r"([0-9a-f]{20})\.json", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class Owner:
    """``line``: that may vote here. ``host``, ``process``: who recorded that; ``since``: when, in
    seconds since 1970.
    """

    job: str
    line: str
    host: str
    process: int
    since: int

    def __str__(self) -> str:
        return f"line {self.line} of job {self.job} (process {self.process} on {self.host})"


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """See ``protocol.Asked``. ``asked``: when, in seconds since 1970."""

    heads: tuple[Attempt, ...]
    loadable: tuple[Attempt, ...]
    reasons: tuple[str, ...]
    asked: int


# --- records ------------------------------------------------------------------------------------


def lines_in(root: Path) -> tuple[tuple[Line, ...], tuple[str, ...]]:
    """The records that are there, and the ids of those that are damaged. Raises OSError."""
    found, torn = [], []
    for name in sorted(_names(root / DIRECTORY_NAME / LINES_NAME)):
        named = _LINE.fullmatch(name)
        if named is None:
            continue
        try:
            found.append(_line(root / DIRECTORY_NAME / LINES_NAME / name, named[1]))
        except JobFilesError as error:
            log.warning("%s: %s", root, error)
            torn.append(named[1])
    return tuple(found), tuple(torn)


def keep(root: Path, lines: Iterable[Line]) -> None:
    """Their records, durable. What is there and whole stays as it is. Raises OSError."""
    there = {line.id for line in lines_in(root)[0]}
    for line in lines:
        if line.id not in there:
            plain = dataclasses.asdict(line)
            _write(root, f"{LINES_NAME}/{line.id}.json", {"line": plain})


def _line(path: Path, name: str) -> Line:
    try:
        line = line_of(_read(path, "line"))
    except PlainError as error:
        raise JobFilesError(f"{path}: {error}") from None
    if line.id != name:
        raise JobFilesError(f"{path}: it is of line {line.id}")
    return line


# --- the owner ----------------------------------------------------------------------------------


def own(root: Path, line: Line) -> None:
    """From now on no other line may vote here. What was asked is answered. Raises OSError."""
    owner = Owner(line.job, line.id, os.uname().nodename, os.getpid(), int(time.time()))
    _write(root, OWNER_NAME, {"owner": dataclasses.asdict(owner)})
    for name in (QUESTION_NAME, DECISION_NAME):
        (root / DIRECTORY_NAME / name).unlink(missing_ok=True)


def owner_of(root: Path) -> Owner | None:
    """Raises JobFilesError, OSError."""
    path = root / DIRECTORY_NAME / OWNER_NAME
    names = ("job", "line", "host", "process", "since")
    with contextlib.suppress(FileNotFoundError):
        try:
            found = fields(_read(path, "owner"), names)
            texts = text(found["job"]), text(found["line"]), text(found["host"])
            return Owner(*texts, number(found["process"]), number(found["since"]))
        except PlainError as error:
            raise JobFilesError(f"{path}: {error}") from None
    return None


def require_owner(root: Path, line: str) -> None:
    """Raises JobFilesError (another line owns the directory), OSError."""
    owner = owner_of(root)
    if owner is None or owner.line != line:
        raise JobFilesError(
            f"{root} is no longer of line {line}: {owner or 'nobody'} owns it",
            next_step="end this start of the job: a newer one runs",
        )


# --- questions and decisions --------------------------------------------------------------------


def ask(root: Path, question: Question) -> None:
    """Raises OSError."""
    _write(root, QUESTION_NAME, {"question": dataclasses.asdict(question)})


def question_in(root: Path) -> Question | None:
    """Raises JobFilesError, OSError."""
    path = root / DIRECTORY_NAME / QUESTION_NAME
    with contextlib.suppress(FileNotFoundError):
        try:
            found = fields(_read(path, "question"), ("heads", "loadable", "reasons", "asked"))
            rows = row(found["heads"], attempt_of), row(found["loadable"], attempt_of)
            return Question(*rows, row(found["reasons"], text), number(found["asked"]))
        except PlainError as error:
            raise JobFilesError(f"{path}: {error}") from None
    return None


def decide(root: Path, decision: Decision) -> None:
    """For the next start. Raises OSError."""
    _write(root, DECISION_NAME, {"decision": dataclasses.asdict(decision)})


def decision_in(root: Path) -> Decision | None:
    """Raises JobFilesError, OSError."""
    path = root / DIRECTORY_NAME / DECISION_NAME
    with contextlib.suppress(FileNotFoundError):
        try:
            return decision_of(_read(path, "decision"))
        except PlainError as error:
            raise JobFilesError(f"{path}: {error}") from None
    return None


# --- form ---------------------------------------------------------------------------------------


def _write(root: Path, name: str, body: dict[str, object]) -> None:
    path = root / DIRECTORY_NAME / name
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        sync_directory(path.parent.parent)
        sync_directory(root)
    plain = {"format": FORMAT, **body}
    write_durably(path, json.dumps({**plain, "crc32c": _sum_of(plain)}).encode())


def _sum_of(plain: object) -> int:
    return crc32c(json.dumps(plain, sort_keys=True).encode())


def _read(path: Path, name: str) -> Plain:
    """What it says of ``name``. Raises PlainError, JobFilesError (no file), OSError."""
    with opened_file(path, JobFilesError) as (descriptor, size_bytes):
        if size_bytes > _BYTES_MAX:
            raise PlainError(f"larger than {_BYTES_MAX} bytes")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            data = file.read(_BYTES_MAX + 1)
    found = fields(parse(data, _BYTES_MAX), ("format", name, "crc32c"))
    constant(found["format"], FORMAT)
    if found["crc32c"] != _sum_of({"format": FORMAT, name: found[name]}):
        raise PlainError("damaged")
    return found[name]


def _names(directory: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return [entry.name for entry in directory.iterdir()]
    return []
