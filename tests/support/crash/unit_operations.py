"""Short operations over checkpoint units, for pairs: with each other and with any other operation.

Each is total, as those of ``operations``: it takes the set as the first one of the pair has left
it, complete, open or removed.
"""

from __future__ import annotations

import weakref

from cxlfs.errors import NotFoundError
from cxlfs.store.unit_rules import Ending
from tests.support.crash.bench import Bench
from tests.support.crash.unit_scene import MARKER, SET, Scene, complete_set, short_steps

_SCENES: weakref.WeakKeyDictionary[Bench, Scene] = weakref.WeakKeyDictionary()


def set_the_scene(bench: Bench) -> None:
    """Before a pair: a complete checkpoint."""
    _SCENES[bench] = complete_set(bench)


def _exists(bench: Bench, path: bytes) -> bool:
    try:
        bench.inode(path)
    except NotFoundError:
        return False
    return True


def _begin(bench: Bench) -> Scene:
    """The set is an open unit from its next change on, and is there."""
    scene = _SCENES[bench]
    if not scene.is_open(SET):
        scene.begin(SET)
    if not _exists(bench, SET):
        scene.make(SET)
    return scene


def unit_saved_over(bench: Bench) -> None:
    scene = _begin(bench)
    scene.save(SET + b"/a", 400)
    scene.finish(SET + b"/" + MARKER, 91, SET)


def unit_left_open(bench: Bench) -> None:
    """In mid-save: one file is new, one is gone."""
    scene = _begin(bench)
    scene.save(SET + b"/a", 500)
    bench.unlink(SET + b"/b")


def unit_killed(bench: Bench) -> None:
    scene = _begin(bench)
    endings = {"saver": Ending.ALIVE}
    scene.units.writer = lambda: "saver"
    scene.units.ending_of = lambda who: endings.get(str(who), Ending.ALIVE)
    scene.save(SET + b"/a", 600)
    endings["saver"] = Ending.KILLED
    scene.back(SET)
    scene.units.writer = lambda: None


def unit_left_removed(bench: Bench) -> None:
    """For good only when its remover ends well, which it has not yet."""
    if _exists(bench, SET):
        scene = _begin(bench)
        _remove_below(scene, SET)


def _remove_below(scene: Scene, path: bytes) -> None:
    directory = scene.bench.inode(path)
    for name, ino in list((directory.entries or {}).items()):
        if scene.bench.store.namespace.get(ino).entries is not None:
            _remove_below(scene, path + b"/" + name)
        else:
            scene.bench.unlink(path + b"/" + name)
    scene.remove(path)


def unit_left_keeping(bench: Bench) -> None:
    """Two steps towards a change were made."""
    if _exists(bench, SET + b"/a") and bench.inode(SET + b"/a").content.ref_count > 2:
        scene = _SCENES[bench]
        if not scene.is_open(SET):
            scene.begin(SET)
        with short_steps():
            scene.step(SET + b"/a")
            scene.step(SET + b"/a")


def unit_made(bench: Bench) -> None:
    scene = _SCENES[bench]
    if not _exists(bench, b"checkpoint-2"):
        scene.begin(b"checkpoint-2")
        scene.make(b"checkpoint-2")
        scene.save(b"checkpoint-2/a", 700)
        scene.finish(b"checkpoint-2/" + MARKER, 92, b"checkpoint-2")


def unit_left_half_made(bench: Bench) -> None:
    scene = _SCENES[bench]
    if not _exists(bench, b"checkpoint-3"):
        scene.begin(b"checkpoint-3")
        scene.make(b"checkpoint-3")
        scene.save(b"checkpoint-3/a", 700)


def unit_named(bench: Bench) -> None:
    """Written under a name for a while, then renamed."""
    scene = _SCENES[bench]
    temporary = b"7.orbax-checkpoint-tmp-1"
    if not _exists(bench, b"7"):
        scene.begin(temporary)
        scene.make(temporary)
        scene.save(temporary + b"/a", 800)
        scene.ending("rename", temporary, lambda: bench.store.rename(1, temporary, 1, b"7"))


UNIT_OPERATIONS = [
    unit_saved_over, unit_left_open, unit_killed, unit_left_removed, unit_left_keeping, unit_made,
    unit_left_half_made, unit_named,
]  # fmt: skip
