"""The table of a run: which figures are shown, how, and what they must be.

Every row names its place in the JSON document, so that a table can be made again from a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from cxlfs.units import KIB, MIB
from tests.support.bench import openings, scaling
from tests.support.bench.first_pass import CASES
from tests.support.bench.huge_pages import RATES, TIMES
from tests.support.bench.inspecting import TYPES
from tests.support.bench.measure import Figures
from tests.support.bench.unit_saves import SHAPES, WAYS

UNIT_MAX = 1.05
"""What a save in a checkpoint unit may take, times one outside."""
UNITS = {
    "GB/s": (1e-9, "{:.2f} GB/s"),
    "us": (1e6, "{:.1f} µs"),
    "ms": (1e3, "{:.2f} ms"),
    "per s": (1.0, "{:.0f} a second"),
    "MiB": (1 / MIB, "{:.0f} MiB"),
    "ratio": (1.0, "{:.2f}"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """``key`` and ``ratio`` are places in the document. ``must`` is a least ratio where there is
    one, else the most that the value may be, in units of ``unit``. Where a distribution lies, its
    percentiles 50, 90 and 99 are shown.
    """

    text: str
    key: str
    unit: str
    ratio: str | None = None
    must: float | None = None

    def cells(self, figures: Figures) -> tuple[str, ...] | None:
        """None: the document has no such figure."""
        value = find(figures, self.key)
        if value is None:
            return None
        if isinstance(value, dict):
            return self.text, self._levels(value), "", "", f"`{self.key}`"
        factor, form = UNITS[self.unit]
        ratio = None if self.ratio is None else find(figures, self.ratio)
        shown = "" if ratio is None else f"{ratio:.2f}"
        must = self._must(value * factor, ratio)
        return self.text, form.format(value * factor), shown, must, f"`{self.key}`"

    def _levels(self, value: Figures) -> str:
        factor, form = UNITS[self.unit]
        number, unit = form.split(" ", 1)
        levels = (value[f"{level}_s"] for level in ("p50", "p90", "p99"))
        return f"{' / '.join(number.format(level * factor) for level in levels)} {unit}"

    def _must(self, value: float, ratio: float | None) -> str:
        if self.must is None:
            return ""
        if self.ratio is None:
            met = value <= self.must
            return f"≤ {self.must:g} {'µs' if self.unit == 'us' else self.unit}: {_verdict(met)}"
        return f"≥ {self.must:.2f}: {_verdict(ratio is not None and ratio >= self.must)}"


def _verdict(met: object) -> str:
    return "met" if met else "missed"


def find(figures: Figures, key: str) -> Any:
    """What lies at a place like ``data.raw.copy_bytes_per_s``; None when nothing does."""
    place: Any = figures
    for part in key.split("."):
        if not isinstance(place, dict) or part not in place:
            return None
        place = place[part]
    return place


def _data_rows() -> Iterator[Row]:
    raw = "data.raw"
    yield Row("raw non-temporal copy, one core", f"{raw}.copy_bytes_per_s", "GB/s")
    yield Row("raw CRC32C of a cached block, one core", f"{raw}.crc32c_bytes_per_s", "GB/s")
    yield Row("raw CRC32C of memory, one core", f"{raw}.crc32c_of_memory_bytes_per_s", "GB/s")
    yield Row("raw read with CRC32C, one core", f"{raw}.read_crc32c_bytes_per_s", "GB/s")
    musts = {("write", 1): 0.23, ("write", 2): 0.45, ("read", 1): 0.25, ("read", 2): 0.50}
    targets = {
        "native": "",
        "pyfuse3": ", pyfuse3 transport",
        "tmpfs": ", tmpfs itself",
        "passthrough": ", a FUSE pass-through over tmpfs",
        "disk": ", a disk",
        "ext4-dax": ", ext4-dax",
        "xfs-dax": ", xfs-dax",
    }
    for kind in ("write", "read"):
        for name, suffix in targets.items():
            for count in (1, 2, 4):
                what = f"{kind}{'r' if kind == 'write' else 'er'}{'s' * (count > 1)}"
                key = f"data.throughput.{kind}.{name}.{count}.{MIB}"
                must = musts.get((kind, count)) if name == "native" else None
                text = f"{count} {what}, 1 MiB{suffix}"
                yield Row(text, f"{key}.bytes_per_s", "GB/s", f"{key}.ratio", must)
    for name, suffix in targets.items():
        key = f"data.pwrite_4kib.{name}"
        must = 20.0 if name == "native" else None
        yield Row(f"4 KiB pwrite, median{suffix}", f"{key}.p50_s", "us", None, must)
        yield Row(f"4 KiB pwrite, p99{suffix}", f"{key}.p99_s", "us")


_SERVERS = {
    "store": "store",
    "bare": "bare FUSE server",
    "bare_one_core": "bare FUSE server and client on one core",
}
_TIMES = {"pwrite_4kib": ("4 KiB pwrite", 15.0), "save": ("save of a small file", 300.0)}
_AVERAGES = {"p50": "median", "mean": "mean"}


def _fuse_rate_rows() -> Iterator[Row]:
    """To the raw copy."""
    for count in (1, 2):
        for name in ("store", "bare"):
            key = f"fuse.write.{name}.{count}"
            must = 0.55 if (name, count) == ("store", 2) else None
            text = f"{count} writer{'s' * (count > 1)}, 1 MiB, {_SERVERS[name]}"
            yield Row(text, f"{key}.bytes_per_s", "GB/s", f"{key}.ratio", must)


def _fuse_bare_rows() -> Iterator[Row]:
    for count in (1, 2):
        key = f"fuse.write.store.{count}"
        text = f"{count} writer{'s' * (count > 1)}, 1 MiB, beside a bare FUSE server"
        yield Row(text, f"{key}.bytes_per_s", "GB/s", f"{key}.of_bare")


def _fuse_time_rows() -> Iterator[Row]:
    for kind, (text, must) in _TIMES.items():
        for name, server in _SERVERS.items():
            for level, called in _AVERAGES.items():
                key = f"fuse.{kind}.{name}.{level}_s"
                wanted = must if name == "store" else None
                yield Row(f"{text}, {called}, {server}", key, "us", None, wanted)


def _fuse_beside_rows() -> Iterator[Row]:
    for kind, (text, _) in _TIMES.items():
        for name in ("store", "bare_one_core"):
            for level, called in _AVERAGES.items():
                key = f"fuse.{kind}.{name}"
                what = f"{text}, {called}, {_SERVERS[name]}, beside a bare FUSE server"
                yield Row(what, f"{key}.{level}_s", "us", f"{key}.{level}_times_bare")


_DIRECT_MUSTS = {
    ("write", "client", 1): 0.85,
    ("write", "client", 2): 1.5,
    ("write", "preloaded", 1): 0.35,
    ("write", "preloaded_large", 1): 0.85,
    ("read", "client", 1): 0.85,
    ("read", "mapped", 1): 0.85,
}
_DIRECT_WAYS = {
    "kernel": "through the kernel",
    "client": "by the client library",
    "mapped": "mapped by the client library, verified where it lies",
    "preloaded": "unchanged under cxlfs run",
    "tmpfs": "tmpfs itself",
    "memcpy": "memcpy into shared memory",
    "raw": "non-temporal copy into shared memory",
}
_DIRECT_LARGE_WAYS = {
    "kernel_large": "through the kernel",
    "preloaded_large": "unchanged under cxlfs run",
    "raw_large": "non-temporal copy into shared memory",
}


def _direct_rows(kind: str, ways: Mapping[str, str], call: str = "1 MiB") -> Iterator[Row]:
    for way, text in ways.items():
        for count in (1, 2):
            what = f"{count} {kind}{'r' if kind == 'write' else 'er'}{'s' * (count > 1)}"
            key = f"direct.{kind}.{way}.{count}"
            must = _DIRECT_MUSTS.get((kind, way, count))
            yield Row(f"{what}, {call}, {text}", f"{key}.bytes_per_s", "GB/s", f"{key}.ratio", must)


def _torch_row(text: str, key: str, ratio: str = "ratio", must: float | None = None) -> Row:
    place = f"direct_torch.{key}"
    return Row(text, f"{place}.bytes_per_s", "GB/s", f"{place}.{ratio}", must)


def _latency_rows() -> Iterator[Row]:
    names = {
        "store_on_tmpfs": "store on tmpfs",
        "store_on_tmpfs_awake": "store on tmpfs, wakeup_latency=0",
        "store_on_disk": "store on a disk",
        "tmpfs": "tmpfs itself",
        "disk": "the disk itself, with fsync",
    }
    for name, text in names.items():
        key = f"latency.{name}"
        must = 700.0 if name.startswith("store_on_tmpfs") else None
        yield Row(
            f"create + 4 KiB + close + rename, median, {text}",
            f"{key}.replace.p50_s",
            "us",
            None,
            must,
        )
        for call in ("fsync", "close", "rename"):
            yield Row(f"{call}, p50 / p90 / p99, {text}", f"{key}.{call}", "us")
        for what in ("creates", "stats", "unlinks"):
            yield Row(f"{what} of empty files, {text}", f"{key}.{what}_per_s", "per s")


FRAMEWORKS: dict[str, tuple[str, float | None]] = {
    "torch_save": ("torch.save", 1.0),
    "torch_load": ("torch.load", 0.8),
    "torch_load_mmap": ("torch.load, mmap=True", None),
    "dcp_save": ("torch.distributed.checkpoint.save", None),
    "dcp_load": ("torch.distributed.checkpoint.load", None),
    "safetensors_save": ("safetensors save_file", None),
    "safetensors_load": ("safetensors load_file", None),
}
"""What is saved or loaded, and the least speed beside tmpfs."""


def _framework_rows() -> Iterator[Row]:
    for name, (text, must) in FRAMEWORKS.items():
        key = f"frameworks.{name}"
        yield Row(text, f"{key}.bytes_per_s", "GB/s", f"{key}.ratio_to_tmpfs", must)


def _store_rows() -> Iterator[Row]:
    yield Row("open, closed cleanly", "opening.clean_open_s", "ms")
    yield Row("open after a crash", "opening.crash_open_s", "ms")
    yield Row("open after a crash, read-only", "opening.crash_open_read_only_s", "ms")
    for kind, text in (("empty", "an empty store"), ("full", "a store with files")):
        for what in ("mount", "umount"):
            yield Row(f"cxlfs {what}, {text}", f"mount.{kind}_{what}.p50_s", "ms")
    yield Row("daemon memory beyond the mapping", "memory.with_files_bytes", "MiB")
    yield Row("the same, allowed", "memory.allowed_bytes", "MiB")
    for name, text in (("live", "mounted"), ("offline", "not mounted")):
        key = f"verify.{name}"
        yield Row(
            f"verify, data pass, {text}",
            f"{key}.bytes_per_s",
            "GB/s",
            f"{key}.ratio_of_memory",
            0.6,
        )
        yield Row(f"the same beside raw CRC32C of a cached block, {text}", f"{key}.ratio", "ratio")


def _inspect_rows() -> Iterator[Row]:
    """Those that a limit was set for come first; the others are slower, as the page says."""
    for name in TYPES:
        key = f"inspect.stats.{name}"
        must = INSPECT_MIN if name == "F32" else None
        yield Row(f"inspect --stats, {name}", f"{key}.bytes_per_s", "GB/s", f"{key}.ratio", must)
    key = "inspect.diff"
    yield Row("diff, F32", f"{key}.bytes_per_s", "GB/s", f"{key}.ratio", INSPECT_MIN)


INSPECT_MIN = 0.5
GATHERED_MIN, FIRST_WRITE_MIN = 0.7, 0.8
PIECES: dict[str, tuple[str, float | None]] = {
    "fresh": ("as written", None),
    "fragmented": ("overwritten at random places", None),
    "gathered": ("gathered by the daemon", GATHERED_MIN),
}
"""Of the file that is read, and the least speed beside the first."""
FIRST_PASS_CASES = {"memory": "plain memory, a new file", **CASES}


def _fragmentation_rows() -> Iterator[Row]:
    key = "fragmentation"
    yield Row("raw CRC32C of memory beside it", f"{key}.raw.crc32c_of_memory_bytes_per_s", "GB/s")
    for state, (text, must) in PIECES.items():
        of = f"{key}.{state}"
        yield Row(f"1 reader, file {text}", f"{of}.bytes_per_s", "GB/s", f"{of}.ratio", must)
    yield Row("wait until gathering begins", f"{key}.gathering.waited_s", "ms")
    yield Row("rate of gathering", f"{key}.gathering.bytes_per_s", "GB/s")


def _first_write_rows() -> Iterator[Row]:
    for count in (100_000, 500_000):
        key = f"fragmentation.first_write.{count}"
        references = f"a file of {count:,} references".replace(",", " ")
        yield Row(f"first 4 KiB write to {references}", f"{key}.first_s", "ms", None, 50.0)
        yield Row(f"those after it, {references}", f"{key}.next_s", "us")
        yield Row(f"first one after opening it again, {references}", f"{key}.again_s", "us")


def _first_pass_rows() -> Iterator[Row]:
    for name, text in FIRST_PASS_CASES.items():
        must = FIRST_WRITE_MIN if name.endswith("write") else None
        key = f"first_pass.{name}"
        first, later = f"{key}.first", f"{key}.later"
        yield Row(f"first pass, {text}", f"{first}.bytes_per_s", "GB/s", f"{first}.ratio", must)
        yield Row(f"later pass, {text}", f"{later}.bytes_per_s", "GB/s")


def _huge_page_rows() -> Iterator[Row]:
    for name, text in RATES.items():
        small, huge = f"huge_pages.small.{name}", f"huge_pages.huge.{name}"
        yield Row(f"{text}, 4 KiB pages", f"{small}.bytes_per_s", "GB/s")
        yield Row(f"{text}, huge pages", f"{huge}.bytes_per_s", "GB/s", f"{huge}.ratio")
    for name, text in TIMES.items():
        small, huge = f"huge_pages.small.{name}", f"huge_pages.huge.{name}"
        yield Row(f"{text}, 4 KiB pages", f"{small}.median_s", "ms")
        yield Row(f"{text}, huge pages", f"{huge}.median_s", "ms", f"{huge}.ratio")


def _unit_rows() -> Iterator[Row]:
    texts = {"new": "a new directory", "over": "over an old one", "rename": "over one by rename"}
    for shape in SHAPES:
        for way in WAYS:
            key = f"units.{shape}_{way}"
            text = f"saving {shape.replace('x', ' files of ')}iB, {texts[way]}"
            yield Row(f"{text}, outside of a unit", f"{key}.outside_s", "ms")
            yield Row(f"{text}, in a unit: times that", f"{key}.ratio", "ratio", None, UNIT_MAX)


def _history_rows() -> Iterator[Row]:
    ways = {"over": "over one name", "rename": "by rename"}
    for size in ("4K", "1M", "64M"):
        for way, text in ways.items():
            key = f"history.{size}.{way}"
            what = f"save of {size}iB {text}, store full of versions"
            yield Row(f"{what}, without history", f"{key}.without_s", "us")
            yield Row(f"{what}, with history: times that", f"{key}.ratio", "ratio", None, 1.02)
    for way in ("without", "with"):
        what = f"saves of 64 KiB, store 95 % full, {way} history"
        yield Row(f"{what}, median", f"history.full.{way}.p50_s", "us")
        yield Row(f"{what}, p99", f"history.full.{way}.p99_s", "us")
        yield Row(f"{what}, slowest", f"history.full.{way}.worst_s", "us")


ROWS = {
    "of the raw copy": (
        *_data_rows(),
        *_fuse_rate_rows(),
        *_direct_rows("write", _DIRECT_WAYS),
        _torch_row("raw copy of a state, which no cache holds, one core", "raw_state"),
        _torch_row("cxlfs.torch.save", "save"),
        _torch_row("the same, by two threads", "raw_state_by_two"),
        _torch_row("DCP save, StorageWriter of cxlfs.torch, 2 threads", "dcp_save", must=1.2),
        _torch_row("cxlfs.torch.async_save, until it returns", "async_save"),
    ),
    "of reading and CRC32C, as many threads": tuple(_inspect_rows()),
    "": (
        *_fuse_time_rows(),
        *_latency_rows(),
        *_unit_rows(),
        *_history_rows(),
        Row("a file mapped by the client library, unverified", "direct.map_s", "us"),
        Row("cxlfs.torch.load, nothing verified", "direct_torch.load_unverified_s", "us"),
    ),
    "of the bare server": tuple(_fuse_bare_rows()),
    "times the bare server's": tuple(_fuse_beside_rows()),
    "of tmpfs": (
        *_framework_rows(),
        _torch_row("cxlfs.torch.save, to torch.save", "save", "of_tmpfs", 3.0),
        _torch_row("DCP save by cxlfs.torch, to PyTorch's", "dcp_save", "of_tmpfs"),
        _torch_row("DCP load by cxlfs.torch, to PyTorch's", "dcp_load", "of_tmpfs"),
        _torch_row("torch.save under cxlfs run, to tmpfs", "save_unchanged", "of_tmpfs", 3.0),
    ),
    "of raw CRC32C of memory": (
        *_store_rows(),
        *_direct_rows("read", {"mapped": _DIRECT_WAYS["mapped"]}),
        _torch_row("cxlfs.torch.load, what verifying adds", "verifying", must=0.8),
        _torch_row("DCP load by cxlfs.torch", "dcp_load"),
    ),
    "of the raw read with CRC32C": tuple(
        _direct_rows("read", {way: text for way, text in _DIRECT_WAYS.items() if way != "mapped"})
    ),
    "of one writer's raw copy in such calls": tuple(
        _direct_rows("write", _DIRECT_LARGE_WAYS, "16 MiB")
    ),
    "of two copying threads": (_torch_row("DCP save by cxlfs.torch", "dcp_save", "of_two_copies"),),
    "of the fresh file": (*_fragmentation_rows(), *_first_write_rows()),
    "of the later pass": tuple(_first_pass_rows()),
    "of 4 KiB pages": tuple(_huge_page_rows()),
}
"""By what their ratio is to."""


def table(figures: Figures) -> str:
    """Markdown: every row that the document has a figure for, what was missing, and what scaling
    has beside it.
    """
    lines = ["| what | measured | ratio | must | key |", "|---|---:|---:|---|---|"]
    for unit, rows in ROWS.items():
        for row in rows:
            cells = row.cells(figures)
            if cells is not None:
                what, measured, ratio, must, key = cells
                shown = f"{ratio} {unit}" if ratio else ""
                lines.append(f"| {what} | {measured} | {shown} | {must} | {key} |")
    peers = find(figures, "data.peers") or {}
    notes = [f"- {name}: {text}" for name, text in peers.items()]
    notes += [f"- {name}: {text}" for name, text in figures.get("missing", {}).items()]
    lines += ["", *notes] if notes else []
    for name, section in (("scaling", scaling), ("openings", openings)):
        lines += ["", *section.table(figures[name])] if name in figures else []
    return "\n".join(lines)


def blocks_of(figures: Figures, kind: str, target: str, count: int) -> list[tuple[int, float]]:
    """Block size in KiB and bytes per second, for a plot."""
    found = find(figures, f"data.throughput.{kind}.{target}.{count}") or {}
    return [(int(size) // KIB, place["bytes_per_s"]) for size, place in found.items()]
