"""The media format: every structure that cxlfs writes, as a numpy dtype, and nothing else.

``docs/format.md`` describes the same structures as byte tables; a test compares the two.

Never here: reading or writing media, policy, defaults that could differ between two stores.

Invariants
- Every field is little-endian with an explicit size; there is no implicit padding; reserved bytes
  are zero and are covered by the checksum like everything else.
- Each structure ends with its CRC32C over all bytes before it (the superblock leaves out its copy
  number, so that all copies sum alike). Zero is never a valid magic or type.
- Offsets called ``media_offset`` count from the start of the media; segments are counted from 0.
- A number may be added to the format only with a feature flag or a new version. ``docs/format.md``
  (Unknown values) says how a program treats a number that it does not know. Role 4 and record type
  2 have no flag: programs that do not know them read a store right.
"""

from __future__ import annotations

from typing import Final

import numpy as np

FORMAT_VERSION: Final = 1
KNOWN_COMPAT: Final = 0
KNOWN_READ_ONLY_COMPAT: Final = 0
KNOWN_INCOMPAT: Final = 0

SUPERBLOCK_MAGIC: Final = b"cxlfs\x0dSB"
ROOT_MAGIC: Final = b"cxlfs\x0dRT"
SEGMENT_MAGIC: Final = b"cxlfs\x0dSG"
IMAGE_MAGIC: Final = b"cxlfs\x0dMI"
HISTORY_MAGIC: Final = b"cxlfs\x0dHB"
RECORD_MAGIC: Final = 0x524A5843  # "CXJR" in memory order

UNIT_BYTES: Final = 2 << 20
"""Superblock copies and root rings lie in different units: 2 MiB is the largest page that one
uncorrectable error takes away on devdax (see docs/format.md)."""
UNIT_BYTES_TEST: Final = 16 << 10
"""The unit of the small geometry that crash tests use; mkfs never makes it."""
SLOT_BYTES: Final = 4096
"""Pitch of root slots and offset of a ring in its unit: a page, so that page media tear one."""
RING_SLOTS_MAX: Final = 8
SEGMENT_SIZE_MIN: Final = 2 << 20
SEGMENT_SIZE_TEST_MIN: Final = 64 << 10
SEGMENT_SIZE_MAX: Final = 64 << 20
SEGMENT_HEADER_BYTES: Final = 4096
"""Room of a segment header: payload begins page-aligned."""
CHUNK_BYTES: Final = 64 << 10
RECORD_ALIGN: Final = 64
SUPERBLOCK_COPIES: Final = 4
DEVICES_MAX: Final = 8
IMAGE_SEGMENTS_MAX: Final = 384
NO_SEGMENT: Final = (1 << 64) - 1
NUMBER_LIMIT: Final = 1 << 62
"""Inode and extent numbers, LSNs, epochs and generations stay below: counting on is safe."""

NAME_BYTES_MAX: Final = 255
SYMLINK_BYTES_MAX: Final = 4095
XATTR_NAME_BYTES_MAX: Final = 255
XATTR_VALUE_BYTES_MAX: Final = 65536
XATTRS_BYTES_MAX: Final = 65536
"""Of one inode, names and values together: what listxattr can return at most."""
XATTR_LIST_BYTES_MAX: Final = 65536  # each name with a zero byte: what listxattr(2) returns
LINK_COUNT_MAX: Final = 65000
FILE_SIZE_MAX: Final = 1 << 56
TIME_NS_MIN: Final = -(1 << 63)  # 1677-09-21
TIME_NS_MAX: Final = (1 << 63) - 1  # 2262-04-11
LABEL_BYTES: Final = 64

# --- superblock -----------------------------------------------------------------------------

DEVICE_DTYPE: Final = np.dtype(
    [
        # Identity of the device, random at mkfs.
        ("device_uuid", "V16"),
        # Where the device's bytes begin in the linear address space of the store, bytes.
        ("start", "<u8"),
        # How many bytes of the device the store uses; 0: unused table entry.
        ("size", "<u8"),
    ]
)
assert DEVICE_DTYPE.itemsize == 32

