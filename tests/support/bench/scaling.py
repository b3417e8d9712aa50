"""Section ``scaling``: what each verb costs, and rollover, cleaning, opening and memory, for stores
with more and more files, references of one file, and journal records.

Every store lies in a file on tmpfs and is used without a mount, each in a process of its own, and
opened in others (``apart``). What an opening takes behind a full journal of each kind of change is
another section (``openings``).

Never here: a verdict. That no verb's work grows is tested by counting work, not by time.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator

from cxlfs.media import open_media
from cxlfs.store import Store
from cxlfs.units import KIB, MIB
from tests.support.bench.apart import apart, open_apart
from tests.support.bench.crowd import put_content, put_files
from tests.support.bench.measure import (
    Figures,
    MissingError,
    Progress,
    Settings,
    private_bytes,
    require_memory,
)
from tests.support.bench.workers import WorkError

COUNTS = (1000, 10_000, 100_000, 1_000_000)
QUICK_COUNTS = (300, 1000)
CLOSED_KINDS = ("files", "references")
"""Those that end cleanly when they were measured."""
KINDS = ("files", "saves", "references", "records")
BLOCK = random.Random(3).randbytes(4 * KIB)
SEGMENT_BYTES = 2 * MIB
"""A small journal is soon full, and the image that follows costs the same."""
FULL_SEGMENT_BYTES = 64 * MIB
"""The largest segment there is, and so the longest journal: 170 000 saves, 300 000 records."""
_SAVE_BYTES = 384
"""Of the record of a new file of 4 KiB with a short name."""
_DIRECTORY_FILES = 1000
_SAMPLES = 200
_STEPS_MAX = 1_000_000
_OVERWRITES_MIN = 50_000
_CLEANED = 20

Verb = Callable[[int], object]


def measure_scaling(settings: Settings, say: Progress) -> Figures:
    """By what there is many of, and how many; a store too large for this machine is left out, and
    ``left_out`` says so.
    """
    counts = QUICK_COUNTS if settings.quick else COUNTS
    result: Figures = {"left_out": {}}
    measures = {
        "files": _files,
        "saves": _saves,
        "references": _references,
        "records": _records,
    }
    for kind, measure in measures.items():
        result[kind] = {}
        for count in counts:
            size_bytes = _size_bytes(kind, count)
            try:
                require_memory(settings.memory, size_bytes)
            except MissingError as error:
                result["left_out"][f"{kind}.{count}"] = str(error)
                continue
            say(f"scaling: {count} {kind}")
            source = settings.memory / "scaling.img"
            found = apart(measure, str(source), size_bytes, count, quick=settings.quick)
            if found is not None:
                openings = _openings(str(source), kind, count, quick=settings.quick)
                result[kind][str(count)] = found | openings
            source.unlink()
    return result


def _size_bytes(kind: str, count: int) -> int:
    """What the data takes and half of that, and room for three images; for records 24 segments."""
    if kind == "records":
        return 24 * _record_segment_bytes(count)
    if kind == "saves":
        return 24 * FULL_SEGMENT_BYTES + count * 6 * KIB // MIB * MIB
    return 128 * MIB + count * {"files": 1 * KIB, "references": 6 * KIB}[kind] // MIB * MIB


def _record_segment_bytes(count: int) -> int:
    return FULL_SEGMENT_BYTES if count > 4000 else 2 * MIB


def _openings(source: str, kind: str, count: int, *, quick: bool) -> Figures:
    """Seconds of an opening after a clean end, where the store had one, and of one after an end
    without warning; how many records were read then.
    """
    figures: Figures = {}
    if kind in CLOSED_KINDS:
        figures["clean_open_s"] = open_apart(source, 0, quick=quick)["open_s"]
    least = {"records": count, "saves": min(count, 1000)}.get(kind, 0)
    found = open_apart(source, least, quick=quick)
    figures["crash_open_s"], figures["crash_records"] = found["open_s"], found["records"]
    return figures


def _end(store: Store) -> None:
    media = store.media
    store.close()
    media.close()


# --- files ----------------------------------------------------------------------------------------


def _files(source: str, size_bytes: int, count: int) -> Figures:
    """Empty files, all in one directory."""
    media = open_media(source, create_size_bytes=size_bytes)
    Store.format(media, segment_size_bytes=SEGMENT_BYTES)
    store = Store.open(media)
    before = private_bytes(os.getpid())
    parent = store.make_directory(1, b"names", 0o755, 0, 0).ino
    inos = put_files(store, parent, b"file-%07d", count)
    figures: Figures = {"memory_each_bytes": (private_bytes(os.getpid()) - before) / count}
    store.volume.rollover()
    rng = random.Random(count)
    picked = [rng.randrange(count) for _ in range(_SAMPLES)]
    figures["verbs_s"] = _timed(
        {
            "lookup": lambda i: store.lookup(parent, b"file-%07d" % picked[i]),
            "attributes": lambda i: store.get_attributes(inos[picked[i]]),
            "create, close": lambda i: _create(store, parent, b"new-%d" % i),
            "save of 4 KiB by rename": lambda i: _save_by_rename(store, parent, picked[i]),
            "set an extended attribute": lambda i: store.set_xattr(
                inos[picked[i]], b"user.x", b"%d" % i
            ),
            "link": lambda i: store.link(inos[picked[i]], parent, b"link-%d" % i),
            "rename": lambda i: store.rename(parent, b"link-%d" % i, parent, b"moved-%d" % i),
            "unlink": lambda i: store.unlink(parent, b"moved-%d" % i),
            "statfs": lambda _i: store.statfs(),
        }
    )
    figures["listing_s"] = _time_listing(store, parent)
    figures["rollover_wait_s"] = _wait_at_rollover(
        store, lambda i: store.set_xattr(inos[i % count], b"user.x", b"%d" % i)
    )
    _end(store)
    return figures


def _create(store: Store, parent: int, name: bytes, data: bytes = b"") -> int:
    attributes, handle = store.create(parent, name, 0o644, 0, 0, os.O_WRONLY)
    if data:
        store.write(handle, 0, data)
    store.flush(handle, writer_killed=False)
    store.release(handle)
    return attributes.ino


def _save_by_rename(store: Store, parent: int, index: int) -> None:
    _create(store, parent, b"save.new", BLOCK)
    store.rename(parent, b"save.new", parent, b"saved-%d" % (index % 50))


def _time_listing(store: Store, parent: int) -> Figures:
    """The first name, and all of them."""
    began = time.perf_counter()
    handle = store.open_directory(parent)
    entries = iter(store.read_directory(handle, 0))
    next(entries)
    first = time.perf_counter()
    count = 1 + sum(1 for _ in entries)
    ended = time.perf_counter()
    store.release_directory(handle)
    return {"first": first - began, "each": (ended - first) / count}


# --- saves ----------------------------------------------------------------------------------------


def _saves(source: str, size_bytes: int, count: int) -> Figures:
    """Files of 4 KiB, a thousand to a directory, the last of them made by creating, writing and
    closing them until the journal has no room for the next one.
    """
    media = open_media(source, create_size_bytes=size_bytes)
    Store.format(media, segment_size_bytes=FULL_SEGMENT_BYTES)
    store = Store.open(media)
    last = min(count, FULL_SEGMENT_BYTES // _SAVE_BYTES)
    inos: list[int] = []
    for first in range(0, count - last, _DIRECTORY_FILES):
        parent = store.make_directory(1, b"old-%d" % first, 0o755, 0, 0).ino
        inos += put_files(store, parent, b"file-%07d", min(_DIRECTORY_FILES, count - last - first))
    put_content(store, inos, len(BLOCK))
    store.volume.rollover()
    rollovers, parent = store.statistics().rollovers, 1
    for index in range(last):
        journal = store.volume.journal
        if journal is None or journal.free_bytes < 2 * KIB:
            break
        if index % _DIRECTORY_FILES == 0:
            parent = store.make_directory(1, b"new-%d" % index, 0o755, 0, 0).ino
        _create(store, parent, b"file-%07d" % index, BLOCK)
    if store.statistics().rollovers != rollovers:
        raise WorkError("the journal was begun anew")
    store.abandon()
    return {}


# --- references -----------------------------------------------------------------------------------


def _references(source: str, size_bytes: int, count: int) -> Figures:
    """Of one file: every second block of 4 KiB, written in an order of luck."""
    media = open_media(source, create_size_bytes=size_bytes)
    Store.format(media, segment_size_bytes=SEGMENT_BYTES)
    store = Store.open(media)
    rng = random.Random(count)
    places = list(range(count))
    rng.shuffle(places)
    attributes, handle = store.create(1, b"file", 0o644, 0, 0, os.O_RDWR)
    before = private_bytes(os.getpid())
    for number, place in enumerate(places):
        _write(store, handle, place * 8 * KIB)
        if number % 50_000 == 0:
            store.fsync(handle)
    store.fsync(handle)
    figures: Figures = {"memory_each_bytes": (private_bytes(os.getpid()) - before) / count}
    target, copy = store.create(1, b"copy", 0o644, 0, 0, os.O_RDWR)
    _write(store, copy, 0)

    def save(index: int) -> None:
        _write(store, handle, places[index] * 8 * KIB)
        store.flush(handle, writer_killed=False)

    def punch(index: int) -> None:
        store.allocate(handle, places[-1 - index] * 8 * KIB, 4 * KIB, keep_size=True, punch=True)

    figures["verbs_s"] = _timed(
        {
            "read 4 KiB": lambda i: store.read(handle, places[i] * 8 * KIB, 4 * KIB),
            "write 4 KiB": lambda i: _write(store, handle, places[i] * 8 * KIB),
            "write 4 KiB, close": save,
            "write 4 KiB, fsync": lambda i: (
                _write(store, handle, places[i] * 8 * KIB),
                store.fsync(handle),
            ),
            "copy 4 KiB by reference": lambda i: store.ranges.copy(
                handle, places[i] * 8 * KIB, copy, 0, 4 * KIB
            ),
            "punch 4 KiB": punch,
            "next data": lambda i: store.seek(handle, places[i] * 8 * KIB, os.SEEK_DATA),
            "attributes": lambda _i: store.get_attributes(attributes.ino),
            "statfs": lambda _i: store.statfs(),
        }
    )
    for opened in (handle, copy):
        store.flush(opened, writer_killed=False)
        store.release(opened)
    store.unlink(1, b"copy")
    del target
    figures["rollover_wait_s"] = _wait_at_rollover(
        store, lambda i: store.set_xattr(attributes.ino, b"user.x", b"%d" % i)
    )
    figures["cleaning_wait_s"] = _wait_at_cleaning(store, attributes.ino, places)
    _end(store)
    return figures


def _write(store: Store, handle: int, offset: int) -> None:
    """As a mount does it: one whose lease has ended gets another."""
    done = store.write(handle, offset, BLOCK)
    if done != len(BLOCK):
        raise WorkError(f"wrote {done} bytes of {len(BLOCK)}")


def _wait_at_cleaning(store: Store, ino: int, places: list[int]) -> float | None:
    """The longest of the short steps in which the cleaner works, while blocks are written over in
    an order of luck; None when there was nothing to clean.
    """
    handle = store.open_file(ino, os.O_WRONLY)
    rng = random.Random(1)
    before, longest = store.statistics().cleaned_segments, 0.0
    for number in range(_OVERWRITES_MIN + len(places)):
        try:
            _write(store, handle, places[rng.randrange(len(places))] * 8 * KIB)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        if number % 1000 == 0:
            store.flush(handle, writer_killed=False)
            for _ in range(_STEPS_MAX):
                began = time.perf_counter()
                more = store.maintain(time.monotonic())
                longest = max(longest, time.perf_counter() - began)
                if not more:
                    break
            if store.statistics().cleaned_segments >= before + _CLEANED:
                break
    store.flush(handle, writer_killed=False)
    store.release(handle)
    return longest if store.statistics().cleaned_segments > before else None


# --- records --------------------------------------------------------------------------------------


def _records(source: str, size_bytes: int, count: int) -> Figures | None:
    """Of one file's attributes; None where the journal does not hold so many."""
    media = open_media(source, create_size_bytes=size_bytes)
    Store.format(media, segment_size_bytes=_record_segment_bytes(count))
    store = Store.open(media)
    ino = _create(store, 1, b"file")
    rollovers = store.statistics().rollovers
    for index in range(count):
        store.set_xattr(ino, b"user.x", b"%d" % index)
    held = store.statistics().rollovers == rollovers
    store.abandon()
    return {} if held else None


