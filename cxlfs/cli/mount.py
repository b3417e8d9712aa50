"""``cxlfs mount``: start the daemon of a store and wait until the mount answers.

Never here: checks of the machine and the mount point, the daemon itself (``fuse``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from typing import ClassVar

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options, wants_debug
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style, quote, quote_first
from cxlfs.cli.status_parts import Getter, Recovery, Tidied, recovery_from, tidied_from
from cxlfs.cli.target import OPEN_EXIT_CODES, naming_the_mount
from cxlfs.control import mountinfo
from cxlfs.control.client import control_request, find_and_connect, is_served
from cxlfs.daemon.mount import MountConfig, make_config, mount_background, mount_foreground
from cxlfs.daemon.options import TIDY_SECONDS_MAX
from cxlfs.errors import CxlfsError, FuseUnavailableError

HELP = """Mount the store on SOURCE at the directory MOUNTPOINT, and return when it answers.

A store that was not closed cleanly is recovered first: everything that was committed is there. A
dead mount that a killed daemon left on MOUNTPOINT is cleared. An ordinary user needs fusermount3
(Debian package fuse3).

\b
Options for -o, separated by commas:
  ro, rw                       the same as --read-only, or its opposite
  verify=read|off              the same as --verify
  transport=native|pyfuse3     the same as --transport
  allow_other                  the same as --allow-other
  default_permissions          check permissions also where only root may enter
  verified_for=SECONDS         how long a mapped file, once verified, is so for others (300)
  commit=SECONDS               how often a file that stays open is committed (30)
  busy_poll=MICROSECONDS       how long to look for the next request before sleeping (100)
  wakeup_latency=MICROSECONDS  let idle processors wake so fast while mounted (root; small files)
  allow_incomplete_overwrite   when two versions of a file do not fit, give up the old one
  torn=back|tell|off           a torn file: the version before comes back, is kept, or neither
  dedup=off|on                 parts that files have in common are kept once; off is the default
  units=auto|policy|off        directories that are done or undone as a whole: those of well-known
                               frameworks and of policies (see "cxlfs policy"; the default), those
                               of policies alone, or none
  tidy, tidy=off|unclean|always
                               set checkpoints aside that were not finished, as "cxlfs tidy --all
                               --structure-only" does, before anybody gets in: after a crash (what
                               "tidy" alone means), or each time; off is the default
  suid, dev                    set-user-ID programs and devices work (root)
  noexec, noatime, and what fstab has for others (nofail, _netdev, x-systemd...)

\b
Examples:
  cxlfs mount /dev/dax0.0 /mnt/ckpt
  cxlfs mount store.cxlfs /mnt/ckpt --allow-other -o commit=5
  cxlfs mount store.cxlfs /mnt/ckpt --read-only --foreground
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Mounted(Report):
    """A mount that answers. ``state`` is that of ``cxlfs status``."""

    schema: ClassVar[str] = "cxlfs.mount/1"

    source: bytes
    mountpoint: bytes
    read_only: bool
    pid: int | None
    log_path: bytes | None
    state: str | None
    recovered_records: int | None
    open_units: int
    open_unit_paths: tuple[str, ...]
    already_mounted: bool
    """It was mounted there before; nothing was changed."""
    weakened: tuple[str, ...]
    """What this mount does not promise, or its source cannot."""
    tidied: Tidied | None
    """What became of checkpoints that were not finished; None: that was not asked for."""

    def lines(self, style: Style, /) -> Iterator[str]:
        how = " read-only" if self.read_only else ""
        if self.already_mounted:
            verb = style.good("already mounted")
            yield f"{verb}: {quote(self.source)} on {quote(self.mountpoint)}{how}"
            return
        yield f"{style.good('mounted')} {quote(self.source)} on {quote(self.mountpoint)}{how}"
        if self.recovered_records is not None or self.open_units:
            yield self._unclean_text()
        if self.tidied is not None and (self.tidied.checkpoints or self.tidied.trackers):
            yield f"tidied: {self.tidied.words}"

    def _unclean_text(self) -> str:
        text = f"recovered {self.recovered_records} journal records after an unclean end"
        if self.recovered_records is None:
            text = "the last mount left checkpoints unfinished"
        if self.open_units:
            how = "unfinished, may be mixed" if self.read_only else "rolled back"
            text += f"; {how}: {quote_first(self.open_unit_paths, self.open_units)}"
        return text


