"""Workloads over the ends of checkpoint units: by a kill, by a name, without a marker or room."""

from __future__ import annotations

from cxlfs.errors import NoSpaceError
from cxlfs.store.unit_rules import Ending
from tests.support.crash.bench import Bench
from tests.support.crash.unit_scene import MARKER, SET, complete_set


def unit_back_between_any_two_files(bench: Bench) -> None:
    """The saver is killed behind the first file, the second, the third; each time all is back."""
    scene = complete_set(bench)
    scene.units.writer = lambda: "saver"
    for count in (1, 2, 3):
        endings = {"saver": Ending.ALIVE}
        scene.units.ending_of = endings.__getitem__  # type: ignore[assignment]
        scene.begin(SET)
        for name in (b"/a", b"/below/c", b"/d")[:count]:
            scene.save(SET + name, 200 + count)
        endings["saver"] = Ending.KILLED
        scene.back(SET)


def unit_overwritten_and_renamed(bench: Bench) -> None:
    """What was there is not wanted any more from the record of the rename on."""
    scene = complete_set(bench)
    scene.begin(SET)
    scene.save(SET + b"/a", 300)
    scene.ending("rename", SET, lambda: bench.store.rename(1, SET, 1, b"final"))
    bench.do("maintain", scene.units.maintain, late=True, keeps=True)
    scene.save(b"unrelated", 3000)


def unit_whose_marker_never_comes(bench: Bench) -> None:
    """Its writer ends: nobody knows how, or with an error."""
    scene = complete_set(bench)
    scene.units.writer = lambda: "saver"
    for ending in (Ending.UNKNOWN, Ending.BADLY):
        endings = {"saver": Ending.ALIVE}
        scene.units.ending_of = endings.__getitem__  # type: ignore[assignment]
        scene.begin(SET)
        scene.save(SET + b"/a", 300)
        endings["saver"] = ending
        scene.back(SET)


def unit_without_room_to_keep(bench: Bench) -> None:
    """A removal goes on without; the next change finds room."""
    scene = complete_set(bench)
    kept = scene.units.kept
    require_room = kept._require_room

    def no_room() -> None:
        raise NoSpaceError("the metadata of this store has no room to grow")

    kept._require_room = no_room
    bench.unlink(SET + b"/a")
    assert not scene.units.open_units()
    kept._require_room = require_room
    scene.begin(SET)
    scene.save(SET + b"/below/c", 300)
    scene.finish(SET + b"/" + MARKER, 95, SET)


ENDING_WORKLOADS = [
    unit_back_between_any_two_files, unit_overwritten_and_renamed, unit_whose_marker_never_comes,
    unit_without_room_to_keep,
]  # fmt: skip