# --- what all have --------------------------------------------------------------------------------


def _timed(verbs: dict[str, Verb]) -> Figures:
    """The median of each, in seconds; each as often as the next, in turns."""
    samples: dict[str, list[float]] = {name: [] for name in verbs}
    for index in range(_SAMPLES):
        for name, verb in verbs.items():
            began = time.perf_counter()
            verb(index)
            samples[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in samples.items()}


def _wait_at_rollover(store: Store, verb: Verb) -> float:
    """The longest time a verb took until the journal had been begun anew twice."""
    wanted, longest = store.statistics().rollovers + 2, 0.0
    for index in itertools.count():
        began = time.perf_counter()
        verb(index)
        longest = max(longest, time.perf_counter() - began)
        if index % 64 == 0:
            store.maintain(time.monotonic())
            if store.statistics().rollovers >= wanted:
                return longest
            if index > _STEPS_MAX:
                raise WorkError("the journal is never begun anew")
    raise AssertionError


# --- the table ------------------------------------------------------------------------------------


def rows(figures: Figures) -> Iterator[tuple[str, list[str]]]:
    """What a line is about, and its cells, one for each of ``counts_of``."""
    for kind in KINDS:
        found = figures.get(kind, {})
        for text, value in _lines(kind, found):
            yield (
                f"{kind}: {text}",
                [_cell(value, found.get(count)) for count in counts_of(figures)],
            )


