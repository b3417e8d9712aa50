"""DCP by way of ``cxlfs.torch``: PyTorch reads what ours writes and the other way round; what fails
leaves the checkpoint before; ``async_save`` has the state when it returns, and commits behind.
"""

from __future__ import annotations

import errno
import gc
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cxlfs.torch as ours
from cxlfs import client
from cxlfs.checkpoint import Level, inspect
from tests.frameworks.conftest import Twice
from tests.support.mount import Workplace
from tests.support.torch_ranks import run_program

pytestmark = [
    pytest.mark.frameworks("torch"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

torch = pytest.importorskip(
    "torch", reason="torch is not installed (scripts/test --frameworks installs it)"
)

import torch.distributed.checkpoint as dcp  # noqa: E402  it wants torch

from tests.frameworks.test_torch import assert_same  # noqa: E402  it wants torch

BASE = torch.rand(3_000_000)


def make_state(step: int) -> dict[str, Any]:
    """Whole storages and parts of them, of several types and layouts, and what is no tensor."""
    generator = torch.Generator().manual_seed(step)
    return {
        "large": torch.rand(1 << 20, generator=generator),
        "model": {
            "part": (BASE + step)[100:2_000_100],
            "parameter": torch.nn.Parameter(torch.rand(300, 40, generator=generator)),
            "transposed": torch.rand(30, 40, generator=generator).t(),
            "strided": (BASE + step)[::7],
            "conjugated": torch.rand(9, dtype=torch.complex64, generator=generator).conj(),
        },
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(float(step)),
        "half": torch.full((513,), step, dtype=torch.bfloat16),
        "other": {"step": step, "list": [step, "x"]},
    }


def save(directory: Path, step: int, **arguments: Any) -> None:
    dcp.save(
        make_state(step), storage_writer=ours.StorageWriter(directory, **arguments), no_dist=True
    )


def loaded(reader: Any) -> dict[str, Any]:
    state = make_state(0)
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def has_step(directory: Path, step: int) -> None:
    for reader in (ours.StorageReader, dcp.FileSystemReader):
        assert_same(loaded(reader(directory)), make_state(step))


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("arguments", [{}, {"thread_count": 1}, {"single_file_per_rank": False}])
def test_pytorch_reads_it(
    mnt: Path, tmp_path: Path, twice: Twice, arguments: dict[str, Any], *, on_store: bool
) -> None:
    directory = (mnt if on_store else tmp_path) / "dcp"
    before = client.counts()
    save(directory, 1, **arguments)
    save(directory, 2, **arguments)
    if on_store:
        assert client.counts().direct_bytes - before.direct_bytes > 24_000_000
    theirs = tmp_path / "theirs"
    threads = arguments.get("thread_count", 2)
    single = arguments.get("single_file_per_rank", True)
    writer = dcp.FileSystemWriter(theirs, single_file_per_rank=single, thread_count=threads)
    dcp.save(make_state(2), storage_writer=writer, no_dist=True)
    assert {p.name for p in directory.iterdir()} == {p.name for p in theirs.iterdir()}
    assert sum(p.stat().st_size for p in directory.iterdir()) == pytest.approx(
        sum(p.stat().st_size for p in theirs.iterdir()), rel=0.001
    )
    twice(lambda: has_step(directory, 2))
    found = inspect(directory, Level.CONTENT)
    assert found is not None
    assert found.words == "complete"


def test_it_reads_what_pytorch_wrote(mnt: Path, twice: Twice) -> None:
    directory = mnt / "dcp"
    dcp.save(
        make_state(3), storage_writer=dcp.FileSystemWriter(directory, thread_count=2), no_dist=True
    )
    before = client.counts()
    has_step(directory, 3)
    assert client.counts().mapped_bytes - before.mapped_bytes > 13_000_000
    twice(lambda: has_step(directory, 3))


def test_nothing_is_left_to_pytorch(mnt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_arguments: object) -> None:
        raise AssertionError

    save(mnt / "ours", 1)
    dcp.save(make_state(1), storage_writer=dcp.FileSystemWriter(mnt / "theirs"), no_dist=True)
    monkeypatch.setattr(dcp.FileSystemReader, "read_data", never)
    for name in ("ours", "theirs"):
        assert_same(loaded(ours.StorageReader(mnt / name)), make_state(1))


def test_what_it_does_not_know_is_left_to_pytorch(mnt: Path) -> None:
    """Archives of another byte order, and what is no archive."""
    save(mnt / "dcp", 1)
    shard = max((mnt / "dcp").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = shard.read_bytes()
    assert b"little" in data
    shard.write_bytes(data.replace(b"little", b"LITTLE"))
    with pytest.raises(dcp.api.CheckpointException) as caught:
        loaded(ours.StorageReader(mnt / "dcp"))
    (failure,) = (error for error, _ in caught.value.failures.values())
    assert "Unknown endianness" in str(failure)


def test_loaded_tensors_are_their_own(mnt: Path) -> None:
    save(mnt / "dcp", 1)
    state = loaded(ours.StorageReader(mnt / "dcp"))
    version = state["large"]._version
    dcp.load(state, storage_reader=ours.StorageReader(mnt / "dcp"), no_dist=True)
    assert state["large"]._version > version
    state["large"].fill_(7)
    has_step(mnt / "dcp", 1)


class Refusing(dcp.DefaultSavePlanner):  # type: ignore[misc]  # torch is not typed here
    """Like a device that fails in the middle."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "half":
            raise KeyError("the device is gone")
        return super().resolve_data(write_item)


@pytest.mark.parametrize("arguments", [{}, {"thread_count": 3}, {"single_file_per_rank": False}])
def test_what_a_thread_meets_is_raised_and_nothing_has_changed(
    place: Workplace, arguments: dict[str, Any]
) -> None:
    """PyTorch's own writer says nothing of it, and its metadata lacks what that thread had."""
    directory = place.mountpoint / "dcp"
    save(directory, 1, **arguments)
    place.announced.append("reverted: the previous version is back")
    for where in (directory, place.mountpoint / "new"):
        writer = ours.StorageWriter(where, **arguments)
        with pytest.raises(dcp.api.CheckpointException) as caught:
            dcp.save(make_state(2), storage_writer=writer, planner=Refusing(), no_dist=True)
        (failure,) = (error for error, _ in caught.value.failures.values())
        assert isinstance(failure, KeyError)
    assert not list(place.mountpoint.glob("new/.metadata"))
    if arguments.get("single_file_per_rank", True):
        assert list(place.mountpoint.glob("new/*")) == []
        has_step(directory, 1)


def test_damage_is_told_before_it_is_in_a_tensor(place: Workplace) -> None:
    directory = place.mountpoint / "dcp"
    save(directory, 1)
    needle = make_state(1)["large"].numpy().tobytes()[1 << 20 : (1 << 20) + 256]
    at = place.source.read_bytes().index(needle)
    place.announced.append("damage|checksum|data")
    with place.source.open("r+b") as medium:
        medium.seek(at + 5)
        medium.write(bytes([needle[5] ^ 0x40]))
    try:
        with pytest.raises(dcp.api.CheckpointException) as caught:
            loaded(ours.StorageReader(directory))
        (failure,) = (error for error, _ in caught.value.failures.values())
        assert isinstance(failure, OSError)
        assert failure.errno == errno.EIO
        assert "damaged: bytes" in str(failure)
    finally:
        with place.source.open("r+b") as medium:
            medium.seek(at)
            medium.write(needle)
    del caught, failure  # which refer to frames that have the mapping
    gc.collect()
    has_step(directory, 1)


def test_what_is_on_a_device_goes_through_pieces_of_host_memory(
    mnt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a device: memory that counts as one, copied from by the same calls."""
    from cxlfs.adapters.torch import tensors

    staged: list[int] = []
    copy = tensors.Staging.pieces

    def counted(self: tensors.Staging, raw: Any) -> Iterator[memoryview]:
        for piece in copy(self, raw):
            staged.append(len(piece))
            yield piece

    monkeypatch.setattr(tensors, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(tensors, "is_on_host", lambda _tensor: False)
    monkeypatch.setattr(tensors.Staging, "pieces", counted)
    save(mnt / "dcp", 4)
    monkeypatch.undo()
    assert max(staged) == 1 << 20
    assert sum(staged) >= 12_000_000  # what is not in one piece is copied as a whole
    has_step(mnt / "dcp", 4)


RANKS = """
import sys, warnings
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
import cxlfs.torch as ours
from tests.support.torch_ranks import say, start

def state_of(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(600 * 700, dtype=torch.float32).reshape(600, 700) * (step + 1)
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "copied": distribute_tensor(whole, mesh, [Replicate()]),
        "step": step,
    }

def saves(path, beside):
    state = state_of(5)
    if beside:
        pending = ours.async_save(state, checkpoint_id=path)
        for name in ("rows", "columns", "copied"):
            state[name].to_local().fill_(-1)
        assert pending.result(timeout=60).state_dict_metadata
    else:
        dcp.save(state, storage_writer=ours.StorageWriter(path))

def loads(path, name):
    reader = {"ours": ours.StorageReader, "torchs": dcp.FileSystemReader}[name](path)
    state, wanted = state_of(0), state_of(5)
    dcp.load(state, storage_reader=reader)
    for name in ("rows", "columns", "copied"):
        assert torch.equal(state[name].to_local(), wanted[name].to_local()), name
    assert state["step"] == 5
    say("loaded")

for beside in (False, True):
    path = f"{sys.argv[1]}/{beside}"
    assert start(2, saves, path, beside)
    assert start(2, loads, path, "torchs")
    assert start(3, loads, path, "ours")
    assert start(1, loads, path, "ours")
"""


def test_ranks_save_and_other_numbers_of_ranks_load(mnt: Path, tmp_path: Path) -> None:
    assert run_program(RANKS, tmp_path, mnt).count("loaded") == 12


# --- behind the program ---------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, no file that is written can be closed."""
    opened = threading.Event()
    close = client.File.close

    def late(self: client.File) -> None:
        if not self.closed and self.writable():
            assert opened.wait(60)
        close(self)

    monkeypatch.setattr(client.File, "close", late)
    yield opened
    opened.set()


def spoil(state: dict[str, Any]) -> None:
    """As training does."""
    with torch.no_grad():
        for value in [*state.values(), *state["model"].values()]:
            if isinstance(value, torch.Tensor):
                value.fill_(-7)


@pytest.mark.parametrize("given", ["name", "writer"])
def test_the_state_may_change_when_it_returns(mnt: Path, gate: threading.Event, given: str) -> None:
    state = make_state(6)
    chosen: dict[str, Any] = {"checkpoint_id": mnt / "dcp"}
    if given == "writer":
        chosen = {"storage_writer": ours.StorageWriter(mnt / "dcp", thread_count=3)}
    saved = ours.async_save(state, **chosen, no_dist=True)
    spoil(state)
    assert not saved.done()
    assert not (mnt / "dcp" / ".metadata").exists()
    gate.set()
    assert saved.result(timeout=60).state_dict_metadata
    has_step(mnt / "dcp", 6)


def test_a_later_one_does_not_overtake(mnt: Path, gate: threading.Event) -> None:
    first = ours.async_save(make_state(1), checkpoint_id=mnt / "dcp", no_dist=True)
    later: list[Any] = []

    def begin() -> None:
        later.append(ours.async_save(make_state(2), checkpoint_id=mnt / "dcp", no_dist=True))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert later == []
    gate.set()
    thread.join()
    later[0].result(timeout=60)
    assert first.done()
    has_step(mnt / "dcp", 2)


def test_what_it_meets_is_in_the_future_and_in_the_log(
    place: Workplace, caplog: pytest.LogCaptureFixture
) -> None:
    directory = place.mountpoint / "dcp"
    save(directory, 1)
    place.announced.append("reverted: the previous version is back")
    with caplog.at_level(logging.ERROR, "cxlfs.torch"):
        failed = ours.async_save(
            make_state(2), checkpoint_id=directory, planner=Refusing(), no_dist=True
        )
        assert isinstance(failed.exception(timeout=60), dcp.api.CheckpointException)
    assert "the device is gone" in caplog.text
    ours.async_save(make_state(3), checkpoint_id=directory, no_dist=True).result(timeout=60)
    has_step(directory, 3)
    with pytest.raises(ValueError, match="checkpoint_id"):
        ours.async_save({})
    theirs = dcp.FileSystemWriter(place.mountpoint / "theirs")
    ours.async_save(make_state(4), storage_writer=theirs, no_dist=True).result(timeout=60)
    has_step(place.mountpoint / "theirs", 4)


KILLED = """
import sys, threading, warnings
warnings.simplefilter("ignore")
import cxlfs.torch
from cxlfs import client
from tests.frameworks.test_torch_checkpoint import make_state
def never(self):
    threading.Event().wait()
client.File.close = never
saved = cxlfs.torch.async_save(make_state(2), checkpoint_id=sys.argv[1], no_dist=True)
print("copied", flush=True)
sys.stdin.read()
"""


def test_killed_between_copy_and_commit_the_old_one_is_there(place: Workplace) -> None:
    place.announced.append("the writer was killed")
    directory = place.mountpoint / "dcp"
    save(directory, 1)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "copied\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    has_step(directory, 1)


def test_a_child_of_fork_has_its_own_turn(mnt: Path, gate: threading.Event) -> None:
    from cxlfs.adapters.torch import behind

    saved = ours.async_save(make_state(1), checkpoint_id=mnt / "dcp", no_dist=True)
    assert behind._turn.locked()
    child = fork(lambda: not behind._turn.locked())
    gate.set()
    saved.result(timeout=60)
    assert child == 0


def fork(check: Callable[[], bool]) -> int:
    """How a child ended: 0 where what it looked at was so."""
    import os
    import warnings

    with warnings.catch_warnings():  # threads of this process are what it is about
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os._exit(0 if check() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
