"""``cxlfs list``: the checkpoints in a store, with the commit that made each what it is.

Never here: what counts as a checkpoint (``store`` for files, ``checkpoint`` for formats).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import OK, epilog
from cxlfs.cli.mounts import for_each_mount
from cxlfs.cli.output import Output, Report, Style, quote, time_or_none
from cxlfs.cli.target import OPEN_EXIT_CODES, served_by
from cxlfs.control.client import control_request
from cxlfs.units import format_size

if TYPE_CHECKING:
    from cxlfs.checkpoint import Suspect

HELP = """List the checkpoints in the store on SOURCE, or in the one mounted on MOUNTPOINT; without
either, in every store that is mounted.

They are the files and directories in PATH (default: /). A directory stands for everything below
it, and its state is the worst one in it. In a mounted store the formats of frameworks are known:
headers are read, and what is missing or wrong is said ("cxlfs good" reads the tensors too).

\b
States:
  complete       the whole content was committed; of a known format: nothing of it is missing
  not inspected  the whole content was committed, and nobody looked into it: the store is not
                 mounted, this user may not read there, or no reader here understands it
  incomplete     its writer has not closed it, or was killed, or a part of it is missing
  damaged        a checksum error was seen in it, or its parts contradict each other
  being written  it is open for writing: what is committed may be replaced or go on growing
  empty          nothing is in it
  suspect        complete, and programs that had opened it failed three times since: perhaps it is
                 what kills the job (the newest one of a directory alone)
  set unknown    every file in the directory is complete; whether one is missing is not known

Where one lies elsewhere, too, IN says so: in this store (cxl), in other nodes' stores (peer: the
copies of a job), in an object store (tier).

An overwrite that was not finished is listed again as "incomplete, kept aside": the complete version
stays in place, and the rest is kept until its space is needed.

