"""``cxlfs forget``: history keeps nothing of a path any more.

Never here: what history keeps (``store.past``).
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
from cxlfs.cli.target import mounted_place
from cxlfs.control.client import control_request
from cxlfs.errors import NoDaemonError, NotFoundError, StillPinnedError

HELP = """Drop the earlier versions of a path, and of everything that was below it.

What is there now stays. Use it when a secret was saved: afterwards no command brings it back. Its
bytes stay on the media until the space is used again. If it was renamed or linked since, name it as
it is called now.

Pins keep what they hold. If a pin has something of the path, the command names it and fails: take
the pin away with "cxlfs unpin".

Root and the user of the daemon may ask.

\b
Example:
  cxlfs forget /mnt/ckpt/token.json
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Forgotten(Report):
    """How many versions were dropped."""

    schema: ClassVar[str] = "cxlfs.forget/1"

    path: bytes
    count: int
    pins: tuple[str, ...]

    def lines(self, style: Style, /) -> Iterator[str]:
        del style
        yield f"dropped {self.count} version{'s'[: self.count != 1]} of {quote(self.path)}"


@click.command(
    "forget",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(*(e.exit_code for e in (NoDaemonError, NotFoundError, StillPinnedError))),
)
@click.argument("path", type=ANY_PATH)
@common_options
def command(path: str, *, as_json: bool) -> None:
    """See HELP."""
    mountpoint, inside = mounted_place(path)
    (message,) = control_request(mountpoint, "forget", {"path": inside})
    count = message.get("count")
    pins = tuple(_pins(message.get("pins")))
    forgotten = Forgotten(os.fsencode(path), count if isinstance(count, int) else 0, pins)
    Output(as_json=as_json).report(forgotten)
    if pins:
        raise StillPinnedError(
            f"{path} is still held by {', '.join(f'the pin {name}' for name in pins)}",
            next_step="; ".join(f"cxlfs unpin {name} {mountpoint}" for name in pins),
        )


def _pins(said: object) -> Iterator[str]:
    """Names of pins, as the user who asks writes them."""
    for pin in said if isinstance(said, list) else ():
        if isinstance(pin, dict):
            name, uid = str(pin.get("name")), pin.get("uid")
            yield name if uid == os.geteuid() else f"{name}@{uid}"
