"""Whether a process is being killed: from files as in /proc, and with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cxlfs.fuse.handles import OpenFile
from cxlfs.fuse.processes import PF_EXITING, Process, ProcessTable


def write_process(
    root: Path,
    tid: int,
    *,
    tgid: int | None = None,
    command: str = "python3",
    flags: int = 0x400000,
    start: int = 1000,
    exit_code: int = 0,
    groups: str = "",
    tracer: int = 0,
) -> None:
    directory = root / str(tid)
    directory.mkdir(exist_ok=True)
    status = f"Name:\tx\nTgid:\t{tgid or tid}\nPid:\t{tid}\nTracerPid:\t{tracer}\n"
    status += f"Groups:\t{groups}\nNStgid:\t1\n"
    (directory / "status").write_text(status)
    fields = ["0"] * 50
    fields[0], fields[9 - 3], fields[22 - 3], fields[52 - 3] = (
        "S",
        str(flags),
        str(start),
        str(exit_code),
    )
    (directory / "stat").write_text(f"{tid} ({command}) {' '.join(fields)}\n")


def identified(table: ProcessTable, child: subprocess.Popen[bytes]) -> Process | None:
    """Once it is out of execve."""
    process = None
    while process is None and child.poll() is None:
        process = table.identify(child.pid)
    return process


def test_supplementary_groups(tmp_path: Path) -> None:
    write_process(tmp_path, 10, groups="4 24 1000 ")
    write_process(tmp_path, 11)
    table = ProcessTable(tmp_path)
    assert table.groups(10) == {4, 24, 1000}
    assert table.groups(11) == table.groups(12) == set()
    assert ProcessTable().groups(os.getpid()) == set(os.getgroups())


@pytest.mark.parametrize(
    ("flags", "exit_code", "killed"),
    [
        (0, 0, False),  # close() in the middle of its life
        (PF_EXITING, 0, False),  # exit(0) with the file open
        (PF_EXITING, 3 << 8, False),  # exit(3)
        (PF_EXITING, 9, True),
        (PF_EXITING, 15, True),
        (PF_EXITING, 11 | 128, True),  # with a core
        (PF_EXITING | 0x400040, 6, True),
        (0x400000, 9, True),  # sent, and not taken yet
        (0x400000, signal.SIGSTOP, False),  # Ctrl-Z
        (0x400000, signal.SIGTSTP, False),
    ],
)
def test_the_table_of_ends(tmp_path: Path, flags: int, exit_code: int, killed: bool) -> None:
    write_process(tmp_path, 10, flags=0)
    table = ProcessTable(tmp_path)
    process = table.identify(10)
    write_process(tmp_path, 10, flags=flags, exit_code=exit_code)
    assert table.is_being_killed(process) is killed


@pytest.mark.parametrize(("flags", "killed"), [(0, False), (PF_EXITING, True)])
def test_what_a_tracer_was_told_is_no_end(tmp_path: Path, flags: int, killed: bool) -> None:
    """Under strace it is SIGTRAP | 128, while the traced process is stopped."""
    write_process(tmp_path, 10, flags=flags, exit_code=signal.SIGTRAP | 128, tracer=9)
    table = ProcessTable(tmp_path)
    assert table.is_being_killed(table.identify(10)) is killed


def test_threads_belong_to_their_group(tmp_path: Path) -> None:
    write_process(tmp_path, 10, start=500)
    write_process(tmp_path, 11, tgid=10, start=700)
    assert ProcessTable(tmp_path).identify(11) == Process(10, 500)


@pytest.mark.parametrize("command", ["a) b (c", ") S 0 0", "", "((("])
def test_any_command_name(tmp_path: Path, command: str) -> None:
    write_process(tmp_path, 10, command=command, flags=PF_EXITING, exit_code=9)
    table = ProcessTable(tmp_path)
    assert table.is_being_killed(table.identify(10))


def test_a_number_that_was_used_again_is_another_process(tmp_path: Path) -> None:
    write_process(tmp_path, 10, start=500)
    table = ProcessTable(tmp_path)
    process = table.identify(10)
    write_process(tmp_path, 10, start=501, flags=PF_EXITING, exit_code=9)
    assert not table.is_being_killed(process)


@pytest.mark.parametrize("text", ["", "10", "10 (x", "10 (x) S 1 2", "10 (x) S" + " y" * 50])
def test_what_cannot_be_read_is_not_known_to_be_killed(tmp_path: Path, text: str) -> None:
    write_process(tmp_path, 10)
    table = ProcessTable(tmp_path)
    process = table.identify(10)
    (tmp_path / "10" / "stat").write_text(text)
    assert not table.is_being_killed(process)
    table = ProcessTable(tmp_path)  # one that does not remember it
    assert table.identify(10) is None
    assert not table.is_being_killed(None)
    for tid in (0, -1, 77):
        assert table.identify(tid) is None


def test_who_is_in_execve_is_asked_for_nothing_that_waits_for_it(tmp_path: Path) -> None:
    """Later kernels keep ``stat`` until the descriptors are closed, which are served here."""
    write_process(tmp_path, 10)
    table = ProcessTable(tmp_path)
    process = table.identify(10)
    assert process is not None
    stat = tmp_path / "10/stat"
    stat.unlink()
    os.mkfifo(stat)  # waits for who writes to it: nobody does
    (tmp_path / "10/statm").write_text("33 1 0 0 0 33 0\n")
    assert table.is_alive(process)
    assert not table.is_being_killed(process)
    assert table.exit_code(process) is None
    assert ProcessTable(tmp_path).identify(10) is None


def test_a_real_thread_is_identified_by_its_group() -> None:
    found: list[Process | None] = []
    thread = threading.Thread(
        target=lambda: found.append(ProcessTable().identify(threading.get_native_id()))
    )
    thread.start()
    thread.join()
    assert found[0] is not None
    assert found[0].tgid == os.getpid()


def test_a_real_process_is_identified_as_long_as_it_is_there() -> None:
    table = ProcessTable()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = identified(table, child)
    assert process is not None
    assert process.tgid == child.pid
    assert not table.is_being_killed(process)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie: still readable
    assert table.is_being_killed(process)
    child.communicate()
    assert not table.is_being_killed(process)


def test_writers_that_ended_are_not_remembered_for_ever() -> None:
    """A descriptor that a shell or a pool of workers keeps open, and thousands write to."""
    file = OpenFile(
        1,
        writable=True,
        direct=True,
        appends=False,
        opener=None,
        may_keep_set_id=False,
        uid=0,
        gid=0,
    )
    looks: list[Process] = []
    living = {Process(tgid, 1) for tgid in range(0, 10_000, 100)}

    def is_alive(process: Process) -> bool:
        looks.append(process)
        return process in living or process == writers[-1]

    writers: list[Process] = []
    for tgid in range(10_000):
        writers.append(Process(tgid, 1))
        file.note_writer(writers[-1], is_alive)
        assert writers[-1] in file.writers
    assert living <= file.writers
    assert len(file.writers) <= 2 * len(living) + 2
    assert len(looks) <= 4 * len(writers)


def test_a_zombie_is_alive_and_what_was_waited_for_is_not(tmp_path: Path) -> None:
    write_process(tmp_path, 10, start=500)
    table = ProcessTable(tmp_path)
    assert table.is_alive(Process(10, 500))
    assert not table.is_alive(Process(10, 501)), "the number is used again"
    assert not table.is_alive(Process(11, 500))


# --- what a process holds -----------------------------------------------------------------------


def write_descriptor(
    root: Path, pid: int, number: int, *, flags: int, mount: int, ino: int | None
) -> None:
    directory = root / str(pid) / "fdinfo"
    directory.mkdir(exist_ok=True)
    tail = "" if ino is None else f"ino:\t{ino}\n"
    (directory / str(number)).write_text(f"pos:\t0\nflags:\t0{flags:o}\nmnt_id:\t{mount}\n{tail}")


@pytest.mark.parametrize(
    ("flags", "mount", "ino", "held"),
    [
        (os.O_WRONLY, 77, 5, True),
        (os.O_RDWR | os.O_APPEND, 77, 5, True),
        (os.O_RDONLY, 77, 5, False),
        (os.O_WRONLY, 7, 5, False),  # another file system
        (os.O_WRONLY, 77, 55, False),
        (os.O_WRONLY, 77, None, False),  # Linux before 5.14 does not say
    ],
)
def test_what_a_process_holds(
    tmp_path: Path, flags: int, mount: int, ino: int | None, held: bool
) -> None:
    write_process(tmp_path, 10)
    (tmp_path / "10" / "mountinfo").write_text(
        "7 1 8:1 / / rw - ext4 /dev/x rw\n77 7 0:50 / /mnt rw shared:1 - fuse.cxlfs src rw\n"
    )
    write_descriptor(tmp_path, 10, 0, flags=os.O_RDONLY, mount=7, ino=3)
    write_descriptor(tmp_path, 10, 1, flags=flags, mount=mount, ino=ino)
    table = ProcessTable(tmp_path)
    assert table.holds(table.identify(10), 5) is held
    assert table.holds(None, 5) is False
    assert table.holds(Process(99, 1), 5) is False


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_is_kept_open_of_processes_is_little_and_of_one_each() -> None:
    """Of many that end one after the other, as a loop over programs makes them."""
    table, begun = ProcessTable(), descriptors()
    for _ in range(20):
        child = subprocess.Popen(["sleep", "60"])
        process = identified(table, child)
        assert process is not None
        assert not table.is_being_killed(process)
        child.kill()
        child.wait()
        assert not table.is_being_killed(process), "it is gone: nothing is known"
    assert descriptors() <= begun + 1
    others = [subprocess.Popen(["sleep", "60"]) for _ in range(20)]
    try:
        for child in others:
            assert not table.is_being_killed(identified(table, child))
        assert begun < descriptors() <= begun + 16
    finally:
        for child in others:
            child.kill()
            child.wait()
    del table
    assert descriptors() == begun
