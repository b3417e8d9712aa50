"""PyTorch: ``torch.save``, every way of ``torch.load``, and distributed checkpoints."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.conftest import Twice
from tests.support.mount import Workplace

pytestmark = [pytest.mark.frameworks("torch"), pytest.mark.slow]

torch = pytest.importorskip(
    "torch", reason="torch is not installed (scripts/test --frameworks installs it)"
)

DTYPES = ("float32", "float16", "bfloat16", "int64", "bool", "complex64")


def make_state(seed: int, scale: int = 1) -> dict[str, Any]:
    """What a trainer saves: tensors of model and optimizer, an empty, a shared one, numbers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"layer{i}.{name}": torch.rand(257 * scale, 1031, generator=generator).to(
            getattr(torch, name)
        )
        for i, name in enumerate(DTYPES)
    }
    torch.manual_seed(seed)
    model = torch.nn.Linear(512, 384)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(4, 512, generator=generator)).sum().backward()
    optimizer.step()
    return {
        "model": {**tensors, **model.state_dict(), "tied": tensors["layer0.float32"]},
        "optimizer": optimizer.state_dict(),
        "empty": torch.empty(0, 7),
        "scalar": torch.tensor(3.5),
        "step": seed,
        "losses": [0.5 / (i + 1) for i in range(100)],
    }


def assert_same(a: Any, b: Any) -> None:
    """Bit for bit, not number for number: NaN equals itself, -0.0 is not 0.0."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        raw_a, raw_b = (t.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        assert torch.equal(raw_a, raw_b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key, value in a.items():
            assert_same(value, b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_same(left, right)
    else:
        assert a == b


@pytest.mark.parametrize("how", ["plain", "mmap", "file object"])
def test_save_and_load(mnt: Path, twice: Twice, how: str) -> None:
    state = make_state(1)
    path = mnt / "checkpoint.pt"
    if how == "file object":
        with path.open("wb") as file:
            torch.save(state, file)
    else:
        torch.save(state, path)

    def compare() -> None:
        if how == "file object":
            with path.open("rb") as file:
                assert_same(torch.load(file), state)
        else:
            assert_same(torch.load(path, mmap=how == "mmap"), state)

    twice(compare)


def test_the_archive_is_the_one_that_another_file_system_gets(
    mnt: Path, tmp_path: Path, twice: Twice
) -> None:
    state = make_state(2)
    for directory in (mnt, tmp_path):
        torch.save(state, directory / "archive.pt")  # the archive holds its own name
    expected = (tmp_path / "archive.pt").read_bytes()
    twice(lambda: (mnt / "archive.pt").read_bytes() == expected)


def test_overwriting_one_name(mnt: Path, twice: Twice) -> None:
    """The habit that costs people their checkpoints: one name, again and again, growing too."""
    path = mnt / "last.pt"
    for step in range(1, 7):
        torch.save(make_state(step, scale=1 + step % 3), path)
    state = make_state(6, scale=1)
    twice(lambda: assert_same(torch.load(path), state))


def test_a_checkpoint_mapped_while_it_is_overwritten_by_rename(mnt: Path, twice: Twice) -> None:
    """A server maps the old weights while the trainer replaces them."""
    old, new = make_state(10), make_state(11)
    path, temporary = mnt / "weights.pt", mnt / "weights.pt.tmp"
    torch.save(old, path)
    mapped = torch.load(path, mmap=True)
    torch.save(new, temporary)
    temporary.rename(path)
    assert_same(mapped, old)
    del mapped
    twice(lambda: assert_same(torch.load(path), new))


def test_load_through_a_shared_mapping(place: Workplace, twice: Twice) -> None:
    """With MAP_SHARED torch opens the file for writing, and what is changed reaches the file."""
    state = make_state(20)
    path = place.mountpoint / "shared.pt"
    torch.save(state, path)

    def load() -> dict[str, Any]:
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            loaded: dict[str, Any] = torch.load(path, mmap=True)
        return loaded

    def compare() -> None:
        assert_same(load(), state)

    twice(compare)
    shared = load()
    shared["model"]["weight"][3, 5] = 42.0
    state["model"]["weight"][3, 5] = 42.0
    assert_same(load(), state)
    del shared
    place.remount()
    assert_same(torch.load(path), state)


@pytest.fixture
def _one_process() -> Iterator[None]:
    """A process group of one: what a training script on one machine with one device has."""
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_distributed_checkpoint(mnt: Path, twice: Twice) -> None:
    """Shards overwritten in place, metadata by rename, one fsync for each file."""
    import torch.distributed.checkpoint as dcp

    directory = mnt / "step"
    state = {}
    for step in (1, 2):
        state = make_state(step)["model"]
        writer = dcp.FileSystemWriter(directory, thread_count=2, overwrite=True)
        dcp.save(state, storage_writer=writer)
    assert {p.name for p in directory.iterdir()} >= {".metadata", "__0_0.distcp", "__0_1.distcp"}

    def compare() -> None:
        loaded = {key: torch.zeros_like(value) for key, value in state.items()}
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(directory))
        assert_same(loaded, state)

    twice(compare)


@pytest.mark.usefixtures("_one_process")
def test_asynchronous_distributed_checkpoint(mnt: Path, twice: Twice) -> None:
    """Written by another thread while training would go on."""
    import torch.distributed.checkpoint as dcp

    state = make_state(30)["model"]
    directory = mnt / "async"
    dcp.async_save(state, storage_writer=dcp.FileSystemWriter(directory)).result(timeout=60)

    def compare() -> None:
        loaded = {key: torch.zeros_like(value) for key, value in state.items()}
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(directory))
        assert_same(loaded, state)

    twice(compare)
