"""The guest's initial RAM file system: busybox, the kernel modules needed, and three scripts.

It is only large enough to put the host's own root file system (read-only) under an overlay and to
switch to it; no disk image is ever built. Modules are unpacked here, because an emulated processor
takes longer for that than for all the rest of the boot.
"""

from __future__ import annotations

import functools
import io
import lzma
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.vm.needs import Kernel, find_program

GUEST_SCRIPTS = Path(__file__).parent / "guest"
COMMON_MODULES = (
    "virtio_pci",
    "virtio_console",
    "9p",
    "9pnet_virtio",
    "overlay",
    "fuse",
    "crc32c_generic",
    "nd_pmem",
    "dax_pmem",
    "dax_hmem",
    "device_dax",
)
DIRECTORY_MODE = 0o040755
PROGRAM_MODE = 0o100755
FILE_MODE = 0o100644


def cpio(entries: Iterable[tuple[str, int, bytes]]) -> bytes:
    """A "newc" archive of (name, mode, content), as the kernel's documentation
    (driver-api/early-userspace/buffer-format) lays it out.
    """
    out = io.BytesIO()
    for inode, (name, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")], 1):
        raw = name.encode() + b"\0"
        fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(raw), 0)
        for part in (b"070701" + b"".join(b"%08X" % field for field in fields) + raw, data):
            out.write(part)
            out.write(b"\0" * (-out.tell() % 4))
    return out.getvalue()


def _module_name(path: str) -> str:
    return path.rpartition("/")[2].partition(".ko")[0].replace("-", "_")


def module_files(modules: Path, names: Iterable[str]) -> list[Path]:
    """The files of these kernel modules and of all they need, in loading order; a module that the
    kernel has built in has none.

    Read from the indexes instead of asking modprobe, whose configuration (ndctl brings an
    "install" line for libnvdimm) would hide some.
    """
    dependencies: dict[str, list[str]] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, needed = line.partition(":")
        dependencies[_module_name(path)] = [*reversed(needed.split()), path]
    soft: dict[str, list[str]] = {}
    for line in (modules / "modules.softdep").read_text().splitlines():
        words = line.split()
        if words[:1] == ["softdep"] and words[2:3] == ["pre:"]:
            before = [word for word in words[3:] if not word.endswith(":")]
            soft.setdefault(words[1].replace("-", "_"), []).extend(before)
    ordered: list[str] = []

    def add(name: str) -> None:
        for path in dependencies.get(name.replace("-", "_"), []):
            for earlier in soft.get(_module_name(path), []):
                add(earlier)
            if path not in ordered:
                ordered.append(path)

    for name in names:
        add(name)
    return [modules / path for path in ordered]


@functools.cache
def _unpacked(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    if path.suffix == ".zst":
        command = [shutil.which("zstd") or "zstd", "-dcq"]
        return subprocess.run(command, input=data, check=True, capture_output=True).stdout
    return data


def command_script(command: Iterable[str], directory: Path, environment: Mapping[str, str]) -> str:
    """The shell script that runs ``command`` in ``directory`` with ``environment`` added."""
    lines = [f"cd {shlex.quote(str(directory))} || exit 126"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    return "\n".join([*lines, "exec " + shlex.join(command)]) + "\n"


def build(kernel: Kernel, modules: Iterable[str], settings: str, command: str) -> bytes:
    """The archive. ``settings`` are shell assignments that the guest's first script reads;
    ``command`` is the shell script it runs once the devices are there.
    """
    busybox = find_program("busybox")
    if busybox is None:
        raise FileNotFoundError("busybox")
    files: list[tuple[str, int, bytes]] = [
        ("bin", DIRECTORY_MODE, b""),
        ("mods", DIRECTORY_MODE, b""),
        ("bin/busybox", PROGRAM_MODE, Path(busybox).read_bytes()),
    ]
    for number, path in enumerate(module_files(kernel.modules, [*COMMON_MODULES, *modules])):
        name = f"mods/{number:03d}-{_module_name(path.name)}.ko"
        files.append((name, FILE_MODE, _unpacked(path)))
    files += [
        ("init", PROGRAM_MODE, (GUEST_SCRIPTS / "init.sh").read_bytes()),
        ("main.sh", PROGRAM_MODE, (GUEST_SCRIPTS / "main.sh").read_bytes()),
        ("settings", FILE_MODE, settings.encode()),
        ("command.sh", PROGRAM_MODE, command.encode()),
    ]
    return cpio(files)
