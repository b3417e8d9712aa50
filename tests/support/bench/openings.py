"""Section ``openings``: how long a store with many files takes to open behind a full journal of
changes to them, for each kind of change.

The image is made once, past the verbs (``crowd``); each kind changes a copy of the media in a
process of its own, until the journal has no room for more, and ends without warning. Another one
opens it.

Never here: a verdict. That a record's cost does not grow is tested by counting work
(``tests/store/test_replay_scaling.py``).
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable
from pathlib import Path

from cxlfs.media import open_media
from cxlfs.store import Store
from cxlfs.units import KIB, MIB
from tests.support.bench.apart import apart, open_apart
from tests.support.bench.crowd import put_content, put_files
from tests.support.bench.measure import Figures, Progress, Settings, require_memory
from tests.support.bench.workers import WorkError

FILES = (100_000, 1_000_000)
QUICK_FILES = (1000, 4000)
SEGMENT_BYTES = 64 * MIB
"""The largest there is, and so the longest journal."""
QUICK_SEGMENT_BYTES = 2 * MIB
_DIRECTORY_FILES = 1000
_RECORD_BYTES_MAX = 2 * KIB
"""Where a journal has less room than that it is full."""
_RENAME_BYTES = 320
"""Of the record of a renamed directory."""
_BLOCK = random.Random(5).randbytes(4 * KIB)


@dataclasses.dataclass(frozen=True, slots=True)
class Crowd:
    """An open store, and its directories of a thousand files each, whose numbers follow theirs."""

    store: Store
    directories: list[int]

    def ino(self, number: int) -> int:
        return self.parent(number) + 1 + number % _DIRECTORY_FILES

    def parent(self, number: int) -> int:
        return self.directories[number // _DIRECTORY_FILES]


Change = Callable[[Crowd, int], object]


def _name(number: int) -> bytes:
    return b"file-%07d" % (number % _DIRECTORY_FILES)


# --- kinds of changes -----------------------------------------------------------------------------


def _unlink(crowd: Crowd, number: int) -> None:
    crowd.store.unlink(crowd.parent(number), _name(number))


def _chmod(crowd: Crowd, number: int) -> None:
    crowd.store.set_attributes(crowd.ino(number), mode=0o600)


def _set_xattr(crowd: Crowd, number: int) -> None:
    crowd.store.set_xattr(crowd.ino(number), b"user.x", b"%07d" % number)


def _truncate(crowd: Crowd, number: int) -> None:
    crowd.store.set_attributes(crowd.ino(number), size=100)


def _rename(crowd: Crowd, number: int) -> None:
    parent = crowd.parent(number)
    crowd.store.rename(parent, _name(number), parent, b"name-%07d" % number)


def _overwrite(crowd: Crowd, number: int) -> None:
    _put(crowd.store, crowd.store.open_file(crowd.ino(number), os.O_WRONLY))


def _save(crowd: Crowd, number: int) -> None:
    store, parent = crowd.store, crowd.parent(number)
    _put(store, store.create(parent, b"save.new", 0o644, 0, 0, os.O_WRONLY)[1])
    store.rename(parent, b"save.new", parent, _name(number))


def _put(store: Store, handle: int) -> None:
    store.write(handle, 0, _BLOCK)
    store.flush(handle, writer_killed=False)
    store.release(handle)


def _make_directory(crowd: Crowd, number: int) -> None:
    crowd.store.make_directory(crowd.parent(number), b"new-%07d" % number, 0o755, 0, 0)


def _rename_directory(crowd: Crowd, number: int) -> None:
    parent = crowd.parent(number)
    crowd.store.rename(parent, b"new-%07d" % number, parent, b"old-%07d" % number)


KINDS: dict[str, Change | None] = {
    "nothing: the image alone": None,
    "unlinks": _unlink,
    "chmod": _chmod,
    "extended attributes": _set_xattr,
    "truncation": _truncate,
    "renames": _rename,
    "overwriting 4 KiB in place": _overwrite,
    "saves of 4 KiB by rename, two records each": _save,
    "new directories beside the files": _make_directory,
    "renames of such directories": _rename_directory,
}


# --- measuring ------------------------------------------------------------------------------------


def measure_openings(settings: Settings, say: Progress) -> Figures:
    """By number of files and kind: seconds of the opening, records and bytes of each, memory."""
    segment_bytes = settings.scaled(SEGMENT_BYTES, QUICK_SEGMENT_BYTES)
    result: Figures = {"journal_bytes": segment_bytes, "files": {}}
    for count in QUICK_FILES if settings.quick else FILES:
        result["files"][str(count)] = _measure(settings, say, count, segment_bytes)
    return result


def _measure(settings: Settings, say: Progress, count: int, segment_bytes: int) -> Figures:
    # Twice the image, and one process; data of the records of a journal, and its copies.
    require_memory(settings.memory, count * 2 * KIB + 20 * segment_bytes)
    image, source = settings.memory / "image.img", settings.memory / "openings.img"
    kinds: Figures = {}
    say(f"openings: making {count} files")
    quick = settings.quick
    made = apart(_make, str(image), count, segment_bytes, quick=quick)
    for kind in KINDS:
        say(f"openings: {count} files: {kind}")
        copy_sparse(image, source)
        found = apart(_change, str(source), kind, count, made, quick=quick)
        if found is None:
            raise WorkError(f"no changes of this kind: {kind}")
        kinds[kind] = found | open_apart(str(source), found["records"], quick=quick)
        source.unlink()
    image.unlink()
    return kinds


def _make(source: str, count: int, segment_bytes: int) -> Figures:
    """The store, closed cleanly; the numbers of its directories."""
    size_bytes = 24 * segment_bytes + count * 6 * KIB // MIB * MIB
    media = open_media(source, create_size_bytes=size_bytes)
    Store.format(media, segment_size_bytes=segment_bytes)
    store = Store.open(media)
    directories, inos = list[int](), list[int]()
    for first in range(0, count, _DIRECTORY_FILES):
        parent = store.make_directory(1, b"all-%07d" % first, 0o755, 0, 0).ino
        made = put_files(store, parent, b"file-%07d", min(_DIRECTORY_FILES, count - first))
        if made[0] != parent + 1 or made[-1] != parent + len(made):
            raise WorkError("numbers of files do not follow that of their directory")
        directories.append(parent)
        inos += made
    put_content(store, inos, len(_BLOCK))
    store.close()
    media.close()
    return {"directories": directories}


def _change(source: str, kind: str, count: int, made: Figures) -> Figures:
    """As many changes as the journal takes, at most one for each file; then the end comes without
    warning.
    """
    change = KINDS[kind]
    media = open_media(source)
    crowd = Crowd(Store.open(media), made["directories"])
    volume = crowd.store.volume
    if change is _rename_directory:
        wanted = volume.superblock.segment_payload_bytes // _RENAME_BYTES
        for number in range(min(count, wanted)):
            _make_directory(crowd, number)
        volume.rollover()
    journal, records = volume.journal, volume.last_lsn
    if journal is None:
        raise WorkError("a store that is open for writing has a journal")
    free_bytes = journal.free_bytes
    for number in range(count if change is not None else 0):
        if journal.free_bytes < _RECORD_BYTES_MAX:
            break
        if change is not None:
            change(crowd, number)
    if volume.journal is not journal:
        raise WorkError("the journal was begun anew")
    records = volume.last_lsn - records
    used_bytes = free_bytes - journal.free_bytes
    crowd.store.abandon()
    return {"records": records, "bytes_each": used_bytes // records if records else 0}


def copy_sparse(source: Path, target: Path) -> None:
    """A file with its holes: a store's media is mostly that."""
    with source.open("rb") as old, target.open("wb") as new:
        size_bytes = os.fstat(old.fileno()).st_size
        os.ftruncate(new.fileno(), size_bytes)
        end = 0
        while end < size_bytes:
            try:
                start = os.lseek(old.fileno(), end, os.SEEK_DATA)
            except OSError:  # a hole up to the end
                break
            end = os.lseek(old.fileno(), start, os.SEEK_HOLE)
            os.lseek(new.fileno(), start, os.SEEK_SET)
            while start < end:
                start += os.sendfile(new.fileno(), old.fileno(), start, end - start)


# --- the table ------------------------------------------------------------------------------------


def _grouped(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def table(figures: Figures) -> list[str]:
    """Markdown: a line for each kind."""
    counts: Figures = figures["files"]
    heads = ["records of"]
    for count in counts:
        heads += [f"{_grouped(int(count))} files: records", "open after", "memory"]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for kind in KINDS:
        cells = [kind]
        for kinds in counts.values():
            found = kinds[kind]
            cells += [_grouped(found["records"]) if found["records"] else ""]
            cells += [f"{found['open_s']:.2f} s", f"{found['memory_bytes'] / MIB:.0f} MiB"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
