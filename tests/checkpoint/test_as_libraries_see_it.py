"""What a library that wrote a checkpoint cannot load any more, or loads wrongly, is not complete.

Which damage that is was found with the libraries: ``tests/frameworks/test_damages.py``.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from cxlfs.checkpoint import Level, State, inspect
from cxlfs.checkpoint.formats import tensorflow
from cxlfs.checkpoint.zstd import is_frame
from tests.checkpoint.conftest import Unpack
from tests.checkpoint.test_zstd import FRAMES


def words(path: Path) -> str:
    found = inspect(path, Level.CONTENT)
    assert found is not None
    return found.words


# --- TensorFlow ---------------------------------------------------------------------------------


def test_the_checksum_of_a_type_that_is_not_known(
    unpack: Unpack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow has more of them with each release; their bytes have checksums like others."""
    path = unpack("tensorflow") / "run" / "ckpt-20"
    monkeypatch.delitem(tensorflow._TYPES, 1)
    found = inspect(path, Level.CONTENT)
    assert found is not None
    assert found.state is State.COMPLETE
    (tensor,) = [each for each in found.tensors if each.name == "w"]
    assert (tensor.dtype, tensor.offset is None) == ("type 1", False)
    data = path.parent / tensor.file
    content = bytearray(data.read_bytes())
    content[tensor.offset or 0] ^= 1
    data.write_bytes(content)
    assert words(path).startswith("damaged: tensor w")


def message(*fields: tuple[int, bytes]) -> bytes:
    """Of a protocol buffer, with fields of less than 128 bytes."""
    return b"".join(bytes([number << 3 | 2, len(data)]) + data for number, data in fields)


ASSET = message((2, message((6, message((2, b"words.txt"))))))
VARIABLE = message((2, message((7, message((1, message((7, b""))))))))
NOT_TEXT = message((2, message((2, message((1, message((1, b"\xff"))))))))
NO_FIELD = message((2, message((7, message((1, bytes(4)))))))


def test_the_parts_that_a_graph_names(tmp_path: Path) -> None:
    graph = tmp_path / "saved_model.pb"
    graph.write_bytes(ASSET)
    assert words(tmp_path) == "incomplete: the asset assets/words.txt is missing"
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "words.txt").write_text("one")
    assert words(tmp_path) == "complete"
    graph.write_bytes(ASSET.replace(b"words.txt", b"../../a.b"))
    assert words(tmp_path).startswith("damaged: saved_model.pb: it names a file outside of itself")
    graph.write_bytes(VARIABLE)
    assert words(tmp_path).startswith("incomplete: variables/variables.index is missing")


@pytest.mark.parametrize("graph", [NOT_TEXT, NO_FIELD], ids=("not text", "no field"))
def test_a_graph_that_cannot_be_parsed_to_its_leaves(tmp_path: Path, graph: bytes) -> None:
    (tmp_path / "saved_model.pb").write_bytes(graph)
    assert words(tmp_path).startswith("damaged: saved_model.pb: a ")


def test_a_graph_with_zeros_to_its_end(unpack: Unpack) -> None:
    path = unpack("tensorflow") / "saved"
    graph = path / "saved_model.pb"
    data = graph.read_bytes()
    for begin in range(1, len(data) - 8, 97):
        graph.write_bytes(data[:begin].ljust(len(data), b"\0"))
        assert words(path).startswith("damaged: saved_model.pb: "), begin


def test_a_graph_that_goes_deeper_than_is_looked(tmp_path: Path) -> None:
    graph = head = b""
    for _ in range(120):  # a list of values of lists of values
        head = b"\x9a\x03" + _length(graph) + graph
        graph = b"\x0a" + _length(head) + head
    concrete = b"\x22" + _length(head) + head
    for number in (2, 2, 7, 2):
        concrete = bytes([number << 3 | 2]) + _length(concrete) + concrete
    (tmp_path / "saved_model.pb").write_bytes(concrete)
    found = inspect(tmp_path)
    assert found is not None
    assert found.state is State.COMPLETE
    assert "nested deeper" in found.notes[0]


def _length(data: bytes) -> bytes:
    size, found = len(data), b""
    while size > 127:
        found += bytes([size & 127 | 128])
        size >>= 7
    return found + bytes([size])


# --- Orbax --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["default/_sharding", "default/array_metadatas/process_0"])
def test_what_orbax_parses_beside_its_tree(unpack: Unpack, name: str) -> None:
    path = unpack("orbax") / "2"
    data = (path / name).read_bytes()
    for length in range(0, len(data), 17):
        (path / name).write_bytes(data[:length])
        assert not words(path).startswith("complete")
    (path / name).write_bytes(data.replace(b'"write_shape"', b'"write_shepe"'))
    assert (words(path) == "complete") is (b"write_shape" not in data)


