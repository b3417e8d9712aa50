"""What libraries load is never called damaged or incomplete, and what they refuse is never called
complete: formats that the default run has libraries for, and directories made by hand.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from cxlfs.checkpoint import Level, State, ages, catalogue, good, inspect
from cxlfs.errors import NoGoodCheckpointError, UnknownCheckpointError

ARRAY = np.arange(3000.0)
BAD = (State.DAMAGED, State.INCOMPLETE)


def state(path: Path, level: Level = Level.CONTENT) -> State | None:
    found = inspect(path, level)
    return None if found is None else found.state


def words(path: Path) -> str:
    found = inspect(path, Level.CONTENT)
    assert found is not None
    return found.words


# --- files of any program -----------------------------------------------------------------------


def pickles(count: int) -> bytes:
    return b"".join(pickle.dumps({"step": n, "w": ARRAY}) for n in range(count))


def arrays(count: int) -> bytes:
    buffer = io.BytesIO()
    for _ in range(count):
        np.save(buffer, ARRAY)
    return buffer.getvalue()


def archive(method: int = zipfile.ZIP_STORED, **more: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        file.writestr("a.npy", arrays(1))
        for name, content in more.items():
            file.writestr(name, content)
    return buffer.getvalue()


def old_array(header: str, data: bytes) -> bytes:
    """As NumPy wrote it with Python 2."""
    return b"\x93NUMPY\x01\x00F\x00" + header.ljust(69).encode() + b"\n" + data


def joblib_like() -> bytes:
    """Opcodes, the bytes of an array, and more opcodes: joblib.numpy_pickle.NumpyPickler."""
    begin = pickle.dumps({"w": "joblib.numpy_pickle", "n": 1})[:-1]
    return begin + ARRAY.tobytes() + b"\x94u."


WHOLE = {
    "m.pkl": pickles(1),
    "log.pkl": pickles(3),
    "old.pkl": pickle.dumps({"w": [1, 2.5, "ü", None]}, protocol=0),
    "packed.pkl": gzip.compress(pickles(1)),
    "joblib.pkl": joblib_like(),
    "header-and-raw.pkl": pickles(1) + ARRAY.tobytes(),
    "extended.pkl": b"\x80\x02\x82\x01.",
    "a.npy": arrays(1),
    "row.npy": arrays(4),
    "raw.npy": arrays(1) + b"trailer",
    "python2.npy": old_array(
        "{'descr': '<f8', 'fortran_order': False, 'shape': (2L,), }", bytes(16)
    ),
    "pickled.npy": pickles(1),
    "a.npz": archive(),
    "notes.npz": archive(notes=b"x"),
    "lzma.npz": archive(zipfile.ZIP_LZMA),
    "tail.npz": archive() + bytes(100),
    "exported.pt": archive(model=b"torch.export"),
    "other.pt": b"a format of somebody else",
    "other.safetensors.joblib": b"not read here",
    "stream.msgpack": b"\x81\x01\x02\x81\x01\x02",
    "data_5": b"\x85not of flax",
    "blank_5": bytes(100),
    "model.gguf": b"GGUF",
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_files_of_any_program(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(WHOLE[name])
    for level in Level:
        assert state(tmp_path / name, level) not in BAD
    assert all(entry.checkpoint.state not in BAD for entry in catalogue(tmp_path))
    if state(tmp_path / name) is State.UNKNOWN:
        with pytest.raises(UnknownCheckpointError):
            good(tmp_path)


COMPLETE = ("m.pkl", "log.pkl", "old.pkl", "a.npy", "row.npy", "python2.npy", "a.npz", "tail.npz")


@pytest.mark.parametrize("name", COMPLETE)
def test_what_is_understood_is_complete_and_torn_where_it_is_cut(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(WHOLE[name])
    assert words(path) == "complete"
    for cut in (1, 200, len(WHOLE[name]) * 2 // 5):
        path.write_bytes(WHOLE[name][:-cut])
        assert state(path) is not State.COMPLETE or name == "tail.npz"


# --- safetensors --------------------------------------------------------------------------------

ONE = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
HEADERS = {
    "plain": '{"a":%s}',
    "space": '  {"a":%s}  ',
    "null": '{"__metadata__":null,"a":%s}',
    "texts": '{"__metadata__":{"format":"pt"},"a":%s}',
    "number": '{"__metadata__":{"step":5},"a":%s}',
    "list": '{"__metadata__":[1],"a":%s}',
    "text": '{"__metadata__":"x","a":%s}',
    "twice": '{"a":%s,"a":%s}',
    "metadata twice": '{"__metadata__":{},"__metadata__":{},"a":%s}',
    "type twice": '{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "another key": '{"a":{"x":[1,{}],"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "no type": '{"a":{"shape":[1],"data_offsets":[0,4]}}',
    "type": '{"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}',
    "nan": '{"a":{"x":NaN,"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "infinity": '{"a":{"x":-Infinity,"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "too large": '{"a":{"x":1e999,"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "surrogate": '{"\\ud800":%s}',
    "surrogate inside": '{"__metadata__":{"a":"\\udc00x"},"a":%s}',
    "pair": '{"\\ud83d\\ude00":%s}',
    "minus zero": '{"a":{"dtype":"F32","shape":[1],"data_offsets":[-0,4]}}',
    "fraction": '{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}',
    "truth": '{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}',
    "negative": '{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
    "three places": '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}}',
    "hole": '{"a":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}}',
    "overlap": '{"a":%s,"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}',
    "empty in front": '{"a":%s,"z":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}',
    "empty behind": '{"a":%s,"z":{"dtype":"F32","shape":[0],"data_offsets":[4,4]}}',
    "list of fields": '{"a":["F32",[1],[0,4]]}',
    "comma": '{"a":%s,}',
    "nothing": "{}",
    "no object": "[]",
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_as_the_library_takes_them(name: str, tmp_path: Path) -> None:
    header = HEADERS[name].replace("%s", ONE).encode()
    path = tmp_path / "m.safetensors"
    data = bytes(4) if b"data_offsets" in header else b""
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    try:
        load_file(path)
    except SafetensorError:
        assert state(path) is not State.COMPLETE
    else:
        assert state(path) not in BAD


# --- models in several files --------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    weight_map = {f"w{n}": f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)}
    for number, (tensor, name) in enumerate(weight_map.items()):
        save_file({tensor: np.arange(10.0) + number}, directory / name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def test_what_the_index_does_not_name_is_left_over(shards: Path) -> None:
    (shards / "model-00007-of-00008.safetensors").write_bytes(b"cut")
    found = inspect(shards, Level.CONTENT)
    assert found is not None
    assert found.words == "complete"
    assert found.notes == ("model-00007-of-00008.safetensors belongs to no part of it",)


def test_a_shard_without_any_tensor(shards: Path) -> None:
    save_file({}, shards / "model-00002-of-00003.safetensors")
    assert words(shards) == "damaged: tensor w2 is not in model-00002-of-00003.safetensors"


@pytest.mark.parametrize("makes", [Path.mkdir, lambda path: path.symlink_to("gone")])
def test_a_shard_that_is_no_file(shards: Path, makes: Callable[[Path], None]) -> None:
    (shards / "model-00002-of-00003.safetensors").unlink()
    makes(shards / "model-00002-of-00003.safetensors")
    assert words(shards) == "incomplete: shard 2 of 3 is missing"


def test_a_save_over_an_older_one_that_was_broken_off(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = sorted(path.name for path in shards.iterdir())
    for name in names:
        os.utime(shards / name, (1000, 1000))
    monkeypatch.setattr(ages, "birth_ns", lambda _: 1)
    assert words(shards) == "complete"
    os.utime(shards / names[0], (2000, 2000))
    assert words(shards).startswith(f"incomplete: the set may be mixed: {names[0]} was written")
    for name in names[:3]:  # all are of the new one, which has the same index
        os.utime(shards / name, (2000, 2000))
    assert words(shards) == "complete"


@pytest.mark.parametrize("order", [(0, 1, 3, 2), (3, 0, 1, 2), (0, 1, 2, 3)])
def test_a_copy_in_any_order(shards: Path, tmp_path: Path, order: tuple[int, ...]) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    names = sorted(path.name for path in shards.iterdir())
    for moment, number in enumerate(order):
        (copy / names[number]).write_bytes((shards / names[number]).read_bytes())
        now = (copy / names[number]).stat().st_mtime_ns
        os.utime(copy / names[number], ns=(now, now + moment))
    assert words(copy) == "complete"


# --- directories --------------------------------------------------------------------------------


def trainer(directory: Path) -> Path:
    directory.mkdir()
    save_file({"w": np.arange(10.0)}, directory / "model.safetensors")
    (directory / "trainer_state.json").write_text('{"global_step": 5}')
    return directory


@pytest.mark.parametrize("makes", [Path.mkdir, lambda path: path.symlink_to("gone"), os.mkfifo])
def test_weights_that_are_no_file(tmp_path: Path, makes: Callable[[Path], None]) -> None:
    directory = trainer(tmp_path / "checkpoint-5")
    assert words(directory) == "complete"
    (directory / "model.safetensors").unlink()
    makes(directory / "model.safetensors")
    assert state(directory) in BAD
    with pytest.raises(NoGoodCheckpointError):
        good(tmp_path)


def test_notes_of_a_program_in_a_checkpoint(tmp_path: Path) -> None:
    directory = trainer(tmp_path / "checkpoint-5")
    (directory / "metrics.json").write_text('{"a": 1}\n{"a": 2}\n')
    (directory / "notes.json").write_text("")
    (directory / "vocab.pkl").write_bytes(joblib_like())
    (directory / "model.onnx").write_bytes(b"onnx")
    (directory / "args.json").write_text("just a text")
    assert words(directory) == "complete"
    (directory / "config.json").write_text('{"a": ')
    assert words(directory).startswith("incomplete: config.json")


def test_names_that_several_frameworks_give(tmp_path: Path) -> None:
    """A name alone does not say who wrote it: what is missing then is not known."""
    diffusers = tmp_path / "checkpoint-500"
    (diffusers / "unet").mkdir(parents=True)
    save_file({"w": np.arange(9.0)}, diffusers / "unet" / "diffusion_pytorch_model.safetensors")
    (diffusers / "random_states_0.pkl").write_bytes(pickles(1))
    assert words(diffusers) == "complete"
    plain = tmp_path / "checkpoint-600"
    plain.mkdir()
    save_file({"w": np.arange(9.0)}, plain / "model.safetensors")
    assert state(plain) is State.UNKNOWN
    trainer(tmp_path / "checkpoint-700")
    assert state(plain) is State.INCOMPLETE, "beside the Trainer's it is one of these"
    for name in ("checkpoint_7", "iter_0000007", "global_step7"):
        other = tmp_path / name
        other.mkdir()
        assert state(other) is State.INCOMPLETE, "nothing is in it"
        save_file({"w": np.arange(9.0)}, other / "weights.safetensors")
        assert state(other) is State.UNKNOWN
        (other / "weights.safetensors").write_bytes(b"cut")
        assert state(other) is State.INCOMPLETE


def test_a_directory_of_one_own_is_not_nothing(tmp_path: Path) -> None:
    step = tmp_path / "step_100"
    step.mkdir()
    save_file({"w": np.arange(9.0)}, step / "model.safetensors")
    with pytest.raises(UnknownCheckpointError, match="it may lack a file"):
        good(tmp_path)
    assert good(step)[0].path == step / "model.safetensors"


# --- what ranks wrote ---------------------------------------------------------------------------


def torch_file(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(value, protocol=2))


def deepspeed(directory: Path, *names: str, **world: int) -> Path:
    for name in names:
        is_model = name.startswith("mp_rank") or "_model_states" in name
        torch_file(directory / name, {"global_steps": 5, **world} if is_model else {"x": 1})
    return directory


KINDS: dict[str, tuple[dict[str, int], list[str]]] = {
    "model ranks": ({}, [f"mp_rank_{m:02d}_model_states.pt" for m in range(4)]),
    "ranks of data and model": (
        {"dp_world_size": 2, "mp_world_size": 2},
        [f"mp_rank_{m:02d}_model_states.pt" for m in range(2)]
        + [f"zero_pp_rank_{d}_mp_rank_{m:02d}_optim_states.pt" for d in range(2) for m in range(2)],
    ),
    "zero 3": (
        {"dp_world_size": 3, "mp_world_size": 1},
        [
            f"zero_pp_rank_{d}_mp_rank_00_{k}_states.pt"
            for d in range(3)
            for k in ("model", "optim")
        ],
    ),
    "experts": (
        {"dp_world_size": 2, "mp_world_size": 1},
        ["mp_rank_00_model_states.pt"]
        + [f"layer_{n}_expert_{e}_mp_rank_00_model_states.pt" for n in range(2) for e in range(4)]
        + [f"expp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(2)],
    ),
    "a pipeline": (
        {"dp_world_size": 1, "mp_world_size": 4},
        [f"mp_rank_{m:02d}_model_states.pt" for m in range(4)]
        + [f"layer_{n:02d}-model_{m:02d}-model_states.pt" for n in (1, 3, 4, 5, 7) for m in (0, 1)],
    ),
}


def test_the_optimizer_of_experts(tmp_path: Path) -> None:
    world, names = KINDS["experts"]
    there = [name for name in names if not name.startswith("expp")]
    directory = deepspeed(tmp_path / "global_step5", *there, **world)
    assert words(directory).startswith("incomplete: the optimizer of the experts")


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_layer_and_expert_of_deepspeed(kind: str, tmp_path: Path) -> None:
    """All that is not the last of its kind is missed, and where the world is known that, too."""
    world, names = KINDS[kind]
    directory = deepspeed(tmp_path / "global_step5", *names, **world)
    assert words(directory) == "complete"
    unseen = {
        "layer_1_expert_3_mp_rank_00_model_states.pt",
        "expp_rank_1_mp_rank_00_optim_states.pt",
    }
    unseen |= {"mp_rank_03_model_states.pt"} if not world else set()
    for name in names:
        content = (directory / name).read_bytes()
        (directory / name).unlink()
        if name not in unseen:
            assert state(directory) is State.INCOMPLETE, name
        (directory / name).write_bytes(content)


def test_layers_that_hold_the_same_have_none_between_them(tmp_path: Path) -> None:
    directory = deepspeed(tmp_path / "global_step5", "mp_rank_00_model_states.pt")
    storage = ("storage", 0, "0", "cpu", 4)
    for layer in (1, 3, 4, 6):
        path = directory / f"layer_{layer:02d}-model_00-model_states.pt"
        _with_tensor(path, "embedding" if layer == 1 else "attention", storage)
    assert words(directory).startswith("incomplete: layer 5 ")
    _with_tensor(directory / "layer_05-model_00-model_states.pt", "attention", storage)
    assert words(directory) == "complete", "what holds no parameters has no file"


def _with_tensor(path: Path, name: str, storage: tuple[Any, ...]) -> None:
    """A file of torch.save with one tensor, by opcodes."""
    key = f"X{chr(len(name))}\0\0\0".encode() + name.encode()
    pickled = (
        b"\x80\x02}" + key + b"ctorch._utils\n_rebuild_tensor_v2\n("
        b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tQ"
        b"K\0K\x04\x85K\x01\x85\x89}tRs."
    )
    del storage
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/data/0", bytes(16))


def test_layers_of_a_pipeline_alone(tmp_path: Path) -> None:
    """Without ranks of the model their names have no number of one. The optimizer counts them."""
    directory = tmp_path / "global_step5"
    groups = [{"params": [0, 1]}, {"params": [2, 3]}]
    state = {"global_steps": 5, "optimizer": {"state": {}, "param_groups": groups}}
    torch_file(directory / "mp_rank_00_model_states.pt", state)
    names = [directory / f"layer_{layer:02d}-model_states.pt" for layer in range(4)]
    for path in names:
        _with_tensor(path, f"w{path.name[7]}", ())
    assert words(directory) == "complete"
    for path in (names[0], names[3]):
        content = path.read_bytes()
        path.unlink()
        assert words(directory).startswith("incomplete: one of the layers with 4 tensors in all")
        path.write_bytes(content)
    (directory / "layer_94-model_states.pt").write_bytes(names[0].read_bytes()[:70])
    assert words(directory).startswith("unknown: if layer_94-model_states.pt belongs"), (
        "those before it are enough"
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zero_pp_rank_9_mp_rank_00_optim_states.pt", "unknown"),
        ("expp_rank_0_mp_rank_99_optim_states.pt", "complete"),
        ("layer_0_expert_0_mp_rank_99_model_states.pt", "complete"),
        ("mp_rank_99_model_states.pt", "incomplete"),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "incomplete"),
    ],
)
def test_left_over_of_more_ranks(name: str, said: str, tmp_path: Path) -> None:
    """DeepSpeed counts the files of the model, and asks for no other by a rank that it lacks.
    Its converter (``zero_to_fp32``) counts those of the optimizer.
    """
    directory = tmp_path / "global_step5"
    deepspeed(directory, "mp_rank_00_model_states.pt", dp_world_size=2, mp_world_size=1)
    (directory / name).write_bytes(b"PK\3\4 a beginning")
    assert words(directory).split(":")[0] == said


class Namespace:
    """Stands for argparse's."""


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ({}, ["mp_rank_00", "mp_rank_01"]),
        (
            {"tensor": 2, "pipeline": 2},
            [f"mp_rank_{t:02d}_{p:03d}" for t in (0, 1) for p in (0, 1)],
        ),
        ({"tensor": 1, "expert": 2}, ["mp_rank_00_000", "mp_rank_00_001"]),
        (
            {"tensor": 2, "pipeline": 2, "expert": 2},
            [f"mp_rank_{t:02d}_{p:03d}_{e:03d}" for t in (0, 1) for p in (0, 1) for e in (0, 1)],
        ),
    ],
    ids=str,
)
def test_every_rank_of_megatron(sizes: dict[str, int], names: list[str], tmp_path: Path) -> None:
    directory = tmp_path / "iter_0000100"
    arguments = Namespace()
    vars(arguments).update({f"{kind}_model_parallel_size": n for kind, n in sizes.items()})
    for name in names:
        torch_file(directory / name / "model_optim_rng.pt", {"args": arguments, "iteration": 100})
    assert words(directory) == "complete"
    for number, name in enumerate(names):
        (directory / name).rename(tmp_path / name)
        is_last = number == len(names) - 1
        if sizes or not is_last:
            assert f"({name}) is missing" in words(directory)
        (tmp_path / name).rename(directory / name)


