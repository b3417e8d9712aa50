"""The programs that the system calls: ``mount.cxlfs`` for mount(8), ``fsck.cxlfs`` for fsck(8).

They take the arguments and give the exit codes that those programs expect; what they do is done by
``mount`` and ``verify``.

Never here: printing, checks.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, debug_option, wants_debug
from cxlfs.cli.exit_codes import FINDINGS, OK, REPAIRED, SIGNAL_BASE, USAGE
from cxlfs.cli.mount import describe, with_visitor
from cxlfs.cli.output import Output
from cxlfs.cli.program import run
from cxlfs.cli.target import served_by
from cxlfs.cli.verify import check
from cxlfs.daemon.linux import is_root
from cxlfs.daemon.mount import make_config, mount_background
from cxlfs.daemon.preflight import prepare
from cxlfs.daemon.remount import is_remount, remount
from cxlfs.errors import BusyError, UsageError

MOUNT_USAGE = 1
MOUNT_INTERRUPTED = 8
MOUNT_FAILURE = 32
"""Exit codes of mount(8)."""

FSCK_OK = 0
FSCK_CORRECTED = 1
FSCK_UNCORRECTED = 4
FSCK_OPERATIONAL = 8
FSCK_USAGE = 16
FSCK_CANCELLED = 32
"""Exit bits of fsck(8)."""

MOUNT_HELP = """Mount a cxlfs store; called by mount(8) for the types cxlfs and fuse.cxlfs.

\b
In /etc/fstab:
  /dev/dax0.0  /mnt/ckpt  fuse.cxlfs  defaults,nofail,allow_other  0 0

The options are those of "cxlfs mount -o"; what root mounts has suid and dev unless nosuid and
nodev are given. With -o remount,ro and remount,rw a mount becomes read-only, with its store closed
as by an unmount, and writable again. Exit codes as in mount(8): 0 mounted, 1 usage,
8 interrupted, 32 failed.
"""

FSCK_HELP = """Check the structures of the cxlfs store on SOURCE; called by fsck(8).

