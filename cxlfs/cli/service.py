"""``cxlfs service``: let systemd mount a store when the machine starts.

Never here: what the files say (``daemon.systemd``), running systemctl.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style, quote
from cxlfs.daemon import systemd
from cxlfs.daemon.options import make_config
from cxlfs.errors import OccupiedError

HELP = """Let systemd mount a store at boot, and mount it again when its daemon was killed.

"install" writes the unit cxlfs@.service with the absolute path of this program, so that it works
from a virtual environment too, and a configuration for the mount point. "remove" takes away what
"install" wrote. Neither calls systemctl: what to run next is said.

\b
Examples:
  cxlfs service install /dev/dax0.0 /mnt/ckpt -o allow_other
  cxlfs service install /dev/dax0.0 /mnt/ckpt --dry-run --json
  cxlfs service remove /mnt/ckpt
"""

INSTALL_HELP = """Write the unit, and the configuration of one mount.

\b
Examples:
  cxlfs service install /dev/dax0.0 /mnt/ckpt -o allow_other
  cxlfs service install /dev/dax0.0 /mnt/ckpt --dry-run
"""

REMOVE_HELP = """Remove the configuration of one mount and, with the last one, the unit.

\b
Example:
  systemctl disable --now cxlfs@mnt-ckpt.service; cxlfs service remove /mnt/ckpt
"""


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceReport(Report):
    """What was written or removed, or would be."""

    schema: ClassVar[str] = "cxlfs.service/1"

    action: str
    dry_run: bool
    service: str
    mountpoint: bytes
    source: bytes | None
    program: str | None
    changed: tuple[bytes, ...]
    """Paths of the files that were written or removed, or would be."""
    contents: tuple[str, ...]
    """With --dry-run: what would be written, file by file."""
    next_step: str

    def lines(self, style: Style, /) -> Iterator[str]:
        verb = {"install": "wrote", "remove": "removed"}[self.action]
        if self.dry_run:
            verb = {"install": "would write", "remove": "would remove"}[self.action]
        if not self.changed:
            yield f"nothing to {self.action}: {quote(self.service)}"
        for number, path in enumerate(self.changed):
            yield f"{style.good(verb)} {quote(path)}"
            if self.contents:
                yield from (f"    {line}" for line in self.contents[number].splitlines())
        yield f"next: {self.next_step}"


@click.group(
    "service", help=HELP, context_settings=CONTEXT_SETTINGS, epilog=epilog(OccupiedError.exit_code)
)
def command() -> None:
    """See HELP."""


_ROOT = click.option(
    "--root",
    type=click.Path(path_type=Path),
    default=Path("/"),
    metavar="DIRECTORY",
    help="Write below this directory instead of /, for images.",
)
_DRY_RUN = click.option("--dry-run", is_flag=True, help="Show what would change; change nothing.")


@command.command("install", help=INSTALL_HELP, context_settings=CONTEXT_SETTINGS)
@click.argument("source", type=ANY_PATH)
@click.argument("mountpoint", type=ANY_PATH)
@click.option("-o", "options", multiple=True, metavar="OPTS", help="Mount options.")
@_ROOT
@_DRY_RUN
@common_options
def install(
    source: str,
    mountpoint: str,
    options: Sequence[str],
    root: Path,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """See INSTALL_HELP."""
    config = make_config(source, mountpoint, options=options)
    program = systemd.program_path()
    files = systemd.service_files(
        config.source,
        config.mountpoint,
        ",".join(options) or "defaults",
        program=program,
        root=root,
    )
    paths = [files.unit_path, files.configuration_path]
    changed = paths if dry_run else systemd.install(files)
    make = (
        "" if Path(config.mountpoint).is_dir() else f"mkdir -p {shlex.quote(config.mountpoint)}; "
    )
    Output(as_json=as_json).report(
        ServiceReport(
            action="install",
            dry_run=dry_run,
            service=files.service,
            mountpoint=os.fsencode(config.mountpoint),
            source=os.fsencode(config.source),
            program=program,
            changed=tuple(os.fsencode(path) for path in changed),
            contents=(files.unit, files.configuration) if dry_run else (),
            next_step=f"{make}systemctl daemon-reload; systemctl enable --now '{files.service}'",
        )
    )


@command.command("remove", help=REMOVE_HELP, context_settings=CONTEXT_SETTINGS)
@click.argument("mountpoint", type=ANY_PATH)
@_ROOT
@_DRY_RUN
@common_options
def remove(mountpoint: str, root: Path, *, dry_run: bool, as_json: bool) -> None:
    """See REMOVE_HELP."""
    absolute = os.path.abspath(mountpoint)  # noqa: PTH100  Path.absolute keeps ".."
    instance = systemd.instance_of(absolute)
    gone = systemd.remove(instance, root=root, dry_run=dry_run)
    Output(as_json=as_json).report(
        ServiceReport(
            action="remove",
            dry_run=dry_run,
            service=f"cxlfs@{instance}.service",
            mountpoint=os.fsencode(absolute),
            source=None,
            program=None,
            changed=tuple(os.fsencode(path) for path in gone),
            contents=(),
            next_step=f"systemctl disable --now 'cxlfs@{instance}.service'; "
            "systemctl daemon-reload",
        )
    )
