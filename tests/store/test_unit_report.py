"""What a list says of directories of files that belong together: units, and what is none."""

from __future__ import annotations

import pytest

from cxlfs.store import Store
from cxlfs.store.unit_record import policy_rule
from cxlfs.store.unit_rules import Ending, UnitsMode
from tests.support.shop import Shop
from tests.support.stores import write_file
from tests.support.unit_scenes import CHECKPOINT, Writers, make, open_writing, save, saved, shards


@pytest.fixture
def store(shop: Shop) -> Store:
    """Without units: what is torn stays so."""
    return shop.new(units=UnitsMode.OFF)


def said(store: Store, path: bytes = b"/") -> dict[bytes, str]:
    """State, reason and the rest of each entry, by name."""
    return {
        entry.path.rpartition(b"/")[2]: " | ".join(
            [
                entry.state,
                *([entry.reason] if entry.reason else []),
                *(["kept aside"] if entry.kept_aside else []),
                *(["being written"] if entry.being_written else []),
            ]
        )
        for entry in store.list_checkpoints(path)
    }


def test_a_set_without_its_marker(store: Store) -> None:
    save(store, make(store, CHECKPOINT), shards(1), marker=None)
    save(store, make(store, b"dcp"), {b"__0_0.distcp": b"shard"}, marker=None)
    save(store, make(store, b"checkpoint_1"), shards(1), marker=None)
    save(store, make(store, b"logs"), shards(1), marker=None)
    make(store, b"checkpoint-9")
    assert said(store) == {
        CHECKPOINT: "incomplete | incomplete set: there is no trainer_state.json",
        b"dcp": "incomplete | incomplete set: there is no .metadata",
        b"checkpoint_1": "complete",
        b"logs": "complete",
        b"checkpoint-9": "complete",
    }


def test_a_set_that_may_be_mixed(store: Store) -> None:
    """Old metadata with new shards looks whole, file by file."""
    directory = make(store, b"dcp")
    save(store, directory, {b"__0_0.distcp": b"a", b"__1_0.distcp": b"b"}, b".metadata")
    assert said(store) == {b"dcp": "complete"}
    write_file(store, directory, b"notes", b"not of the set")
    assert said(store) == {b"dcp": "complete"}
    write_file(store, directory, b"__1_0.distcp", b"new")
    reason = "set may be mixed: __1_0.distcp was committed after .metadata"
    assert said(store) == {b"dcp": f"incomplete | {reason}"}
    write_file(store, directory, b".metadata", b"new")
    assert said(store) == {b"dcp": "complete"}


def test_what_may_follow_a_marker(store: Store) -> None:
    directory, _ = saved(store)
    write_file(store, directory, b"rng_state_3.pth", b"of another rank")
    assert said(store) == {CHECKPOINT: "complete"}
    write_file(store, make(store, b"below", directory), b"late", b"x")
    reason = "set may be mixed: below/late was committed after trainer_state.json"
    assert said(store) == {CHECKPOINT: f"incomplete | {reason}"}


def test_a_policy_says_what_is_written_last(shop: Shop) -> None:
    store = shop.new(units=UnitsMode.OFF)
    runs = make(store, b"runs")
    rules = (policy_rule((b"epoch-*",), (b"DONE",), None),)
    store.units.set_policy(store.namespace.get(runs), rules)
    save(store, make(store, b"epoch-1", runs), shards(1), marker=None)
    save(store, make(store, b"epoch-2", runs), shards(1), marker=b"DONE")
    assert said(store, b"/runs") == {
        b"epoch-1": "incomplete | incomplete set: there is no DONE",
        b"epoch-2": "complete",
    }


def test_units(shop: Shop) -> None:
    """Being written, taken back, and left open in a store that cannot be written."""
    store = shop.new(units=UnitsMode.AUTO)
    writers = Writers(store)
    runs = make(store, b"runs")
    directory = make(store, CHECKPOINT, runs)
    save(store, directory, shards(1))
    assert said(store, b"/runs") == {CHECKPOINT: "complete"}
    write_file(store, directory, b"shard-0", b"new")
    assert said(store, b"/runs") == {CHECKPOINT: "complete | being written"}
    writers.endings["trainer"] = Ending.KILLED
    store.units.maintain()
    again = {CHECKPOINT: "complete"}
    assert said(store, b"/runs") == again, "what came back is not newer than its marker"
    store = shop.reopen(store, units=UnitsMode.AUTO)
    assert said(store, b"/runs") == again
    assert set(said(store)) == {b"runs"}
    writers = Writers(store)
    writers.present = None
    open_writing(store, make(store, b"checkpoint-6", runs), b"shard", b"half")
    store = shop.reopen(store, read_only=True)
    assert said(store, b"/runs")[b"checkpoint-6"].startswith("incomplete | it was being written")
    store = shop.reopen(store)
    assert b"checkpoint-6" not in said(store, b"/runs")
