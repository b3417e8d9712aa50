"""What ``inspect`` and ``diff`` say of files of the installed PyTorch, and what it loads itself."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from cxlfs.checkpoint.tensors import Layout, Statistics, difference, layout_of, statistics
from cxlfs.checkpoint.tensors.compare import together
from cxlfs.checkpoint.tensors.dtypes import byte_values, item_type
from cxlfs.checkpoint.tensors.model import Part, StoredTensor
from tests.support.torch_ranks import run_program

pytestmark = [pytest.mark.frameworks("torch"), pytest.mark.slow]

torch = pytest.importorskip(
    "torch", reason="torch is not installed (scripts/test --frameworks installs it)"
)

FLOATS = ("float64", "float32", "float16", "bfloat16")
BYTES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
OTHERS = ("int64", "int32", "int16", "int8", "uint8", "bool", "uint16", "complex64", "complex128")


def tensors(seed: int) -> dict[str, Any]:
    """Every type, views, what shares a storage, what repeats, what is no number."""
    torch.manual_seed(seed)
    base = torch.randn(300, 257)
    found = {name: (base * 20).to(getattr(torch, name)) for name in (*FLOATS, *BYTES, *OTHERS)}
    special = base.clone()
    special[0, 0], special[7, 7], special[8, 8] = math.nan, math.inf, -math.inf
    found |= {"special": special, "special16": special.bfloat16(), "special8": special.half()}
    found |= {"view": base[3:50], "transposed": base.t(), "strided": base[::3, 1::4]}
    found |= {"tied": base, "tied_again": base, "empty": torch.empty(0, 7)}
    found |= {"scalar": torch.tensor(2.5), "expanded": base[:, :1].expand(300, 9)}
    found |= {"permuted": torch.randn(4, 5, 6).permute(2, 0, 1), "negative": -base.abs() - 1}
    return found


def as_double(tensor: Any) -> Any:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.contiguous())
    return tensor.to(torch.float64)


def laid_out(path: Path) -> Layout:
    found = layout_of(path)
    assert found is not None
    return found


def check(found: Statistics | str, tensor: Any) -> None:
    assert isinstance(found, Statistics), found
    wide = as_double(tensor)
    finite = wide[torch.isfinite(wide)]
    assert found.items == wide.numel()
    assert (found.nan, found.inf) == (int(wide.isnan().sum()), int(wide.isinf().sum()))
    if not finite.numel():
        assert found.minimum is found.maximum is found.mean is found.norm is None
        return
    assert (found.minimum, found.maximum) == (finite.min().item(), finite.max().item())
    scale = finite.abs().mean().item()
    assert found.mean == pytest.approx(finite.mean().item(), abs=1e-5 * scale)
    assert found.norm == pytest.approx(finite.norm().item(), rel=1e-5)


@pytest.mark.parametrize("is_zip", [True, False])
def test_statistics_and_items(tmp_path: Path, seed: int, is_zip: bool) -> None:
    wanted = tensors(seed)
    path = tmp_path / "a.pt"
    torch.save(wanted, path, _use_new_zipfile_serialization=is_zip)
    layout = laid_out(path)
    assert {each.name for each in layout.tensors} == set(wanted)
    for tensor, found in zip(layout.tensors, statistics(layout), strict=True):
        check(found, wanted[tensor.name])
        data = together(layout.home, tensor).tobytes()
        raw = wanted[tensor.name].contiguous().reshape(-1)
        assert data == bytes(raw.view(torch.uint8).numpy()) if len(raw) else not data


@pytest.mark.parametrize("name", BYTES)
def test_floats_of_eight_bits_are_those_of_torch(name: str) -> None:
    patterns = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    wanted = patterns.view(getattr(torch, name)).to(torch.float64)
    found = torch.from_numpy(byte_values(name).copy())
    assert torch.equal(found.nan_to_num(7777.0), wanted.nan_to_num(7777.0))


def test_every_type_of_torch_has_an_item_type_or_a_reason() -> None:
    packed = {"float4_e2m1fn_x2", "quint4x2", "quint2x4"}
    sub_byte = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
    sub_byte |= {f"bits{text}" for text in ("1x8", "2x4", "4x2", "8", "16")}
    names = {
        str(each).removeprefix("torch.")
        for each in vars(torch).values()
        if isinstance(each, torch.dtype)
    }
    assert {name for name in names if item_type(name) is None} <= packed | sub_byte


def test_differences_of_two_saves(tmp_path: Path, seed: int) -> None:
    before = tensors(seed)
    after = {name: each.clone() for name, each in before.items()}
    for name in (*FLOATS, "view", "transposed"):
        after[name] = (after[name].float() * 1.01).to(after[name].dtype)
    after["float8_e4m3fn"].view(torch.uint8)[3, 3] = 5
    after["int16"][4, 4] += 1
    after["special"][0, 0] = 1
    torch.save(before, tmp_path / "before.pt")
    torch.save(after, tmp_path / "after.pt")
    found = difference(laid_out(tmp_path / "before.pt"), laid_out(tmp_path / "after.pt"))
    assert not found.added
    assert not found.gone
    for each in found.tensors:
        one, other = before[each.name], after[each.name]
        raw = [t.contiguous().reshape(-1).view(torch.uint8).view(-1) for t in (one, other)]
        if each.is_shared:
            assert torch.equal(*raw)
            continue
        change = each.change
        assert change is not None, (each.name, each.reason)
        delta = (as_double(other) - as_double(one)).reshape(-1)
        measured = delta[torch.isfinite(delta)]
        assert math.sqrt(change.squares) == pytest.approx(measured.norm().item(), rel=1e-5)
        if not one.is_complex() and each.name != "expanded":
            size = one.element_size()
            pairs = [r.view(-1, size) for r in raw]
            assert change.changed == int((pairs[0] != pairs[1]).any(dim=1).sum())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints(tmp_path: Path, seed: int) -> None:
    """One rank: each tensor is one box in an archive in a file."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    torch.manual_seed(seed)
    wanted = {"w": torch.randn(70, 30), "half": torch.randn(999).half(), "t": torch.randn(5, 7).t()}
    changed = {name: each.clone() for name, each in wanted.items()}
    changed["w"][3, 3] = 7
    for name, state in (("before", wanted), ("after", changed)):
        dcp.save({**state, "step": 3}, checkpoint_id=tmp_path / name, no_dist=True)
    layouts = [laid_out(tmp_path / name) for name in ("before", "after")]
    named = {
        each.name: found
        for each, found in zip(layouts[0].tensors, statistics(layouts[0]), strict=True)
    }
    assert named.pop("step") == "it is an object, not a tensor"
    for name, found in named.items():
        check(found, wanted[name])
    found = {each.name: each for each in difference(*layouts).tensors}
    assert found["w"].change is not None
    assert found["w"].change.changed == 1
    assert found["half"].is_shared


