"""File systems in memory with huge pages, for this process and what it begins alone: mounted in a
mount namespace of its own, so that they are gone with it.

Never here: changing what the machine keeps for huge pages, but in :func:`reserved`, which puts it
back.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
_CLONE_NEWNS, _RECURSIVE, _PRIVATE = 0x20000, 0x4000, 1 << 18


class NotHereError(Exception):
    """This machine, or this user, cannot do it; says why."""


def enter(kind: str, options: str, at: Path) -> None:
    """Mount it at ``at``, in a new namespace: before there are threads. Raises NotHereError."""
    libc = ctypes.CDLL(None, use_errno=True)
    calls = [
        ("unshare", (_CLONE_NEWNS,)),
        ("mount", (b"none", b"/", None, _RECURSIVE | _PRIVATE, None)),
        ("mount", (kind.encode(), os.fsencode(at), kind.encode(), 0, options.encode())),
    ]
    for name, given in calls:
        if getattr(libc, name)(*given) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise NotHereError(f"{kind} with {options} cannot be mounted: {name}: {reason}")


@contextlib.contextmanager
def reserved(pages: int, folder: Path) -> Iterator[None]:
    """So many more huge pages in the machine's pool, given back at the end. ``folder``: the same
    for all who do that; one at a time. Raises NotHereError.
    """
    with (folder / "huge-pages.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            before = int(HUGE_PAGES.read_text(encoding="ascii"))
            HUGE_PAGES.write_text(str(before + pages), encoding="ascii")
        except OSError as error:
            raise NotHereError(f"no huge pages can be reserved: {error}") from error
        try:
            have = int(HUGE_PAGES.read_text(encoding="ascii"))
            if have < before + pages:
                raise NotHereError(f"of {pages} huge pages the machine gives {have - before}")
            yield
        finally:
            HUGE_PAGES.write_text(str(before), encoding="ascii")
