"""Files that a verb writes for its user, such as a manifest or a picture.

Never here: what is in them.

Invariants
- Nothing is replaced but an earlier file of the same kind, or an empty one.
"""

from __future__ import annotations

import re
from pathlib import Path

from cxlfs.errors import UsageError

_HEAD_BYTES = 256


def check_target(path: str | None, kind: re.Pattern[bytes], what: str) -> None:
    """Before anything is read: the file may be written. ``kind`` matches the beginning of such
    files. Raises UsageError, OSError.
    """
    target = Path(path) if path is not None else None
    if target is None or not (target.exists() or target.is_symlink()):
        return
    next_step = "name another file, or remove that one"
    if not target.is_file():
        raise UsageError(f"{path} is no regular file", next_step=next_step)
    with target.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head and kind.match(head) is None:
        raise UsageError(f"{path} is there, and is no {what}", next_step=next_step)
