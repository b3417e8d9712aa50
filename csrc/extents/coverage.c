/* coverage.c - which bytes of an extent references cover, counted as they come and go: how much is used in
 * each segment and in all, without a look at all references.
 *
 * Never: locks a map (its caller does), touches media bytes, decides what a kind means.
 *
 * Invariants
 * - A byte counts once, however many references cover it: as the first kind of these.
 * - A closed extent that history alone refers to (COVER_HELD, COVER_PAST) is not published, as if no record had defined
 *   it: an image leaves it out, and the delta that names it again defines it again, with the same number.
 * - The pieces of an extent are sorted, begin at 0, neighbours differ, and the last one covers nothing.
 * - A change takes its memory first. Where it must not fail and there is none, the counts of that extent
 *   stay as they are until it is gone: more counts as used than is, never less than before.
 *
 * Cost: a binary search and a move of the pieces of one extent, of which there are few, and at most as many
 * as file blocks fit into it.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "extents/coverage.h"
#include "extents/referrers.h"

enum { SPLITS = 2, WORK = COVER_FEW + SPLITS, HEAP_PIECES_MIN = 6 };

/* Room for so many pieces in memory of their own. */
static bool grow(cxl_engine *engine, extent *x, uint32_t wanted)
{
    if (x->cover != NULL && wanted <= x->cover_capacity)
        return true;
    uint32_t capacity = (uint32_t)larger(larger(wanted, HEAP_PIECES_MIN), (uint64_t)x->cover_capacity * 2);
    cover_piece *fresh = engine_allocate(engine, capacity * sizeof(*fresh));
    if (fresh == NULL)
        return false;
    memcpy(fresh, x->cover != NULL ? x->cover : x->cover_few, x->cover_count * sizeof(*fresh));
    engine_release(engine, x->cover, x->cover_capacity * sizeof(*x->cover));
    x->cover = fresh;
    x->cover_capacity = capacity;
    return true;
}

static void use_segment(cxl_engine *engine, extent *x, uint64_t more)
{
    uint64_t before = atomic_fetch_add_explicit(&segment_of(engine, x)->used, more, memory_order_relaxed);
    if (more != 0 && before == 0)
        atomic_fetch_add_explicit(&engine->used_segments, 1, memory_order_relaxed);
    else if (more != 0 && before + more == 0)
        atomic_fetch_sub_explicit(&engine->used_segments, 1, memory_order_relaxed);
}

static uint64_t covered_below(const extent *x, int kind)
{
    uint64_t bytes = 0;
    while (kind > 0)
        bytes += x->covered[--kind];
    return bytes;
}

/* What refers to x has changed; the stripe is held, or nothing has x any more. */
static void note_past(cxl_engine *engine, extent *x)
{
    bool past = !x->cover_stays && x->leased == 0 && covered_below(x, COVER_HELD) == 0 &&
                covered_below(x, COVER_KINDS) != 0;
    if (past == (x->past_chunks != 0))
        return;
    if (past) {
        x->past_chunks = (uint32_t)chunks_of(engine, x->length);
        x->published = 0;
        atomic_fetch_add_explicit(&engine->past_extents, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&engine->past_crcs, x->past_chunks, memory_order_relaxed);
    } else {
        atomic_fetch_sub_explicit(&engine->past_extents, 1, memory_order_relaxed);
        atomic_fetch_sub_explicit(&engine->past_crcs, x->past_chunks, memory_order_relaxed);
        x->past_chunks = 0;
    }
}

static void account(cxl_engine *engine, extent *x, const cover_change *change)
{
    int64_t used = 0;
    for (int kind = 0; kind < COVER_KINDS; kind++) {
        if (change->bytes[kind] == 0)
            continue;
        atomic_fetch_add_explicit(&engine->covered[kind], (uint64_t)change->bytes[kind], memory_order_relaxed);
        x->covered[kind] += (uint64_t)change->bytes[kind];
        used += kind < COVER_PAST ? change->bytes[kind] : 0;
    }
    atomic_fetch_add_explicit(&engine->pieces_visited, change->pieces, memory_order_relaxed);
    if (x->leased == 0)
        use_segment(engine, x, (uint64_t)used);
    note_past(engine, x);
}

