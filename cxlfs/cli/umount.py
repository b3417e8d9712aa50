"""``cxlfs umount``: take a mount away and wait until its store is closed.

Never here: how a daemon is told (``daemon.unmount``).
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
from cxlfs.control import mountinfo
from cxlfs.daemon.unmount import unmount
from cxlfs.errors import BusyError, FuseUnavailableError, MountError

HELP = """Unmount the store on MOUNTPOINT, and return when it is closed cleanly.

While programs have files open there it is refused, with their names. While another mount namespace
(a container, unshare) holds a copy of the mount it waits, and says for whom after a second.

A mount whose daemon is gone is cleared; its store is recovered by the next mount.

\b
Example:
  cxlfs umount /mnt/ckpt
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Unmounted(Report):
    """A mount that is gone."""

    schema: ClassVar[str] = "cxlfs.umount/1"

    mountpoint: bytes
    source: bytes | None

    def lines(self, style: Style, /) -> Iterator[str]:
        yield f"{style.good('unmounted')} {quote(self.mountpoint)}"


@click.command(
    "umount",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(BusyError.exit_code, FuseUnavailableError.exit_code, MountError.exit_code),
)
@click.argument("mountpoint", type=ANY_PATH)
@common_options
def command(mountpoint: str, *, as_json: bool) -> None:
    """See HELP."""
    mount = mountinfo.find_mount(mountpoint)
    output = Output(as_json=as_json)
    unmount(mountpoint, on_wait=output.warning)
    absolute = os.path.abspath(mountpoint)  # noqa: PTH100  Path.absolute keeps ".."
    source = None if mount is None else os.fsencode(mount.source)
    output.report(Unmounted(os.fsencode(absolute), source))
