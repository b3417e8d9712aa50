"""A sysfs of one's own: the folders and files that the kernel shows for DAX devices."""

from __future__ import annotations

from pathlib import Path

ACPI = "devices/LNXSYSTM:00/LNXSYBUS:00/ACPI0012:00/ndbus0"
CXL = "devices/platform/ACPI0017:00/root0/nvdimm-bridge0/ndbus0"
CXL_VOLATILE = "devices/platform/ACPI0017:00/root0/decoder0.0/region0"
FIRMWARE = "devices/platform/hmem.0"


class Sysfs:
    """Builds below ``root``; numbers of devices are ``major:minor``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: object) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return file

    def link(self, path: str, target: str) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        (self.root / target).mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / target)

    def dax(
        self, parent: str, *, number: str = "1:5", size_bytes: int = 4 << 20, align: int = 2 << 20
    ) -> str:
        """A dax device below ``parent``; returns its folder."""
        folder = f"{parent}/dax0.0"
        self.write(f"{folder}/size", size_bytes)
        self.write(f"{folder}/align", align)
        self.link(f"{folder}/subsystem", "bus/dax")
        self.link(f"dev/char/{number}", folder)
        return folder

    def region(
        self, bus: str, *, domain: str | None = "memory_controller", name: str = "region0"
    ) -> str:
        """A libnvdimm region; returns its folder."""
        folder = f"{bus}/{name}"
        self.write(f"{folder}/devtype", "nd_pmem")
        if domain is not None:
            self.write(f"{folder}/persistence_domain", domain)
        return folder

    def device(
        self, region: str, index: int, *, kind: str, identity: str, shutdowns: object | None
    ) -> None:
        """A memory device that the region is made of; ``kind`` is ``cxl`` or ``nfit``."""
        bus = region.rpartition("/")[0]
        self.write(f"{region}/mapping{index}", f"nmem{index},0,4294967296,{index}")
        self.write(f"{bus}/nmem{index}/{kind}/id", identity)
        if shutdowns is not None:
            self.write(f"{bus}/nmem{index}/{kind}/dirty_shutdown", shutdowns)
