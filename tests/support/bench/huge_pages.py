"""Section ``huge_pages``: a store on tmpfs in pages of 4 KiB beside one in huge pages.

Both are measured one after the other in each run, in turns which is first, on two tmpfs that are
mounted for this section alone (huge=never, huge=always): it is a program of its own, in a mount
namespace of its own, which needs root.

What is measured in each: making the store; a pass of writes over the new store, a later one, and
one of two writers; passes of reads after it was mounted again, likewise; opening a store with many
files; and the page faults of the daemon in the first pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cxlfs.media import open_media
from cxlfs.store import Store
from cxlfs.units import GIB, MIB
from tests.support.bench.apart import open_apart
from tests.support.bench.first_pass import remove_file
from tests.support.bench.measure import (
    Figures,
    MissingError,
    Progress,
    Settings,
    median_ratio,
    rate_figures,
    require_memory,
)
from tests.support.bench.opening import FILES, fill
from tests.support.bench.targets import make_store, served_once, statistics_of
from tests.support.bench.workers import Job, WorkError, Workers, bytes_per_second
from tests.support.memory_mounts import NotHereError, enter
from tests.support.repository import ROOT

KINDS = {"small": "never", "huge": "always"}
"""And how tmpfs is mounted for them."""
RATES = {
    "write_first": "1 writer, new store, first pass",
    "write_later": "1 writer, later pass",
    "write_two": "2 writers, later pass",
    "read_first": "1 reader, mounted again, first pass",
    "read_later": "1 reader, later pass",
    "read_two": "2 readers, later pass",
}
TIMES = {"make_s": "cxlfs mkfs", "open_s": "opening a store with files"}
STORE_BYTES_MAX = GIB
FILES_STORE_BYTES = 128 * MIB
PASS_SHARE = 0.75
SHARE_MIN = 0.9
"""Of a store in huge pages: with less the comparison is of something else."""
_FAULTS_FIELD = 7
"""Of /proc/PID/stat behind the name: minor faults."""
_CODE_MISSING = 69


def measure_huge_pages(settings: Settings, _say: Progress) -> Figures:
    """Raises MissingError, WorkError."""
    size_bytes = min(settings.size_bytes, STORE_BYTES_MAX)
    require_memory(settings.memory, size_bytes + len(KINDS) * FILES_STORE_BYTES)
    given = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in dataclasses.asdict(settings).items()
    }
    command = [sys.executable, "-m", __name__, json.dumps(given)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == _CODE_MISSING:
        raise MissingError(done.stdout.strip())
    if done.returncode != 0:
        raise WorkError(f"the program of this section ended with {done.returncode}")
    figures: Figures = json.loads(done.stdout)
    return figures


def _measure(settings: Settings, places: dict[str, Path], say: Progress) -> Figures:
    size_bytes = min(settings.size_bytes, STORE_BYTES_MAX)
    pass_bytes = int(size_bytes * PASS_SHARE) // (2 * MIB) * 2 * MIB
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for kind, place in places.items():
        say(f"huge_pages: {kind}: a store with files")
        _make_files(place / "files.img", settings.scaled(FILES, 1000))
    with Workers() as workers:
        for run in settings.rounds():
            for kind in KINDS if run % 2 else reversed(KINDS):
                say(f"huge_pages: run {run}/{settings.runs}: {kind} pages")
                one = _of_store(places[kind] / "store.img", size_bytes, pass_bytes, workers)
                files = str(places[kind] / "files.img")
                one["open_s"] = open_apart(files, 0, quick=settings.quick)["open_s"]
                if run:
                    found[kind].append(one)
    return {"size_bytes": size_bytes, "pass_bytes": pass_bytes, **_figures(found)}


def _figures(found: dict[str, list[dict[str, Any]]]) -> Figures:
    """Each to the store in small pages of the same run."""
    result: Figures = {}
    for kind, runs in found.items():
        part: Figures = {}
        for name in RATES:
            small = [run[name] for run in found["small"]]
            part[name] = rate_figures([run[name] for run in runs], small)
        for name in TIMES:
            taken, small = [run[name] for run in runs], [run[name] for run in found["small"]]
            part[name] = {"median_s": statistics.median(taken), "ratio": median_ratio(taken, small)}
        for name in ("faults", "page_size_bytes", "huge_page_share"):
            values = [run[name] for run in runs if run[name] is not None]
            part[name] = statistics.median(values) if values else None
        result[kind] = part
    share = result["huge"]["huge_page_share"]
    if share is not None and share < SHARE_MIN:
        raise MissingError(f"only {100 * share:.0f}% of the store came in huge pages")
    return result


def _of_store(source: Path, size_bytes: int, pass_bytes: int, workers: Workers) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def timed(name: str, kind: str, names: str, each_bytes: int) -> None:
        if kind == "write":
            for path in directory.iterdir():
                remove_file(directory, path, pass_bytes)
        jobs = [Job(kind, str(directory / one), MIB, each_bytes, sync=False) for one in names]
        found[name] = bytes_per_second(jobs, workers.run(jobs))

    began = time.perf_counter()
    make_store(source, size_bytes)
    found["make_s"] = time.perf_counter() - began
    try:
        with served_once(source) as (directory, pid):
            before = _faults(pid)
            timed("write_first", "write", "a", pass_bytes)
            found["faults"] = _faults(pid) - before
            timed("write_later", "write", "a", pass_bytes)
            timed("write_two", "write", "ab", pass_bytes // 2)
            media = statistics_of(directory)["media"]
            found |= {name: media[name] for name in ("page_size_bytes", "huge_page_share")}
        with served_once(source) as (directory, pid):
            timed("read_first", "read", "a", pass_bytes // 2)
            timed("read_later", "read", "a", pass_bytes // 2)
            timed("read_two", "read", "ab", pass_bytes // 2)
    finally:
        source.unlink()
    return found


def _faults(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return int(text.rpartition(")")[2].split()[_FAULTS_FIELD])


def _make_files(source: Path, files: int) -> None:
    make_store(source, FILES_STORE_BYTES)
    media = open_media(str(source))
    store = Store.open(media)
    fill(store, files)
    store.close()
    media.close()


def main() -> int:
    """In a process of its own: settings in, figures out, each as JSON."""
    given = json.loads(sys.argv[1])
    for name in ("memory", "disk"):
        given[name] = Path(given[name])
    settings = Settings(**given)
    with contextlib.ExitStack() as until, contextlib.redirect_stdout(sys.stderr):
        places = {}
        for kind in KINDS:
            folder = until.enter_context(tempfile.TemporaryDirectory(dir=settings.memory))
            places[kind] = Path(folder)
        try:
            for kind, place in places.items():
                # Before a worker is begun: it and the daemons are to see the mount.
                enter("tmpfs", f"huge={KINDS[kind]},size=90%", place)
            figures: Figures | str = _measure(settings, places, Progress())
        except (NotHereError, MissingError, WorkError) as error:
            figures = str(error)
        finally:
            for place in places.values():
                subprocess.run(["umount", "-l", str(place)], stderr=subprocess.DEVNULL, check=False)
    if isinstance(figures, str):
        print(figures)
        return _CODE_MISSING
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