@pytest.mark.parametrize("is_saved", [True, False])
def test_optimizers_of_megatron_that_the_arguments_name(tmp_path: Path, *, is_saved: bool) -> None:
    directory = tmp_path / "iter_0000100"
    arguments = Namespace()
    vars(arguments).update(use_distributed_optimizer=True, no_save_optim=not is_saved)
    model = {"args": arguments, "iteration": 100}
    torch_file(directory / "mp_rank_00" / "model_optim_rng.pt", model)
    expected = "incomplete: mp_rank_00/distrib_optim.pt is missing" if is_saved else "complete"
    assert words(directory) == expected
    torch_file(directory / "mp_rank_00" / "distrib_optim.pt", {"x": 1})
    (directory / "mp_rank_00" / "9-distrib_optim.pt").write_bytes(b"PK\3\4")
    assert words(directory) == "complete", "what nobody loads counts for nothing"


def test_an_index_beside_that_of_the_model(shards: Path) -> None:
    (shards / "9-model.safetensors.index.json").write_text('{"weight_map": {"a": ')
    assert words(shards).startswith("unknown: if 9-model.safetensors.index.json belongs to it")
    (shards / "model.safetensors.index.json").unlink()
    assert words(shards).startswith("incomplete")


# --- arrays of zarr, as Orbax writes them without its database ------------------------------------


