"""Sets whose writers ended well without all that a whole one has: the one beside, before, below."""

from __future__ import annotations

import os

import pytest

from cxlfs.store import Store
from cxlfs.store.overwrite import Evidence
from cxlfs.store.overwrites import REST_SECONDS, TornMode
from cxlfs.store.unit_rules import Ending, UnitsMode
from tests.support.shop import Shop, close
from tests.support.stores import read_file, write_file
from tests.support.unit_scenes import (
    Tree,
    Writers,
    find,
    in_history,
    make,
    open_count,
    open_writing,
    remove_tree,
    save,
    tree,
)

WEIGHTS, STATES = b"model.safetensors", b"random_states_0.pkl"
OTHER_RANK, CUSTOM = b"random_states_1.pkl", b"custom_checkpoint_0.pkl"
WHOLE, CUT = b"\x80\x04}.", b"\x80\x04}"
"""Pickles."""
SHARDS = [b"model-%05d-of-00003.safetensors" % number for number in (1, 2, 3)]
CONFIG, INDEX = b"config.json", b"model.safetensors.index.json"


@pytest.fixture
def store(shop: Shop) -> Store:
    """With well-known names."""
    return shop.new(units=UnitsMode.AUTO, torn=TornMode.BACK)


@pytest.fixture
def writers(store: Store) -> Writers:
    return Writers(store)


def end_well(store: Store, writers: Writers) -> None:
    writers.endings[writers.present] = Ending.WELL  # type: ignore[index]
    store.units.settle()


def fill(store: Store, writers: Writers, path: bytes, files: Tree) -> None:
    """A program makes a directory, and ends well. All that there is to decide is decided."""
    writers.present = path
    save(store, make(store, path), files, None)
    end_well(store, writers)
    writers.now += 100.0
    store.units.settle()
    assert open_count(store) == 0


# --- beside finished ones -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("beside", "files", "stays"),
    [
        ([{STATES: WHOLE}], {}, False),
        ([{STATES: WHOLE}], {WEIGHTS: b"new"}, False),
        ([{STATES: WHOLE}], {WEIGHTS: b"new", STATES: b""}, False),
        ([{STATES: WHOLE}], {WEIGHTS: b"new", STATES: CUT}, False),
        ([{STATES: WHOLE}], {WEIGHTS: b"new", STATES: WHOLE}, True),
        ([{STATES: WHOLE, CUSTOM: WHOLE}], {STATES: WHOLE}, False),
        ([{STATES: WHOLE, CUSTOM: WHOLE}], {STATES: WHOLE, CUSTOM: CUT}, False),
        ([{STATES: WHOLE, CUSTOM: WHOLE}], {STATES: WHOLE, CUSTOM: WHOLE}, True),
        # What not all of them have says nothing.
        ([{STATES: WHOLE}, {STATES: WHOLE, CUSTOM: WHOLE}], {STATES: WHOLE}, True),
        ([{WEIGHTS: b"a program of one's own"}], {b"optimizer.bin": b"new"}, True),
        ([], {WEIGHTS: b"new"}, True),
    ],
)
def test_a_set_without_marker(
    shop: Shop, store: Store, writers: Writers, beside: list[Tree], files: Tree, *, stays: bool
) -> None:
    for number, each in enumerate(beside):
        fill(store, writers, b"checkpoint_%d" % number, {WEIGHTS: b"old", **each})
    writers.present = "the last"
    save(store, make(store, b"checkpoint_6"), {WEIGHTS: b"old", **(beside or [{}])[0]}, None)
    save(store, make(store, b"checkpoint_7"), files, None)
    end_well(store, writers)
    assert tree(store, b"checkpoint_7") == (files if stays else None)
    told = [event.message for event in shop.events if event.kind == "unit-back"]
    assert len(told) == (not stays)
    if not stays:
        assert "its writers have ended without" in told[0]
        for name, data in files.items():
            assert in_history(store, name)[0] == data


@pytest.mark.parametrize(
    ("names", "ends"),
    [([STATES], False), ([STATES, CUSTOM], True), ([STATES, OTHER_RANK, CUSTOM], True)],
)
def test_a_set_with_all_that_others_have_is_finished(
    store: Store, writers: Writers, names: list[bytes], *, ends: bool
) -> None:
    """Nothing that happens after its last file takes it back."""
    fill(store, writers, b"checkpoint_1", {WEIGHTS: b"old", STATES: WHOLE})
    fill(store, writers, b"checkpoint_2", {WEIGHTS: b"old", STATES: WHOLE, CUSTOM: WHOLE})
    writers.present = "the last"
    files = {WEIGHTS: b"new", **dict.fromkeys(names, WHOLE)}
    save(store, make(store, b"checkpoint_3"), files, None)
    assert open_count(store) == (not ends)
    writers.endings["the last"] = Ending.KILLED
    store.units.settle()
    assert tree(store, b"checkpoint_3") == (files if ends else None)


