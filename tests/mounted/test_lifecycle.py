"""The life of a mount: coming up, going away, dying, and being found."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxlfs.control import mountinfo
from cxlfs.control.client import NoDaemonError, control_request, is_served
from cxlfs.daemon import linux
from cxlfs.daemon.mount import unmount
from cxlfs.daemon.options import TRANSPORTS, make_config
from cxlfs.daemon.service import serve
from cxlfs.errors import BusyError, MountError, ReadOnlyError
from tests.support.cli import PROGRAM
from tests.support.mount import (
    Workplace,
    assert_store_clean,
    kill,
    require_allow_other,
    tell,
    wait_for_exit,
    wait_for_line,
    wait_until,
)

HOLD_OPEN = """
import sys
file = open(sys.argv[1], "ab", buffering=0)
file.write(b"begun ")
print("ready", flush=True)
sys.stdin.readline()
file.write(b"ended")
file.close()
print("closed", flush=True)
"""


@pytest.fixture
def unmounted(unmounted: Workplace) -> Workplace:
    """How a daemon starts belongs to its life."""
    unmounted.starts_afresh = True
    return unmounted


def piped(*command: object) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        list(map(str, command)), stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def test_the_mount_table_names_source_and_type(place: Workplace) -> None:
    mount = mountinfo.find_mount(str(place.mountpoint))
    assert mount is not None
    assert mount.source == str(place.source)
    assert mount.file_system_type == "fuse.cxlfs"


@pytest.mark.parametrize("options", ["", "allow_other", "default_permissions"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_permissions_are_checked_unless_only_root_may_enter(
    unmounted: Workplace, options: str, transport: str
) -> None:
    if options == "allow_other":
        require_allow_other()
    unmounted.mount(*options.split(), f"transport={transport}")
    mount = mountinfo.find_mount(str(unmounted.mountpoint))
    assert mount is not None
    only_root = not options and os.geteuid() == 0
    assert ("default_permissions" in mount.options) is not only_root


@pytest.mark.skipif(
    not os.access(linux.CPU_LATENCY_DEVICE, os.W_OK),
    reason=f"{linux.CPU_LATENCY_DEVICE} is not there (no PM QoS) or not writable (root's alone)",
)
def test_a_wakeup_latency_is_asked_for_while_mounted(unmounted: Workplace) -> None:
    def held() -> list[Path]:
        folder = Path(f"/proc/{unmounted.daemon_pid}/fd")
        return [link for link in folder.iterdir() if link.readlink() == linux.CPU_LATENCY_DEVICE]

    unmounted.mount("wakeup_latency=2")
    assert len(held()) == 1
    unmounted.remount()
    assert held() == []


def test_a_wakeup_latency_that_cannot_be_had_is_told(
    unmounted: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = unmounted.root / "no device"
    monkeypatch.setattr(linux, "CPU_LATENCY_DEVICE", missing)
    config = make_config(
        str(unmounted.source), str(unmounted.mountpoint), options=["wakeup_latency=0"]
    )
    with pytest.raises(MountError) as caught:
        serve(config, on_ready=pytest.fail, log_path=None)
    assert str(missing) in caught.value.message
    assert "root" in caught.value.next_step
    assert not unmounted.is_mounted


def test_odd_names_of_source_and_mount_point(unmounted: Workplace) -> None:
    odd = unmounted.root / "a, b\\c 'ä' %41"
    mountpoint = unmounted.root / "m, n\\o 'ü'"
    unmounted.source.rename(odd)
    unmounted.source, unmounted.mountpoint = odd, mountpoint
    mountpoint.mkdir()
    unmounted.mount()
    mount = mountinfo.find_mount(str(mountpoint))
    assert mount is not None
    assert mount.source == str(odd)
    (mountpoint / "file").write_bytes(b"x")


def test_the_store_is_clean_when_unmount_returns(place: Workplace) -> None:
    """No waiting in between: the source can be used at once."""
    for round_number in range(3):
        (place.mountpoint / f"file{round_number}").write_bytes(b"x" * 10_000)
        place.unmount()
        assert not place.is_mounted
        place.mount()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_unmounts_cleanly(place: Workplace, number: signal.Signals) -> None:
    (place.mountpoint / "file").write_bytes(b"x" * 100_000)
    watch = os.pidfd_open(place.daemon_pid)
    os.kill(place.daemon_pid, number)
    wait_for_exit(watch)
    assert not place.is_mounted
    assert "store closed" in place.log_text()


def test_umount_by_other_tools_closes_the_store(place: Workplace) -> None:
    (place.mountpoint / "file").write_bytes(b"x" * 100_000)
    watch = os.pidfd_open(place.daemon_pid)
    command = ["umount"] if os.geteuid() == 0 else ["fusermount3", "-u"]
    subprocess.run([*command, str(place.mountpoint)], check=True)
    wait_for_exit(watch)
    assert "store closed" in place.log_text()


def test_a_busy_mount_names_who_holds_it(place: Workplace) -> None:
    holder = place.python(HOLD_OPEN, place.mountpoint / "file")
    wait_for_line(holder)
    with pytest.raises(BusyError) as caught:
        place.unmount()
    assert f"{holder.pid} (python" in str(caught.value)
    assert "detach it: " in caught.value.next_step
    tell(holder)
    wait_for_line(holder, b"closed")
    holder.wait()
    place.unmount()


def test_a_lazy_unmount_lets_writers_finish(place: Workplace) -> None:
    holder = place.python(HOLD_OPEN, place.mountpoint / "file")
    wait_for_line(holder)
    watch = os.pidfd_open(place.daemon_pid)
    unmount(str(place.mountpoint), lazy=True)
    assert not place.is_mounted
    tell(holder)
    wait_for_line(holder, b"closed")
    wait_for_exit(watch)
    place.mount()
    assert (place.mountpoint / "file").read_bytes() == b"begun ended"


def test_a_stop_signal_lets_writers_finish(place: Workplace) -> None:
    holder = place.python(HOLD_OPEN, place.mountpoint / "file")
    wait_for_line(holder)
    watch = os.pidfd_open(place.daemon_pid)
    os.kill(place.daemon_pid, signal.SIGTERM)
    wait_until(lambda: not place.is_mounted, "the mount is detached")
    tell(holder)
    wait_for_line(holder, b"closed")
    wait_for_exit(watch)
    place.mount()
    assert (place.mountpoint / "file").read_bytes() == b"begun ended"


def test_a_second_stop_signal_does_not_wait_for_writers(place: Workplace) -> None:
    (place.mountpoint / "file").write_bytes(b"before ")
    holder = place.python(HOLD_OPEN, place.mountpoint / "file")
    wait_for_line(holder)
    pid = place.daemon_pid
    watch = os.pidfd_open(pid)
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not place.is_mounted, "the mount is detached")
    os.kill(pid, signal.SIGTERM)
    wait_for_exit(watch)
    kill(holder)
    place.mount()
    assert (place.mountpoint / "file").read_bytes().startswith(b"before ")


def test_a_killed_daemon_leaves_a_dead_mount_not_an_empty_one(place: Workplace) -> None:
    data = os.urandom(300_000)
    (place.mountpoint / "kept").write_bytes(data)
    place.kill_daemon()
    for look in (os.listdir, os.statvfs):
        with pytest.raises(OSError) as caught:
            look(place.mountpoint)
        assert caught.value.errno == errno.ENOTCONN
    assert not is_served(str(place.mountpoint))
    with pytest.raises(NoDaemonError):
        list(control_request(str(place.mountpoint), "status"))
    place.mount()  # clears the dead one
    assert (place.mountpoint / "kept").read_bytes() == data
    assert "clearing the dead mount" in place.log_text()
    place.unmount()
    assert not place.is_mounted
    place.ends_clean = True


KILLED_WHILE_ASKING = """
import os, struct, sys, threading, time
from cxlfs.daemon import linux
from cxlfs.daemon.attach import attach
from cxlfs.daemon.mount import make_config

