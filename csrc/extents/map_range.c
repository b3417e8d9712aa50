/* map_range.c - ranges of a content as such: where data and holes are, and sharing a range with
 * another content.
 *
 * Never: touches media bytes, shares bytes of an open extent.
 *
 * Invariants
 * - What is shared lies in closed extents, whose length and checksums are final: whichever content
 *   is published first defines all of an extent, and the other finds it defined.
 * - A twin is clean and not marked: whoever makes one has its content in the same record as its name.
 * - Only one map is locked at a time, also when both are the same: the source is seen as of one
 *   moment, and its extents are held until the target holds them.
 */
#include <errno.h>
#include <stdlib.h>

#include "extents/extents.h"

/* ---------------------------------------------------------------------------------- questions */

int64_t cxl_map_seek(cxl_map *map, uint64_t offset, int hole)
{
    const tree *content = &map->content;
    pthread_rwlock_rdlock(&map->lock);
    uint64_t size = map->size, found = size;
    if (offset < size) {
        tree_position at = tree_find(content, offset);
        const reference *ref = tree_at(content, at);
        if (hole) {
            found = offset;
            while (ref != NULL && ref->file_offset <= found) {
                found = reference_end(ref);
                at = tree_next(content, at);
                ref = tree_at(content, at);
            }
            found = smaller(found, size);
        } else if (ref != NULL) {
            found = larger(offset, ref->file_offset);
        }
    }
    pthread_rwlock_unlock(&map->lock);
    if (offset >= size || (!hole && found >= size))
        return -ENXIO;
    return (int64_t)found;
}

uint64_t cxl_map_mapped(cxl_map *map, uint64_t offset, uint64_t length, uint64_t *refs)
{
    uint64_t end = length > UINT64_MAX - offset ? UINT64_MAX : offset + length, bytes = 0;
    const tree *content = &map->content;
    const reference *ref;
    *refs = 0;
    pthread_rwlock_rdlock(&map->lock);
    for (tree_position at = tree_find(content, offset);
         (ref = tree_at(content, at)) != NULL && ref->file_offset < end;
         at = tree_next(content, at)) {
        bytes += smaller(reference_end(ref), end) - larger(ref->file_offset, offset);
        ++*refs;
    }
    pthread_rwlock_unlock(&map->lock);
    return bytes;
}

uint64_t cxl_map_reach(cxl_map *map, uint64_t offset, uint64_t length, uint64_t refs_max)
{
    uint64_t left = larger(refs_max, 1);
    const tree *content = &map->content;
    pthread_rwlock_rdlock(&map->lock);
    tree_position at = tree_find(content, offset);
    for (; at.leaf < content->leaf_count; at = (tree_position){at.leaf + 1, 0}) {
        uint32_t here = content->leaves[at.leaf]->count - at.slot;
        if (left < here) {
            at.slot += (uint32_t)left;
            break;
        }
        left -= here;
    }
    const reference *ref = tree_at(content, at); /* the first one too many */
    if (ref != NULL)
        length = smaller(length, ref->file_offset - offset);
    pthread_rwlock_unlock(&map->lock);
    return length;
}

/* -------------------------------------------------------------------------------------- share */

/* References of the source as the target will have them, each with a hold. */
typedef struct {
    reference *list;
    uint64_t count;
    uint64_t length;         /* of the range: cut at the source's end of file */
} shared_range;

static void shared_range_drop(cxl_engine *engine, shared_range *range)
{
    for (uint64_t i = 0; i < range->count; i++)
        extent_drop(engine, range->list[i].extent);
    free(range->list);
}

/* -EBUSY when one of the extents is open: it may grow, so that its end and the checksum of its last
 * chunk would change between one record and the next. */
static int hold_closed(cxl_engine *engine, shared_range *range)
{
    int result = 0;
    pthread_mutex_lock(&engine->lock);
    for (uint64_t i = 0; i < range->count && result == 0; i++) {
        if (range->list[i].extent->open)
            result = -EBUSY;
    }
    for (uint64_t i = 0; i < range->count && result == 0; i++)
        extent_hold(range->list[i].extent);
    pthread_mutex_unlock(&engine->lock);
    return result;
}

