/* fuse_wire.h - the part of the kernel's FUSE protocol that the transport itself reads or writes.
 *
 * Never: what libfuse handles for us. Source: include/uapi/linux/fuse.h (protocol 7.12 to 7.45);
 * written out here because the header of the build machine may be older than the kernel that runs.
 *
 * Invariants
 * - Every structure has the size that the protocol gives it (asserted below); all numbers are the
 *   machine's own byte order.
 */
#ifndef CXLFS_FUSE_WIRE_H
#define CXLFS_FUSE_WIRE_H

#include <stdint.h>

enum {
    FUSE_WIRE_LOOKUP = 1,
    FUSE_WIRE_FORGET = 2,
    FUSE_WIRE_READ = 15,
    FUSE_WIRE_WRITE = 16,
    FUSE_WIRE_RELEASE = 18,
    FUSE_WIRE_INIT = 26,
    FUSE_WIRE_READDIR = 28,
    FUSE_WIRE_INTERRUPT = 36,
    FUSE_WIRE_IOCTL = 39,
    FUSE_WIRE_NOTIFY_REPLY = 41,
    FUSE_WIRE_BATCH_FORGET = 42,
    FUSE_WIRE_READDIRPLUS = 44,
};

/* Flags of INIT, the upper half as they stand in flags2. */
#define FUSE_WIRE_PARALLEL_DIROPS (UINT32_C(1) << 18)
#define FUSE_WIRE_MAX_PAGES (UINT32_C(1) << 22)
#define FUSE_WIRE_INIT_EXT (UINT32_C(1) << 30)
#define FUSE_WIRE2_DIRECT_IO_ALLOW_MMAP (UINT32_C(1) << 4)

enum { FUSE_WIRE_NOTIFY_INVALIDATE_INODE = 2 };

typedef struct {
    uint32_t length;          /* of the whole request */
    uint32_t opcode;
    uint64_t unique;
    uint64_t inode;
    uint32_t uid;
    uint32_t gid;
    uint32_t pid;             /* of the calling thread; 0: the kernel itself */
    uint32_t extensions;
} fuse_wire_header;

typedef struct {
    uint32_t length;
    int32_t error;            /* 0 or -errno; the code of a notification when unique is 0 */
    uint64_t unique;
} fuse_wire_reply;

/* Of LOOKUP. Inode 0: there is no such name, which the kernel remembers for so long. */
typedef struct {
    uint64_t inode;
    uint64_t generation;
    uint64_t name_seconds;
    uint64_t attributes_seconds;
    uint32_t name_ns;
    uint32_t attributes_ns;
    uint64_t attributes[11];
} fuse_wire_entry;

typedef struct {
    uint32_t major;
    uint32_t minor;
    uint32_t readahead_max;
    uint32_t flags;
    uint32_t flags2;
    uint32_t unused[11];
} fuse_wire_init;

typedef struct {
    uint32_t major;
    uint32_t minor;
    uint32_t readahead_max;
    uint32_t flags;
    uint16_t background_max;
    uint16_t congestion_threshold;
    uint32_t write_max;
    uint32_t time_granularity_ns;
    uint16_t pages_max;
    uint16_t map_alignment;
    uint32_t flags2;
    uint32_t stack_depth_max;
    uint16_t unused[12];
} fuse_wire_init_reply;

/* READ, and READDIR and READDIRPLUS with a directory's handle. */
typedef struct {
    uint64_t handle;
    uint64_t offset;
    uint32_t size;
    uint32_t read_flags;
    uint64_t lock_owner;
    uint32_t flags;
    uint32_t padding;
} fuse_wire_read;

typedef struct {
    uint64_t handle;
    uint64_t offset;
    uint32_t size;
    uint32_t write_flags;
    uint64_t lock_owner;
    uint32_t flags;
    uint32_t padding;
} fuse_wire_write;

typedef struct {
    uint32_t size;
    uint32_t padding;
} fuse_wire_write_reply;

typedef struct {
    uint64_t handle;          /* of a directory with FUSE_WIRE_IOCTL_DIRECTORY in flags */
    uint32_t flags;
    uint32_t command;
    uint64_t argument;
    uint32_t in_size;         /* bytes that follow */
    uint32_t out_size;        /* there is room for in the answer */
} fuse_wire_ioctl;

enum { FUSE_WIRE_IOCTL_DIRECTORY = 1 << 4 };

typedef struct {
    uint32_t count;           /* pairs of inode and number of lookups that follow */
    uint32_t unused;
} fuse_wire_forgets;

typedef struct {
    uint64_t inode;
    int64_t offset;
    int64_t length;
} fuse_wire_invalidate;

enum { FUSE_WIRE_FORGET_BYTES = 16 };

_Static_assert(sizeof(fuse_wire_header) == 40, "protocol");
_Static_assert(sizeof(fuse_wire_reply) == 16, "protocol");
_Static_assert(sizeof(fuse_wire_init) == 64, "protocol");
_Static_assert(sizeof(fuse_wire_init_reply) == 64, "protocol");
_Static_assert(sizeof(fuse_wire_ioctl) == 32, "protocol");
_Static_assert(sizeof(fuse_wire_read) == 40 && sizeof(fuse_wire_write) == 40, "protocol");

#endif
