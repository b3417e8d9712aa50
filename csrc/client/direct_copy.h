/* direct_copy.h - one piece on its way: where in a lease it goes, and how it gets there. */
#ifndef CXLFS_DIRECT_COPY_H
#define CXLFS_DIRECT_COPY_H

#include "client/direct_file.h"

typedef struct {
    uint64_t extent_offset;      /* where it begins; what lies between the used part and this is a gap of zeros */
    uint64_t length;             /* how much of it goes there; 0: nothing */
} placement;

enum { GAP_SHARE = 64 };         /* of a piece, what may be left in front of it for the sake of large pages, */
enum { GAP_FIRST = 64 << 10 };   /* and in front of the first one, for which the daemon may have given no other place */

/* From where a lease is filled to, so many bytes to where the file's large pages are as the medium's. */
uint64_t direct_gap(const direct_lease *lease, uint64_t file_offset);

/* Where a piece of the file goes. Such that the pages of a file that is written front to back can be mapped one behind
 * the other: what begins anew has the same offset in a page on the medium as in the file, in a large page where that
 * leaves a short gap, and where the file goes on in another lease it does so at the end of a page. */
placement direct_place(const direct_lease *lease, uint64_t file_offset, uint64_t length);

/* Store it, and append its descriptor: content of the file from then on. The lease is busy for the caller, the file not
 * locked. -EAGAIN: the daemon wants no more, nothing happened; -EIO: the medium failed. */
int direct_copy(cxl_direct_file *file, direct_lease *lease, const placement *place, const uint8_t *bytes,
                uint64_t file_offset);

#endif
