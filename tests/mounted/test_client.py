"""``cxlfs.client`` on real mounts: what goes directly is right at every moment, as is the rest."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cxlfs import client
from cxlfs.control.client import control_request
from tests.support.direct_scenes import read_elsewhere, run
from tests.support.mount import MIB, Workplace, kill, wait_for_line, wait_until, workplace

pytestmark = pytest.mark.usefixtures("nothing_stays_mapped")


def counted(action: Callable[[], object]) -> client.ClientCounts:
    """What it adds to the counters."""
    before = client.counts()
    action()
    after = client.counts()
    return client.ClientCounts(*(b - a for a, b in zip(before, after, strict=True)))


def open_files(place: Workplace) -> int:
    (message,) = control_request(str(place.mountpoint), "status")
    return int(message["open_files"])


def write_often(file: client.File, data: bytes) -> None:
    for _ in range(100):
        file.write(data)


# --- writing --------------------------------------------------------------------------------------


def test_what_is_written_went_directly_and_is_there(place: Workplace, rng: random.Random) -> None:
    path = place.mountpoint / "file"
    data = rng.randbytes(9 * MIB + 4321)

    def save() -> None:
        with client.open(path, "wb") as file:
            assert file.direct
            assert file.why_not is None
            for start in range(0, len(data), MIB):
                file.write(memoryview(data)[start : start + MIB])
            assert read_elsewhere(path)[: 8 * MIB] == data[: 8 * MIB], "while it is open"

    counts = counted(save)
    assert counts.direct_bytes >= 9 * MIB
    assert counts.fuse_bytes == len(data) - counts.direct_bytes
    assert path.read_bytes() == data
    place.remount()
    assert path.read_bytes() == data


def test_random_calls_do_what_a_plain_file_does(
    place: Workplace, tmp_path: Path, rng: random.Random
) -> None:
    path = place.mountpoint / "ours"
    with client.open(path, "w+b") as ours, (tmp_path / "theirs").open("w+b", buffering=0) as theirs:
        ours.write(bytes(MIB))
        theirs.write(bytes(MIB))
        for _ in range(300):
            data = rng.randbytes(rng.choice([5, 5000, 200_000, 400_000]))
            offset = rng.randrange(2 * MIB)
            match rng.randrange(6):
                case 0 | 1:
                    assert ours.write(data) == theirs.write(data)
                case 2:
                    ours.write_at(data, offset)
                    os.pwrite(theirs.fileno(), data, offset)
                case 3:
                    assert ours.seek(offset) == theirs.seek(offset)
                case 4:
                    assert ours.read(10_000) == theirs.read(10_000)
                case 5:
                    assert ours.seek(-10, os.SEEK_END) == theirs.seek(-10, os.SEEK_END)
                    if rng.random() < 0.3:
                        assert ours.truncate(offset) == theirs.truncate(offset)
            assert ours.tell() == theirs.tell()
    assert path.read_bytes() == (tmp_path / "theirs").read_bytes()
    assert client.counts().direct_bytes > 0


def test_threads_write_one_file(place: Workplace, rng: random.Random) -> None:
    part_bytes = 2 * MIB + 777
    data = rng.randbytes(4 * part_bytes)
    path = place.mountpoint / "file"
    with client.open(path, "wb") as file:

        def write(number: int) -> None:
            for start in range(number * part_bytes, (number + 1) * part_bytes, 300_000):
                end = min(start + 300_000, (number + 1) * part_bytes)
                file.write_at(memoryview(data)[start:end], start)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert path.read_bytes() == data


def test_a_second_opener_in_the_middle(place: Workplace, rng: random.Random) -> None:
    """He sees all that was written, at every moment, and what he writes is in its order."""
    path = place.mountpoint / "file"
    expected = bytearray(rng.randbytes(4 * MIB))

    def save() -> None:
        with client.open(path, "wb") as file:
            file.write(expected[:MIB])
            with path.open("r+b", buffering=0) as other:
                assert other.read(MIB) == expected[:MIB]
                file.write(expected[MIB : 2 * MIB])
                assert os.pread(other.fileno(), 3 * MIB, 0) == expected[: 2 * MIB]
                os.pwrite(other.fileno(), b"other", 5)
            wait_until(lambda: open_files(place) == 1, "the kernel has said that it is closed")
            file.flush()
            file.write(expected[2 * MIB :])
            file.write_at(b"our", 6)

    counts = counted(save)
    expected[5:10] = b"other"
    expected[6:9] = b"our"
    assert path.read_bytes() == expected
    assert counts.direct_bytes >= 2 * MIB
    assert counts.fuse_bytes >= MIB, "while the other one had it open"


def test_a_killed_overwrite_leaves_the_old_content(place: Workplace, rng: random.Random) -> None:
    path = place.mountpoint / "file"
    data = rng.randbytes(3 * MIB)
    path.write_bytes(data)
    place.announced.append("the writer was killed")
    process = place.python(
        "import sys; from cxlfs import client; f = client.open(sys.argv[1], 'wb')\n"
        "f.write(bytes(3 << 20)); f.flush(); assert client.counts().direct_bytes == 3 << 20\n"
        "print('ready', flush=True); sys.stdin.read()",
        path,
    )
    wait_for_line(process)
    assert read_elsewhere(path) == bytes(3 * MIB)
    kill(process)
    assert read_elsewhere(path) == data


@pytest.mark.parametrize("at", ["before a byte", "waiting", "in the middle", "closed by itself"])
@pytest.mark.parametrize("is_new", [True, False])
def test_what_is_not_finished_is_discarded(
    place: Workplace, rng: random.Random, at: str, *, is_new: bool
) -> None:
    path = place.mountpoint / "file"
    if not is_new:
        path.write_bytes(b"old" * 1000)
        place.announced.append("reverted: the previous version is back")

    def begin() -> None:
        with client.replacing(path) as file:
            if at == "waiting":
                file.write(b"little")
            elif at != "before a byte":
                file.write(rng.randbytes(3 * MIB))
                file.flush()
                assert path.stat().st_size == 3 * MIB
            if at == "closed by itself":
                file.discard()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin()
    for _ in range(2):
        if is_new:
            assert list(place.mountpoint.iterdir()) == []
        else:
            assert path.read_bytes() == b"old" * 1000
        place.remount()


def test_whoever_took_the_name_meanwhile_keeps_it(place: Workplace) -> None:
    path = place.mountpoint / "file"

    def begin() -> None:
        with client.replacing(path) as file:
            file.write(bytes(MIB))
            (place.mountpoint / "other").write_bytes(b"theirs")
            (place.mountpoint / "other").rename(path)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin()
    assert path.read_bytes() == b"theirs"


def test_what_is_finished_is_there(mnt: Path) -> None:
    for content in (b"first" * 99999, b"second"):
        with client.replacing(mnt / "file") as file:
            file.write(content)
        assert (mnt / "file").read_bytes() == content
    with client.open(mnt / "file", "r+b") as file, pytest.raises(io.UnsupportedOperation):
        file.discard()


def test_a_fork_in_the_middle(place: Workplace, rng: random.Random) -> None:
    path = place.mountpoint / "file"
    data = rng.randbytes(4 * MIB)
    with client.open(path, "wb") as file:
        file.write(data[: 2 * MIB])
        child = os.fork()
        if child == 0:
            # Its bytes go through the kernel, with the descriptor that it has inherited.
            ok = file.write_at(b"child", 2 * MIB) == 5
            file.flush()
            os._exit(0 if ok and client.counts().media == 0 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert read_elsewhere(path)[2 * MIB :] == b"child"
        file.write(data[2 * MIB :])
    assert path.read_bytes() == data


def test_a_full_store_says_so(rng: random.Random) -> None:
    data = rng.randbytes(MIB)
    with workplace(size_bytes=64 * MIB) as place:
        place.mount()
        place.announced.append("no room for")
        old = place.mountpoint / "old"
        old.write_bytes(data)
        file = client.open(place.mountpoint / "new", "wb")
        with pytest.raises(OSError, match="No space left"):
            write_often(file, data)
        with pytest.raises(OSError, match="No space left"):
            file.close()
        assert file.closed
        assert old.read_bytes() == data
        (place.mountpoint / "new").unlink()
        with (
            pytest.raises(OSError, match="No space left"),
            client.replacing(place.mountpoint / "new") as file,
        ):
            write_often(file, data)
        assert list(place.mountpoint.iterdir()) == [old]
        client.forget()


def test_the_daemon_is_killed_in_the_middle(place: Workplace, rng: random.Random) -> None:
    path = place.mountpoint / "file"
    data = rng.randbytes(MIB)
    path.write_bytes(data)
    file = client.open(path, "wb")
    file.write(bytes(2 * MIB))
    place.kill_daemon()
    with pytest.raises(OSError, match="not connected") as caught:
        write_often(file, bytes(MIB))
    assert caught.value.errno == errno.ENOTCONN
    with pytest.raises(OSError, match="not connected"):
        file.close()
    client.forget()
    place.mount()
    assert path.read_bytes() == data
    with client.open(path, "wb") as again:
        again.write(bytes(MIB))
    assert path.read_bytes() == bytes(MIB)


def test_a_new_daemon_at_the_same_place(place: Workplace, rng: random.Random) -> None:
    """What is mapped of the mount before is not taken for this one's."""
    path = place.mountpoint / "file"
    for _ in range(3):
        data = rng.randbytes(2 * MIB)
        with client.open(path, "wb") as file:
            file.write(data)
            assert file.direct
        assert path.read_bytes() == data
        place.remount()
        assert path.read_bytes() == data


