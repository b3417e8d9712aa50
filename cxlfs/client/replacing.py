"""A file that gets new content whole, or not at all: whoever writes it may fail in the middle.

    with replacing("/mnt/ckpt/last.pt") as file:
        torch.save(state, file)

Never here: temporary names. A mounted store keeps the old content until the new one is closed.

Invariants
- A name that did not exist before does not exist after an exception, unless somebody else made it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cxlfs.client.files import File, open  # noqa: A004  as in cxlfs.client

if TYPE_CHECKING:
    from _typeshed import StrOrBytesPath


@contextlib.contextmanager
def replacing(path: StrOrBytesPath) -> Iterator[File]:
    """The file as ``open(path, "wb")`` gives it, closed in the end: then it is durable on a store.

    After an exception a name that is new is gone, and an old one has its old content on a mounted
    store; elsewhere it is empty, as opening has emptied it. Raises OSError.
    """
    with contextlib.ExitStack() as steps:
        file, new = _opened(path)
        if new is not None:
            steps.callback(os.close, new)
        try:
            yield file
            file.close()
        except BaseException:
            if new is not None:
                _remove(path, new)
            file.discard()
            raise


def _opened(path: StrOrBytesPath) -> tuple[File, int | None]:
    """And, where the name is new, a descriptor that keeps its inode number from meaning another
    file.
    """
    if os.path.lexists(path):
        return open(path, "wb"), None
    try:
        file = open(path, "xb")
    except FileExistsError:
        return open(path, "wb"), None
    try:
        return file, os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # it has another name already: it is no longer ours to remove
        return file, None


def _remove(path: StrOrBytesPath, new: int) -> None:
    """The name, as long as it means the file that was made."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.lstat(path), os.fstat(new)):
            Path(os.fsdecode(path)).unlink()
