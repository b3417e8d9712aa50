"""A default mount: whoever is interrupted in a save, the next process loads the version before."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.mount import Workplace, kill, tell, wait_for_line, wait_until

REVERTED = r"reverted: the previous version is back"
TAKEN_AWAY = r"taken-away: /model-10.npy: it was left incomplete: .*; model-9.npy is complete"
TORN = r"torn: it (is|was left) incomplete"

SAVE = """
import os, pickle, signal, sys, time
path, how = sys.argv[1:3]

class Stop(Exception):
    pass

class Interrupted:
    def __reduce__(self):
        if how == "interrupt":
            signal.raise_signal(signal.SIGINT)
        if how.startswith("exit"):
            sys.exit(int(how[4:]))
        raise Stop

def handler(number, frame):
    sys.exit(0)

signal.signal(signal.SIGTERM, handler)
try:
    with open(path, "wb") as file:
        pickle.dump([list(range(50_000)), Interrupted()], file)
except Stop:
    if how != "caught":
        raise
print("ready", flush=True)
sys.stdin.readline()
"""


def good_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"good": list(range(1000))}))


def loads(path: Path) -> bool:
    with path.open("rb") as file:
        return "good" in pickle.load(file)  # noqa: S301  made by this test


@pytest.mark.parametrize("how", ["interrupt", "exit0", "exit1", "exit143", "exception"])
def test_the_next_process_loads_the_version_before(place: Workplace, how: str) -> None:
    place.announced.append(REVERTED)
    path = place.mountpoint / "model.pkl"
    good_pickle(path)
    before = path.stat()
    saved = subprocess.run(
        [sys.executable, "-c", SAVE, path, how],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    assert (saved.returncode == 0) == (how == "exit0")
    assert loads(path)
    after = path.stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    assert after.st_mtime_ns == before.st_mtime_ns
    place.remount()
    assert loads(path)


SAVE_ARRAY = """
import os, signal, sys
import numpy as np
path, how = sys.argv[1:3]
shape = b"{'descr': '<f8', 'fortran_order': False, 'shape': (9000,), }"
whole = np.lib.format.magic(1, 0) + b"v\\0" + shape
with open(path, "wb") as file:
    file.write(whole.ljust(127) + b"\\n" + bytes(5000))
    file.flush()
    if how == "kill":
        os.kill(os.getpid(), 9)
if how == "interrupt":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)
if how.startswith("exit"):
    sys.exit(int(how[4:]))
if how != "caught":
    raise RuntimeError
