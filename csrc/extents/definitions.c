/* definitions.c - what a definition of one extent says: its place, its length and its checksums, as they
 * are or as far as the journal knows them.
 *
 * Never: touches media bytes, or the table (extent.c, which takes definitions in).
 *
 * Invariants
 * - The length and the checksums that are given belong together: they are of one moment.
 * - What is published only grows.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "extents/extents.h"

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
