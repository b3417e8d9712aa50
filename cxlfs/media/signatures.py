"""What already lies on a region, told by magic numbers: so that mkfs overwrites nothing unasked.

Never here: opening, mapping or changing anything; deciding what to do about what was found.

Invariants
- ``find`` only calls the ``read`` it is given, always inside the region.
- A signature is a name, places and bytes that must all be there; a negative place counts from the
  end. Formats whose magic is short carry further bytes that every instance of them has.
- False alarms cost the user one ``--force``; a missed format costs its data. So magic alone counts:
  a damaged file system is still somebody's file system.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from cxlfs.units import KIB, MIB

Read = Callable[[int, int], bytes]
"""``read(offset, length)`` of the region, bytes from its start."""

_WINDOW_BYTES: Final = 64 * KIB


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """One format: ``magic`` at any of ``offsets``, and where given ``also`` (offset, values)."""

    name: str
    magic: bytes
    offsets: tuple[int, ...]
    source: str
    also: tuple[tuple[int, tuple[bytes, ...]], ...] = ()
    """Further places, from the start of the region, and the bytes allowed there."""
    round_end_to: int = 1
    """Negative offsets count from the end of the region rounded down to this."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The ``length`` bytes at ``offset`` (from the start of the region) say ``name``."""

    name: str
    offset: int
    length: int


def _many(start: int, step: int, count: int) -> tuple[int, ...]:
    return tuple(range(start, start + step * count, step))


_BLOCK_SIZES = (4 * KIB, 8 * KIB, 16 * KIB, 64 * KIB)
_SWAP_PLACES = tuple(size - 10 for size in _BLOCK_SIZES)
_MD_MAGIC = b"\xfc\x4e\x2b\xa9"
_LUKS2_SECOND = tuple((16 * KIB) << i for i in range(9))
_ZFS_RING = _many(128 * KIB, KIB, 128)
_ANY_BOOT_FLAG = ((0x1BE, (b"\0", b"\x80")), (0x1CE, (b"\0", b"\x80")))

STORES: Final = (
    Signature(
        "cxlfs store",
        b"cxlfs\x0dSB",
        (0, 2 * MIB, -4 * MIB, -2 * MIB),
        "docs/format.md, superblock",
        round_end_to=2 * MIB,
    ),
)

_PERSISTENT_MEMORY = (
    Signature("famfs", b"\xff\x82\xb2\x87", (0,), "Linux, famfs: FAMFS_SUPER_MAGIC"),
    Signature("PMDK object pool", b"PMEMOBJ\0", (0,), "PMDK, libpmemobj: OBJ_HDR_SIG"),
    Signature("PMDK block pool", b"PMEMBLK\0", (0,), "PMDK, libpmemblk: BLK_HDR_SIG"),
    Signature("PMDK log pool", b"PMEMLOG\0", (0,), "PMDK, libpmemlog: LOG_HDR_SIG"),
    Signature("PMDK pool set", b"PMEMPOOLSET", (0,), "PMDK, poolset(5)"),
    Signature("BTT namespace", b"BTT_ARENA_INFO\0\0", (0, 4096), "Linux, drivers/nvdimm/btt.h"),
    Signature("fsdax namespace", b"NVDIMM_PFN_INFO\0", (4096,), "Linux, drivers/nvdimm/pfn.h"),
    Signature("devdax namespace", b"NVDIMM_DAX_INFO\0", (4096,), "Linux, drivers/nvdimm/pfn.h"),
)

