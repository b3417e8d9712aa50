"""What ``inspect`` and ``diff`` compute, compared with NumPy; how they read, and hostile files."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import random
import shutil
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from cxlfs.checkpoint import zstd
from cxlfs.checkpoint.model import BeyondLimitsError, DamagedError, ProblemError, State
from cxlfs.checkpoint.place import Place
from cxlfs.checkpoint.tensors import (
    Layout,
    Statistics,
    decode_manifest,
    difference,
    family_of,
    layer_of,
    layout_of,
    manifest_of,
    statistics,
)
from cxlfs.checkpoint.tensors.blocks import BLOCK_BYTES, Buffer, access_of, blocks, spread
from cxlfs.checkpoint.tensors.compare import together
from cxlfs.checkpoint.tensors.dtypes import Kind, byte_values, item_type
from cxlfs.checkpoint.tensors.model import (
    Codec,
    Part,
    StoredTensor,
    dense_strides,
    span_items,
)
from cxlfs.checkpoint.tensors.reducing import Reducer
from cxlfs.checkpoint.tensors.statistics import NEVER_READ
from tests.support import fuzz_checkpoints, hostile_checkpoints
from tests.support.checkpoints import CASES, Case

from .conftest import Unpack

TOLERANCE = 1e-5


def laid_out(path: Path) -> Layout:
    found = layout_of(path)
    assert found is not None
    return found


def check(found: Statistics | str, values: np.ndarray[Any, Any]) -> None:
    """Against NumPy, in float64."""
    assert isinstance(found, Statistics), found
    if values.dtype.kind == "c":
        values = values.view(values.real.dtype)
    flat = values.reshape(-1)
    with np.errstate(invalid="ignore"):  # NaN that signal
        wide = flat.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    assert found.items == len(flat)
    assert found.nan == np.isnan(wide).sum()
    assert found.inf == np.isinf(wide).sum()
    if not len(finite):
        assert (found.minimum, found.maximum, found.mean, found.norm) == (None,) * 4
        return
    exact = flat if flat.dtype.kind in "iu" else finite
    assert found.minimum == exact.min().item()
    assert found.maximum == exact.max().item()
    assert found.mean == pytest.approx(finite.mean(), abs=TOLERANCE * np.abs(finite).mean())
    assert found.norm == pytest.approx(np.linalg.norm(finite), rel=TOLERANCE)


def arrays(rng: random.Random) -> dict[str, np.ndarray[Any, Any]]:
    """Every type of NumPy, and contents that are summed in each of the ways there are."""
    make = np.random.default_rng(rng.getrandbits(32))
    base = make.standard_normal((1001, 257))
    found: dict[str, np.ndarray[Any, Any]] = {
        name: (base * 50).astype(name)
        for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8")
    }
    for name in ("uint8", "uint16", "uint32", "uint64"):
        found[name] = make.integers(0, 1 << 8, 4097).astype(name)
    found["extremes"] = np.array([-(1 << 63), (1 << 63) - 1], dtype=np.int64)
    found["bool"] = base > 0
    found["complex64"] = (base + 1j * base[::-1]).astype(np.complex64)
    special = base.astype(np.float32)
    special[0, 0], special[3, 3], special[1000, 256] = np.nan, np.inf, -np.inf
    found["special"] = special
    found["only-nan"] = np.full(300, np.nan, dtype=np.float32)
    found["negative"] = -np.abs(base).astype(np.float32) - 1
    found["positive"] = np.abs(base).astype(np.float16) + 1
    found["zero"] = np.zeros((40, 40), dtype=np.float32)
    found["minus-zero"] = -np.zeros(300, dtype=np.float32)
    found["tiny"] = (base * 1e-30).astype(np.float32)
    found["huge"] = (base * 1e37).astype(np.float32)
    found["subnormal"] = (base * 1e-7).astype(np.float16)
    found["scalar"] = np.array(2.5, dtype=np.float32)
    found["empty"] = np.zeros((0, 7), dtype=np.float32)
    found["one-more"] = base.astype(np.float32).reshape(-1)[: 256 * 3 + 1]
    return found


def test_statistics_of_npz(tmp_path: Path, rng: random.Random) -> None:
    wanted = arrays(rng)
    wanted["fortran"] = np.asfortranarray(wanted["float32"])
    wanted["big-endian"] = wanted["float32"].astype(">f4")
    wanted["big-integers"] = wanted["int16"].astype(">i2")
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **wanted)  # type: ignore[arg-type]
        layout = laid_out(tmp_path / "a.npz")
        assert [each.name for each in layout.tensors] == list(wanted)
        for tensor, found in zip(layout.tensors, statistics(layout), strict=True):
            check(found, wanted[tensor.name])


def test_statistics_of_safetensors_and_npy(tmp_path: Path, rng: random.Random) -> None:
    wanted = arrays(rng)
    save_file(wanted, tmp_path / "a.safetensors")
    layout = laid_out(tmp_path / "a.safetensors")
    assert {each.name for each in layout.tensors} == set(wanted)
    for threads in (1, 3):
        for tensor, found in zip(layout.tensors, statistics(layout, threads=threads), strict=True):
            check(found, wanted[tensor.name])
    np.save(tmp_path / "a.npy", wanted["special"])
    layout = laid_out(tmp_path / "a.npy")
    check(statistics(layout)[0], wanted["special"])


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_statistics_of_hdf5(tmp_path: Path, rng: random.Random, libver: str) -> None:
    wanted = {name: arrays(rng)[name] for name in ("float64", "float16", "int32", "special")}
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as file:
        for name, values in wanted.items():
            file[f"layers/{name}"] = values
        file.create_dataset("chunked", data=wanted["float64"], chunks=(100, 100))
    layout = laid_out(tmp_path / "a.h5")
    seen = 0
    for tensor, found in zip(layout.tensors, statistics(layout), strict=True):
        if tensor.name == "chunked":
            assert (
                found == "the format says no place: it is compressed, cut up, or part of an index"
            )
            continue
        check(found, wanted[tensor.name.removeprefix("layers/")])
        seen += 1
    assert seen == len(wanted)


def test_one_file_read_with_another_order_of_bytes_has_changed(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(300, dtype="<f4"))
    layout = laid_out(tmp_path / "a.npy")
    (tensor,) = layout.tensors
    (found,) = difference(layout, layout).tensors
    assert found.is_shared
    turned = dataclasses.replace(tensor, dtype=">f4")
    assert turned.type not in (None, tensor.type)
    (found,) = difference(layout, dataclasses.replace(layout, tensors=(turned,))).tensors
    assert found.is_changed


@pytest.mark.parametrize("case", CASES, ids=str)
def test_golden_checkpoints_can_be_looked_into(unpack: Unpack, case: Case) -> None:
    """Of each format, every tensor that holds numbers; or there is a reason."""
    layout = laid_out(unpack(case.archive) / case.path)
    assert (layout.state, layout.kind, layout.step) == (State.COMPLETE, case.kind, case.step)
    found = statistics(layout)
    reasons = [each for each in found if isinstance(each, str)]
    allowed = {
        "dcp": 1,
        "megatron": 0,
        "tensorflow": 2,
        "saved-model": 1,
        "orbax": 1,
    }
    assert len(reasons) == allowed.get(case.kind, 0)
    assert difference(layout, layout).bytes_read == 0
    everything = difference(layout, layout, reads_all=True)
    assert not any(each.is_changed for each in everything.tensors)
    assert everything.bytes_shared == 0


def test_chunks_of_orbax_are_what_another_reader_inflates(unpack: Unpack) -> None:
    """Golden, of Orbax itself; inflated here by the small reader of the headers."""
    layout = laid_out(unpack("orbax") / "2")
    (tensor,) = [each for each in layout.tensors if each.name == "w"]
    (part,) = tensor.parts
    assert part.codec is Codec.ZSTD
    with layout.home.open(part.file) as reader:
        data = zstd.inflate(reader.read(part.offset, part.size_bytes), 64 * 64 * 4)
    values = np.frombuffer(data, dtype="<f4").reshape(64, 64)
    check(statistics(layout, [tensor])[0], values)
    assert together(layout.home, tensor).tobytes() == data
    (tensor,) = [each for each in layout.tensors if each.name == "b.c"]
    assert (
        tensor.reason == "the format says no place: it is compressed, cut up, or part of an index"
    )


@pytest.mark.parametrize("codec", Codec)
def test_chunks_at_the_edge_of_an_array(tmp_path: Path, rng: random.Random, codec: Codec) -> None:
    """They are as large as the others, and what lies outside of the array does not count."""
    chunk = np.random.default_rng(rng.getrandbits(32)).standard_normal((10, 12))
    for values in (chunk, np.asfortranarray(chunk)):
        data = compressed(codec, values.tobytes("A"))
        (tmp_path / "a").write_bytes(data)
        strides = tuple(step // 8 for step in values.strides)
        for shape in ((10, 12), (7, 12), (10, 5), (7, 5), (1, 1)):
            part = Part("", 0, len(data), (0, 0), shape, strides, codec)
            with Place(tmp_path / "a").open() as reader:
                read = [each.copy() for each in blocks(reader, part, 8, Buffer())]
            wanted = chunk[: shape[0], : shape[1]]
            assert sorted(np.concatenate(read).view(np.float64)) == sorted(wanted.reshape(-1))
            tensor = StoredTensor("w", "<f8", shape, (part,))
            assert together(Place(tmp_path / "a"), tensor).tobytes() == wanted.tobytes()


def compressed(codec: Codec, data: bytes) -> bytes:
    if codec is Codec.ZSTD:
        return zstd.library.compress(data)
    machine = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return machine.compress(data) + machine.flush()


@pytest.mark.parametrize("codec", Codec)
def test_streams_that_are_hostile(tmp_path: Path, rng: random.Random, codec: Codec) -> None:
    """Cut, damaged, of other bytes; and one that inflates to a thousand times its size."""
    data = compressed(codec, rng.randbytes(9000))
    changed = bytes([*data[:40], *(each ^ 0x55 for each in data[40:60]), *data[60:]])
    for stream in (b"", data[:-2000], rng.randbytes(500), changed[:70], data[1:]):
        (tmp_path / "a").write_bytes(stream)
        part = Part("", 0, len(stream), (0,), (9000,), (1,), codec)
        with Place(tmp_path / "a").open() as reader, pytest.raises(DamagedError, match="inflate"):
            list(blocks(reader, part, 1, Buffer()))
    bomb = compressed(codec, bytes(64 << 20))
    (tmp_path / "a").write_bytes(bomb)
    part = Part("", 0, len(bomb), (0,), (1000,), (1,), codec)
    tracemalloc.start()
    with Place(tmp_path / "a").open() as reader:
        assert [len(each) for each in blocks(reader, part, 1, Buffer())] == [1000]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4 << 20


# --- what changed -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_differences_are_those_of_numpy(tmp_path: Path, rng: random.Random, name: str) -> None:
    before = arrays(rng)
    after = {key: values.copy() for key, values in before.items()}
    after["float32"][7] *= np.float32(1.5)
    after["float16"][0, 0] += 3
    after["float64"] += 1e-3
    after["int8"][5, 5] ^= 1
    after["uint64"][9] += 100
    after["bool"][0, 0] ^= True
    after["complex64"][2, 2] += 2j
    after["special"][3, 3] = 1
    after["tiny"][0] *= 2
    after["huge"][0, :9] = 0
    after["minus-zero"] = np.zeros(300, dtype=np.float32)
    del after["zero"]
    after["new"] = np.ones(3)
    after["scalar"] = np.array([2.5], dtype=np.float32)
    after["only-nan"] = after["only-nan"].astype(np.float64)
    paths = [tmp_path / "before", tmp_path / "after"]
    for path, values in zip(paths, (before, after), strict=True):
        path.mkdir()
        save = np.savez if name.endswith("z") else None
        save(path / name, **values) if save else save_file(values, path / name)  # type: ignore[arg-type]
    found = difference(*(laid_out(path / name) for path in paths))
    assert [each.name for each in found.added] == ["new"]
    assert [each.name for each in found.gone] == ["zero"]
    by_name = {each.name: each for each in found.tensors}
    assert by_name["scalar"].reason == "its shape was [] and is [1]"
    assert (by_name["only-nan"].reason or "").startswith("its type was")
    for key in before.keys() & after.keys() - {"scalar", "only-nan"}:
        one, other = (each.reshape(-1) for each in (before[key], after[key]))
        if one.dtype.kind == "c":
            one, other = one.view(np.float32), other.view(np.float32)
        word = np.dtype(f"u{one.dtype.itemsize}")
        differs = one.view(word) != other.view(word)
        each = by_name[key]
        if each.is_shared:
            assert not differs.any()
            continue
        change = each.change
        assert change is not None, each
        assert change.items == len(one)
        assert change.changed == differs.sum()
        with np.errstate(invalid="ignore"):
            delta = other.astype(np.float64) - one.astype(np.float64)
        measured = delta[np.isfinite(delta) & differs]
        assert change.unmeasured == differs.sum() - len(measured)
        norm = np.linalg.norm(measured)
        assert math.sqrt(change.squares) == pytest.approx(norm, rel=TOLERANCE)
        assert change.largest == pytest.approx(
            np.abs(
                measured,
            ).max(initial=0),
            rel=1e-6,
        )
    if name.endswith("z"):  # whose CRC-32s say what is the same
        assert by_name["int64"].is_shared
        assert found.bytes_shared > 0
    total = {each.family: each for each in found.families()}["other"]
    assert total.items_changed == sum(
        each.change.changed for each in found.tensors if each.change is not None
    )


def test_tensors_that_are_stored_differently_are_compared(
    tmp_path: Path, rng: random.Random
) -> None:
    """C and Fortran order, stored and deflated, little and big end first."""
    values = np.random.default_rng(rng.getrandbits(32)).standard_normal((70, 300))
    values = values.astype(np.float32)
    other = values.copy()
    other[3, 5] = 9
    np.savez(tmp_path / "c.npz", w=values)
    ways = {"f": np.asfortranarray(other), "big": other.astype(">f4"), "plain": other}
    for name, stored in ways.items():
        for save in (np.savez, np.savez_compressed):
            save(tmp_path / f"{name}.npz", w=stored)
            pair = laid_out(tmp_path / "c.npz"), laid_out(tmp_path / f"{name}.npz")
            (found,) = difference(*pair).tensors
            assert found.change is not None, (name, found.reason)
            assert found.change.changed == 1
            assert found.change.largest == pytest.approx(abs(float(values[3, 5]) - 9))


def test_one_file_is_not_read_twice(tmp_path: Path) -> None:
    save_file({"w": np.ones(1000, dtype=np.float32)}, tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").hardlink_to(tmp_path / "a.safetensors")
    (tmp_path / "c.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes())
    layouts = [laid_out(tmp_path / f"{name}.safetensors") for name in "abc"]
    linked, copied = difference(*layouts[:2]), difference(layouts[0], layouts[2])
    assert (linked.bytes_read, linked.bytes_shared) == (0, 4000)
    assert (copied.bytes_read, copied.bytes_shared) == (8000, 0)
    assert difference(*layouts[:2], reads_all=True).bytes_read == 8000


def test_what_was_read_is_said_on_the_way(tmp_path: Path) -> None:
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", w=np.ones(9 << 20), v=np.ones(9 << 20))
    layouts = [laid_out(tmp_path / f"{name}.npz") for name in ("a", "b")]
    for size, work in (
        (144 << 20, lambda seen: statistics(layouts[0], seen=seen)),
        (288 << 20, lambda seen: difference(*layouts, reads_all=True, seen=seen)),
    ):
        said: list[tuple[int, int]] = []
        work(lambda *numbers, said=said: said.append(numbers))
        assert len(said) > 1
        assert said == sorted(said)
        assert said[-1] == (size, size)


def test_ranks_with_tensors_of_one_name_are_told_apart(unpack: Unpack) -> None:
    layout = laid_out(unpack("megatron") / "ranks" / "iter_0000100")
    names = layout.named()
    assert len(names) == 4
    assert "mp_rank_01_001/model_optim_rng.pt:model.w" in names


# --- types --------------------------------------------------------------------------------------


def test_values_of_bytes() -> None:
    """Those of the specifications, by hand: largest, smallest, special ones."""
    assert byte_values("float8_e4m3fn")[[0x7E, 0x01, 0x80, 0x38]].tolist() == [448, 2**-9, 0, 1]
    assert np.isnan(byte_values("float8_e4m3fn")).sum() == 2
    assert not np.isinf(byte_values("float8_e4m3fn")).any()
    assert byte_values("float8_e5m2")[[0x7B, 0x01, 0x3C]].tolist() == [57344, 2**-16, 1]
    assert np.isinf(byte_values("float8_e5m2")).sum() == 2
    assert np.isnan(byte_values("float8_e5m2")).sum() == 6
    assert byte_values("float8_e4m3fnuz")[[0x7F, 0x40]].tolist() == [240, 1]
    assert byte_values("float8_e5m2fnuz")[[0x7F, 0x40]].tolist() == [57344, 1]
    assert byte_values("float8_e4m3b11fnuz")[[0x7F, 0x58]].tolist() == [30, 1]
    assert byte_values("float8_e8m0fnu")[[0, 127, 254]].tolist() == [2.0**-127, 1, 2.0**127]
    for name in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"):
        assert np.flatnonzero(np.isnan(byte_values(name))).tolist() == [0x80]


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("F32", "float32"),
        ("<f4", "float32"),
        ("|b1", "bool"),
        ("|u1", "uint8"),
        ("<c8", "complex64"),
    ],
)
def test_types_by_the_names_of_formats(name: str, plain: str) -> None:
    found = item_type(name)
    assert found is not None
    assert found.name == plain
    assert not found.is_big_endian


@pytest.mark.parametrize("name", ["", "string", "<U5", "|O", "F4", "<f16", "object", ">", "V8"])
def test_types_that_are_not_computed_with(name: str) -> None:
    assert item_type(name) is None


@given(st.binary(min_size=2, max_size=4096), st.sampled_from(["float16", "bfloat16", "float32"]))
@settings(max_examples=150, deadline=None)
def test_any_bits_are_summed_as_float64_would(data: bytes, name: str) -> None:
    """Short and long blocks of any bits: NaN, Inf, subnormals, all of one sign."""
    of_item = item_type(name)
    assert of_item is not None
    size = of_item.item_bytes
    data = data[: len(data) // size * size]
    assume(data)
    block = np.frombuffer(bytearray(data * 300), dtype=np.uint8)[: BLOCK_BYTES // 4]
    block = block[: len(block) // size * size].copy()
    if name == "bfloat16":
        values = (block.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = block.view(name)
    check(Statistics.of(Reducer().moments(block.copy(), of_item)), values)


@pytest.mark.parametrize("bits", [16, 32])
def test_floats_are_halved_as_numpy_widens_them(bits: int, rng: random.Random) -> None:
    """All patterns of float16, and as many of float32 as random."""
    if bits == 16:
        block = np.arange(1 << 16, dtype=np.uint16)
    else:
        block = np.random.default_rng(rng.getrandbits(32)).integers(0, 1 << 32, 1 << 12, np.uint32)
    raw = block.view(np.uint8)
    of_item = item_type(f"float{bits}")
    assert of_item is not None
    assert of_item.kind is Kind.FLOAT
    check(Statistics.of(Reducer().moments(raw.copy(), of_item)), block.view(f"f{bits // 8}"))


# --- strides ------------------------------------------------------------------------------------

_shapes = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), min_size=0, max_size=4)


@given(_shapes)
@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_strided_items_are_each_read_once(
    tmp_path_factory: pytest.TempPathFactory, dimensions: list[tuple[int, int]]
) -> None:
    """As NumPy's ``as_strided`` finds them; what is refused does overlap."""
    shape = tuple(size for size, _ in dimensions)
    strides = tuple(stride for _, stride in dimensions)
    span = span_items(shape, strides)
    data = np.arange(max(span, 1), dtype=np.uint32)
    path = tmp_path_factory.getbasetemp() / "strided"
    path.write_bytes(data.tobytes())
    part = Part("", 0, span * 4, (0,) * len(shape), shape, strides)
    places = [
        sum(n * step for n, step in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, shape))
    ]
    try:
        repeats = access_of(part, 4).repeats
    except BeyondLimitsError:
        # Repeated dimensions aside, a place that stands there twice is why; or what only an exact
        # search would tell from that (interleaved strides), which nobody saves.
        assert sum(step > 0 and size > 1 for size, step in dimensions) > 1
        return
    with Place(path).open() as reader:
        found = np.concatenate(
            [np.zeros(0, np.uint8), *(each.copy() for each in blocks(reader, part, 4, Buffer()))]
        ).view(np.uint32)
    assert sorted(found.tolist() * repeats) == sorted(places)


