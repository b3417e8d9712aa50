"""Overwriting through a mount: a writer that is killed or fails brings the old version back."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.mount import MIB, Workplace, kill, tell, wait_for_line, wait_until

OLD = bytes(range(256)) * 8192  # 2 MiB
REVERTED = r"reverted: the previous version is back"

OVERWRITE = """
import sys, threading, time
path, how = sys.argv[1:3]
file = open(path, "wb", buffering=0)
file.write(b"n" * 1500000)
if how == "threads":
    for _ in range(4):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
print("ready", flush=True)
sys.stdin.readline()
file.write(b"m" * 500000)
if how == "exit":
    raise SystemExit(3)  # closes the file: an ordinary end
file.close()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
@pytest.mark.parametrize("how", ["plain", "threads"])
def test_a_killed_writer_brings_the_old_version_back(
    place: Workplace, number: signal.Signals, how: str
) -> None:
    place.announced.append(REVERTED)
    path = place.mountpoint / "checkpoint"
    path.write_bytes(OLD)
    reader = os.open(path, os.O_RDONLY)
    writer = place.python(OVERWRITE, path, how)
    wait_for_line(writer)
    assert os.fstat(reader).st_size == 1_500_000  # POSIX: every reader sees the new content
    assert os.pread(reader, 10, 0) == b"n" * 10
    kill(writer, number)
    wait_until(lambda: os.fstat(reader).st_size == len(OLD), "the old version is back")
    wait_until(lambda: os.pread(reader, 4 * MIB, 0) == OLD, "cached pages are gone")
    os.close(reader)
    assert path.read_bytes() == OLD
    place.remount()
    assert path.read_bytes() == OLD


SEND = """
import socket, sys
path, address = sys.argv[1:3]
file = open(path, "wb", buffering=0)
file.write(b"n" * 1500000)
there = socket.socket(socket.AF_UNIX)
there.connect(address)
socket.send_fds(there, [b"x"], [file.fileno()])
print("ready", flush=True)
sys.stdin.readline()
"""
OPENAT = {"x86_64": "257", "aarch64": "56"}


def test_who_opens_before_the_kernel_has_released_it_finds_the_old_version(
    place: Workplace, tmp_path: Path
) -> None:
    """A descriptor on its way through a socket keeps the RELEASE back, and nobody has it."""
    place.announced.append(REVERTED)
    path, address = place.mountpoint / "checkpoint", str(tmp_path / "socket")
    path.write_bytes(OLD)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        writer = place.python(SEND, path, address)
        wait_for_line(writer)
        connection, _ = listening.accept()
    kill(writer)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(path.read_bytes()))
    reader.start()

    def is_opening() -> bool:
        call = Path(f"/proc/self/task/{reader.native_id}/syscall").read_text().split()[0]
        return call == OPENAT[os.uname().machine]

    wait_until(lambda: bool(found) or is_opening(), "it is being opened")
    for number in range(50):  # others are served meanwhile
        assert not (place.mountpoint / f"absent-{number}").exists()
    assert not found
    assert is_opening()
    connection.close()
    reader.join()
    assert found == [OLD]


def test_a_writer_that_ends_by_itself_publishes(place: Workplace) -> None:
    path = place.mountpoint / "checkpoint"
    path.write_bytes(OLD)
    writer = place.python(OVERWRITE, path, "exit", stderr=subprocess.DEVNULL)
    wait_for_line(writer)
    tell(writer)
    assert writer.wait() == 3
    expected = b"n" * 1_500_000 + b"m" * 500_000
    assert path.read_bytes() == expected
    place.remount()
    assert path.read_bytes() == expected


def test_the_death_of_another_process_changes_nothing(place: Workplace) -> None:
    path = place.mountpoint / "checkpoint"
    path.write_bytes(OLD)
    bystander = place.python(
        "import sys; f = open(sys.argv[1], 'rb'); print('ready', flush=True); sys.stdin.readline()",
        path,
    )
    wait_for_line(bystander)
    with path.open("wb") as file:
        file.write(b"new")
        kill(bystander)
    assert path.read_bytes() == b"new"


