/* definitions.c - what a definition of one extent says: its place, its length and its checksums, as they
 * are or as far as the journal knows them; and taking in those that a record or an image gives.
 *
 * Never: touches media bytes.
 *
 * Invariants
 * - cxl_engine_define changes everything it was given or nothing.
 * - The length and the checksums that are given belong together: they are of one moment.
 * - What is published only grows.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "extents/extents.h"

/* ----------------------------------------------------------------------------------- describing */

int cxl_engine_describe(cxl_engine *engine, uint64_t id, cxl_extent_info *info, uint32_t **crcs)
{
    extent *x = extent_take(engine, id);
    if (x == NULL)
        return -ENOENT;
    /* The length may grow in between: what is described is what the checksums are of. */
    uint64_t length = extent_checksums(engine, x, 0, 0, NULL);
    uint64_t count = chunks_of(engine, length);
    int result = -ENOMEM;
    uint32_t *list = cxl_allocate(larger(count, 1) * sizeof(*list));
    while (list != NULL && result != 0) {
        uint64_t now = extent_checksums(engine, x, 0, count, list);
        if (chunks_of(engine, now) <= count) {
            *info = (cxl_extent_info){
                .id = x->id, .media_offset = x->media_offset, .length = now,
                .crc_count = (uint32_t)count,
            };
            *crcs = list;
            result = 0;
        } else {
            count = chunks_of(engine, now);
            free(list);
            list = cxl_allocate(count * sizeof(*list));
        }
    }
    extent_drop(engine, x);
    return result;
}

int cxl_engine_publish(cxl_engine *engine, uint64_t id)
{
    extent *x = extent_take(engine, id);
    if (x == NULL)
        return -ENOENT;
    snapshot_keep(engine, x);
    pthread_mutex_lock(stripe_of(engine, x));
    if (x->length > 0) {
        x->published = x->length;
        x->published_tail = x->crcs[chunks_of(engine, x->length) - 1];
    }
    pthread_mutex_unlock(stripe_of(engine, x));
    extent_drop(engine, x);
    return 0;
}

bool extent_describe_published(cxl_engine *engine, extent *x, cxl_extent_info *info, uint32_t *crcs,
                               uint64_t room)
{
    pthread_mutex_lock(stripe_of(engine, x));
    uint64_t count = chunks_of(engine, x->published);
    bool fits = count <= room;
    *info = (cxl_extent_info){
        .id = x->id, .media_offset = x->media_offset, .length = x->published,
        .crc_index = info->crc_index, .crc_count = (uint32_t)count,
    };
    if (fits && count != 0) {
        memcpy(crcs, x->crcs, count * sizeof(*crcs));
        if (count << engine->chunk_shift != x->published)
            crcs[count - 1] = x->published_tail;
    }
    pthread_mutex_unlock(stripe_of(engine, x));
    return fits;
}

/* ----------------------------------------------------------------------------------- taking in */

typedef struct {
    extent *extent;
    uint64_t length;          /* before; 0: it was created here */
    uint64_t published;
    uint32_t published_tail;
    uint32_t tail;            /* checksum of the partial chunk that grew */
} definition_undo;

/* Nothing that the batch claims may ask for more memory than the batch itself takes. */
static bool definitions_fit(const cxl_engine *engine, const cxl_extent_info *infos, uint64_t count,
                            uint64_t crc_count, uint64_t *bad)
{
    uint64_t total = 0, segment;
    for (uint64_t i = 0; i < count; i++) {
        const cxl_extent_info *info = &infos[i];
        uint64_t end = (uint64_t)info->first_chunk + info->crc_count;
        *bad = i;
        if (info->id == 0 || !extent_place(engine, info->media_offset, info->length, &segment))
            return false;
        if (end != chunks_of(engine, info->length))
            return false;
        if (info->crc_index > crc_count || info->crc_count > crc_count - info->crc_index)
            return false;
        total += info->crc_count;
        if (total > crc_count)
            return false;
    }
    return true;
}

