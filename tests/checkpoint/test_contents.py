"""What is found beyond names and sizes: mixed sets, unreadable bytes, the places of tensors."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from safetensors.numpy import save_file

from cxlfs.checkpoint import Level, State, ages, inspect
from tests.checkpoint.conftest import Unpack
from tests.support.ended_early import ended_early, records


def words(path: Path, level: Level = Level.STRUCTURE) -> str:
    found = inspect(path, level)
    assert found is not None
    return found.words


# --- archives that an exception has ended early ---------------------------------------------------


def test_an_archive_without_what_had_not_come_is_incomplete(unpack: Unpack) -> None:
    path = unpack("torch") / "zip.pt"
    data = path.read_bytes()
    names = records(data)
    storages = [number for number, name in enumerate(names) if name.startswith("data/")]
    for count in range(max(storages) + 1):
        path.write_bytes(ended_early(data, count))
        what = "before tensor " if count else "anything was in it"
        assert words(path).startswith("incomplete: ")
        assert what in words(path)
    path.write_bytes(ended_early(data, max(storages) + 1))
    assert words(path, Level.CONTENT) == "complete"


def test_a_checkpoint_whose_last_file_is_such_an_archive_is_incomplete(unpack: Unpack) -> None:
    path = unpack("accelerate") / "checkpoint_3"
    last = path / "custom_checkpoint_0.pkl"
    last.write_bytes(ended_early((path / "random_states_0.pkl").read_bytes(), 0))
    assert words(path) == (
        f"incomplete: {last.name}: the archive was ended before anything was in it"
    )


def test_a_storage_by_another_name_is_damage(unpack: Unpack) -> None:
    path = unpack("torch") / "zip.pt"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"/data/0", b"/data/;"))
    assert words(path).startswith("damaged: ")


# --- files of two saves -------------------------------------------------------------------------


def later(path: Path, seconds: int = 60) -> None:
    status = path.stat()
    moment = status.st_mtime_ns + seconds * 1_000_000_000
    os.utime(path, ns=(moment, moment))


@pytest.fixture
def distributed(unpack: Unpack, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose files were born an hour before they were written."""
    path = unpack("dcp") / "step-7"
    hour_ns = 3600 * 1_000_000_000
    monkeypatch.setattr(ages, "birth_ns", lambda each: each.stat().st_mtime_ns - hour_ns)
    later(path / ".metadata", 1)
    return path


def test_a_shard_that_was_written_over_is_told_from_one_of_the_same_save(distributed: Path) -> None:
    assert words(distributed) == "complete"
    later(distributed / "__0_0.distcp")
    assert words(distributed) == (
        "incomplete: __0_0.distcp was written after .metadata: it may be of another save"
    )
    later(distributed / ".metadata", 61)
    assert words(distributed) == "complete"


def test_a_copy_in_another_order_is_no_mixed_set(unpack: Unpack, tmp_path: Path) -> None:
    source = unpack("dcp") / "step-7"
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(source / ".metadata", copy)
    shutil.copy(source / "__0_0.distcp", copy)
    later(copy / "__0_0.distcp")  # written long after .metadata, by the file that was made then
    if ages.birth_ns(copy) is None:
        assert "another save" in words(copy), "without a time of birth the safe answer"
    else:
        assert words(copy) == "complete"


