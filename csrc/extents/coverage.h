/* coverage.h - what the files that count coverage share.
 *
 * Never: for anyone else; they find coverage in extents.h.
 */
#ifndef CXLFS_COVERAGE_H
#define CXLFS_COVERAGE_H

#include "extents/extents.h"

/* What a reference covers of its extent. */
typedef struct {
    extent *extent;
    uint32_t start;
    uint32_t end;
} cover_range;

/* What is to be done with ranges. */
typedef struct {
    int add;                  /* kinds, or COVER_KINDS: none */
    int remove;
    int holds;                /* 1: each takes a hold on its extent, -1: each gives one back */
    bool must;                /* succeed, if need be by counting too much */
} cover_task;

/* What became of the pieces of one extent. */
typedef struct {
    int add;
    int remove;
    int64_t bytes[COVER_KINDS + 1]; /* more of each kind */
    uint64_t pieces;          /* looked at, and moved */
} cover_change;

/* Room to merge pieces in, for one extent after the other. */
typedef struct {
    cover_piece *pieces;
    uint64_t capacity;
} cover_scratch;

/* The first kind that counts a piece; COVER_KINDS: nothing covers it. */
static inline int kind_of(const cover_piece *piece)
{
    for (int kind = 0; kind < COVER_KINDS; kind++) {
        if (piece->counts[kind] != 0)
            return kind;
    }
    return COVER_KINDS;
}

/* coverage_pieces.c. Counts of [start, end) change; the list has room for two more. How many pieces there are. */
uint32_t pieces_change(cover_piece *list, uint32_t count, uint32_t start, uint32_t end, cover_change *change);
/* The same for many ranges, of which starts and ends are sorted, into out: room for two more for each. One pass. */
uint32_t pieces_merge(const cover_piece *list, uint32_t count, const cover_range *ranges, uint64_t range_count,
                      cover_piece *out, cover_change *change);

/* coverage.c. Ranges of one extent, starts and ends sorted; -ENOMEM changes nothing. */
int cover_change_ranges(cxl_engine *engine, const cover_range *ranges, uint64_t count, cover_task task,
                        cover_scratch *scratch);
uint32_t cover_piece_count(cxl_engine *engine, const extent *x);

/* coverage_batch.c. As many references as there are, in any order; -ENOMEM changes nothing. */
int cover_change_list(cxl_engine *engine, const reference *refs, size_t count, cover_task task);
/* References that were of one kind go, with their holds, all of one extent; room: for as many ranges. */
void cover_drop_ranges(cxl_engine *engine, cover_range *ranges, cover_range *room, uint64_t count, int kind);
/* Those of a content, what of them lies in [start, end). */
int cover_change_part(cxl_engine *engine, const tree *content, uint64_t start, uint64_t end, cover_task task);

#endif