def test_boxes_of_another_cut_are_compared(tmp_path: Path, seed: int) -> None:
    """A tensor of two boxes, and the same in one."""
    torch.manual_seed(seed)
    whole = torch.randn(10, 6)
    torch.save({"w": whole}, tmp_path / "a.pt")
    torch.save({"w0": whole[:4].clone(), "w1": whole[4:].clone()}, tmp_path / "b.pt")
    one, two = laid_out(tmp_path / "a.pt"), laid_out(tmp_path / "b.pt")
    parts = []
    for start, tensor in zip(((0, 0), (4, 0)), two.tensors, strict=True):
        (part,) = tensor.parts
        parts.append(Part(part.file, part.offset, part.size_bytes, start, part.shape, part.strides))
    cut = StoredTensor("w", "float32", (10, 6), tuple(parts))
    (found,) = difference(one, dataclasses.replace(two, tensors=(cut,))).tensors
    assert found.change is not None, found.reason
    assert (found.change.items, found.change.changed) == (60, 0)


RANKS = """
import sys, warnings
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.torch_ranks import start


def save(path, seed, delta):
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows, columns = torch.randn(101, 64), torch.randn(64, 33).bfloat16()
    rows[50, 3] += delta
    state = {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "columns": distribute_tensor(columns, mesh, [Shard(1)]),
        "whole": distribute_tensor(columns, mesh, [Replicate()]),
    }
    dcp.save(state, checkpoint_id=path)


warnings.simplefilter("ignore")
directory, seed = sys.argv[1], int(sys.argv[2])
assert start(2, save, f"{directory}/two", seed, 0)
assert start(3, save, f"{directory}/three", seed, 5)
"""


def test_shards_of_two_and_three_ranks_are_compared(tmp_path: Path, seed: int) -> None:
    """Rows and columns that each number of ranks cuts elsewhere."""
    run_program(RANKS, tmp_path, tmp_path, seed)
    torch.manual_seed(seed)
    rows, columns = torch.randn(101, 64), torch.randn(64, 33).bfloat16()
    two, three = laid_out(tmp_path / "two"), laid_out(tmp_path / "three")
    assert {len(each.parts) for each in three.tensors} == {1, 3}
    wanted = {"rows": rows, "columns": columns, "whole": columns}
    for tensor, found in zip(two.tensors, statistics(two), strict=True):
        check(found, wanted[tensor.name])
    changes = {each.name: each.change for each in difference(two, three, reads_all=True).tensors}
    assert {name: change and change.changed for name, change in changes.items()} == {
        "rows": 1,
        "columns": 0,
        "whole": 0,
    }