def test_on_a_store_commits_and_inodes_say_it(
    unpack: Unpack, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = unpack("dcp") / "step-7"
    commits = {".metadata": 20, "__0_0.distcp": 10}
    monkeypatch.setattr(ages, "commit_of", lambda each: commits[each.name])
    assert words(path) == "complete"
    commits["__0_0.distcp"] = 30
    first, last = sorted((path / ".metadata", path / "__0_0.distcp"), key=lambda p: p.stat().st_ino)
    expected = "complete" if first.name == ".metadata" else "another save"
    assert expected in words(path)
    if last.name == "__0_0.distcp":  # the other order of inodes
        data = (path / ".metadata").read_bytes()
        (path / "__0_0.distcp").rename(path / "keep")
        while True:
            (path / "new").write_bytes(data)
            if (path / "new").stat().st_ino > (path / "keep").stat().st_ino:
                break
            (path / "new").rename(path / f"filler-{len(list(path.iterdir()))}")
        (path / "new").rename(path / ".metadata")
        (path / "keep").rename(path / "__0_0.distcp")
        assert "another save" in words(path)


def test_hugging_face_weights_of_a_later_save(
    unpack: Unpack, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = unpack("hugging-face") / "checkpoint-2"
    monkeypatch.setattr(ages, "birth_ns", lambda _: 1)
    for each in path.iterdir():
        os.utime(each, (1000, 1000))
    later(path / "trainer_state.json")
    assert words(path) == "complete"
    later(path / "rng_state.pth", 61)  # another rank was a moment later
    assert words(path) == "complete"
    later(path / "model.safetensors", 120)
    assert "model.safetensors was written after trainer_state.json" in words(path)


@pytest.mark.parametrize(
    ("ranks", "missing"),
    [
        ((0, 1), None),
        ((1,), None),
        ((2, 3), None),
        ((8, 9, 10, 11), None),
        ((0, 2), 1),
        ((1, 2), 0),
        ((2, 4), 0),
        ((1, 2, 3, 4, 5, 6, 7), 0),
    ],
)
def test_random_states_of_all_ranks_or_of_one_node(
    unpack: Unpack, ranks: tuple[int, ...], missing: int | None
) -> None:
    """With ``save_on_each_node`` a later node's directory has its own ranks' alone."""
    path = unpack("hugging-face") / "checkpoint-2"
    data = (path / "rng_state.pth").read_bytes()
    (path / "rng_state.pth").unlink()
    for rank in ranks:
        (path / f"rng_state_{rank}.pth").write_bytes(data)
    later(path / "trainer_state.json")
    found = "complete" if missing is None else f"incomplete: rng_state_{missing}.pth is missing"
    assert words(path) == found


def test_with_zero_the_optimizer_has_files_although_none_of_them_is_there(unpack: Unpack) -> None:
    """Killed behind the model's file, which comes before them."""
    path = unpack("deepspeed-zero") / "stage-1" / "global_step3"
    assert words(path) == "complete"
    for each in path.glob("*_optim_states.pt"):
        each.unlink()
    assert words(path) == (
        "incomplete: shard 1 of 2 of the optimizer (*zero_pp_rank_0_mp_rank_00_optim_states.pt) "
        "is missing"
    )


def test_ranks_of_deepspeed_that_say_they_are_of_two_steps(unpack: Unpack) -> None:
    run = unpack("deepspeed-zero") / "stage-3"
    shutil.copy(run / "global_step2" / _RANK_1, run / "global_step3")
    assert words(run / "global_step3") == (
        "incomplete: files of several saves: zero_pp_rank_0_mp_rank_00_model_states.pt is of "
        f"step 3, {_RANK_1} of step 2"
    )


_RANK_1 = "zero_pp_rank_1_mp_rank_00_model_states.pt"


def test_ranks_of_megatron_that_say_they_are_of_two_iterations(unpack: Unpack) -> None:
    path = unpack("megatron") / "ranks" / "iter_0000100"
    with zipfile.ZipFile(path / "mp_rank_01_001" / "model_optim_rng.pt", "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps({"iteration": 90, "model": {}}, protocol=2))
    assert words(path) == (
        "incomplete: files of several saves: mp_rank_00_000/model_optim_rng.pt is of step 100, "
        "mp_rank_01_001/model_optim_rng.pt of step 90"
    )


def test_a_rank_of_megatron_without_the_optimizer_that_others_have(unpack: Unpack) -> None:
    path = unpack("megatron") / "ranks" / "iter_0000100"
    ranks = sorted(path.iterdir())
    for rank in ranks:
        shutil.copy(rank / "model_optim_rng.pt", rank / "distrib_optim.pt")
    assert words(path) == "complete"
    (ranks[2] / "distrib_optim.pt").unlink()
    assert words(path) == f"incomplete: {ranks[2].name}/distrib_optim.pt is missing"


# --- bytes that cannot be read ------------------------------------------------------------------


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Reads that meet [begin, end) of any file fail as on a store with damage there."""

    def refused(begin: int, end: int) -> None:
        real = os.pread

        def pread(descriptor: int, length: int, offset: int) -> bytes:
            if offset < end and begin < offset + length:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(descriptor, length, offset)

        monkeypatch.setattr(os, "pread", pread)

    return refused


def test_the_tensor_of_bytes_that_cannot_be_read(
    tmp_path: Path, refuse: Callable[[int, int], None]
) -> None:
    path = tmp_path / "m.safetensors"
    save_file({f"layers.{n}.w": np.full(500_000, n, "<f4") for n in range(4)}, path)
    found = inspect(path)
    assert found is not None
    (tensor,) = [t for t in found.tensors if t.name == "layers.2.w"]
    assert tensor.offset is not None
    refuse(tensor.offset + 1_999_000, tensor.offset + 1_999_001)
    assert words(path) == "complete"
    page = (tensor.offset + 1_999_000) // 4096 * 4096
    begin = page - page % 4096
    said = words(path, Level.CONTENT)
    assert said.startswith("damaged: tensor layers.2.w: bytes ")
    first, last = (int(word) for word in said.split() if word.isdigit())
    assert last - first <= 4096
    assert abs(first - begin) <= 4096


def test_a_header_that_cannot_be_read(tmp_path: Path, refuse: Callable[[int, int], None]) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": np.arange(4.0)}, path)
    refuse(0, 8)
    found = inspect(path)
    assert found is not None
    assert found.state is State.DAMAGED


def test_what_a_store_says_of_a_file_counts(
    unpack: Unpack, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = unpack("deepspeed") / "global_step10"
    name = "mp_rank_00_model_states.pt"
    said = {name: "incomplete"}
    from cxlfs.checkpoint import inspection

    monkeypatch.setattr(
        inspection, "attribute", lambda each, _: said.get(Path(each).name, "complete")
    )
    assert words(path) == f"incomplete: the writer of {name} has not closed it, or was killed"
    said[name] = "damaged"
    assert words(path) == f"damaged: {name} has bytes that cannot be read"


# --- where tensors lie --------------------------------------------------------------------------


def test_the_bytes_of_each_tensor_are_where_it_says(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(12.0).reshape(3, 4),
        "b": np.arange(7, dtype="<i2"),
        "empty": np.zeros((0, 5), "<f4"),
        "scalar": np.float64(3.5),
    }
    np.savez(tmp_path / "x.npz", **arrays)
    save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, tmp_path / "x.safetensors")
    np.save(tmp_path / "a.npy", arrays["a"])
    for name in ("x.npz", "x.safetensors", "a.npy"):
        found = inspect(tmp_path / name, Level.CONTENT)
        assert found is not None
        assert found.words == "complete"
        data = (tmp_path / name).read_bytes()
        for tensor in found.tensors:
            wanted = arrays[tensor.name or "a"]
            assert tensor.offset is not None
            assert tensor.size_bytes == wanted.nbytes
            assert data[tensor.offset : tensor.offset + tensor.size_bytes] == wanted.tobytes()
            assert int(np.prod(tensor.shape)) == wanted.size


@pytest.mark.parametrize(
    "dtype", ["?", "<U5", "S3", "<c16", ">f8", "<M8[ns]", [("a", "<i2"), ("b", "<f4", (2, 3))], "O"]
)
def test_types_of_numpy(tmp_path: Path, dtype: object) -> None:
    array = np.zeros((2, 3), dtype=dtype)  # type: ignore[call-overload]
    np.save(tmp_path / "x.npy", array)
    assert words(tmp_path / "x.npy", Level.CONTENT) == "complete"
    size = (tmp_path / "x.npy").stat().st_size
    os.truncate(tmp_path / "x.npy", size - 1)
    assert words(tmp_path / "x.npy").startswith("incomplete")


def test_compressed_archives(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", a=np.arange(100_000))
    assert words(tmp_path / "x.npz", Level.CONTENT) == "complete"
    data = bytearray((tmp_path / "x.npz").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "x.npz").write_bytes(data)
    assert words(tmp_path / "x.npz", Level.CONTENT).startswith("damaged")


# --- HDF5 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["earliest", "latest"])
@pytest.mark.parametrize("userblock", [0, 512, 2048])
def test_superblocks(tmp_path: Path, version: str, userblock: int) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver=version, userblock_size=userblock) as file:
        file["w"] = np.arange(1000.0)
    assert words(path, Level.CONTENT) == "complete"
    with path.open("ab") as file:
        file.write(bytes(10))
    assert words(path).startswith("unknown: it goes on behind its end")
    os.truncate(path, path.stat().st_size - 20)
    assert words(path).startswith("incomplete: it ends at byte")


@pytest.mark.parametrize("userblock", [0, 1024])
def test_data_sets_are_where_they_say(tmp_path: Path, userblock: int) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", userblock_size=userblock) as file:
        file["a"] = np.arange(100.0)
        file["a"].attrs["long"] = "y" * 1000
        group = file.create_group("group")
        group["b"] = np.ones((3, 4), ">i2")
        group["bool"] = np.array([True, False])
        group.create_dataset("chunked", data=np.zeros((50, 50)), chunks=True, compression="gzip")
        group.create_dataset("never written", (10,), "f8")
        for number in range(300):
            group[f"many/{number}"] = np.full(3, number, "f4")
        file["again"] = h5py.SoftLink("/a")
        file["self"] = file["group"]
        group["up"] = file["/"]
    found = inspect(path, Level.CONTENT)
    assert found is not None
    assert (found.words, found.notes) == ("complete", ())
    assert len(found.tensors) == 1 + 4 + 300
    data = path.read_bytes()
    with h5py.File(path) as file:
        for tensor in found.tensors:
            array = file[tensor.name]
            assert tensor.shape == array.shape
            if tensor.offset is not None:
                assert tensor.size_bytes == array.nbytes
                piece = data[tensor.offset : tensor.offset + array.nbytes]
                assert piece == array[()].tobytes()
    assert sum(tensor.offset is None for tensor in found.tensors) == 2


def test_a_page_of_an_hdf5_file_that_was_never_written(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        for number in range(100):
            file[f"{number}"] = np.full(50, number)
    data = path.read_bytes()
    worse = 0
    for page in range(0, len(data), 4096):
        path.write_bytes(data[:page] + bytes(4096) + data[page + 4096 :])
        worse += words(path, Level.CONTENT) != "complete"
    assert worse > 1, "more than the superblock is looked at"


def test_a_file_that_is_open_for_writing(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file["w"] = np.arange(1000.0)
        file.swmr_mode = True
        file.flush()
        shutil.copy(path, tmp_path / "copy.h5")
    assert words(tmp_path / "copy.h5").startswith("incomplete")
    assert words(path) == "complete"


# --- TensorFlow ---------------------------------------------------------------------------------


def test_a_wrong_byte_in_the_index(unpack: Unpack) -> None:
    prefix = unpack("tensorflow") / "run" / "ckpt-10"
    index = Path(f"{prefix}.index")
    data = bytearray(index.read_bytes())
    data[40] ^= 1
    index.write_bytes(data)
    assert words(prefix) == "damaged: ckpt-10.index: the checksum of its block at 0 differs"


def test_zip64(tmp_path: Path) -> None:
    """Sizes in the extra field, as torch writes them for records of 4 GiB and more."""
    np.savez(tmp_path / "x.npz", a=np.arange(10.0))
    data = (tmp_path / "x.npz").read_bytes()
    begin, end = data.index(b"PK\x01\x02"), data.rindex(b"PK\x05\x06")
    entry = bytearray(data[begin:end])
    stored, size = struct.unpack_from("<2L", entry, 20)
    struct.pack_into("<2L", entry, 20, 0xFFFFFFFF, 0xFFFFFFFF)
    extra = struct.pack("<2H2Q", 1, 16, size, stored)
    struct.pack_into("<H", entry, 30, len(extra))
    name_end = 46 + struct.unpack_from("<H", entry, 28)[0]
    entry[name_end:] = extra
    directory = bytes(entry)
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, len(directory), begin)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, begin + len(directory), 1)
    last = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 2**32 - 1, 2**32 - 1, 0)
    (tmp_path / "x.npz").write_bytes(data[:begin] + directory + record + locator + last)
    assert words(tmp_path / "x.npz", Level.CONTENT) == "complete"
