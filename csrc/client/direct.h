/* direct.h - what a program that stores file data by itself and the daemon of its mount tell each other: requests
 * on an open file of the mount (ioctl), and a slip, which is a piece of the medium that both have mapped.
 *
 * The picture and the rules are in docs/direct.md.
 *
 * Invariants
 * - Fields are little-endian, without implicit padding; sizes are asserted below. The version changes with them.
 * - The daemon trusts none of it: whatever a program writes is copied once, and checked then.
 * - "in" is what the program fills in, "out" what the daemon answers in the same place.
 */
#ifndef CXLFS_DIRECT_H
#define CXLFS_DIRECT_H

#include <stdint.h>
#include <sys/ioctl.h>

enum { CXL_DIRECT_VERSION = 6 };

/* ---------------------------------------------------------------------------------- requests */

enum { CXL_DIRECT_PATH_BYTES = 1952 };

/* What the medium is, for whoever may open it (the daemon's user, root). Nothing is given yet. */
typedef struct {
    uint32_t version;             /* in: CXL_DIRECT_VERSION; out: the daemon's */
    uint32_t granularity;         /* out: CXL_GRANULARITY_* */
    uint64_t media_bytes;
    uint64_t device;              /* st_dev, st_ino and st_rdev of the medium as the daemon has it open */
    uint64_t inode;
    uint64_t special_device;
    uint32_t chunk_bytes;         /* what one checksum is of */
    uint32_t flags;               /* CXL_DIRECT_SYNC */
    uint8_t uuid[16];             /* of the store */
    uint64_t watch;               /* a byte beyond the medium that the daemon keeps locked as long as it serves it */
    uint64_t reserved[3];
    uint8_t path[CXL_DIRECT_PATH_BYTES]; /* of the medium, ended by a zero */
} cxl_direct_attach;

enum { CXL_DIRECT_SYNC = 1 };     /* map it with MAP_SYNC */

enum { CXL_DIRECT_LEASES = 16 };  /* of one request */

/* Room for what is about to be written: an extent that is filled front to back. */
typedef struct {
    uint64_t lease_id;            /* of the extent */
    uint64_t media_offset;        /* of its first byte, a multiple of 64; what is locked begins here */
    uint64_t capacity_bytes;      /* room for data, */
    uint64_t crc_offset;          /* on the medium, behind it or behind the slip: a uint32_t for each chunk of it */
    uint64_t length_bytes;        /* all of this is locked */
} cxl_direct_room_given;

/* Room: in one lease or, as each ends with its segment, in several. Filled in their order from file_offset on they lie
 * as the file does modulo 2 MiB, the short ones between them aside: each from the offset's place in its page to its
 * last whole page, the first with a gap in front of up to 64 KiB where the lease lies as a multiple of 2 MiB does.
 * Nothing may be stored there before the ranges of the leases and of the slip are locked, and the byte of the watch was
 * seen locked after that (F_OFD_GETLK). EBUSY: not now (somebody else has the file open, it is for appending, a write
 * has failed). EINVAL: what was given before, and not returned, is not locked. */
typedef struct {
    uint64_t wanted_bytes;        /* in: room wished for, in all; out: the inode number of the file that it is for */
    uint64_t file_offset;         /* in: where in the file it will go first */
    uint64_t slip_offset;         /* out: the file's slip, the same for every lease of it */
    uint64_t watch;               /* in: that of the slip that the program has, 0: none: any other slip of the file is
                                   * closed, since another process has it that shares the open file, and two may not
                                   * append to one;
                                   * out: a byte beyond the medium, of this slip alone. The daemon keeps it locked,
                                   * through an open file description of its own, until the slip is closed, and lets
                                   * nothing of it go before; the kernel unlocks it when the daemon dies, before the
                                   * next one can begin */
    uint32_t slip_bytes;          /* CXL_SLIP_BYTES, and room for checksums of the leases */
    uint32_t count;               /* in: 1 to CXL_DIRECT_LEASES; out: of rooms, 1 at least */
    uint32_t flags;               /* in: CXL_DIRECT_AHEAD */
    uint32_t reserved;            /* 0 */
    uint64_t returned_lease_ids[CXL_DIRECT_LEASES]; /* in: nobody stores there any more, the rest goes back; 0: none */
    cxl_direct_room_given rooms[CXL_DIRECT_LEASES];
} cxl_direct_lease;

