"""``cxlfs pins``: which pins there are.

Other modules keep pins (``store.pins``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style, quote
from cxlfs.cli.pin import AT, Pinned
from cxlfs.cli.target import only_mount
from cxlfs.errors import UsageError
from cxlfs.units import format_size

HELP = """List your pins. Root sees those of all users, as NAME@UID.

MOUNTPOINT, or any path in the mount, is needed if more than one store is mounted.

\b
Examples:
  cxlfs pins
  cxlfs pins /mnt/ckpt --json
"""

_HEADER = ("NAME", "COMMIT", "MADE", "NAMES", "SIZE", "PATH")


@dataclasses.dataclass(frozen=True, slots=True)
class Pins(Report):
    """The pins of a user, by name."""

    schema: ClassVar[str] = "cxlfs.pins/1"

    mountpoint: bytes
    pins: tuple[Pinned, ...]

    def lines(self, style: Style, /) -> Iterator[str]:
        if not self.pins:
            yield "no pins"
            return
        rows = [_HEADER, *(_row(pin) for pin in self.pins)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for number, row in enumerate(rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            line = "  ".join(cells).rstrip()
            yield line if number else style.strong(line)


def _row(pin: Pinned) -> tuple[str, ...]:
    return (
        *(quote(os.fsencode(pin.name)), str(pin.commit), pin.made or "-", str(pin.count)),
        *(format_size(pin.size_bytes), quote(pin.path)),
    )


@click.command(
    "pins", help=HELP, context_settings=CONTEXT_SETTINGS, epilog=epilog(UsageError.exit_code)
)
@click.argument("mountpoint", type=ANY_PATH, required=False)
@common_options
def command(mountpoint: str | None, *, as_json: bool) -> None:
    """See HELP."""
    mount = only_mount(mountpoint)
    found = []
    for place in sorted(Path(mount, AT).iterdir()):
        with contextlib.suppress(OSError):  # taken away meanwhile
            found.append(Pinned.read(mount, place.name))
    Output(as_json=as_json).report(Pins(os.fsencode(mount), tuple(found)))