/* The stripe is held. Few pieces are changed on the stack, and memory is wanted only for more. */
static bool change_locked(cxl_engine *engine, extent *x, uint32_t start, uint32_t end, cover_change *change)
{
    cover_piece work[WORK];
    if (x->cover == NULL) {
        memcpy(work, x->cover_few, sizeof(x->cover_few));
        uint32_t count = pieces_change(work, x->cover_count, start, end, change);
        if (count <= COVER_FEW) {
            memcpy(x->cover_few, work, count * sizeof(*work));
            x->cover_count = count;
            return true;
        }
        if (!grow(engine, x, count + SPLITS))
            return false;
        memcpy(x->cover, work, count * sizeof(*work));
        x->cover_count = count;
        return true;
    }
    if (!grow(engine, x, x->cover_count + SPLITS))
        return false;
    x->cover_count = pieces_change(x->cover, x->cover_count, start, end, change);
    return true;
}

/* The same for many ranges. */
static bool merge_locked(cxl_engine *engine, extent *x, const cover_range *ranges, uint64_t count,
                         cover_scratch *scratch, cover_change *change)
{
    uint64_t most = x->cover_count + 2 * count;
    if (most > UINT32_MAX)
        return false;
    if (scratch->capacity < most) {
        cover_piece *larger_room = cxl_reallocate(scratch->pieces, most * sizeof(*larger_room));
        if (larger_room == NULL)
            return false;
        scratch->pieces = larger_room;
        scratch->capacity = most;
    }
    const cover_piece *list = x->cover != NULL ? x->cover : x->cover_few;
    uint32_t made = pieces_merge(list, x->cover_count, ranges, count, scratch->pieces, change);
    if (x->cover == NULL && made <= COVER_FEW) {
        memcpy(x->cover_few, scratch->pieces, made * sizeof(*list));
    } else {
        if (!grow(engine, x, made))
            return false;
        memcpy(x->cover, scratch->pieces, made * sizeof(*list));
    }
    x->cover_count = made;
    return true;
}

static void stay(cxl_engine *engine, extent *x)
{
    x->cover_stays = true;
    note_past(engine, x);
    atomic_fetch_add_explicit(&engine->uncounted, 1, memory_order_relaxed);
}

/* One after the other, as far as there is memory. */
static bool each_locked(cxl_engine *engine, extent *x, const cover_range *ranges, uint64_t count, cover_change *change)
{
    for (uint64_t i = 0; i < count; i++) {
        cover_change after = *change;
        if (!change_locked(engine, x, ranges[i].start, ranges[i].end, &after))
            return false;
        *change = after;
    }
    return true;
}

/* The stripe is held. Dropping leaves one hold, which is dropped without it. */
static void change_holds(extent *x, uint64_t count, int holds)
{
    if (holds > 0)
        atomic_fetch_add_explicit(&x->holds, count, memory_order_relaxed);
    else if (holds < 0 && count > 1)
        atomic_fetch_sub_explicit(&x->holds, count - 1, memory_order_release);
}

int cover_change_ranges(cxl_engine *engine, const cover_range *ranges, uint64_t count, cover_task task,
                        cover_scratch *scratch)
{
    extent *x = ranges->extent;
    cover_change change = {.add = task.add, .remove = task.remove};
    if (task.remove < COVER_HELD)
        snapshot_keep(engine, x); /* it may not be published any more */
    pthread_mutex_lock(stripe_of(engine, x));
    bool done = x->cover_stays || (count > 1 && merge_locked(engine, x, ranges, count, scratch, &change));
    if (!done && (count == 1 || task.must)) {
        change = (cover_change){.add = task.add, .remove = task.remove};
        done = each_locked(engine, x, ranges, count, &change);
    }
    if (done || task.must) {
        account(engine, x, &change);
        change_holds(x, count, task.holds);
    }
    if (!done && task.must)
        stay(engine, x);
    if (task.add == COVER_KINDS)
        referrers_gone(engine, x);
    pthread_mutex_unlock(stripe_of(engine, x));
    if (!done && !task.must)
        return -ENOMEM;
    if (task.holds < 0)
        extent_drop(engine, x);
    return 0;
}

uint32_t cover_piece_count(cxl_engine *engine, const extent *x)
{
    pthread_mutex_lock(stripe_of(engine, x));
    uint32_t count = x->cover_count;
    pthread_mutex_unlock(stripe_of(engine, x));
    return count;
}

/* ------------------------------------------------------------------------------------ references */

/* Who refers to [start, end) may have been forgotten meanwhile. */
static void note_again(cxl_engine *engine, const tree *content, uint64_t start, uint64_t end)
{
    const reference *ref;
    for (tree_position at = tree_find(content, start);
         (ref = tree_at(content, at)) != NULL && ref->file_offset < end; at = tree_next(content, at)) {
        uint64_t first = larger(ref->file_offset, start), last = smaller(reference_end(ref), end);
        const reference part = {first, last - first, ref->extent, ref->extent_offset + (first - ref->file_offset)};
        referrers_add(engine, &part, content->owner);
    }
}