@pytest.fixture
def orbax(tmp_path: Path) -> Path:
    """Of one array in six chunks, without compression."""
    path = tmp_path / "7"
    (path / "w").mkdir(parents=True)
    handlers = "orbax.checkpoint.handlers.PyTreeCheckpointHandler"
    metadata: dict[str, object] = {"item_handlers": handlers, "commit_timestamp_nsecs": 7}
    (path / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata))
    value = {"value_type": "np.ndarray", "skip_deserialize": False}
    parameter = {"key_metadata": [{"key": "w", "key_type": 2}], "value_metadata": value}
    tree = {"tree_metadata": {"('w',)": parameter}, "use_ocdbt": False}
    tree |= {"store_array_data_equal_to_fill_value": True}
    (path / "_METADATA").write_text(json.dumps(tree))
    array = {"shape": [5, 4], "chunks": [2, 2], "dtype": "<f8", "compressor": None}
    (path / "w" / ".zarray").write_text(json.dumps(array) + "\0\0")
    for number in range(6):
        (path / "w" / f"{number // 2}.{number % 2}").write_bytes(bytes([number + 1]) * 32)
    assert words(path) == "complete"
    return path


def test_chunks_of_orbax_without_a_database(orbax: Path) -> None:
    for number in range(6):
        chunk = orbax / "w" / f"{number // 2}.{number % 2}"
        content = chunk.read_bytes()
        chunk.write_bytes(content[:-1])
        assert words(orbax) == f"incomplete: w/{chunk.name} has 31 bytes, 32 are needed"
        chunk.unlink()
        assert words(orbax) == f"incomplete: w/{chunk.name} is missing"
        chunk.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("_METADATA", None, "incomplete: _METADATA is missing"),
        ("w/.zarray", None, "incomplete: w/.zarray is missing"),
        ("w/.zarray", b"\0\0", "incomplete: w/.zarray is empty"),
        ("w/.zarray", b'{"shape": [5', "damaged: w/.zarray is not JSON"),
        ("w/.zarray", b'{"shape": [5, -1]}', "damaged: w/.zarray is damaged"),
    ],
)
def test_descriptions_of_orbax_without_a_database(
    orbax: Path, name: str, content: bytes | None, said: str
) -> None:
    (orbax / name).unlink()
    if content is not None:
        (orbax / name).write_bytes(content)
    assert words(orbax).startswith(said)


