"""``cxlfs history``: what a file or a name in a directory was before.

Never here: what history keeps (``store.past``), and for how long (``store.past_order``).
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
from cxlfs.cli.target import mounted_place
from cxlfs.control.client import control_request
from cxlfs.errors import NoDaemonError, NotFoundError
from cxlfs.units import format_size

HELP = """Show earlier versions of a file, and what was removed from a directory.

A store keeps what was overwritten, removed or renamed over until its space is needed. It counts as
free, and it is there after an unmount and a crash. Bring it back with "cxlfs restore" or "cxlfs
undelete".

Root and the user of the daemon may ask.

\b
Examples:
  cxlfs history /mnt/ckpt/model.pt
  cxlfs history /mnt/ckpt
  cxlfs history /mnt/ckpt/removed/model.pt --json
"""

_HEADER = ("COMMIT", "COMMITTED", "ENDED", "SIZE", "STATE", "PATH")


@dataclasses.dataclass(frozen=True, slots=True)
class PastVersion:
    """One version that is not there any more."""

    path: bytes
    kind: str
    state: str
    size_bytes: int
    commit: int | None
    commit_time: str | None
    ended_commit: int
    ended_time: str | None
    how: str
    uid: int
    stored: bool

    @classmethod
    def from_message(cls, message: Mapping[str, object]) -> PastVersion:
        def number(name: str) -> int:
            value = message.get(name)
            return value if isinstance(value, int) else 0

        return cls(
            path=os.fsencode(str(message.get("path", ""))),
            kind=str(message.get("kind", "")),
            state=str(message.get("state", "")),
            size_bytes=number("size_bytes"),
            commit=number("commit") or None,
            commit_time=time_or_none(number("commit_time_ns")),
            ended_commit=number("ended_commit"),
            ended_time=time_or_none(number("ended_time_ns")),
            how=str(message.get("how", "")),
            uid=number("uid"),
            stored=bool(message.get("stored")),
        )

    def row(self) -> tuple[str, ...]:
        is_file = self.kind == "file"
        return (
            "-" if self.commit is None else str(self.commit),
            self.commit_time or "-",
            f"{self.how} {self.ended_time or '-'}",
            format_size(self.size_bytes) if is_file else self.kind,
            self.state,
            quote(self.path),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class History(Report):
    """Earlier versions, the oldest end first."""

    schema: ClassVar[str] = "cxlfs.history/1"

    mountpoint: bytes
    versions: tuple[PastVersion, ...]

    def lines(self, style: Style, /) -> Iterator[str]:
        if not self.versions:
            yield "history has nothing of it"
            return
        rows = [_HEADER, *(version.row() for version in self.versions)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for number, row in enumerate(rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            line = "  ".join(cells).rstrip()
            yield line if number else style.strong(line)


@click.command(
    "history",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(*(e.exit_code for e in (NoDaemonError, NotFoundError))),
)
@click.argument("path", type=ANY_PATH)
@common_options
def command(path: str, *, as_json: bool) -> None:
    """See HELP."""
    mountpoint, inside = mounted_place(path)
    messages = control_request(mountpoint, "history", {"path": inside})
    found = tuple(PastVersion.from_message(message) for message in messages)
    Output(as_json=as_json).report(History(os.fsencode(mountpoint), found))
