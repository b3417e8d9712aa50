/* reference_snapshot.c - the references of a content as of one moment, taken down in steps: whatever of them is
 * about to change is taken down before it does.
 *
 * Writing a reference down takes 30 ns: for 4 million of them everybody would wait for 120 ms. So a snapshot notes
 * the leaves alone, of 127 references each, and whoever changes or frees a leaf that is noted takes down what it
 * has before. So nobody waits for more than the leaves that he changes anyway.
 *
 * Never: decides of what a snapshot is made, or when a step is due.
 *
 * Invariants
 * - A leaf with a slot is as it was when the snapshot began, and its references hold their extents, whether it is
 *   part of a content or waits to be dropped (discard.c).
 * - There is room for all rows from the beginning: taking a leaf down cannot fail.
 * - A leaf is part of one snapshot at most.
 */
#include <errno.h>
#include <stdlib.h>

#include "extents/reference_snapshot.h"

struct snapshot_slot {
    leaf *of;                 /* NULL: it is taken down, */
    cxl_reference_snapshot *in;
    uint64_t row;             /* from this one on */
};

struct cxl_reference_snapshot {
    cxl_engine *engine;
    cxl_reference_snapshot *next;
    cxl_ref *rows;            /* the caller's */
    uint64_t slot_count;
    uint64_t cursor;          /* the slots below it are done */
    bool failed;              /* a reference was not published */
    snapshot_slot slots[];
};

static size_t snapshot_bytes(uint64_t slots)
{
    return sizeof(cxl_reference_snapshot) + slots * sizeof(snapshot_slot);
}

/* references_lock is held: of everything that a slot leads to. */
static void take_down(cxl_engine *engine, snapshot_slot *slot)
{
    leaf *of = slot->of;
    cxl_ref *row = slot->in->rows + slot->row;
    for (uint32_t i = 0; i < of->count; i++) {
        const reference *ref = &of->refs[i];
        if (!extent_is_known(engine, ref->extent, ref->extent_offset + ref->length))
            slot->in->failed = true;
        row[i] = (cxl_ref){ref->file_offset, ref->length, ref->extent->id, ref->extent_offset};
    }
    atomic_fetch_add_explicit(&engine->refs_visited, of->count, memory_order_relaxed);
    slot->of = NULL;
    atomic_store_explicit(&of->snapshot, NULL, memory_order_release);
}

void leaf_take_down(cxl_engine *engine, leaf *of)
{
    pthread_mutex_lock(&engine->references_lock);
    snapshot_slot *slot = atomic_load_explicit(&of->snapshot, memory_order_relaxed);
    if (slot != NULL)
        take_down(engine, slot);
    pthread_mutex_unlock(&engine->references_lock);
}

/* ---------------------------------------------------------------------------------- begin and end */

/* The leaves that are left are nobody's. references_lock is held. */
static void forget_leaves(cxl_reference_snapshot *snapshot)
{
    for (uint64_t i = snapshot->cursor; i < snapshot->slot_count; i++) {
        if (snapshot->slots[i].of != NULL)
            atomic_store_explicit(&snapshot->slots[i].of->snapshot, NULL, memory_order_release);
    }
}

/* -EBUSY: a leaf is part of another one. references_lock is held, and the map for writing. */
static int note_leaves(cxl_reference_snapshot *snapshot, const tree *content)
{
    uint64_t row = 0;
    for (uint64_t i = 0; i < content->leaf_count; i++) {
        leaf *of = content->leaves[i];
        if (content->leaf_count - i > AHEAD)
            __builtin_prefetch(content->leaves[i + AHEAD], 1);
        if (atomic_load_explicit(&of->snapshot, memory_order_relaxed) != NULL)
            return -EBUSY;
        snapshot->slots[i] = (snapshot_slot){of, snapshot, row};
        snapshot->slot_count = i + 1;
        atomic_store_explicit(&of->snapshot, &snapshot->slots[i], memory_order_release);
        row += of->count;
    }
    return 0;
}

static int begin_locked(cxl_map *map, cxl_ref **rows, cxl_reference_snapshot **out)
{
    cxl_engine *engine = map->engine;
    uint64_t leaves = map->content.leaf_count;
    cxl_reference_snapshot *snapshot = engine_allocate(engine, snapshot_bytes(leaves));
    *rows = cxl_allocate(larger(map->content.refs, 1) * sizeof(**rows));
    int result = -ENOMEM;
    if (snapshot != NULL && *rows != NULL) {
        *snapshot = (cxl_reference_snapshot){.engine = engine, .rows = *rows};
        pthread_mutex_lock(&engine->references_lock);
        result = note_leaves(snapshot, &map->content);
        if (result == 0) {
            snapshot->next = engine->reference_snapshots;
            engine->reference_snapshots = snapshot;
        } else {
            forget_leaves(snapshot);
        }
        pthread_mutex_unlock(&engine->references_lock);
    }
    if (result != 0) {
        engine_release(engine, snapshot, snapshot_bytes(leaves));
        free(*rows);
        return result;
    }
    *out = snapshot;
    return 0;
}

int cxl_map_begin_snapshot(cxl_map *map, uint64_t *size, uint64_t *count, cxl_ref **rows,
                           cxl_reference_snapshot **out)
{
    pthread_mutex_lock(&map->writer);
    pthread_rwlock_wrlock(&map->lock);
    *size = map->size;
    *count = map->content.refs;
    int result = begin_locked(map, rows, out);
    pthread_rwlock_unlock(&map->lock);
    pthread_mutex_unlock(&map->writer);
    return result;
}

void cxl_reference_snapshot_end(cxl_reference_snapshot *snapshot)
{
    cxl_engine *engine = snapshot->engine;
    pthread_mutex_lock(&engine->references_lock);
    forget_leaves(snapshot);
    cxl_reference_snapshot **link = &engine->reference_snapshots;
    while (*link != snapshot)
        link = &(*link)->next;
    *link = snapshot->next;
    pthread_mutex_unlock(&engine->references_lock);
    engine_release(engine, snapshot, snapshot_bytes(snapshot->slot_count));
}

void reference_snapshots_free(cxl_engine *engine)
{
    while (engine->reference_snapshots != NULL)
        cxl_reference_snapshot_end(engine->reference_snapshots);
}

/* ------------------------------------------------------------------------------------------ steps */

int cxl_reference_snapshot_step(cxl_reference_snapshot *snapshot, uint64_t count)
{
    cxl_engine *engine = snapshot->engine;
    int result = 0;
    while (result == 0 && snapshot->cursor < snapshot->slot_count && count > 0) {
        uint64_t done = 1; /* a look at what others have taken down */
        pthread_mutex_lock(&engine->references_lock);
        snapshot_slot *slot = &snapshot->slots[snapshot->cursor++];
        if (slot->of != NULL) {
            done = slot->of->count;
            take_down(engine, slot);
        }
        result = snapshot->failed ? -EINVAL : 0;
        pthread_mutex_unlock(&engine->references_lock);
        count -= smaller(count, done);
    }
    return result != 0 ? result : snapshot->cursor < snapshot->slot_count;
}
