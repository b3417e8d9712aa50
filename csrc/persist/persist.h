/* persist.h - what the persist part shares, and the other parts use: dispatch table, guard, faults, regions.
 *
 * Never: anything of the media format, anything that a user of cxlfs.h needs.
 *
 * Invariants
 * - Code that may take a SIGBUS runs inside cxl_guarded and holds no lock, no memory and no other
 *   resource that a jump out of it would leak.
 * - The dispatch table is written once, by cxl_dispatch_init, before the first media exists.
 */
#ifndef CXLFS_INTERNAL_H
#define CXLFS_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>

#include "cxlfs.h"

#ifndef MAP_SYNC
#define MAP_SYNC 0x80000                /* Linux 4.15; some C libraries leave them out */
#endif
#ifndef MAP_SHARED_VALIDATE
#define MAP_SHARED_VALIDATE 0x03
#endif

/* ------------------------------------------------------------------------------ CPU dispatch */

enum { CXL_LINE = 64 };          /* bytes of a cache line, and what x86 writes back at once */
enum { CXL_COPY_BLOCK = 2048 };  /* bytes copied and summed in turn, so that they stay in L1 */

/* Routines of one CPU. Addresses and lengths need no alignment except where said. */
typedef struct {
    /* Begin writing back every line that [address, address+length) touches. No fence. */
    void (*write_back)(const void *address, size_t length);
    /* Wait until what this thread wrote back (or stored past the cache) is durable. */
    void (*fence)(void);
    uint32_t (*crc32c)(uint32_t crc, const void *data, size_t length);
    /* Copy count whole lines; target is line-aligned. Durable after a fence alone. */
    void (*copy_lines)(void *target, const void *source, size_t count);
    /* The same with the checksum of what was stored, or NULL: then block by block. */
    uint32_t (*copy_lines_crc)(uint32_t crc, void *target, const void *source, size_t count);
    const char *write_back_name;
    const char *fence_name;
    const char *crc32c_name;
    const char *copy_name;
    bool can_write_back;         /* false: this CPU has no such instruction, and nobody chose "none" */
} cxl_routines;

extern cxl_routines cxl_table;

/* Copy to the media: lines past the cache, ragged ends stored and (write_back) written back. */
void cxl_copy_out(void *target, const void *source, size_t length, bool write_back);
uint32_t cxl_copy_out_crc(uint32_t crc, void *target, const void *source, size_t length,
                          bool write_back);
/* Copy into ordinary memory with the checksum of what arrived there. */
uint32_t cxl_copy_in_crc(uint32_t crc, void *target, const void *source, size_t length);

uint32_t cxl_crc32c_table(uint32_t crc, const void *data, size_t length);
/* *crc continuing over length zeros, and the checksum of what two are of, one behind the other: O(log length). */
uint32_t cxl_crc32c_zeros(uint32_t crc, uint64_t length);
uint32_t cxl_crc32c_combine(uint32_t first, uint32_t second, uint64_t second_length);
void cxl_copy_lines_plain(void *target, const void *source, size_t count);
void cxl_write_back_none(const void *address, size_t length);

#if defined(__x86_64__)
void cxl_write_back_clwb(const void *address, size_t length);
void cxl_write_back_clflushopt(const void *address, size_t length);
void cxl_write_back_clflush(const void *address, size_t length);
void cxl_fence_sfence(void);
void cxl_copy_lines_sse2(void *target, const void *source, size_t count);
void cxl_copy_lines_avx2(void *target, const void *source, size_t count);
void cxl_copy_lines_avx512(void *target, const void *source, size_t count);
uint32_t cxl_crc32c_sse42(uint32_t crc, const void *data, size_t length);
uint32_t cxl_crc32c_vpclmul256(uint32_t crc, const void *data, size_t length);
uint32_t cxl_crc32c_vpclmul(uint32_t crc, const void *data, size_t length);
uint32_t cxl_copy_lines_sse42(uint32_t crc, void *target, const void *source, size_t count);
uint32_t cxl_copy_lines_vpclmul256(uint32_t crc, void *target, const void *source, size_t count);
uint32_t cxl_copy_lines_vpclmul(uint32_t crc, void *target, const void *source, size_t count);
#elif defined(__aarch64__)
void cxl_write_back_cvap(const void *address, size_t length);
void cxl_write_back_cvadp(const void *address, size_t length);
void cxl_fence_dsb(void);
uint32_t cxl_crc32c_arm(uint32_t crc, const void *data, size_t length);
#endif

/* ------------------------------------------------------------------------------------- guard */

/* Run body(argument); a SIGBUS on [base, base+size) ends it: -EIO, *fault_offset (may be NULL) counts
 * from base. May be nested. Signals elsewhere go to the handler that was there before. */
