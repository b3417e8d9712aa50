"""The background process behind a mount: leaves its caller, serves, reports how it went.

Run by ``mount.mount_background`` as ``python -m cxlfs.daemon.start SOURCE MOUNTPOINT``, with the
configuration on standard input and a descriptor for the report.

Never here: serving itself (``service``), which is imported after the fork: numeric libraries start
threads when they are imported, and threads do not survive a fork.

Invariants
- Exactly one report is made: ready, or an error as in ``wire``.
- The process keeps no directory and no terminal of its caller, and is no child of it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import logging
import os
import sys
from pathlib import Path

from cxlfs.control.wire import error_to_dict
from cxlfs.daemon import linux, runtime
from cxlfs.daemon.options import MountConfig
from cxlfs.errors import CxlfsError, MountError

log = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    """Fork, and serve in the child. Returns the exit status of the process it is running in."""
    parser = argparse.ArgumentParser(prog="python -m cxlfs.daemon.start")
    parser.add_argument("source", help="shown by ps and in messages about locks")
    parser.add_argument("mountpoint")
    parser.add_argument("--report-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    text = sys.stdin.read()
    if os.fork() != 0:
        return 0
    return _run(text, _Report(options.report_fd))


def _run(config_text: str, report: _Report) -> int:
    log_path: Path | None = None
    try:
        config = MountConfig.from_json(config_text)
        log_path = _log_path(config)
        _leave_caller(log_path)
        runtime.log_to_file(log_path, debug=config.debug)
        # numpy's linear algebra is not used: its threads would only cost memory.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        from cxlfs.daemon.service import serve  # noqa: PLC0415  see the header

        def on_ready() -> None:
            linux.set_process_title(f"cxlfs: {config.mountpoint} ({config.source})")
            report.ready()

        serve(config, on_ready=on_ready, log_path=str(log_path))
    except CxlfsError as error:
        if report.sent:
            log.error("%s; %s", error.message, error.next_step)  # noqa: TRY400  expected errors
        elif log_path is not None:
            _remove_if_empty(log_path)
        report.failed(error)
        return error.exit_code
    except Exception as error:
        log.exception("the daemon failed")
        report.failed(error)
        return 1
    return 0


class _Report:
    """The one line that tells the waiting command how it went."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.sent = False

    def ready(self) -> None:
        self._send({"message_type": "ready", "pid": os.getpid()})

    def failed(self, error: Exception) -> None:
        self._send(error_to_dict(error))

    def _send(self, message: dict[str, object]) -> None:
        if self.sent:
            return
        self.sent = True
        try:
            os.write(self._descriptor, json.dumps(message).encode() + b"\n")
        except OSError:
            log.info("nobody waits for the mount any more")
        os.close(self._descriptor)


def _log_path(config: MountConfig) -> Path:
    if config.log_path is not None:
        return Path(config.log_path)
    return runtime.default_log_path(runtime.make_runtime_directory(), config.mountpoint)


def _remove_if_empty(log_path: Path) -> None:
    """A mount that did not come up has told its caller why: no empty file is left to look into."""
    with contextlib.suppress(OSError):
        if log_path.stat().st_size == 0:
            log_path.unlink()


def _leave_caller(log_path: Path) -> None:
    """Give up the caller's terminal; standard error keeps the last words of libraries.

    Raises MountError when the log cannot be written.
    """
    os.umask(0o077)
    try:
        output = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise MountError(
            f"cannot write the log {log_path}: {error.strerror}", next_step="name another log file"
        ) from error
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(null)
    faulthandler.enable()


if __name__ == "__main__":
    sys.exit(main())
