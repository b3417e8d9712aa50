"""Files of the client on any directory: what io promises, and what gathering must not change."""

from __future__ import annotations

import io
import os
import pickle
import random
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

from cxlfs import client
from cxlfs.client.gathering import GATHER_BYTES, PASS_FROM_BYTES, Gathering

SIZES = (1, 10, 1000, PASS_FROM_BYTES - 1, PASS_FROM_BYTES, PASS_FROM_BYTES + 7)


def test_what_is_gathered_is_one_range() -> None:
    waiting = Gathering()
    small = memoryview(bytes(100))
    assert not waiting
    assert waiting.accepts(small, 50)
    waiting.put(small, 50)
    assert waiting
    assert waiting.end == 150
    assert waiting.accepts(small, 150)
    assert not waiting.accepts(small, 149)
    assert not waiting.accepts(memoryview(bytes(PASS_FROM_BYTES)), 150)
    while not waiting.is_full:
        waiting.put(small, waiting.end)
    assert not waiting.accepts(small, waiting.end)
    offset, data = waiting.take()
    assert (offset, len(data)) == (50, GATHER_BYTES + -GATHER_BYTES % 100)
    assert not waiting
    assert waiting.accepts(small, 0)


def test_random_calls_do_what_a_plain_file_does(tmp_path: Path, rng: random.Random) -> None:
    with (
        client.open(tmp_path / "ours", "w+b") as ours,
        (tmp_path / "theirs").open("w+b", buffering=0) as theirs,
    ):
        files: tuple[io.RawIOBase, ...] = (ours, theirs)
        for _ in range(2000):
            data = rng.randbytes(rng.choice(SIZES)) if rng.random() < 0.5 else b""
            offset = rng.randrange(1 << 19)
            match rng.randrange(7):
                case 0 | 1 | 2:
                    assert ours.write(data) == theirs.write(data)
                case 3:
                    assert [file.seek(offset) for file in files] == [offset, offset]
                case 4:
                    first, second = (file.read(10_000) for file in files)
                    assert first == second
                case 5:
                    back = -min(offset, theirs.seek(0, os.SEEK_END))
                    assert ours.seek(back, os.SEEK_END) == theirs.seek(back, os.SEEK_END)
                case 6:
                    assert ours.truncate(offset) == theirs.truncate(offset)
            assert ours.tell() == theirs.tell()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("mode", ["rb", "r+b", "rb+", "wb", "w+b", "xb", "x+b", "ab", "a+b"])