def test_what_others_copy_stays(store: Store, writers: Writers) -> None:
    store.units.copies_files = lambda writer: writer == "cp"
    fill(store, writers, b"checkpoint_1", {WEIGHTS: b"old", STATES: WHOLE})
    writers.present = "cp"
    save(store, make(store, b"checkpoint_2"), {WEIGHTS: b"new"}, None)
    end_well(store, writers)
    assert tree(store, b"checkpoint_2") == {WEIGHTS: b"new"}


# --- in place of one that was removed -------------------------------------------------------------


def group(store: Store, arrays: dict[bytes, int], *, marked: bool) -> None:
    """A directory as zarr makes it: its metadata first, and once more if ``marked``."""
    top = make(store, b"a.zarr")
    write_file(store, top, b"zarr.json", b"{}")
    for name, chunks in arrays.items():
        array = make(store, name, top)
        write_file(store, array, b"zarr.json", b"{}")
        chunk_home = make(store, b"c", array)
        for chunk in range(chunks):
            write_file(store, chunk_home, b"%d" % chunk, b"chunk of " + name)
    if marked:
        write_file(store, top, b"zarr.json", b'{"consolidated_metadata": {}}')


@pytest.mark.parametrize("count", range(5))
def test_a_flat_set_made_anew(store: Store, writers: Writers, count: int) -> None:
    """Who only makes the directory again has emptied it."""
    top = make(store, b"checkpoint-5")
    files = {WEIGHTS: b"1", b"optimizer.pt": b"1", b"trainer_state.json": b"{}"}
    save(store, top, files, None)
    writers.present = "the next"
    remove_tree(store, 1, b"checkpoint-5")
    top = make(store, b"checkpoint-5")
    new = dict.fromkeys([*files][:count], b"{2}")
    save(store, top, new, None)
    end_well(store, writers)
    writers.now += 100.0
    store.units.settle()
    assert tree(store, b"checkpoint-5") == (files if count in (1, 2) else new)


@pytest.mark.parametrize(
    ("was_marked", "arrays", "marked", "stays"),
    [
        (True, {}, False, True),  # emptied
        (True, {b"x": 0, b"y": 0}, False, True),  # prepared for others
        (True, {b"x": 1}, False, True),
        (True, {b"x": 2, b"y": 0}, False, False),
        (True, {b"x": 2}, False, False),
        (True, {b"x": 2, b"y": 1}, False, False),
        (True, {b"x": 2, b"y": 2}, False, True),  # all that it had
        (True, {b"x": 1}, True, True),
        (True, {b"x": 1, b"z": 1}, False, True),  # something else
        (False, {b"x": 1}, False, True),  # nobody knows what comes last
    ],
)
def test_a_set_made_anew(
    store: Store,
    writers: Writers,
    arrays: dict[bytes, int],
    *,
    was_marked: bool,
    marked: bool,
    stays: bool,
) -> None:
    group(store, {b"x": 2, b"y": 2}, marked=was_marked)
    writers.now += 100.0
    store.units.settle()
    old = tree(store, b"a.zarr")
    writers.present = "the next"
    top = find(store, b"a.zarr").ino
    for name in (b"x", b"y"):
        array = find(store, b"a.zarr/" + name).ino
        remove_tree(store, array, b"c")
        remove_tree(store, top, name)
    remove_tree(store, 1, b"a.zarr")
    group(store, arrays, marked=marked)
    new = tree(store, b"a.zarr")
    end_well(store, writers)
    writers.now += 100.0
    store.units.settle()
    assert tree(store, b"a.zarr") == (new if stays else old)
    assert open_count(store) == 0


def test_a_directory_that_is_only_removed_stays_so(store: Store, writers: Writers) -> None:
    group(store, {}, marked=False)
    writers.now += 100.0
    store.units.settle()
    writers.present = "another"
    remove_tree(store, 1, b"a.zarr")
    end_well(store, writers)
    assert tree(store, b"a.zarr") is None


def clear(store: Store, name: bytes, parent: int = 1) -> None:
    """As ``rm -r``, each file by itself."""
    directory = store.lookup(parent, name).ino
    for each, ino in list((store.namespace.get(directory).entries or {}).items()):
        if store.namespace.get(ino).entries is None:
            store.unlink(directory, each)
        else:
            clear(store, each, directory)
    store.remove_directory(parent, name)