_FILE_SYSTEMS = (
    Signature("ext2, ext3 or ext4", b"\x53\xef", (0x438,), "Linux, ext4: super block, s_magic"),
    Signature("XFS", b"XFSB", (0,), "Linux, fs/xfs: XFS_SB_MAGIC"),
    Signature(
        "XFS external journal", b"\xfe\xed\xba\xbe", (0,), "Linux, fs/xfs: XLOG_HEADER_MAGIC"
    ),
    Signature("btrfs", b"_BHRfS_M", (64 * KIB + 64, 64 * MIB + 64), "Linux, fs/btrfs: BTRFS_MAGIC"),
    Signature(
        "bcachefs",
        bytes.fromhex("c68573f666ce90a9d96a60cf803df7ef"),
        (0x1018,),
        "bcachefs: BCHFS_MAGIC",
    ),
    Signature("F2FS", b"\x10\x20\xf5\xf2", (0x400, 0x1400), "Linux, fs/f2fs: F2FS_SUPER_MAGIC"),
    Signature(
        "NILFS2", b"\x34\x34", (0x406,), "Linux, fs/nilfs2: s_magic", ((0x400, (b"\x02\0\0\0",)),)
    ),
    Signature("JFS", b"JFS1", (32 * KIB,), "Linux, fs/jfs: JFS_MAGIC"),
    Signature("ReiserFS", b"ReIsEr", (64 * KIB + 52, 8 * KIB + 52), "Linux, reiserfs: s_magic"),
    Signature("Reiser4", b"ReIsEr4", (64 * KIB,), "reiser4progs: master super block"),
    Signature("GFS2", b"\x01\x16\x19\x70", (64 * KIB,), "Linux, fs/gfs2: GFS2_MAGIC"),
    Signature("OCFS2", b"OCFSV2", (KIB, 2 * KIB, 4 * KIB, 8 * KIB), "Linux, fs/ocfs2: signature"),
    Signature("EROFS", b"\xe2\xe1\xf5\xe0", (KIB,), "Linux, fs/erofs: EROFS_SUPER_MAGIC_V1"),
    Signature("SquashFS", b"hsqs", (0,), "Linux, fs/squashfs: SQUASHFS_MAGIC"),
    Signature("SquashFS, big-endian", b"sqsh", (0,), "squashfs-tools: SQUASHFS_MAGIC_SWAP"),
    Signature("cramfs", b"\x45\x3d\xcd\x28", (0, 512), "Linux, fs/cramfs: CRAMFS_MAGIC"),
    Signature("romfs", b"-rom1fs-", (0,), "Linux, fs/romfs: ROMSB_WORD0"),
    Signature("Minix file system", b"\x7f\x13", (0x410,), "Linux, fs/minix: MINIX_SUPER_MAGIC"),
    Signature("Minix file system", b"\x8f\x13", (0x410,), "Linux, fs/minix: MINIX_SUPER_MAGIC2"),
    Signature("Minix file system", b"\x68\x24", (0x410,), "Linux, fs/minix: MINIX2_SUPER_MAGIC"),
    Signature("Minix file system", b"\x78\x24", (0x410,), "Linux, fs/minix: MINIX2_SUPER_MAGIC2"),
    Signature("Minix file system v3", b"\x5a\x4d", (0x418,), "Linux, fs/minix: MINIX3_SUPER_MAGIC"),
    Signature("BFS", b"\xce\xfa\xad\x1b", (0,), "Linux, fs/bfs: BFS_MAGIC"),
    Signature("zonefs", b"SFOZ", (0,), "Linux, fs/zonefs: ZONEFS_MAGIC"),
    Signature("ZFS pool", b"\x0c\xb1\xba\x00\0\0\0\0", _ZFS_RING, "OpenZFS: UBERBLOCK_MAGIC"),
    Signature("ZFS pool", b"\0\0\0\0\x00\xba\xb1\x0c", _ZFS_RING, "OpenZFS: UBERBLOCK_MAGIC"),
    Signature("FAT", b"FAT12   ", (54,), "Microsoft FAT specification: BS_FilSysType"),
    Signature("FAT", b"FAT16   ", (54,), "Microsoft FAT specification: BS_FilSysType"),
    Signature("FAT32", b"FAT32   ", (82,), "Microsoft FAT specification: BS_FilSysType"),
    Signature("exFAT", b"EXFAT   ", (3,), "Microsoft exFAT specification: FileSystemName"),
    Signature("NTFS", b"NTFS    ", (3,), "Linux, fs/ntfs3: NTFS boot sector, system_id"),
    Signature("ReFS", b"\0\0\0ReFS\0", (0,), "libfsrefs: volume header"),
    Signature("HFS+", b"H+", (KIB,), "Apple TN1150: kHFSPlusSigWord", ((KIB + 2, (b"\0\x04",)),)),
    Signature("HFSX", b"HX", (KIB,), "Apple TN1150: kHFSXSigWord", ((KIB + 2, (b"\0\x05",)),)),
    Signature("HFS", b"BD", (KIB,), "Inside Macintosh: Files, drSigWord"),
    Signature("APFS", b"NXSB", (32,), "Apple File System Reference: NX_MAGIC"),
    Signature("ISO 9660", b"CD001", (0x8001,), "ECMA-119: volume descriptor"),
    Signature("UDF", b"BEA01", (0x8001,), "ECMA-167: volume structure descriptor"),
    Signature("UDF", b"NSR0", (0x8001, 0x8801, 0x9001), "ECMA-167: volume structure descriptor"),
    Signature("UFS2", b"\x19\x01\x54\x19", (65536 + 1372,), "FreeBSD: FS_UFS2_MAGIC"),
    Signature("UFS1", b"\x54\x19\x01\x00", (8192 + 1372,), "FreeBSD: FS_UFS1_MAGIC"),
    Signature("VMFS", b"\x0d\xd0\x01\xc0", (MIB,), "vmfs-tools: VMFS_VOLINFO_MAGIC"),
    Signature("VxFS", b"\xf5\xfc\x01\xa5", (KIB,), "Linux, fs/freevxfs: VXFS_SUPER_MAGIC"),
    Signature("UBIFS", b"\x31\x18\x10\x06", (0,), "Linux, fs/ubifs: UBIFS_NODE_MAGIC"),
    Signature("Ceph BlueStore", b"bluestore block device", (0,), "Ceph: bluestore label"),
)

