/* sums.h - checksums of ranges, from those that are kept of chunks (extent_io.c).
 *
 * Never: of bytes that were not verified.
 */
#ifndef CXLFS_SUMS_H
#define CXLFS_SUMS_H

#include "extents/extents.h"

enum { CHUNK_WORK = 1024 };      /* of a chunk that is not read: 50 ns, in bytes that are read meanwhile */

/* The checksum of a range, *crc continuing: from those of its chunks, and where it has a part of one alone from its
 * bytes, all of which are read and verified. Stops when *work is used up, bytes that are read and CHUNK_WORK for
 * each chunk; *done: how many bytes it is of then, up to the end of a chunk or of all. -EIO with *fault. */
int extent_sum(cxl_engine *engine, const extent_range *range, uint32_t *crc, uint64_t *work, uint64_t *done,
               cxl_fault *fault);

#endif
