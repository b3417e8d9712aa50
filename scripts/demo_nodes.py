"""Nodes of scripts/demo-job on one machine: each has mounts, a network, a name and processes of its
own (Linux namespaces), and a cxlfs store in a file, mounted at the path that it has on all of them.

Invariants
- Nothing of it is seen outside: no interface, mount, name or directory of the machine changes.
- A node is gone, with its processes, mounts and interfaces, when the program that made it ends, in
  whatever way: its first process reads a pipe until then, and the kernel ends the others with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

BIN = Path(sys.executable).parent
MOUNTPOINT = Path("/mnt/ckpt")
NETWORK = "10.77.0."
TOOLS = ("ip", "nsenter", "unshare")
STORE_SIZE = "256M"
PATIENCE_SECONDS = 60.0
SWITCH_BEGINS = "echo ready; read -r _"
NODE_BEGINS = """set -e
hostname "$1"
mount -t tmpfs none /mnt
mount -t tmpfs none /run
mount --bind "$2" /etc/hosts
mkdir /mnt/ckpt
ip link set lo up
echo ready
while read -r _; do :; done"""


class MissingError(Exception):
    """This machine cannot do that."""


class NodeError(Exception):
    """A command of a node failed."""


def require_tools() -> None:
    """Raises MissingError."""
    if os.geteuid() != 0:
        raise MissingError("nodes have namespaces of their own, which takes root: run it with sudo")
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        raise MissingError(f"there is no {', '.join(lacking)}: install iproute2 and util-linux")
    if not Path("/dev/fuse").exists():
        raise MissingError("there is no /dev/fuse: nothing can be mounted (modprobe fuse)")


class _Holder:
    """A process in namespaces of its own, which end with it."""

    def __init__(self, namespaces: list[str], script: str, *arguments: str) -> None:
        command = ["unshare", *namespaces, "bash", "-c", script, "bash", *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the one who shows it
        )
        if self.process.stdout is None or self.process.stdout.readline() != "ready\n":
            self.process.kill()
            told = self.process.communicate()[1].strip().splitlines()
            raise MissingError(f"no namespaces here: {told[-1] if told else 'no reason'}")

    def end(self) -> None:
        """With the first process of its own all others of a node end."""
        try:
            self.process.communicate(timeout=PATIENCE_SECONDS)
        finally:
            self.process.kill()
            self.process.communicate()


class Switch:
    """What the nodes' networks hang on. Raises MissingError."""

    def __init__(self) -> None:
        self._holder = _Holder(["--net"], SWITCH_BEGINS)
        try:
            self._ip("link", "add", "switch", "type", "bridge")
            self._ip("link", "set", "switch", "up")
        except MissingError:
            self.end()
            raise

    def plug(self, number: int, process: int) -> None:
        """A port for the node, whose namespaces are those of ``process``."""
        port = f"port{number}"
        self._ip("link", "add", port, "type", "veth", "peer", "eth0", "netns", str(process))
        self._ip("link", "set", port, "master", "switch", "up")

    def end(self) -> None:
        self._holder.end()

    def _ip(self, *arguments: str) -> None:
        inside = ["nsenter", f"--net=/proc/{self._holder.process.pid}/ns/net"]
        done = subprocess.run(
            [*inside, "ip", *arguments], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise MissingError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class Node:
    """``work``: where the files of stores are. Raises MissingError."""

    def __init__(self, number: int, work: Path, switch: Switch) -> None:
        self.name = f"node{number}"
        self.address = f"{NETWORK}{number + 1}"
        self.source = work / f"{self.name}.cxlfs"
        namespaces = ["--mount", "--net", "--uts", "--pid", "--fork", "--kill-child=KILL"]
        hosts = str(work / "hosts")
        self._holder = _Holder([*namespaces, "--mount-proc"], NODE_BEGINS, self.name, hosts)
        self._process = self._holder.process.pid
        self.is_on = True
        try:
            switch.plug(number, self._process)
            self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
            self.run("ip", "link", "set", "eth0", "up")
        except NodeError as error:
            self.power_off()
            raise MissingError(str(error)) from None
        except MissingError:
            self.power_off()
            raise

    def inside(self, *arguments: object) -> list[str]:
        """A command that runs on the node."""
        namespaces = [f"--{name}=/proc/{self._process}/ns/{name}" for name in ("net", "uts")]
        processes = f"--pid=/proc/{self._process}/ns/pid_for_children"
        mounts = f"--mount=/proc/{self._process}/ns/mnt"
        return ["nsenter", *namespaces, processes, mounts, *map(str, arguments)]

    def begin(
        self, *arguments: object, log: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen(
                self.inside(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def run(self, *arguments: object) -> str:
        """What it printed. Raises NodeError."""
        done = subprocess.run(
            self.inside(*arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            told = (done.stderr or done.stdout).strip()
            raise NodeError(f"{self.name}: {' '.join(map(str, arguments))}: {told}")
        return done.stdout

    def cxlfs(self, *arguments: object) -> str:
        return self.run(BIN / "cxlfs", *arguments)

    def seen(self, path: Path) -> Path:
        """What the node calls ``path``."""
        return Path(f"/proc/{self._process}/root") / path.relative_to("/")

    # --- the store --------------------------------------------------------------------------

    def make_store(self) -> None:
        self.source.unlink(missing_ok=True)
        self.cxlfs("mkfs", self.source, "--size", STORE_SIZE, "--label", self.name)
        self.mount()

    def mount(self) -> None:
        self.cxlfs("mount", self.source, MOUNTPOINT)

    def unmount(self) -> None:
        self.cxlfs("umount", MOUNTPOINT)

    # --- the end ----------------------------------------------------------------------------

    def power_off(self) -> None:
        """All its processes at once, as they are; its store stays in its file."""
        if self.is_on:
            self.is_on = False
            self._holder.end()


def write_hosts(work: Path, count: int) -> None:
    lines = ["127.0.0.1 localhost"]
    lines += [f"{NETWORK}{number + 1} node{number}" for number in range(count)]
    (work / "hosts").write_text("\n".join(lines) + "\n")


def terminate(process: subprocess.Popen[bytes]) -> None:
    """What runs on a node: nsenter waits for it, and passes no signal on."""
    own = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    with contextlib.suppress(OSError):
        for child in own.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), 15)


def wait_for(processes: list[subprocess.Popen[bytes]], seconds: float) -> bool:
    """Whether all ended."""
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
