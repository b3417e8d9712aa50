"""``cxlfs list``: the checkpoints in a store, with the commit that made each what it is.

Never here: what counts as a checkpoint (``store``).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import ClassVar

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style, quote, time_or_none
from cxlfs.cli.source import media_of
from cxlfs.cli.target import OPEN_EXIT_CODES, served_by
from cxlfs.control.client import control_request
from cxlfs.store import CheckpointEntry, Store, StoreOptions
from cxlfs.units import format_size

HELP = """List the checkpoints in the store on SOURCE, or in the one mounted on MOUNTPOINT.

They are the files and directories in PATH (default: /). A directory stands for everything below
it, and its state is the worst one in it.

\b
States:
  complete    the whole content was committed
  incomplete  its writer has not closed it, or was killed: the content is a beginning
  damaged     a checksum error was seen in it

An overwrite that was not finished is listed once more as "incomplete, kept aside": the complete
version stays in place, and the rest is kept until its space is needed.

\b
Examples:
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
    size_bytes: int
    files: int
    commit: int | None
    commit_time: str | None

    @classmethod
    def from_entry(cls, entry: CheckpointEntry) -> Checkpoint:
        return cls(
            path=entry.path,
            kind=entry.kind,
            state=entry.state,
            kept_aside=entry.kept_aside,
            size_bytes=entry.size_bytes,
            files=entry.files,
            commit=entry.commit_lsn or None,
            commit_time=time_or_none(entry.commit_time_ns),
        )

    @classmethod
    def from_message(cls, message: Mapping[str, object]) -> Checkpoint:
        """From what a daemon says; missing parts become empty."""
        names = [field.name for field in dataclasses.fields(CheckpointEntry)]
        values = {name: message.get(name, 0) for name in names}
        values["path"] = os.fsencode(str(values["path"]))
        return cls.from_entry(CheckpointEntry(**values))  # type: ignore[arg-type]

    def row(self, style: Style) -> tuple[str, ...]:
        state = f"{self.state}, kept aside" if self.kept_aside else self.state
        return (
            style.good(state) if self.state == "complete" else style.bad(state),
            "-" if self.commit is None else str(self.commit),
            self.commit_time or "-",
            format_size(self.size_bytes),
            quote(self.path) + ("/" if self.kind == "directory" else ""),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoints(Report):
    """What PATH holds."""

    schema: ClassVar[str] = "cxlfs.list/1"

    path: bytes
    checkpoints: tuple[Checkpoint, ...]

    def lines(self, style: Style, /) -> Iterator[str]:
        if not self.checkpoints:
            yield f"no checkpoints in {quote(self.path)}"
            return
        header = ("STATE", "COMMIT", "COMMITTED", "SIZE", "PATH")
        rows = [header, *(checkpoint.row(Style()) for checkpoint in self.checkpoints)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        yield style.strong(_line(header, header, widths))
        for plain, checkpoint in zip(rows[1:], self.checkpoints, strict=True):
            yield _line(plain, checkpoint.row(style), widths)


def _line(plain: tuple[str, ...], painted: tuple[str, ...], widths: list[int]) -> str:
    """Columns two spaces apart, numbers flush right; colour takes no width."""
    state, commit, committed, size, path = range(len(widths))
    cells = list(painted)
    for column in (state, committed):
        cells[column] += " " * (widths[column] - len(plain[column]))
    for column in (commit, size):
        cells[column] = " " * (widths[column] - len(plain[column])) + cells[column]
    return "  ".join([*cells[:path], cells[path]])


@click.command(
    "list",
    help=HELP,
    short_help="List checkpoints with their commits and states.",
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(*OPEN_EXIT_CODES),
)
@click.argument("target", metavar="SOURCE|MOUNTPOINT", type=ANY_PATH)
@click.argument("path", required=False, default="/", metavar="[PATH]")
@common_options
def command(target: str, path: str, *, as_json: bool) -> None:
    """See HELP."""
    Output(as_json=as_json).report(checkpoints(target, path))


def checkpoints(target: str, path: str) -> Checkpoints:
    """The checkpoints in ``path`` of a store, mounted or not."""
    daemon = served_by(target)
    if daemon is not None:
        inside = _inside(path, daemon.mountpoint)
        messages = control_request(daemon.mountpoint, "list", {"path": inside})
        found = tuple(Checkpoint.from_message(message) for message in messages)
        return Checkpoints(os.fsencode(inside), found)
    inside = _inside(path, None)
    with media_of(target) as media:
        store = Store.open(media, StoreOptions(read_only=True))
        try:
            entries = store.list_checkpoints(os.fsencode(inside))
            found = tuple(Checkpoint.from_entry(entry) for entry in entries)
        finally:
            store.close()
    return Checkpoints(os.fsencode(inside), found)


def _inside(path: str, mountpoint: str | None) -> str:
    """The path within the store; one below the mount point is understood too."""
    if mountpoint is not None and (path + "/").startswith(mountpoint.rstrip("/") + "/"):
        path = path.removeprefix(mountpoint.rstrip("/"))
    return os.path.normpath("/" + path.lstrip("/"))
