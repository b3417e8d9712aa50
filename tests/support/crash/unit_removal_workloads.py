"""Workloads over checkpoint units that are removed, for good or to be made again."""

from __future__ import annotations

from cxlfs.store.space import State as SpaceState
from cxlfs.store.unit_rules import Ending
from tests.support.crash.bench import Bench
from tests.support.crash.unit_scene import MARKER, SET, Scene, complete_set, short_removals


def _remove(scene: Scene) -> None:
    """As rmtree does: file by file, then the directories."""
    for name in (b"/a", b"/below/c", b"/" + MARKER, b"/b"):
        scene.bench.unlink(SET + name)
    scene.remove(SET + b"/below")
    scene.remove(SET)


def unit_removed(bench: Bench) -> None:
    """For good when nothing follows for a while."""
    scene = complete_set(bench)
    scene.begin(SET)
    _remove(scene)
    assert scene.units.open_units()
    scene.now += 1000.0
    scene.ending("quiet", SET, scene.units.maintain)
    bench.do("maintain", scene.units.maintain, late=True, keeps=True)


def unit_removed_and_made_again(bench: Bench) -> None:
    """What was removed is back until the new one of the same name is finished."""
    scene = complete_set(bench)
    scene.begin(SET)
    _remove(scene)
    scene.make(SET)
    scene.save(SET + b"/a", 6500)
    scene.save(SET + b"/d", 300)
    scene.finish(SET + b"/" + MARKER, 95, SET)
    bench.do("maintain", scene.units.maintain, late=True, keeps=True)
    scene.save(b"unrelated", 3000)


def unit_removed_that_gives_its_room(bench: Bench) -> None:
    """In mid-save of what replaces it: from one record on nothing comes back."""
    scene = complete_set(bench)
    scene.begin(SET)
    _remove(scene)
    scene.make(SET)
    scene.save(SET + b"/a", 300)

    def give() -> None:
        assert scene.units.drop_removed()
        scene.begin_without(SET)

    bench.do("drop_removed", give)
    bench.do("maintain", scene.units.maintain, late=True, keeps=True)
    scene.save(SET + b"/d", 300)
    scene.finish(SET + b"/" + MARKER, 95, SET)


def unit_removed_by_whom_a_kill_stops(bench: Bench) -> None:
    """Before the name is made again, and behind it: what was removed comes back at once."""
    scene = complete_set(bench)
    scene.units.writer = lambda: "saver"
    for again in (False, True):
        endings = {"saver": Ending.ALIVE}
        scene.units.ending_of = endings.__getitem__  # type: ignore[assignment]
        scene.begin(SET)
        _remove(scene)
        if again:
            scene.make(SET)
            scene.save(SET + b"/a", 300)
        endings["saver"] = Ending.KILLED
        scene.back(SET)


def unit_removed_and_replaced(bench: Bench) -> None:
    """Another directory is renamed to the name: one record makes it so, and ends the removal."""
    scene = complete_set(bench)
    scene.make(b"new")
    scene.save(b"new/a", 500)
    scene.begin(SET)
    _remove(scene)
    scene.ending("rename", SET, lambda: bench.store.rename(1, b"new", 1, SET))


def unit_removed_and_followed(bench: Bench) -> None:
    """What somebody else begins beside it, or its remover elsewhere, does not make the removal
    stand; what its remover begins beside it does, with the next commit.
    """
    scene = complete_set(bench)
    present = ["saver"]
    scene.units.writer = lambda: present[0]
    scene.begin(SET)
    _remove(scene)
    present[0] = "other"
    scene.begin(b"checkpoint-2")
    scene.make(b"checkpoint-2")
    scene.save(b"checkpoint-2/a", 700)
    scene.finish(b"checkpoint-2/" + MARKER, 92, b"checkpoint-2")
    present[0] = "saver"
    scene.begin(b"dir/checkpoint-3")
    scene.make(b"dir/checkpoint-3")
    scene.save(b"dir/checkpoint-3/a", 500)
    scene.begin(b"checkpoint-4")
    scene.make(b"checkpoint-4")
    bench.do("remove some", scene.units.garbage.remove_some, late=True, keeps=True)
    scene.save(b"checkpoint-4/a", 300)
    assert not scene.is_open(SET)
    bench.do("maintain", scene.units.maintain, late=True, keeps=True)
    scene.save(b"unrelated", 3000)


def unit_removed_on_a_full_store(bench: Bench) -> None:
    """A write gets its room, when there is no other: all that was removed comes back, or nothing,
    also while it is taken apart.
    """
    scene = complete_set(bench)
    scene.begin(SET)
    _remove(scene)
    space = bench.store.volume.space
    while space.free_count > bench.store.volume.refresh_reserve() + 1:
        space.take(SpaceState.IMAGE)
    handle = scene.open(b"unrelated")
    with short_removals():
        while scene.is_open(SET):
            assert bench.write(handle, bench.store.files.get(handle).inode.content.size, 16_000)
    bench.close(handle)


REMOVAL_WORKLOADS = [
    unit_removed, unit_removed_and_made_again, unit_removed_that_gives_its_room,
    unit_removed_by_whom_a_kill_stops, unit_removed_and_replaced,
]  # fmt: skip
LONG_REMOVAL_WORKLOADS = [unit_removed_and_followed, unit_removed_on_a_full_store]
