/* promise.c - room that was promised to a content: how much of it is still wanted, counted as holes are filled.
 *
 * Never: decides whether there is room, or who may take what is left.
 *
 * Invariants
 * - What is wanted of a range are the file blocks that its holes would fill: writing uses it up, a hole that
 *   is made in it brings it back.
 * - The sum over all maps is right whenever no map is being changed.
 *
 * Cost: a change of content looks at the promised ranges that it touches, and at what it replaces.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "extents/extents.h"

static uint64_t blocks_of(uint64_t bytes)
{
    return bytes / BLOCK_BYTES + (bytes % BLOCK_BYTES != 0);
}

static uint64_t holes_in(const tree *content, uint64_t start, uint64_t end)
{
    uint64_t holes = end - start;
    const reference *ref;
    for (tree_position at = tree_find(content, start);
         (ref = tree_at(content, at)) != NULL && ref->file_offset < end; at = tree_next(content, at))
        holes -= smaller(reference_end(ref), end) - larger(ref->file_offset, start);
    return holes;
}

/* The first range that ends behind offset. */
static uint32_t find_range(const tree *content, uint64_t offset)
{
    uint32_t low = 0, high = content->promised_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (content->promised[middle].end > offset)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static void add(cxl_engine *engine, tree *content, uint64_t more, uint64_t more_holes)
{
    content->promised_holes += more_holes;
    content->promised_blocks += more;
    atomic_fetch_add_explicit(&engine->promised_blocks, more, memory_order_relaxed);
}

/* Holes of [start, end) are taken off the ranges (sign -1), or added to them (1). */
static void count(cxl_engine *engine, tree *content, uint64_t start, uint64_t end, int sign)
{
    for (uint32_t i = find_range(content, start);
         i < content->promised_count && content->promised[i].start < end; i++) {
        promised_range *range = &content->promised[i];
        uint64_t holes = holes_in(content, larger(range->start, start), smaller(range->end, end));
        uint64_t before = blocks_of(range->holes);
        uint64_t more_holes = sign < 0 ? 0 - holes : holes;
        range->holes += more_holes;
        add(engine, content, blocks_of(range->holes) - before, more_holes);
    }
}

void promise_before(cxl_engine *engine, tree *content, uint64_t start, uint64_t end)
{
    if (content->promised_count != 0)
        count(engine, content, start, end, -1);
}

void promise_after(cxl_engine *engine, tree *content, uint64_t start, uint64_t end)
{
    if (content->promised_count != 0)
        count(engine, content, start, end, 1);
}

void promise_clear(cxl_engine *engine, tree *content)
{
    add(engine, content, 0 - content->promised_blocks, 0 - content->promised_holes);
    engine_release(engine, content->promised, content->promised_count * sizeof(*content->promised));
    content->promised = NULL;
    content->promised_count = 0;
}

static bool ranges_fit(const cxl_range *ranges, uint64_t count)
{
    uint64_t before = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (ranges[i].start < before || ranges[i].end <= ranges[i].start || ranges[i].end > FILE_OFFSET_MAX)
            return false;
        before = ranges[i].end;
    }
    return count <= UINT32_MAX;
}

int cxl_map_promise(cxl_map *map, const cxl_range *ranges, uint64_t count_wanted)
{
    cxl_engine *engine = map->engine;
    tree *content = &map->content;
    promised_range *fresh = NULL;
    if (!ranges_fit(ranges, count_wanted))
        return -EINVAL;
    if (count_wanted != 0) {
        fresh = engine_allocate(engine, count_wanted * sizeof(*fresh));
        if (fresh == NULL)
            return -ENOMEM;
    }
    pthread_mutex_lock(&map->writer);
    pthread_rwlock_wrlock(&map->lock);
    promise_clear(engine, content);
    content->promised = fresh;
    content->promised_count = (uint32_t)count_wanted;
    for (uint64_t i = 0; i < count_wanted; i++) {
        uint64_t holes = holes_in(content, ranges[i].start, ranges[i].end);
        fresh[i] = (promised_range){ranges[i].start, ranges[i].end, holes};
        add(engine, content, blocks_of(holes), holes);
    }
    pthread_rwlock_unlock(&map->lock);
    pthread_mutex_unlock(&map->writer);
    return 0;
}

uint64_t cxl_map_promised(cxl_map *map, uint64_t offset, uint64_t length, uint64_t *inside)
{
    uint64_t end = length > UINT64_MAX - offset ? UINT64_MAX : offset + length;
    const tree *content = &map->content;
    *inside = 0;
    pthread_rwlock_rdlock(&map->lock);
    for (uint32_t i = find_range(content, offset);
         i < content->promised_count && content->promised[i].start < end && *inside == 0; i++)
        *inside = holes_in(content, larger(content->promised[i].start, offset),
                           smaller(content->promised[i].end, end));
    uint64_t blocks = content->promised_blocks;
    pthread_rwlock_unlock(&map->lock);
    return blocks * BLOCK_BYTES;
}

uint64_t cxl_map_occupied(cxl_map *map, uint64_t *size)
{
    pthread_rwlock_rdlock(&map->lock);
    uint64_t bytes = map->content.bytes + map->content.promised_holes;
    *size = map->size;
    pthread_rwlock_unlock(&map->lock);
    return bytes;
}

uint64_t cxl_engine_promised(cxl_engine *engine)
{
    return atomic_load(&engine->promised_blocks) * BLOCK_BYTES;
}
