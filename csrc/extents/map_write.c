/* map_write.c - file data as it is changed: a write is planned, copied and shown; a hole is punched.
 *
 * Never: writes below an extent's length, holds map.lock while data is copied.
 *
 * Invariants
 * - A write is reserved (room behind the open extent's end, which nobody can reach), copied and
 *   fenced, and only then published: reference, length, checksum, size and mark change together, or
 *   not at all.
 */
#include <errno.h>
#include <string.h>

#include "extents/append.h"

/* -------------------------------------------------------------------------------------- write */

/* A write as it will be done: [start, end) of the file moves behind the open extent's end. */
typedef struct {
    uint64_t start;
    uint64_t end;
    uint64_t padding;
    const void *bytes;
} write_plan;

/* Whether offset is where the open extent's last bytes lie in the file. */
static bool continues_lease(const cxl_map *map, uint64_t offset)
{
    const reference *ref = tree_ending_at(&map->content, offset);
    return ref != NULL && ref->extent == map->lease &&
           ref->extent_offset + ref->length == map->lease->length;
}

/* From the first to the last mapped byte of the file blocks that [*start, *end) touches. */
static void widen_to_blocks(const cxl_map *map, uint64_t *start, uint64_t *end)
{
    uint64_t block_start = *start / BLOCK_BYTES * BLOCK_BYTES;
    uint64_t block_end = (*end + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
    const tree *content = &map->content;
    const reference *ref = tree_at(content, tree_find(content, block_start));
    if (ref != NULL && ref->file_offset < *start)
        *start = larger(ref->file_offset, block_start);
    block_end = smaller(block_end, map->size);
    if (block_end <= *end)
        return;
    tree_position at = tree_find(content, block_end - 1);
    ref = tree_at(content, at);
    if (ref == NULL || ref->file_offset >= block_end) {
        if (!tree_step_back(content, &at))
            return;
        ref = tree_at(content, at);
    }
    *end = larger(*end, smaller(reference_end(ref), block_end));
}

/* Old bytes around the new ones, in a buffer of two blocks. map.writer is held, so that nothing is cut;
 * between the end of the file and the new bytes are zeros. */
static int carry(cxl_map *map, uint64_t offset, const void *source, uint64_t length,
                 uint8_t *buffer, const write_plan *plan, cxl_fault *fault)
{
    uint64_t before = offset - plan->start;
    uint64_t end = offset + length;
    int64_t result = 0;
    if (before != 0)
        result = map_deliver(map, plan->start, buffer, before, true, fault);
    if (result >= 0)
        memset(buffer + result, 0, before - (uint64_t)result);
    memcpy(buffer + before, source, length);
    if (result >= 0 && end < plan->end)
        result = map_deliver(map, end, buffer + before + length, plan->end - end, true, fault);
    return result < 0 ? (int)result : 0;
}

int map_show(cxl_map *map, const append_state *state, const reference *fresh)
{
    cxl_engine *engine = map->engine;
    uint64_t start = fresh->file_offset, end = reference_end(fresh);
    pthread_rwlock_wrlock(&map->lock);
    int result = marks_reserve(engine, &map->dirty);
    if (result == 0)
        result = tree_replace(engine, &map->content, start, end, fresh, 1);
    if (result == 0) {
        append_commit(engine, fresh->extent, state);
        marks_add(&map->dirty, start, end);
        map->size = larger(map->size, end);
    }
    pthread_rwlock_unlock(&map->lock);
    return result;
}

/* Reserve memory, copy, fence, and show the result. */
static int write_planned(cxl_map *map, const write_plan *plan, cxl_fault *fault)
{
    cxl_engine *engine = map->engine;
    extent *x = map->lease;
    append_state state;
    uint64_t length = plan->end - plan->start;
    int result = append_begin(engine, x, plan->padding, &state, fault);
    if (result == 0)
        result = append_bytes(engine, x, &state, plan->bytes, length, fault);
    if (result == 0) {
        int fenced = append_fence(engine);
        if (fenced != 0)
            *fault = (cxl_fault){
                .error = fenced, .extent_id = x->id, .length = length,
                .media_offset = x->media_offset + state.start,
            };
        result = fenced == -EREMOTEIO ? -EIO : fenced;
    }
    fault->file_offset = plan->start;
    if (result != 0)
        return result;
    reference fresh = {plan->start, length, x, state.start};
    return map_show(map, &state, &fresh);
}

/* The next lease takes over; false: there is none. */
static bool change_lease(cxl_map *map)
{
    uint64_t media_offset, length;
    if (map->next_lease == NULL)
        return false;
    extent_close(map->engine, map->lease, &media_offset, &length);
    map->lease = map->next_lease;
    map->next_lease = NULL;
    return true;
}

static int64_t write_locked(cxl_map *map, uint64_t offset, const void *source, uint64_t length,
                            uint64_t *needed, cxl_fault *fault)
{
    uint8_t buffer[2 * BLOCK_BYTES];
    write_plan plan = {.start = offset, .end = offset + length, .bytes = source};
    extent *x = map->lease;
    uint64_t padding = x == NULL ? 0 : append_padding(map->engine, x);
    bool continuing = x != NULL && padding == 0 && continues_lease(map, offset);
    if (!continuing && length < BLOCK_BYTES)
        widen_to_blocks(map, &plan.start, &plan.end);
    uint64_t all = plan.end - plan.start, taken = length;
    uint64_t room = x == NULL ? 0 : x->capacity - x->length - padding;
    /* What is carried along is written as a whole. Else take what fits, but no shred that the end
     * of an almost used up lease would make. */
    bool carried = all != length;
    uint64_t least = carried ? all : continuing ? 1 : smaller(all, BLOCK_BYTES);
    if (room < least) {
        *needed = all;
        return change_lease(map) ? write_locked(map, offset, source, length, needed, fault) : -EAGAIN;
    }
    if (carried) {
        int result = carry(map, offset, source, length, buffer, &plan, fault);
        if (result != 0)
            return result;
        plan.bytes = buffer;
    } else {
        taken = smaller(length, room);
        plan.end = plan.start + taken;
    }
    plan.padding = padding;
    int result = write_planned(map, &plan, fault);
    if (result != 0)
        return result;
    atomic_fetch_add_explicit(&map->engine->bytes_written, taken, memory_order_relaxed);
    return (int64_t)taken;
}

int64_t cxl_map_write(cxl_map *map, uint64_t offset, const void *source, uint64_t length,
                      uint64_t *needed, cxl_fault *fault)
{
    fault->error = 0;
    *needed = 0;
    if (offset > FILE_OFFSET_MAX || length > FILE_OFFSET_MAX - offset)
        return -EFBIG;
    if (length == 0)
        return 0;
    pthread_mutex_lock(&map->writer);
    int64_t result = write_locked(map, offset, source, length, needed, fault);
    pthread_mutex_unlock(&map->writer);
    return result;
}

/* -------------------------------------------------------------------------------------- punch */

int cxl_map_punch(cxl_map *map, uint64_t offset, uint64_t length)
{
    int result = 0;
    pthread_mutex_lock(&map->writer);
    length = map_clip_to_size(map, offset, length);
    if (length != 0) {
        pthread_rwlock_wrlock(&map->lock);
        result = marks_reserve(map->engine, &map->dirty);
        if (result == 0)
            result = tree_replace(map->engine, &map->content, offset, offset + length, NULL, 0);
        if (result == 0)
            marks_add(&map->dirty, offset, offset + length);
        pthread_rwlock_unlock(&map->lock);
    }
    pthread_mutex_unlock(&map->writer);
    return result;
}
