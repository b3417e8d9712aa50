"""A file that gets new content whole, or not at all: whoever writes it may fail in the middle.

    with replacing("/mnt/ckpt/last.pt") as file:
        torch.save(state, file)

Never here: temporary names. A mounted store keeps the old content until the new one is closed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cxlfs.client.files import File
from cxlfs.native.client import LibraryFile

if TYPE_CHECKING:
    from _typeshed import StrOrBytesPath


@contextlib.contextmanager
def replacing(path: StrOrBytesPath) -> Iterator[File]:
    """The file as ``open(path, "wb")`` gives it, closed in the end: then it is durable on a store.

    After an exception a name that is new is gone, unless somebody else has taken it, and an old one
    has its old content on a mounted store; elsewhere it is empty, as opening has emptied it. A file
    that was closed in between is what it was then. Raises OSError.
    """
    try:
        made = LibraryFile.replacing(os.fsencode(path))
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    file = File(path, "wb", made)
    try:
        yield file
        file.close()
    except BaseException:
        file.discard()
        raise
