"""Writes tables and arrays with PyArrow, h5py, zarr and NumPy below a directory, reads them back,
and prints one line for each: its name, and whether all was the same. Runs in an environment of its
own (``suites.py``), with nothing of cxlfs.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import zarr
from pyarrow import dataset, feather, parquet

ROWS = 3_000_000
VALUES = np.random.default_rng(7).standard_normal(ROWS)
TABLE = pa.table({"number": np.arange(ROWS), "value": VALUES, "group": np.arange(ROWS) % 4})


def check_parquet(at: Path) -> bool:
    parquet.write_table(TABLE, at / "t.parquet", compression="none", row_group_size=ROWS // 3)
    mapped = parquet.read_table(at / "t.parquet", memory_map=True)
    return mapped.equals(TABLE) and parquet.read_table(at / "t.parquet").equals(TABLE)


def check_feather(at: Path) -> bool:
    feather.write_feather(TABLE, str(at / "t.feather"), compression="uncompressed")
    mapped = feather.read_table(str(at / "t.feather"), memory_map=True)
    feather.write_feather(TABLE, str(at / "new"), compression="lz4")
    (at / "new").replace(at / "t.feather")
    again = feather.read_table(str(at / "t.feather"), memory_map=False)
    return bool(mapped.equals(TABLE) and again.equals(TABLE))


def check_ipc(at: Path) -> bool:
    with pa.OSFile(str(at / "t.arrow"), "wb") as sink, pa.ipc.new_file(sink, TABLE.schema) as out:
        for batch in TABLE.to_batches(max_chunksize=ROWS // 5):
            out.write_batch(batch)
    with pa.memory_map(str(at / "t.arrow")) as source:
        return bool(pa.ipc.open_file(source).read_all().equals(TABLE))


def check_mapped_sink(at: Path) -> bool:
    data = VALUES.tobytes()
    with pa.create_memory_map(str(at / "map"), len(data)) as sink:
        sink.write(data)
    return (at / "map").read_bytes() == data


def check_dataset(at: Path) -> bool:
    options = {"partitioning": ["group"], "partitioning_flavor": "hive"}
    dataset.write_dataset(TABLE, at / "set", format="parquet", **options)
    found = dataset.dataset(at / "set", partitioning="hive").to_table().sort_by("number")
    return bool(found.select(["number", "value"]).equals(TABLE.select(["number", "value"])))


def check_hdf5(at: Path) -> bool:
    with h5py.File(at / "t.h5", "w") as file:
        file.create_dataset("plain", data=VALUES)
        chunked = file.create_dataset(
            "chunked", shape=(0,), maxshape=(None,), chunks=(1 << 18,), dtype="f4"
        )
        for start in range(0, ROWS, 700_000):
            piece = VALUES[start : start + 700_000]
            chunked.resize((start + len(piece),))
            chunked[start:] = piece
    with h5py.File(at / "t.h5", "a") as file:
        file["plain"][100:2_000_000] = 1.0
        file.flush()
    with h5py.File(at / "t.h5", "r") as file:
        same = np.array_equal(file["chunked"][:], VALUES.astype("f4"))
        return same and float(file["plain"][100:2_000_000].min()) == 1.0


def check_hdf5_swmr(at: Path) -> bool:
    with h5py.File(at / "s.h5", "w", libver="latest") as file:
        grown = file.create_dataset(
            "d", shape=(0,), maxshape=(None,), chunks=(1 << 18,), dtype="f4"
        )
        file.swmr_mode = True
        with h5py.File(at / "s.h5", "r", libver="latest", swmr=True) as reader:
            for count in range(1, 5):
                grown.resize((count << 18,))
                grown[-(1 << 18) :] = count
                grown.flush()
                reader["d"].refresh()
                if reader["d"].shape != (count << 18,) or reader["d"][-1] != count:
                    return False
    return True


def check_zarr(at: Path) -> bool:
    array = zarr.create_array(at / "z", shape=VALUES.shape, chunks=(1 << 20,), dtype="f8")
    threads = [
        threading.Thread(target=array.__setitem__, args=(part, VALUES[part]))
        for part in (slice(0, 1 << 20), slice(1 << 20, 2 << 20), slice(2 << 20, ROWS))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return np.array_equal(zarr.open_array(at / "z", mode="r")[:], VALUES)


def check_numpy(at: Path) -> bool:
    VALUES.tofile(at / "raw")
    np.save(at / "saved.npy", VALUES)
    mapped = np.memmap(at / "raw", dtype="f8", mode="r+")
    mapped[::1000] = 0.0
    with (at / "raw").open("r+b", buffering=0) as file:
        file.seek(4 << 20)
        file.write(VALUES[: 1 << 20].tobytes())
    mapped.flush()
    digest = hashlib.sha256(mapped.tobytes()).digest()
    loaded = np.load(at / "saved.npy", mmap_mode="r")
    whole = hashlib.sha256((at / "raw").read_bytes()).digest()
    return digest == whole and np.array_equal(loaded, VALUES)


def check_large_pickle(at: Path) -> bool:
    import pickle

    with (at / "pickled").open("wb") as file:
        pickle.dump({"values": VALUES, "rows": list(range(100_000))}, file, protocol=5)
    with (at / "pickled").open("rb") as file:
        return np.array_equal(pickle.load(file)["values"], VALUES)  # noqa: S301  its own


def main() -> None:
    directory = Path(sys.argv[1])
    checks: dict[str, Callable[[Path], bool]] = {
        name: value for name, value in globals().items() if name.startswith("check_")
    }
    for name, check in checks.items():
        place = directory / name
        place.mkdir()
        try:
            outcome = "same" if check(place) else "different"
        except Exception as error:  # noqa: BLE001  whatever it is, it is compared
            outcome = f"{type(error).__name__}"
            print(f"{name}: {error}", file=sys.stderr)
        print(name.removeprefix("check_"), outcome, flush=True)


if __name__ == "__main__":
    main()
