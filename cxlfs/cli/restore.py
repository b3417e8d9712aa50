"""``cxlfs restore``: the version of a file that is kept aside becomes its content.

Never here: what is kept aside, and when (``store.overwrites``). The mount does the work, with the
rights of the caller.
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
from cxlfs.errors import (
    BusyError,
    NotFoundError,
    NotPermittedError,
    ReadOnlyError,
    UsageError,
)
from cxlfs.units import format_size

RESTORE_XATTR = "user.cxlfs.restore"
STATE_XATTR = "user.cxlfs.state"

HELP = """Bring back the version of a file that a mounted store keeps aside.

A store keeps a version aside in two cases. A program left a torn file in place of a whole one: the
whole one is kept while the torn one stays, and the torn one after the whole one came back. Or a
program was killed while it overwrote a file: what it had written is kept. "cxlfs list" shows both.

The two versions change places, so the same command undoes it. No data is copied. You need the
right to write the file.

\b
Examples:
  cxlfs restore /mnt/ckpt/model.pt
  cxlfs list /mnt/ckpt/model.pt
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Restored(Report):
    """The file as it is now."""

    schema: ClassVar[str] = "cxlfs.restore/1"

    path: bytes
    state: str
    size_bytes: int

    def lines(self, style: Style, /) -> Iterator[str]:
        del style
        size = format_size(self.size_bytes)
        yield f"restored {quote(self.path)}: {size}, {self.state}; the same command undoes it"


@click.command(
    "restore",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(
        *(e.exit_code for e in (NotFoundError, NotPermittedError, BusyError, ReadOnlyError))
    ),
)
@click.argument("path", type=ANY_PATH)
@common_options
def command(path: str, *, as_json: bool) -> None:
    """See HELP."""
    try:
        state = os.getxattr(path, STATE_XATTR).decode()
        os.setxattr(path, RESTORE_XATTR, b"")
        state = os.getxattr(path, STATE_XATTR).decode()
        size = Path(path).stat().st_size
    except OSError as error:
        raise _failure(path, error) from error
    Output(as_json=as_json).report(Restored(os.fsencode(path), state, size))


def _failure(path: str, error: OSError) -> Exception:
    if error.errno == errno.ENOENT:
        return NotFoundError(f"no such path: {path}")
    if error.errno in {errno.EACCES, errno.EPERM}:
        return NotPermittedError(f"cannot restore {path}: {error.strerror}")
    if error.errno == errno.EBUSY:
        return BusyError(
            f"cannot restore {path}: a program is writing it",
            next_step="wait until the program has closed the file",
        )
    if error.errno == errno.EROFS:
        return ReadOnlyError(f"cannot restore {path}: the store is read-only")
    if error.errno == errno.ENODATA and error.filename2 is None and _is_ours(path):
        return NotFoundError(
            f"cannot restore {path}: no other version of it is kept",
            next_step=f"run cxlfs list {path} to see what there is",
        )
    return UsageError(
        f"cannot restore {path}: it is not a file of a mounted store",
        next_step="mount the store, and name a file in it",
    )


def _is_ours(path: str) -> bool:
    try:
        os.getxattr(path, STATE_XATTR)
    except OSError:
        return False
    return True
