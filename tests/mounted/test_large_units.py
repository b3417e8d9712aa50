"""Checkpoint units of many files through a mount: their beginning takes many steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mount import Workplace, kill, tell, wait_for_line, wait_until

pytestmark = pytest.mark.slow

MARKER = "trainer_state.json"


@pytest.fixture
def place(unmounted: Workplace) -> Workplace:
    unmounted.announced.append(r"unit-back: what was there before is back")
    return unmounted


@pytest.fixture(params=["native", "pyfuse3"])
def mounted(place: Workplace, request: pytest.FixtureRequest) -> Path:
    """With well-known names."""
    return place.mount(f"units=auto,transport={request.param}")


def _look(directory: Path) -> None:
    """Whoever lists waits until it is decided what becomes of a unit whose writers are gone."""
    list(directory.iterdir())


CHANGES = {
    "overwrite": "open(d + '/7', 'wb').write(b'new')",
    "in place": "f = os.open(d + '/7', os.O_RDWR); os.pwrite(f, b'new', 0); os.fsync(f)",
    "mapping": """
f = open(d + '/7', 'r+b')
with mmap.mmap(f.fileno(), 0) as view:
    view[:3] = b'new'
    view.flush()
""",
    "ftruncate": "f = os.open(d + '/7', os.O_RDWR); os.ftruncate(f, 2); os.fsync(f)",
    "truncate": "os.truncate(d + '/7', 2)",
    "truncate to nothing": "os.truncate(d + '/7', 0)",
    "fallocate": "f = os.open(d + '/7', os.O_RDWR); os.posix_fallocate(f, 0, 99); os.fsync(f)",
    "copy_file_range": """
f, g = os.open(d + '/8', os.O_RDONLY), os.open(d + '/7', os.O_RDWR)
assert os.copy_file_range(f, g, 5, 0, 2) == 5
os.fsync(g)
""",
    "unlink": "os.unlink(d + '/7')",
    "rename": "os.rename(d + '/7', d + '/new')",
    "rename over": "os.rename(d + '/7', d + '/8')",
    "rmdir": "os.rmdir(d + '/empty')",
}


def test_every_change_that_begins_a_unit_of_many_files(place: Workplace, mounted: Path) -> None:
    """Its copy takes several steps; a kill right behind the change brings all of it back."""
    directory = mounted / "checkpoint-1"
    directory.mkdir()
    (directory / "empty").mkdir()
    for number in range(700):
        (directory / str(number)).write_bytes(b"old %03d" % number)
    (directory / MARKER).write_text("{}")
    old, old_glance = _contents(directory), _glance(directory)
    for change in CHANGES.values():
        process = place.python(
            f"import mmap, os, sys\nd = sys.argv[1]\n{change}\n"
            "print('ready', flush=True)\nsys.stdin.readline()",
            directory,
        )
        wait_for_line(process)
        assert _glance(directory) != old_glance, change
        kill(process)
        _look(mounted)
        wait_until(lambda: _contents(directory) == old, "what was there is back")


def _glance(directory: Path) -> dict[str, bytes]:
    """All names, and what CHANGES change besides: reading hundreds of files takes a second."""
    names = {path.name: b"" for path in directory.iterdir()}
    return names | {name: (directory / name).read_bytes() for name in {"7", "8"} & names.keys()}


def _contents(directory: Path) -> dict[str, bytes]:
    """Of its files; an empty one for anything else."""
    try:
        found = list(directory.iterdir())
        return {p.name: p.read_bytes() if p.is_file() else b"" for p in found}
    except FileNotFoundError:
        return {}


READ = """
import os, sys
directory = sys.argv[1]
print("ready", flush=True)
while True:
    for name in sorted(os.listdir(directory)):
        with open(f"{directory}/{name}", "rb") as file:
            assert file.read()[:3] in (b"", b"old", b"new"), name
"""


def test_several_savers_begin_a_unit_of_many_files_together(
    place: Workplace, mounted: Path
) -> None:
    """And others read all the time: nobody waits for ever, and all of it goes back together."""
    directory = mounted / "checkpoint-1"
    directory.mkdir()
    for number in range(1500):
        (directory / str(number)).write_bytes(b"old %04d" % number)
    (directory / MARKER).write_text("old")
    old = _contents(directory)
    reader = place.python(READ, directory)
    wait_for_line(reader)
    change = """
import sys
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[2]), 1500, 250):
    with open(f"{sys.argv[1]}/{number}", "wb") as file:
        file.write(b"new")
print("ready", flush=True)
sys.stdin.readline()
"""
    savers = [place.python(change, directory, number) for number in range(4)]
    for each in savers:
        wait_for_line(each)
    for each in savers:
        tell(each)
    for each in savers:
        wait_for_line(each)
    assert sum(data == b"new" for data in _contents(directory).values()) == 4 * 6
    assert reader.poll() is None, "the reader found something else"
    kill(reader)
    for each in savers:
        kill(each)
    _look(mounted)
    wait_until(lambda: _contents(directory) == old, "what was there is back")
