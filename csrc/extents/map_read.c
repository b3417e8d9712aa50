/* map_read.c - file data as it is read: where a range lies, and its bytes.
 *
 * Never: changes a map, holds map.lock while data is copied.
 *
 * Invariants
 * - A read holds the extents it reads from, so that their space is not used again meanwhile.
 */
#include <string.h>

#include "extents/sums.h"

/* ------------------------------------------------------------------------------------- lookup */

static extent_range range_of(const reference *ref, uint64_t start, uint64_t end)
{
    return (extent_range){
        .extent = ref->extent,
        .extent_offset = ref->extent_offset + (start - ref->file_offset),
        .length = end - start,
        .reference_start = ref->extent_offset,
        .reference_end = ref->extent_offset + ref->length,
        .file_base = ref->file_offset - ref->extent_offset,
    };
}

static uint64_t range_start(const extent_range *range)
{
    return range->file_base + range->extent_offset;
}

/* The next ranges of [offset, *end), held; *covered: how far they, and the holes between, reach.
 * *end: not behind the end of the file, which may have come nearer. */
static unsigned look_up(cxl_map *map, uint64_t offset, uint64_t *end_wanted, extent_range *ranges,
                        uint64_t *covered)
{
    unsigned count = 0;
    pthread_rwlock_rdlock(&map->lock);
    uint64_t end = smaller(*end_wanted, larger(map->size, offset));
    *end_wanted = *covered = end;
    tree_position at = tree_find(&map->content, offset);
    reference *ref;
    while ((ref = tree_at(&map->content, at)) != NULL && ref->file_offset < end) {
        if (count == READ_BATCH) {
            *covered = ref->file_offset;
            break;
        }
        extent_hold(ref->extent);
        ranges[count++] = range_of(ref, larger(ref->file_offset, offset),
                                   smaller(reference_end(ref), end));
        at = tree_next(&map->content, at);
    }
    pthread_rwlock_unlock(&map->lock);
    return count;
}

/* Zeros between the ranges, up to covered; where each of them goes. */
static void lay_out(const extent_range *ranges, unsigned count, uint64_t offset, uint64_t covered,
                    uint8_t *target, uint8_t **targets)
{
    uint64_t position = offset;
    for (unsigned i = 0; i < count; i++) {
        uint64_t start = range_start(&ranges[i]);
        memset(target + (position - offset), 0, start - position);
        targets[i] = target + (start - offset);
        position = start + ranges[i].length;
    }
    memset(target + (position - offset), 0, covered - position);
}

int64_t map_deliver(cxl_map *map, uint64_t offset, uint8_t *target, uint64_t length, bool verify,
                    cxl_fault *fault)
{
    extent_range ranges[READ_BATCH];
    uint8_t *targets[READ_BATCH];
    uint64_t first = offset, end = offset + length, covered;
    int result = 0;
    while (offset < end && result == 0) {
        unsigned count = look_up(map, offset, &end, ranges, &covered);
        lay_out(ranges, count, offset, covered, target, targets);
        result = extent_read_each(map->engine, ranges, targets, count, verify, fault);
        for (unsigned i = 0; i < count; i++)
            extent_drop(map->engine, ranges[i].extent);
        target += covered - offset;
        offset = covered;
    }
    return result != 0 ? result : (int64_t)(offset - first);
}

/* ----------------------------------------------------------------------------------- checksum */

int64_t cxl_map_crc(cxl_map *map, uint64_t offset, uint64_t work, uint32_t *crc, cxl_fault *fault)
{
    extent_range ranges[READ_BATCH];
    uint64_t first = offset, end = FILE_OFFSET_MAX, covered = offset;
    int result = 0;
    while (work != 0 && result == 0 && offset == covered) {
        unsigned count = look_up(map, offset, &end, ranges, &covered);
        if (offset == covered)
            break; /* the end of the file */
        for (unsigned i = 0; i < count; i++) {
            uint64_t hole = range_start(&ranges[i]) - offset, done = 0;
            if (work != 0 && result == 0) {
                *crc = cxl_crc32c_zeros(*crc, hole);
                result = extent_sum(map->engine, &ranges[i], crc, &work, &done, fault);
                offset += hole + done;
                if (done < ranges[i].length)
                    work = 0;
            }
            extent_drop(map->engine, ranges[i].extent);
        }
        if (work != 0 && result == 0) {
            *crc = cxl_crc32c_zeros(*crc, covered - offset);
            offset = covered;
        }
    }
    return result != 0 ? result : (int64_t)(offset - first);
}

/* --------------------------------------------------------------------------------------- read */

uint64_t map_clip_to_size(cxl_map *map, uint64_t offset, uint64_t length)
{
    uint64_t size = cxl_map_size(map);
    return offset >= size ? 0 : smaller(length, size - offset);
}

int64_t cxl_map_read(cxl_map *map, uint64_t offset, void *target, uint64_t length, int verify,
                     cxl_fault *fault)
{
    length = map_clip_to_size(map, offset, length);
    if (length == 0)
        return 0;
    int64_t result = map_deliver(map, offset, target, length, verify != 0, fault);
    if (result > 0)
        atomic_fetch_add_explicit(&map->engine->bytes_read, (uint64_t)result, memory_order_relaxed);
    return result;
}

uint64_t map_hold_extent(cxl_map *map, uint64_t offset, uint64_t length, extent_range *held)
{
    bool found = false;
    length = map_clip_to_size(map, offset, length);
    if (length == 0)
        return 0;
    pthread_rwlock_rdlock(&map->lock);
    reference *ref = tree_at(&map->content, tree_find(&map->content, offset));
    if (ref != NULL && ref->file_offset <= offset && reference_end(ref) - offset >= length) {
        *held = range_of(ref, offset, offset + length);
        found = held->extent != NULL;
        if (found)
            extent_hold(held->extent);
    }
    pthread_rwlock_unlock(&map->lock);
    return found ? length : 0;
}

int64_t cxl_map_peek(cxl_map *map, uint64_t offset, uint64_t length, int verify,
                     const void **address, cxl_fault *fault)
{
    cxl_engine *engine = map->engine;
    extent_range range;
    length = map_hold_extent(map, offset, length, &range);
    if (length == 0)
        return 0;
    int result = verify ? extent_read(engine, &range, NULL, true, fault) : 0;
    *address = range_address(engine, &range);
    extent_drop(engine, range.extent);
    if (result != 0)
        return result;
    atomic_fetch_add_explicit(&engine->bytes_read, length, memory_order_relaxed);
    return (int64_t)length;
}
