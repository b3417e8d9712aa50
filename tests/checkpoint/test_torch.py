"""Files that the installed PyTorch writes: every tensor is where it is said to be, bit for bit."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from cxlfs.checkpoint import Checkpoint, Level, State, catalogue, inspect
from cxlfs.store.unit_archives import is_hollow
from tests.support.stores import new_store, write_file

pytestmark = [pytest.mark.frameworks("torch"), pytest.mark.slow]

torch = pytest.importorskip(
    "torch", reason="torch is not installed (scripts/test --frameworks installs it)"
)

DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8")
DTYPES += ("bool", "complex64", "complex128", "float8_e4m3fn", "uint16")


def tensors() -> dict[str, Any]:
    """Contiguous ones of every type, views, shared storages, an empty one."""
    torch.manual_seed(1)
    found = {}
    for name in DTYPES:
        raw = torch.randint(0, 2, (3 * 16 * 5,), dtype=torch.uint8)
        found[name] = raw.view(getattr(torch, name))
    base = torch.rand(10, 20)
    found |= {"view": base[3:5], "transposed": base.t(), "strided": base[::3, 1::4]}
    found |= {"tied": base, "empty": torch.empty(0, 7), "scalar": torch.tensor(2.5)}
    return found


def complete(path: Path) -> Checkpoint:
    found = inspect(path, Level.CONTENT)
    assert found is not None
    assert (found.words, found.notes) == ("complete", ())
    return found


@pytest.fixture(params=[True, False], ids=["crc32", "no crc32"])
def crc32(request: pytest.FixtureRequest) -> Iterator[None]:
    """PyTorch's switch of the checksums in its archives: without them all are 0."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(request.param)
    yield
    torch.serialization.set_crc32_options(before)


@pytest.mark.usefixtures("crc32")
@pytest.mark.parametrize("zipped", [True, False])
def test_every_tensor_of_torch_save(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "x.pt"
    saved = tensors()
    torch.save({"model": saved, "step": 12}, path, _use_new_zipfile_serialization=zipped)
    found = complete(path)
    assert found.step == 12
    data = path.read_bytes()
    assert {tensor.name for tensor in found.tensors} == {f"model.{name}" for name in saved}
    for tensor in found.tensors:
        original = saved[tensor.name.removeprefix("model.")]
        assert tensor.shape == tuple(original.shape)
        assert tensor.dtype == str(original.dtype).removeprefix("torch.")
        if original.is_contiguous() and original.numel():
            assert tensor.offset is not None
            piece = data[tensor.offset : tensor.offset + (tensor.size_bytes or 0)]
            assert piece == original.flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("zipped", [True, False])
def test_modules_optimizers_and_odd_values(tmp_path: Path, zipped: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(3, 4)).sum().backward()
    optimizer.step()
    saved = {
        "model": model,
        "state": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "sparse": torch.eye(3).to_sparse(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "odd": [{1, 2}, frozenset({3}), 1j, b"x", range(3), slice(1), Ellipsis, 1 << 100],
    }
    torch.save(saved, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    names = {tensor.name for tensor in complete(tmp_path / "x.pt").tensors}
    assert {"state.0.weight", "state.1.running_mean", "optimizer.state.0.exp_avg"} <= names
    assert {"random", "parameter", "model._modules.0._parameters.weight"} <= names


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_a_distributed_checkpoint(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    saved = {"w": torch.rand(8, 16), "b": torch.zeros(5, dtype=torch.bfloat16), "step": 3}
    dcp.save(saved, checkpoint_id=tmp_path / "step-3")
    found = complete(tmp_path / "step-3")
    assert {(t.name, t.dtype, t.shape) for t in found.tensors} == {
        ("w", "float32", (8, 16)),
        ("b", "bfloat16", (5,)),
        ("step", "bytes", ()),
    }
    dcp.save(saved, checkpoint_id=tmp_path / "step-3")
    assert complete(tmp_path / "step-3")


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_module_of_torchscript(tmp_path: Path) -> None:
    torch.jit.trace(torch.nn.Linear(3, 2), torch.ones(1, 3)).save(tmp_path / "x.pt")
    found = inspect(tmp_path / "x.pt", Level.CONTENT)
    assert found is not None
    assert found.words == "complete"


class _InMidSaveError(Exception):
    """Raised in some line of ``torch.save``."""


def _save_until(line: int, value: object, path: Path) -> bool:
    """``torch.save``, with an exception before the line that is executed so manieth; False: it has
    come.
    """
    lines = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal lines
        if frame.f_code is torch.serialization._save.__code__ and event == "line":
            lines += 1
            if lines == line:
                raise _InMidSaveError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        torch.save(value, path)
    except _InMidSaveError:
        return False
    finally:
        sys.settrace(before)
    return True


def test_archives_that_exceptions_end_early(tmp_path: Path) -> None:
    """Each is told by the store, too; what was finished before the exception is whole."""
    store = new_store(16 << 20)
    seen = set()
    for line in itertools.count(1):
        path = tmp_path / "x.pt"
        finished = _save_until(line, {"model": torch.ones(5), "other": torch.ones(7)}, path)
        found = inspect(path, Level.CONTENT)
        assert found is not None
        ino = write_file(store, 1, b"x.pt", path.read_bytes())
        hollow = is_hollow(store.namespace.get(ino).content)
        assert hollow == (found.state is State.INCOMPLETE), (line, found.words)
        assert hollow or found.words == "complete"
        seen.add(found.words)
        if finished:
            break
    store.close()
    assert len(seen) == 4  # without anything, without both storages, without one; complete


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("lost", "incomplete: nothing was stored of tensor w1"),
        ("larger", "damaged: the chunks of tensor w1 do not make it up"),
        ("moved", "damaged: the chunks of tensor w1 do not make it up"),
        ("left over", "complete"),
    ],
)
def test_metadata_that_contradicts_itself(tmp_path: Path, change: str, said: str) -> None:
    """What dcp.load refuses, or fills with nothing."""
    import pickle

    import torch.distributed.checkpoint as dcp

    directory = tmp_path / "step-1"
    state = {f"w{n}": torch.rand(8, 4) for n in range(3)}
    dcp.save(state, checkpoint_id=directory, no_dist=True)
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301  our own
    tensor = metadata.state_dict_metadata["w1"]
    if change == "lost":
        del metadata.storage_data[next(i for i in metadata.storage_data if i.fqn == "w1")]
    elif change == "larger":
        tensor.size = torch.Size([16, 4])
    elif change == "moved":
        tensor.chunks[0].sizes = torch.Size([4, 4])
    else:
        (directory / "__1_0.distcp").write_bytes(b"of an attempt of two ranks")
    path.write_bytes(pickle.dumps(metadata))
    found = inspect(directory, Level.CONTENT)
    assert found is not None
    assert found.words == said
    assert bool(found.notes) is (change == "left over")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_step_in_a_distributed_checkpoint(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    for name, step in (("a", 20), ("b", 10)):
        state = {"w": torch.ones(3), "train": {"global_step": step, "epoch": 1}}
        dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True)
    assert [entry.path.name for entry in catalogue(tmp_path)] == ["a", "b"]
