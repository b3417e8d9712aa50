/* mapped.h - what the files about one mapped file share: where its bytes lie, and what they are checked against.
 *
 * Invariants
 * - Rows are in the order of the file and do not overlap; what they say lies inside file and medium.
 */
#ifndef CXLFS_MAPPED_H
#define CXLFS_MAPPED_H

#include "client/parts.h"

typedef struct {
    cxl_direct_row is;
    uint64_t sums;               /* index of the checksum of its first chunk */
    uint64_t stitched_start;     /* bytes of the file that are mapped in one piece with those of the row, */
    uint64_t stitched_end;       /* from the medium; what else it has is a copy */
} mapped_row;

struct cxl_mapped {
    int fd;                      /* the caller's */
    const cxl_client_channel *channel;
    cxl_client *client;
    int process;
    bool is_private;             /* pages of the medium are copied when somebody writes to them, if that is let */
    bool is_compared_alone;      /* nothing of it is mapped on its own: media is the client's view */
    bool is_held;                /* the daemon has been asked where the file lies */
    bool is_shared;              /* the daemon says what of it is left to be verified */
    atomic_bool is_verified;     /* all of it, by whomever */
    int medium_fd;               /* an open file description of its own: its locks end with it and its mappings */
    cxl_media *media;            /* all of the medium, to be read */
    uint8_t *reserved;           /* address space, of which base is a part that begins at a large page */
    uint64_t reserved_bytes;
    uint8_t *base;
    uint64_t size;
    uint64_t copied;
    mapped_row *rows;
    uint64_t row_count, row_capacity;
    uint32_t *sums;              /* none of what was verified when it was mapped */
    uint64_t sum_count, sum_capacity;
    _Atomic uint8_t *verified;   /* a byte for each of sums */
};

/* Ask the daemon; rows and sums are there then, and *watch where the flags ask for one (CXL_DIRECT_WATCH). With
 * CXL_DIRECT_VERIFIED the mapping is verified when the daemon says so. */
int mapped_ask(cxl_mapped *mapped, uint64_t flags, uint64_t *watch);
/* Compare the chunks of a row that have bytes of [start, end) of the file; at the first one that is damaged, -EIO. */
int mapped_verify_row(cxl_mapped *mapped, const mapped_row *row, uint64_t start, uint64_t end, uint64_t *bad_offset,
                      uint64_t *bad_length);
/* The first row that ends behind offset; row_count where there is none. */
uint64_t mapped_find(const cxl_mapped *mapped, uint64_t offset);

#endif
