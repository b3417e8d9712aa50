"""Operations on pins: made, kept through what follows, taken away.

The states that the judge allows have the store's own directory in them. So a recovery that shows a
half of a pin under its name, or loses a byte of one, is found like any other.
"""

from __future__ import annotations

from cxlfs.errors import NotFoundError
from cxlfs.store.past_state import TIME_NS_MIN
from cxlfs.store.pins import PinState
from tests.support.crash import operations
from tests.support.crash.bench import Bench
from tests.support.crash.operations import BIG, TRUNCATE, Operation

_PIN = b"best"


def pin(bench: Bench, path: bytes, *, commit: int | None = None) -> bytes | None:
    """Pin a path; returns what the pin has of a file."""
    store = bench.store
    expected = None if commit is not None else committed(bench, path)

    def action() -> None:
        state = store.state_at(store.volume.last_lsn if commit is None else commit)
        for made in store.pins.make(0, _PIN, path, state):
            assert made.missing == 0 or commit is not None, "something is not in its own state"

    bench.do("pin", action, commits=True, steps=True)
    found = pinned(bench, path)
    assert expected is None or found == expected, "what is pinned is not what was there"
    return found


def committed(bench: Bench, path: bytes) -> bytes | None:
    """What a file holds as of its last commit."""
    try:
        content = bench.inode(path).committed_content
    except NotFoundError:
        return None
    return None if content is None else bytes(content.read(0, content.size))


def pinned(bench: Bench, path: bytes) -> bytes | None:
    """What the pin has of a file; None: nothing."""
    found = bench.store.pins.find(0, _PIN)
    if found is None:
        return None
    state, ino = PinState(bench.store.volume), found.directory.ino
    for part in path.split(b"/"):
        below = state.find(ino, part)
        if below is None:
            return None
        ino = below
    fact = state.fact(ino)
    if fact is None or fact.content is None:
        return None
    return bytes(fact.content.read(0, fact.content.size))


def unpin(bench: Bench) -> None:
    """Taken away, and its names removed."""

    def action() -> None:
        bench.store.pins.remove(0, _PIN)
        while bench.store.pins.step():
            pass

    bench.do("unpin", action, commits=False, late=True, steps=True)


def pin_a_file_and_overwrite_it(bench: Bench) -> None:
    before = pin(bench, b"old")
    bench.save(b"old", BIG)
    operations.rollover(bench)
    assert pinned(bench, b"old") == before
    bench.save(b"third", 3000)


def pin_a_tree_and_remove_it(bench: Bench) -> None:
    bench.save(b"dir/more", 5000)
    before = pin(bench, b"dir")
    for name in (b"dir/more", b"dir/below"):
        bench.unlink(name)
    bench.do("rmdir", lambda: bench.store.remove_directory(*bench.place(b"dir")))
    assert pinned(bench, b"dir") == before
    bench.save(b"third", 3000)


def pin_and_unpin(bench: Bench) -> None:
    """What only the pin had is used again."""
    bench.save(b"dir/more", 9000)
    pin(bench, b"dir")
    bench.unlink(b"dir/more")
    unpin(bench)
    bench.save(b"third", 12_000)


def pin_what_history_has(bench: Bench) -> None:
    """An extent that only history refers to is in no image."""
    bench.store.past.is_on = True
    commit = bench.store.volume.last_lsn
    bench.save(b"old", 700)
    operations.rollover(bench)
    pin(bench, b"old", commit=commit)
    operations.rollover(bench)
    bench.save(b"old", 9000)


def pin_on_a_full_store(bench: Bench) -> None:
    """What is pinned is never given back."""
    bench.store.past.is_on = True
    bench.save(b"many", 9000)
    before = pin(bench, b"many")
    bench.unlink(b"many")
    for number in range(22):
        bench.save(b"fill", 32_000 + number)
    assert pinned(bench, b"many") == before


def pin_a_file_that_is_open(bench: Bench) -> None:
    """As it was committed."""
    handle = bench.open(b"old", TRUNCATE)
    bench.write(handle, 0, 4000)
    before = pin(bench, b"old")
    bench.close(handle)
    assert pinned(bench, b"old") == before


def pin_that_fails(bench: Bench) -> None:
    """What was made of it is removed."""

    def action() -> None:
        making = bench.store.pins.make(0, _PIN, b"", bench.store.state_at(TIME_NS_MIN))
        next(making, None)
        making.close()
        raise NotFoundError("its user is gone")

    bench.do("pin", action, late=True, steps=True)
    bench.do("sweep", lambda: list(iter(bench.store.pins.step, False)), late=True, steps=True)
    bench.save(b"third", 3000)


PIN_OPERATIONS: list[Operation] = [
    pin_a_file_and_overwrite_it, pin_a_tree_and_remove_it, pin_and_unpin, pin_what_history_has,
    pin_on_a_full_store, pin_a_file_that_is_open, pin_that_fails,
]  # fmt: skip