print("ready", flush=True)
sys.stdin.readline()
"""


def good_array(path: Path) -> None:
    np.save(path, np.arange(1000.0))


def newest(directory: Path) -> Path:
    """As a program finds it that resumes from the highest number."""
    return max(directory.glob("model-*.npy"), key=lambda path: int(path.stem[6:]))


@pytest.mark.parametrize(
    ("how", "looks"),
    [
        ("interrupt", True),
        ("exit0", False),
        ("exit143", False),
        ("exception", False),
        ("kill", True),
    ],
)
def test_the_highest_number_is_never_a_torn_file(
    place: Workplace, how: str, *, looks: bool
) -> None:
    """Whoever resumes asks for a name, or lists them."""
    place.announced += [TORN, TAKEN_AWAY]
    good_array(place.mountpoint / "model-9.npy")
    path = place.mountpoint / "model-10.npy"
    save = SAVE_ARRAY
    subprocess.run(
        [sys.executable, "-c", save, path, how],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if looks:
        assert not path.exists()
    assert newest(place.mountpoint).name == "model-9.npy"
    good_array(path)
    assert np.load(newest(place.mountpoint)).size == 1000
    place.remount()
    assert newest(place.mountpoint) == path
    path.unlink()
    undelete = [Path(sys.executable).with_name("cxlfs"), "history", path, "--json"]
    environment = {**os.environ, "CXLFS_RUNTIME_DIR": str(place.runtime)}
    told = subprocess.run(undelete, stdout=subprocess.PIPE, env=environment, check=True)
    states = [version["state"] for version in json.loads(told.stdout)["versions"]]
    assert sorted(states) == ["complete", "incomplete"]


@pytest.mark.parametrize("how", ["daemon", "unmount"])
def test_a_torn_new_file_goes_at_the_next_mount(place: Workplace, how: str) -> None:
    place.announced += [TORN, TAKEN_AWAY]
    good_array(place.mountpoint / "model-9.npy")
    writer = place.python(SAVE_ARRAY, place.mountpoint / "model-10.npy", "caught")
    wait_for_line(writer)
    if how == "daemon":
        place.kill_daemon()
        place.mount()
    else:
        place.remount()
    assert newest(place.mountpoint).name == "model-9.npy"
    kill(writer, signal.SIGKILL)


def test_a_program_that_goes_on_is_told_and_may_save_again(place: Workplace) -> None:
    place.announced += [TORN, REVERTED]
    path = place.mountpoint / "model.pkl"
    good_pickle(path)
    writer = place.python(SAVE, path, "caught")
    wait_for_line(writer)
    wait_until(
        lambda: os.getxattr(path, "user.cxlfs.state") == b"incomplete", "somebody has looked"
    )
    with pytest.raises((pickle.UnpicklingError, EOFError)):
        loads(path)
    command = [Path(sys.executable).with_name("cxlfs"), "list", place.mountpoint, "--json"]
    environment = {**os.environ, "CXLFS_RUNTIME_DIR": str(place.runtime)}
    listed = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True)
    (entry,) = json.loads(listed.stdout)["checkpoints"]
    assert entry["state"] == "incomplete"
    assert "the version before is kept" in entry["reason"]
    tell(writer, b"")
    assert writer.wait() == 0
    assert loads(path)


def test_a_kill_after_the_torn_file_was_closed(place: Workplace) -> None:
    place.announced += [TORN, REVERTED]
    path = place.mountpoint / "model.pkl"
    good_pickle(path)
    writer = place.python(SAVE, path, "caught")
    wait_for_line(writer)
    kill(writer, signal.SIGKILL)
    assert loads(path)


@pytest.mark.parametrize("how", ["daemon", "unmount"])
def test_what_is_torn_goes_back_at_the_next_mount(place: Workplace, how: str) -> None:
    place.announced += [TORN, REVERTED]
    path = place.mountpoint / "model.pkl"
    good_pickle(path)
    writer = place.python(SAVE, path, "caught")
    wait_for_line(writer)
    if how == "daemon":
        place.kill_daemon()
        place.mount()
    else:
        place.remount()
    assert loads(path)
    kill(writer, signal.SIGKILL)


def test_an_archive_that_was_ended_in_good_order(place: Workplace) -> None:
    """What is left of it is whole by its own format: what it had before tells."""
    place.announced.append(REVERTED)
    path = place.mountpoint / "arrays.npz"
    np.savez(path, first=np.zeros(1000), second=np.zeros(1000))
    cut = (
        "import sys, zipfile, io\nimport numpy as np\n"
        "with zipfile.ZipFile(sys.argv[1], 'w') as archive:\n"
        "    with archive.open('first.npy', 'w') as file:\n"
        "        np.lib.format.write_array(file, np.ones(1000))\n"
        "    raise KeyboardInterrupt\n"
    )
    saved = subprocess.run(
        [sys.executable, "-c", cut, path], stderr=subprocess.DEVNULL, check=False
    )
    assert saved.returncode != 0
    with np.load(path) as found:
        assert set(found) == {"first", "second"}
        assert not found["first"].any()


@pytest.mark.parametrize("name", ["notes.txt", "model.pkl"])
def test_whole_files_and_unknown_ones_stay(place: Workplace, name: str) -> None:
    path = place.mountpoint / name
    good_pickle(path)
    new = pickle.dumps({"good": "another"}) if name == "model.pkl" else b"half a line"
    code = "import os, sys; open(sys.argv[1], 'wb').write(bytes.fromhex(sys.argv[2])); os.abort()"
    subprocess.run(
        [sys.executable, "-c", code.replace("; os", "; sys.stdout.flush(); os"), path, new.hex()],
        check=False,
    )
    assert path.read_bytes() == new


def test_parts_that_are_put_together_by_several_programs(place: Workplace) -> None:
    """``cat first > f; cat second >> f``: the first program leaves a torn file on purpose."""
    path = place.mountpoint / "model.pkl"
    good_pickle(path)
    data = pickle.dumps({"good": list(range(5000))})
    parts = place.mountpoint / "parts"
    parts.mkdir()
    (parts / "1").write_bytes(data[:3000])
    (parts / "2").write_bytes(data[3000:])
    first = "import shutil, sys; shutil.copyfile(sys.argv[1], sys.argv[2])"
    subprocess.run([sys.executable, "-c", first, parts / "1", path], check=True)
    second = "import sys; open(sys.argv[2], 'ab').write(open(sys.argv[1], 'rb').read())"
    subprocess.run([sys.executable, "-c", second, parts / "2", path], check=True)
    assert path.read_bytes() == data


def test_switched_off(unmounted: Workplace) -> None:
    unmounted.mount("torn=off")
    path = unmounted.mountpoint / "model.pkl"
    good_pickle(path)
    subprocess.run(
        [sys.executable, "-c", SAVE, path, "exception"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    with pytest.raises((pickle.UnpicklingError, EOFError)):
        loads(path)


IN_PLACE = """
import sys
with open(sys.argv[1], "r+b") as file:
    file.seek(0, 2)
    middle = file.tell() // 2
    for start in range(0, middle, 4096):
        file.seek(8 + start)
        file.write(b"new " * 1024)
        file.flush()
    print("ready", flush=True)
    sys.stdin.readline()
"""
HDF5 = b"\x89HDF\r\n\x1a\n" + b"old " * 100_000
NUMPY = b"\x93NUMPY\x01\x00" + b"old " * 100_000


@pytest.mark.parametrize("how", ["kill", "closed"])
def test_a_file_with_a_directory_is_changed_as_a_whole(place: Workplace, how: str) -> None:
    path = place.mountpoint / "model.h5"
    path.write_bytes(HDF5)
    writer = place.python(IN_PLACE, path)
    wait_for_line(writer)
    assert path.read_bytes() != HDF5
    if how == "kill":
        place.announced.append(REVERTED)
        kill(writer, signal.SIGKILL)
        assert path.read_bytes() == HDF5
        assert os.getxattr(path, "user.cxlfs.state") == b"complete"
    else:
        tell(writer, b"")
        assert writer.wait() == 0
        assert path.read_bytes().count(b"new ") > 50_000
    found = path.read_bytes()
    place.remount()
    assert path.read_bytes() == found


@pytest.mark.parametrize(("content", "torn"), [(HDF5, "off"), (NUMPY, "back")])
def test_other_changes_in_place_stay(unmounted: Workplace, content: bytes, torn: str) -> None:
    unmounted.mount(f"torn={torn}")
    path = unmounted.mountpoint / "model.h5"
    path.write_bytes(content)
    writer = unmounted.python(IN_PLACE, path)
    wait_for_line(writer)
    kill(writer, signal.SIGKILL)
    assert path.read_bytes().count(b"new ") > 50_000