SUPERBLOCK_DTYPE: Final = np.dtype(
    [
        ("magic", "S8"),  # SUPERBLOCK_MAGIC
        # Format version; a reader refuses a larger one.
        ("format_version", "<u4"),
        # Bytes of this structure, 512.
        ("structure_bytes", "<u4"),
        # Features an older program may ignore / may only read with / must refuse.
        ("compat", "<u8"),
        ("read_only_compat", "<u8"),
        ("incompat", "<u8"),
        # Identity of the store, random at mkfs; every segment header and root repeats it.
        ("uuid", "V16"),
        # Name given by the user, UTF-8, zero-padded.
        ("label", "V64"),
        # Time of mkfs, ns since the epoch.
        ("created_ns", "<i8"),
        # Bytes of the linear address space, a multiple of the unit.
        ("size_bytes", "<u8"),
        ("segment_size_bytes", "<u8"),
        # Media offset of segment 0.
        ("first_segment_offset", "<u8"),
        ("segment_count", "<u8"),
        # Bytes of the unit (UNIT_BYTES), of a checksum chunk (CHUNK_BYTES), slots in a root ring.
        ("unit_bytes", "<u4"),
        ("chunk_bytes", "<u4"),
        ("ring_slots", "<u4"),
        # Entries used of the device table; format version 1 has exactly one.
        ("device_count", "<u4"),
        ("devices", DEVICE_DTYPE, (DEVICES_MAX,)),
        ("reserved", "V72"),
        # CRC32C over all bytes before it.
        ("crc", "<u4"),
        # 0 to 3; not summed, so that all copies are equal but for it.
        ("copy_number", "<u4"),
    ]
)
assert SUPERBLOCK_DTYPE.itemsize == 512

# --- roots ----------------------------------------------------------------------------------

ROOT_IN_USE: Final = 1
"""The store was open for writing when this root was written and has not been closed since."""

ROOT_DTYPE: Final = np.dtype(
    [
        ("magic", "S8"),  # ROOT_MAGIC
        # One more for each root written; the highest valid one wins.
        ("generation", "<u8"),
        ("uuid", "V16"),
        # ROOT_IN_USE.
        ("flags", "<u4"),
        # Segments used of image_segments.
        ("image_segment_count", "<u4"),
        # The metadata image: bytes, CRC32C of its header structure, last LSN it includes.
        ("image_bytes", "<u8"),
        ("image_lsn", "<u8"),
        ("image_header_crc", "<u4"),
        # 1: dirty_shutdown_count could be read when the store was opened.
        ("dirty_shutdown_known", "<u4"),
        # Journal that continues the image: segment and its mirror (NO_SEGMENT after a clean close),
        # epoch of both, LSN of the first record.
        ("journal_segment", "<u8"),
        ("journal_mirror", "<u8"),
        ("journal_epoch", "<u8"),
        ("journal_first_lsn", "<u8"),
        # No segment has this epoch or a higher one yet.
        ("next_epoch", "<u8"),
        # Sum of the devices' dirty shutdown counts and a hash of their identity, at open.
        ("dirty_shutdown_count", "<u8"),
        ("device_hash", "<u8"),
        # When this root was written, ns since the epoch.
        ("written_ns", "<i8"),
        ("reserved", "V380"),
        ("image_segments", "<u4", (IMAGE_SEGMENTS_MAX,)),
        ("crc", "<u4"),
    ]
)
assert ROOT_DTYPE.itemsize == 2048
assert ROOT_DTYPE.itemsize <= SLOT_BYTES

# --- segments -------------------------------------------------------------------------------

ROLE_DATA: Final = 1
ROLE_JOURNAL: Final = 2
ROLE_IMAGE: Final = 3
ROLE_HISTORY: Final = 4
ROLE_NAMES: Final = {
    ROLE_DATA: "data",
    ROLE_JOURNAL: "journal",
    ROLE_IMAGE: "image",
    ROLE_HISTORY: "history",
}