def counts_of(figures: Figures) -> list[str]:
    """How many there were, of whatever."""
    return sorted({count for kind in KINDS for count in figures.get(kind, {})}, key=int)


def _lines(kind: str, found: Figures) -> Iterator[tuple[str, Callable[[Figures], str | None]]]:
    first: Figures = next(iter(found.values()), {})
    for name in first.get("verbs_s", {}):
        yield name, lambda of, name=name: _us(of["verbs_s"].get(name))
    if kind == "files":
        yield "first name of a listing", lambda of: _us(of["listing_s"]["first"])
        yield "each name of a listing", lambda of: _us(of["listing_s"]["each"])
    if kind in CLOSED_KINDS:
        yield "longest verb through a rollover", lambda of: _ms(of["rollover_wait_s"])
    if kind == "references":
        yield "longest step of cleaning", lambda of: _ms(of["cleaning_wait_s"])
    yield "opening after a crash", lambda of: _ms(of["crash_open_s"])
    if kind not in CLOSED_KINDS:
        yield "records that it reads", lambda of: str(of["crash_records"])
        return
    yield "opening after a clean end", lambda of: _ms(of["clean_open_s"])
    yield "memory for each", lambda of: f"{of['memory_each_bytes']:.0f} B"


def _cell(value: Callable[[Figures], str | None], found: Figures | None) -> str:
    return "" if found is None else value(found) or ""


def _us(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1e6:.1f} µs"


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1e3:.1f} ms"


def table(figures: Figures) -> list[str]:
    """Markdown: a line for each thing that is measured, a column for each count."""
    counts = counts_of(figures)
    heads = [f"{int(count):,}".replace(",", " ") for count in counts]
    lines = [f"| {' | '.join(['what', *heads])} |", f"|---|{'---:|' * len(counts)}"]
    lines += [f"| {text} | {' | '.join(cells)} |" for text, cells in rows(figures)]
    lines += [f"- {name}: {text}" for name, text in figures.get("left_out", {}).items()]
    return lines