@pytest.mark.parametrize("key", ["key_type", "value_type", "skip_deserialize"])
def test_a_key_that_orbax_cannot_do_without(unpack: Unpack, key: str) -> None:
    path = unpack("orbax") / "2"
    name = path / "default" / "_METADATA"
    name.write_text(name.read_text().replace(f'"{key}"', f'"{key[:-1]}x"', 1))
    assert words(path).startswith("damaged: ")


def test_an_item_of_json(unpack: Unpack) -> None:
    path = unpack("orbax") / "2"
    metadata = json.loads((path / "_CHECKPOINT_METADATA").read_text())
    metadata["item_handlers"]["config"] = "a.b.JsonCheckpointHandler"
    (path / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata))
    item = path / "config"
    item.mkdir()
    (item / "commit_success.txt").write_text("Checkpoint commit was successful")
    assert words(path) == "incomplete: nothing is in config"
    (item / "metadata").write_text('{"lr": 0.5}')
    assert words(path) == "complete"
    (item / "metadata").write_text('{"lr": 0.')
    assert words(path) == "incomplete: config/metadata was not written to its end"


def test_an_array_of_orbax_that_lacks_its_end(unpack: Unpack) -> None:
    path = unpack("orbax") / "2"
    found = inspect(path)
    assert found is not None
    (tensor,) = [each for each in found.tensors if each.offset is not None]
    begin, size = tensor.offset or 0, tensor.size_bytes or 0
    data = (path / tensor.file).read_bytes()
    for at in range(begin, begin + size - 2, 29):
        (path / tensor.file).write_bytes(
            data[:at].ljust(begin + size, b"\0") + data[begin + size :]
        )
        assert words(path).startswith("damaged: tensor w"), at


@pytest.mark.parametrize("name", FRAMES)
def test_frames_from_their_heads(name: str) -> None:
    frame = bytes.fromhex(FRAMES[name][1])
    assert whole(frame)
    assert not whole(frame + b"\0")
    assert not any(whole(frame[:length]) for length in range(len(frame)))


def test_a_block_that_is_longer_than_there_can_be() -> None:
    frame = bytearray.fromhex("28b52ffd0058")
    assert whole(frame + struct.pack("<L", 3 << 3 | 1)[:3] + b"abc")
    size = 129 << 10
    assert not whole(frame + struct.pack("<L", size << 3 | 1)[:3] + bytes(size))
    assert not whole(frame + struct.pack("<L", 3 << 3 | 7)[:3] + b"abc")


def whole(frame: bytes | bytearray) -> bool:
    return is_frame(bytes(frame[at : at + 7]) for at in range(0, len(frame), 7))


# --- flax ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (b"float32", b"float16", "does not fit its shape"),
        (b"float32", b"flnat32", "the type of tensor"),
        (b"\x92\x08\x10", b"\x92\x08\x11", "does not fit its shape"),
        (b"\xa4step", b"\xa4st\xe5p", "a text in its tree is none"),
        (b"\xa4step", b"\x04\x04\x04\x04\x04", "a key of its tree is no name"),
    ],
)
def test_headers_of_arrays_of_flax(unpack: Unpack, old: bytes, new: bytes, what: str) -> None:
    path = unpack("flax") / "checkpoint_9"
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    assert what in words(path)
    # A tree may have other keys: what flax does not write may be somebody else's.
    assert words(path).startswith("unknown" if "key" in what else "damaged")


# --- archives -----------------------------------------------------------------------------------


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "x.npz"
    np.savez(path, weights=np.arange(100.0))
    assert words(path) == "complete"
    return path


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (lambda data: data.replace(b"weights.npy", b"weightz.npy", 1), "unknown"),
        (lambda data: _at(data, b"PK\1\2", 6, 84), "unknown"),
    ],
    ids=("another name in its header", "a later version"),
)
def test_archives_that_zipfile_refuses(
    archive: Path, change: Callable[[bytes], bytes], state: str
) -> None:
    archive.write_bytes(change(archive.read_bytes()))
    with (
        pytest.raises((zipfile.BadZipFile, NotImplementedError)),
        zipfile.ZipFile(archive) as found,
    ):
        found.read("weights.npy")
    assert words(archive).startswith(state)


def _at(data: bytes, magic: bytes, offset: int, value: int) -> bytes:
    at = data.index(magic) + offset
    return data[:at] + bytes([value]) + data[at + 1 :]