SEGMENT_DTYPE: Final = np.dtype(
    [
        ("magic", "S8"),  # SEGMENT_MAGIC
        # ROLE_*; written when the segment is taken into use, fenced before anything else in it.
        ("role", "<u4"),
        # Journal: 0 primary, 1 mirror. Else 0.
        ("copy_number", "<u4"),
        # This segment's own index: a header found elsewhere is misplaced.
        ("index", "<u8"),
        # Larger than that of every segment taken into use before (both journal copies share one).
        ("epoch", "<u8"),
        # Random for each opening; seeds the checksums of records.
        ("nonce", "<u8"),
        # Journal: the segment that this one continues (NO_SEGMENT: none), its epoch, its last LSN.
        ("predecessor", "<u8"),
        ("predecessor_epoch", "<u8"),
        ("predecessor_last_lsn", "<u8"),
        # Journal: LSN of the first record, and the index of the other copy. Image: part number.
        ("first_lsn", "<u8"),
        ("partner", "<u8"),
        ("uuid", "V16"),
        ("written_ns", "<i8"),
        ("reserved", "V20"),
        ("crc", "<u4"),
    ]
)
assert SEGMENT_DTYPE.itemsize == 128

# --- journal --------------------------------------------------------------------------------

RECORD_TRANSACTION: Final = 1
RECORD_CONTINUATION: Final = 2

RECORD_DTYPE: Final = np.dtype(
    [
        ("magic", "<u4"),  # RECORD_MAGIC
        # RECORD_TRANSACTION or RECORD_CONTINUATION.
        ("type", "<u2"),
        # Operations in the payload.
        ("operation_count", "<u2"),
        # Bytes of header and payload, a multiple of RECORD_ALIGN; and of the payload unpadded.
        ("length", "<u4"),
        ("payload_bytes", "<u4"),
        # One more than that of the record before, over the whole life of the store.
        ("lsn", "<u8"),
        # Epoch of the segment it lies in.
        ("epoch", "<u8"),
        # Every record up to this LSN was durable before this one was stored. A later record that
        # says so of a missing one proves damage; on DAX media it is always lsn - 1.
        ("fenced_lsn", "<u8"),
        # When it was written, ns since the epoch.
        ("time_ns", "<i8"),
        # CRC32C of the padded payload, seeded like the header's.
        ("payload_crc", "<u4"),
        ("reserved", "<u4"),
        ("reserved_2", "<u4"),
        # CRC32C of the header before it, seeded with CRC32C(nonce, epoch, uuid).
        ("crc", "<u4"),
    ]
)
assert RECORD_DTYPE.itemsize == 64

OPERATION_DTYPE: Final = np.dtype(
    [
        # OP_*; what follows is that operation's body.
        ("type", "<u2"),
        # OP_FLAG_* of that operation, else 0.
        ("flags", "<u2"),
        # Bytes of header and body, a multiple of 8.
        ("length", "<u4"),
    ]
)
assert OPERATION_DTYPE.itemsize == 8

OP_INODE: Final = 1
OP_LINK: Final = 2
OP_UNLINK: Final = 3
OP_SYMLINK: Final = 4
OP_XATTR_SET: Final = 5
OP_XATTR_REMOVE: Final = 6
OP_EXTENT: Final = 7
OP_CONTENT: Final = 8
OP_PROMOTE: Final = 9
OP_ASIDE_DROP: Final = 10
OP_MOVE: Final = 11

OP_FLAG_ASIDE: Final = 1
"""OP_CONTENT: changes the version kept aside, not the committed one."""
OP_FLAGS_KNOWN: Final = {OP_CONTENT: OP_FLAG_ASIDE}
"""Flags of each type of operation. A type that is not here has none."""

XATTR_HIDDEN_PREFIX: Final = b"trusted.cxlfs."
"""Of the names of extended attributes that the store keeps for itself and shows to nobody."""

INODE_INCOMPLETE: Final = 1
"""The committed content is a prefix: its writer has not closed it, or died."""
INODE_ASIDE: Final = 2
"""Image only: the inode has a version kept aside."""
INODE_FLAGS_KNOWN: Final = INODE_INCOMPLETE

