"""The directory that an Orbax job with multi-tier checkpoints saves to, as its agent sees it.

    replicator.yaml                 the job asks; gone: it was answered
    run1-s20-n0-w0.restore          the answer: a link to the step, which the job gives its number;
                                    an empty one of step 0: there is nothing
    replicator.failed               why there is no answer: the job ends
    jax-init-info.txt               the number of the job's process here, and who coordinates
    20/                             a step that the job has finished, or the link to it
    .cxlfs-agent/                   the agent's own (``KEPT``):
        job.json                    who saves here: job, rank, interval
        step-000000000020.000003-…/ what was agreed on, as ``job.files`` has it: links to the files
        given/20/                   what the job was given: the same files once more
        aside/                      what it saved behind the step that it was given

Never: which step is given (``orbax``), who has which copy (``keeper``).

Invariants
- Files are linked and not copied: what Orbax has finished it never changes.
- Nothing that is whole on all nodes goes before something newer is: what was behind the step that
  was given waits in ``aside`` for that.
- An answer is there before its question goes; what a former start was given goes before that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

from cxlfs.checkpoint import Level, State, inspect
from cxlfs.durable import opened_file, write_durably
from cxlfs.errors import JobFilesError
from cxlfs.job.files import MANIFEST_NAME
from cxlfs.plain import Plain, PlainError, fields, number, parse, text

KEPT = ".cxlfs-agent"
REQUEST = "replicator.yaml"
FAILED = "replicator.failed"
ERRORS = "replicator.errors"
INITIAL = "jax-init-info.txt"
STEP_MAX = 10**18
_RESTORE = "*.restore"
_JOB = "job.json"
_GIVEN, _ASIDE, _GOING = "given", "aside", "going"
_REQUEST_BYTES_MAX = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", re.ASCII)
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_STEP = re.compile(r"0|[1-9]\d{0,17}", re.ASCII)
_INTERVALS = {"backup-interval-minutes": "minutes", "backup-interval-steps": "steps"}


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What a job says of itself. ``interval`` in ``unit``: ``minutes`` or ``steps``."""

    job: str
    rank: int
    nodes: int
    unit: str
    interval: int


def request_of(plain: Plain) -> Request:
    """As it was told or kept. Raises PlainError."""
    found = fields(plain, ("job", "rank", "nodes", "unit", "interval"))
    unit = text(found["unit"])
    if unit not in _INTERVALS.values():
        raise PlainError("an interval of neither minutes nor steps")
    return Request(
        text(found["job"]),
        number(found["rank"]),
        number(found["nodes"]),
        unit,
        number(found["interval"]),
    )


def read_request(data: bytes) -> Request:
    """Of ``replicator.yaml``: a key and a value in each line. Raises JobFilesError."""
    pairs: dict[str, str] = {}
    for line in data.decode("utf-8", "replace").splitlines():
        key, _, value = line.partition(":")
        pairs[key.strip()] = value.strip()
    job, unit = pairs.get("job-name", ""), [name for name in _INTERVALS if name in pairs]
    words = [pairs.get(key, "") for key in ("node-rank", "nodes", *unit)]
    rank, nodes, interval = (int(w) if _NUMBER.fullmatch(w) else -1 for w in (*words, "")[:3])
    is_named = pairs.get("framework") == "orbax" and _NAME.fullmatch(job) is not None
    if not is_named or len(unit) != 1 or not 0 <= rank < nodes or interval < 1:
        raise JobFilesError(
            f"{REQUEST} is not a request of Orbax that is known",
            next_step="see docs/job.md for the version that was tried",
        )
    return Request(job, rank, nodes, _INTERVALS[unit[0]], interval)


