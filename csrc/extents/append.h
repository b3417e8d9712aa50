/* append.h - how an open extent becomes longer, with or without a copy of what is put there.
 *
 * Never: of an extent that somebody else appends to: its map's writer lock, or extent_use_open, keeps others away.
 *
 * Invariants
 * - What was appended counts from append_commit, or map_show, on. Before it nobody can see it.
 */
#ifndef CXLFS_APPEND_H
#define CXLFS_APPEND_H

#include "extents/extents.h"

/* extent_io.c */

/* Where an append has come to; the extent itself changes with append_commit only. */
typedef struct {
    uint64_t start;           /* extent offset of the first data byte, behind the padding */
    uint64_t offset;          /* of the next byte */
    uint64_t first_chunk;     /* the chunk that was open when the append began, */
    uint32_t first_crc;       /* and its checksum as it will be */
    uint32_t crc;             /* of the chunk being filled */
} append_state;

/* LINE, BYTE: what this thread appended is durable then. -EREMOTEIO when that failed: unlike -EIO it
 * says nothing of one range, but that nobody knows what of all that was stored survives. */
int append_fence(cxl_engine *engine);
/* Bytes of padding that an append must put first, because published bytes end off alignment. */
uint64_t append_padding(cxl_engine *engine, extent *x);
/* Room for data in an open extent after that padding. */
uint64_t append_room(cxl_engine *engine, extent *x);
int append_begin(cxl_engine *engine, extent *x, uint64_t padding, append_state *state, cxl_fault *fault);
int append_bytes(cxl_engine *engine, extent *x, append_state *state, const void *source,
                 uint64_t length, cxl_fault *fault);
void append_commit(cxl_engine *engine, extent *x, const append_state *state);

/* map_write.c */

/* What was appended becomes content of the map where the reference to it says, all or nothing: reference, length and
 * checksums of the extent, size and mark. map.writer is held. */
int map_show(cxl_map *map, const append_state *state, const reference *fresh);

#endif