def test_libraries_save_through_it(place: Workplace, rng: random.Random) -> None:
    array = np.frombuffer(rng.randbytes(3 * MIB), dtype=np.uint8)
    path = place.mountpoint / "array.npz"
    with client.open(path, "wb") as file:
        np.savez(file, first=array, second=array[::-1])
    with np.load(path) as loaded:
        assert (loaded["first"] == array).all()
        assert (loaded["second"] == array[::-1]).all()


# --- mapped ---------------------------------------------------------------------------------------


@pytest.fixture
def saved(place: Workplace, rng: random.Random) -> tuple[Path, bytes]:
    path = place.mountpoint / "file"
    data = rng.randbytes(7 * MIB + 99)
    with client.open(path, "wb") as file:
        file.write(data)
    return path, data


@pytest.mark.parametrize("verify", list(client.Verify))
def test_what_was_written_is_mapped(saved: tuple[Path, bytes], verify: client.Verify) -> None:
    path, data = saved
    with client.map(path, verify) as mapped:
        assert mapped.direct
        assert mapped.copied_bytes < 64 << 10, "it lies page by page"
        assert mapped.read(MIB, 100) == data[MIB : MIB + 100]
        mapped.verify()
        assert mapped.view == data


def test_what_the_kernel_wrote_is_mapped(place: Workplace, rng: random.Random) -> None:
    path = place.mountpoint / "file"
    data = bytearray(rng.randbytes(2 * MIB))
    with path.open("wb") as file:
        file.write(data)
        file.seek(3 * MIB)
        file.write(b"behind a hole")
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"in between")
    data[1000:1010] = b"in between"
    data += bytes(MIB) + b"behind a hole"
    with client.map(path, "all") as mapped:
        assert mapped.direct
        assert mapped.view == data