/* Whether info may follow what is known of x: same place, no gap, nothing known contradicted. */
static bool definition_follows(const cxl_engine *engine, const extent *x,
                               const cxl_extent_info *info, const uint32_t *crcs)
{
    uint64_t whole = x->length >> engine->chunk_shift;
    bool grows = info->length > x->length;
    uint64_t known = grows ? whole : chunks_of(engine, x->length);
    if (x->open || x->media_offset != info->media_offset || info->length < x->length)
        return false;
    if (grows && info->first_chunk > whole)
        return false;
    for (uint64_t chunk = info->first_chunk; chunk < known; chunk++) {
        if (x->crcs[chunk] != crcs[chunk - info->first_chunk])
            return false;
    }
    return true;
}

static int define_one(cxl_engine *engine, const cxl_extent_info *info, const uint32_t *crcs,
                      definition_undo *undo)
{
    extent *x = extent_find_locked(engine, info->id);
    uint64_t chunks = chunks_of(engine, info->length);
    undo->extent = NULL;
    if (x != NULL) {
        if (!definition_follows(engine, x, info, crcs))
            return -EINVAL;
        if (extent_grow_crcs(engine, x, chunks) != 0)
            return -ENOMEM;
    } else {
        if (info->first_chunk != 0)
            return -EINVAL;
        x = extent_create_locked(engine, info->id, info->media_offset, chunks);
        if (x == NULL)
            return -ENOMEM;
    }
    *undo = (definition_undo){
        .extent = x, .length = x->length, .published = x->published,
        .published_tail = x->published_tail,
    };
    uint64_t whole = x->length >> engine->chunk_shift;
    if (whole << engine->chunk_shift < x->length)
        undo->tail = x->crcs[whole];
    atomic_fetch_add(&engine->crcs, chunks - chunks_of(engine, x->length));
    pthread_mutex_lock(stripe_of(engine, x));
    if (info->crc_count != 0)
        memcpy(x->crcs + info->first_chunk, crcs, info->crc_count * sizeof(*crcs));
    x->length = x->published = x->capacity = info->length;
    x->published_tail = x->crcs[chunks - 1];
    pthread_mutex_unlock(stripe_of(engine, x));
    return 0;
}

static void undo_one(cxl_engine *engine, const definition_undo *undo)
{
    extent *x = undo->extent;
    if (undo->length == 0) {
        extent_destroy_locked(engine, x, false);
        return;
    }
    uint64_t whole = undo->length >> engine->chunk_shift;
    atomic_fetch_sub(&engine->crcs, chunks_of(engine, x->length) - chunks_of(engine, undo->length));
    pthread_mutex_lock(stripe_of(engine, x));
    if (whole << engine->chunk_shift < undo->length)
        x->crcs[whole] = undo->tail;
    x->length = x->capacity = undo->length;
    x->published = undo->published;
    x->published_tail = undo->published_tail;
    pthread_mutex_unlock(stripe_of(engine, x));
}

int cxl_engine_define(cxl_engine *engine, const cxl_extent_info *infos, uint64_t count,
                      const uint32_t *crcs, uint64_t crc_count, uint64_t *bad)
{
    int result = 0;
    uint64_t done = 0;
    *bad = 0;
    if (count == 0)
        return 0;
    if (!definitions_fit(engine, infos, count, crc_count, bad))
        return -EINVAL;
    definition_undo few[4], *undos = few;
    if (count > sizeof(few) / sizeof(few[0]))
        undos = cxl_allocate(count * sizeof(*undos));
    if (undos == NULL)
        return -ENOMEM;
    pthread_mutex_lock(&engine->lock);
    table_make_room(engine, count);
    for (; done < count && result == 0; done++) {
        if (count - done > AHEAD)
            extent_prefetch(engine, infos[done + AHEAD].id, infos[done + AHEAD / 2].id);
        const uint32_t *own = infos[done].crc_count != 0 ? crcs + infos[done].crc_index : NULL;
        result = define_one(engine, &infos[done], own, &undos[done]);
    }
    if (result != 0)
        *bad = --done;
    while (done > 0) {
        done--;
        if (result != 0) {
            undo_one(engine, &undos[done]);
        } else if (!undos[done].extent->kept) {
            undos[done].extent->kept = true;
            extent_hold(undos[done].extent);
        }
    }
    pthread_mutex_unlock(&engine->lock);
    if (undos != few)
        free(undos);
    return result;
}
