"""Verbs without an argument: the same for every store that is mounted.

Never here: what a verb says of one store.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import ClassVar

from cxlfs.cli.exit_codes import OK
from cxlfs.cli.output import Output, Report, Style, quote
from cxlfs.control import mountinfo
from cxlfs.errors import CxlfsError, MountError


@dataclasses.dataclass(frozen=True, slots=True)
class Unreachable(Report):
    """A mount whose daemon could not be asked."""

    schema: ClassVar[str] = "cxlfs.unreachable/1"

    mountpoint: bytes
    source: bytes
    id: str
    message: str
    next_step: str

    def lines(self, style: Style, /) -> Iterator[str]:
        yield f"{style.bad(quote(self.message))}"
        yield f"next: {self.next_step}"


def for_each_mount(output: Output, look: Callable[[str], Report]) -> int:
    """Report on every mount, in the order in which they were made; the exit code.

    One that cannot be asked is reported too, and makes the exit code that of MountError.
    """
    mounts = {
        mount.mountpoint: mount
        for mount in mountinfo.read_mounts()
        if mount.file_system_type == mountinfo.FILE_SYSTEM_TYPE
    }
    if not mounts:
        output.text("no store is mounted")
    code = OK
    for number, mount in enumerate(mounts.values()):
        if number:
            output.text("")
        try:
            output.report(look(mount.mountpoint))
        except CxlfsError as error:
            code = MountError.exit_code
            output.report(
                Unreachable(
                    mountpoint=os.fsencode(mount.mountpoint),
                    source=os.fsencode(mount.source),
                    id=error.id,
                    message=error.message,
                    next_step=error.next_step,
                )
            )
    return code