@click.command(
    "mount",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(FuseUnavailableError.exit_code, *OPEN_EXIT_CODES),
)
@click.argument("source", type=ANY_PATH)
@click.argument("mountpoint", type=ANY_PATH)
@click.option("--foreground", is_flag=True, help="Serve in this process, until it is unmounted.")
@click.option("--read-only", is_flag=True, help="Change nothing, neither files nor the store.")
@click.option(
    "--verify",
    type=click.Choice(["read", "off"]),
    help="Check every byte read against its checksum (default: read), or trust the media.",
)
@click.option(
    "--transport",
    type=click.Choice(["native", "pyfuse3"]),
    help="Serve file data with threads in C (default: native), or with pyfuse3's handlers.",
)
@click.option("--allow-other", is_flag=True, help="Let other users in; permissions are checked.")
@click.option("-o", "options", multiple=True, metavar="OPTS", help="Mount options, see above.")
@common_options
def command(
    source: str,
    mountpoint: str,
    options: Sequence[str],
    verify: str | None,
    transport: str | None,
    *,
    foreground: bool,
    read_only: bool,
    allow_other: bool,
    as_json: bool,
) -> None:
    """See HELP."""
    config = with_visitor(
        make_config(
            source,
            mountpoint,
            options=options,
            read_only=read_only,
            verify=verify,
            transport=transport,
            allow_other=allow_other,
            debug=wants_debug(),
        )
    )
    output = Output(as_json=as_json)
    if foreground:
        mount_foreground(config)
        return
    mounted = _already_mounted(config)
    if mounted is None:
        with naming_the_mount(config.source):
            mount_background(config)
        mounted = describe(config)
    output.report(mounted)
    for text in mounted.weakened:
        output.warning(text)
    if mounted.tidied is not None and mounted.tidied.is_left:
        output.warning(f"not everything was tidied: {mounted.tidied.message}")
    if mounted.state not in ("ONLINE", None) and not config.read_only:
        output.warning(f"the store is {mounted.state}; see: cxlfs status {config.mountpoint}")


def with_visitor(config: MountConfig) -> MountConfig:
    """The same, with the command that tidies the store where that is asked for: see
    ``daemon.first_visit``.
    """
    if config.tidy == "off":
        return config
    call = "import sys; from cxlfs.cli import main; sys.exit(main(sys.argv[1:]))"
    tidy = ("tidy", "--all", "--structure-only", "--seconds-max", f"{TIDY_SECONDS_MAX:g}", "--json")
    return dataclasses.replace(config, visitor=(sys.executable, "-P", "-c", call, *tidy, "--"))


def _already_mounted(config: MountConfig) -> Mounted | None:
    """What serves this source on this mount point already, as it was asked for now; else None."""
    mount = mountinfo.find_mount(config.mountpoint)
    if mount is None or mount.file_system_type != mountinfo.FILE_SYSTEM_TYPE:
        return None
    if ("ro" in mount.options) != config.read_only or not _is_same(mount.source, config.source):
        return None
    if not is_served(config.mountpoint):
        return None
    mounted = describe(config)
    if mounted.state is None:  # a daemon that was killed has its socket until it is gone
        return None
    return dataclasses.replace(mounted, already_mounted=True)


def _is_same(one: str, other: str) -> bool:
    try:
        return one == other or os.path.samefile(one, other)  # noqa: PTH121
    except OSError:
        return False


def describe(config: MountConfig) -> Mounted:
    """What came up. A daemon that cannot be asked is no failure: the mount answers."""
    weakened: tuple[str, ...] = ()
    pid: int | None = None
    log_path: bytes | None = None
    state: str | None = None
    records: int | None = None
    recovery: Recovery | None = None
    tidied: Tidied | None = None
    with contextlib.suppress(CxlfsError):
        channel, registration = find_and_connect(config.mountpoint)
        channel.close()
        pid = registration.pid
        log_path = os.fsencode(registration.log_path) if registration.log_path else None
        for message in control_request(config.mountpoint, "status"):
            state = str(message.get("state"))
            recovery = recovery_from(Getter(message).part("recovery"))
            records = None if recovery.clean else recovery.records
            tidied = tidied_from(Getter(message))
            found = message.get("weakened")
            weakened = tuple(str(text) for text in found) if isinstance(found, list) else ()
    return Mounted(
        source=os.fsencode(config.source),
        mountpoint=os.fsencode(config.mountpoint),
        read_only=config.read_only,
        pid=pid,
        log_path=log_path,
        state=state,
        recovered_records=records,
        open_units=0 if recovery is None else recovery.open_units,
        open_unit_paths=() if recovery is None else recovery.open_unit_paths,
        already_mounted=False,
        weakened=weakened,
        tidied=tidied,
    )
