"""Programs that run as another user, in test processes that are root's."""

from __future__ import annotations

import functools
import os
import pwd
import shutil
import subprocess
import sys

USER = "nobody"
READ_EVERYTHING = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
"""For an interpreter in a private directory; gives no right to write or to mount."""


def why_not(*programs: str) -> str | None:
    """Why a test cannot become another user; ``programs``: what it needs besides."""
    for program in ("setpriv", *programs):
        if shutil.which(program) is None:
            return f"no {program}"
    if os.geteuid() != 0:
        return "needs root to become another user"
    if not _can_run_here([]) and not _can_run_here(READ_EVERYTHING):
        return f"user {USER} cannot run {sys.executable}"
    return None


def command(*arguments: str, uid: int | None = None) -> list[str]:
    """Python with these arguments, as user ``uid`` (USER), who is in no group but his own."""
    return _command(list(_capabilities_needed()), uid, *arguments)


def _command(capabilities: list[str], uid: int | None, *arguments: str) -> list[str]:
    uid = pwd.getpwnam(USER).pw_uid if uid is None else uid
    identity = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    return ["setpriv", *identity, *capabilities, sys.executable, *arguments]


@functools.cache
def _capabilities_needed() -> tuple[str, ...]:
    return () if _can_run_here([]) else tuple(READ_EVERYTHING)


def _can_run_here(capabilities: list[str]) -> bool:
    """The interpreter and the package can be read with these rights, by a second process too:
    the first one is still started with those of root.
    """
    second = [sys.executable, "-c", "import cxlfs.daemon.service"]
    code = f"import subprocess; subprocess.run({second}, check=True)"
    started = _command(capabilities, None, "-c", code)
    return subprocess.run(started, cwd="/", capture_output=True, check=False).returncode == 0
