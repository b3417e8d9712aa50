"""``scripts/bench`` runs, measures everything it says it does, and makes its table and plots of it.

Nothing here looks at how large a figure is: a test that times something fails by luck.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cxlfs.control.mountinfo import find_mount
from cxlfs.units import MIB
from tests.support.bench import openings, scaling
from tests.support.bench.bare import bare_mount
from tests.support.bench.data import BLOCKS_BYTES, KINDS, TRANSPORTS
from tests.support.bench.fragmentation import QUICK_REFERENCES
from tests.support.bench.huge_pages import RATES, TIMES
from tests.support.bench.inspecting import TYPES
from tests.support.bench.report import FIRST_PASS_CASES, PIECES, ROWS, find, table
from tests.support.bench.targets import mounted
from tests.support.bench.unit_saves import SHAPES, WAYS
from tests.support.bench.workers import COUNTS
from tests.support.mount import fast_directory
from tests.support.repository import ROOT

BENCH = [sys.executable, str(ROOT / "scripts" / "bench")]
one_quick_run = pytest.mark.sampled(5, group="quick runs of benchmarks")
LEVELS = ("p50_s", "p90_s", "p99_s", "count")


def assert_positive(figures: dict[str, Any], *keys: str) -> None:
    for key in keys:
        value = find(figures, key)
        assert isinstance(value, int | float), key
        assert value > 0, key


class SectionError(Exception):
    """What a section may fail of."""


@pytest.mark.mounted
@pytest.mark.parametrize("held", ["by the failing frame", "elsewhere"])
def test_a_failure_while_a_mapping_is_held_is_the_one_that_is_told(
    tmp_path: Path, held: str
) -> None:
    kept = []
    target = tmp_path

    def load(directory: Path) -> None:
        (directory / "mapped").write_bytes(bytes(8192))
        with (directory / "mapped").open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if held == "elsewhere":
            kept.append(mapping)
        raise SectionError("the first error")

    def section() -> None:
        nonlocal target
        with mounted(tmp_path / "store", 64 * MIB) as (target, _pid):
            load(target)

    with pytest.raises(SectionError, match="the first error") as caught:
        section()
    notes = getattr(caught.value, "__notes__", [])
    assert [str(target) in note for note in notes] == [True] * len(kept)
    assert find_mount(str(target)) is None
    assert not target.exists()
    for mapping in kept:
        mapping.close()


@one_quick_run
@pytest.mark.mounted
@pytest.mark.slow
@pytest.mark.timeout(600)  # half a minute of two cores, which others may be using
def test_a_quick_run_measures_every_case(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ["--quick", "--only", "data", "--size", "256M", "--runs", "1", "--json", path]
    arguments += ["--memory", fast_directory() or tmp_path]
    done = subprocess.run(
        [*BENCH, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run 1/1: 4 readers of 8.0 MiB on pyfuse3" in done.stderr
    figures = json.loads(path.read_text())
    assert figures["missing"] == {}
    assert figures["settings"]["quick"] is True
    raw = ("copy", "crc32c", "crc32c_of_memory", "read_crc32c")
    assert_positive(figures, *(f"data.raw.{name}_bytes_per_s" for name in raw))
    for target in (*TRANSPORTS, "tmpfs"):
        assert_positive(figures, *(f"data.pwrite_4kib.{target}.{level}" for level in LEVELS))
        for kind in KINDS:
            for count in COUNTS:
                for block_bytes in BLOCKS_BYTES:
                    key = f"data.throughput.{kind}.{target}.{count}.{block_bytes}"
                    assert_positive(figures, f"{key}.bytes_per_s", f"{key}.ratio")
                    assert len(find(figures, f"{key}.runs_bytes_per_s")) == 1
    again = subprocess.run([*BENCH, "--table", path], capture_output=True, text=True, check=True)
    assert again.stdout == done.stdout == f"{table(figures)}\n"


@one_quick_run
@pytest.mark.mounted
@pytest.mark.slow
@pytest.mark.timeout(600)  # as above
def test_a_quick_run_measures_saves_in_units(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ["--quick", "--only", "units", "--size", "256M", "--runs", "1"]
    arguments += ["--json", str(path)]
    arguments += ["--memory", str(fast_directory() or tmp_path)]
    done = subprocess.run([*BENCH, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(path.read_text())
    assert figures["missing"] == {}
    for key in (f"units.{shape}_{way}" for shape in SHAPES for way in WAYS):
        assert_positive(figures, f"{key}.inside_s", f"{key}.outside_s", f"{key}.ratio")
        assert done.stdout.count(f"`{key}.ratio`") == 1


def test_a_quick_run_measures_looking_inside(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ["--quick", "--only", "inspect", "--state-size", "64M", "--runs", "1"]
    arguments += ["--json", str(path), "--memory", str(fast_directory() or tmp_path)]
    done = subprocess.run([*BENCH, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(path.read_text())
    assert figures["missing"] == {}
    for key in ("inspect.diff", *(f"inspect.stats.{name}" for name in TYPES)):
        assert_positive(figures, *(f"{key}.{name}bytes_per_s" for name in ("", "crc32c_")))
        assert done.stdout.count(f"`{key}.bytes_per_s`") == 1


@pytest.mark.mounted
@pytest.mark.skipif(os.geteuid() != 0, reason="a bare FUSE server is mounted as root only")
def test_a_bare_server_keeps_what_is_written(tmp_path: Path) -> None:
    block = random.Random(1).randbytes(MIB + 4097)
    with bare_mount(Path(fast_directory() or tmp_path)) as target:
        (target / "new").write_bytes(block)
        (target / "new").rename(target / "final")
        (target / "new").write_bytes(block[:5])
        assert (target / "final").read_bytes() == block
        (target / "new").rename(target / "final")
        assert (target / "final").read_bytes() == block[:5]
        assert not (target / "new").exists()
    assert not target.exists()


@one_quick_run
@pytest.mark.mounted
@pytest.mark.skipif(os.geteuid() != 0, reason="a bare FUSE server is mounted as root only")
def test_a_quick_run_measures_a_store_beside_a_bare_server(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ["--quick", "--only", "fuse", "--size", "256M", "--runs", "1", "--json", str(path)]
    arguments += ["--memory", str(fast_directory() or tmp_path)]
    done = subprocess.run([*BENCH, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(path.read_text())
    assert figures["missing"] == {}
    for name in ("store", "bare"):
        for key in (f"fuse.write.{name}.{count}" for count in (1, 2)):
            assert_positive(figures, f"{key}.bytes_per_s", f"{key}.ratio", f"{key}.of_bare")
    for name in ("store", "bare", "bare_one_core"):
        for key in (f"fuse.{kind}.{name}" for kind in ("pwrite_4kib", "save")):
            assert_positive(figures, *(f"{key}.{level}" for level in (*LEVELS, "mean_s")))
            assert_positive(figures, f"{key}.p50_times_bare", f"{key}.mean_times_bare")
    assert done.stdout == f"{table(figures)}\n"


@pytest.mark.mounted
@pytest.mark.campaign
@pytest.mark.timeout(600)  # as above; the daemon rests for up to ten seconds before it gathers
def test_a_quick_run_measures_files_in_pieces_and_first_passes(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ["--quick", "--only", "fragmentation,first_pass", "--size", "256M", "--runs", "1"]
    arguments += ["--json", str(path), "--memory", str(fast_directory() or tmp_path)]
    done = subprocess.run([*BENCH, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(path.read_text())
    assert figures["missing"] == {}
    for key in (f"fragmentation.{state}" for state in PIECES):
        assert_positive(figures, f"{key}.bytes_per_s", f"{key}.ratio")
    gathering = figures["fragmentation"]["gathering"]
    overwritten = figures["fragmentation"]["file_bytes"]
    assert overwritten / 2 < gathering["moved_bytes"] <= 1.01 * overwritten, "all of it, once"
    assert gathering["worked_s"] > 0
    for count in QUICK_REFERENCES:
        key = f"fragmentation.first_write.{count}"
        assert_positive(figures, *(f"{key}.{name}" for name in ("first_s", "next_s", "again_s")))
    for name in FIRST_PASS_CASES:
        for which in ("first", "later"):
            key = f"first_pass.{name}.{which}"
            assert_positive(figures, f"{key}.bytes_per_s", f"{key}.ratio")
    assert done.stdout == f"{table(figures)}\n"
    assert "1 reader, file gathered by the daemon" in done.stdout


@pytest.mark.mounted
@pytest.mark.campaign
@pytest.mark.timeout(600)  # as above
def test_a_quick_run_measures_huge_pages(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ["--quick", "--only", "huge_pages", "--size", "128M", "--runs", "1"]
    arguments += ["--json", str(path), "--memory", str(fast_directory() or tmp_path)]
    done = subprocess.run([*BENCH, *arguments], capture_output=True, text=True, check=False)
    figures = json.loads(path.read_text())
    if done.returncode != 0:
        said = figures["missing"]["huge_pages"]
        assert re.search("cannot be mounted|came in huge pages|needs .* of memory", said), done
        pytest.skip(said)
    for kind in ("small", "huge"):
        for name in RATES:
            assert_positive(figures, f"huge_pages.{kind}.{name}.bytes_per_s")
            assert_positive(figures, f"huge_pages.{kind}.{name}.ratio")
        for name in TIMES:
            assert_positive(figures, f"huge_pages.{kind}.{name}.median_s")
    assert figures["huge_pages"]["small"]["faults"] > figures["huge_pages"]["huge"]["faults"]
    assert done.stdout == f"{table(figures)}\n"


def quick_run(tmp_path: Path, section: str) -> tuple[dict[str, Any], str]:
    """Its figures, and what it printed."""
    path = tmp_path / "figures.json"
    memory = fast_directory() or tmp_path
    arguments = ["--quick", "--only", section, "--json", path, "--memory", memory]
    done = subprocess.run(
        [*BENCH, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text()), done.stdout


@one_quick_run
@pytest.mark.slow
@pytest.mark.timeout(600)  # as above
def test_a_quick_run_measures_what_grows(tmp_path: Path) -> None:
    figures, said = quick_run(tmp_path, "scaling")
    found = figures["scaling"]
    assert found["left_out"] == {}
    for kind in scaling.KINDS:
        assert list(found[kind]) == [str(count) for count in scaling.QUICK_COUNTS]
    for cells in found["files"].values():
        assert len(cells["verbs_s"]) == 9
        assert min(cells["verbs_s"].values()) > 0
        assert min(cells["rollover_wait_s"], cells["clean_open_s"]) > 0
    for cells in found["references"].values():
        assert len(cells["verbs_s"]) == 9
        assert min(cells["verbs_s"].values()) > 0
    assert said.endswith("\n".join(scaling.table(found)) + "\n")
    assert "| files: lookup |" in said
    text = (ROOT / "docs" / "scaling.md").read_text()
    _, shown, _ = re.split(r"<!-- (?:scaling: .*|end of scaling) -->\n", text)
    rows = {line.split("|")[1].strip() for line in shown.splitlines()[2:]}
    assert rows <= {what for what, _ in scaling.rows(found)}, "the document has what is printed"


@one_quick_run
@pytest.mark.slow
@pytest.mark.timeout(600)  # as above
def test_a_quick_run_measures_openings_behind_each_kind_of_change(tmp_path: Path) -> None:
    figures, said = quick_run(tmp_path, "openings")
    assert figures["missing"] == {}
    found = figures["openings"]
    assert list(found["files"]) == [str(count) for count in openings.QUICK_FILES]
    for count, kinds in found["files"].items():
        assert list(kinds) == list(openings.KINDS)
        for kind, cells in kinds.items():
            assert_positive(cells, "open_s", "processor_s", "memory_bytes")
            changes = 0 if openings.KINDS[kind] is None else int(count)
            full = cells["records"] * cells["bytes_each"] > 0.99 * openings.QUICK_SEGMENT_BYTES
            assert cells["records"] in (changes, 2 * changes) or full, kind
    assert said.endswith("\n".join(openings.table(found)) + "\n")
    text = (ROOT / "docs" / "scaling.md").read_text()
    _, shown, _ = re.split(r"<!-- (?:openings: .*|end of openings) -->\n", text)
    rows = [line.split("|")[1].strip() for line in shown.splitlines()[2:]]
    assert rows == list(openings.KINDS)


def test_a_verdict_compares_the_ratio_or_the_value() -> None:
    key = "data.throughput.write.native.1.1048576"
    for ratio, seconds, verdict in ((0.23, 20e-6, "met"), (0.22, 21e-6, "missed")):
        figures: dict[str, Any] = {"data": {"throughput": {"write": {"native": {"1": {}}}}}}
        figures["data"]["throughput"]["write"]["native"]["1"]["1048576"] = {
            "bytes_per_s": 2e9,
            "ratio": ratio,
        }
        figures["data"]["pwrite_4kib"] = {"native": {"p50_s": seconds}}
        lines = {line.split("|")[-2].strip(): line for line in table(figures).splitlines()}
        assert f"≥ 0.23: {verdict}" in lines[f"`{key}.bytes_per_s`"]
        assert f"≤ 20 µs: {verdict}" in lines["`data.pwrite_4kib.native.p50_s`"]


def test_no_figure_stands_in_two_rows() -> None:
    """What is compared with two things has a row for each."""
    shown = [(row.key, row.ratio) for rows in ROWS.values() for row in rows]
    assert len(shown) == len(set(shown))


def test_the_document_shows_rows_that_the_program_prints() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    _, figures, _ = re.split(r"<!-- (?:figures: .*|end of figures) -->\n", text)
    header, _, *lines = figures.splitlines()
    assert table({}).startswith(header)
    keys = [row.key for rows in ROWS.values() for row in rows]
    shown = [line.split("|")[-2].strip(" `") for line in lines]
    assert shown
    assert set(shown) <= set(keys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "data,speed"], "no section speed"),
        (["--runs", "3"], "a median of fewer than 5 runs"),
        (["--size", "much"], "not a size"),
        (["--passthrough", "/nowhere/passthrough_hp"], "no program"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    done = subprocess.run([*BENCH, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