@pytest.mark.parametrize("step", ["cleared", "in mid-save", "saved", "cut"])
def test_a_saver_that_clears_its_own_group_had_finished_it(
    shop: Shop, store: Store, writers: Writers, step: str
) -> None:
    """Nothing comes last, and it saves again before the group was quiet for a while."""
    group(store, {b"x": 2, b"y": 2}, marked=False)
    first = tree(store, b"a.zarr")
    clear(store, b"a.zarr")
    if step != "cleared":
        group(store, {b"x": 2, b"y": 2 if step == "saved" else 1}, marked=False)
    if step == "cut":
        store = shop.reopen(store, units=UnitsMode.AUTO)
    else:
        writers.endings[writers.present] = Ending.KILLED
        store.units.settle()
    assert tree(store, b"a.zarr") == first
    assert open_count(store) == 0


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("first", [b"x", b"zarr.json"])
def test_a_group_of_which_a_part_changed_is_cleared(
    store: Store, writers: Writers, first: bytes, *, marked: bool
) -> None:
    """What is removed before the changed file goes was finished earlier: it comes back."""
    group(store, {b"x": 2, b"y": 1}, marked=marked)
    writers.now += 100.0
    store.units.settle()
    top = find(store, b"a.zarr").ino
    write_file(store, top, b"zarr.json", b'{"attributes": 1}')
    whole = tree(store, b"a.zarr")
    before = whole if first == b"zarr.json" or marked else None
    if first == b"x":
        clear(store, b"x", top)
    store.unlink(top, b"zarr.json")
    writers.endings[writers.present] = Ending.KILLED
    store.units.settle()
    left = tree(store, b"a.zarr") or {}
    assert set(left) == set(whole or {})
    if before is not None:
        assert {left[name] for name in left if b"c/" in name} == {b"chunk of x", b"chunk of y"}


@pytest.mark.parametrize("closes", [False, True])
def test_a_file_that_is_renamed_before_it_is_closed(
    store: Store, writers: Writers, model: int, *, closes: bool
) -> None:
    """As safetensors does: the unit begins with the rename, and the file belongs to it."""
    before = tree(store, b"model")
    for shard in SHARDS[:2]:
        handle = store.create(model, b".tmp-a", 0o644, 5, 6, os.O_RDWR)[1]
        store.write(handle, 0, (before or {})[shard].replace(b"1", b"2"))
        if closes:
            close(store, handle)
        store.rename(model, b".tmp-a", model, shard)
        if not closes:
            close(store, handle)
    writers.endings[writers.present] = Ending.KILLED
    store.units.settle()
    left = tree(store, b"model") or {}
    assert left.pop(b".tmp-a", None) is None or closes  # it was there before the unit began
    assert left == before


@pytest.mark.parametrize(
    "names", [[b"latest.weights.h5", b"training_metadata.json"], [b"__0_0.distcp", b".metadata"]]
)
def test_a_part_that_somebody_edits_in_place_stays(
    store: Store, writers: Writers, names: list[bytes]
) -> None:
    fill(store, writers, b"saved", dict.fromkeys(names, b'{"step": 1}'))
    writers.present = "an editor"
    directory = find(store, b"saved").ino
    handle = store.open_file(store.lookup(directory, names[0]).ino, os.O_RDWR)
    store.write(handle, 9, b"5")
    close(store, handle)
    end_well(store, writers)
    writers.now += 100.0
    store.units.settle()
    assert (tree(store, b"saved") or {})[names[0]] == b'{"step": 5}'


@pytest.mark.parametrize(
    "how", ["temporary", "renamed", "rewritten", "renamed over", "busy", "another"]
)
def test_what_a_saver_removes_in_mid_save(store: Store, writers: Writers, how: str) -> None:
    """That is no sign of an end, and nothing that comes later is."""
    group(store, {b"x": 2}, marked=False)
    top = find(store, b"a.zarr").ino
    write_file(store, top, b"zarr.1.partial", b"{}")
    home = find(store, b"a.zarr/x/c").ino
    handle = None
    if how == "rewritten":
        write_file(store, home, b"0", b"another chunk")
    elif how == "renamed over":
        write_file(store, home, b"0.partial", b"another chunk")
        store.rename(home, b"0.partial", home, b"0")
    elif how == "busy":
        handle = open_writing(store, home, b"1", b"more")
    elif how == "another":
        writers.present = "another"
    if how == "renamed":
        store.rename(top, b"zarr.json", top, b"zarr.json.old")
    else:
        store.unlink(top, b"zarr.1.partial" if how == "temporary" else b"zarr.json")
    if handle is not None:
        close(store, handle)
    writers.endings |= dict.fromkeys(("trainer", "another"), Ending.KILLED)
    store.units.settle()
    assert tree(store, b"a.zarr") is None
    assert open_count(store) == 0


# --- over one that is there -----------------------------------------------------------------------


