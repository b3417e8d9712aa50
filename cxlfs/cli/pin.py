"""``cxlfs pin``: what a path means, or meant, stays readable.

Other modules make pins (``store.pins``). The request goes through the mount, so the kernel tells
the daemon whose it is: every user may ask.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Iterator, Mapping
from typing import ClassVar

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style, quote, time_or_none
from cxlfs.cli.target import mounted_place
from cxlfs.errors import (
    ExistsError,
    NoSpaceError,
    NotFoundError,
    NotPermittedError,
    ReadOnlyError,
    StaleError,
    TooManyPinsError,
    UsageError,
)
from cxlfs.units import format_size, parse_moment

PIN_XATTR = "user.cxlfs.pin"
AT = ".cxlfs/at"
_ATTEMPTS = 3

HELP = """Keep what a path means readable until "cxlfs unpin", whatever happens to the path.

The pin is a copy by reference: no data is copied, and what it holds counts as used. Read it below
MOUNTPOINT/.cxlfs/at/NAME, where PATH lies as in the mount. With --at the pin is of the path as it
was at a commit or a time, as far as history still has it.

You pin what you own. Of a directory, what others own is left out. No other user but root sees your
pins. A name has letters, digits and . _ + - and begins with a letter.

\b
Examples:
  cxlfs pin best /mnt/ckpt/run1/step-500
  cxlfs pin before /mnt/ckpt/model.pt --at 2026-11-26T08:00:00Z
  cp -r /mnt/ckpt/.cxlfs/at/best/run1/step-500 .
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Pinned:
    """A pin as the daemon describes it."""

    name: str
    path: bytes
    commit: int
    made: str | None
    count: int
    size_bytes: int
    left_out: int
    missing: int
    uid: int

    @classmethod
    def read(cls, mountpoint: str, name: str) -> Pinned:
        """Raises OSError: there is no such pin."""
        said = json.loads(os.getxattr(f"{mountpoint}/{AT}/{name}", PIN_XATTR))
        return cls.of(said, name)

    @classmethod
    def of(cls, said: Mapping[str, object], name: str) -> Pinned:
        """``name``: as the asking user writes it."""

        def number(key: str) -> int:
            value = said.get(key)
            return value if isinstance(value, int) else 0

        return cls(
            name=name,
            path=os.fsencode(str(said.get("path", ""))),
            commit=number("commit"),
            made=time_or_none(number("made_ns")),
            count=number("count"),
            size_bytes=number("size_bytes"),
            left_out=number("left_out"),
            missing=number("missing"),
            uid=number("uid"),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class NewPin(Report):
    """The pin that was made."""

    schema: ClassVar[str] = "cxlfs.pin/1"

    mountpoint: bytes
    pin: Pinned

    def lines(self, style: Style, /) -> Iterator[str]:
        pin, names = self.pin, self.pin.count
        size = format_size(pin.size_bytes)
        yield f"pinned {quote(pin.path)}: {names} name{'s'[: names != 1]}, {size}"
        if pin.left_out:
            yield f"{pin.left_out} of other users left out"
        if pin.missing:
            yield style.bad(f"{pin.missing} missing: history does not have them any more")
        yield f"read it in {quote(self.mountpoint)}/{AT}/{pin.name}"


@click.command(
    "pin",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(
        *(e.exit_code for e in (NotFoundError, NotPermittedError, ExistsError, TooManyPinsError)),
        *(e.exit_code for e in (NoSpaceError, ReadOnlyError)),
    ),
)
@click.argument("name")
@click.argument("path", type=ANY_PATH)
@click.option("--at", metavar="COMMIT|TIME", help="Pin the path as it was then. [default: now]")
@common_options
def command(name: str, path: str, at: str | None, *, as_json: bool) -> None:
    """See HELP."""
    if at is not None:
        parse_moment(at)
    mountpoint, inside = mounted_place(path)
    target = f"{mountpoint}/{AT}/{at or 'now'}{inside}"
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            os.setxattr(target, PIN_XATTR, os.fsencode(name))
            break
        except OSError as error:
            if at is None and error.errno == errno.ESTALE and attempt < _ATTEMPTS:
                continue  # it was saved again meanwhile
            raise _failure(name, path, at, error) from error
    pin = Pinned.read(mountpoint, name)
    Output(as_json=as_json).report(NewPin(os.fsencode(mountpoint), pin))


def _failure(name: str, path: str, at: str | None, error: OSError) -> Exception:
    when = "" if at is None else f" at {at}"
    if error.errno in {errno.ENOENT, errno.ENOTDIR}:
        return NotFoundError(
            f"cannot pin {path}: there is none{when}",
            next_step="run cxlfs history PATH to see what there is",
        )
    if error.errno in {errno.EACCES, errno.EPERM} and os.geteuid() != 0:
        return NotPermittedError(
            f"cannot pin {path}: only its owner pins it", next_step="ask the owner, or root"
        )
    if error.errno == errno.EEXIST:
        return ExistsError(
            f"a pin {name} exists", next_step="choose another name, or run cxlfs unpin first"
        )
    if error.errno == errno.EDQUOT:
        return TooManyPinsError("you have as many pins, or names in them, as a user may have")
    if error.errno == errno.ENOSPC:
        return NoSpaceError(f"cannot pin {path}: no space for its metadata")
    if error.errno == errno.EROFS:
        return ReadOnlyError(f"cannot pin {path}: the store is read-only")
    if error.errno == errno.ESTALE:
        return StaleError(f"cannot pin {path}: it changes all the time", next_step="try again")
    if error.errno == errno.EINVAL:
        return UsageError(
            f"not a name of a pin: {name!r}",
            next_step="begin with a letter; use letters, digits and . _ + - (64 at most); "
            "now is none, and neither is a time",
        )
    return UsageError(
        f"cannot pin {path}: {error.strerror}",
        next_step="name a file, directory or symbolic link in a mounted store",
    )
