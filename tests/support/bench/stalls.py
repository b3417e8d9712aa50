"""The scenarios of ``scripts/stalls``: a store, a program that asks much of it, and what two small
ones wait for meanwhile (``victims``).

Invariants
- Every scenario has a store of its own, in memory; what it takes to prepare it is not measured.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from cxlfs.media import open_media
from cxlfs.store import Store
from cxlfs.units import GIB, MIB
from tests.support.bench import offenders
from tests.support.bench.crowd import put_files, put_pieces
from tests.support.bench.measure import Figures, Progress, private_bytes, require_memory
from tests.support.bench.offenders import together
from tests.support.bench.targets import make_store, run_cxlfs, served, warm
from tests.support.bench.victims import Victims

FULL_SHARE = 0.95
STEADY_SHARE = 0.876
"""So much of an empty store, as a file of which every block lies by itself, is 95 % by ``df``: its
metadata takes the rest."""
LONGEST_SECONDS = 120.0
"""A scenario that waits for something to happen gives up after this."""
_CHUNK_COUNT = 16
_BYTES_FOR_EACH = 2048
"""So much room an empty file has in two images and a journal."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a scenario happens. ``directory`` is the mount point, ``pid`` the daemon."""

    directory: Path
    pid: int
    short: bool

    def path(self, name: str) -> str:
        return str(self.directory / name)

    def scaled(self, count: int, short_count: int) -> int:
        return short_count if self.short else count

    @property
    def seconds(self) -> float:
        """So long programs run that have no count."""
        return 0.5 if self.short else 10.0

    def status(self) -> Figures:
        found: Figures = json.loads(run_cxlfs("status", str(self.directory), "--json"))
        return found

    def activity(self, name: str) -> int:
        return int(self.status()["activity"][name])


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """``offend`` is what others wait for; what it returns stands beside their waits. ``prepare`` is
    done before, on the mount; ``files`` lie in the store already, each with one block.
    """

    text: str
    offend: Callable[[Place], Figures]
    prepare: Callable[[Place], None] = lambda _place: None
    files: tuple[int, int] = (0, 0)
    """In full, and short."""
    size_bytes: tuple[int, int] = (GIB, 256 * MIB)
    pieces: tuple[int, int] = (0, 0)
    """Of a file that lies in the store as well, each 4 KiB."""


# --- what they do ---------------------------------------------------------------------------------


def _roll_over(place: Place) -> Figures:
    """Saves of another program, until the journal was begun anew some times."""
    before = place.activity("rollovers")
    wanted, saves = before + place.scaled(3, 1), 0
    until = time.monotonic() + LONGEST_SECONDS
    while place.activity("rollovers") < wanted and time.monotonic() < until:
        saves += sum(together(offenders.save_by_rename, [(place.path(""), 2000)]))
    return {"saves": saves, "rollovers": place.activity("rollovers") - before}


