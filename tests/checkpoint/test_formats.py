"""Each format as the real library writes it: complete, cut anywhere, each file missing, damaged."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from cxlfs.checkpoint import Level, State, inspect, recognise
from tests.checkpoint.conftest import Unpack
from tests.support.checkpoints import CASES, Case, copy_of, files_of


@pytest.fixture
def checkpoint(case: Case, unpack: Unpack) -> Path:
    return unpack(case.archive) / case.path


def relative(path: Path, checkpoint: Path) -> str:
    return path.name if path == checkpoint else str(path.relative_to(checkpoint))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("level", Level)
def test_complete(case: Case, checkpoint: Path, level: Level) -> None:
    found = inspect(checkpoint, level)
    assert found is not None
    assert (found.kind, found.state, found.reason) == (case.kind, State.COMPLETE, None)
    assert found.step == case.step
    is_apart = level is Level.STRUCTURE and case.kind in ("hdf5", "keras")
    assert len(found.tensors) == (0 if is_apart else case.tensors), "HDF5's library lists content"
    assert found.content_verified is (level is Level.CONTENT)
    sizes = sum(path.stat().st_size for path in files_of(checkpoint))
    assert found.size_bytes == sizes, "every file is counted once"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_file_missing(case: Case, checkpoint: Path, tmp_path: Path) -> None:
    for number, path in enumerate(files_of(checkpoint)):
        if path == checkpoint:
            continue
        name = str(path.relative_to(checkpoint.parent if not checkpoint.is_dir() else checkpoint))
        copy = copy_of(checkpoint, tmp_path / str(number))
        (copy.parent if not copy.is_dir() else copy).joinpath(name).unlink()
        found = inspect(copy)
        assert found is not None, name
        if name in case.optional or is_unseen(case, name):
            assert found.state is State.COMPLETE, (name, found.words)
        elif name == "_CHECKPOINT_METADATA":  # Orbax loads what it is told to load
            assert found.state is State.UNKNOWN, found.words
        else:
            assert found.state is State.INCOMPLETE, (name, found.words)
        shutil.rmtree(tmp_path / str(number))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_file_cut(checkpoint: Path) -> None:
    for path in files_of(checkpoint):
        data = path.read_bytes()
        cuts = {0, 1, 7, len(data) // 4, len(data) // 2, len(data) - 9, len(data) - 1}
        for cut in sorted(cut for cut in cuts if 0 <= cut < len(data.rstrip())):
            path.write_bytes(data[:cut])
            found = inspect(checkpoint)
            name = path.name if not checkpoint.is_dir() else str(path.relative_to(checkpoint))
            if not is_uncuttable(name):
                assert found is not None, (name, cut)
                assert found.state is not State.COMPLETE, (name, cut)
        path.write_bytes(data)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_file_with_zeros_to_its_end(checkpoint: Path) -> None:
    """What a file system leaves that had given the room, but not written the data."""
    for path in files_of(checkpoint):
        data = path.read_bytes()
        path.write_bytes(bytes(len(data)))
        found = inspect(checkpoint, Level.CONTENT)
        name = path.name if not checkpoint.is_dir() else str(path.relative_to(checkpoint))
        if not is_uncuttable(name):
            assert found is not None, name
            assert found.state is not State.COMPLETE, name
        path.write_bytes(data)


def is_unseen(case: Case, name: str) -> bool:
    """Files that nothing which is read names: what a process of Orbax wrote on the way."""
    if case.kind != "orbax":
        return False
    last = name.rpartition("/")[2]
    passing = "ocdbt.process_0/d/" in name and last not in case.needed
    by_process = name.endswith("ocdbt.process_0/manifest.ocdbt")
    return passing or by_process or last in ("_sharding", "process_0", "commit_success.txt")


def is_uncuttable(name: str) -> bool:
    """Texts without an end of their own, and what Orbax wrote on the way."""
    return "ocdbt.process_0/" in name or name.rpartition("/")[2] in (
        "commit_success.txt",
        "fingerprint.pb",
        "training_args.bin",
    )


def test_the_files_that_a_tree_of_orbax_leads_to(unpack: Unpack) -> None:
    path = unpack("orbax") / "2"
    (case,) = (each for each in CASES if each.kind == "orbax")
    good = inspect(path, Level.CONTENT)
    assert good is not None
    assert [tensor.name for tensor in good.tensors] == ["b.c", "w"]
    (tensor,) = [each for each in good.tensors if each.offset is not None]
    assert (tensor.name, tensor.shape) == ("w", (64, 64))
    assert tensor.file.rpartition("/")[2] in case.needed
    data = (path / tensor.file).read_bytes()
    (path / tensor.file).write_bytes(data[: (tensor.offset or 0) + (tensor.size_bytes or 0) - 1])
    found = inspect(path)
    assert found is not None
    assert found.words == f"incomplete: {tensor.file} was not written to its end"


CHECKED = [c for c in CASES if c.kind in ("torch", "dcp", "lightning", "tensorflow", "accelerate")]


@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_a_flipped_byte_of_a_tensor_names_it(
    case: Case, checkpoint: Path, rng: random.Random
) -> None:
    good = inspect(checkpoint)
    assert good is not None
    home = checkpoint if checkpoint.is_dir() else checkpoint.parent
    done = 0
    for tensor in good.tensors:
        if not tensor.size_bytes or tensor.offset is None:
            continue
        if tensor.dtype == "bytes" or tensor.file.endswith(".safetensors"):
            continue
        path = home / tensor.file if tensor.file else checkpoint
        data = bytearray(path.read_bytes())
        # A piece of a distributed checkpoint is an archive: its last byte of data lies before it.
        at = tensor.offset + rng.randrange(tensor.size_bytes)
        if case.kind == "dcp":
            at = data.index(b"PK\x07\x08", data.index(b"/data/0", tensor.offset)) - 1
        data[at] ^= 0x10
        path.write_bytes(data)
        found = inspect(checkpoint, Level.CONTENT)
        assert found is not None
        assert found.state is State.DAMAGED
        assert f"tensor {tensor.name}" in found.words
        assert inspect(checkpoint).words == "complete"  # type: ignore[union-attr]
        data[at] ^= 0x10
        path.write_bytes(data)
        done += 1
    assert done


DIRECTORIES = ("accelerate", "hugging-face", "deepspeed", "megatron")
NAMED = [c for c in CASES if c.kind in DIRECTORIES or Path(c.path).suffix]


@pytest.mark.parametrize("case", NAMED, ids=str)
def test_it_is_recognised_by_its_name_when_nothing_is_in_it(case: Case, tmp_path: Path) -> None:
    path = tmp_path / Path(case.path).name
    if case.kind in DIRECTORIES:
        path.mkdir()
    else:
        path.touch()
    assert recognise(path) in (case.kind, "torch", "torch-legacy")
    found = inspect(path)
    assert found is not None
    assert found.state is State.INCOMPLETE


@pytest.mark.parametrize("name", ["notes.txt", "train.log", "config.yaml", "events.out.tfevents"])
def test_other_files_are_no_checkpoints(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("step 5\n")
    assert recognise(tmp_path / name) is None
    assert inspect(tmp_path / name) is None
    assert inspect(tmp_path) is None
    assert inspect(tmp_path / "absent") is None


def test_a_missing_shard_is_named_by_its_number(tmp_path: Path) -> None:
    names = [f"model-{number:05}-of-00008.safetensors" for number in range(1, 9)]
    weight_map = {}
    for number, name in enumerate(names, start=1):
        (tmp_path / name).write_bytes(save({f"layers.{number}.w": np.arange(10.0)}))
        weight_map[f"layers.{number}.w"] = name
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))

    def words() -> str:
        found = inspect(tmp_path, Level.CONTENT)
        assert found is not None
        return found.words

    assert words() == "complete"
    (tmp_path / names[2]).unlink()
    assert words() == "incomplete: shard 3 of 8 is missing"
    (tmp_path / names[2]).write_bytes(save({"another": np.arange(10.0)}))
    assert words() == f"damaged: tensor layers.3.w is not in {names[2]}"
    index.unlink()
    assert words() == "incomplete: model.safetensors.index.json is missing"


def test_words() -> None:
    from cxlfs.checkpoint import Checkpoint

    bad = Checkpoint("torch", "/x", None, State.DAMAGED, "tensor layers.7.mlp.w2", (), ())
    assert bad.words == "damaged: tensor layers.7.mlp.w2"
