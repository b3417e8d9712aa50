"""The command line: ``cxlfs VERB``. The group and the one mapping of errors to exit codes are in
``program``; a verb is a file of its name; only ``output`` prints.

Never here: what a program does. What is asked of this package is imported when it is asked for, so
that Ctrl-C ends a program quietly also while Python is still loading it.
"""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable, Sequence

__all__ = ["VERBS", "command", "fsck_main", "main", "mount_main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The program ``cxlfs``; returns the exit code."""
    return _entry("program", "main")(arguments)


def mount_main(arguments: Sequence[str] | None = None) -> int:
    """The program ``mount.cxlfs``; returns an exit code of mount(8)."""
    return _entry("system", "mount_main")(arguments)


def fsck_main(arguments: Sequence[str] | None = None) -> int:
    """The program ``fsck.cxlfs``; returns exit bits of fsck(8)."""
    return _entry("system", "fsck_main")(arguments)


def _entry(module: str, name: str) -> Callable[[Sequence[str] | None], int]:
    """Imported with SIGINT as a shell expects it: the program is gone, without a traceback."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        found: Callable[[Sequence[str] | None], int]
        found = getattr(importlib.import_module(f"cxlfs.cli.{module}"), name)
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    return found


def __getattr__(name: str) -> object:
    if name in ("VERBS", "command"):
        return getattr(importlib.import_module("cxlfs.cli.program"), name)
    raise AttributeError(name)
