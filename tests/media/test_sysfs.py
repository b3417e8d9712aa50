"""Which DAX devices count as persistent, and what is known of their devices."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cxlfs.media.base import DirtyShutdown
from cxlfs.media.sysfs import Region, find_block_region, find_dax_device
from tests.media.tree import ACPI, CXL, CXL_VOLATILE, FIRMWARE, Sysfs

NUMBER = os.makedev(1, 5)


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path)


def region_of(sysfs: Sysfs) -> Region:
    device = find_dax_device(NUMBER, sysfs.root)
    assert device is not None
    assert device.region is not None
    return device.region


@pytest.mark.parametrize("bus", [ACPI, CXL])
def test_device_below_a_region_is_persistent(sysfs: Sysfs, bus: str) -> None:
    sysfs.dax(sysfs.region(bus) + "/dax0.0", size_bytes=8 << 20, align=4096)
    device = find_dax_device(NUMBER, sysfs.root)
    assert device is not None
    assert (device.name, device.size_bytes, device.alignment_bytes) == ("dax0.0", 8 << 20, 4096)
    assert region_of(sysfs).persistence_domain == "memory_controller"


@pytest.mark.parametrize("parent", [CXL_VOLATILE + "/dax_region0", FIRMWARE])
def test_volatile_memory_is_not_persistent(sysfs: Sysfs, parent: str) -> None:
    sysfs.dax(parent)
    device = find_dax_device(NUMBER, sysfs.root)
    assert device is not None
    assert device.region is None


def test_volatile_region_of_the_firmware_is_not_persistent(sysfs: Sysfs) -> None:
    region = sysfs.region(ACPI)
    sysfs.write(f"{region}/devtype", "nd_volatile")
    sysfs.dax(region)
    device = find_dax_device(NUMBER, sysfs.root)
    assert device is not None
    assert device.region is None


def test_other_devices_are_not_dax(sysfs: Sysfs) -> None:
    assert find_dax_device(NUMBER, sysfs.root) is None
    sysfs.link("devices/virtual/mem/null/subsystem", "class/mem")
    sysfs.link("dev/char/1:5", "devices/virtual/mem/null")
    assert find_dax_device(NUMBER, sysfs.root) is None


@pytest.mark.parametrize(("text", "domain"), [("cpu_cache", "cpu_cache"), ("", None), (None, None)])
def test_persistence_domain_as_the_kernel_says(
    sysfs: Sysfs, text: str | None, domain: str | None
) -> None:
    sysfs.dax(sysfs.region(CXL, domain=text))
    assert region_of(sysfs).persistence_domain == domain


def test_file_system_on_a_partition_of_a_region(sysfs: Sysfs) -> None:
    region = sysfs.region(ACPI, domain="cpu_cache")
    sysfs.link("dev/block/259:1", f"{region}/namespace0.0/block/pmem0/pmem0p1")
    sysfs.link("dev/block/8:1", "devices/pci0000:00/ata1/block/sda/sda1")
    found = find_block_region(os.makedev(259, 1), sysfs.root)
    assert found is not None
    assert found.persistence_domain == "cpu_cache"
    assert find_block_region(os.makedev(8, 1), sysfs.root) is None
    assert find_block_region(os.makedev(8, 2), sysfs.root) is None


@pytest.mark.parametrize("kind", ["cxl", "nfit"])
def test_dirty_shutdowns_are_summed_over_the_devices(sysfs: Sysfs, kind: str) -> None:
    region = sysfs.region(CXL)
    sysfs.dax(region)
    sysfs.device(region, 0, kind=kind, identity="17", shutdowns=3)
    sysfs.device(region, 1, kind=kind, identity="18", shutdowns=4)
    supported, shutdowns, device_hash = region_of(sysfs).dirty_shutdown()
    assert (supported, shutdowns) == (True, 7)
    assert 0 < device_hash < 1 << 64
    sysfs.device(region, 1, kind=kind, identity="18", shutdowns=5)
    assert region_of(sysfs).dirty_shutdown() == (True, 8, device_hash)
    sysfs.device(region, 1, kind=kind, identity="19", shutdowns=5)
    assert region_of(sysfs).dirty_shutdown().device_hash != device_hash


@pytest.mark.parametrize("silent", [None, "-1", "", "many"])
def test_one_silent_device_makes_the_count_unknown(sysfs: Sysfs, silent: str | None) -> None:
    region = sysfs.region(CXL)
    sysfs.dax(region)
    sysfs.device(region, 0, kind="cxl", identity="17", shutdowns=3)
    sysfs.device(region, 1, kind="cxl", identity="18", shutdowns=silent)
    found = region_of(sysfs).dirty_shutdown()
    assert (found.supported, found.shutdowns) == (False, 0)
    assert found.device_hash != 0


def test_region_without_devices_supports_no_count(sysfs: Sysfs) -> None:
    sysfs.dax(sysfs.region(CXL))
    assert region_of(sysfs).dirty_shutdown() == DirtyShutdown(
        supported=False, shutdowns=0, device_hash=0
    )
