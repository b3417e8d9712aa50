"""``cxlfs.torch``: what ``torch.save`` and ``torch.load`` do, bit for bit, without their copies."""

from __future__ import annotations

import errno
import gc
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cxlfs.torch as ours
from cxlfs import client
from tests.frameworks.conftest import Twice
from tests.support.mount import Workplace

pytestmark = [pytest.mark.frameworks("torch"), pytest.mark.slow]

torch = pytest.importorskip(
    "torch", reason="torch is not installed (scripts/test --frameworks installs it)"
)

from tests.frameworks.test_torch import assert_same, make_state  # noqa: E402  it wants torch


def shapes() -> dict[str, Any]:
    base = torch.arange(300_000, dtype=torch.float32)
    return {
        "base": base,
        "view": base[1000:2000].reshape(10, 100).t(),
        "strided": base[::7],
        "expanded": torch.ones(3, 1).expand(3, 5000),
        "empty": torch.empty(0, 3),
        "bf16": torch.randn(513).bfloat16(),
        "nan": torch.tensor([float("nan"), -0.0]),
        "sparse": torch.eye(100).to_sparse(),
        "parameter": torch.nn.Parameter(torch.randn(5, 5)),
        "nested": [{"x": (torch.zeros(2), "text", 3, None)}],
    }


STATES: dict[str, Callable[[], object]] = {
    "trainer": lambda: make_state(1),
    "shapes": shapes,
    "tensor": lambda: torch.rand(1_000_003),
    "number": lambda: 5,
    "large": lambda: [torch.rand(3_000_001), torch.rand(7), torch.rand(5_000_003)],  # by threads
}


@pytest.mark.parametrize("crc32", [False, True])
@pytest.mark.parametrize("name", STATES)
def test_the_archive_is_the_one_of_torch(mnt: Path, name: str, *, crc32: bool) -> None:
    state = STATES[name]()
    before = torch.serialization.get_crc32_options()
    ours.save(state, mnt / "a.pt", crc32=crc32)
    assert torch.serialization.get_crc32_options() == before
    expected = io.BytesIO()
    torch.serialization.set_crc32_options(crc32)
    try:
        torch.save(state, expected)
    finally:
        torch.serialization.set_crc32_options(before)
    # The serialization id is a hash of the content: nothing in it is of chance.
    assert (mnt / "a.pt").read_bytes() == expected.getvalue()


@pytest.mark.parametrize("name", STATES)
def test_round_trip(mnt: Path, twice: Twice, name: str) -> None:
    state = STATES[name]()
    path = mnt / "a.pt"
    counted = client.counts()
    ours.save(state, path)
    went_directly = client.counts().direct_bytes - counted.direct_bytes
    assert went_directly > 0 or name == "number"  # too little to be worth a lease

    def compare() -> None:
        with path.open("rb") as file:
            theirs = torch.load(file, weights_only=True)
        counted = client.counts().mapped_bytes
        loaded = ours.load(path)
        assert client.counts().mapped_bytes - counted == path.stat().st_size
        if name != "shapes":
            assert_same(loaded, state)
        else:
            assert isinstance(loaded, dict)
            assert loaded["view"].untyped_storage().data_ptr() == loaded["base"].data_ptr()
            assert loaded["view"].stride() == theirs["view"].stride()
            loaded["sparse"], theirs["sparse"] = (
                each["sparse"].to_dense() for each in (loaded, theirs)
            )
        assert_same(loaded, theirs)

    twice(compare)
    gc.collect()


def test_writing_to_a_tensor_changes_no_file(mnt: Path) -> None:
    path = mnt / "a.pt"
    ours.save({"a": torch.zeros(1 << 20), "b": torch.ones(1 << 20)}, path)
    before = path.read_bytes()
    first: Any = ours.load(path)
    second: Any = ours.load(path)
    first["a"].fill_(7)
    first["b"] += 1
    assert torch.equal(first["a"], torch.full((1 << 20,), 7.0))
    assert torch.equal(first["b"], torch.full((1 << 20,), 2.0))
    assert torch.equal(second["a"], torch.zeros(1 << 20))
    assert path.read_bytes() == before
    assert torch.equal(torch.load(path)["b"], torch.ones(1 << 20))


@pytest.mark.parametrize("how", ["overwritten", "removed"])
def test_tensors_outlive_their_file(mnt: Path, how: str) -> None:
    path = mnt / "a.pt"
    ours.save(torch.full((1 << 20,), 3.0), path)
    loaded: Any = ours.load(path)
    for value in range(4):
        if how == "removed":
            path.unlink()
        ours.save(torch.full((1 << 20,), float(value)), path)
    assert torch.equal(loaded, torch.full((1 << 20,), 3.0))
    assert torch.equal(torch.load(path), torch.full((1 << 20,), 3.0))


class Unpicklable:
    def __reduce__(self) -> str:
        raise RuntimeError("not to be saved")


