/* direct_copy.h - one piece on its way into a lease. */
#ifndef CXLFS_DIRECT_COPY_H
#define CXLFS_DIRECT_COPY_H

#include "client/direct_file.h"

/* Store it, and append its descriptor: content of the file from then on. The lease is busy for the caller, the file not
 * locked. -EAGAIN: the daemon wants no more, nothing happened; -EIO: the medium failed. */
int direct_copy(cxl_direct_file *file, direct_lease *lease, const placement *place, const uint8_t *bytes,
                uint64_t file_offset);

#endif