class OrbaxDirectory:
    """``rank``: of this node's agent. Raises OSError, as all methods do."""

    def __init__(self, root: Path, rank: int) -> None:
        self.root = root
        self.kept = root / KEPT
        self._rank = rank
        self._whole: dict[int, tuple[int, int]] = {}
        self.kept.mkdir(parents=True, exist_ok=True)
        self._remove(self.kept / _GOING)

    # --- what the job says ------------------------------------------------------------------

    def request(self) -> Request | None:
        """What it asks now. Raises JobFilesError."""
        try:
            with opened_file(self.root / REQUEST, JobFilesError) as (descriptor, _):
                data = os.pread(descriptor, _REQUEST_BYTES_MAX, 0)
        except FileNotFoundError:
            return None
        return read_request(data)

    def saver(self) -> Request | None:
        """Who saves here: the last that was answered. Raises JobFilesError."""
        path = self.kept / _JOB
        try:
            return request_of(parse(path.read_bytes()[: _REQUEST_BYTES_MAX + 1], 1 << 20))
        except FileNotFoundError:
            return None
        except PlainError as error:
            raise JobFilesError(f"{path}: {error}") from None

    def steps(self) -> list[int]:
        """Those that are whole as far as names, sizes and headers say, newest first; none that
        another rank has saved: a node that has another number now.
        """
        saver = self.saver()
        if saver is not None and saver.rank != self._rank:
            return []
        return sorted((step for step in self._finished() if self._is_whole(step)), reverse=True)

    def has_any(self) -> bool:
        return bool(self._finished())

    def _finished(self) -> list[int]:
        """Directories, and no links: what was given is agreed on already."""
        with os.scandir(self.root) as entries:
            return [
                int(entry.name)
                for entry in entries
                if _STEP.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]

    def _is_whole(self, step: int) -> bool:
        """What was whole is not looked at again, as long as it is the same directory."""
        path = self.root / str(step)
        try:
            found = path.stat()
        except FileNotFoundError:  # the job has removed it
            return False
        seen = found.st_ino, found.st_mtime_ns
        if self._whole.get(step) == seen:
            return True
        checkpoint = inspect(path)
        if checkpoint is None or checkpoint.state is not State.COMPLETE:
            return False
        self._whole[step] = seen
        return True

    # --- keeping ----------------------------------------------------------------------------

    def link(self, step: int, into: Path) -> None:
        """Every byte of it was read, and each checksum that it has compared; then its files are
        linked. Raises JobFilesError.
        """
        path = self.root / str(step)
        found = inspect(path, Level.CONTENT)
        if found is None or found.state is not State.COMPLETE:
            words = "not a checkpoint that is known" if found is None else found.words
            raise JobFilesError(f"{path}: {words}")
        _link_tree(path, into)

    def forget_aside(self) -> None:
        """Something newer is agreed on."""
        self._remove(self.kept / _ASIDE)

    def remove_before(self, step: int) -> None:
        """What the job has finished before it, and links to what it was given."""
        for entry in [*os.scandir(self.root)]:
            if not _STEP.fullmatch(entry.name) or int(entry.name) >= step:
                continue
            path = Path(entry.path)
            if entry.is_symlink():
                path.unlink(missing_ok=True)
                self._remove(self.kept / _GIVEN / entry.name)
            else:
                self._remove(path)
            self._whole.pop(int(entry.name), None)

    def _remove(self, path: Path) -> None:
        """Under another name first: half of it is never taken for all of it."""
        going = self.kept / _GOING
        if path != going:
            self._remove(going)
            with contextlib.suppress(FileNotFoundError):
                path.rename(going)
        if going.exists():
            shutil.rmtree(going)

    # --- answering --------------------------------------------------------------------------

    def forget_introduction(self) -> None:
        """Of a former start: the job waits for the agents of all nodes."""
        (self.root / INITIAL).unlink(missing_ok=True)

    def introduce(self, coordinator: str) -> None:
        """The job's process here gets this node's number."""
        write_durably(self.root / INITIAL, f"{self._rank}\n{coordinator}\n".encode())

    def answer(self, request: Request, step: int | None, shards: Path | None) -> None:
        """``shards``: the files of the step; None, and no step: there is nothing."""
        plain = json.dumps(dataclasses.asdict(request)).encode()
        write_durably(self.kept / _JOB, plain)
        self._forget_answers()
        name = f"{request.job}-s{step or 0}-n{request.rank}-w0.restore"
        if step is None or shards is None:
            (self.root / name).touch()
        else:
            self._set_aside(step)
            given = self.kept / _GIVEN / str(step)
            self._remove(given)
            given.mkdir(parents=True)
            _link_tree(shards, given, leave=MANIFEST_NAME)
            target = given.relative_to(self.root)
            if step:
                (self.root / name).symlink_to(target)
            else:  # an answer of step 0 means nothing: the job finds it by itself
                (self.root / "0").symlink_to(target)
                (self.root / name).touch()
        (self.root / REQUEST).unlink(missing_ok=True)

    def refuse(self, reason: str) -> bool:
        """The job ends with that; whether it had asked."""
        if not (self.root / REQUEST).exists():
            return False
        self._forget_answers()
        write_durably(self.root / FAILED, f"{reason}\n".encode())
        (self.root / REQUEST).unlink(missing_ok=True)
        return True

    def _forget_answers(self) -> None:
        """Of former starts."""
        for path in (*self.root.glob(_RESTORE), self.root / FAILED, self.root / ERRORS):
            path.unlink(missing_ok=True)

    def _set_aside(self, step: int) -> None:
        """Out of the job's sight, which goes on from there: that step, and what is behind it."""
        aside = self.kept / _ASIDE
        aside.mkdir(exist_ok=True)
        for later in [each for each in self._finished() if each >= step]:
            self._remove(aside / str(later))
            (self.root / str(later)).rename(aside / str(later))
            self._whole.pop(later, None)
        for entry in [*os.scandir(self.root)]:
            if _STEP.fullmatch(entry.name) and entry.is_symlink() and int(entry.name) >= step:
                Path(entry.path).unlink(missing_ok=True)
                self._remove(self.kept / _GIVEN / entry.name)


def _link_tree(source: Path, into: Path, *, leave: str = "") -> None:
    """``leave``: a name in ``source`` itself. Raises JobFilesError, OSError."""
    with os.scandir(source) as entries:
        for entry in entries:
            target = into / entry.name
            if entry.name == leave:
                continue
            if entry.is_dir(follow_symlinks=False):
                target.mkdir()
                _link_tree(Path(entry.path), target)
            elif entry.is_file(follow_symlinks=False):
                os.link(entry.path, target, follow_symlinks=False)
            else:
                raise JobFilesError(f"{entry.path}: neither a file nor a directory")
