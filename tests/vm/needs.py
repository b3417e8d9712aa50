"""What a virtual machine with persistent memory needs from this machine: programs, a kernel with
its modules, root. Nothing is installed unless ``install`` is called.

The kernel must be 6.12 or newer: with 6.1 an emulated CXL region comes up, but what is written to
it goes nowhere and reads back as zero.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

# What to look for, and the Debian 12 package that has it (the cxl tool is inside ndctl there).
TOOLS = (
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("modprobe", "kmod"),
    ("ndctl", "ndctl"),
    ("cxl", "ndctl"),
    ("daxctl", "daxctl"),
    ("mkfs.xfs", "xfsprogs"),
    ("blkid", "util-linux"),
    ("setpriv", "util-linux"),
    ("fusermount3", "fuse3"),
)
KERNEL_PACKAGE = "linux-image-6.12-amd64"
KERNEL_MINIMUM = (6, 12)
APT_INSTALL = ("apt-get", "install", "-y", "--no-install-recommends")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Kernel:
    image: Path
    version: str

    @property
    def modules(self) -> Path:
        return Path("/lib/modules", self.version)


def find_program(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":" + SYSTEM_PATH)


def _version_key(version: str) -> tuple[int, ...]:
    digits = "".join(c if c.isdigit() else " " for c in version)
    return tuple(int(part) for part in digits.split())


def find_kernel(boot: Path = Path("/boot")) -> Kernel | None:
    """The newest kernel in ``boot`` that is new enough and whose modules are installed."""
    found = []
    for image in boot.glob("vmlinuz-*"):
        kernel = Kernel(image, image.name.removeprefix("vmlinuz-"))
        if _version_key(kernel.version)[:2] < KERNEL_MINIMUM:
            continue
        if (kernel.modules / "modules.dep").exists() and os.access(image, os.R_OK):
            found.append(kernel)
    return max(found, key=lambda kernel: _version_key(kernel.version), default=None)


def _is_static(program: str) -> bool:
    """Whether the program starts without a libc: true of those that name no dynamic loader."""
    with Path(program).open("rb") as file:
        return b"ld-linux" not in file.read(4096)


def missing_packages(boot: Path = Path("/boot")) -> list[str]:
    """The Debian packages to install; empty when all is there."""
    missing = [package for program, package in TOOLS if find_program(program) is None]
    busybox = find_program("busybox")
    if busybox is not None and not _is_static(busybox):
        missing.append("busybox-static")
    if find_kernel(boot) is None:
        missing.append(KERNEL_PACKAGE)
    return list(dict.fromkeys(missing))


def apt_line(packages: list[str]) -> str:
    return "apt-get update && " + " ".join([*APT_INSTALL, *packages])


def other_problems() -> list[str]:
    """What no package brings: each one line with the next step."""
    problems = []
    if os.uname().machine != "x86_64":
        problems.append(
            f"the emulated devices need an x86-64 machine, this is {os.uname().machine}"
        )
    if os.geteuid() != 0:
        problems.append("only root can lend its file system to the guest; run it as root")
    return problems


def install(packages: list[str]) -> None:
    """Run apt-get, its output visible. Raises ``subprocess.CalledProcessError`` when it fails."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update"], check=True, env=environment)
    subprocess.run([*APT_INSTALL, *packages], check=True, env=environment)