OP_INODE_DTYPE: Final = np.dtype(
    [
        ("ino", "<u8"),
        # st_mode: type and permission bits.
        ("mode", "<u4"),
        ("uid", "<u4"),
        ("gid", "<u4"),
        # Device number of special files.
        ("rdev", "<u4"),
        # INODE_INCOMPLETE.
        ("flags", "<u4"),
        ("reserved", "<u4"),
        # ns since the epoch.
        ("atime_ns", "<i8"),
        ("mtime_ns", "<i8"),
        ("ctime_ns", "<i8"),
        ("birth_ns", "<i8"),
    ]
)
assert OP_INODE_DTYPE.itemsize == 64

OP_NAME_DTYPE: Final = np.dtype(
    [
        # Directory; for OP_LINK the inode it names (else 0); the name follows, zero-padded.
        ("parent", "<u8"),
        ("ino", "<u8"),
        ("name_bytes", "<u4"),
        ("reserved", "<u4"),
    ]
)
assert OP_NAME_DTYPE.itemsize == 24

OP_XATTR_DTYPE: Final = np.dtype(
    [
        # Name and (OP_XATTR_SET) value follow, zero-padded together; OP_SYMLINK: value only.
        ("ino", "<u8"),
        ("name_bytes", "<u4"),
        ("value_bytes", "<u4"),
    ]
)
assert OP_XATTR_DTYPE.itemsize == 16

OP_EXTENT_DTYPE: Final = np.dtype(
    [
        # Identity, never used twice.
        ("id", "<u8"),
        ("media_offset", "<u8"),
        # Bytes that are defined now.
        ("length", "<u8"),
        # The checksums that follow (CRC32C each, zero-padded to 8 bytes) are of chunks
        # [first_chunk, first_chunk + crc_count); those before are as defined earlier.
        ("first_chunk", "<u4"),
        ("crc_count", "<u4"),
    ]
)
assert OP_EXTENT_DTYPE.itemsize == 32

REF_DTYPE: Final = np.dtype(
    [
        ("file_offset", "<u8"),
        ("length", "<u8"),
        # 0: a hole.
        ("extent_id", "<u8"),
        ("extent_offset", "<u8"),
    ]
)
assert REF_DTYPE.itemsize == 32

OP_CONTENT_DTYPE: Final = np.dtype(
    [
        ("ino", "<u8"),
        # First cut the content to this many bytes, then apply the references that follow
        # (REF_DTYPE each), then set the size.
        ("cut", "<u8"),
        ("size", "<u8"),
        ("ref_count", "<u8"),
    ]
)
assert OP_CONTENT_DTYPE.itemsize == 32

OP_INO_DTYPE: Final = np.dtype([("ino", "<u8")])
assert OP_INO_DTYPE.itemsize == 8

OP_MOVE_DTYPE: Final = np.dtype(
    [
        # References of the inodes that follow (8 bytes each) into this range of the source
        # extent now aim at the target extent.
        ("source_id", "<u8"),
        ("source_offset", "<u8"),
        ("length", "<u8"),
        ("target_id", "<u8"),
        ("target_offset", "<u8"),
        ("ino_count", "<u8"),
    ]
)
assert OP_MOVE_DTYPE.itemsize == 48

# --- metadata image -------------------------------------------------------------------------

SECTION_INODES: Final = 1
SECTION_NAMES: Final = 2
SECTION_XATTRS: Final = 3
SECTION_SYMLINKS: Final = 4
SECTION_EXTENTS: Final = 5
SECTION_CRCS: Final = 6
SECTION_REFS: Final = 7
SECTION_STRINGS: Final = 8
SECTION_COUNT: Final = 8
SECTION_ALIGN: Final = 64

SECTION_DTYPE: Final = np.dtype(
    [
        ("kind", "<u4"),
        # CRC32C of the section's bytes.
        ("crc", "<u4"),
        # From the start of the image, a multiple of SECTION_ALIGN; and unpadded length.
        ("offset", "<u8"),
        ("length", "<u8"),
        ("item_count", "<u8"),
    ]
)
assert SECTION_DTYPE.itemsize == 32