int cxl_guarded(const void *base, uint64_t size, void (*body)(void *), void *argument,
                uint64_t *fault_offset);
/* Put the SIGBUS handler in place where it is not. 0 or -errno. */
int cxl_guard_install(void);

/* ------------------------------------------------------------------------------------ faults */

/* Count one call of the kind; true when the tests want this one to fail. */
bool cxl_fault_hit(uint32_t kind);
/* malloc, calloc and realloc that the tests can make fail (CXL_FAULT_ALLOCATE). */
void *cxl_allocate(size_t size);
void *cxl_allocate_zeroed(size_t count, size_t size);
void *cxl_reallocate(void *pointer, size_t size);

/* ------------------------------------------------------------------------------------- media */

typedef struct {
    pthread_mutex_t lock;        /* held over the store and its entry: the log has the media's order */
    atomic_bool on;
    uint8_t *log;
    uint64_t length;
    uint64_t capacity;
} cxl_recorder;

typedef struct {
    uint64_t first;
    uint64_t end;
} dirty_range;

enum { DIRTY_RANGES = 8, DIRTY_GAP = 1 << 20 };

struct cxl_media {
    uint8_t *base;
    uint64_t size;
    uint32_t granularity;
    bool read_only;
    bool anonymous;
    bool fenced_by_others;       /* PAGE: nothing is remembered here, and a fence of this mapping syncs nothing */
    atomic_bool populates;       /* touching pages ahead costs memory alone, and works here */
    cxl_recorder recorder;
    /* PAGE: what the next fence must msync: sorted, further apart than DIRTY_GAP, joined where the
     * gap is smallest when there are more than DIRTY_RANGES. One msync over all of them would save
     * the barrier of the device that each costs, but wait for every page in between that somebody
     * else left dirty, above all a daemon that was killed. Measured on ext4 (virtio disk), two pages
     * in different halves of a file of 512 MiB: 1.17 ms with an msync for each, 1.02 with one over
     * all, 1.01 with fdatasync, 1.05 with sync_file_range before each; the same when 256 MiB lie
     * dirty in between: 3 ms, 80, 85. */
    pthread_mutex_t dirty_lock;  /* of the two below */
    dirty_range dirty[DIRTY_RANGES + 1];
    uint32_t dirty_count;
    pthread_mutex_t fence_lock;  /* PAGE: held over msync: a fence waits for the ranges others took */
    atomic_bool failed;          /* PAGE: an msync failed once */
};

/* For cxl_media_map: no byte can be reached before cxl_media_permit, and what is stored is fenced by others; (either) a
 * forked child has none of it. */
enum { CXL_MAP_CLOSED = 4, CXL_MAP_ALONE = 8 };
/* Let the pages of a range be reached (or not), that end at multiples of the granule, a power of two. 0 or -errno.
 * The tables of the pages stay: what was touched before meets no faults again. */
int cxl_media_permit(cxl_media *media, uint64_t offset, uint64_t length, uint64_t granule, bool allowed);
/* What this thread stored and wrote back is seen by others before what it stores next; LINE, BYTE: it is durable too.
 * PAGE: nothing is synced, which is left to whoever else has the media mapped. */
void cxl_media_order(cxl_media *media);
/* An aligned 8-byte word that other processes change as well; sequentially consistent. *found: as it was. */
int cxl_media_add_u64(cxl_media *media, uint64_t offset, uint64_t value, uint64_t *found);
/* Stored where the word is as expected, which *found tells. */
int cxl_media_swap_u64(cxl_media *media, uint64_t offset, uint64_t expected, uint64_t value, uint64_t *found);

/* PAGE: the next fence covers the pages of this range, which the caller has checked. */
void cxl_media_remember_dirty(cxl_media *media, uint64_t offset, uint64_t length);

int cxl_recorder_init(cxl_recorder *recorder);
void cxl_recorder_destroy(cxl_recorder *recorder);
/* Between begin and end the log has room for the event and no other thread stores. begin: 0 with *held
 * telling whether to call end, or -ENOMEM. */
int cxl_recorder_begin(cxl_recorder *recorder, uint64_t payload_length, bool *held);
void cxl_recorder_end(cxl_recorder *recorder, int result, uint32_t kind, uint64_t offset,
                      uint64_t length, const void *payload);

/* cxl_media_copy_crc for count pieces one behind the other, each with a checksum of its own; after -EIO these may have
 * changed. */
int cxl_media_copy_crcs(cxl_media *media, uint64_t offset, const void *source, uint64_t piece, uint32_t count,
                        uint32_t *crcs);

#endif
