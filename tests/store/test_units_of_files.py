"""Checkpoint units in which each file is a checkpoint of its own (``--done '*'``): what is closed
is done, what is being written goes back.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from cxlfs.store import Store
from cxlfs.store.unit_record import policy_rule
from cxlfs.store.unit_rules import EACH_FILE, QUIET_UNMARKED_SECONDS, Ending
from tests.support.counting import count_calls
from tests.support.shop import Shop, close, fill
from tests.support.stores import read_file, write_file
from tests.support.unit_scenes import (
    Tree,
    Writers,
    find,
    finish_work,
    kept_count,
    make,
    open_count,
    open_writing,
    tree,
)

OLD = {b"model.h5": b"old" * 5000}


@pytest.fixture
def store(shop: Shop) -> Store:
    """With one file in ``runs``, where each is a checkpoint."""
    store = shop.new()
    directory = make(store, b"runs")
    for name, data in OLD.items():
        write_file(store, directory, name, data)
    rules = (policy_rule((b".",), (EACH_FILE,), None),)
    store.units.set_policy(store.namespace.get(directory), rules)
    return store


def runs(store: Store) -> int:
    return find(store, b"runs").ino


def begin_in_place(store: Store, data: bytes) -> int:
    """As HDF5 with "a"."""
    handle = store.open_file(find(store, b"runs/model.h5").ino, os.O_RDWR)
    store.write(handle, 0, data)
    return handle


def in_place(data: bytes) -> Tree:
    return {b"model.h5": data + OLD[b"model.h5"][len(data) :]}


@pytest.mark.parametrize("ending", [Ending.WELL, Ending.KILLED])
def test_what_is_filled_through_a_mapping_is_closed_when_that_ends(
    store: Store, ending: Ending
) -> None:
    writers = Writers(store)
    size = 3 * 4096
    handle = store.open_file(find(store, b"runs/model.h5").ino, os.O_RDWR | os.O_TRUNC)
    store.write(handle, size - 1, b"\0")
    store.flush(handle, writer_killed=False, is_mapped=lambda: True)
    store.write(handle, 0, b"new")
    store.release(handle)
    writers.endings["trainer"] = ending
    store.units.maintain()
    assert open_count(store) == 0
    assert tree(store, b"runs") == {b"model.h5": b"new".ljust(size, b"\0")}


def test_no_crash_takes_back_what_was_closed(shop: Shop, store: Store) -> None:
    Writers(store)
    close(store, begin_in_place(store, b"new"))
    store = shop.reopen(store)
    finish_work(store)
    assert tree(store, b"runs") == in_place(b"new")
    assert kept_count(store) == 0


@pytest.mark.parametrize(
    ("ending", "there"),
    [
        (Ending.KILLED, True),
        (Ending.WELL, True),
        (Ending.UNKNOWN, True),
        (Ending.BADLY, False),
        (Ending.INTERRUPTED, False),
    ],
)
def test_how_who_has_closed_it_ends(store: Store, ending: Ending, there: bool) -> None:
    """An exception in mid-save closes the file, and ends the program; a kill does not close it."""
    writers = Writers(store)
    close(store, begin_in_place(store, b"new"))
    store.units.maintain()
    assert tree(store, b"runs") == in_place(b"new")
    writers.endings["trainer"] = ending
    store.units.maintain()
    assert open_count(store) == 0
    assert tree(store, b"runs") == (in_place(b"new") if there else OLD)


def test_it_is_done_when_its_writer_lives_on(store: Store) -> None:
    writers = Writers(store)
    close(store, begin_in_place(store, b"new"))
    writers.now += QUIET_UNMARKED_SECONDS - 0.1
    store.units.maintain()
    assert open_count(store) == 1
    writers.now += 0.2
    store.units.maintain()
    assert open_count(store) == 0
    writers.endings["trainer"] = Ending.BADLY
    store.units.maintain()
    assert tree(store, b"runs") == in_place(b"new")


def test_an_error_in_the_next_save_takes_back_that_alone(store: Store) -> None:
    writers = Writers(store)
    close(store, begin_in_place(store, b"first"))
    close(store, begin_in_place(store, b"other"))
    writers.endings["trainer"] = Ending.BADLY
    store.units.maintain()
    assert tree(store, b"runs") == in_place(b"first")


def test_what_could_come_back_gives_its_room(shop: Shop) -> None:
    """To the next write that finds no other."""
    store = shop.new()
    directory = make(store, b"runs")
    write_file(store, directory, b"model", b"o" * 1_000_000)
    rules = (policy_rule((b".",), (EACH_FILE,), None),)
    store.units.set_policy(store.namespace.get(directory), rules)
    Writers(store)
    write_file(store, directory, b"model", b"n" * 1_000_000)
    assert open_count(store) == 1
    fill(store)
    assert open_count(store) == 0
    assert tree(store, b"runs") == {b"model": b"n" * 1_000_000}


@pytest.mark.parametrize("with_fsync", [False, True])
def test_what_a_killed_writer_changed_in_place_goes_back(store: Store, with_fsync: bool) -> None:
    """Its last FLUSH publishes what it wrote: that is not done."""
    writers = Writers(store)
    handle = begin_in_place(store, b"half of an update")
    if with_fsync:
        store.fsync(handle)
    store.units.killed("trainer")
    close(store, handle, killed=True)
    assert open_count(store) == 1
    writers.endings["trainer"] = Ending.KILLED
    store.units.maintain()
    assert tree(store, b"runs") == OLD


def test_what_was_changed_in_place_goes_back_after_a_crash(shop: Shop, store: Store) -> None:
    handle = begin_in_place(store, b"half of an update")
    store.fsync(handle)
    store = shop.reopen(store)
    assert tree(store, b"runs") == OLD


def test_a_new_file_that_is_being_written_is_gone(store: Store) -> None:
    """By number, and the newest wins: as XGBoost's."""
    writers = Writers(store)
    handle = open_writing(store, runs(store), b"model_7.ubj", b"half")
    close(store, handle, killed=True)
    writers.endings["trainer"] = Ending.KILLED
    store.units.maintain()
    assert tree(store, b"runs") == OLD


