"""One boot of a virtual machine with an emulated NVDIMM or CXL Type-3 memory device.

The guest runs on this machine's own root file system (read-only, an overlay in RAM above it): all
that is installed or checked out here is there under the same path, and what the guest writes
vanishes with it, except what it writes to the media, a file that is kept.

A power cut is a SIGKILL of QEMU. The media is a shared mapping of a file, so that every store the
guest's processor had executed is seen by the next boot: this tests cuts at any instruction and
recovery in program order, and cannot show a missing write-back or fence (see README.md).

Events come from the guest over a port of its own, one JSON object per line. The guest's processor
waits until QEMU has passed a line on (no ioeventfd), so that after a cut the events received are
exactly those that the guest had sent.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import selectors
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.vm import initramfs
from tests.vm.needs import Kernel, find_program

MIB = 1 << 20
LABEL_BYTES = 2 * MIB
QEMU = "qemu-system-x86_64"
# Any fixed UUID: see cxl_region in guest/main.sh.
REGION_UUID = "b2f6b3de-0d0c-4c7e-9f5e-5f0c1a7f3d42"
# Turns the middle of the guest's RAM into "soft reserved" memory (E820 type 0xefffffff), for which
# Linux makes a device-dax node: volatile, and to be refused.
VOLATILE_REGION = "memmap=256M%0x60000000-1+0xefffffff"

Event = Mapping[str, Any]  # as the guest's agent sends it; "event" names its kind


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of persistent memory: which device, how Linux presents it, how large it is."""

    name: str
    device: str  # "nvdimm" or "cxl"
    mode: str  # "devdax", or "xfs", "ext4": an fsdax namespace with that, mounted dax=always
    size_bytes: int


TARGETS = (
    Target("nvdimm-devdax", "nvdimm", "devdax", 256 * MIB),
    Target("nvdimm-xfs", "nvdimm", "xfs", 640 * MIB),
    Target("cxl-devdax", "cxl", "devdax", 256 * MIB),
    Target("nvdimm-ext4", "nvdimm", "ext4", 640 * MIB),
)
DIRECT_DEVICE_BYTES = 4096 * MIB
"""Of a DAX device on which programs store by themselves: its segments have room for large pages."""


def with_room_for_pages(target: Target) -> Target:
    """The same, larger where it is a DAX device."""
    if target.mode != "devdax":
        return target
    return dataclasses.replace(target, size_bytes=DIRECT_DEVICE_BYTES)


def some_targets(seed: int) -> list[Target]:
    """For a short run: every CXL device, and one of the others."""
    others = [target for target in TARGETS if target.device != "cxl"]
    drawn = random.Random(seed).choice(others)
    return [target for target in TARGETS if target.device == "cxl" or target is drawn]


@dataclass(slots=True)
class Boot:
    """How a boot went. ``status``: the command's exit status, None when it did not get that far."""

    status: int | None = None
    started: bool = False
    cut: bool = False
    timed_out: bool = False
    seconds_to_start: float = 0.0
    seconds: float = 0.0
    output: str = ""
    console: str = ""
    events: list[Event] = field(default_factory=list)

    def describe(self) -> str:
        if self.cut:
            return "power cut"
        if self.timed_out:
            return "timed out"
        if self.status is None:
            return "the guest died"
        return f"exit status {self.status}"


def usable_kvm() -> bool:
    """Whether the processor itself can run a guest: a /dev/kvm without VMX or SVM below it cannot
    boot an unpatched kernel.
    """
    try:
        with Path("/dev/kvm").open("r+b", buffering=0):
            flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool({"vmx", "svm"} & flags)


def make_media(target: Target, path: Path) -> None:
    """Create the sparse file behind the device (and for CXL the one with its labels)."""
    extra = LABEL_BYTES if target.device == "nvdimm" else 0
    with path.open("xb") as file:
        file.truncate(target.size_bytes + extra)
    if target.device == "cxl":
        with label_file(path).open("xb") as file:
            file.truncate(MIB)


def label_file(media: Path) -> Path:
    return media.with_name(media.name + ".lsa")


def _memory_backend(name: str, path: Path, size_bytes: int) -> list[str]:
    if "," in str(path):
        raise ValueError(f"QEMU takes no file names with a comma: {path}")
    backend = f"memory-backend-file,id={name},share=on,mem-path={path},size={size_bytes}"
    return ["-object", backend]