INIT, STATFS = 26, 17
fuse = attach(make_config(sys.argv[1], sys.argv[2]), read_bytes_max=1 << 20)
ask = (linux.answer_apart, (sys.argv[2],), {"seconds": 60})
threading.Thread(target=ask[0], args=ask[1], kwargs=ask[2], daemon=True).start()
while True:
    request = os.read(fuse, 1 << 21)
    size, opcode, unique = struct.unpack_from("=IIQ", request)
    if opcode == STATFS:
        break
    if opcode != INIT:
        continue  # whoever else looks at all mounts gets no answer either
    version = struct.pack("=IIII", 7, 31, 0, 0)
    limits = struct.pack("=HHIIHHIII", 0, 0, 1 << 20, 1, 0, 0, 0, 0, 0)
    answer = (version + limits).ljust(64, bytes(1))
    os.write(fuse, struct.pack("=IiQ", 16 + len(answer), 0, unique) + answer)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_daemon_killed_while_its_mount_does_not_answer_leaves_it_dead(
    unmounted: Workplace,
) -> None:
    """It asks whether its mount answers; a thread of its own in that question would outlive it."""
    process = unmounted.python(KILLED_WHILE_ASKING, unmounted.source, unmounted.mountpoint)
    wait_for_line(process)
    watch = os.pidfd_open(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    wait_for_exit(watch)
    assert mountinfo.is_dead(str(unmounted.mountpoint))
    unmounted.unmount()


def test_a_dead_mount_can_be_unmounted(place: Workplace) -> None:
    place.kill_daemon()
    unmount(str(place.mountpoint))
    assert not place.is_mounted
    with pytest.raises(MountError):
        unmount(str(place.mountpoint))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_umount_says_that_another_namespace_holds_a_copy(place: Workplace) -> None:
    (place.mountpoint / "file").write_bytes(b"x")
    with piped("unshare", "--mount", "sh", "-c", "echo ready; exec cat") as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        with piped(*PROGRAM, "umount", place.mountpoint) as umount:
            assert umount.stderr is not None
            said = umount.stderr.readline()
            assert f"process {holder.pid} (" in said
            command = f"nsenter -t {holder.pid} -m umount {place.mountpoint}"
            assert command in said
            subprocess.run(command.split(), check=True)
            assert umount.communicate()[0] == f"unmounted {place.mountpoint}\n"
            assert umount.returncode == 0
        holder.communicate()
    assert not place.is_mounted
    place.mount()


def test_killing_the_daemon_in_mid_overwrite_keeps_the_old_version(place: Workplace) -> None:
    path = place.mountpoint / "checkpoint"
    old = os.urandom(2_000_000)
    path.write_bytes(old)
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        file.write(os.urandom(1_000_000))
        place.kill_daemon()
        file.write(b"x")
    place.mount()
    assert path.read_bytes() == old
    place.unmount()
    place.ends_clean = True


def test_a_second_mount_of_a_source_names_the_first(place: Workplace) -> None:
    other = place.root / "other"
    other.mkdir()
    with pytest.raises(BusyError) as caught:
        place.mount(mountpoint=other)
    assert str(place.daemon_pid) in str(caught.value)
    assert str(place.mountpoint) in str(caught.value)


def test_a_mount_point_in_use_is_refused(place: Workplace) -> None:
    with pytest.raises(BusyError) as caught:
        place.mount()
    assert str(place.source) in str(caught.value)
    assert "cxlfs umount" in caught.value.next_step


def test_read_only(place: Workplace) -> None:
    (place.mountpoint / "file").write_bytes(b"x" * 5000)
    before = place.source.read_bytes()
    place.remount("ro")
    path = place.mountpoint / "file"
    assert path.read_bytes() == b"x" * 5000
    changes = (
        lambda: path.write_bytes(b"y"),
        path.unlink,
        (place.mountpoint / "new").touch,
        lambda: path.rename(place.mountpoint / "other"),
        lambda: os.setxattr(path, "user.x", b"y"),
        lambda: path.chmod(0o600),
    )
    for change in changes:
        with pytest.raises(OSError) as caught:
            change()
        assert caught.value.errno == ReadOnlyError.errno
    place.unmount()
    after = place.source.read_bytes()
    assert len(before) == len(after)
    place.mount("ro")
    place.unmount()
    assert place.source.read_bytes() == after, "a read-only mount wrote to the source"


def test_status_and_list_of_a_mounted_store(place: Workplace) -> None:
    (place.mountpoint / "checkpoint").write_bytes(b"x" * 70_000)
    for name in (place.mountpoint, place.source):
        (message,) = control_request(str(name), "status")
        assert message["message_type"] == "status"
        assert message["state"] == "ONLINE"
        assert message["files"] == 1
    entries = list(control_request(str(place.source), "list", {"path": "/"}))
    assert [entry["path"] for entry in entries] == ["/checkpoint"]
    assert entries[0]["size_bytes"] == 70_000
    assert entries[0]["state"] == "complete"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may abort connections here")
def test_an_aborted_connection_leaves_a_dead_mount_and_a_clean_store(place: Workplace) -> None:
    place.announced.append("was aborted")
    (place.mountpoint / "file").write_bytes(b"x" * 100_000)
    minor = os.minor(place.mountpoint.stat().st_dev)
    watch = os.pidfd_open(place.daemon_pid)
    with connections(place) as directory:
        (directory / str(minor) / "abort").write_text("1")
    wait_for_exit(watch)
    with pytest.raises(OSError) as caught:
        os.statvfs(place.mountpoint)
    assert caught.value.errno == errno.ENOTCONN
    assert_store_clean(place.source)
    place.mount()
    assert (place.mountpoint / "file").stat().st_size == 100_000


@contextlib.contextmanager
def connections(place: Workplace) -> Iterator[Path]:
    """The control files of FUSE connections, which not every machine has mounted."""
    directory = place.root / "connections"
    directory.mkdir()
    subprocess.run(["mount", "-t", "fusectl", "none", str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


BROKEN_DAEMON = """
import sys
from cxlfs.fuse import direct, operations
from cxlfs.daemon.mount import make_config, mount_foreground

def broken_request(*arguments):
    raise SystemError("broken transport")  # before the boundary: as pyfuse3 itself may fail

operations.Operations.lookup = direct.Direct.serve = broken_request
mount_foreground(make_config(sys.argv[1], sys.argv[2], transport=sys.argv[3]))
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_failure_of_the_main_loop_leaves_a_dead_mount(
    unmounted: Workplace, transport: str
) -> None:
    with (unmounted.root / "stderr").open("wb") as stderr:
        process = unmounted.python(
            BROKEN_DAEMON, unmounted.source, unmounted.mountpoint, transport, stderr=stderr
        )

    def is_met() -> bool:
        """Or whoever looks at all mounts of the machine has asked something of it before."""
        return is_served(str(unmounted.mountpoint)) or process.poll() is not None

    wait_until(is_met, "it is mounted")
    with pytest.raises(OSError):
        (unmounted.mountpoint / "file").stat()
    assert process.wait(20) != 0
    said = (unmounted.root / "stderr").read_text()
    assert "broken transport" in said
    with pytest.raises(OSError) as caught:
        os.statvfs(unmounted.mountpoint)
    assert caught.value.errno == errno.ENOTCONN
    assert_store_clean(unmounted.source)
    unmounted.mount()


FOREGROUND = """
import sys
from cxlfs.daemon.mount import make_config, mount_foreground
mount_foreground(make_config(sys.argv[1], sys.argv[2]))
print("done", flush=True)
"""


def test_in_the_foreground_a_service_manager_is_told(unmounted: Workplace) -> None:
    import socket

    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(unmounted.root / "notify"))
    environment = {**os.environ, "NOTIFY_SOCKET": str(unmounted.root / "notify")}
    process = unmounted.python(
        FOREGROUND,
        unmounted.source,
        unmounted.mountpoint,
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    manager.settimeout(20)
    assert manager.recv(1000).startswith(b"READY=1\n")
    manager.close()
    (unmounted.mountpoint / "file").write_bytes(b"x")
    process.send_signal(signal.SIGTERM)
    wait_for_line(process, b"done")
    assert process.wait() == 0
    assert not unmounted.is_mounted


def test_a_relative_mount_point_is_meant_from_here(
    unmounted: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(unmounted.root)
    unmounted.mount(mountpoint=Path("mnt"))
    assert unmounted.is_mounted
    unmount("mnt")
    assert not unmounted.is_mounted


def test_unmounting_from_inside_the_mount(place: Workplace) -> None:
    code = "import os, sys; from cxlfs.daemon.mount import unmount; unmount(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(place.mountpoint)], cwd=place.mountpoint, check=False
    )
    assert done.returncode == 0
    assert not place.is_mounted