def sharded(step: int) -> Tree:
    """In the order in which a saver writes it."""
    names = [CONFIG, *SHARDS, INDEX, b"tokenizer.json"]
    return dict.fromkeys(names, b'{"step": %d}' % step)


@pytest.fixture
def model(store: Store, writers: Writers) -> int:
    """A directory that is complete."""
    fill(store, writers, b"model", sharded(1))
    writers.present = "the next"
    return find(store, b"model").ino


@pytest.mark.parametrize("count", [2, 3])
def test_the_beginning_of_a_new_save_over_the_old_one(
    shop: Shop, store: Store, writers: Writers, model: int, count: int
) -> None:
    save(store, model, dict(list(sharded(2).items())[:count]), None)
    end_well(store, writers)
    assert tree(store, b"model") == sharded(1)
    (told,) = [event.message for event in shop.events if event.kind == "unit-back"]
    assert f"without a new {SHARDS[count - 1].decode()}" in told
    assert b'{"step": 2}' in in_history(store, SHARDS[0])


@pytest.mark.parametrize(
    "edit",
    [
        [CONFIG],
        [SHARDS[0]],
        SHARDS[:2],
        [CONFIG, SHARDS[2]],
        [CONFIG, SHARDS[1]],
        [CONFIG, *SHARDS],
        [CONFIG, SHARDS[0], b"tokenizer.json"],
        [CONFIG, SHARDS[0], b"added.json"],
        [CONFIG, SHARDS[0], INDEX],
        [b"tokenizer.json"],
    ],
    ids=lambda names: b" ".join(names).decode(),
)
def test_what_somebody_edits_stays(
    store: Store, writers: Writers, model: int, edit: list[bytes]
) -> None:
    new = dict.fromkeys(edit, b'{"step": 2}')
    save(store, model, new, None)
    end_well(store, writers)
    writers.now += 100.0
    store.units.settle()
    assert tree(store, b"model") == {**sharded(1), **new}


@pytest.mark.parametrize(
    "names",
    [[b"latest.weights.h5", b"training_metadata.json"], [b"__0_0.distcp", b".metadata"]],
    ids=["keras", "dcp"],
)
def test_all_parts_but_not_the_marker(store: Store, writers: Writers, names: list[bytes]) -> None:
    """What the marker says holds for one save alone. That of safetensors names tensors."""
    fill(store, writers, b"saved", dict.fromkeys(names, b'{"step": 1}'))
    before = tree(store, b"saved")
    writers.present = "the next"
    save(store, find(store, b"saved").ino, {names[0]: b'{"step": 2}'}, None)
    end_well(store, writers)
    assert tree(store, b"saved") == before


def test_shards_of_another_length_stay(store: Store, writers: Writers, model: int) -> None:
    """As after a change of the vocabulary."""
    new = {CONFIG: b'{"step": 2}', SHARDS[0]: b"longer than it was"}
    save(store, model, new, None)
    end_well(store, writers)
    writers.now += 100.0
    store.units.settle()
    assert tree(store, b"model") == {**sharded(1), **new}


def test_a_set_whose_parts_were_removed_stays(store: Store, writers: Writers, model: int) -> None:
    write_file(store, model, CONFIG, b'{"step": 2}')
    write_file(store, model, SHARDS[0], b'{"step": 2}')
    store.unlink(model, SHARDS[2])
    end_well(store, writers)
    writers.now += 100.0
    store.units.settle()
    assert SHARDS[2] not in (tree(store, b"model") or {})


# --- torn by its own bytes ------------------------------------------------------------------------


@pytest.mark.parametrize("torn", [CONFIG, SHARDS[0]])
def test_a_set_with_a_torn_file_goes_back_as_a_whole(
    store: Store, writers: Writers, model: int, torn: bytes
) -> None:
    """The file alone would be of another save than those beside it."""
    overwrites = store.overwrites
    overwrites.writer = store.units.writer
    overwrites.ending_of = store.units.ending_of
    overwrites.clock = store.units.clock
    new = dict(list(sharded(2).items())[: 1 + [CONFIG, SHARDS[0]].index(torn)])
    save(store, model, {**new, torn: b'{"ste'}, None)
    writers.endings["the next"] = Ending.WELL
    store.units.settle()
    ino = find(store, b"model/" + torn).ino
    assert overwrites.wait_for(ino, opens=True)
    writers.now += REST_SECONDS
    while (question := overwrites.next_question()) is not None:
        is_torn = question.read("new", 0, question.new_bytes) == b'{"ste'
        evidence = Evidence.STRONG if is_torn else Evidence.NONE
        overwrites.judged(question, evidence, "it is cut")
    assert not overwrites.wait_for(ino, opens=True)
    assert tree(store, b"model") == sharded(1)
    assert read_file(store, ino) == sharded(1)[torn]
    assert open_count(store) == 0
