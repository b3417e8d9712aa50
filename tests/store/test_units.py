"""Checkpoint units: a directory is done, or what was there before is there again."""

from __future__ import annotations

import os

import pytest

from cxlfs.store import Store
from cxlfs.store.unit_rules import Ending, UnitsMode
from tests.support.shop import Shop, close
from tests.support.stores import read_file, write_file
from tests.support.unit_scenes import (
    CHECKPOINT,
    MARKER,
    Writers,
    find,
    finish_work,
    in_history,
    kept_count,
    make,
    open_count,
    open_writing,
    remove_tree,
    save,
    saved,
    shards,
    tree,
)


@pytest.fixture
def store(shop: Shop, granularity: object) -> Store:
    """With well-known names."""
    return shop.new(granularity=granularity, units=UnitsMode.AUTO)  # type: ignore[arg-type]


# --- a new directory --------------------------------------------------------------------------


def test_nothing_is_there_after_a_crash_before_the_marker(shop: Shop, store: Store) -> None:
    directory = make(store, CHECKPOINT)
    files = save(store, directory, shards(1), marker=None)
    assert tree(store, CHECKPOINT) == files  # live readers see it at once
    store = shop.reopen(store, units=UnitsMode.AUTO)
    assert tree(store, CHECKPOINT) is None
    for name, data in files.items():
        assert in_history(store, name) == [data]
    assert open_count(store) == 0


def test_all_is_there_after_the_marker(shop: Shop, store: Store) -> None:
    _, files = saved(store)
    assert open_count(store) == 0
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == files
    assert kept_count(store) == 0


def test_a_crash_before_the_first_file(shop: Shop, store: Store) -> None:
    make(store, CHECKPOINT)
    store.fsync_directory(1)
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) is None


def test_it_goes_back_whatever_the_next_mount_wants(shop: Shop, store: Store) -> None:
    save(store, make(store, CHECKPOINT), shards(1), marker=None)
    store = shop.reopen(store, units=UnitsMode.OFF)
    assert tree(store, CHECKPOINT) is None


def test_a_read_only_opening_changes_nothing(shop: Shop, store: Store) -> None:
    files = save(store, make(store, CHECKPOINT), shards(1), marker=None)
    store = shop.reopen(store, read_only=True)
    assert tree(store, CHECKPOINT) == files
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) is None


def test_off_is_as_it_was(shop: Shop) -> None:
    store = shop.new(units=UnitsMode.OFF)
    files = save(store, make(store, CHECKPOINT), shards(1), marker=None)
    assert not store.units.active
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == files


# --- what was there before --------------------------------------------------------------------


def test_the_old_set_is_back_after_a_crash(shop: Shop, store: Store) -> None:
    directory, old = saved(store)
    write_file(store, directory, b"shard-1", b"new shard")
    assert tree(store, CHECKPOINT) == {**old, b"shard-1": b"new shard"}
    store = shop.reopen(store, units=UnitsMode.AUTO)
    assert tree(store, CHECKPOINT) == old
    assert in_history(store, b"shard-1")[0] == b"new shard"


def test_the_new_set_is_there_after_its_marker(shop: Shop, store: Store) -> None:
    directory, _ = saved(store)
    new = save(store, directory, shards(2))
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == new
    finish_work(store)
    assert kept_count(store) == 0


def test_the_copy_goes_away_when_it_is_not_wanted(store: Store) -> None:
    directory, _ = saved(store)
    save(store, directory, shards(2))
    finish_work(store)
    assert kept_count(store) == 0
    before = store.volume.engine.statistics().kept_bytes
    save(store, directory, shards(3))
    finish_work(store)
    assert store.volume.engine.statistics().kept_bytes <= before + 100


