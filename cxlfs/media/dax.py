"""Persistent memory mapped directly: device DAX, and files on a file system mounted with DAX.

Never: takes a volatile region for a persistent one, or a mapping without MAP_SYNC for one that
needs no fsync.

Invariants
- ``devdax`` is mapped only when sysfs shows it below a persistent libnvdimm region.
- BYTE granularity needs the region to say ``cpu_cache``; everything else is written back by line.
"""

from __future__ import annotations

import os
from pathlib import Path

from cxlfs.errors import BusyError, CxlfsError, MediaUnavailableError, NotPersistentError
from cxlfs.media.lock import refuse_other_users
from cxlfs.media.pages import alignment_of
from cxlfs.media.source import SourceMedia
from cxlfs.media.sysfs import DaxDevice, Region, find_block_region, find_dax_device
from cxlfs.native import Granularity, MappedRegion

_SYSTEM_RAM_DRIVER = "kmem"


def granularity_of(region: Region | None) -> Granularity:
    """LINE, unless the platform promises to save its caches when the power fails (eADR)."""
    if region is not None and region.persistence_domain == "cpu_cache":
        return Granularity.BYTE
    return Granularity.LINE


def _volatile(path: str, device: DaxDevice) -> NotPersistentError:
    return NotPersistentError(
        f"{path} is volatile memory ({device.parent} is not a persistent region)",
        next_step="make a persistent one: cxl create-region -t pmem, then "
        "ndctl create-namespace -m devdax",
    )


def without_driver(path: str, sysfs: Path) -> CxlfsError:
    """What to say of a device node that its driver does not answer for: of a volatile region never
    that it needs one, though Linux binds none to it by itself.
    """
    device = find_dax_device(Path(path).stat().st_rdev, sysfs)
    if device is not None and device.region is None:
        return _volatile(path, device)
    if device is not None and device.driver == _SYSTEM_RAM_DRIVER:
        return BusyError(
            f"{path} is in use as system memory (driver {device.driver})",
            next_step=f"take it back, then run it again: daxctl offline-memory {device.name}; "
            f"daxctl reconfigure-device -m devdax {device.name}",
        )
    return MediaUnavailableError(
        f"{path} has no driver", next_step="bind one: daxctl reconfigure-device -m devdax"
    )


def open_device(
    descriptor: int, path: str, *, read_only: bool, sysfs: Path, proc: Path | None
) -> SourceMedia:
    """Map the device DAX node ``descriptor``, and take the descriptor over. ``proc``: where to look
    for other processes that use it, and take no lock; None: they are no matter.

    Raises NotPersistentError for a volatile region, BusyError for one that somebody uses,
    MediaUnavailableError for other devices.
    """
    device = find_dax_device(os.fstat(descriptor).st_rdev, sysfs)
    if device is None:
        raise MediaUnavailableError(
            f"{path} is a character device, but not of the dax subsystem",
            next_step="name a /dev/daxX.Y of a persistent region (ndctl list -N), or a file",
        )
    if device.region is None:
        raise _volatile(path, device)
    if device.size_bytes == 0:
        raise MediaUnavailableError(
            f"{path} has no size: its driver is not bound",
            next_step=f"bind it to device_dax: daxctl reconfigure-device -m devdax {device.name}",
        )
    if proc is not None and not read_only:
        refuse_other_users(descriptor, path, proc)
    handle = MappedRegion.map_handle(
        descriptor,
        device.size_bytes,
        granularity=granularity_of(device.region),
        alignment_bytes=device.alignment_bytes,
        read_only=read_only,
        synchronous=True,
        what=path,
    )
    return SourceMedia(
        handle,
        kind="devdax",
        path=path,
        descriptor=descriptor,
        read_only=read_only,
        region=device.region,
        alignment_bytes=device.alignment_bytes,
        only_page_bytes=device.alignment_bytes,
    )


def open_dax_file(
    descriptor: int, path: str, size_bytes: int, *, read_only: bool, sysfs: Path
) -> SourceMedia | None:
    """Map a file with MAP_SYNC and take the descriptor over; None when its file system has none."""
    region = find_block_region(os.fstat(descriptor).st_dev, sysfs)
    alignment_bytes = alignment_of(descriptor, size_bytes)
    try:
        handle = MappedRegion.map_handle(
            descriptor,
            size_bytes,
            granularity=granularity_of(region),
            alignment_bytes=alignment_bytes,
            read_only=read_only,
            synchronous=True,
            what=path,
        )
    except NotPersistentError:
        return None
    return SourceMedia(
        handle,
        kind="fsdax",
        path=path,
        descriptor=descriptor,
        read_only=read_only,
        region=region,
        alignment_bytes=alignment_bytes,
    )
