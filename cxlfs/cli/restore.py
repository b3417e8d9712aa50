"""``cxlfs restore``: an earlier version of a file becomes its content, or a directory what it was.

Never here: what is kept aside (``store.overwrites``), what history keeps (``store.past``). The
mount brings back what is kept aside, with the rights of the caller. The daemon does the rest.
"""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style, quote
from cxlfs.cli.target import mounted_place, wait_for_name
from cxlfs.control.client import control_request
from cxlfs.errors import (
    BusyError,
    NotFoundError,
    NotPermittedError,
    ReadOnlyError,
    UsageError,
)
from cxlfs.units import format_size, parse_moment

RESTORE_XATTR = "user.cxlfs.restore"
STATE_XATTR = "user.cxlfs.state"

HELP = """Bring back an earlier version of a file, or a directory as it was.

Without options this is the version that the store keeps aside: the whole one where a program left
a torn file, or what a killed program had written; "cxlfs list" shows both. The two change places,
so the same command undoes it. The owner of the file and root may. If nothing is kept aside, it is
the newest version that "cxlfs history" shows.

With --at it is the version that was there at a commit, or at a time. It replaces the present
content, which history keeps. No data is copied. For what history has, root and the user of the
daemon may ask.

A directory comes back with everything below it: without --at as it was before it was last removed,
with --at as it was then. It replaces one of that name by one record, or not at all. What is
replaced is removed, and history keeps it as NAME.replaced.

\b
Examples:
  cxlfs restore /mnt/ckpt/model.pt
  cxlfs restore /mnt/ckpt/model.pt --at 1204
  cxlfs restore /mnt/ckpt/checkpoint-500
  cxlfs restore /mnt/ckpt/model.pt --at 2026-11-26T08:00:00Z --to /mnt/ckpt/before.pt
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Restored(Report):
    """The file as it is now; of a directory ``count`` alone: names that came back with it."""

    schema: ClassVar[str] = "cxlfs.restore/1"

    path: bytes
    count: int
    state: str | None = None
    size_bytes: int | None = None

    def lines(self, style: Style, /) -> Iterator[str]:
        del style
        what = f"{self.count - 1} below it"
        if self.size_bytes is not None:
            what = f"{format_size(self.size_bytes)}, {self.state}"
        yield f"restored {quote(self.path)}: {what}"


@click.command(
    "restore",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(
        *(e.exit_code for e in (NotFoundError, NotPermittedError, BusyError, ReadOnlyError))
    ),
)
@click.argument("path", type=ANY_PATH)
@click.option("--at", metavar="COMMIT|TIME", help="The version that was there then.")
@click.option("--to", type=ANY_PATH, metavar="PATH", help="Another name for it.")
@common_options
def command(path: str, at: str | None, to: str | None, *, as_json: bool) -> None:
    """See HELP."""
    target = path if to is None else to
    if at is None and to is None and not _is_directory(path) and _exchanged(path):
        restored = Restored(os.fsencode(target), 1, *_state_of(path))
    else:
        restored = _from_history(path, at, target)
    Output(as_json=as_json).report(restored)


def _is_directory(path: str) -> bool:
    return Path(path).is_dir() and not Path(path).is_symlink()


def _exchanged(path: str) -> bool:
    """The content and what is kept aside have changed places. False: nothing is kept aside."""
    try:
        os.getxattr(path, STATE_XATTR)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise _failure(path, error) from error
    try:
        os.setxattr(path, RESTORE_XATTR, b"")
    except OSError as error:
        if error.errno == errno.ENODATA:
            return False
        raise _failure(path, error) from error
    return True


def _from_history(path: str, at: str | None, target: str) -> Restored:
    mountpoint, inside = mounted_place(path)
    parameters: dict[str, object] = {"path": inside, "at": None if at is None else _moment(at)}
    if target != path:
        other, parameters["to"] = mounted_place(target)
        if other != mountpoint:
            raise UsageError(
                f"--to {target}: in another store", next_step="name a path in the same mount"
            )
    *_, done = control_request(mountpoint, "restore", parameters)
    wait_for_name(target)
    count, size, state = (done.get(key) for key in ("count", "size_bytes", "state"))
    return Restored(
        os.fsencode(target),
        count if isinstance(count, int) else 0,
        None if state is None else str(state),
        size if isinstance(size, int) else None,
    )


def _moment(text: str) -> int:
    """A commit number, or a time in ns. Raises UsageError."""
    try:
        return parse_moment(text)
    except UsageError as error:
        raise UsageError(f"--at {error.message}", next_step=error.next_step) from error


def _state_of(path: str) -> tuple[str, int]:
    try:
        return os.getxattr(path, STATE_XATTR).decode(), Path(path).stat().st_size
    except OSError as error:
        raise _failure(path, error) from error


def _failure(path: str, error: OSError) -> Exception:
    if error.errno == errno.ENOENT:
        return NotFoundError(f"no such path: {path}")
    if error.errno in {errno.EACCES, errno.EPERM}:
        return NotPermittedError(
            f"cannot restore {path}: {error.strerror}",
            next_step="ask the owner of the file, or root",
        )
    if error.errno == errno.EBUSY:
        return BusyError(
            f"cannot restore {path}: a program is writing it",
            next_step="wait until the program has closed the file",
        )
    if error.errno == errno.EROFS:
        return ReadOnlyError(
            f"cannot restore {path}: it cannot be written",
            next_step="name the file itself, not one in .cxlfs; "
            "cxlfs status says whether the store is read-only",
        )
    return UsageError(
        f"cannot restore {path}: it is not a file of a mounted store",
        next_step="mount the store, and name a file in it",
    )
