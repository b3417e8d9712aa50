"""What the kernel tells about a DAX device or a block device in sysfs: whether it is persistent,
how stores become durable, and how often its devices lost power uncleanly.

Never: opens a device node; fails for a file that is missing or unreadable (that is "not known").

Invariants
- A DAX device counts as persistent only below ``.../ndbusN/regionM/`` and only when that region is
  not of the volatile kind: a volatile CXL region, memory given by the firmware and a libnvdimm
  region all look the same in /dev.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from cxlfs.media.base import DirtyShutdown

SYSFS = Path("/sys")

_REGION = re.compile(r"(?P<region>.*/ndbus\d+/region\d+)(?:/|$)")
_VOLATILE_DEVTYPE = "nd_volatile"


@dataclass(frozen=True, slots=True)
class DaxDevice:
    """A character device of the dax subsystem."""

    name: str
    size_bytes: int
    alignment_bytes: int
    region: Region | None
    """None: not persistent."""
    parent: str
    """The sysfs folder it hangs from, for messages."""
    driver: str | None = None
    """``device_dax``; ``kmem`` of one that is used as system memory; None: bound to none."""


@dataclass(frozen=True, slots=True)
class Region:
    """A persistent libnvdimm region."""

    path: Path
    persistence_domain: str | None
    """``memory_controller`` or ``cpu_cache``; None when the kernel does not say."""

    def dirty_shutdown(self) -> DirtyShutdown:
        """Counts and ids of the devices behind this region, read anew."""
        ids, total, supported = [], 0, True
        for mapping in sorted(self.path.glob("mapping[0-9]*")):
            name = (_text(mapping) or "").partition(",")[0]
            device = self._device(name)
            ids.append(_first_text(device / "cxl/id", device / "nfit/id") or name)
            count = _number(
                _first_text(device / "cxl/dirty_shutdown", device / "nfit/dirty_shutdown")
            )
            if count is None:
                supported = False
            else:
                total += count
        digest = hashlib.blake2b("\n".join(sorted(ids)).encode(), digest_size=8).digest()
        return DirtyShutdown(
            supported=supported and bool(ids),
            shutdowns=total if supported else 0,
            device_hash=int.from_bytes(digest, "little") if ids else 0,
        )

    def _device(self, name: str) -> Path:
        """The folder of a memory device: nmemX is a sibling of the region, on the same bus."""
        return self.path.parent / name


def find_dax_device(device_number: int, sysfs: Path = SYSFS) -> DaxDevice | None:
    """The dax device with this number (``st_rdev``); None when it is another kind of device."""
    folder = _device_folder("char", device_number, sysfs)
    if folder is None or Path(os.path.realpath(folder / "subsystem")).name != "dax":
        return None
    return DaxDevice(
        name=folder.name,
        size_bytes=_number(_text(folder / "size")) or 0,
        alignment_bytes=_number(_text(folder / "align")) or 4096,
        region=find_region(folder),
        parent=str(folder.parent),
        driver=driver.resolve().name if (driver := folder / "driver").exists() else None,
    )


def find_block_region(device_number: int, sysfs: Path = SYSFS) -> Region | None:
    """The persistent region below a block device (``st_dev`` of a file on it), if there is one."""
    folder = _device_folder("block", device_number, sysfs)
    return None if folder is None else find_region(folder)


def find_region(folder: Path) -> Region | None:
    """The persistent region that ``folder``, a resolved sysfs path, lies in."""
    match = _REGION.match(str(folder))
    if match is None:
        return None
    path = Path(match["region"])
    if _text(path / "devtype") == _VOLATILE_DEVTYPE:
        return None
    domain = _text(path / "persistence_domain")
    return Region(path=path, persistence_domain=domain or None)


def _device_folder(kind: str, device_number: int, sysfs: Path) -> Path | None:
    link = sysfs / "dev" / kind / f"{os.major(device_number)}:{os.minor(device_number)}"
    if not link.exists():
        return None
    return Path(os.path.realpath(link))


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None


def _first_text(*paths: Path) -> str | None:
    return next((text for path in paths if (text := _text(path)) is not None), None)


def _number(text: str | None) -> int | None:
    """A decimal or 0x number; None for everything else, negative error codes included."""
    try:
        value = int(text or "", 0)
    except ValueError:
        return None
    return value if value >= 0 else None
