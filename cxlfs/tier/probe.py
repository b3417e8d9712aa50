"""What a bucket does, and not what it says: tried before anything is trusted to it.

Never: leaves its objects behind, where it may delete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import secrets

from cxlfs.errors import TierUnavailableError, TierUntrustedError
from cxlfs.tier.objects import Bucket

PROBES_NAME = ".cxlfs-probe"
_BYTES = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Trust:
    """``creates``: a second create of one name is refused. ``tells_md5``: an object's entity tag is
    the MD5 of its bytes, so that what arrived can be compared without reading it back.
    """

    creates: bool
    tells_md5: bool


def probe(bucket: Bucket, *, single_writer: bool = False) -> Trust:
    """Puts an object, once more, lists it, reads it back, deletes it. ``single_writer``: a bucket
    that accepts a second create will do: somebody vouches that nobody else writes there.

    Raises TierUntrustedError, TierUnavailableError, TierFullError.
    """
    key = f"{PROBES_NAME}/{secrets.token_hex(16)}"
    first, second = secrets.token_bytes(_BYTES), secrets.token_bytes(_BYTES)
    try:
        return _probe(bucket, key, first, second, single_writer=single_writer)
    finally:
        with contextlib.suppress(TierUnavailableError):  # some may not delete; the outcome counts
            bucket.remove(key)


def _probe(bucket: Bucket, key: str, first: bytes, second: bytes, *, single_writer: bool) -> Trust:
    try:
        # Where the answer to a create was lost and it was asked again, what is there is its own.
        is_new = bucket.create(key, first) or bucket.read(key, _BYTES) == first
        creates = is_new and not bucket.create(key, second)
    except TierUntrustedError:
        if not single_writer:
            raise
        bucket.put(key, [second], len(second), parallel=1)
        is_new, creates = True, False
    if not is_new:
        raise TierUntrustedError(f"{bucket.url}: it says that a new name is there already")
    if not creates and not single_writer:
        raise TierUntrustedError(
            f"{bucket.url} accepts a second create of the same name: two writers would not know of "
            "each other"
        )
    wanted = first if creates else second
    if bucket.read(key, _BYTES) != wanted:
        raise TierUntrustedError(f"{bucket.url}: what was put is not what is read")
    if key not in bucket.objects_below(PROBES_NAME):
        raise TierUntrustedError(f"{bucket.url}: what was put is not listed")
    found = bucket.look(key)
    digest = hashlib.md5(wanted, usedforsecurity=False).hexdigest()
    return Trust(creates, found is not None and found.e_tag == digest)
