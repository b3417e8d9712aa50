"""``cxlfs unpin``: a pin is taken away.

Other modules keep pins (``store.pins``).
"""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterator
from typing import ClassVar

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style
from cxlfs.cli.pin import AT, PIN_XATTR
from cxlfs.cli.target import only_mount
from cxlfs.errors import NotFoundError, NotPermittedError, ReadOnlyError, UsageError

HELP = """Take a pin away. What only the pin held is gone: history does not keep it.

MOUNTPOINT, or any path in the mount, is needed if more than one store is mounted. Root writes the
pins of another user as NAME@UID.

\b
Example:
  cxlfs unpin best
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Unpinned(Report):
    """The pin that is gone."""

    schema: ClassVar[str] = "cxlfs.unpin/1"

    mountpoint: bytes
    name: str

    def lines(self, style: Style, /) -> Iterator[str]:
        del style
        yield f"unpinned {self.name}"


@click.command(
    "unpin",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(*(e.exit_code for e in (NotFoundError, NotPermittedError, ReadOnlyError))),
)
@click.argument("name")
@click.argument("mountpoint", type=ANY_PATH, required=False)
@common_options
def command(name: str, mountpoint: str | None, *, as_json: bool) -> None:
    """See HELP."""
    if not name or "/" in name:
        raise UsageError(f"not a name of a pin: {name!r}", next_step="run cxlfs pins")
    mount = only_mount(mountpoint)
    try:
        os.removexattr(f"{mount}/{AT}/{name}", PIN_XATTR)
    except OSError as error:
        raise _failure(name, error) from error
    Output(as_json=as_json).report(Unpinned(os.fsencode(mount), name))


def _failure(name: str, error: OSError) -> Exception:
    if error.errno in {errno.EACCES, errno.EPERM}:
        return NotPermittedError(f"cannot unpin {name}: it is another user's")
    if error.errno == errno.EROFS:
        return ReadOnlyError(f"cannot unpin {name}: it is no pin, or the store is read-only")
    return NotFoundError(f"no pin {name}", next_step="run cxlfs pins to see what there is")