/* map.lock is held. */
static int collect_shared(const cxl_map *source, uint64_t start, uint64_t target_start,
                          shared_range *range)
{
    const tree *content = &source->content;
    uint64_t end = start + range->length, count = 0;
    tree_position first = tree_find(content, start), at = first;
    const reference *ref;
    for (; (ref = tree_at(content, at)) != NULL && ref->file_offset < end;
         at = tree_next(content, at))
        count++;
    range->list = cxl_allocate(larger(count, 1) * sizeof(*range->list));
    if (range->list == NULL)
        return -ENOMEM;
    for (at = first; range->count < count; at = tree_next(content, at)) {
        ref = tree_at(content, at);
        uint64_t from = larger(ref->file_offset, start);
        range->list[range->count++] = (reference){
            .file_offset = from - start + target_start,
            .length = smaller(reference_end(ref), end) - from,
            .extent = ref->extent,
            .extent_offset = ref->extent_offset + (from - ref->file_offset),
        };
    }
    int result = hold_closed(source->engine, range);
    if (result != 0) {
        free(range->list);
        range->list = NULL;
        range->count = 0;
    }
    return result;
}

static int take_shared(cxl_map *source, uint64_t offset, uint64_t length, const cxl_map *target,
                       uint64_t target_offset, shared_range *range)
{
    int result = 0;
    pthread_rwlock_rdlock(&source->lock);
    if (offset < source->size)
        range->length = smaller(length, source->size - offset);
    if (target_offset > FILE_OFFSET_MAX || range->length > FILE_OFFSET_MAX - target_offset)
        result = -EFBIG;
    else if (source == target && target_offset < offset + range->length &&
             offset < target_offset + range->length)
        result = -EINVAL;
    else if (range->length != 0)
        result = collect_shared(source, offset, target_offset, range);
    pthread_rwlock_unlock(&source->lock);
    return result;
}

static int put_shared(cxl_map *target, uint64_t start, const shared_range *range)
{
    uint64_t end = start + range->length;
    pthread_mutex_lock(&target->writer);
    pthread_rwlock_wrlock(&target->lock);
    int result = marks_reserve(target->engine, &target->dirty);
    if (result == 0)
        result = tree_replace(target->engine, &target->content, start, end, range->list,
                              range->count);
    if (result == 0) {
        marks_add(&target->dirty, start, end);
        target->size = larger(target->size, end);
    }
    pthread_rwlock_unlock(&target->lock);
    pthread_mutex_unlock(&target->writer);
    return result;
}

int64_t cxl_map_share(cxl_map *source, uint64_t offset, uint64_t length, cxl_map *target,
                      uint64_t target_offset)
{
    shared_range range = {.list = NULL};
    if (source->engine != target->engine)
        return -EINVAL;
    int result = take_shared(source, offset, length, target, target_offset, &range);
    if (result == 0 && range.length != 0)
        result = put_shared(target, target_offset, &range);
    shared_range_drop(target->engine, &range);
    return result != 0 ? result : (int64_t)range.length;
}

int cxl_map_twin(cxl_map *source, uint64_t owner, cxl_map **out)
{
    cxl_map *twin;
    int result = cxl_map_new(source->engine, owner, &twin);
    if (result != 0)
        return result;
    int64_t size = cxl_map_share(source, 0, FILE_OFFSET_MAX, twin, 0);
    if (size < 0) {
        cxl_map_free(twin);
        return (int)size;
    }
    pthread_rwlock_wrlock(&twin->lock);
    marks_release(twin->engine, &twin->dirty);
    twin->dirty = (marks){.cut = (uint64_t)size, .taken_size = (uint64_t)size};
    pthread_rwlock_unlock(&twin->lock);
    *out = twin;
    return 0;
}
