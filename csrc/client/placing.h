/* placing.h - where bytes of a file go in a lease, and whether what the daemon gave is on the medium: arithmetic alone,
 * for the client library and for programs under `cxlfs run`.
 */
#ifndef CXLFS_PLACING_H
#define CXLFS_PLACING_H

#include <stdbool.h>
#include <stdint.h>

#include "client/direct.h"

enum { LARGE_PAGE = 2 << 20 };   /* where a mapping begins, so that the kernel can use them */
enum { GAP_FROM = 64 << 10 };    /* shorter pieces are not worth a gap in front of them */
enum { GAP_SHARE = 64 };         /* of a piece, what may be left in front of it for the sake of large pages, */
enum { GAP_FIRST = 64 << 10 };   /* and in front of the first one, for which the daemon may have given no other place */

/* How far a lease is filled. */
typedef struct {
    uint64_t media_offset;
    uint64_t capacity;
    uint64_t used;
} placing_room;

typedef struct {
    uint64_t extent_offset;      /* where it begins; what lies between the used part and this is a gap of zeros */
    uint64_t length;             /* how much of it goes there; 0: nothing */
} placement;

/* From where a lease is filled to, so many bytes to where the file's large pages are as the medium's. */
uint64_t direct_gap(const placing_room *room, uint64_t file_offset);

/* Where a piece of the file goes. Such that the pages of a file that is written front to back can be mapped one behind
 * the other: what begins anew has the same offset in a page on the medium as in the file, in a large page where that
 * leaves a short gap, and where the file goes on in another lease it does so at the end of a page. */
placement direct_place(const placing_room *room, uint64_t file_offset, uint64_t length);

/* All of an answer with at most count_max rooms lies on the medium, checksums where they belong. */
bool direct_answer_makes_sense(const cxl_direct_attach *medium, const cxl_direct_lease *answer, uint32_t count_max);

/* The checksum with which that of a chunk begins. */
uint32_t client_chunk_seed(uint64_t extent_id, uint64_t chunk);

#endif
