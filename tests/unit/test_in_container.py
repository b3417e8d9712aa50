"""``scripts/in-container`` takes away what a container does not have, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.mount import why_not_mountable, workplace
from tests.support.repository import ROOT

PROGRAM = ROOT / "scripts" / "in-container"
EXIT_MISSING = 69
CAP_SYS_ADMIN, CAP_SYS_RESOURCE, CAP_IPC_LOCK, CAP_CHOWN = 21, 24, 14, 0


def run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([PROGRAM, *command], capture_output=True, text=True, check=False)
    if done.returncode == EXIT_MISSING:
        pytest.skip(done.stderr.strip())
    return done


def test_rights_and_devices_are_those_of_a_container() -> None:
    done = run("sh", "-c", "grep CapEff /proc/self/status; ls /dev; df -k --output=size /dev/shm")
    assert done.returncode == 0, done.stderr
    word, mask, *devices = done.stdout.split()
    assert word == "CapEff:"
    has = {number for number in range(64) if int(mask, 16) >> number & 1}
    assert {CAP_CHOWN, CAP_SYS_ADMIN} <= has
    assert not has & {CAP_SYS_RESOURCE, CAP_IPC_LOCK}
    assert {"null", "shm"} <= set(devices)
    assert not set(devices) & {"log", "kmsg", "mem", "cpu_dma_latency"}
    assert devices[-1] == str(64 << 10)


@pytest.mark.parametrize("path", ["/sys/kernel/mm/ksm/run", "/proc/sys/vm/swappiness"])
def test_settings_of_the_kernel_cannot_be_written(path: str) -> None:
    if not Path(path).exists():
        pytest.skip(f"this kernel has no {path}")
    done = run("sh", "-c", f"cat {path} && cat {path} > {path}")
    assert done.returncode != 0
    assert done.stdout
    assert "Read-only file system" in done.stderr


def test_the_status_is_that_of_the_command_and_what_it_left_ends(tmp_path: Path) -> None:
    left = tmp_path / "left"
    os.mkfifo(left)
    reader = os.open(left, os.O_RDONLY | os.O_NONBLOCK)
    try:
        script = f"mount -t tmpfs x /mnt && sleep 1000 9>{left} & sleep 0.1; exit 7"
        assert run("bash", "-c", script).returncode == 7
        deadline = time.monotonic() + 20
        while True:  # at the end of the last writer a read is empty, and until then "try again"
            try:
                assert os.read(reader, 1) == b""
                break
            except BlockingIOError:
                assert time.monotonic() < deadline, "a process is left"
                time.sleep(0.01)
    finally:
        os.close(reader)
    assert "x /mnt tmpfs" not in Path("/proc/self/mounts").read_text(encoding="utf-8")


@pytest.mark.mounted
def test_the_mounts_of_others_end_without_the_container() -> None:
    """A copy of a mount would keep its daemon serving after its unmount."""
    if why_not_mountable() is not None:
        pytest.skip(f"cannot mount here: {why_not_mountable()}")
    with workplace() as place:
        place.mount()
        done = run("cat", "/proc/self/mounts")
        assert done.returncode == 0, done.stderr
        assert str(place.mountpoint) in Path("/proc/self/mounts").read_text(encoding="utf-8")
        assert str(place.mountpoint) not in done.stdout


def test_usage() -> None:
    done = subprocess.run([PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "scripts/in-container COMMAND" in done.stdout
