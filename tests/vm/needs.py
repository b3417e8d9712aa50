"""What a virtual machine with persistent memory needs from this machine: programs, a kernel with
its modules, root. Nothing is installed unless ``install`` is called.

The kernel must be 6.12 or newer: with 6.1 an emulated CXL region comes up, but what is written to
it goes nowhere and reads back as zero. One that this machine lacks is unpacked beside it and not
installed: this machine's boot menu stays as it is, and the minute that its own initial RAM file
system would take is saved.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
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
    ("mkfs.ext4", "e2fsprogs"),
    ("blkid", "util-linux"),
    ("setpriv", "util-linux"),
    ("fusermount3", "fuse3"),
)
KERNEL_PACKAGE = "linux-image-6.12-amd64"
KERNEL_MINIMUM = (6, 12)
UNPACKED = Path("/var/cache/cxlfs-test-vm")
"""Where a kernel that is not installed lies, as a file system of its own: boot, lib/modules."""
APT_INSTALL = ("apt-get", "install", "-y", "--no-install-recommends")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Kernel:
    image: Path
    version: str
    modules: Path


def find_program(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":" + SYSTEM_PATH)


def _version_key(version: str) -> tuple[int, ...]:
    digits = "".join(c if c.isdigit() else " " for c in version)
    return tuple(int(part) for part in digits.split())


def find_kernel(*roots: Path) -> Kernel | None:
    """The newest kernel below ``roots`` (this machine's, and what was unpacked for it) that is new
    enough and has its modules.
    """
    found = []
    for root in roots or (Path("/"), UNPACKED):
        for image in (root / "boot").glob("vmlinuz-*"):
            version = image.name.removeprefix("vmlinuz-")
            kernel = Kernel(image, version, root / "lib/modules" / version)
            if _version_key(version)[:2] < KERNEL_MINIMUM:
                continue
            if (kernel.modules / "modules.dep").exists() and os.access(image, os.R_OK):
                found.append(kernel)
    return max(found, key=lambda kernel: _version_key(kernel.version), default=None)


def _is_static(program: str) -> bool:
    """Whether the program starts without a libc: true of those that name no dynamic loader."""
    with Path(program).open("rb") as file:
        return b"ld-linux" not in file.read(4096)


def missing_packages(*roots: Path) -> list[str]:
    """The Debian packages to install, and the kernel's; empty when all is there. ``roots``: where
    to look for a kernel, as of ``find_kernel``.
    """
    missing = [package for program, package in TOOLS if find_program(program) is None]
    busybox = find_program("busybox")
    if busybox is not None and not _is_static(busybox):
        missing.append("busybox-static")
    if find_kernel(*roots) is None:
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
    """Run apt-get, its output visible, and unpack the kernel. Raises
    ``subprocess.CalledProcessError`` when one of them fails.
    """
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update"], check=True, env=environment)
    programs = [package for package in packages if package != KERNEL_PACKAGE]
    if programs:
        subprocess.run([*APT_INSTALL, *programs], check=True, env=environment)
    if KERNEL_PACKAGE in packages:
        with tempfile.TemporaryDirectory(prefix="cxlfs-kernel-") as folder:
            unpack_kernel(_download_kernel(Path(folder)), UNPACKED)


def _download_kernel(folder: Path) -> Path:
    """The package with the files: ``KERNEL_PACKAGE`` only depends on the newest one."""
    command = ["apt-cache", "depends", "--important", KERNEL_PACKAGE]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (name,) = re.findall(r"^ *Depends: (linux-image-\S+)$", said, re.MULTILINE)
    # apt compares it with the signed index; as root, for the folder is root's own.
    command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", name]
    subprocess.run(command, check=True, cwd=folder)
    (package,) = folder.glob("*.deb")
    return package


def unpack_kernel(package: Path, root: Path) -> None:
    """Put the kernel and the modules of a Debian package below ``root``, which is made anew: all of
    it or nothing.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f"{root.name}.", dir=root.parent))
    try:
        subprocess.run(["dpkg-deb", "--extract", package, beside], check=True)
        (version,) = (path.name for path in (beside / "lib/modules").iterdir())
        depmod = find_program("depmod") or "depmod"
        subprocess.run([depmod, "--basedir", beside, version], check=True)
        shutil.rmtree(root, ignore_errors=True)
        beside.rename(root)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