def test_an_archive_whose_longer_end_record_is_none(tmp_path: Path) -> None:
    """PyTorch goes by the shorter one then, Python does not."""
    path = tmp_path / "a.npz"
    np.savez(path, w=ARRAY)
    data = path.read_bytes()
    end = len(data) - 22
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, 0, 1)
    path.write_bytes(data[:end] + bytes(76) + locator + data[end:])
    assert words(path) == "unknown: the archive's end record is not one"


def test_what_the_trainer_does_not_load(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint-7"
    directory.mkdir()
    (directory / "trainer_state.json").write_text('{"global_step": 7}')
    save_file({"w": ARRAY}, directory / "model.safetensors")
    (directory / "9-optimizer.pt").write_bytes(b"PK\3\4")
    assert words(directory).startswith("unknown: if 9-optimizer.pt belongs to it")
    (directory / "optimizer.pt").write_bytes(b"PK\3\4")
    assert words(directory).startswith("incomplete: ")


# --- holes --------------------------------------------------------------------------------------


def test_a_file_that_is_one_hole_is_read_at_once(tmp_path: Path) -> None:
    size = 4 << 40
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "step-9.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    assert words(tmp_path / "step-9.safetensors").startswith("unknown: nothing of its tensors was")
    save_file({"w": ARRAY}, tmp_path / "step-8.safetensors")
    assert good(tmp_path)[0].path.name == "step-8.safetensors"


def test_a_hole_in_a_file_is_said(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": np.ones(500_000), "b": np.zeros(500_000)}, path)
    with path.open("r+b") as file:
        content = file.read()
        file.seek(0)
        file.truncate(0)
        file.write(content[: len(content) // 2])
        file.truncate(len(content))
    found = inspect(path, Level.CONTENT)
    assert found is not None
    assert found.state is State.COMPLETE
    assert len(found.notes) == 1
    assert found.notes[0].endswith(" bytes of it are holes: zeros, or never written")


@pytest.mark.parametrize("size", [0, 1, 4095, 3 << 20])
def test_checksums_over_holes(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.npy", b"begin" + bytes(size) + b"end")
    data = path.read_bytes()
    with path.open("wb") as file:
        at = data.index(b"begin") + 5
        file.write(data[:at])
        file.truncate(at + size)
        file.seek(at + size)
        file.write(data[at + size :])
    assert state(path) is State.COMPLETE
