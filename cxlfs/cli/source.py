"""The media of a SOURCE that no daemon serves, and the store in it, opened for one command.

Never here: deciding whether a daemon serves it (``target``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cxlfs.cli.target import naming_the_mount
from cxlfs.media import Media, open_media
from cxlfs.store import Store, StoreOptions


@contextlib.contextmanager
def media_of(source: str, *, read_only: bool = True, exclusive: bool = True) -> Iterator[Media]:
    """The media of a store that no daemon serves. Raises what ``open_media`` raises."""
    with naming_the_mount(source):
        media = open_media(source, read_only=read_only, exclusive=exclusive)
    try:
        yield media
    finally:
        media.close()


@contextlib.contextmanager
def store_of(source: str) -> Iterator[Store]:
    """The store in a source that no daemon serves, opened read-only. Raises what opening raises."""
    with media_of(source) as media:
        store = Store.open(media, StoreOptions(read_only=True))
        try:
            yield store
        finally:
            store.close()