def _cxl_memdev_option() -> str:
    """The name of cxl-type3's persistent memory option: renamed in QEMU 8.1."""
    command = [QEMU, "-device", "cxl-type3,help"]
    options = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return "persistent-memdev" if "persistent-memdev" in options else "memdev"


class Machine:
    """The same machine for every boot of one target; ``work`` takes its scratch files."""

    memory_mib = 2048

    def __init__(self, target: Target, media: Path, work: Path, kernel: Kernel, accel: str) -> None:
        self.target, self.media, self.work, self.kernel = target, media, work, kernel
        # KVM is not known to run vector instructions on CXL memory, which QEMU emulates as MMIO.
        self.accel = "tcg" if target.device == "cxl" else accel
        self._process: subprocess.Popen[bytes] | None = None
        self._cut_at: float | None = None
        self._boot = Boot()
        self._stopped = threading.Event()

    # ------------------------------------------------------------------------ the QEMU command

    def _device_arguments(self) -> tuple[str, str, str, list[str]]:
        """What the device adds to -machine, to -cpu, to the kernel's command line, and its own
        arguments.
        """
        size_bytes = self.target.size_bytes
        if self.target.device == "nvdimm":
            backend = _memory_backend("memory", self.media, size_bytes + LABEL_BYTES)
            device = f"nvdimm,id=nvdimm0,memdev=memory,label-size={LABEL_BYTES}"
            return ",nvdimm=on,nvdimm-persistence=mem-ctrl", "", "", [*backend, "-device", device]
        option = _cxl_memdev_option()
        devices = [
            *_memory_backend("memory", self.media, size_bytes),
            *_memory_backend("labels", label_file(self.media), MIB),
            *("-device", "pxb-cxl,bus_nr=12,bus=pcie.0,id=cxl.0"),
            *("-device", "cxl-rp,port=0,bus=cxl.0,id=cxlrp0,chassis=0,slot=2"),
            *("-device", f"cxl-type3,bus=cxlrp0,{option}=memory,lsa=labels,id=cxl0,sn=0x1"),
        ]
        # The event log of that old device has no interrupt, for which Linux >= 6.3 refuses it
        # unless no device at all has message interrupts.
        append = " pci=nomsi" if option == "memdev" else ""
        machine = ",cxl=on,cxl-fmw.0.targets.0=cxl.0,cxl-fmw.0.size=4G"
        # Making a region flushes the CPU caches, which Linux refuses to try in a guest: so it must
        # not see that it is one.
        return machine, ",hypervisor=off", append, devices

    def _arguments(self, accel: str, output: int, witness: int) -> list[str]:
        machine, cpu_flags, append, devices = self._device_arguments()
        # Without ERMS: on a CPU that has it glibc's memcpy is "rep movsb", which an emulated CPU
        # does byte by byte.
        cpu = "host" if accel == "kvm" else "max,vendor=GenuineIntel,erms=off,fsrm=off"
        maximum_mib = self.memory_mib + self.target.size_bytes // MIB + 2048
        arguments = [
            *(QEMU, "-machine", f"q35,usb=off,accel={accel}{machine}", "-cpu", cpu + cpu_flags),
            # One CPU: with more, emulated ones trip over each other now and then while Linux
            # patches its own code.
            *("-smp", "1", "-m", f"{self.memory_mib}M,slots=2,maxmem={maximum_mib}M"),
            *("-display", "none", "-nodefaults", "-no-user-config", "-no-reboot", "-nic", "none"),
            *("-kernel", str(self.kernel.image), "-initrd", str(self.work / "initramfs")),
            "-append",
            f"console=ttyS0 panic=-1 mitigations=off nokaslr {VOLATILE_REGION}{append}",
            *("-serial", f"file:{self.work / 'console'}"),
            "-fsdev",
            "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap",
            *("-device", "virtio-9p-pci,fsdev=root,mount_tag=hostroot"),
            *("-device", "virtio-serial-pci,max_ports=3,ioeventfd=off"),
        ]
        for number, (name, fd) in enumerate((("output", output), ("witness", witness)), 1):
            arguments += [
                *("-add-fd", f"fd={fd},set={number}"),
                *("-chardev", f"file,id={name},path=/dev/fdset/{number},append=on"),
                *("-device", f"virtserialport,chardev={name},nr={number},name=vm.{name}"),
            ]
        return arguments + devices

    # ---------------------------------------------------------------------------------- a boot

    def cut(self) -> None:
        """Cut the power now."""
        if self._process is not None and self._process.poll() is None:
            self._boot.cut = True
            self._process.kill()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """End the boot in progress and allow no other; may be called from any thread."""
        self._stopped.set()
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()

    def cut_after(self, seconds: float) -> None:
        """Cut the power so many seconds from now, unless the guest has ended by then."""
        self._cut_at = time.monotonic() + seconds

    def boot(
        self,
        command: list[str],
        on_event: Callable[[Event], None],
        *,
        directory: Path,
        environment: Mapping[str, str],
        timeout_s: float = 600.0,
    ) -> Boot:
        """Boot, run ``command`` in ``directory`` as root, and return when the guest has ended.
        ``on_event`` sees each event at once, and may call :meth:`cut` and :meth:`cut_after`.

        A guest that dies before it reaches the command is booted once more without KVM: none of
        the command has run then.
        """
        script = initramfs.command_script(command, directory, environment)
        settings = (
            f"DEVICE={self.target.device} MODE={self.target.mode} REGION_UUID={REGION_UUID} "
            f"MODULES={shlex.quote(str(self.kernel.modules))}"
        )
        modules = ["nfit"] if self.target.device == "nvdimm" else []
        if self.target.device == "cxl":
            modules += ["cxl_acpi", "cxl_pci", "cxl_port", "cxl_mem", "cxl_pmem"]
        if self.target.mode != "devdax":
            modules.append(self.target.mode)
        archive = initramfs.build(self.kernel, modules, settings + "\n", script)
        (self.work / "initramfs").write_bytes(archive)
        boot = self._boot_once(self.accel, on_event, timeout_s)
        if boot.started or boot.status is not None or boot.timed_out or self.stopped:
            return boot
        return self._boot_once("tcg", on_event, timeout_s)

    def _boot_once(self, accel: str, on_event: Callable[[Event], None], timeout_s: float) -> Boot:
        self._boot, self._cut_at = Boot(), None
        began = time.monotonic()
        output_read, output_write = os.pipe()
        witness_read, witness_write = os.pipe()
        try:
            with (self.work / "qemu").open("wb") as messages:
                self._process = subprocess.Popen(
                    # QEMU does not outlive this program, however that ends.
                    [
                        *("setpriv", "--pdeathsig", "KILL", "--"),
                        *self._arguments(accel, output_write, witness_write),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=messages,
                    stderr=messages,
                    pass_fds=(output_write, witness_write),
                    start_new_session=True,  # a terminal's Ctrl-C is ours to handle
                )
            os.close(output_write)
            os.close(witness_write)
            if self.stopped:
                self._process.kill()
            self._follow(output_read, witness_read, on_event, began, timeout_s)
            self._process.wait()
        finally:
            if self._process is not None and self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            os.close(output_read)
            os.close(witness_read)
        self._boot.seconds = time.monotonic() - began
        for name in ("qemu", "console"):
            path = self.work / name
            if path.exists():
                self._boot.console += path.read_text(errors="replace")
        return self._boot

    def _follow(
        self,
        output: int,
        witness: int,
        on_event: Callable[[Event], None],
        began: float,
        timeout_s: float,
    ) -> None:
        """Read both ports to their ends, which come with the end of QEMU."""
        boot, deadline = self._boot, began + timeout_s
        rest = {output: b"", witness: b""}
        with selectors.DefaultSelector() as selector:
            for fd in rest:
                selector.register(fd, selectors.EVENT_READ)
            while selector.get_map():
                now = time.monotonic()
                if self._cut_at is not None and now >= self._cut_at:
                    self._cut_at = None
                    self.cut()
                if now >= deadline and not boot.timed_out and self._process is not None:
                    boot.timed_out = True
                    self._process.kill()
                next_at = deadline if self._cut_at is None else min(deadline, self._cut_at)
                wait_s = 1.0 if boot.timed_out else max(0.0, next_at - now)
                for key, _ in selector.select(wait_s):
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fd)
                    rest[key.fd] += data
                    if key.fd == witness:
                        *lines, rest[witness] = rest[witness].split(b"\n")
                        self._receive(lines, on_event, began)
        boot.output = rest[output].decode(errors="replace")

    def _receive(self, lines: list[bytes], on_event: Callable[[Event], None], began: float) -> None:
        for line in lines:
            event: Event = json.loads(line)
            self._boot.events.append(event)
            if event["event"] == "start":
                self._boot.started = True
                self._boot.seconds_to_start = time.monotonic() - began
            elif event["event"] == "end":
                self._boot.status = event["status"]
            else:
                on_event(event)


def qemu_version() -> str:
    command = [find_program(QEMU) or QEMU, "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]
