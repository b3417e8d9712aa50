"""DIR of a command about checkpoints: whether it can be asked, and what it means that it has none.

Never here: which checkpoints there are (``checkpoint``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from cxlfs.checkpoint import nothing_in, require_directory
from cxlfs.errors import (
    DirectoryAbsentError,
    DirectoryUnreachableError,
    NoCheckpointError,
    NoDirectoryError,
    NotMountedError,
    UnknownCheckpointError,
)

DIRECTORY_EXIT_CODES = tuple(
    error.exit_code
    for error in (
        DirectoryAbsentError,
        DirectoryUnreachableError,
        NoDirectoryError,
        UnknownCheckpointError,
        NotMountedError,
    )
)

plain_option = click.option(
    "--plain", is_flag=True, help="DIR may be on no store: empty is a first start there, too."
)


@contextlib.contextmanager
def first_start(directory: str, *, plain: bool) -> Iterator[None]:
    """Say of a directory that cannot be asked why; of an empty one whether that is a first start.

    Raises DirectoryAbsentError, DirectoryUnreachableError, NoDirectoryError, NotMountedError,
    NoCheckpointError.
    """
    require_directory(directory)
    try:
        yield
    except NoCheckpointError:
        raise nothing_in(directory, plain=plain) from None