def test_large_gaps_are_read_row_by_row(tmp_path: Path) -> None:
    """Rows longer than a block, and rows that are farther apart than one."""
    items = BLOCK_BYTES // 4
    data = np.arange(12 * items, dtype=np.uint32)
    data.tofile(tmp_path / "a")
    for shape, strides in (((3, 2 * items + 5), (4 * items, 1)), ((5, 3), (2 * items, 7))):
        part = Part("", 0, data.nbytes, (0, 0), shape, strides)
        with Place(tmp_path / "a").open() as reader:
            read = [each.copy() for each in blocks(reader, part, 4, Buffer())]
        assert all(len(each) <= BLOCK_BYTES for each in read)
        wanted = np.lib.stride_tricks.as_strided(data, shape, [4 * step for step in strides])
        assert sorted(np.concatenate(read).view(np.uint32)) == sorted(wanted.reshape(-1))


def test_items_that_lie_scattered_are_refused() -> None:
    part = Part("", 0, 1 << 50, (0, 0, 0), (1 << 20, 1 << 20, 2), (1 << 30, 1 << 10, 512))
    with pytest.raises(BeyondLimitsError, match="scattered"):
        access_of(part, 4)


# --- hostile ------------------------------------------------------------------------------------


def _safetensors(path: Path, header: dict[str, object], data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_tensors_that_claim_the_same_bytes_are_read_a_bounded_number_of_times(
    tmp_path: Path,
) -> None:
    """A pickle may name one storage a million times, in another way each time."""
    torch_like = tmp_path / "a.npz"
    np.savez(torch_like, w=np.ones(1 << 16, dtype=np.float32))
    layout = laid_out(torch_like)
    (tensor,) = layout.tensors
    (part,) = tensor.parts
    many = []
    for number in range(100):
        shape = (part.shape[0] - number,)
        shorter = Part(part.file, part.offset, part.size_bytes, (0,), shape, (1,))
        many.append(type(tensor)(f"w{number}", tensor.dtype, shape, (shorter,)))
    found = statistics(layout, many)
    assert found[0] != NEVER_READ
    assert [each for each in found if each == NEVER_READ]
    assert sum(isinstance(each, Statistics) for each in found) <= 4
    same = statistics(layout, [tensor] * 1000)
    assert all(isinstance(each, Statistics) for each in same), "one that is tied is read once"


def test_what_cannot_be_read_is_said_of_the_tensor_alone(tmp_path: Path) -> None:
    save_file({"a": np.ones(10), "b": np.ones(1000)}, tmp_path / "a.safetensors")
    layout = laid_out(tmp_path / "a.safetensors")
    with (tmp_path / "a.safetensors").open("r+b") as file:
        file.truncate((tmp_path / "a.safetensors").stat().st_size - 100)
    found = dict(zip((t.name for t in layout.tensors), statistics(layout), strict=True))
    assert isinstance(found["a"], Statistics)
    assert isinstance(found["b"], str)
    assert "are needed" in found["b"]
    (tmp_path / "a.safetensors").unlink()
    assert all("missing" in each for each in statistics(layout) if isinstance(each, str))


def test_a_deflated_array_that_is_shorter_than_it_says(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", w=np.zeros(5000))
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        data = archive.read("w.npy")
    with zipfile.ZipFile(tmp_path / "b.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w.npy", data[:-800])
    (found,) = statistics(laid_out(tmp_path / "b.npz"))
    assert found == "its size does not fit its shape"


def test_together_has_a_limit(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", w=np.ones(4))
    layout = laid_out(tmp_path / "a.npz")
    (tensor,) = layout.tensors
    part = Part("", tensor.parts[0].offset, 32, (0, 0), (1 << 40, 4), (0, 1))
    huge = type(tensor)("w", tensor.dtype, (1 << 40, 4), (part,))
    with pytest.raises(BeyondLimitsError, match="too large"):
        together(layout.home, huge)
    (found,) = statistics(layout, [huge])
    assert isinstance(found, Statistics)
    assert (found.items, found.mean) == (1 << 42, 1.0), (
        "a dimension that only repeats costs nothing"
    )


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_headers_of_any_numbers(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Sizes, shapes and offsets that overlap, run over and go beyond the end."""
    number = st.one_of(
        st.integers(0, 300), st.sampled_from([1 << 31, 1 << 62, (1 << 63) - 1, 1 << 64])
    )
    names = data.draw(st.lists(st.sampled_from("abcd"), max_size=4, unique=True))
    header = {
        name: {
            "dtype": data.draw(st.sampled_from(["F32", "BF16", "U8", "C64", "F4", "XX"])),
            "shape": data.draw(st.lists(number, max_size=3)),
            "data_offsets": data.draw(st.lists(number, min_size=2, max_size=2)),
        }
        for name in names
    }
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    _safetensors(path, header, bytes(256))
    layout = laid_out(path)
    for tensor, found in zip(layout.tensors, statistics(layout), strict=True):
        if isinstance(found, Statistics):
            assert found.items in (tensor.items, 2 * tensor.items)
            assert tensor.size_bytes <= 256


@pytest.mark.slow
def test_hostile_checkpoints_are_looked_into(tmp_path: Path, seed: int) -> None:
    """Those of real libraries, changed at random: nothing is run, and what is said is bounded."""
    list(spread(range(2), abs, 2))  # loads what threads need
    for index in range(200):
        base, notes = fuzz_checkpoints.make(seed, index)
        path = hostile_checkpoints.write(base, tmp_path)
        try:
            with hostile_checkpoints.watched(), contextlib.suppress(ProblemError):
                look_at(path)
        except Exception as error:
            error.add_note(f"index {index}: {notes}")
            raise
        for each in tmp_path.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()


def look_at(path: Path) -> None:
    """All that is done with one checkpoint. Raises ProblemError."""
    layout = layout_of(path)
    if layout is None:
        return
    sizes = {file.name: file.size_bytes or 0 for file in layout.files}
    for tensor, found in zip(layout.tensors, statistics(layout), strict=True):
        assert isinstance(found, str) or tensor.reason is None
        for part in tensor.parts:
            if part.codec is None or tensor.reason is None:
                assert 0 <= part.offset <= part.offset + part.size_bytes <= sizes[part.file]
    compared = difference(layout, layout, reads_all=True).tensors
    assert not any(each.is_changed for each in compared)
    manifest = manifest_of(path)
    assert decode_manifest(manifest.encode()).id == manifest.id


def test_dense_strides() -> None:
    assert dense_strides(()) == ()
    assert dense_strides((2, 3, 4)) == (12, 4, 1)
    assert dense_strides((2, 0, 4)) == (4, 4, 1)


def test_tasks_are_answered_in_their_order() -> None:
    assert list(spread(range(100), lambda n: n * n, 4)) == [n * n for n in range(100)]
    with pytest.raises(ZeroDivisionError):
        list(spread(range(10), lambda n: 1 // (n - 5), 3))


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "family", "layer"),
    [
        ("model.layers.12.self_attn.q_proj.weight", "attention", 12),
        ("model.layers.3.mlp.gate_proj.weight", "mlp", 3),
        ("model.layers.3.input_layernorm.weight", "norm", 3),
        ("transformer.h.7.ln_1.bias", "norm", 7),
        ("transformer.wte.weight", "embedding", None),
        ("model.embed_tokens.weight", "embedding", None),
        ("optimizer.state.5.exp_avg_sq", "optimizer", 5),
        ("opt_state.0.nu.layers_3.kernel", "optimizer", 3),
        ("encoder.block.2.layer.0.SelfAttention.v.weight", "attention", 2),
        ("w/.OPTIMIZER_SLOT/optimizer/m", "optimizer", None),
        ("lm_head.weight", "other", None),
        ("layers/dense/vars/0", "mlp", 0),
        ("encoder.layer.1.attention.self.query.weight", "attention", 1),
    ],
)
def test_families_and_layers(name: str, family: str, layer: int | None) -> None:
    assert (family_of(name), layer_of(name)) == (family, layer)
