/* cxl_direct.h - what the daemon needs for programs that store file data by themselves (client/direct.h): words of a
 * slip, taking in what was appended to it, and extents that stay where they are for whoever reads them in place.
 *
 * Rules
 * - Those of cxlfs.h. A slip, and the checksums beside a lease, are written by another process at any time: each byte
 *   is loaded once, and what was loaded is checked before it is used.
 */
#ifndef CXLFS_CXL_DIRECT_H
#define CXLFS_CXL_DIRECT_H

#include <stdbool.h>

#include "cxlfs.h"

/* ------------------------------------------------------------------------------------- words */

/* Set bits of an aligned 8-byte word, sequentially consistent for everybody who has the media mapped; *before: the
 * word as it was. Recorded as a store of what the word is then. */
int cxl_media_or_u64(cxl_media *media, uint64_t offset, uint64_t bits, uint64_t *before);
/* An aligned 8-byte word, never torn; what was stored before it was is seen after this. Sequentially consistent: of
 * two, each of whom sets a word and then looks at the other's, one sees it. Guarded. */
int cxl_media_load_u64(cxl_media *media, uint64_t offset, uint64_t *value);

/* ------------------------------------------------------------------------------------ absorb */

/* An open extent (cxl_engine_lease, of no map) that a program fills. */
typedef struct {
    uint64_t id;
    uint64_t crc_offset;     /* on the media: the checksum of each chunk of it, from the first one on */
    uint64_t capacity;       /* bytes of data; what the extent has beyond them is not for data */
} cxl_direct_room;

/* What is wrong with a descriptor. */
enum { CXL_WRONG_NOT = 0, CXL_WRONG_SLIP = 1,   /* more of them than a slip has, or there is no slip at that place */
       CXL_WRONG_SEQUENCE = 2, CXL_WRONG_RESERVED = 3,
       CXL_WRONG_LEASE = 4,     /* none of the rooms, or not an open extent, or somebody else appends to it */
       CXL_WRONG_PLACE = 5,     /* before the end of the extent as it is, or behind that of the room; or no bytes */
       CXL_WRONG_FILE = 6,      /* beyond the largest file */
       CXL_WRONG_TAIL = 7,      /* a checksum of a last chunk where that is whole */
       CXL_WRONG_PUBLISHED = 8, /* published bytes of the extent end off alignment: nothing goes behind them */
       CXL_WRONG_KINDS = 9 };

/* Make what descriptors [first, last) of a slip say content of the map, in their order: each extends its extent, with
 * the checksums that the program has stored for it, and is referred to, or nothing of it happens. Bytes are not
 * looked at. LINE, BYTE: they are durable; PAGE: the next fence covers them. Returns how many were taken, *bytes in
 * all. Fewer than asked: fault->error is -EINVAL (*wrong says why), -EIO, -ENOMEM or -EROFS, and fault->media_offset
 * that of the descriptor; after the last three it may be asked for again. *wrong is 0 otherwise.
 * Extents that grow like this may be published; but while a delta of them is out, and once one of a length that is no
 * multiple of 64 was applied, nothing more may be appended: the caller closes the slip first. */
int64_t cxl_map_absorb(cxl_map *map, uint64_t slip_offset, uint64_t first, uint64_t last, const cxl_direct_room *rooms,
                       uint64_t room_count, uint64_t file_size_max, uint64_t *bytes, uint32_t *wrong,
                       cxl_fault *fault);

/* -------------------------------------------------------------------------------------- held */

/* The references of a map as of one moment, and each of their extents held: their bytes stay where and what they are,
 * however the map changes, until it is freed. It takes memory for each reference. An engine that is freed frees it. */
typedef struct cxl_held cxl_held;
int cxl_map_hold(cxl_map *map, cxl_held **out);
void cxl_held_free(cxl_held *held);
uint64_t cxl_held_size(const cxl_held *held);    /* of the file */
/* From file offset on: *row_count cxl_direct_row, and behind them the *crc_count checksums of their chunks, in room
 * bytes of payload (aligned as a uint64_t is). A row is divided where its checksums would not fit. *next_offset: where
 * to go on, or the size. with_sums false: no checksums, and rows have none. -EINVAL: there is no room for a row and a
 * checksum. */
int cxl_held_rows(cxl_held *held, uint64_t offset, bool with_sums, void *payload, uint64_t room, uint32_t *row_count,
                  uint32_t *crc_count, uint64_t *next_offset);
/* Where the bytes that are referred to lie, by media offset, those with at most gap bytes between them as one. *out:
 * cxl_free. */
int cxl_held_ranges(const cxl_held *held, uint64_t gap, cxl_span **out, uint64_t *count);
/* What tells this content from any other: its size, and of each reference its places, the number and the length of its
 * extent, and a checksum of the checksums of its chunks. *out: cxl_free. */
int cxl_held_identity(cxl_held *held, uint64_t **out, uint64_t *count);

#endif
