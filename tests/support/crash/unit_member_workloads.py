"""Workloads over checkpoint units in which something does not belong to them (``unit_scene``)."""

from __future__ import annotations

import os

from cxlfs.store.unit_rules import Ending
from tests.support.crash.bench import Bench
from tests.support.crash.unit_scene import MARKER, SET, Scene

_TOP = b"/" + SET


def _set_with_logs(bench: Bench) -> Scene:
    """A finished one, with logs in it and below."""
    scene = Scene(bench)
    scene.make(b"work")
    scene.make(b"work/below")
    for name, length in (
        *((b"/a", 3000), (b"/below/c", 500), (b"/train.log", 400), (b"/below/d.csv", 300)),
        *((b"/progress", 200), (b"/" + MARKER, 90)),
    ):
        scene.save(b"work" + name, length)
    bench.rename(b"work", SET)
    scene.units.writer = lambda: "saver"
    scene.start()
    return scene


def unit_with_logs(bench: Bench) -> None:
    """They grow, are made, renamed and removed while a unit is open that goes back: by a crash
    at any instant, then because its writer is gone.
    """
    scene = _set_with_logs(bench)
    for name in (b"/train.log", b"/below/d.csv", b"/progress", b"/new.log", b"/more/e.log"):
        scene.stays[_TOP + name] = _TOP + name
    scene.begin(SET)
    scene.save(SET + b"/a", 3100)
    for name, flags in (
        (b"/train.log", os.O_RDWR),
        (b"/below/d.csv", os.O_RDWR),
        (b"/progress", os.O_RDWR | os.O_APPEND),
    ):
        handle = scene.open(SET + name, flags)
        bench.write(handle, 150, 700)
        scene.close(handle)
    scene.save(SET + b"/new.log", 300)
    scene.gone.add(_TOP + b"/below/d.csv")
    bench.unlink(SET + b"/below/d.csv")
    scene.units.ending_of = lambda _writer: Ending.KILLED
    scene.back(SET)


def unit_with_something_moved_in(bench: Bench) -> None:
    """From elsewhere to a new name and over an old one, and linked; a crash or its writer's end
    brings each back to where it was.
    """
    scene = _set_with_logs(bench)
    for name in (b"best", b"second"):
        scene.save(name, 2500)
    scene.begin(SET)
    scene.save(SET + b"/a", 3100)
    scene.move_in(b"best", SET + b"/best")
    scene.move_in(b"second", SET + b"/a")
    scene.units.ending_of = lambda _writer: Ending.KILLED
    scene.back(SET)


MEMBER_WORKLOADS = [unit_with_logs, unit_with_something_moved_in]