# --- HDF5 ---------------------------------------------------------------------------------------


def test_everything_that_hdf5_may_hold_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["type"] = np.dtype("f4")
        file.create_dataset("typed", (5,), dtype=file["type"])
        file["compound"] = np.zeros(3, [("a", "i4"), ("b", "f8", (2,))])
        file["complex"] = np.zeros(3, "c16")
        file["empty"] = h5py.Empty("f4")
        file["none"] = np.zeros((0, 4))
        file["scalar"] = 7
        file["text"] = "words"
        file["texts"] = np.array([b"ab", b"c"])
        file["enum"] = np.zeros(2, h5py.enum_dtype({"a": 0, "b": 300}, "i4"))
        file["reference"] = file["scalar"].ref
        file.create_dataset("external", (4,), dtype="u1", external=[(tmp_path / "raw", 0, 4)])
        file.create_dataset("grows", (1, 4), dtype="f4", maxshape=(None, 4))
        file["grows"].resize((3000, 4))
        file.create_dataset("chunks", data=np.ones((70, 70)), chunks=(3, 3), fletcher32=True)
        file.create_dataset("filled", (9,), dtype="f4", fillvalue=3)
        for number in range(50):
            file["scalar"].attrs[f"attribute {number}"] = np.arange(number)
        for number in range(40):
            file[f"gone/{number}"] = number
        for number in range(0, 40, 3):
            del file[f"gone/{number}"]
        layout = h5py.VirtualLayout((3000, 4), "f4")
        layout[:] = h5py.VirtualSource(file["grows"])
        file.create_virtual_dataset("virtual", layout)
    with h5py.File(path, "a") as file:
        file["later"] = np.arange(10)
    assert words(path) == "complete"


def later(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + bytes([value]) + data[at + 1 :]


SUPERBLOCK = {
    "version of free space": 9,
    "version of the root's entry": 10,
    "version of shared headers": 12,
    "flags": 22,
    "base": 25,
    "extension": 33,
    "driver": 50,
}
"""Bytes of it, all of which one bit makes unreadable."""


@pytest.fixture
def hdf5(tmp_path: Path) -> Path:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["group/a"] = np.arange(100.0)
        file.create_dataset("chunked", data=np.zeros((50, 50)), chunks=(10, 10), compression="gzip")
    assert words(path) == "complete"
    return path


def is_refused(path: Path) -> bool:
    """By HDF5's own library, with all that it holds."""
    try:
        with h5py.File(path) as file:
            file.visititems(lambda _, each: each[()] if isinstance(each, h5py.Dataset) else None)
    except (OSError, RuntimeError, KeyError):
        return True
    return False


@pytest.mark.parametrize("name", SUPERBLOCK)
def test_a_wrong_bit_in_the_superblock(hdf5: Path, name: str) -> None:
    data = hdf5.read_bytes()
    at = SUPERBLOCK[name]
    hdf5.write_bytes(later(data, at, data[at] ^ 8))
    assert is_refused(hdf5)
    assert not words(hdf5).startswith("complete")


def test_structures_with_zeros_for_a_part(hdf5: Path) -> None:
    """Of each structure that can be found by its signature or lies behind the superblock."""
    data = hdf5.read_bytes()
    places = [96]
    for signature in (b"TREE", b"SNOD", b"HEAP"):
        at = data.find(signature)
        while at >= 0:
            places.append(at)
            at = data.find(signature, at + 1)
    refused = 0
    for at in places:
        for begin in range(at, at + 40, 8):
            hdf5.write_bytes(data[:begin] + bytes(8) + data[begin + 8 :])
            if is_refused(hdf5):
                refused += 1
                assert not words(hdf5).startswith("complete"), (at, begin - at)
    assert refused > 15


def test_a_chunk_behind_the_end(hdf5: Path) -> None:
    data = hdf5.read_bytes()
    at = next(at for at in range(len(data)) if data[at : at + 6] == b"TREE\1\0")
    first = at + 24 + 8 + 3 * 8
    hdf5.write_bytes(data[:first] + struct.pack("<Q", len(data) - 1) + data[first + 8 :])
    assert is_refused(hdf5)
    assert words(hdf5) == "damaged: tensor chunked lies behind the end"


def test_a_root_of_later_version_that_was_never_written(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file["w"] = np.arange(1000.0)
    data = path.read_bytes()
    path.write_bytes(data[:48] + bytes(512) + data[560:])
    assert is_refused(path)
    assert words(path).startswith("damaged: HDF5's library cannot read it")