enum { CXL_DIRECT_AHEAD = 1 };    /* others go on meanwhile: on the processor of who asks nobody is in the way */

/* The ranges of what was mapped (CXL_DIRECT_MAP) are locked: they stay as long as they are. EINVAL: they are not. */
typedef struct {
    uint64_t reserved;
} cxl_direct_confirm;

/* Whatever was appended to the slip is content of the file when this returns. */
typedef struct {
    uint64_t returned_lease_ids[CXL_DIRECT_LEASES]; /* in, as with a lease */
    uint32_t flags;               /* in: CXL_DIRECT_DONE */
    uint32_t reserved;
    uint64_t absorbed;            /* out: descriptors done since the slip was given */
    uint64_t size_bytes;          /* out: of the file */
} cxl_direct_settled;

enum { CXL_DIRECT_DONE = 1 };     /* the slip is closed, and all leases of the file are returned */

/* One extent that the file refers to, or a part of it; its checksums are count of those that follow the rows. */
typedef struct {
    uint64_t file_offset;         /* ranges that no row has are holes */
    uint64_t length_bytes;
    uint64_t extent_id;
    uint64_t extent_offset;       /* of file_offset */
    uint64_t extent_media_offset; /* of extent offset 0 */
    uint64_t extent_length;       /* bytes that checksums cover: the last chunk ends here */
    uint32_t first_chunk;         /* checksums are of this chunk of the extent and those that follow */
    uint32_t crc_count;           /* all that length_bytes touches; 0: it was verified (CXL_DIRECT_VERIFIED) */
} cxl_direct_row;

enum { CXL_DIRECT_MAP_BYTES = 16352, CXL_DIRECT_MAP_PAYLOAD = CXL_DIRECT_MAP_BYTES - 48 };

/* Where the bytes of a file lie, which stay there until CXL_DIRECT_UNMAP, or the file is closed. The first request
 * (offset 0) begins it: the answers to all are of that moment. With CXL_DIRECT_WATCH a byte beyond the medium is then
 * locked by the daemon, through an open file description of its own, which F_OFD_GETLK finds as long as the content of
 * the file is what it was and its bytes stay, and no longer. EBUSY: not now (it is open for writing).
 * With CXL_DIRECT_VERIFIED the daemon says whether all of this content was verified lately: then nothing is to be
 * compared, and there are no checksums. Where it was not, and CXL_DIRECT_SHARED is said, CXL_DIRECT_VERIFY says what
 * is left. */
typedef struct {
    uint64_t offset;              /* in: of the file, where to go on; */
    uint64_t next_offset;         /* out: and from where; the size of the file when this was the last part */
    uint64_t size_bytes;          /* out */
    uint32_t row_count;           /* out: rows, and behind them uint32_t checksums */
    uint32_t crc_count;
    uint64_t flags;               /* in: CXL_DIRECT_WATCH, CXL_DIRECT_VERIFIED: it will do; out: those two that are so,
                                   * and CXL_DIRECT_SHARED */
    uint64_t watch;               /* out: the byte that is locked; 0: none */
    uint8_t payload[CXL_DIRECT_MAP_PAYLOAD];
} cxl_direct_map;

enum { CXL_DIRECT_WATCH = 1, CXL_DIRECT_VERIFIED = 2, CXL_DIRECT_SHARED = 4 };

/* What is locked of a mapped file may be longer: ranges with so little between them are locked as one. Checksums and
 * the head of a segment lie there, and no room that anybody waits for. */
enum { CXL_DIRECT_LOCK_GAP = 16 << 10 };