@pytest.mark.large_store
@pytest.mark.parametrize("change", ["overwritten", "changed", "removed", "cleaned"])
def test_a_mapped_file_stays_as_it_is(saved: tuple[Path, bytes], change: str) -> None:
    path, data = saved
    with client.map(path, "no") as mapped:
        if change == "overwritten":
            path.write_bytes(b"new" * 100_000)
        elif change == "changed":
            with path.open("r+b") as file:
                file.write(b"new" * 100_000)
        else:
            path.unlink()
        if change == "cleaned":
            for number in range(20):
                (path.parent / f"{number}").write_bytes(bytes([number]) * 5 * MIB)
                if number >= 10:
                    (path.parent / f"{number - 10}").unlink()
        mapped.verify()
        assert mapped.view == data
    for other in path.parent.iterdir():
        other.unlink()


def test_a_mapping_outlives_its_object_and_is_inherited(saved: tuple[Path, bytes]) -> None:
    path, data = saved
    with client.map(path) as mapped:
        kept = mapped[MIB : 2 * MIB]
    path.unlink()
    child = os.fork()
    if child == 0:
        os._exit(0 if kept == data[MIB : 2 * MIB] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert kept == data[MIB : 2 * MIB]


def test_a_file_is_looked_at_where_it_lies(place: Workplace, saved: tuple[Path, bytes]) -> None:
    path, data = saved
    stored = client.StoredFile(path)
    assert len(stored) == len(data)
    for offset, length in ((0, len(data)), (MIB + 1, 3 * MIB), (len(data) - 1, 1), (5, 0)):
        pieces = stored.pieces(offset, length)
        assert pieces is not None
        assert b"".join(pieces) == data[offset : offset + length]
    assert stored.pieces(len(data) - 1, 2) is None
    stored.verify(0, len(data))
    with pytest.raises(OSError, match="range") as caught:
        stored.verify(len(data), 1)
    assert caught.value.errno == errno.ERANGE
    child = os.fork()
    if child == 0:
        try:
            stored.verify(0, 1)
        except OSError as error:
            os._exit(0 if error.errno == errno.ENXIO and stored.pieces(0, 1) is None else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    kept = stored.pieces(0, len(data))
    assert kept is not None
    del stored, pieces, caught
    path.unlink()
    for number in range(5):
        (path.parent / str(number)).write_bytes(bytes([number]) * 4 * MIB)
    assert b"".join(kept) == data, "held as long as a piece of it is"
    holes = place.mountpoint / "holes"
    with holes.open("wb") as file:
        file.write(data[:MIB])
        file.seek(2 * MIB)
        file.write(data[:1000])
    stored = client.StoredFile(holes)
    for offset, length in ((0, 2 * MIB), (MIB, 1), (MIB - 1, 2), (2 * MIB - 1, 2)):
        assert stored.pieces(offset, length) is None
    end = stored.pieces(2 * MIB, 1000)
    assert end is not None
    assert b"".join(end) == data[:1000]


# --- who may --------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_somebody_else_goes_through_the_kernel(unmounted: Workplace) -> None:
    unmounted.mount("allow_other")
    unmounted.mountpoint.chmod(0o777)
    path = unmounted.mountpoint / "file"
    code = (
        "import json, os, sys; from cxlfs import client\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "f = client.open(sys.argv[1], 'wb'); f.write(bytes(1 << 20)); f.close()\n"
        "m = client.map(sys.argv[1])\n"
        "print(json.dumps([f.direct, m.direct, m.view == bytes(1 << 20)]))"
    )
    assert json.loads(run(code, path)) == [False, False, True]
    assert path.read_bytes() == bytes(MIB)


@pytest.mark.large_store
def test_a_program_that_closes_every_descriptor_harms_nothing(mnt: Path) -> None:
    """Also not by opening something else under the number that the library had."""
    code = (
        "import os, sys; from cxlfs import client\n"
        "f = client.open(sys.argv[1], 'wb'); f.write(bytes(1 << 20))\n"
        "for n in os.listdir('/proc/self/fd'):\n"
        "    if int(n) > 2 and int(n) != f.fileno():\n"
        "        try: os.close(int(n))\n"
        "        except OSError: pass\n"
        "for n in range(600): os.open('/dev/null', os.O_RDWR)\n"
        "for n in range(40): f.write(bytes(1 << 20))\n"
        "f.close(); print(client.counts().fuse_bytes > 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, mnt / "file"], capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("True", 0), done.stderr
    assert (mnt / "file").read_bytes() == bytes(41 * MIB)