def test_modes_are_those_of_open(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "file"
    if mode[0] != "x":
        path.write_bytes(b"before")
    with path.open(mode, buffering=0) as theirs:
        wanted = theirs.readable(), theirs.writable()
    if mode[0] == "x":
        path.unlink()
    elif mode[0] == "w":
        path.write_bytes(b"before")
    with client.open(path, mode) as file:
        assert (file.readable(), file.writable()) == wanted
        assert not file.direct
        assert file.why_not is not None
        if file.writable():
            assert file.write(b"AF") == 2
        else:
            with pytest.raises(io.UnsupportedOperation):
                file.write(b"AF")
        if not file.readable():
            with pytest.raises(io.UnsupportedOperation):
                file.read()
    expected = {"r": b"AFfore", "w": b"AF", "x": b"AF", "a": b"beforeAF"}[mode[0]]
    assert path.read_bytes() == (expected if mode != "rb" else b"before")


@pytest.mark.parametrize("mode", ["r", "w", "wt", "bb", "rwb", "", "r++b"])
def test_other_modes_are_refused(tmp_path: Path, mode: str) -> None:
    with pytest.raises(ValueError, match="mode"):
        client.open(tmp_path / "file", mode)
    assert list(tmp_path.iterdir()) == []


def test_memory_of_any_shape_is_written(tmp_path: Path) -> None:
    square = np.arange(12, dtype=np.int32).reshape(3, 4)
    pieces = [square, square[:, ::2], square.T, np.float64(3.5), memoryview(b""), bytearray(b"xy")]
    with client.open(tmp_path / "file", "wb") as file:
        for piece in pieces:
            assert file.write(piece) == memoryview(piece).nbytes
    assert (tmp_path / "file").read_bytes() == b"".join(memoryview(p).tobytes() for p in pieces)


def test_libraries_write_and_read(tmp_path: Path) -> None:
    array = np.arange(200_000)
    with client.open(tmp_path / "a.npy", "wb") as file:
        np.save(file, array)
    assert (np.load(tmp_path / "a.npy") == array).all()
    with client.open(tmp_path / "a.zip", "wb") as file, zipfile.ZipFile(file, "w") as archive:
        for number in range(50):
            archive.writestr(f"member-{number}", bytes([number]) * number * 1000)
    with client.open(tmp_path / "a.zip") as file, zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        assert archive.read("member-49") == b"1" * 49_000
    with client.open(tmp_path / "a.pickle", "w+b") as file:
        pickle.dump({"array": array, "list": list(range(1000))}, file)
        file.seek(0)
        assert pickle.load(file)["list"][-1] == 999  # noqa: S301  our own


def test_threads_write_their_parts(tmp_path: Path, rng: random.Random) -> None:
    part_bytes = 300_000
    content = rng.randbytes(4 * part_bytes)
    with client.open(tmp_path / "file", "wb") as file:

        def write(number: int) -> None:
            for start in range(number * part_bytes, (number + 1) * part_bytes, 10_000):
                file.write_at(content[start : start + 10_000], start)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert file.tell() == 0
    assert (tmp_path / "file").read_bytes() == content


def test_others_see_what_was_flushed_and_the_descriptor_has_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with client.open(path, "wb") as file:
        file.write(b"one")
        assert path.read_bytes() == b""
        file.flush()
        assert path.read_bytes() == b"one"
        file.write(b"two")
        os.write(file.fileno(), b"three")
    assert path.read_bytes() == b"onetwothree"


def test_a_forked_child_writes_nothing_that_waited(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with client.open(path, "wb") as file:
        file.write(b"parent")
        child = os.fork()
        if child == 0:
            file.flush()
            os._exit(0 if path.read_bytes() == b"" else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert path.read_bytes() == b"parent"


def test_what_is_discarded_is_empty_or_gone(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def fail(content: bytes) -> None:
        with client.replacing(path) as file:
            file.write(content)
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        fail(b"new" * 99999)
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="enough"):
        fail(b"new")
    assert path.read_bytes() == b""
    assert os.listxattr(path) == []
    with client.replacing(path) as file:
        file.write(b"whole")
    assert path.read_bytes() == b"whole"


def test_what_close_meets_is_raised_once() -> None:
    file = client.open("/dev/full", "wb")
    file.write(b"anything")
    with pytest.raises(OSError, match="No space left"):
        file.close()
    assert file.closed
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.write(b"more")


@pytest.mark.parametrize("verify", list(client.Verify))
def test_any_file_is_mapped(tmp_path: Path, verify: client.Verify, rng: random.Random) -> None:
    path = tmp_path / "file"
    content = rng.randbytes(100_000)
    path.write_bytes(content)
    with client.map(path, verify) as mapped:
        assert not mapped.direct
        assert len(mapped) == 100_000
        assert mapped[10:20] == content[10:20]
        assert mapped.read(99_990, 100) == content[99_990:]
        assert mapped.view == content
        assert mapped.view.readonly
        mapped.verify()
        with pytest.raises(OSError, match="range"):
            mapped.verify(0, 100_001)
        kept = mapped[:]
    assert kept == content
    with pytest.raises(ValueError, match="closed"):
        mapped.read(0, 1)


def test_an_empty_file_is_mapped(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with client.map(tmp_path / "file") as mapped:
        assert len(mapped) == 0
        assert mapped[:] == b""


def test_it_is_imported_without_numpy_or_a_framework() -> None:
    program = "import cxlfs.client, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not {"numpy", "torch", "trio", "pyfuse3", "click"} & set(done.stdout.split())