def test_everything_of_the_old_set_is_back(shop: Shop, store: Store) -> None:
    """Names, links, attributes, holes, what is below; and what was incomplete is."""
    directory = make(store, CHECKPOINT)
    below = make(store, b"optimizer", directory)
    write_file(store, below, b"rank-0", b"r" * 9000)
    store.link(store.lookup(below, b"rank-0").ino, directory, b"same")
    store.make_symlink(directory, b"best", b"optimizer/rank-0", 1, 2)
    store.make_node(directory, b"pipe", 0o010600, 0, 1, 2)
    ino = write_file(store, directory, b"sparse", b"head")
    handle = store.open_file(ino, os.O_RDWR)
    store.write(handle, 100_000, b"tail")
    close(store, handle)
    store.set_xattr(ino, b"user.step", b"5")
    store.set_attributes(ino, mode=0o600, uid=7, gid=8, mtime_ns=123, atime_ns=55)
    write_file(store, directory, MARKER, b"{}")
    before = {
        path: store.get_attributes(find(store, CHECKPOINT + path).ino)
        for path in (b"/optimizer", b"/optimizer/rank-0", b"/best", b"/pipe", b"/sparse", b"")
    }
    remove_tree(store, directory, b"optimizer")
    store.unlink(directory, b"best")
    store.unlink(directory, b"pipe")
    store.unlink(directory, b"sparse")
    store = shop.reopen(store)
    for path, old in before.items():
        new = store.get_attributes(find(store, CHECKPOINT + path).ino)
        assert new.ino == old.ino
        for field in (
            "mode",
            "nlink",
            "uid",
            "gid",
            "rdev",
            "size",
            "allocated_bytes",
            "atime_ns",
            "mtime_ns",
        ):
            if field == "mtime_ns" and path in {b"", b"/optimizer"}:
                continue  # of directories: names went and came
            assert getattr(new, field) == getattr(old, field), (path, field)
    sparse = find(store, CHECKPOINT + b"/sparse")
    assert read_file(store, sparse.ino) == b"head".ljust(100_000, b"\0") + b"tail"
    assert store.get_xattr(sparse.ino, b"user.step") == b"5"
    assert store.read_symlink(find(store, CHECKPOINT + b"/best").ino) == b"optimizer/rank-0"
    one, two = (find(store, CHECKPOINT + p) for p in (b"/same", b"/optimizer/rank-0"))
    assert one is two


def test_files_changed_in_place_go_back_together(shop: Shop, store: Store) -> None:
    """Written without truncation, as HDF5 and memory maps do, and published one by one."""
    directory, old = saved(store)
    for name in (b"shard-1", b"shard-2"):
        handle = store.open_file(store.lookup(directory, name).ino, os.O_RDWR)
        store.write(handle, 100, b"in place")
        store.fsync(handle)
        close(store, handle)
    assert tree(store, CHECKPOINT) != old
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == old


def test_a_half_removed_tree_is_back(shop: Shop, store: Store) -> None:
    directory, old = saved(store)
    store.unlink(directory, b"shard-1")
    store.unlink(directory, MARKER)
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == old


def test_a_removed_tree_is_gone(shop: Shop, store: Store) -> None:
    """Once whoever removed it has ended well."""
    saved(store)
    writers = Writers(store)
    remove_tree(store, 1, CHECKPOINT)
    assert open_count(store) == 1
    writers.endings["trainer"] = Ending.WELL
    finish_work(store)
    assert open_count(store) == 0
    assert kept_count(store) == 0
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) is None
    finish_work(store)
    assert kept_count(store) == 0


def test_names_moved_in_and_out(shop: Shop, store: Store) -> None:
    directory, old = saved(store)
    write_file(store, 1, b"outside", b"outside")
    store.rename(1, b"outside", directory, b"shard-0")
    store.rename(directory, b"shard-1", 1, b"taken")
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == old
    assert read_file(store, find(store, b"taken").ino) == old[b"shard-1"]


def test_what_has_no_copy_is_not_in_the_set(shop: Shop, store: Store) -> None:
    """A file that was never published is not part of what comes back."""
    directory, old = saved(store)
    handle = store.create(directory, b"open", 0o644, 1, 1, os.O_RDWR)[1]
    store.write(handle, 0, b"not published")
    store.units.settle()
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == old


# --- ends -------------------------------------------------------------------------------------