def test_one_waits_while_another_is_being_written(shop: Shop, store: Store) -> None:
    Writers(store)
    begin_in_place(store, b"half")
    write_file(store, runs(store), b"other", b"whole")
    assert open_count(store) == 1
    store = shop.reopen(store)
    assert tree(store, b"runs") == OLD


def test_all_are_there_when_all_are_closed(shop: Shop, store: Store) -> None:
    Writers(store)
    handle = begin_in_place(store, b"half")
    write_file(store, runs(store), b"other", b"whole")
    close(store, handle)
    store = shop.reopen(store)
    assert tree(store, b"runs") == in_place(b"half") | {b"other": b"whole"}


def test_what_is_renamed_into_place_is_done(shop: Shop, store: Store) -> None:
    """Before it is closed, as safetensors does it."""
    Writers(store)
    handle = open_writing(store, runs(store), b"temporary", b"new")
    store.rename(runs(store), b"temporary", runs(store), b"model.h5")
    close(store, handle)
    store = shop.reopen(store)
    assert tree(store, b"runs") == {b"model.h5": b"new"}


@pytest.mark.parametrize(
    "how", ["rename", "rename, without a quiet time", "over", "exchange", "link"]
)
def test_what_comes_from_elsewhere_stays_in_one_record(
    shop: Shop, store: Store, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Killed right behind the record that names it: it would be at neither name."""
    Writers(store)
    write_file(store, 1, b"elsewhere", b"whole")
    directory = runs(store)
    if "quiet" in how:
        rules = (policy_rule((b".",), (EACH_FILE,), 0.0),)
        store.units.set_policy(store.namespace.get(directory), rules)
    monkeypatch.setattr(store.units, "settle", lambda **_: False)
    if how == "link":
        store.link(store.lookup(1, b"elsewhere").ino, directory, b"new")
    else:
        new = b"new" if how.startswith("rename") else b"model.h5"
        store.rename(1, b"elsewhere", directory, new, exchange=how == "exchange")
    assert open_count(store) == (0 if "quiet" in how else 1)
    store = shop.reopen(store)
    is_new = how.startswith(("rename", "link"))
    there = {b"new": b"whole"} | OLD if is_new else {b"model.h5": b"whole"}
    assert tree(store, b"runs") == there
    if how == "exchange":
        assert read_file(store, store.lookup(1, b"elsewhere").ino) == OLD[b"model.h5"]


def test_two_that_change_places_are_done(shop: Shop, store: Store) -> None:
    Writers(store)
    write_file(store, runs(store), b"other", b"whole")
    store.rename(runs(store), b"other", runs(store), b"model.h5", exchange=True)
    store = shop.reopen(store)
    assert tree(store, b"runs") == {b"model.h5": b"whole", b"other": OLD[b"model.h5"]}


def test_one_waits_while_another_is_synced_and_not_closed(shop: Shop, store: Store) -> None:
    """By fsync or the periodic commit: it may be half of a save."""
    Writers(store)
    handle = open_writing(store, runs(store), b"new one", b"half")
    assert store.commits.commit_all()
    write_file(store, runs(store), b"other", b"whole")
    assert not store.units.open_units()[0].kept
    close(store, handle)
    store.unlink(runs(store), b"new one")
    handle = begin_in_place(store, b"half")
    store.fsync(handle)
    write_file(store, runs(store), b"other", b"whole")
    assert not store.units.open_units()[0].kept
    close(store, handle)
    assert store.units.open_units()[0].kept
    handle = begin_in_place(store, b"next")
    store.fsync(handle)
    write_file(store, 1, b"elsewhere", b"whole")
    store.rename(1, b"elsewhere", runs(store), b"new")
    store = shop.reopen(store)
    assert tree(store, b"runs") == in_place(b"half") | {b"other": b"whole"}


def test_what_comes_from_elsewhere_waits_for_one_that_is_being_written(
    shop: Shop, store: Store
) -> None:
    Writers(store)
    write_file(store, 1, b"elsewhere", b"whole")
    handle = begin_in_place(store, b"half")
    store.link(store.lookup(1, b"elsewhere").ino, runs(store), b"new")
    assert not store.units.open_units()[0].kept
    close(store, handle)
    store = shop.reopen(store)
    assert tree(store, b"runs") == in_place(b"half") | {b"new": b"whole"}


@pytest.mark.parametrize("how", ["in place", "in place, with fsync", "over", "a new one"])
def test_a_kill_of_one_of_two_savers_takes_back_what_it_spoiled_alone(
    shop: Shop, store: Store, how: str
) -> None:
    """What was there before of a file that was written anew is whole: the other saver's stay."""
    writers = Writers(store)
    writers.present = "other"
    if how == "over":
        handle = open_writing(store, runs(store), b"model.h5", b"half")
    elif how == "a new one":
        handle = open_writing(store, runs(store), b"model_2", b"half")
    else:
        handle = begin_in_place(store, b"half")
        if "fsync" in how:
            store.fsync(handle)
    writers.present = "trainer"
    write_file(store, runs(store), b"mine", b"whole")
    store.units.killed("other")
    close(store, handle, killed=True)
    writers.endings["other"] = Ending.KILLED
    store.units.maintain()
    assert store.units.open_units()[0].kept == (how == "over")
    store = shop.reopen(store)
    assert tree(store, b"runs") == (OLD | {b"mine": b"whole"} if how == "over" else OLD)


def test_whoever_reads_ends_nothing(shop: Shop, store: Store) -> None:
    Writers(store)
    writing = begin_in_place(store, b"half")
    store.fsync(writing)
    reading = store.open_file(find(store, b"runs/model.h5").ino, os.O_RDONLY)
    store.flush(reading, writer_killed=False)
    store.release(reading)
    store = shop.reopen(store)
    assert tree(store, b"runs") == OLD


def test_removing_an_old_one_comes_back_with_the_rest(store: Store) -> None:
    """Rotation behind a save: the next save makes it final, a kill before that undoes it."""
    writers = Writers(store)
    write_file(store, runs(store), b"model_2", b"two")
    store.unlink(runs(store), b"model.h5")
    writers.endings["trainer"] = Ending.KILLED
    store.units.maintain()
    assert tree(store, b"runs") == OLD | {b"model_2": b"two"}


def test_no_marker_is_missing(store: Store) -> None:
    directory = store.namespace.get(runs(store))
    assert store.units.problem_of(directory) is None


# --- files of certain names -----------------------------------------------------------------------


@pytest.fixture
def by_two_names(store: Store) -> Store:
    """In ``runs`` each ``*.h5`` is a checkpoint: what is not whole has another name."""
    rules = (policy_rule((b".",), (b"*.h5",), None),)
    store.units.set_policy(store.namespace.get(runs(store)), rules)
    return store


@pytest.mark.parametrize("ending", [Ending.KILLED, Ending.BADLY, Ending.UNKNOWN])
@pytest.mark.parametrize("where", ["written", "closed", "named"])
def test_a_saver_by_two_names_leaves_a_whole_file_or_none(
    by_two_names: Store, where: str, ending: Ending
) -> None:
    store = by_two_names
    writers = Writers(store)
    handle = open_writing(store, runs(store), b"new.dirty", b"new")
    if where != "written":
        close(store, handle)
        store.units.maintain()
        assert not store.units.open_units()[0].kept
    if where == "named":
        store.rename(runs(store), b"new.dirty", runs(store), b"new.h5")
        store.units.maintain()
        assert store.units.open_units()[0].kept
    if where == "written":
        close(store, handle, killed=True)
    writers.endings["trainer"] = ending
    store.units.maintain()
    stays = where == "named" and ending is not Ending.BADLY
    assert tree(store, b"runs") == OLD | ({b"new.h5": b"new"} if stays else {})
    assert open_count(store) == 0


@pytest.mark.parametrize("is_named", [False, True])
def test_a_crash_of_a_saver_by_two_names(
    shop: Shop, by_two_names: Store, monkeypatch: pytest.MonkeyPatch, *, is_named: bool
) -> None:
    """That it stays is said in the record that names it."""
    store = by_two_names
    Writers(store)
    write_file(store, runs(store), b"new.dirty", b"new")
    store.units.maintain()
    monkeypatch.setattr(store.units, "settle", lambda **_: False)
    if is_named:
        store.rename(runs(store), b"new.dirty", runs(store), b"new.h5")
    store = shop.reopen(store)
    assert tree(store, b"runs") == OLD | ({b"new.h5": b"new"} if is_named else {})


def test_a_closed_file_waits_for_one_of_another_name(shop: Shop, by_two_names: Store) -> None:
    store = by_two_names
    Writers(store)
    handle = open_writing(store, runs(store), b"other.dirty", b"half")
    write_file(store, runs(store), b"new.h5", b"new")
    assert not store.units.open_units()[0].kept
    close(store, handle)
    assert store.units.open_units()[0].kept
    store = shop.reopen(store)
    assert tree(store, b"runs") == OLD | {b"new.h5": b"new", b"other.dirty": b"half"}


# --- what the next save has to copy -------------------------------------------------------------


def many(store: Store, count: int) -> int:
    """That many files more in ``runs``; each is there for good."""
    directory = runs(store)
    for number in range(count):
        write_file(store, directory, b"%05d" % number, b"x" * 5000)
    return directory


def over(store: Store, name: bytes) -> None:
    write_file(store, runs(store), name, b"new")


def by_rename(store: Store, name: bytes) -> None:
    write_file(store, runs(store), b"temporary", b"new")
    store.rename(runs(store), b"temporary", runs(store), name)


@pytest.mark.parametrize("save", [over, by_rename])
def test_a_save_copies_no_more_the_more_files_there_are(
    shop: Shop, save: Callable[[Store, bytes], None]
) -> None:
    """Neither calls nor inodes, once the first one was made."""
    counted: list[tuple[int, int]] = []
    for count in (100, 800):
        store = shop.new(16 << 20)
        directory = make(store, b"runs")
        rules = (policy_rule((b".",), (EACH_FILE,), None),)
        store.units.set_policy(store.namespace.get(directory), rules)
        Writers(store)
        many(store, count)
        save(store, b"00007")
        before = store.namespace.next_ino
        calls = count_calls(lambda s=store: [save(s, b"%05d" % n) for n in range(20, 40)])
        counted.append((calls, store.namespace.next_ino - before))
    (few, few_made), (calls, made) = counted
    assert made == few_made <= 20 * 4
    assert calls <= few * 1.1


CHANGES: dict[str, Callable[[Store, int, int], object]] = {
    "over": lambda s, d, n: write_file(s, d, b"%05d" % (n % 7), b"over %d" % n),
    "new": lambda s, d, n: write_file(s, d, b"new-%d" % n, b"new %d" % n),
    "in place": lambda s, _, n: close(s, begin_in_place(s, b"%d" % n)),
    "rename": lambda s, _, n: by_rename(s, b"%05d" % (n % 5)),
    "unlink": lambda s, d, _: (write_file(s, d, b"gone", b"g"), s.unlink(d, b"gone")),
    "attributes": lambda s, d, n: s.set_attributes(
        s.lookup(d, b"model.h5").ino, mode=0o600 + n % 8
    ),
    "link": lambda s, d, n: s.link(s.lookup(d, b"model.h5").ino, d, b"link-%d" % n),
    "directory": lambda s, d, n: write_file(s, make(s, b"sub-%d" % n, d), b"deep", b"d%d" % n),
    "directory moves": lambda s, d, n: (
        make(s, b"from-%d" % n, d),
        s.rename(d, b"from-%d" % n, d, b"to-%d" % n),
    ),
}


@pytest.mark.parametrize("seed", range(12))
def test_what_comes_back_is_what_the_save_before_left(store: Store, seed: int) -> None:
    """After any saves, of which some ended with an error."""
    rng = random.Random(seed)
    writers = Writers(store)
    many(store, 9)
    for number in range(25):
        how = rng.choice(list(CHANGES))
        CHANGES[how](store, runs(store), number)
        over(store, b"last")  # which ends what that change began, whatever it was
        before = whole_picture(store)
        over(store, rng.choice([b"00001", b"model.h5", b"another"]))
        if rng.random() < 0.4:
            writers.endings[writers.present] = Ending.BADLY
            store.units.maintain()
            assert whole_picture(store) == before, (seed, number, how)
            writers.present = number
    finish_work(store)


def whole_picture(store: Store) -> dict[bytes, tuple[int, bytes]]:
    """Mode and content of each file in ``runs``."""
    files = tree(store, b"runs") or {}
    return {path: (find(store, b"runs/" + path).mode, data) for path, data in files.items()}
