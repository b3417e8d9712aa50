"""``cxlfs policy``: which directories of a mounted store are checkpoint units.

Never here: what a unit is (``store.units``), what a policy may say (``store.unit_record``).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style, quote
from cxlfs.cli.target import mounted_place
from cxlfs.control.client import control_request
from cxlfs.errors import (
    LimitError,
    MediaUnavailableError,
    NoDaemonError,
    NotFoundError,
    ReadOnlyError,
)

HELP = """Say which directories are checkpoint units: done as a whole, or back to what was there.

A trainer that is killed while it saves a directory of files leaves a part of them, or old and new
ones mixed. In a checkpoint unit the files are published together: when the last one that its saver
writes (the marker) is published, when its writers have ended well, when it is renamed, or when
nothing was written for a while. If a writer is killed first, or the power goes, what was there
before is there again, and history has what was written ("cxlfs undelete", "cxlfs history").
Directories of well-known frameworks are checkpoint units without a policy (mount option "units").

A policy holds for all directories below PATH; of several the nearest. It is kept in the store.

\b
Examples:
  cxlfs policy set /mnt/ckpt --unit 'checkpoint-*' --done trainer_state.json
  cxlfs policy set /mnt/ckpt/run1 --unit 'step-*' --done .metadata --quiet 60
  cxlfs policy set /mnt/ckpt/live --unit . --done '*'
  cxlfs policy set /mnt/ckpt/maps --unit . --quiet 5
  cxlfs policy show /mnt/ckpt
  cxlfs policy unset /mnt/ckpt
"""

SET_HELP = """Make directories below PATH checkpoint units; replaces what was said of PATH before.

\b
Example:
  cxlfs policy set /mnt/ckpt --unit 'checkpoint-*' --done trainer_state.json
"""

SHOW_HELP = """Show the policies of the store that PATH lies in.

\b
Example:
  cxlfs policy show /mnt/ckpt
"""

UNSET_HELP = """Forget what was said of PATH; what holds above it holds here again.

\b
Example:
  cxlfs policy unset /mnt/ckpt
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What holds below a directory; ``path`` is below the mount point."""

    path: bytes
    unit: tuple[bytes, ...]
    done: tuple[bytes, ...]
    quiet_seconds: float

    @classmethod
    def from_message(cls, message: Mapping[str, object]) -> Policy:
        def names(key: str) -> tuple[bytes, ...]:
            found = message.get(key)
            return tuple(os.fsencode(str(n)) for n in found) if isinstance(found, list) else ()

        quiet = message.get("quiet_seconds")
        return cls(
            path=os.fsencode(str(message.get("path", ""))),
            unit=names("unit"),
            done=names("done"),
            quiet_seconds=float(quiet) if isinstance(quiet, int | float) else 0.0,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Policies(Report):
    """All policies of a store, after what was asked for."""

    schema: ClassVar[str] = "cxlfs.policy/1"

    mountpoint: bytes
    policies: tuple[Policy, ...]

    def lines(self, style: Style, /) -> Iterator[str]:
        if not self.policies:
            yield "no policies"
        for policy in self.policies:
            units = ", ".join(quote(name) for name in policy.unit)
            yield f"{style.strong(quote(policy.path))}: each {units} is a checkpoint unit"
            if policy.done:
                names = ("a file" if n == b"*" else quote(n) for n in policy.done)
                yield f"  done when {' or '.join(names)} is published"
            yield f"  done when nothing was written for {policy.quiet_seconds:g} s"


@click.group(
    "policy",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(
        *(e.exit_code for e in (NoDaemonError, NotFoundError, ReadOnlyError, LimitError)),
        MediaUnavailableError.exit_code,
    ),
)
@common_options
@click.pass_context
def command(context: click.Context, *, as_json: bool) -> None:
    """See HELP."""
    context.obj = as_json


@command.command("set", help=SET_HELP, context_settings=CONTEXT_SETTINGS)
@click.argument("path", type=ANY_PATH)
@click.option(
    "--unit",
    "units",
    multiple=True,
    required=True,
    metavar="PATTERN",
    help="Names of the directories, as in a shell; . is PATH itself. May be repeated.",
)
@click.option(
    "--done",
    multiple=True,
    metavar="NAME",
    help="The file that a saver publishes last; may be repeated: any of them. '*', or a pattern"
    " with it: each file of such a name is a checkpoint of its own, there for good when it is"
    " closed or renamed.",
)
@click.option(
    "--quiet",
    type=float,
    metavar="SECONDS",
    help="Done when nothing was written for so long (30; 10 without --done and with '*').",
)
@common_options
def set_policy(
    path: str,
    units: Sequence[str],
    done: Sequence[str],
    quiet: float | None,
    *,
    as_json: bool,
) -> None:
    """See SET_HELP."""
    wanted = {"unit": list(units), "done": list(done), "quiet_seconds": quiet}
    _ask(path, wanted, as_json=as_json)


@command.command("show", help=SHOW_HELP, context_settings=CONTEXT_SETTINGS)
@click.argument("path", type=ANY_PATH)
@common_options
def show(path: str, *, as_json: bool) -> None:
    """See SHOW_HELP."""
    _ask(path, None, as_json=as_json)


@command.command("unset", help=UNSET_HELP, context_settings=CONTEXT_SETTINGS)
@click.argument("path", type=ANY_PATH)
@common_options
def unset(path: str, *, as_json: bool) -> None:
    """See UNSET_HELP."""
    _ask(path, {"unit": [], "done": [], "quiet_seconds": None}, as_json=as_json)


def _ask(path: str, wanted: Mapping[str, object] | None, *, as_json: bool) -> None:
    """``--json`` may stand before the second verb or behind it."""
    as_json = as_json or bool(click.get_current_context().obj)
    mountpoint, inside = mounted_place(path)
    parameters = {"path": inside} | ({} if wanted is None else {"set": wanted})
    messages = control_request(mountpoint, "policy", parameters)
    found = tuple(Policy.from_message(message) for message in messages)
    Output(as_json=as_json).report(Policies(os.fsencode(mountpoint), found))
