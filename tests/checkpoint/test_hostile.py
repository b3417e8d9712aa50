"""Checkpoints that somebody made to hurt: nothing is run, everything is bounded."""

from __future__ import annotations

import ast
import importlib
import io
import json
import multiprocessing
import os
import pickle
import re
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from cxlfs.checkpoint import Level, State, inspect, limits
from cxlfs.checkpoint.jsons import parse_json
from cxlfs.checkpoint.model import BeyondLimitsError, DamagedError, IncompleteError, ProblemError
from cxlfs.checkpoint.pickles import Applied, Global, Pairs, Persistent, read_pickle
from cxlfs.checkpoint.place import Budget, Place
from cxlfs.units import MIB
from tests.support import fuzz_checkpoints, hostile_checkpoints
from tests.support.repository import python_files

NEVER_IMPORTED = {"pickle", "_pickle", "marshal", "shelve", "pickletools", "dill", "torch", "runpy"}
NEVER_CALLED = {"eval", "exec", "compile", "__import__", "getattr", "import_module"}


# --- nothing is run -----------------------------------------------------------------------------


def test_the_room_imports_nothing_that_unpickles() -> None:
    found = []
    for path in python_files("cxlfs/checkpoint"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = {node.func.id} & NEVER_CALLED
            else:
                continue
            found += [f"{path.name}: {name}" for name in names & (NEVER_IMPORTED | NEVER_CALLED)]
    assert found == []


def test_the_room_imports_no_framework() -> None:
    program = "import sys, cxlfs.checkpoint; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    frameworks = {"torch", "tensorflow", "jax", "h5py", "safetensors", "keras", "msgpack", "trio"}
    assert frameworks & set(done.stdout.split()) == set()


class Evil:
    """Unpickling it would make a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, (f"touch {self.path}",))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_call_in_a_pickle_is_a_record_of_it(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "mark"
    data = pickle.dumps({"model": Evil(str(mark))}, protocol=protocol)
    found = read_pickle(data)
    assert isinstance(found.value, Pairs)
    call = found.value.get("model")
    assert isinstance(call, Applied)
    assert isinstance(call.function, Global)
    assert call.function.name == "system"
    with zipfile.ZipFile(tmp_path / "step-1.pt", "w") as archive:
        archive.writestr("a/data.pkl", data)
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / ".metadata").write_bytes(data)
    (tmp_path / "step-3.pt").write_bytes(data)
    with hostile_checkpoints.watched():
        for name in ("step-1.pt", "step-2", "step-3.pt"):
            assert inspect(tmp_path / name, Level.CONTENT) is not None
    assert not mark.exists()


def test_the_watch_sees_what_it_forbids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loaded_for_the_watch.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for forbidden in (
        lambda: subprocess.run(["true"], check=True),
        lambda: pickle.loads(pickle.dumps(os.getcwd)),  # noqa: S301  our own
        lambda: (tmp_path / "x").write_text("x"),
        lambda: importlib.import_module("loaded_for_the_watch"),
    ):
        with pytest.raises(AssertionError), hostile_checkpoints.watched():
            forbidden()


# --- pickles ------------------------------------------------------------------------------------

VALUES: list[object] = [
    None,
    True,
    0,
    -1,
    255,
    65536,
    -(1 << 40),
    1 << 80,
    1.5,
    "text \N{SNOWMAN}",
    b"bytes",
    (),
    (1,),
    (1, 2, 3, 4),
    [1, [2, [3]]],
    [],
    "x" * 300,
    b"y" * 70000,
]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_plain_values_are_read_as_they_are(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol=protocol)
    found = read_pickle(data)
    assert found.end == len(data)
    if isinstance(value, bytes) and protocol < 3:
        assert isinstance(found.value, Applied), "bytes are a call of codecs.encode there"
    else:
        assert found.value == value


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_dictionaries_sets_and_memos(protocol: int) -> None:
    shared = ["shared"]
    data = pickle.dumps({"a": shared, "b": shared, 3: {"c": {1, 2}}}, protocol=protocol)
    found = read_pickle(data).value
    assert isinstance(found, Pairs)
    assert found.get("a") is found.get("b")
    assert found.get("a") == ["shared"]
    assert [key for key, _ in found.items] == ["a", "b", 3]


def test_what_a_dictionary_names_is_gathered_once() -> None:
    """A large one may be the state of a million objects, and each is asked for its fields."""
    found = read_pickle(pickle.dumps({"a": 1, 2: 3, "b": None, "c": "d"})).value
    assert isinstance(found, Pairs)
    assert found.named is found.named
    assert found.named == {"a": 1, "b": None, "c": "d"}
    assert (found.has("b"), found.has("x"), found.get("x")) == (True, False, None)


def test_persistent_ids() -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            return ("storage", "7") if obj is Ellipsis else None

    target = io.BytesIO()
    Pickler(target, protocol=2).dump([...])
    found = read_pickle(target.getvalue()).value
    assert isinstance(found, list)
    assert isinstance(found[0], Persistent)
    assert found[0].id == ("storage", "7")


def test_a_pickle_cut_anywhere_is_incomplete() -> None:
    data = pickle.dumps({"a": [1, 2.5, "x" * 300], "b": Evil("/x")}, protocol=4)
    for length in range(len(data)):
        with pytest.raises((IncompleteError, DamagedError)):
            read_pickle(data[:length])
    for length in (0, 1, len(data) // 2, len(data) - 1):
        with pytest.raises(IncompleteError):
            read_pickle(data[:length])


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04.",  # nothing to return
        b"\x80\x06N.",  # a protocol of later
        b"\x80\x04\x82\x01.",  # an extension
        b"\x80\x04\x97.",  # a buffer of elsewhere
        b"\x80\x04h\x05.",  # nothing is kept there
        b"\x80\x04t.",  # no mark
        b"\x80\x04NNa.",  # appended to nothing
        b"\x80\x04(NNNd.",  # a key without a value
        b"\x80\x04K\x01K\x02\x93.",  # a class named by numbers
        b"S'unclosed\n.",
        b"cmodule without an end",
        b"I" + b"9" * 6000 + b"\n.",  # more digits than Python takes
        b"Ffloat\n.",
    ],
)
def test_nonsense_is_damage(data: bytes) -> None:
    with pytest.raises(ProblemError):
        read_pickle(data)


def test_a_value_may_contain_itself(tmp_path: Path) -> None:
    loop: list[object] = []
    loop.append({"x": (loop,)})
    with zipfile.ZipFile(tmp_path / "loop.pt", "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps(loop))
    found = inspect(tmp_path / "loop.pt", Level.CONTENT)
    assert found is not None
    assert found.words == "complete"


def peak_of(data: bytes) -> int:
    """Bytes that reading a pickle takes at most; it must be refused, or end."""
    tracemalloc.start()
    try:
        with pytest.raises(ProblemError):
            read_pickle(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "piece", [b"]", b"}", b"(", b")", b"N", b"K\x01", b"]2", b"\x8c\x00", b"]\x94", b"cx\ny\n"]
)
def test_what_a_pickle_builds_is_bounded(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured at an eighth of the limits: they are linear, and tracing is slow."""
    monkeypatch.setattr(limits, "PICKLE_MEMORY_BYTES_MAX", limits.PICKLE_MEMORY_BYTES_MAX // 64)
    monkeypatch.setattr(limits, "PICKLE_STEPS_MAX", limits.PICKLE_STEPS_MAX // 64)
    data = b"\x80\x04" + piece * (limits.PICKLE_STEPS_MAX + 10)
    assert peak_of(data) < 2.5 * limits.PICKLE_MEMORY_BYTES_MAX


# --- JSON, archives, sizes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 2_000_000,
        b'{"a":' * 100_000,
        b"[" * 50_000 + b"]" * 50_000,
        b"[1" + b",1" * 2_000_000,
    ],
)
def test_json_that_is_deep_or_wide(data: bytes) -> None:
    with pytest.raises((BeyondLimitsError, DamagedError)):
        parse_json(data, "it")


@pytest.mark.parametrize("data", [b"9" * 5000, b"\xff\xfe{\x00}\x00", b'"\xff"', b"{", b"", b"nul"])
def test_json_that_is_none(data: bytes) -> None:
    with pytest.raises(DamagedError):
        parse_json(data, "it")


def deflated(path: Path, sizes: dict[str, int]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, size in sizes.items():
            archive.writestr(name, bytes(size))


def test_an_archive_that_inflates_to_much(tmp_path: Path) -> None:
    deflated(tmp_path / "bomb.pt", {"a/data.pkl": limits.INFLATE_BYTES_MAX + 1})
    tracemalloc.start()
    found = inspect(tmp_path / "bomb.pt", Level.CONTENT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found is not None
    assert "larger than what is read" in found.notes[0]
    assert peak < 8 * MIB


def test_records_that_overlap(tmp_path: Path) -> None:
    """One megabyte that a thousand records claim would be read a thousand times."""
    inside = b""
    entries: list[bytes] = []
    for name in ("a.npy", "b.npy", "c.npy"):  # each one holds the one before it, header and all
        with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
            array = io.BytesIO()
            np.save(array, np.frombuffer(inside or bytes(MIB), np.uint8))
            archive.writestr(name, array.getvalue())
        data = (tmp_path / "x.npz").read_bytes()
        begin, end = data.index(b"PK\x01\x02"), data.rindex(b"PK\x05\x06")
        moved = data.index(inside) if inside else 0
        entries = [_moved(each, moved) for each in entries] + [data[begin:end]]
        inside = data[:begin]
    directory = b"".join(entries)
    last = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 3, 3, len(directory), len(inside), 0)
    (tmp_path / "x.npz").write_bytes(inside + directory + last)
    found = inspect(tmp_path / "x.npz", Level.CONTENT)
    assert found is not None
    assert found.state is State.DAMAGED
    assert "overlaps" in found.words


def _moved(entry: bytes, by: int) -> bytes:
    """Of a record that lies so many bytes further on."""
    return entry[:42] + struct.pack("<L", int.from_bytes(entry[42:46], "little") + by) + entry[46:]


@pytest.mark.parametrize("length", [1 << 31, 1 << 62, (1 << 64) - 1])
def test_a_header_that_claims_to_be_huge(tmp_path: Path, length: int) -> None:
    (tmp_path / "x.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    found = inspect(tmp_path / "x.safetensors")
    assert found is not None
    assert found.state is State.DAMAGED


def test_a_sparse_file_of_a_terabyte_takes_no_time(tmp_path: Path) -> None:
    for name in ("x.pt", "x.safetensors", "x.npz", "x.h5", "x.keras", "checkpoint_1"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 40)
        began = time.process_time()
        found = inspect(tmp_path / name)
        assert found is not None
        assert found.state is not State.COMPLETE
        assert time.process_time() - began < 5, name


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", "a\0b", "a//b", "./a"])
def test_names_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (tmp_path / "x").write_bytes(b"secret")
    index = {"weight_map": {"w": name}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    found = inspect(directory)
    assert found is not None
    assert found.state in (State.DAMAGED, State.INCOMPLETE)
    with pytest.raises(ProblemError), Place(directory).open(name or "a//") as reader:
        reader.head(1)


@pytest.mark.parametrize("kind", ["pipe", "device", "loop", "socket"])
def test_what_is_no_file_is_never_opened(tmp_path: Path, kind: str) -> None:
    directory = tmp_path / "checkpoint-5"
    directory.mkdir()
    path = directory / "model.safetensors"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path)
    else:
        import socket

        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        server.close()
    found = inspect(directory, Level.CONTENT)
    assert found is not None
    assert found.state is not State.COMPLETE
    assert inspect(path) is None or inspect(path).state is not State.COMPLETE  # type: ignore[union-attr]


def test_a_directory_with_too_many_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ENTRIES_MAX", 50)
    directory = tmp_path / "checkpoint-5"
    directory.mkdir()
    for number in range(60):
        (directory / f"{number}.safetensors").touch()
    found = inspect(directory)
    assert found is not None
    assert found.state is State.UNKNOWN


def test_the_headers_of_one_checkpoint_have_a_budget(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(1000))
    place = Place(tmp_path, Budget(1500))
    with place.open("x") as reader:
        reader.read(0, 1000)
        with pytest.raises(BeyondLimitsError):
            reader.read(0, 1000)


# --- at random ----------------------------------------------------------------------------------


def test_hostile_checkpoints(seed: int, tmp_path: Path) -> None:
    """As scripts/fuzz-checkpoints, which does it for longer. In a process of its own: what other
    tests have taken is none of its memory.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        states, peak_bytes = pool.submit(exercise_many, seed, tmp_path).result()
    assert states == {"complete", "incomplete", "damaged", "unknown", "none"}
    assert peak_bytes < 1 << 30


def exercise_many(seed: int, directory: Path) -> tuple[set[str], int]:
    """The states of 300 hostile checkpoints, and how much memory this process had at most."""
    states = set()
    for index in range(300):
        base, notes = fuzz_checkpoints.make(seed, index)
        try:
            states.add(hostile_checkpoints.exercise(base, directory).state)
        except Exception as error:
            error.add_note(f"--seed {seed} --only {index}: {notes}")
            raise
    status = Path("/proc/self/status").read_text()  # ru_maxrss has that of the process before exec
    (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return states, int(peak) << 10