def test_a_marker_alone_is_no_end(shop: Shop, store: Store) -> None:
    directory = make(store, CHECKPOINT)
    write_file(store, directory, MARKER, b"first")
    assert open_count(store) == 1
    write_file(store, directory, b"shard-0", b"later")
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) is None


def test_a_renamed_marker_alone_is_no_end(shop: Shop, store: Store) -> None:
    directory, old = saved(store)
    store.unlink(directory, MARKER)
    write_file(store, directory, b"tmp", b"first")
    store.rename(directory, b"tmp", directory, MARKER)
    assert open_count(store) == 1
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == old


def test_a_marker_that_is_renamed_into_place_is_an_end(shop: Shop, store: Store) -> None:
    directory = make(store, b"step-7")
    write_file(store, directory, b"__0_0.distcp", b"shard")
    assert open_count(store) == 1
    write_file(store, directory, b".metadata.tmp", b"metadata")
    assert open_count(store) == 1
    store.rename(directory, b".metadata.tmp", directory, b".metadata")
    assert open_count(store) == 0
    store = shop.reopen(store)
    assert tree(store, b"step-7") == {b"__0_0.distcp": b"shard", b".metadata": b"metadata"}


def test_shards_that_are_overwritten_show_what_the_directory_is(shop: Shop, store: Store) -> None:
    directory = make(store, b"dcp")
    old = save(store, directory, {b"__0_0.distcp": b"a", b"__1_0.distcp": b"b"}, b".metadata")
    assert open_count(store) == 0
    write_file(store, directory, b"__1_0.distcp", b"new")
    store = shop.reopen(store, units=UnitsMode.AUTO)
    assert tree(store, b"dcp") == old
    store.unlink(find(store, b"dcp").ino, b".metadata")  # the first step of rmtree
    store = shop.reopen(store)
    assert tree(store, b"dcp") == old


def test_the_first_file_of_a_save_over_shards_begins_a_unit(shop: Shop, store: Store) -> None:
    """save_pretrained writes config.json before all shards."""
    directory = make(store, b"model")
    files = {
        b"config.json": b"{}",
        **{b"model-%05d-of-00002.safetensors" % n: b"1" for n in (1, 2)},
    }
    old = save(store, directory, files, b"model.safetensors.index.json")
    assert open_count(store) == 0
    write_file(store, directory, b"config.json", b'{"step": 2}')
    assert open_count(store) == 1
    store = shop.reopen(store, units=UnitsMode.AUTO)
    assert tree(store, b"model") == old
    write_file(store, 1, b"config.json", b"{}")  # in a directory of any kind
    assert open_count(store) == 0


@pytest.mark.parametrize("name", [CHECKPOINT, b"step-2"])
def test_a_new_set_without_the_marker_of_the_one_beside_it(store: Store, name: bytes) -> None:
    """A handler of SIGTERM that exits with 0 leaves it so."""
    writers = Writers(store)
    first = {CHECKPOINT: b"checkpoint-4", b"step-2": b"step-1"}[name]
    marker = MARKER if name == CHECKPOINT else b".metadata"
    names = [b"__0_0.distcp", b"__1_0.distcp"]
    save(store, make(store, first), dict.fromkeys(names, b"old"), marker)
    files = save(store, make(store, name), dict.fromkeys(names, b"new"), None)
    assert tree(store, name) == files
    writers.endings["trainer"] = Ending.WELL
    store.units.settle()
    assert tree(store, name) is None
    for each, data in files.items():
        assert in_history(store, each)[0] == data
    assert tree(store, first) is not None