The store must not be mounted. File data is not read unless -f is given: that is the work of
"cxlfs verify", which a mounted store can do too. Exit codes as in fsck(8): 0 no errors, 1 errors
corrected, 4 errors left, 8 operational error, 16 usage, 32 cancelled.
"""

_INTERRUPTED = SIGNAL_BASE + signal.SIGINT


@click.command("mount.cxlfs", help=MOUNT_HELP, context_settings=CONTEXT_SETTINGS)
@click.argument("source", type=ANY_PATH)
@click.argument("mountpoint", type=ANY_PATH)
@click.option("-o", "options", multiple=True, metavar="OPTS", help="Mount options.")
@click.option("-s", "sloppy", is_flag=True, help="Ignore options that are not known.")
@click.option("-f", "fake", is_flag=True, help="Check everything, but do not mount.")
@click.option("-n", "no_mtab", is_flag=True, help="Ignored: the kernel keeps the list of mounts.")
@click.option("-v", "verbose", is_flag=True, help="Say what was mounted.")
@click.option("-r", "read_only", is_flag=True, help="The same as -o ro.")
@click.option("-w", "writable", is_flag=True, help="The same as -o rw.")
@click.option("-t", "file_system_type", metavar="TYPE", help="Ignored: it is cxlfs.")
@debug_option
def mount_command(
    source: str,
    mountpoint: str,
    options: Sequence[str],
    file_system_type: str | None,
    *,
    sloppy: bool,
    fake: bool,
    no_mtab: bool,
    verbose: bool,
    read_only: bool,
    writable: bool,
) -> None:
    """See MOUNT_HELP."""
    del file_system_type, no_mtab
    # mount(8) leaves out suid and dev, as they are what root gets from any other file system.
    given = ["suid,dev"] if is_root() else []
    texts = [*given, *(["rw"] if writable else []), *(["ro"] if read_only else []), *options]
    if is_remount(texts):
        if not fake:
            remount(mountpoint, texts)
        return
    if sloppy:
        texts = [option for text in texts for option in text.split(",") if _is_known(option)]
    config = with_visitor(make_config(source, mountpoint, options=texts, debug=wants_debug()))
    prepare(config)
    if fake:
        return
    mount_background(config)
    if verbose:
        Output(as_json=False).report(describe(config))


def _is_known(option: str) -> bool:
    try:
        make_config("/", "/", options=[option])
    except UsageError:
        return False
    return True


def mount_main(arguments: Sequence[str] | None = None) -> int:
    """The program ``mount.cxlfs``; returns an exit code of mount(8)."""
    given = sys.argv[1:] if arguments is None else arguments
    code = run(mount_command, given, program="mount.cxlfs")
    return {OK: OK, USAGE: MOUNT_USAGE, _INTERRUPTED: MOUNT_INTERRUPTED}.get(code, MOUNT_FAILURE)


# --- fsck ---------------------------------------------------------------------------------------


@click.command("fsck.cxlfs", help=FSCK_HELP, context_settings=CONTEXT_SETTINGS)
@click.argument("source", type=ANY_PATH)
@click.option("-a", "automatic", is_flag=True, help="Repair without asking.")
@click.option("-p", "preen", is_flag=True, help="The same as -a.")
@click.option("-y", "assume_yes", is_flag=True, help="The same as -a.")
@click.option("-n", "no_changes", is_flag=True, help="Change nothing (the default).")
@click.option("-f", "with_data", is_flag=True, help="Check file data, too.")
@click.option("-C", "progress", metavar="[FD]", is_flag=True, help="Ignored.")
@click.option("-M", "skip_mounted", is_flag=True, help="Do nothing, and succeed, when mounted.")
@click.option("-v", "-V", "-T", "-r", "-l", "ignored", is_flag=True, help="Ignored.")
@click.option("-t", "file_system_type", metavar="TYPE", help="Ignored: it is cxlfs.")
@debug_option
def fsck_command(
    source: str,
    file_system_type: str | None,
    *,
    automatic: bool,
    preen: bool,
    assume_yes: bool,
    no_changes: bool,
    with_data: bool,
    progress: bool,
    skip_mounted: bool,
    ignored: bool,
) -> int:
    """See FSCK_HELP."""
    del file_system_type, progress, ignored
    repair = automatic or preen or assume_yes
    if repair and no_changes:
        raise UsageError("-n changes nothing, -a, -p and -y repair", next_step="choose one of them")
    daemon = served_by(source)
    if daemon is not None:
        if skip_mounted:
            return OK
        raise BusyError(
            f"{source} is mounted on {daemon.mountpoint}",
            next_step=f"check it while it is mounted: cxlfs verify {daemon.mountpoint}",
        )
    return check(
        source, Output(as_json=False), structure_only=not with_data, repair=repair, record=None
    )


def fsck_main(arguments: Sequence[str] | None = None) -> int:
    """The program ``fsck.cxlfs``; returns exit bits of fsck(8)."""
    given = _without_descriptor(sys.argv[1:] if arguments is None else arguments)
    code = run(fsck_command, given, program="fsck.cxlfs")
    return {
        OK: FSCK_OK,
        REPAIRED: FSCK_CORRECTED,
        FINDINGS: FSCK_UNCORRECTED,
        USAGE: FSCK_USAGE,
        _INTERRUPTED: FSCK_CANCELLED,
    }.get(code, FSCK_OPERATIONAL)


def _without_descriptor(arguments: Sequence[str]) -> list[str]:
    """``-C5`` and ``-C 5`` become ``-C``: fsck(8) names a descriptor for its own progress bar."""
    result: list[str] = []
    for number, argument in enumerate(arguments):
        follows = number > 0 and arguments[number - 1] == "-C"
        is_last = number == len(arguments) - 1
        if follows and argument.isdigit() and not is_last:
            continue
        attached = argument.startswith("-C") and argument[2:].isdigit()
        result.append("-C" if attached else argument)
    return result