_VOLUMES = (
    Signature("LVM physical volume", b"LABELONE", _many(0, 512, 4), "LVM2: LABEL_ID"),
    Signature("LUKS", b"LUKS\xba\xbe", (0,), "LUKS on-disk format: LUKS_MAGIC"),
    Signature("LUKS2, second header", b"SKUL\xba\xbe", _LUKS2_SECOND, "LUKS2: MAGIC_2ND"),
    Signature("BitLocker", b"-FVE-FS-", (3,), "libbde: volume header"),
    Signature(
        "MD RAID member", _MD_MAGIC + b"\x01\0\0\0", (0, 4096), "Linux: MD_SB_MAGIC, 1.1 and 1.2"
    ),
    Signature(
        "MD RAID member",
        _MD_MAGIC + b"\x01\0\0\0",
        (-8 * KIB,),
        "Linux: MD_SB_MAGIC, 1.0",
        round_end_to=4 * KIB,
    ),
    Signature(
        "MD RAID member",
        _MD_MAGIC,
        (-64 * KIB,),
        "Linux: MD_SB_MAGIC, 0.90",
        round_end_to=64 * KIB,
    ),
    Signature(
        "bcache",
        bytes.fromhex("c68573f64e1a45ca8265f57f48ba6d81"),
        (0x1018,),
        "Linux, drivers/md/bcache: bcache_magic",
    ),
    Signature("Stratis", b"!Stra0tis\x86\xff\x02^\x41rh", (516, 4612), "Stratis design document"),
    Signature("VDO volume", b"dmvdo001", (0,), "Linux, drivers/md/dm-vdo: VDO_GEOMETRY_MAGIC"),
    Signature("dm-verity hash", b"verity\0\0", (0,), "Linux, dm-verity: cryptsetup super block"),
    Signature("dm-integrity", b"integrt\0", (0,), "Linux, dm-integrity: SB_MAGIC"),
    Signature("device-mapper snapshot", b"SnAp", (0,), "Linux, dm-snap-persistent: SNAP_MAGIC"),
    Signature("DRBD meta data", b"\x83\x74\x02\x6b", (-4096 + 60,), "DRBD: DRBD_MD_MAGIC_08"),
    Signature("DRBD meta data", b"\x83\x74\x02\x6c", (-4096 + 60,), "DRBD: MD_MAGIC_84_UNCLEAN"),
    Signature("DRBD meta data", b"\x83\x74\x02\x6d", (-4096 + 60,), "DRBD: DRBD_MD_MAGIC_09"),
    Signature("UBI", b"UBI#", (0,), "Linux, drivers/mtd/ubi: UBI_EC_HDR_MAGIC"),
    Signature("Oracle ASM disk", b"ORCLDISK", (32,), "oracleasm: ASM_DISK_LABEL_MARKED"),
    Signature("swap space", b"SWAPSPACE2", _SWAP_PLACES, "Linux, include/linux/swap.h"),
    Signature("swap space", b"SWAP-SPACE", _SWAP_PLACES, "mkswap(8), version 0"),
    Signature("hibernation image", b"S1SUSPEND", _SWAP_PLACES, "Linux, kernel/power/swap.c"),
)

_PARTITION_TABLES = (
    Signature("GPT partition table", b"EFI PART", (512, 4096), "UEFI specification, 5.3.2"),
    Signature("GPT, backup", b"EFI PART", (-512, -4096), "UEFI specification, 5.3.2"),
    Signature(
        "MBR partition table", b"\x55\xaa", (510,), "UEFI specification, 5.2.1", _ANY_BOOT_FLAG
    ),
    Signature("Apple partition map", b"PM\0\0", (512,), "Inside Macintosh: pmSig"),
    Signature("Sun disk label", b"\xda\xbe", (508,), "Linux, block/partitions/sun.c"),
    Signature("BSD disk label", b"\x57\x45\x56\x82", (64, 512), "Linux, block/partitions/msdos.c"),
)

_DISK_IMAGES = (
    Signature("qcow2 disk image", b"QFI\xfb", (0,), "QEMU, docs/interop/qcow2.txt"),
    Signature("VMDK disk image", b"KDMV", (0,), "VMware virtual disk format"),
    Signature("VHDX disk image", b"vhdxfile", (0,), "MS-VHDX"),
    Signature("VHD disk image", b"conectix", (0, -512), "Microsoft VHD image format"),
    Signature("VDI disk image", b"\x7f\x10\xda\xbe", (64,), "VirtualBox: VDI_IMAGE_SIGNATURE"),
)