@pytest.mark.parametrize("name", [CHECKPOINT, b"step-2"])
@pytest.mark.parametrize("program", ["the same", "another"])
@pytest.mark.parametrize("ending", [Ending.WELL, Ending.KILLED])
def test_the_first_set_of_a_life_without_the_marker(
    store: Store, name: bytes, program: str, ending: Ending
) -> None:
    """A kill takes back what a program that has finished such sets has begun, and what is made in a
    directory of such a name. Exit code 0 does where the program and the name are known: elsewhere
    jobs of one program may make one part each.
    """
    writers = Writers(store)
    store.units.savers.program = lambda who: (
        b"train" if program == "the same" else repr(who).encode()
    )
    first = {CHECKPOINT: b"checkpoint-4", b"step-2": b"step-1"}[name]
    marker = MARKER if name == CHECKPOINT else b".metadata"
    save(store, make(store, first), {b"__0_0.distcp": b"old"}, marker)
    writers.present = "the next life"
    files = save(store, make(store, name), {b"__0_0.distcp": b"new"}, None)
    writers.endings["the next life"] = ending
    store.units.settle()
    by_name, is_same = name == CHECKPOINT, program == "the same"
    goes_back = (by_name or is_same) if ending is Ending.KILLED else (by_name and is_same)
    writers.now += 100
    store.units.settle()
    assert tree(store, name) == (None if goes_back else files)
    assert tree(store, first) is not None


def test_who_is_a_saver_is_known_after_a_mount(shop: Shop, store: Store) -> None:
    writers = Writers(store)
    save(store, make(store, b"step-1"), {b"__0_0.distcp": b"old"}, b".metadata")
    assert writers
    store = shop.reopen(store, units=UnitsMode.AUTO)
    Writers(store)
    save(store, make(store, b"step-2"), {b"__0_0.distcp": b"new"}, None)
    store = shop.reopen(store, clean=False, units=UnitsMode.AUTO)
    assert tree(store, b"step-2") is None


@pytest.mark.parametrize("first", [b"shard-0", b"checkpoint-10", b"config.json"])
def test_a_directory_beside_sets_may_hold_something_else(store: Store, first: bytes) -> None:
    """A run beside a run that ended with sharded weights, by one program: what it holds is no set,
    and nothing that fails in it takes its checkpoints back.
    """
    writers = Writers(store)
    part, index = b"model-00001-of-00001.safetensors", b"model.safetensors.index.json"
    save(store, make(store, b"run-1"), {part: b"old"}, index)
    run = make(store, b"run-2")
    if first == b"checkpoint-10":
        whole = save(store, make(store, first, run), shards(1))
        expected = {first + b"/" + name: data for name, data in whole.items()}
    else:
        write_file(store, run, b"args.bin", b"args")
        expected = {b"args.bin": b"args"}
    writers.endings["trainer"] = Ending.KILLED
    store.units.settle()
    assert tree(store, b"run-2") == expected


@pytest.mark.parametrize("how", ["killed", "crash", "unmount"])
def test_a_file_that_is_put_beside_a_finished_set_stays(shop: Shop, store: Store, how: str) -> None:
    writers = Writers(store)
    directory, old = saved(store)
    writers.present = "evaluator"
    write_file(store, directory, b"eval_results.json", b"{}")
    assert open_count(store) == 0
    writers.endings["evaluator"] = Ending.KILLED
    store.units.settle()
    if how != "killed":
        store = shop.reopen(store, clean=how == "unmount")
    assert tree(store, CHECKPOINT) == {**old, b"eval_results.json": b"{}"}


@pytest.mark.parametrize("ending", [Ending.KILLED, Ending.BADLY, Ending.WELL])
def test_parts_of_a_download_stay(store: Store, ending: Ending) -> None:
    """Each is whole, and the next try goes on with the others."""
    writers = Writers(store)
    parts = [b"model-0000%d-of-00003.safetensors" % number for number in (1, 2)]
    directory = make(store, b"llama-7b")
    for number, part in enumerate(parts):
        writers.present = number
        write_file(store, directory, part, b"weights")
        writers.endings[number] = ending
        store.units.settle()
    assert tree(store, b"llama-7b") == dict.fromkeys(parts, b"weights")