IMAGE_DTYPE: Final = np.dtype(
    [
        ("magic", "S8"),  # IMAGE_MAGIC
        # Last LSN that the image includes.
        ("lsn", "<u8"),
        # No inode, no extent has this number or a higher one yet.
        ("next_ino", "<u8"),
        ("next_extent_id", "<u8"),
        ("uuid", "V16"),
        ("written_ns", "<i8"),
        ("sections", SECTION_DTYPE, (SECTION_COUNT,)),
        ("reserved", "V196"),
        ("crc", "<u4"),
    ]
)
assert IMAGE_DTYPE.itemsize == 512

IMAGE_INODE_DTYPE: Final = np.dtype(
    [
        ("ino", "<u8"),
        ("mode", "<u4"),
        ("uid", "<u4"),
        ("gid", "<u4"),
        ("rdev", "<u4"),
        # INODE_INCOMPLETE, INODE_ASIDE.
        ("flags", "<u4"),
        # Record by which all of its names were linked, or a later one; 0: not known, or it does not
        # fit. Then no earlier than the image.
        ("named_lsn", "<u4"),
        ("atime_ns", "<i8"),
        ("mtime_ns", "<i8"),
        ("ctime_ns", "<i8"),
        ("birth_ns", "<i8"),
        # Record that published the content, and when; 0: none yet.
        ("commit_lsn", "<u8"),
        ("commit_ns", "<i8"),
        # Committed size and references; those kept aside follow the committed ones.
        ("size", "<u8"),
        ("ref_count", "<u8"),
        ("aside_size", "<u8"),
        ("aside_ref_count", "<u8"),
    ]
)
assert IMAGE_INODE_DTYPE.itemsize == 112

IMAGE_NAME_DTYPE: Final = np.dtype(
    [
        # Sorted by parent.
        ("parent", "<u8"),
        ("ino", "<u8"),
        # Into SECTION_STRINGS.
        ("name_offset", "<u8"),
        ("name_bytes", "<u4"),
        ("reserved", "<u4"),
    ]
)
assert IMAGE_NAME_DTYPE.itemsize == 32

IMAGE_XATTR_DTYPE: Final = np.dtype(
    [
        # The value follows the name in SECTION_STRINGS. SECTION_SYMLINKS: no name, value = target.
        ("ino", "<u8"),
        ("string_offset", "<u8"),
        ("name_bytes", "<u4"),
        ("value_bytes", "<u4"),
    ]
)
assert IMAGE_XATTR_DTYPE.itemsize == 24

IMAGE_EXTENT_DTYPE: Final = np.dtype(
    [
        ("id", "<u8"),
        ("media_offset", "<u8"),
        ("length", "<u8"),
        # First of its checksums in SECTION_CRCS, one for each chunk.
        ("crc_index", "<u8"),
        ("first_chunk", "<u4"),  # 0
        ("crc_count", "<u4"),
    ]
)
assert IMAGE_EXTENT_DTYPE.itemsize == 40

SECTION_ITEM_BYTES: Final = {
    SECTION_INODES: IMAGE_INODE_DTYPE.itemsize,
    SECTION_NAMES: IMAGE_NAME_DTYPE.itemsize,
    SECTION_XATTRS: IMAGE_XATTR_DTYPE.itemsize,
    SECTION_SYMLINKS: IMAGE_XATTR_DTYPE.itemsize,
    SECTION_EXTENTS: IMAGE_EXTENT_DTYPE.itemsize,
    SECTION_CRCS: 4,
    SECTION_REFS: REF_DTYPE.itemsize,
    SECTION_STRINGS: 1,
}

# --- history --------------------------------------------------------------------------------

DEATHS: Final = {1: "overwritten", 2: "changed in place", 3: "removed", 4: "renamed over"}

