"""Mount a store: in the background, returning when it answers, or in the foreground.

What a command line needs; ``daemon.unmount`` and ``control.client`` are the other halves. Importing
this does not import trio.

Never here: printing.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys

from cxlfs.control import discovery
from cxlfs.control.wire import error_from_dict
from cxlfs.daemon import linux, runtime
from cxlfs.daemon.options import MountConfig, make_config
from cxlfs.daemon.unmount import unmount
from cxlfs.errors import CxlfsError, MountError

__all__ = ["MountConfig", "make_config", "mount_background", "mount_foreground", "unmount"]

READY_SECONDS_MAX = 600.0
"""Recovery of a large store may take long; a silent daemon is given up after this."""

_REPORT_BYTES_MAX = 1 << 16


def mount_background(config: MountConfig, *, seconds_max: float = READY_SECONDS_MAX) -> None:
    """Start a daemon of its own session; on return the mount answers.

    Raises whatever stood in the way, as the daemon found it: FuseUnavailableError, MountError,
    BusyError, MediaUnavailableError, NotACxlfsError and the other errors of opening a store.
    """
    reader, writer = os.pipe()
    try:
        launcher = _launch(config, writer)
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    try:
        line = _read_line(reader, seconds_max)
    except BaseException:  # a timeout, Ctrl-C: no half-started daemon stays behind
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGTERM)
        raise
    finally:
        os.close(reader)
        launcher.wait()
    _raise_unless_ready(config, line)


def _launch(config: MountConfig, writer: int) -> subprocess.Popen[bytes]:
    """Start the process that forks the daemon; both are in a process group of their own."""
    launcher = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "cxlfs.daemon.start"),
            *("--report-fd", str(writer), "--", config.source, config.mountpoint),
        ],
        stdin=subprocess.PIPE,
        pass_fds=[writer],
        start_new_session=True,
    )
    if launcher.stdin is not None:
        with contextlib.suppress(BrokenPipeError), launcher.stdin as stdin:
            stdin.write(config.to_json().encode())
    return launcher


def _read_line(reader: int, seconds_max: float) -> bytes:
    """What the daemon reports; empty when it ended without a word. Raises MountError."""
    line = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while not line.endswith(b"\n") and len(line) < _REPORT_BYTES_MAX:
            if not selector.select(seconds_max):
                raise MountError(f"the mount did not come up within {seconds_max:.0f} s")
            part = os.read(reader, _REPORT_BYTES_MAX)
            if not part:
                break
            line += part
    return bytes(line)


def _raise_unless_ready(config: MountConfig, line: bytes) -> None:
    try:
        report = json.loads(line)
    except ValueError:
        log_path = config.log_path or runtime.default_log_path(
            discovery.runtime_directory(), config.mountpoint
        )
        raise MountError(
            f"the daemon ended before {config.mountpoint} was mounted",
            next_step=f"read its log: {log_path}",
        ) from None
    if report.get("message_type") != "ready":
        raise error_from_dict(report)


def mount_foreground(config: MountConfig) -> None:
    """Serve in this process until it is unmounted or gets SIGTERM or SIGINT; messages go to
    standard error, and a service manager is told when the mount answers. Raises CxlfsError.
    """
    from cxlfs.daemon.service import serve  # noqa: PLC0415  imports trio and pyfuse3

    runtime.log_to_stderr(debug=config.debug)

    def on_ready() -> None:
        linux.notify_service_manager(
            f"READY=1\nSTATUS=serving {config.source} on {config.mountpoint}"
        )

    try:
        serve(config, on_ready=on_ready, log_path=None)
    except CxlfsError as error:
        linux.notify_service_manager(f"STATUS={error.message}")
        raise