def test_what_a_program_copies_into_an_unfinished_set_is_no_part_of_it(store: Store) -> None:
    writers = Writers(store)
    store.units.copies_files = lambda writer: writer == "cp"
    directory, old = saved(store)
    write_file(store, directory, b"shard-0", b"half of the set")
    writers.present = "cp"
    write_file(store, directory, b"plot.png", b"a picture")
    writers.endings |= {"trainer": Ending.KILLED, "cp": Ending.KILLED}
    store.units.settle()
    assert tree(store, CHECKPOINT) == {**old, b"plot.png": b"a picture"}


def test_a_saver_that_waits_in_mid_save_goes_on_with_it(store: Store) -> None:
    """A process that has finished a set is not done with the next one before its marker."""
    writers = Writers(store)
    saved(store, b"checkpoint-4")
    save(store, make(store, CHECKPOINT), shards(2), None)
    writers.now += 1000
    store.units.settle()
    assert open_count(store) == 1
    writers.endings["trainer"] = Ending.KILLED
    store.units.settle()
    assert tree(store, CHECKPOINT) is None


def test_a_set_that_has_no_marker_behind_one_that_has(store: Store) -> None:
    """Zarr's metadata is written first, and only some programs write it again."""
    writers = Writers(store)
    save(store, make(store, b"a1.zarr"), shards(1), b"zarr.json")
    writers.present = "another"
    directory = make(store, b"a2.zarr")
    write_file(store, directory, b"zarr.json", b"{}")
    files = save(store, directory, shards(1), None)
    writers.endings["another"] = Ending.WELL
    writers.now += 100.0
    store.units.settle()
    assert tree(store, b"a2.zarr") == {**files, b"zarr.json": b"{}"}


def test_an_empty_directory_beside_finished_ones(shop: Shop, store: Store) -> None:
    """The kill comes before any name tells what the directory will hold."""
    writers = Writers(store)
    save(store, make(store, b"step-9"), {b"__0_0.distcp": b"old"}, b".metadata")
    make(store, b"step-10")
    make(store, b"other-10")
    assert open_count(store) == 1
    writers.endings["trainer"] = Ending.KILLED
    store.units.settle()
    assert tree(store, b"step-10") is None
    assert tree(store, b"other-10") == {}
    store.units.savers.program = lambda _who: repr("trainer").encode()
    writers.present = "the next"
    make(store, b"step-10")
    store = shop.reopen(store)
    assert tree(store, b"step-10") is None
    assert tree(store, b"step-9") is not None


def test_a_marker_ends_a_unit_when_it_is_closed(shop: Shop, store: Store) -> None:
    """It may be half written when it is made durable."""
    directory = make(store, CHECKPOINT)
    save(store, directory, shards(1), None)
    handle = open_writing(store, directory, MARKER, b"{}")
    store.fsync(handle)
    assert open_count(store) == 1
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) is None
    directory = make(store, CHECKPOINT)
    save(store, directory, shards(1), None)
    handle = open_writing(store, directory, MARKER, b"{}")
    store.fsync(handle)
    close(store, handle)
    assert open_count(store) == 0


def test_a_directory_that_other_programs_fill_stays(store: Store) -> None:
    """mkdir, and a cp for each file, beside one that a trainer has finished."""
    writers = Writers(store)
    store.units.copies_files = lambda writer: writer != "trainer"
    save(store, make(store, b"checkpoint-4"), shards(1))
    writers.present = "mkdir"
    directory = make(store, CHECKPOINT)
    writers.endings["mkdir"] = Ending.WELL
    store.units.settle()
    for name, data in shards(2).items():
        writers.present = b"cp " + name
        write_file(store, directory, name, data)
        writers.endings[writers.present] = Ending.WELL
        store.units.settle()
    assert tree(store, CHECKPOINT) == shards(2)
    writers.now += 100.0
    store.units.settle()
    assert tree(store, CHECKPOINT) == shards(2)


def test_a_new_set_without_a_pattern_stays(store: Store) -> None:
    """With none beside it that has the marker; and a change in a directory that is done."""
    writers = Writers(store)
    files = save(store, make(store, b"checkpoint-4"), shards(1), None)
    writers.endings["trainer"] = Ending.WELL
    writers.now += 100.0
    store.units.settle()
    assert tree(store, b"checkpoint-4") == files
    directory, _ = saved(store)
    assert open_count(store) == 0
    write_file(store, directory, b"shard-1", b"edited")
    writers.now += 100.0
    store.units.settle()
    assert read_file(store, find(store, b"checkpoint-5/shard-1").ino) == b"edited"


