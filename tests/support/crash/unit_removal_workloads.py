"""Workloads over checkpoint units that are removed, for good or to be made again."""

from __future__ import annotations

from cxlfs.store.unit_rules import Ending
from tests.support.crash.bench import Bench
from tests.support.crash.unit_scene import MARKER, SET, Scene, complete_set


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


REMOVAL_WORKLOADS = [
    unit_removed, unit_removed_and_made_again, unit_removed_that_gives_its_room,
    unit_removed_by_whom_a_kill_stops, unit_removed_and_replaced,
]  # fmt: skip