/* Those who map one content at the same time verify it together: each says which piece it has compared, and is given
 * another. EINVAL: nothing is known of it any more (damage was found somewhere, it took too long): it is to be verified
 * alone. */
typedef struct {
    uint64_t done_offset;         /* in: of the piece that was compared and is right; or (CXL_DIRECT_WRONG) is not; */
    uint64_t done_bytes;          /* 0: none */
    uint64_t offset;              /* out: of the next one; */
    uint64_t length_bytes;        /* 0: none, ask again in a while, or (CXL_DIRECT_VERIFIED) all of it is verified */
    uint64_t flags;               /* in: CXL_DIRECT_WRONG; out: CXL_DIRECT_VERIFIED */
} cxl_direct_verify;

enum { CXL_DIRECT_WRONG = 8 };

typedef struct {
    uint64_t reserved;
} cxl_direct_unmap;

#define CXL_DIRECT_ATTACH _IOWR('c', 0x40, cxl_direct_attach)
#define CXL_DIRECT_LEASE _IOWR('c', 0x41, cxl_direct_lease)
#define CXL_DIRECT_CONFIRM _IOWR('c', 0x42, cxl_direct_confirm)
#define CXL_DIRECT_SETTLE _IOWR('c', 0x43, cxl_direct_settled)
#define CXL_DIRECT_MAP _IOWR('c', 0x44, cxl_direct_map)
#define CXL_DIRECT_UNMAP _IOWR('c', 0x45, cxl_direct_unmap)
#define CXL_DIRECT_VERIFY _IOWR('c', 0x46, cxl_direct_verify)

/* -------------------------------------------------------------------------------------- slip */

enum { CXL_SLIP_BYTES = 65536, CXL_SLIP_DESCRIPTORS_AT = 4096, CXL_SLIP_DESCRIPTORS = 960 };

#define CXL_SLIP_CLOSED (UINT64_C(1) << 63)

typedef struct {
    uint64_t state;               /* CXL_SLIP_CLOSED, once the daemon wants no more, or the program has none; below it
                                   * how many descriptors were appended. Changed by compare-and-swap (the program), and
                                   * by atomic OR (whoever closes it). */
    uint64_t unused_1[7];
    uint64_t copying;             /* threads of the program that store into a lease just now; each looks at the state
                                   * again after it has counted itself */
    uint64_t unused_2[7];
    uint64_t absorbed;            /* the daemon's: descriptors done. At most CXL_SLIP_DESCRIPTORS more are appended. */
    uint64_t unused_3[7];
} cxl_slip;

/* One write, durable on line and byte granularity when appended. Descriptor n lies at n % CXL_SLIP_DESCRIPTORS. */
typedef struct {
    uint64_t sequence;            /* n */
    uint64_t lease_id;
    uint64_t file_offset;
    uint64_t extent_offset;       /* not below the end of the one before in that lease; what lies between are zeros */
    uint64_t length_bytes;        /* not 0 */
    uint32_t tail_crc;            /* of the chunk with the last byte, as far as it goes; 0 where that byte ends it */
    uint32_t flags;               /* 0 */
    uint64_t reserved[2];         /* 0 */
} cxl_slip_descriptor;

_Static_assert(sizeof(cxl_direct_attach) == 2048, "");
_Static_assert(sizeof(cxl_direct_lease) == 816, "");
_Static_assert(sizeof(cxl_direct_confirm) == 8, "");
_Static_assert(sizeof(cxl_direct_settled) == 152, "");
_Static_assert(sizeof(cxl_direct_row) == 56, "");
_Static_assert(sizeof(cxl_direct_map) == CXL_DIRECT_MAP_BYTES, "");
_Static_assert(sizeof(cxl_direct_unmap) == 8, "");
_Static_assert(sizeof(cxl_direct_verify) == 40, "");
_Static_assert(sizeof(cxl_slip) == 192, "");
_Static_assert(sizeof(cxl_slip_descriptor) == 64, "");

#endif