def test_a_new_file_of_a_killed_writer_says_that_it_is_incomplete(place: Workplace) -> None:
    path = place.mountpoint / "new"
    writer = place.python(OVERWRITE, path, "plain")
    wait_for_line(writer)
    kill(writer)
    wait_until(lambda: os.getxattr(path, "user.cxlfs.state") == b"incomplete", "it says so")
    place.remount()
    assert os.getxattr(path, "user.cxlfs.state") == b"incomplete"
    assert path.read_bytes() == b"n" * 1_500_000


def test_the_log_of_a_killed_program_is_kept(unmounted: Workplace) -> None:
    """What a shell redirects and has hardly grown at the first periodic commit: its last lines are
    wanted, not those of the run before.
    """
    place = unmounted
    place.mount("commit=1")
    path = place.mountpoint / "log"
    path.write_bytes(b"old log")
    commit = os.getxattr(path, "user.cxlfs.commit")
    script = f"exec python3 -c 'import time; print(\"line\", flush=True); time.sleep(99)' > {path}"
    shell = subprocess.Popen(["sh", "-c", script], start_new_session=True)
    wait_until(lambda: path.read_bytes() == b"line\n", "the line is written")
    wait_until(lambda: os.getxattr(path, "user.cxlfs.commit") != commit, "it is committed")
    kill(shell)
    place.remount()
    assert path.read_bytes() == b"line\n"


def test_saving_again_after_a_kill_works(place: Workplace) -> None:
    place.announced.append(REVERTED)
    path = place.mountpoint / "checkpoint"
    path.write_bytes(OLD)
    for round_number in range(3):
        writer = place.python(OVERWRITE, path, "plain")
        wait_for_line(writer)
        kill(writer)
        wait_until(lambda: path.read_bytes() == OLD[: path.stat().st_size], "it is back")
        wait_until(lambda: path.stat().st_size == len(OLD), "it is back as a whole")
        new = b"%d" % round_number * 1_000_000
        path.write_bytes(new)
        assert path.read_bytes() == new
        path.write_bytes(OLD)