_ARCHIVES = (
    Signature("zip archive (torch.save writes these)", b"PK\x03\x04", (0,), "APPNOTE.TXT, 4.3.7"),
    Signature("zip archive, empty", b"PK\x05\x06", (0,), "APPNOTE.TXT, 4.3.16"),
    Signature("tar archive", b"ustar", (257,), "POSIX.1, pax: magic"),
    Signature("gzip file", b"\x1f\x8b\x08", (0,), "RFC 1952"),
    Signature("xz file", b"\xfd7zXZ\0", (0,), "The .xz file format"),
    Signature("zstd file", b"\x28\xb5\x2f\xfd", (0,), "RFC 8878"),
    Signature("bzip2 file", b"BZh", (0,), "bzip2", ((4, (b"1AY&SY", b"\x17rE8P\x90")),)),
    Signature("lz4 file", b"\x04\x22\x4d\x18", (0,), "LZ4 frame format"),
    Signature("7-Zip archive", b"7z\xbc\xaf\x27\x1c", (0,), "7zFormat.txt"),
    Signature("RAR archive", b"Rar!\x1a\x07", (0,), "RAR 5.0 archive format"),
)

_DATA_FILES = (
    Signature("HDF5 file", b"\x89HDF\r\n\x1a\n", (0, 512, 1024, 2048), "HDF5 file format"),
    Signature("numpy array", b"\x93NUMPY", (0,), "NEP 1"),
    Signature(
        "safetensors file", b"{", (8,), "safetensors format", ((5, (b"\0\0\0",)), (9, (b'"', b"}")))
    ),
    Signature("GGUF model", b"GGUF", (0,), "ggml, docs/gguf.md"),
    Signature(
        "Python pickle", b"\x80", (0,), "PEP 307, 3154", ((1, (b"\2", b"\3", b"\4", b"\5")),)
    ),
    Signature("SQLite database", b"SQLite format 3\0", (0,), "SQLite database file format"),
    Signature("Parquet file", b"PAR1", (0,), "Apache Parquet format"),
    Signature("Arrow file", b"ARROW1\0\0", (0,), "Apache Arrow columnar format"),
    Signature("ELF program", b"\x7fELF", (0,), "System V ABI"),
    Signature("PDF document", b"%PDF-", (0,), "ISO 32000"),
    Signature("PNG picture", b"\x89PNG\r\n\x1a\n", (0,), "PNG specification"),
    Signature("JPEG picture", b"\xff\xd8\xff", (0,), "ITU-T T.81"),
    Signature("script", b"#!/", (0,), "execve(2)"),
)

TABLE: Final[tuple[Signature, ...]] = (
    *STORES,
    *_PERSISTENT_MEMORY,
    *_FILE_SYSTEMS,
    *_VOLUMES,
    *_PARTITION_TABLES,
    *_DISK_IMAGES,
    *_ARCHIVES,
    *_DATA_FILES,
)


class _Windows:
    """The parts of the region looked at, read once each; outside of it there is nothing."""

    def __init__(self, read: Read, size_bytes: int) -> None:
        self._read = read
        self._size_bytes = size_bytes
        self._windows: dict[int, bytes] = {}

    def bytes_at(self, offset: int, length: int) -> bytes:
        """Shorter than ``length`` where the region ends."""
        data = b""
        while length > 0 and 0 <= offset < self._size_bytes:
            start = offset - offset % _WINDOW_BYTES
            part = self._window(start)[offset - start : offset - start + length]
            if not part:
                break
            data += part
            offset += len(part)
            length -= len(part)
        return data

    def _window(self, start: int) -> bytes:
        if start not in self._windows:
            length = min(_WINDOW_BYTES, self._size_bytes - start)
            self._windows[start] = self._read(start, length)
        return self._windows[start]


def find(read: Read, size_bytes: int, table: Iterable[Signature] = TABLE) -> tuple[Found, ...]:
    """Everything known that lies on a region of ``size_bytes``, every place, in table order.

    Whatever ``read`` raises is passed on.
    """
    windows = _Windows(read, size_bytes)
    return tuple(
        Found(signature.name, offset, len(signature.magic))
        for signature in table
        for offset in _matches(signature, windows, size_bytes)
    )


def _matches(signature: Signature, windows: _Windows, size_bytes: int) -> Iterator[int]:
    end = size_bytes - size_bytes % signature.round_end_to
    for place in signature.offsets:
        offset = place if place >= 0 else end + place
        if (
            offset >= 0
            and windows.bytes_at(offset, len(signature.magic)) == signature.magic
            and all(_is_one_of(windows, also, values) for also, values in signature.also)
        ):
            yield offset


def _is_one_of(windows: _Windows, offset: int, values: tuple[bytes, ...]) -> bool:
    return any(windows.bytes_at(offset, len(value)) == value for value in values)