\b
Examples:
  cxlfs list
  cxlfs list /mnt/ckpt
  cxlfs list /dev/dax0.0 /run1
  cxlfs list /mnt/ckpt --json | jq '.checkpoints[] | select(.state != "complete")'
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """One file, or a directory with everything below it."""

    path: bytes
    kind: str
    state: str
    kept_aside: bool
    being_written: bool
    set_known: bool
    """False for a directory of no known format: whether files are missing from it is not known."""
    size_bytes: int
    files: int
    commit: int | None
    commit_time: str | None
    format: str | None = None
    """What kind of checkpoint it is; None: none that is known, or the store is not mounted."""
    step: int | None = None
    reason: str | None = None
    """Why a checkpoint is not complete, or was taken back."""
    checkpoints: int = 0
    """Of a directory that is none itself: how many are in it."""
    failed_resumes: int = 0
    """How often a program that had opened it failed."""
    suspect: str | None = None
    """Why it, or the newest in it, may be what kills a job."""
    places: tuple[str, ...] = ("cxl",)
    """Where it lies: ``cxl``, this store; ``peer``: other nodes' stores, as a job has recorded;
    ``tier``: an object store, as ``cxlfs drain`` or the job saw it.
    """

    @classmethod
    def from_message(cls, message: Mapping[str, object]) -> Checkpoint:
        """From what a store says of an entry, here or through a daemon; missing parts are empty."""

        def number(name: str) -> int:
            value = message.get(name)
            return value if isinstance(value, int) else 0

        path, kind = message.get("path", ""), str(message.get("kind", ""))
        return cls(
            path=path if isinstance(path, bytes) else os.fsencode(str(path)),
            kind=kind,
            state=str(message.get("state", "")),
            kept_aside=bool(message.get("kept_aside")),
            being_written=bool(message.get("being_written")),
            set_known=kind != "directory",
            size_bytes=number("size_bytes"),
            files=number("files"),
            commit=number("commit_lsn") or None,
            commit_time=time_or_none(number("commit_time_ns")),
            reason=None if message.get("reason") is None else str(message["reason"]),
        )

    @property
    def words(self) -> str:
        """The state, and what else is known."""
        words = [self.state if self.reason is None else f"{self.state}: {quote(self.reason)}"]
        if self.kept_aside:
            words.append("kept aside")
        elif self.being_written:
            words.append("being written")
        elif self.kind == "directory":
            if not self.files:
                return "empty"
            if self.checkpoints:
                words.append(f"{self.checkpoints} checkpoint{'s'[: self.checkpoints > 1]}")
            elif self.state == "complete" and not self.set_known:
                words.append("set unknown")
        elif not self.size_bytes:
            words.append("empty")
        if self.suspect is not None:
            words.append(quote(self.suspect))
        return ", ".join(words)

    def row(self, style: Style) -> tuple[str, ...]:
        paint = style.good if self.state == "complete" else style.bad
        return (
            paint(self.words),
            "-" if self.step is None else str(self.step),
            "-" if self.commit is None else str(self.commit),
            self.commit_time or "-",
            "+".join(self.places),
            format_size(self.size_bytes),
            quote(self.path) + ("/" if self.kind == "directory" else ""),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoints(Report):
    """What PATH holds."""

    schema: ClassVar[str] = "cxlfs.list/1"

    mountpoint: bytes | None
    path: bytes
    checkpoints: tuple[Checkpoint, ...]

    def lines(self, style: Style, /) -> Iterator[str]:
        if not self.checkpoints:
            yield f"no checkpoints in {quote(self.path)}"
            return
        rows = [_HEADER, *(checkpoint.row(Style()) for checkpoint in self.checkpoints)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
        has_steps = any(checkpoint.step is not None for checkpoint in self.checkpoints)
        has_tiers = any(len(checkpoint.places) > 1 for checkpoint in self.checkpoints)
        shown = _columns_that_fit(widths, style.width, has_steps=has_steps, has_tiers=has_tiers)
        yield style.strong(_line(_HEADER, _HEADER, widths, shown))
        for plain, checkpoint in zip(rows[1:], self.checkpoints, strict=True):
            yield _line(plain, checkpoint.row(style), widths, shown)


_HEADER = ("STATE", "STEP", "COMMIT", "COMMITTED", "IN", "SIZE", "PATH")
_STATE, _STEP, _COMMIT, _COMMITTED, _PLACES, _SIZE, _PATH = range(len(_HEADER))
_GAP = "  "
_NOT_INSPECTED = "not inspected"
_OWN_PREFIX = b".cxlfs-"


def _columns_that_fit(
    widths: list[int], width: int | None, *, has_steps: bool, has_tiers: bool
) -> list[int]:
    """What says something; on a narrow terminal the commit's number goes first, then its time."""
    shown = list(range(len(_HEADER)))
    if not has_steps:
        shown.remove(_STEP)
    if not has_tiers:
        shown.remove(_PLACES)
    for dispensable in (_COMMIT, _COMMITTED):
        needed = sum(widths[column] for column in shown) + len(_GAP) * (len(shown) - 1)
        if width is not None and needed > width:
            shown.remove(dispensable)
    return shown


def _line(
    plain: tuple[str, ...], painted: tuple[str, ...], widths: list[int], shown: list[int]
) -> str:
    """Columns two spaces apart, numbers flush right; colour takes no width."""
    cells = []
    for column in shown:
        padding = " " * (widths[column] - len(plain[column]))
        if column in (_STEP, _COMMIT, _SIZE):
            cells.append(padding + painted[column])
        else:
            cells.append(painted[column] + ("" if column == _PATH else padding))
    return _GAP.join(cells)


@click.command(
    "list",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(*OPEN_EXIT_CODES),
)
@click.argument("target", metavar="[SOURCE|MOUNTPOINT]", type=ANY_PATH, required=False)
@click.argument("path", required=False, default="/", metavar="[PATH]")
@common_options
def command(target: str | None, path: str, *, as_json: bool) -> int:
    """See HELP."""
    output = Output(as_json=as_json)
    if target is not None:
        output.report(checkpoints(target, path))
        return OK

    def look(mountpoint: str) -> Checkpoints:
        found = checkpoints(mountpoint, path)
        output.text(f"{quote(mountpoint)}:")
        return found

    return for_each_mount(output, look)


def checkpoints(target: str, path: str) -> Checkpoints:
    """The checkpoints in ``path`` of a store, mounted or not."""
    daemon = served_by(target)
    if daemon is not None:
        inside = _inside(path, daemon.mountpoint)
        messages = control_request(daemon.mountpoint, "list", {"path": inside})
        found = _without_own(Checkpoint.from_message(message) for message in messages)
        known = tuple(_with_format(each, daemon.mountpoint) for each in found)
        known = _with_suspect(known, Path(daemon.mountpoint + inside))
        known = tuple(_with_places(each, daemon.mountpoint) for each in known)
        return Checkpoints(os.fsencode(daemon.mountpoint), os.fsencode(inside), known)
    inside = _inside(path, None)
    # Only where a store is opened: see status.
    from cxlfs.cli.source import store_of  # noqa: PLC0415

    with store_of(target) as store:
        entries = store.list_checkpoints(os.fsencode(inside))
        found = _without_own(Checkpoint.from_message(dataclasses.asdict(each)) for each in entries)
    return Checkpoints(None, os.fsencode(inside), tuple(map(_not_inspected, found)))


def _not_inspected(entry: Checkpoint) -> Checkpoint:
    """The same; of what was only committed it is not said that it is complete."""
    if entry.state != "complete" or entry.kept_aside or entry.being_written or not entry.files:
        return entry
    return dataclasses.replace(entry, state=_NOT_INSPECTED)


def _without_own(found: Iterable[Checkpoint]) -> tuple[Checkpoint, ...]:
    """What broke off on its way here, and what was noted of others, are none."""
    return tuple(e for e in found if not e.path.rpartition(b"/")[2].startswith(_OWN_PREFIX))


def _with_format(entry: Checkpoint, mountpoint: str) -> Checkpoint:
    """The same, with what the bytes say; a mount that this user may not enter says nothing."""
    if entry.kept_aside or entry.being_written:
        return entry  # what is read now is not what was committed
    # Only where a store is mounted: formats take a while to load.
    from cxlfs.checkpoint import (  # noqa: PLC0415
        State,
        catalogue,
        failed_resumes,
        inspect,
        suspect_of,
        with_step,
    )

    path = Path(mountpoint + os.fsdecode(entry.path))
    if not os.access(path, os.R_OK):
        return _not_inspected(entry)
    found = inspect(_without_part(path) if entry.kind == "file" else path)
    if found is not None and found.state is not State.UNKNOWN:
        found = with_step(found)
        entry = dataclasses.replace(entry, failed_resumes=failed_resumes(found))
        # What the store knows of a file comes before what its bytes look like; of a directory the
        # store knows no file that is left over.
        is_known_better = entry.kind == "file" or entry.reason is not None
        if entry.state != "complete" and found.state is State.COMPLETE and is_known_better:
            return dataclasses.replace(entry, format=found.kind, step=found.step, set_known=True)
        return dataclasses.replace(
            entry,
            state=found.state.value,
            reason=found.reason if entry.reason is None else entry.reason,
            format=found.kind,
            step=found.step,
            set_known=True,
        )
    if found is not None and found.kind != "unknown":
        entry = _not_inspected(entry)
        reason = found.reason if entry.reason is None else entry.reason
        return dataclasses.replace(entry, format=found.kind, reason=reason)
    below = catalogue(path) if entry.kind == "directory" else ()
    if not below or any(each.checkpoint.kind == "unknown" for each in below):
        return entry
    entry = dataclasses.replace(entry, suspect=_words_of(suspect_of(below), inside=True))
    bad = next((e for e in below if e.checkpoint.state in (State.INCOMPLETE, State.DAMAGED)), None)
    if bad is None or entry.state != "complete":
        return dataclasses.replace(entry, set_known=bad is None, checkpoints=len(below))
    found = bad.checkpoint
    reason = f"{Path(found.path).name}: {found.reason}"
    return dataclasses.replace(
        entry, state=found.state.value, reason=reason, set_known=True, checkpoints=len(below)
    )


def _with_suspect(known: tuple[Checkpoint, ...], directory: Path) -> tuple[Checkpoint, ...]:
    """The same, with what is said of the newest of them where they are checkpoints themselves."""
    from cxlfs.checkpoint import FAILED_RESUMES_MAX, catalogue, suspect_of  # noqa: PLC0415  as above

    if all(each.failed_resumes < FAILED_RESUMES_MAX for each in known):
        return known
    if not directory.is_dir():
        directory = directory.parent
    suspect = suspect_of(catalogue(directory))
    if suspect is None:
        return known
    words = _words_of(suspect, inside=False)
    names = suspect.entry.names or (suspect.entry.path.name,)
    return tuple(
        dataclasses.replace(each, suspect=words)
        if each.format is not None and Path(os.fsdecode(each.path)).name in names
        else each
        for each in known
    )


def _with_places(entry: Checkpoint, mountpoint: str) -> Checkpoint:
    """The same, with where else it lies; a mount that this user may not enter says nothing."""
    from cxlfs.job.files import has_copies, is_drained  # noqa: PLC0415  as above
    from cxlfs.tier.record import tiers_of  # noqa: PLC0415

    if entry.kept_aside or entry.being_written:
        return entry
    places = ["cxl"]
    with contextlib.suppress(OSError):
        path = Path(mountpoint + os.fsdecode(entry.path))
        is_directory = entry.kind == "directory"
        if is_directory and has_copies(path):
            places.append("peer")
        if tiers_of(path) or (is_directory and is_drained(path)):
            places.append("tier")
    return dataclasses.replace(entry, places=tuple(places))


def _words_of(suspect: Suspect | None, *, inside: bool) -> str | None:
    if suspect is None:
        return None
    kind, _, rest = suspect.words.partition(": ")
    return f"{kind}: {suspect.entry.path.name} {rest}" if inside else suspect.words


def _without_part(path: Path) -> Path:
    """The prefix, for a file of TensorFlow's that has a part of a checkpoint."""
    from cxlfs.checkpoint.formats.tensorflow import PART  # noqa: PLC0415  as above

    match = PART.fullmatch(path.name)
    return path if match is None else path.with_name(match["prefix"])


def _inside(path: str, mountpoint: str | None) -> str:
    """The path within the store; one below the mount point is understood too."""
    if mountpoint is not None and (path + "/").startswith(mountpoint.rstrip("/") + "/"):
        path = path.removeprefix(mountpoint.rstrip("/"))
    return os.path.normpath("/" + path.lstrip("/"))