HISTORY_BATCH_DTYPE: Final = np.dtype(
    [
        ("magic", "S8"),  # HISTORY_MAGIC
        # Bytes of header and sections, a multiple of SECTION_ALIGN.
        ("length", "<u8"),
        # Where the batch begins, from the start of the segment's payload.
        ("offset", "<u8"),
        # Every record up to this LSN was durable before the batch was stored.
        ("lsn", "<u8"),
        # Items of each section, in the order of the sections.
        ("row_count", "<u4"),
        ("segment_count", "<u4"),
        ("extent_count", "<u4"),
        ("checksum_count", "<u4"),
        ("reference_count", "<u4"),
        ("attribute_count", "<u4"),
        ("string_bytes", "<u4"),
        # CRC32C of all sections with their padding, seeded like the header's.
        ("payload_crc", "<u4"),
        ("written_ns", "<i8"),
        ("reserved", "V52"),
        # CRC32C over all bytes before it, seeded with CRC32C(nonce, epoch, uuid) of the segment.
        ("crc", "<u4"),
    ]
)
assert HISTORY_BATCH_DTYPE.itemsize == 128

HISTORY_ROW_DTYPE: Final = np.dtype(
    [
        # Record that ended the version, and when.
        ("ended_lsn", "<u8"),
        ("ended_ns", "<i8"),
        ("ino", "<u8"),
        # Directory that the name was in.
        ("parent", "<u8"),
        # Record that published the content, and when; 0: it was made with its inode.
        ("commit_lsn", "<u8"),
        ("commit_ns", "<i8"),
        ("size", "<u8"),
        ("ref_count", "<u8"),
        ("atime_ns", "<i8"),
        ("mtime_ns", "<i8"),
        ("birth_ns", "<i8"),
        # Number of the operation in the record that ended it.
        ("operation", "<u4"),
        # How it ended.
        ("death", "<u4"),
        ("mode", "<u4"),
        ("uid", "<u4"),
        ("gid", "<u4"),
        ("rdev", "<u4"),
        # INODE_INCOMPLETE.
        ("flags", "<u4"),
        # Of the strings of a row: its name, the target of a symbolic link, its attributes.
        ("name_bytes", "<u4"),
        ("target_bytes", "<u4"),
        ("attribute_count", "<u4"),
    ]
)
assert HISTORY_ROW_DTYPE.itemsize == 128

HISTORY_SEGMENT_DTYPE: Final = np.dtype(
    [
        # Data segment that extents of the batch lie in, and its epoch at that time.
        ("index", "<u8"),
        ("epoch", "<u8"),
    ]
)
assert HISTORY_SEGMENT_DTYPE.itemsize == 16

HISTORY_ATTRIBUTE_DTYPE: Final = np.dtype([("name_bytes", "<u4"), ("value_bytes", "<u4")])
assert HISTORY_ATTRIBUTE_DTYPE.itemsize == 8

STRUCTURES: Final = {
    "superblock": SUPERBLOCK_DTYPE,
    "device": DEVICE_DTYPE,
    "root": ROOT_DTYPE,
    "segment header": SEGMENT_DTYPE,
    "record header": RECORD_DTYPE,
    "operation header": OPERATION_DTYPE,
    "operation inode": OP_INODE_DTYPE,
    "operation name": OP_NAME_DTYPE,
    "operation xattr": OP_XATTR_DTYPE,
    "operation extent": OP_EXTENT_DTYPE,
    "operation content": OP_CONTENT_DTYPE,
    "reference": REF_DTYPE,
    "operation ino": OP_INO_DTYPE,
    "operation move": OP_MOVE_DTYPE,
    "image header": IMAGE_DTYPE,
    "image section": SECTION_DTYPE,
    "image inode": IMAGE_INODE_DTYPE,
    "image name": IMAGE_NAME_DTYPE,
    "image xattr": IMAGE_XATTR_DTYPE,
    "image extent": IMAGE_EXTENT_DTYPE,
    "history batch": HISTORY_BATCH_DTYPE,
    "history row": HISTORY_ROW_DTYPE,
    "history segment": HISTORY_SEGMENT_DTYPE,
    "history attribute": HISTORY_ATTRIBUTE_DTYPE,
}
"""Every structure by the name that docs/format.md gives it."""
