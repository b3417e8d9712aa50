/* reference_snapshot.h - for those that change references: what a snapshot still needs is taken down before.
 *
 * Never: included outside csrc/extents.
 */
#ifndef CXLFS_REFERENCE_SNAPSHOT_H
#define CXLFS_REFERENCE_SNAPSHOT_H

#include "extents/extents.h"

/* Into the rows of the snapshot that a leaf is part of, if it still is. */
void leaf_take_down(cxl_engine *engine, leaf *of);

/* A leaf is about to change, or one of its references to lose its hold. Its map is held for writing, or it has none. */
static inline void leaf_keep(cxl_engine *engine, leaf *of)
{
    if (atomic_load_explicit(&of->snapshot, memory_order_acquire) != NULL)
        leaf_take_down(engine, of);
}

/* The same for leaves [first, end) of a content. */
static inline void leaves_keep(cxl_engine *engine, const tree *content, uint64_t first, uint64_t end)
{
    for (; first < end && first < content->leaf_count; first++)
        leaf_keep(engine, content->leaves[first]);
}

/* The engine ends: nobody wants them any more. */
void reference_snapshots_free(cxl_engine *engine);

#endif