def test_the_second_marker_ends_a_unit_of_its_own(shop: Shop, store: Store) -> None:
    directory, old = saved(store)
    write_file(store, directory, b"shard-1", b"late")
    assert open_count(store) == 1
    write_file(store, directory, MARKER, b"again")
    assert open_count(store) == 0
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == {**old, b"shard-1": b"late", MARKER: b"again"}


def test_a_marker_waits_for_files_that_are_being_written(shop: Shop, store: Store) -> None:
    directory = make(store, CHECKPOINT)
    handle = open_writing(store, directory, b"rank-1", b"slow")
    files = save(store, directory, shards(1))
    assert open_count(store) == 1
    close(store, handle)
    assert open_count(store) == 0
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == {**files, b"rank-1": b"slow"}


def test_a_marker_beside_the_directory(shop: Shop, store: Store) -> None:
    directory = make(store, b"global_step7")
    files = save(store, directory, shards(1), marker=None)
    assert open_count(store) == 1
    write_file(store, 1, b"latest", b"global_step7")
    assert open_count(store) == 0
    store = shop.reopen(store)
    assert tree(store, b"global_step7") == files


def test_the_rename_of_the_directory_is_an_end(shop: Shop, store: Store) -> None:
    directory = make(store, b"7.orbax-checkpoint-tmp-1")
    files = save(store, directory, shards(1), marker=None)
    commits = store.volume.counters.commits
    store.rename(1, b"7.orbax-checkpoint-tmp-1", 1, b"7")
    assert store.volume.counters.commits == commits + 1
    assert open_count(store) == 0
    store = shop.reopen(store)
    assert tree(store, b"7") == files


def test_the_rename_of_a_directory_above_is_none(shop: Shop, store: Store) -> None:
    runs = make(store, b"runs")
    save(store, make(store, CHECKPOINT, runs), shards(1), marker=None)
    store.rename(1, b"runs", 1, b"moved")
    assert open_count(store) == 1
    store = shop.reopen(store)
    assert tree(store, b"moved") == {}


def test_directories_in_each_other_are_one(shop: Shop, store: Store) -> None:
    outer = make(store, CHECKPOINT)
    inner = make(store, b"global_step5", outer)
    write_file(store, inner, b"zero", b"z")
    assert [unit.inode.ino for unit in store.units.open_units()] == [outer]
    write_file(store, outer, b"latest", b"no marker of this one")
    assert open_count(store) == 1
    write_file(store, outer, MARKER, b"{}")
    assert open_count(store) == 0
    write_file(store, inner, b"zero", b"y")
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT + b"/global_step5") == {b"zero": b"z"}


MANY_FILES = 3000
"""More than the bytes that the record of an end may have."""


def test_the_end_of_many_files_is_one_small_record(shop: Shop) -> None:
    store = shop.new(64 << 20, units=UnitsMode.AUTO)
    directory = make(store, CHECKPOINT)
    for number in range(MANY_FILES):
        write_file(store, directory, b"%05d" % number, b"x")
    commits = store.volume.counters.commits
    written = store.volume.counters.journal_bytes_written
    write_file(store, directory, MARKER, b"{}")
    assert store.volume.counters.commits - commits == 2  # the marker, and that it ends the unit
    assert store.volume.counters.journal_bytes_written - written < 2048


def test_few_records_take_many_files_back(shop: Shop) -> None:
    store = shop.new(64 << 20, units=UnitsMode.AUTO)
    directory = make(store, CHECKPOINT)
    for number in range(MANY_FILES):
        write_file(store, directory, b"%05d" % number, b"x")
    store = shop.reopen(store)
    assert store.volume.counters.commits < 3000 / 100
    assert tree(store, CHECKPOINT) is None
