"""A fence that fails, whichever of a verb's: the verb says so, and nothing is written behind it.

What lay behind it may be durable or not; a second record over it could make a lie of the first.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from cxlfs.errors import MediaError, ReadOnlyError
from cxlfs.store import Store
from tests.support.shop import Shop, close, create, open_for_overwrite
from tests.support.stores import clean_round, write_file


def save(store: Store) -> None:
    """A new file, closed; then one over it by rename."""
    close(store, create(store, b"new", b"n" * 9000)[1])
    store.rename(1, b"new", 1, b"old")


def overwrite(store: Store) -> None:
    """Staged aside first, as the periodic commit does it."""
    handle = open_for_overwrite(store, b"old", b"over" * 5000)
    store.commits.commit_old(older_than=1e18)
    store.write(handle, 50, b"x" * 5000)
    close(store, handle)


def fsync(store: Store) -> None:
    handle = store.open_file(store.lookup(1, b"old").ino, os.O_RDWR)
    store.write(handle, 100, b"m" * 9000)
    store.fsync(handle)
    store.release(handle)


def names(store: Store) -> None:
    """Of which none is durable on page media before the sync."""
    ino = store.lookup(1, b"old").ino
    store.make_directory(1, b"d", 0o755, 0, 0)
    store.make_symlink(1, b"l", b"to", 0, 0)
    store.set_xattr(ino, b"user.k", b"v")
    store.set_attributes(ino, mode=0o600)
    store.link(ino, 1, b"second")
    store.unlink(1, b"second")
    store.sync()


def truncate(store: Store) -> None:
    store.set_attributes(store.lookup(1, b"old").ino, size=77)


def rollover(store: Store) -> None:
    store.volume.rollover()


def clean(store: Store) -> None:
    assert clean_round(store, 0.97)


VERBS = (save, overwrite, fsync, names, truncate, rollover, clean)


def prepared(shop: Shop, granularity: object) -> Store:
    store = shop.new(2 << 20, granularity)  # type: ignore[arg-type]
    write_file(store, 1, b"old", b"old" * 3000)
    for number in range(12):
        write_file(store, 1, b"f%d" % number, b"f" * 9000)
    for number in range(0, 12, 2):
        store.unlink(1, b"f%d" % number)
    return store


def fails_at(
    shop: Shop, granularity: object, verb: Callable[[Store], None], nth: int, where: str
) -> bool:
    """The verb with its n-th fence failing; False when it has fewer. ``where``: fences of the media
    (on page media those of data, too), or of the journal alone.
    """
    store = prepared(shop, granularity)
    shop.stores.remove(store)
    left = nth
    owner = store.media if where == "media" else store.volume.journal
    assert owner is not None
    real = owner.fence

    def fence() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise MediaError("planted", offset=0, length=1)
        real()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, "fence", fence)
        try:
            verb(store)
        except MediaError:
            assert store.read_only_reason is not None
            assert "planted" in store.read_only_reason
            with pytest.raises(ReadOnlyError):
                store.make_directory(1, b"later", 0o755, 0, 0)
            assert left == 0, "nothing is tried again"
        else:
            assert left > 0, "a failure that nobody was told of"
    store.abandon()
    store.media.close()
    return left == 0


@pytest.mark.parametrize("where", ["media", "journal"])
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_nothing_is_written_after_a_failed_fence(
    shop: Shop, granularity: object, verb: Callable[[Store], None], where: str
) -> None:
    nth = 1
    while fails_at(shop, granularity, verb, nth, where):
        nth += 1
    assert nth > 1 or (verb is rollover and where == "journal")
