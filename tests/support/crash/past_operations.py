"""Operations on history: what was overwritten or removed is brought back.

An extent that only history refers to is in no image and, after a crash, nowhere. So each operation
is one that a recovery gets wrong if the record of the restore does not say all of it. Where history
is stored on the media, no recovery may show a version that was not there.
"""

from __future__ import annotations

from cxlfs.errors import CorruptionError, NotFoundError
from cxlfs.store.past_archive import WAIT_S
from cxlfs.store.past_rows import Row
from tests.support.crash import operations
from tests.support.crash.bench import Bench
from tests.support.crash.operations import BIG, TRUNCATE, Operation
from tests.support.crash.tape import State


def row_of(bench: Bench, name: bytes) -> Row:
    """The last row of a name."""
    rows = [row for row in bench.store.past if row.name == name]
    if not rows:
        raise NotFoundError("history has no such row")
    return rows[-1]


def known(bench: Bench, path: bytes) -> bytes:
    """What a file holds before it is overwritten or removed."""
    try:
        return bytes(bench.content(bench.inode(path)))
    except (NotFoundError, AssertionError):
        return b""


def restore(bench: Bench, name: bytes, path: bytes, expected: bytes) -> None:
    """``expected``: the content that comes back."""

    def action() -> None:
        inode = bench.store.history.restore(row_of(bench, name), *bench.place(path))
        try:
            found = bytes(inode.content.read(0, inode.content.size))
        except CorruptionError as error:
            raise AssertionError("what came back is damaged") from error
        assert found == expected, "what came back is not what was there"
        bench.contents[inode.ino] = bytearray(expected)

    bench.do("restore", action, commits=True, steps=True)


def restore_over_the_new_content(bench: Bench) -> None:
    bench.store.past.is_on = True
    before = known(bench, b"old")
    bench.save(b"old", BIG)
    restore(bench, b"old", b"old", before)
    bench.save(b"third", 3000)


def restore_after_a_rollover(bench: Bench) -> None:
    """The image does not know the extents; what dies later is written over."""
    bench.store.past.is_on = True
    before = known(bench, b"old")
    bench.save(b"old", 700)
    operations.rollover(bench)
    restore(bench, b"old", b"back", before)
    operations.rollover(bench)
    bench.unlink(b"back")
    bench.save(b"third", 9000)


def restore_a_removed_file(bench: Bench) -> None:
    bench.store.past.is_on = True
    before = known(bench, b"old")
    bench.unlink(b"old")
    operations.rollover(bench)
    restore(bench, b"old", b"old", before)


def restore_what_a_rename_replaced(bench: Bench) -> None:
    bench.store.past.is_on = True
    before = known(bench, b"old")
    bench.save(b"new", 5000)
    bench.rename(b"new", b"old")
    restore(bench, b"old", b"new", before)
    bench.rename(b"new", b"old")


def restore_a_change_in_place(bench: Bench) -> None:
    bench.store.past.is_on = True
    before = known(bench, b"old")
    handle = bench.open(b"old")
    bench.write(handle, 100, 33)
    bench.close(handle)
    restore(bench, b"old", b"old", before)


def restore_what_an_exchange_replaced(bench: Bench) -> None:
    bench.store.past.is_on = True
    before = known(bench, b"old")
    bench.save(b"new", 100)
    handle = bench.open(b"old", TRUNCATE)
    bench.write(handle, 0, 4000)
    bench.rename(b"old", b"new", exchange=True)
    bench.close(handle)
    restore(bench, b"old", b"back", before)


def undelete_a_tree(bench: Bench) -> None:
    bench.store.past.is_on = True
    bench.save(b"dir/more", 5000)
    for name in (b"dir/more", b"dir/below"):
        bench.unlink(name)
    bench.do("rmdir", lambda: bench.store.remove_directory(*bench.place(b"dir")))
    operations.rollover(bench)

    def action() -> None:
        for _ in bench.store.trees.undelete(row_of(bench, b"dir")):
            pass

    bench.do("undelete", action, commits=True, steps=True)
    bench.save(b"third", 3000)


def restore_a_tree(bench: Bench) -> None:
    """The directory as it was takes the place of what it is."""
    store = bench.store
    store.past.is_on = True
    commit = store.volume.last_lsn
    bench.save(b"dir/more", 5000)
    bench.save(b"dir/below", 700)

    def action() -> None:
        for _ in store.trees.restore(b"/dir", store.state_at(commit), 1, b"dir"):
            pass

    bench.do("restore", action, commits=True, steps=True)
    before, after = bench.tape.states[-2:]
    ends = [_below(before, b"/dir"), _below(after, b"/dir")]
    for state in bench.tape.between[-1]:
        assert _below(state, b"/dir") in ends, "the name means neither the one nor the other"
    bench.save(b"third", 3000)


def _below(state: State, top: bytes) -> tuple[bool, State]:
    """Whether there is a directory, and what is in it. Its times change with its name."""
    entries = {path: entry for path, entry in state.items() if path.startswith(top + b"/")}
    return top in state, entries


def reuse_what_history_had(bench: Bench) -> None:
    """Oldest first, as room is wanted; what is left comes back."""
    bench.store.past.is_on = True
    for number in range(2):
        bench.save(b"many", 9000 + number)
    before = known(bench, b"many")
    bench.unlink(b"many")
    for number in range(22):
        bench.save(b"fill", 32_000 + number)
    restore(bench, b"many", b"back", before)


def archive(bench: Bench) -> None:
    """Store history on the media, as a second without deaths would."""
    store = bench.store
    for row in store.past:
        content = b"" if row.data is None else bytes(row.data.read(0, row.size))
        bench.tape.past[row.key] = row.name, content

    def action() -> None:
        store.past.archive.step(0.0)
        store.past.archive.step(WAIT_S)

    bench.do("archive", action, late=True)


def archive_what_died(bench: Bench) -> None:
    """In two batches; a row of the first one is stored anew behind its restore."""
    bench.store.past.is_on = True
    before = known(bench, b"old")
    bench.save(b"old", BIG)
    bench.save(b"new", 300)
    bench.unlink(b"new")
    archive(bench)
    restore(bench, b"old", b"old", before)
    archive(bench)


def archive_what_is_used_again(bench: Bench) -> None:
    """The segments of rows that a batch has are given back, and written over."""
    bench.store.past.is_on = True
    bench.save(b"many", 9000)
    bench.save(b"many", 9001)
    bench.unlink(b"many")
    archive(bench)
    for number in range(20):
        bench.save(b"fill", 40_000 + number)
        if number == 7:
            archive(bench)
    operations.rollover(bench)
    bench.save(b"third", 9000)


def archive_and_forget(bench: Bench) -> None:
    """Its segment is overwritten; what others have there is stored anew."""
    bench.store.past.is_on = True
    bench.save(b"old", 700)
    bench.save(b"new", 5000)
    bench.unlink(b"new")
    archive(bench)
    rows = [row for row in bench.store.past if row.name == b"new"]
    bench.do("forget", lambda: bench.store.history.forget(rows), late=True)
    archive(bench)
    bench.save(b"third", 3000)


PAST_OPERATIONS: list[Operation] = [
    restore_over_the_new_content, restore_after_a_rollover, restore_a_removed_file,
    restore_what_a_rename_replaced, restore_a_change_in_place, restore_what_an_exchange_replaced,
    undelete_a_tree, restore_a_tree, reuse_what_history_had, archive_what_died,
    archive_what_is_used_again, archive_and_forget,
]  # fmt: skip