def fill(path: Path, piece: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        for _ in range(1000):
            file.write(piece)


def fill_with_files(directory: Path, content: bytes) -> None:
    for index in range(1000):
        (directory / f"{index:04d}").write_bytes(content)


def test_a_full_store_keeps_the_old_version_and_gives_the_space_back(place: Workplace) -> None:
    place.announced += [REVERTED, "no-space:"]
    path = place.mountpoint / "checkpoint"
    path.write_bytes(OLD)
    free = os.statvfs(place.mountpoint).f_bavail
    piece = os.urandom(MIB)
    with pytest.raises(OSError, match="No space left"):
        fill(path, piece)
    wait_until(lambda: path.stat().st_size == len(OLD), "the old version is back")
    assert path.read_bytes() == OLD
    wait_until(lambda: os.statvfs(place.mountpoint).f_bavail == free, "the space is back")
    place.remount()
    assert path.read_bytes() == OLD


def test_a_full_store_can_be_emptied(place: Workplace) -> None:
    place.announced.append("no-space:")
    free = os.statvfs(place.mountpoint).f_bavail
    piece = os.urandom(MIB)
    with pytest.raises(OSError, match="No space left"):
        fill_with_files(place.mountpoint, piece * 4)
    for path in place.mountpoint.iterdir():
        path.unlink()
    wait_until(lambda: os.statvfs(place.mountpoint).f_bavail == free, "the space is back")
    (place.mountpoint / "again").write_bytes(piece)


def test_free_space_is_told_truly(place: Workplace) -> None:
    before = os.statvfs(place.mountpoint)
    assert before.f_bavail <= before.f_bfree <= before.f_blocks
    assert before.f_namemax == 255
    (place.mountpoint / "file").write_bytes(os.urandom(20 * MIB))
    after = os.statvfs(place.mountpoint)
    used = (before.f_bfree - after.f_bfree) * before.f_frsize
    assert 20 * MIB <= used < 21 * MIB


def test_the_temporary_name_of_a_killed_writer_can_be_removed(mnt: Path, place: Workplace) -> None:
    writer = place.python(OVERWRITE, mnt / "checkpoint.tmp", "plain")
    wait_for_line(writer)
    kill(writer)
    (mnt / "checkpoint.tmp").unlink()
    assert list(mnt.iterdir()) == []


# --- shell redirection --------------------------------------------------------------------------

_SAVE = """
import sys
sys.stdout.buffer.write(b"n" * 1500000)
sys.stdout.flush()
print("ready", file=sys.stderr, flush=True)
sys.stdin.readline()
"""
_NEEDS_INO = pytest.mark.skipif(
    "ino:" not in Path("/proc/self/fdinfo/0").read_text(), reason="needs Linux 5.14"
)


def redirected(place: Workplace, shell: str, path: Path, line: str) -> subprocess.Popen[bytes]:
    """``line`` in a shell, with $1 the program and $2 the file; returns when it has written."""
    process = subprocess.Popen(
        [shell, "-c", line, shell, _SAVE, str(path), sys.executable],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    place._processes.append(process)
    assert process.stderr is not None
    assert process.stderr.readline() == b"ready\n"
    return process


@_NEEDS_INO
@pytest.mark.parametrize(
    ("shell", "line", "transport"),
    [
        ("sh", '"$3" -c "$1" > "$2"', "native"),
        ("sh", '"$3" -c "$1" > "$2"', "pyfuse3"),
        ("bash", '"$3" -c "$1" > "$2"', "native"),
        ("sh", 'exec "$3" -c "$1" 1> "$2" 3>&1', "native"),
    ],
)
def test_a_killed_program_behind_a_redirection(
    unmounted: Workplace, shell: str, line: str, transport: str
) -> None:
    """``train.py > checkpoint``: the shell opens it, closes a copy, and becomes the program."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    place = unmounted
    place.mount(f"transport={transport}")
    place.announced.append(REVERTED)
    path = place.mountpoint / "checkpoint"
    path.write_bytes(OLD)
    process = redirected(place, shell, path, line)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: path.read_bytes() == OLD, "the old version is back")
    new = place.mountpoint / "new"
    process = redirected(place, shell, new, line)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: os.getxattr(new, "user.cxlfs.state") == b"incomplete", "it is told")
    assert new.read_bytes() == b"n" * 1_500_000


@pytest.mark.parametrize(
    ("line", "content"),
    [
        ('echo one > "$1"', b"one\n"),
        (': > "$1"', b""),
        ('> "$1"', b""),
        ('no-such-program-anywhere > "$1" 2>&1 || true', None),
        ('{ echo one; cat /dev/null; echo two; } > "$1"', b"one\ntwo\n"),
        ('(echo one; sh -c "echo two") > "$1"', b"one\ntwo\n"),
        ('exec > "$1"; echo one; sh -c "echo two"; echo three', b"one\ntwo\nthree\n"),
        ('echo one > "$1"; echo two >> "$1"', b"one\ntwo\n"),
        ('cat "$0" | cat > "$1"', None),
    ],
)
def test_what_a_shell_writes_is_there_when_it_ends(
    place: Workplace, line: str, content: bytes | None
) -> None:
    path = place.mountpoint / "file"
    path.write_bytes(OLD)
    subprocess.run(["sh", "-c", line, sys.executable, str(path)], check=True)
    if content is not None:
        assert path.read_bytes() == content
    assert path.read_bytes() != OLD
    assert os.getxattr(path, "user.cxlfs.state") == b"complete"
    place.kill_daemon()
    place.announced.append("recover|dead mount|not closed")
    place.mount()
    if content is not None:
        assert path.read_bytes() == content
