"""Operations: what one-, two- and three-operation workloads are made of.

Together they are every verb of a store, on few names, so that two of them meet: created and
overwritten files in many shapes of writes, both overwrite forms, several descriptors of one file,
files left open, names of every kind, attributes, and what the store does by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from cxlfs.store.space import State
from tests.support.crash.bench import Bench
from tests.support.stores import clean_round

Operation = Callable[[Bench], None]
TRUNCATE = os.O_RDWR | os.O_TRUNC
BIG = 20_000
LONG_NAME = b"n" * 255


# --- new files ------------------------------------------------------------------------------


def create_empty(bench: Bench) -> None:
    bench.close(bench.create(b"new"))


def create_tiny(bench: Bench) -> None:
    bench.save(b"new", 1)


def create_unaligned(bench: Bench) -> None:
    handle = bench.create(b"new")
    for offset, length in ((7, 100), (107, 777), (884, 63)):
        bench.write(handle, offset, length)
    bench.close(handle)


def create_big(bench: Bench) -> None:
    bench.save(b"new", BIG)


def create_sparse(bench: Bench) -> None:
    handle = bench.create(b"new")
    bench.write(handle, 30_000, 500)
    bench.write(handle, 5000, 100)
    bench.close(handle)


def create_fsync(bench: Bench) -> None:
    handle = bench.create(b"new")
    bench.write(handle, 0, 4096)
    bench.fsync(handle)
    bench.write(handle, 4096, 65)
    bench.close(handle)


def create_killed(bench: Bench) -> None:
    handle = bench.create(b"new")
    bench.write(handle, 0, 5000)
    bench.close(handle, killed=True)


def create_unlinked(bench: Bench) -> None:
    handle = bench.create(b"new")
    bench.write(handle, 0, 3000)
    bench.unlink(b"new")
    bench.close(handle)


def create_in_directory(bench: Bench) -> None:
    bench.save(b"dir/new", 700)


def create_long_name(bench: Bench) -> None:
    bench.save(LONG_NAME, 64)


def create_left_open(bench: Bench) -> None:
    handle = bench.create(b"new")
    if handle is not None:
        bench.write(handle, 0, 2500)
        bench.left_open.append(handle)


# --- overwriting ----------------------------------------------------------------------------


def overwrite(bench: Bench) -> None:
    bench.save(b"old", 5000)


def overwrite_big(bench: Bench) -> None:
    bench.save(b"old", BIG)


def overwrite_with_nothing(bench: Bench) -> None:
    bench.close(bench.open(b"old", TRUNCATE))


def overwrite_redirected(bench: Bench) -> None:
    """A shell closes its copy of the descriptor before the program writes."""
    handle = bench.open(b"old", TRUNCATE)
    if handle is not None:
        store = bench.store
        bench.do("close of a copy", lambda: store.flush(handle, writer_killed=False), commits=True)
        bench.write(handle, 0, 900)
        bench.close(handle, killed=True)


def overwrite_killed(bench: Bench) -> None:
    handle = bench.open(b"old", TRUNCATE)
    bench.write(handle, 0, 9000)
    bench.close(handle, killed=True)


def overwrite_left_open(bench: Bench) -> None:
    handle = bench.open(b"old", TRUNCATE)
    if handle is not None:
        bench.write(handle, 0, 3000)
        bench.left_open.append(handle)


def overwrite_by_ftruncate(bench: Bench) -> None:
    handle = bench.open(b"old")
    bench.ftruncate(handle, 0)
    bench.write(handle, 0, 4097)
    bench.close(handle)


def overwrite_fsync(bench: Bench) -> None:
    handle = bench.open(b"old", TRUNCATE)
    bench.write(handle, 0, 3000)
    bench.fsync(handle)
    bench.write(handle, 1500, 3000)
    bench.close(handle)


def change_word(bench: Bench) -> None:
    handle = bench.open(b"old")
    bench.write(handle, 63, 5)
    bench.close(handle)


def change_block(bench: Bench) -> None:
    handle = bench.open(b"old")
    bench.write(handle, 4096, 1904)
    bench.close(handle)


def change_across_chunks(bench: Bench) -> None:
    handle = bench.open(b"old")
    bench.write(handle, 100, 5000)
    bench.close(handle)


def change_killed(bench: Bench) -> None:
    """Not an overwrite: what a killed writer changed in place stays."""
    handle = bench.open(b"old")
    bench.write(handle, 10, 300)
    bench.close(handle, killed=True)


def change_left_open(bench: Bench) -> None:
    handle = bench.open(b"other")
    if handle is not None:
        bench.write(handle, 3, 200)
        bench.left_open.append(handle)


def append(bench: Bench) -> None:
    handle = bench.open(b"old")
    bench.write(handle, 6000, 777)
    bench.close(handle)


def append_byte(bench: Bench) -> None:
    handle = bench.open(b"other")
    bench.write(handle, 5, 1)
    bench.close(handle)


def append_fsync(bench: Bench) -> None:
    handle = bench.open(b"old")
    for step in range(2):
        bench.write(handle, 6000 + 333 * step, 333)
        bench.fsync(handle)
    bench.close(handle)


def go_on(bench: Bench) -> None:
    """Write more through a handle that was left open, and close it."""
    handle = bench.left_open.pop() if bench.left_open else bench.open(b"old")
    bench.write(handle, 2000, 1500)
    bench.close(handle)


# --- several descriptors --------------------------------------------------------------------


def two_writers(bench: Bench) -> None:
    first, second = bench.open(b"old"), bench.open(b"old")
    bench.write(first, 0, 100)
    bench.write(second, 50, 100)
    bench.close(first)
    bench.write(second, 6000, 10)
    bench.close(second)


def truncated_by_another(bench: Bench) -> None:
    first = bench.open(b"old")
    bench.write(first, 0, 100)
    second = bench.open(b"old", TRUNCATE)
    bench.write(second, 0, 200)
    bench.close(second, killed=True)
    bench.close(first)


def joined_by_another(bench: Bench) -> None:
    """A second writer that did not truncate makes the overwrite an ordinary one."""
    first = bench.open(b"old", TRUNCATE)
    bench.write(first, 0, 300)
    second = bench.open(b"old")
    bench.write(second, 300, 50)
    bench.close(second)
    bench.close(first, killed=True)


def files_by_turns(bench: Bench) -> None:
    """Two new files grow beside each other; when one is closed its unused room goes to a third."""
    first, second = bench.create(b"first"), bench.create(b"beside")
    bench.write(first, 0, 300)
    bench.write(second, 0, 300)
    bench.close(first)
    bench.write(second, 300, 300)
    third = bench.create(b"third")
    bench.write(third, 0, 32_700)
    bench.close(second)
    bench.close(third)


# --- sizes ----------------------------------------------------------------------------------


def truncate_shorter(bench: Bench) -> None:
    bench.attributes(b"old", size=100)


def truncate_longer(bench: Bench) -> None:
    bench.attributes(b"old", size=9001)


def truncate_to_nothing(bench: Bench) -> None:
    bench.attributes(b"old", size=0)


def truncate_and_append(bench: Bench) -> None:
    """The cut and what follows lie in one chunk: its checksum is of neither."""
    handle = bench.open(b"old")
    bench.ftruncate(handle, 5)
    bench.write(handle, 9, 20)
    bench.close(handle)


# --- names ----------------------------------------------------------------------------------


def rename(bench: Bench) -> None:
    bench.rename(b"old", b"renamed")


def rename_back(bench: Bench) -> None:
    bench.rename(b"renamed", b"old")


def rename_over(bench: Bench) -> None:
    bench.rename(b"other", b"old")


def rename_into(bench: Bench) -> None:
    bench.rename(b"old", b"dir/below")


def rename_new(bench: Bench) -> None:
    """The way of safetensors: renamed before it is closed."""
    handle = bench.create(b"temporary")
    bench.write(handle, 0, 7000)
    bench.rename(b"temporary", b"old")
    bench.close(handle)


def rename_directory(bench: Bench) -> None:
    bench.rename(b"dir", b"empty")


def rename_directory_back(bench: Bench) -> None:
    bench.rename(b"empty", b"dir")


def rename_directory_in_use(bench: Bench) -> None:
    """An overwrite and a new file are open below it."""
    below = bench.open(b"dir/below", TRUNCATE)
    bench.write(below, 0, 600)
    made = bench.create(b"dir/made")
    bench.write(made, 0, 400)
    bench.rename(b"dir", b"moved")
    bench.close(below)
    bench.close(made)


def exchange(bench: Bench) -> None:
    bench.rename(b"old", b"other", exchange=True)


def exchange_with_directory(bench: Bench) -> None:
    bench.rename(b"dir", b"old", exchange=True)


def rename_refused(bench: Bench) -> None:
    bench.rename(b"old", b"other", no_replace=True)


def link(bench: Bench) -> None:
    bench.link(b"old", b"linked")


def link_new(bench: Bench) -> None:
    handle = bench.create(b"temporary")
    bench.write(handle, 0, 1000)
    bench.link(b"temporary", b"linked")
    bench.unlink(b"temporary")
    bench.close(handle)


def unlink(bench: Bench) -> None:
    bench.unlink(b"old")


def unlink_linked(bench: Bench) -> None:
    bench.unlink(b"second")


def unlink_open(bench: Bench) -> None:
    handle = bench.open(b"old")
    bench.write(handle, 0, 50)
    bench.unlink(b"old")
    bench.write(handle, 50, 50)
    bench.close(handle)


def make_directory(bench: Bench) -> None:
    bench.do("mkdir", lambda: bench.store.make_directory(1, b"made", 0o2755, 5, 5))


def remove_directory(bench: Bench) -> None:
    bench.do("rmdir", lambda: bench.store.remove_directory(*bench.place(b"empty")))


def make_symlink(bench: Bench) -> None:
    bench.do("symlink", lambda: bench.store.make_symlink(1, b"made-link", b"x" * 301, 5, 5))


def make_node(bench: Bench) -> None:
    bench.do("mknod", lambda: bench.store.make_node(1, b"node", 0o100640, 0, 5, 5))


# --- attributes -----------------------------------------------------------------------------


def change_mode(bench: Bench) -> None:
    bench.attributes(b"old", mode=0o600)


def change_owner(bench: Bench) -> None:
    bench.attributes(b"dir", uid=7, gid=8)


def change_times(bench: Bench) -> None:
    bench.attributes(b"old", mtime_ns=5, atime_ns=6)


def set_xattr(bench: Bench) -> None:
    bench.xattr(b"old", b"user.b", b"2" * 21)


def set_large_xattr(bench: Bench) -> None:
    bench.xattr(b"other", b"user.large", bench.fresh(1500))


def replace_xattr(bench: Bench) -> None:
    bench.xattr(b"old", b"user.a", b"33")


def remove_xattr(bench: Bench) -> None:
    bench.xattr(b"old", b"user.a", None)


# --- what the store does by itself ----------------------------------------------------------


def rollover(bench: Bench) -> None:
    bench.do("rollover", bench.store.volume.rollover, late=True)


def clean(bench: Bench) -> None:
    bench.do("clean", lambda: clean_round(bench.store, 0.97), late=True)


def commit_periodically(bench: Bench) -> None:
    """Overwrites are made durable aside: what is committed stays."""
    kept = {
        inode.ino: bytes(committed.read(0, committed.size))
        for inode in bench.store.versions.open_versions.values()
        if getattr(inode.version, "atomic", False) and (committed := inode.committed) is not None
    }
    bench.do(
        "periodic commit",
        lambda: bench.store.commits.commit_old(older_than=1e18),
        late=True,
        steps=True,
    )
    for ino, content in kept.items():
        committed = bench.store.namespace.get(ino).committed
        assert committed is not None, "an overwrite was published"
        assert bytes(committed.read(0, committed.size)) == content


def drop_aside(bench: Bench) -> None:
    bench.do("drop", bench.store.versions.drop_oldest_aside, late=True)


def sync_directory(bench: Bench) -> None:
    bench.do("fsync of /", lambda: bench.store.fsync_directory(1), commits=True)


def fill_and_fail(bench: Bench) -> None:
    """Almost no room is left, and an overwrite needs more than that."""
    space = bench.store.volume.space
    taken = []
    while space.free_count > bench.store.volume.refresh_reserve() + 1:
        taken.append(space.take(State.IMAGE))
    handle = bench.open(b"old", TRUNCATE)
    for step in range(4):
        bench.write(handle, 32_000 * step, 32_000)
    bench.close(handle)
    space.give_up(taken)


OPERATIONS: list[Operation] = [
    create_empty, create_tiny, create_unaligned, create_big, create_sparse, create_fsync,
    create_killed, create_unlinked, create_in_directory, create_long_name, create_left_open,
    overwrite, overwrite_big, overwrite_with_nothing, overwrite_redirected, overwrite_killed,
    overwrite_left_open, overwrite_by_ftruncate, overwrite_fsync, change_word, change_block,
    change_across_chunks, change_killed, change_left_open, append, append_byte, append_fsync,
    go_on, files_by_turns, two_writers, truncated_by_another, joined_by_another, truncate_shorter,
    truncate_longer, truncate_to_nothing, truncate_and_append, rename, rename_over, rename_into,
    rename_new, rename_directory, rename_directory_in_use, exchange, exchange_with_directory,
    rename_refused, link, link_new, unlink, unlink_linked, unlink_open, make_directory,
    remove_directory, make_symlink, make_node, change_mode, change_owner, change_times, set_xattr,
    set_large_xattr, replace_xattr, remove_xattr, rollover, clean, commit_periodically,
    drop_aside, sync_directory, fill_and_fail,
]  # fmt: skip
SECOND_ONLY: list[Operation] = [rename_back, rename_directory_back]
"""They undo what another one did; first of all they would be refused."""