def _one_large_file(place: Place) -> None:
    """A half of the store."""
    size = os.statvfs(place.directory)
    with (place.directory / "large").open("wb", buffering=0) as file:
        for _ in range(size.f_blocks * size.f_frsize // 2 // MIB):
            file.write(offenders.BLOCK)


def _scatter_until_cleaned(place: Place) -> Figures:
    before = place.activity("cleaned_segments")
    wanted, writes = before + place.scaled(100, 3), 0
    until = time.monotonic() + LONGEST_SECONDS
    while place.activity("cleaned_segments") < wanted and time.monotonic() < until:
        together(offenders.scatter, [(place.path("large"), writes, 20_000, 1000)])
        writes += 20_000
    return {"writes": writes, "cleaned_segments": place.activity("cleaned_segments") - before}


def _allocate(place: Place) -> Figures:
    paths = [(place.path(f"room-{number}"), 32 * MIB, place.seconds) for number in range(3)]
    return {"rounds": sum(together(offenders.allocate, paths))}


def _open_and_unlink(place: Place) -> Figures:
    left, each, given = place.scaled(50_000, 2000), offenders.descriptors_each(), []
    while left > 0:
        given.append((place.path(""), len(given), min(left, each)))
        left -= each
    return {"files": sum(together(offenders.open_and_unlink, given)), "programs": len(given)}


def _allocate_bytes(place: Place) -> Figures:
    count = place.scaled(4000, 500)
    return {"ranges": sum(together(offenders.allocate_bytes, [(place.path("ranges"), count)]))}


def _list_at_once(place: Place) -> Figures:
    before = private_bytes(place.pid)
    count = place.scaled(200, 20)
    (during,) = together(offenders.open_directories, [(place.path("names"), count, place.pid)])
    return {"handles": count, "daemon_before_bytes": before, "daemon_bytes": during}


def _ask_for_room(place: Place) -> Figures:
    return {"rounds": sum(together(offenders.ask_for_room, [(place.path("a"), place.seconds)]))}


def _scattered(place: Place) -> None:
    """A quarter of the store, in one file of which most blocks were overwritten one by one."""
    size = os.statvfs(place.directory)
    with (place.directory / "pieces").open("wb", buffering=0) as file:
        for _ in range(size.f_blocks * size.f_frsize // 4 // MIB):
            file.write(offenders.BLOCK)
    count = place.scaled(100_000, 2000)
    together(offenders.scatter, [(place.path("pieces"), 5, count, count)])


def _write_and_close(place: Place) -> Figures:
    given = [(place.path("pieces"), place.seconds)]
    return {"rounds": sum(together(offenders.write_and_close, given))}


def _change_and_remove(place: Place) -> Figures:
    count = place.scaled(1_000_000, 100_000)
    given = [(place.path("names/pieces"), count, place.seconds / 5)]
    return {"changes": sum(together(offenders.change_and_remove, given))}


def _write_in_turn(place: Place) -> Figures:
    before = private_bytes(place.pid)
    given = [(place.path("log"), place.scaled(1000, 20))]
    return {
        "writers": sum(together(offenders.write_in_turn, given)),
        "daemon_before_bytes": before,
        "daemon_bytes": private_bytes(place.pid),
    }


def _set_attributes(place: Place) -> Figures:
    given = [(place.path(f"attributes-{number}"), place.seconds) for number in range(8)]
    return {"rounds": sum(together(offenders.set_attributes, given)), "programs": 8}


def _room(place: Place) -> tuple[int, int]:
    size = os.statvfs(place.directory)
    return size.f_blocks * size.f_frsize, size.f_bavail * size.f_frsize


def _fill(place: Place) -> None:
    """To 95 %, with files of a hundredth of the store."""
    size_bytes, free_bytes = _room(place)
    each, number = max(MIB, size_bytes // 100 // MIB * MIB), 0
    while free_bytes > (1 - FULL_SHARE) * size_bytes:
        with (place.directory / f"full-{number}").open("wb", buffering=0) as file:
            room = min(each, free_bytes - int((1 - FULL_SHARE) * size_bytes) + MIB)
            for _ in range(room // MIB):
                file.write(offenders.BLOCK)
        number += 1
        _, free_bytes = _room(place)


def _save_when_nearly_full(place: Place) -> Figures:
    size_bytes = max(MIB, _room(place)[0] // 200 // MIB * MIB)
    given = [(place.path(f"full-{number}"), size_bytes, place.seconds) for number in range(4)]
    return {"no_space": sum(together(offenders.save_over, given)), "programs": 4}


def _amplification(place: Place, act: Callable[[], int]) -> Figures:
    """What was moved beside what was written, from the daemon's own counters."""
    before = place.status()["activity"]
    full = act()
    after = place.status()["activity"]
    written = after["bytes_written"] - before["bytes_written"]
    moved = after["moved_bytes"] - before["moved_bytes"]
    images = after["image_bytes_written"] - before["image_bytes_written"]
    return {
        "written_bytes": written,
        "moved_bytes": moved,
        "image_bytes": images,
        "amplification": (written + moved + images) / max(1, written),
        "no_space": full,
    }


def _amplify_checkpoints(place: Place) -> Figures:
    def act() -> int:
        size_bytes = max(MIB, _room(place)[0] // 100 // MIB * MIB)
        given = [(place.path("full-0"), size_bytes, place.seconds)]
        return sum(together(offenders.save_over, given))

    return _amplification(place, act)


def _fill_with_one(place: Place, share: float = FULL_SHARE) -> None:
    """With one file, to 95 % if nothing else is said."""
    size_bytes, free_bytes = _room(place)
    most = int((1 - share) * size_bytes) + MIB
    with (place.directory / "large").open("wb", buffering=0) as file:
        while free_bytes > most:
            for _ in range(_CHUNK_COUNT if free_bytes > most + 2 * _CHUNK_COUNT * MIB else 1):
                file.write(offenders.BLOCK)
            _, free_bytes = _room(place)


def _amplify_scattered(place: Place) -> Figures:
    count = place.scaled(100_000, 5000)
    given = [(place.path("large"), 1, count, 256)]
    return _amplification(place, lambda: sum(together(offenders.scatter, given)))


def _fill_with_scattered(place: Place) -> None:
    """One file, and twice as many writes as it has blocks: nearly each lies by itself."""
    _fill_with_one(place, STEADY_SHARE)
    blocks = (place.directory / "large").stat().st_size // len(offenders.PAGE)
    together(offenders.scatter, [(place.path("large"), 2, 2 * blocks, 256)])


def _amplify_steadily(place: Place) -> Figures:
    found = _amplify_scattered(place)
    size = os.statvfs(place.directory)
    used = size.f_blocks - size.f_bfree
    return {**found, "df_percent": 100 * used / (used + size.f_bavail)}


SCENARIOS: dict[str, Scenario] = {
    "rollovers_60k": Scenario(
        "saves of another program through rollovers, 60 000 files", _roll_over, files=(60_000, 500)
    ),
    "rollovers_100k": Scenario(
        "saves of another program through rollovers, 100 000 files",
        _roll_over,
        files=(100_000, 1000),
    ),
    "cleaning": Scenario(
        "cleaning after scattered 4 KiB writes to one file of a 2 GiB store",
        _scatter_until_cleaned,
        _one_large_file,
        size_bytes=(2 * GIB, 128 * MIB),
    ),
    "fallocate": Scenario("three programs in fallocate", _allocate),
    "fallocate_100k": Scenario(
        "three programs in fallocate, 100 000 files", _allocate, files=(100_000, 1000)
    ),
    "socket": Scenario("eight programs that set extended attributes of 60 KiB", _set_attributes),
    "unlinked": Scenario("50 000 unlinked files, all open, then closed at once", _open_and_unlink),
    "ranges": Scenario("4000 ranges of one byte by fallocate, in one file", _allocate_bytes),
    "handles": Scenario(
        "200 listings at once of a directory with 50 000 names", _list_at_once, files=(50_000, 2000)
    ),
    "reopening": Scenario(
        "a file of 100 000 pieces, opened, written to and closed again and again",
        _write_and_close,
        _scattered,
        size_bytes=(2 * GIB, 128 * MIB),
    ),
    "pieces": Scenario(
        "a file of 1 000 000 pieces, written to, cut and removed",
        _change_and_remove,
        size_bytes=(2 * GIB, 512 * MIB),
        pieces=(1_000_000, 100_000),
    ),
    "writers": Scenario("1000 processes that write to one open file, in turn", _write_in_turn),
    "statfs": Scenario(
        "statfs after each write, 100 000 files", _ask_for_room, files=(100_000, 1000)
    ),
    "full": Scenario("four programs that save, store 95 % full", _save_when_nearly_full, _fill),
    "amplification_checkpoint": Scenario(
        "one program that saves over one name, store 95 % full", _amplify_checkpoints, _fill
    ),
    "amplification_scattered": Scenario(
        "scattered 4 KiB writes to one file, store 95 % full", _amplify_scattered, _fill_with_one
    ),
    "amplification_steady": Scenario(
        "scattered 4 KiB writes to one file of which each block lies by itself, `df` 95 %",
        _amplify_steadily,
        _fill_with_scattered,
        size_bytes=(512 * MIB, 128 * MIB),
    ),
}


# --- measuring ------------------------------------------------------------------------------------


def measure(
    name: str, memory: Path, say: Progress, *, short: bool, files: int | None = None
) -> Figures:
    """The waits of both victims, what the scenario says, and how long it took; with ``files`` of
    them in a store that has some. Raises MissingError, WorkError.
    """
    scenario = SCENARIOS[name]
    count, size_bytes = scenario.files[short], scenario.size_bytes[short]
    told: Figures = {}
    if count and files is not None:
        count, size_bytes = files, max(size_bytes, files * _BYTES_FOR_EACH // MIB * MIB)
        told = {"files": files}
    require_memory(memory, size_bytes)
    source = memory / "stalls.img"
    say(f"{name}: preparing")
    make_store(source, size_bytes)
    _put_files(source, count, scenario.pieces[short])
    with served(source) as (directory, pid):
        place = Place(directory, pid, short)
        if not count:
            warm(directory, size_bytes // 2)
        scenario.prepare(place)
        with Victims(directory) as victims:
            say(f"{name}: {scenario.text}")
            began = time.monotonic()
            found = scenario.offend(place)
            elapsed = time.monotonic() - began
            return {**victims.waits(), **found, **told, "seconds": elapsed}


def _put_files(source: Path, count: int, pieces: int) -> None:
    """In one directory, without a mount: it takes a tenth of the time."""
    if not count and not pieces:
        return
    media = open_media(str(source))
    store = Store.open(media)
    parent = store.make_directory(1, b"names", 0o755, os.geteuid(), os.getegid()).ino
    if count:
        put_files(store, parent, b"file-%07d", count)
    if pieces:
        put_pieces(store, parent, b"pieces", pieces)
    store.close()
    media.close()


def table(figures: Figures) -> str:
    """Markdown; times in milliseconds."""
    lines = [
        "| meanwhile | read, p99 | read, worst | save, p99 | save, worst | and |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for name, found in figures["waits"].items():
        times = [
            f"{found[kind][level] * 1e3:.1f} ms"
            for kind in ("read", "save")
            for level in ("p99_s", "worst_s")
        ]
        others = ", ".join(
            _shown(key, value) for key, value in found.items() if key not in ("read", "save")
        )
        lines.append(f"| {SCENARIOS[name].text} | {' | '.join(times)} | {others} |")
    notes = [f"- {name}: {text}" for name, text in figures["missing"].items()]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _shown(key: str, value: float) -> str:
    if key.endswith("_bytes"):
        return f"{key.removesuffix('_bytes').replace('_', ' ')} {value / MIB:.0f} MiB"
    if key == "seconds":
        return f"{value:.1f} s"
    words = key.replace("_", " ")
    return f"{words} {value:.2f}" if isinstance(value, float) else f"{value} {words}"
