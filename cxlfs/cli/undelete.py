"""``cxlfs undelete``: what was removed has its name again.

Never here: finding it, bringing it back (the daemon does: ``store.past_restore``).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import ClassVar

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style, quote
from cxlfs.cli.target import mounted_place, wait_for_name
from cxlfs.control.client import control_request
from cxlfs.errors import ExistsError, NoDaemonError, NoSpaceError, NotFoundError, ReadOnlyError

HELP = """Bring back a file, or a directory with everything below it, that was removed.

Works until the space of what was removed is needed. Directories above PATH that are gone as well
come back empty, but for PATH. No data is copied.

Root and the user of the daemon may ask.

\b
Examples:
  cxlfs undelete /mnt/ckpt/checkpoint-500
  cxlfs undelete /mnt/ckpt/run1/model.pt
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Undeleted(Report):
    """What is there again. ``count``: files, directories and links."""

    schema: ClassVar[str] = "cxlfs.undelete/1"

    path: bytes
    count: int

    def lines(self, style: Style, /) -> Iterator[str]:
        del style
        more = f" and {self.count - 1} below it" if self.count > 1 else ""
        yield f"brought back {quote(self.path)}{more}"


@click.command(
    "undelete",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(
        *(e.exit_code for e in (NoDaemonError, NotFoundError, ExistsError)),
        *(e.exit_code for e in (NoSpaceError, ReadOnlyError)),
    ),
)
@click.argument("path", type=ANY_PATH)
@common_options
def command(path: str, *, as_json: bool) -> None:
    """See HELP."""
    mountpoint, inside = mounted_place(path)
    count = 0
    for message in control_request(mountpoint, "undelete", {"path": inside}):
        found = message.get("count")
        count = found if isinstance(found, int) else count
    wait_for_name(path)
    Output(as_json=as_json).report(Undeleted(os.fsencode(path), count))