def test_what_cannot_be_pickled_leaves_the_file_alone(mnt: Path) -> None:
    path = mnt / "a.pt"
    ours.save({"step": 1}, path)
    with pytest.raises(RuntimeError, match="not to be saved"):
        ours.save({"step": 2, "bad": Unpicklable()}, path)
    assert torch.load(path) == {"step": 1}
    with pytest.raises(RuntimeError, match="not to be saved"):
        ours.save(Unpicklable(), mnt / "new.pt")
    assert not (mnt / "new.pt").exists()


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("is_new", [True, False])
def test_an_exception_in_the_middle(
    place: Workplace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    on_store: bool,
    is_new: bool,
) -> None:
    """``torch.save`` itself leaves an archive there that ends as one."""
    path = (place.mountpoint if on_store else tmp_path) / "a.pt"
    if not is_new:
        place.announced.append("reverted: the previous version is back")
        ours.save([torch.ones(2_000_000)], path)
        before = path.read_bytes()
    written = 0
    store = client.File.write

    def failing(self: client.File, data: Any, /) -> int:
        nonlocal written
        written += memoryview(data).nbytes
        if written > 5_000_000:
            raise KeyboardInterrupt
        return store(self, data)

    monkeypatch.setattr(client.File, "write", failing)
    with pytest.raises(KeyboardInterrupt):
        ours.save([torch.rand(1_000_000) for _ in range(5)], path)
    monkeypatch.undo()
    gc.collect()  # the writer's end, too
    if is_new:
        assert not path.exists()
    else:
        assert path.read_bytes() == (before if on_store else b"")
    assert [entry.name for entry in path.parent.iterdir()] == [path.name] * (not is_new)


def test_a_name_that_cannot_be_opened(mnt: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ours.save(1, mnt / "missing" / "a.pt")
    with pytest.raises(FileNotFoundError):
        ours.load(mnt / "missing.pt")


KILLED = """
import sys, torch, cxlfs.torch
from cxlfs import client
store = client.File.write
def slow(self, data):
    done = store(self, data)
    if len(data) > 1000:
        self.flush()
        print("in the middle", flush=True)
        sys.stdin.read()
    return done
client.File.write = slow
cxlfs.torch.save([torch.rand(1000000), torch.rand(1000000)], sys.argv[1])
"""


def test_killed_in_mid_save_the_old_one_is_there(place: Workplace) -> None:
    place.announced.append("the writer was killed")
    path = place.mountpoint / "a.pt"
    ours.save({"step": 1, "w": torch.ones(1 << 20)}, path)
    before = path.read_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in the middle\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert path.read_bytes() == before


def test_damage_is_told_before_a_tensor_is_there(place: Workplace) -> None:
    """A bit of the medium, changed behind the daemon's back while nobody has it open."""
    path = place.mountpoint / "a.pt"
    marker = torch.arange(1 << 19)
    ours.save({"a": torch.rand(1 << 20), "m": marker}, path)
    image = place.source.read_bytes()
    needle = marker.numpy().tobytes()[1 << 20 : (1 << 20) + 256]
    at = image.index(needle)
    in_file = path.read_bytes().index(needle)
    place.announced.append("damage|checksum|data")
    with place.source.open("r+b") as medium:
        medium.seek(at + 5)
        medium.write(bytes([image[at + 5] ^ 0x40]))
    try:
        with pytest.raises(OSError, match="damaged: bytes") as caught:
            ours.load(path)
        assert caught.value.errno == errno.EIO
        assert caught.value.filename == str(path)
        start, end = (int(w) for w in str(caught.value.strerror).split("bytes ")[1].split(" to "))
        assert start <= in_file + 5 < end
        unseen: Any = ours.load(path, verify=False)
        assert not torch.equal(unseen["m"], marker)
        del unseen
    finally:
        with place.source.open("r+b") as medium:
            medium.seek(at)
            medium.write(image[at : at + 256])
    assert torch.equal(torch.load(path)["m"], marker)


def test_weights_only_is_kept(mnt: Path) -> None:
    path = mnt / "a.pt"
    ours.save({"where": os.getcwd}, path)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        ours.load(path)
    assert ours.load(path, weights_only=False) == {"where": os.getcwd}
    with pytest.raises(RuntimeError, match="explicit pickle_module"):
        ours.load(path, pickle_module=pickle, weights_only=True)
    assert ours.load(path, pickle_module=pickle) == {"where": os.getcwd}


def test_what_is_not_ours_is_torchs(mnt: Path, tmp_path: Path) -> None:
    state = make_state(4)
    memory = io.BytesIO()
    ours.save(state, memory)
    memory.seek(0)
    assert_same(ours.load(memory), state)
    ours.save(state, mnt / "old.pt", _use_new_zipfile_serialization=False)
    assert_same(ours.load(mnt / "old.pt"), state)
    ours.save(state, tmp_path / "a.pt")
    for mmap in (None, True, False):
        assert_same(ours.load(tmp_path / "a.pt", mmap=mmap), state)
    (mnt / "empty.pt").touch()
    with pytest.raises(EOFError):
        ours.load(mnt / "empty.pt")


def test_other_devices_and_map_location(mnt: Path) -> None:
    path = mnt / "a.pt"
    ours.save({"w": torch.rand(1000)}, path)
    on_meta: Any = ours.load(path, map_location="meta")
    assert on_meta["w"].device.type == "meta"
    seen: list[str] = []

    def place_of(storage: Any, location: str) -> Any:
        seen.append(location)
        return storage

    assert_same(ours.load(path, map_location=place_of), torch.load(path))
    assert seen == ["cpu"]


def test_threads_save_and_load(mnt: Path) -> None:
    states = [make_state(seed) for seed in range(4)]
    failed: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for _ in range(3):
                ours.save(states[index], mnt / f"{index}.pt", crc32=index % 2 == 0)
                assert_same(ours.load(mnt / f"{index}.pt"), states[index])
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
