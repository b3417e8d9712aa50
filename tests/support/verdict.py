"""What verify and an ordinary reader say of a media, in forms that tests compare."""

from __future__ import annotations

import functools
from typing import TypeAlias

from cxlfs.errors import CxlfsError
from cxlfs.media import MemoryMedia
from cxlfs.store import Store, StoreOptions
from cxlfs.verify import Finding, run_passes
from tests.support.corrupt import Anatomy, populated_media
from tests.support.stores import Entry, picture

Picture: TypeAlias = dict[bytes, Entry]
"""What a user sees of a store: each path."""


@functools.cache
def good_store(*, closed: bool, chained: bool = False) -> Anatomy:
    """A store with a bit of everything; shared: damage it only inside ``with Damage``."""
    return Anatomy(populated_media(closed=closed, chained=chained))


@functools.cache
def good_picture(*, closed: bool, chained: bool = False) -> Picture:
    """Everything a user can see of it."""
    seen = picture_of(good_store(closed=closed, chained=chained).media)
    assert isinstance(seen, dict)
    return seen


def picture_of(media: MemoryMedia) -> Picture | CxlfsError:
    """Everything a user can see of the store, or why it cannot be seen."""
    try:
        store = Store.open(media, StoreOptions(read_only=True))
        try:
            return picture(store)
        finally:
            store.close()
    except CxlfsError as error:
        return error


def findings_of(media: MemoryMedia, *, structure_only: bool = False) -> list[Finding]:
    return list(run_passes(media, structure_only=structure_only))


Short = tuple[str, str, int | None]


def short(findings: list[Finding]) -> list[Short]:
    """(id, structure, media offset) of each."""
    return [(finding.id, finding.structure, finding.media_offset) for finding in findings]