int cover_replace(cxl_engine *engine, const tree *content, uint64_t start, uint64_t end, const reference *with,
                  size_t count, bool must)
{
    int result = cover_change_list(engine, with, count, (cover_task){content->kind, COVER_KINDS, 0, must});
    if (result != 0)
        return result;
    for (size_t i = 0; i < count; i++)
        referrers_add(engine, &with[i], content->owner);
    result = cover_change_part(engine, content, start, end, (cover_task){COVER_KINDS, content->kind, 0, must});
    if (result != 0) {
        note_again(engine, content, start, end);
        cover_change_list(engine, with, count, (cover_task){COVER_KINDS, content->kind, 0, true});
    }
    return result;
}

void cover_restore(cxl_engine *engine, const tree *content, uint64_t start, uint64_t end, const reference *with,
                   size_t count)
{
    cover_change_part(engine, content, start, end, (cover_task){content->kind, COVER_KINDS, 0, true});
    note_again(engine, content, start, end);
    cover_change_list(engine, with, count, (cover_task){COVER_KINDS, content->kind, 0, true});
}

static void visited(cxl_engine *engine, const tree *content)
{
    atomic_fetch_add_explicit(&engine->refs_visited, content->refs, memory_order_relaxed);
}

int cover_hold_all(cxl_engine *engine, const tree *content, int kind)
{
    visited(engine, content);
    return cover_change_part(engine, content, 0, UINT64_MAX, (cover_task){kind, COVER_KINDS, 1, false});
}

void cover_drop_all(cxl_engine *engine, const tree *content)
{
    visited(engine, content);
    cover_change_part(engine, content, 0, UINT64_MAX, (cover_task){COVER_KINDS, content->kind, -1, true});
}

void cover_set_kind(cxl_engine *engine, tree *content, int kind)
{
    if (content->kind == kind)
        return;
    visited(engine, content);
    cover_change_part(engine, content, 0, UINT64_MAX, (cover_task){kind, content->kind, 0, true});
    cover_refs(engine, content, -(int64_t)content->refs);
    content->kind = (uint8_t)kind;
    cover_refs(engine, content, (int64_t)content->refs);
}

void cover_refs(cxl_engine *engine, const tree *content, int64_t more)
{
    atomic_fetch_add(&engine->refs, (uint64_t)more);
    if (content->kind >= COVER_HELD)
        atomic_fetch_add_explicit(&engine->past_refs, (uint64_t)more, memory_order_relaxed);
}

/* --------------------------------------------------------------------------------------- extents */

void cover_init(extent *x)
{
    x->cover_count = 1;
}

void cover_destroy(cxl_engine *engine, extent *x)
{
    cover_change rest = {.pieces = 0};
    for (int kind = 0; kind < COVER_KINDS; kind++)
        rest.bytes[kind] = -(int64_t)x->covered[kind];
    account(engine, x, &rest);
    engine_release(engine, x->cover, x->cover_capacity * sizeof(*x->cover));
}

void cover_open(cxl_engine *engine, extent *x, uint64_t capacity)
{
    pthread_mutex_lock(stripe_of(engine, x));
    use_segment(engine, x, capacity - covered_below(x, COVER_PAST));
    atomic_fetch_add_explicit(&engine->leased, capacity, memory_order_relaxed);
    x->leased = capacity;
    pthread_mutex_unlock(stripe_of(engine, x));
}

void cover_close(cxl_engine *engine, extent *x)
{
    snapshot_keep(engine, x);
    pthread_mutex_lock(stripe_of(engine, x));
    use_segment(engine, x, covered_below(x, COVER_PAST) - x->leased);
    atomic_fetch_sub_explicit(&engine->leased, x->leased, memory_order_relaxed);
    x->leased = 0;
    note_past(engine, x);
    pthread_mutex_unlock(stripe_of(engine, x));
}

int cxl_map_count_as(cxl_map *map, int kind)
{
    if (kind < 0 || kind >= COVER_KINDS)
        return -EINVAL;
    pthread_mutex_lock(&map->writer);
    pthread_rwlock_wrlock(&map->lock);
    cover_set_kind(map->engine, &map->content, kind);
    pthread_rwlock_unlock(&map->lock);
    pthread_mutex_unlock(&map->writer);
    return 0;
}

int cxl_engine_usage(cxl_engine *engine, uint64_t *used, uint64_t segment_count)
{
    if (segment_count != engine->segment_count)
        return -EINVAL;
    for (uint64_t i = 0; i < segment_count; i++)
        used[i] = atomic_load(&engine->segments[i].used);
    return 0;
}
