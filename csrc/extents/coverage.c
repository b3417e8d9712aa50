/* coverage.c - which bytes of an extent references cover, counted as they come and go: how much is used in
 * each segment and in all, without a look at all references.
 *
 * Never: locks a map (its caller does), touches media bytes, decides what a kind means.
 *
 * Invariants
 * - A byte counts once, however many references cover it: as COVER_KEPT if one of these does, else as
 *   COVER_REPLACED, else as COVER_ASIDE.
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

#include "extents/extents.h"
#include "extents/referrers.h"

enum { SPLITS = 2, WORK = COVER_FEW + SPLITS, HEAP_PIECES_MIN = 6 };

static int kind_of(const cover_piece *piece)
{
    for (int kind = 0; kind < COVER_KINDS; kind++) {
        if (piece->counts[kind] != 0)
            return kind;
    }
    return COVER_KINDS;
}

static bool equal_counts(const cover_piece *a, const cover_piece *b)
{
    return memcmp(a->counts, b->counts, sizeof(a->counts)) == 0;
}

/* The piece that begins at offset, made if there is none; the list has room for it. */
static uint32_t split(cover_piece *list, uint32_t *count, uint32_t offset)
{
    uint32_t low = 0, high = *count;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (list[middle].start <= offset)
            low = middle;
        else
            high = middle;
    }
    if (list[low].start == offset)
        return low;
    memmove(list + low + 2, list + low + 1, (*count - low - 1) * sizeof(*list));
    list[low + 1] = list[low];
    list[low + 1].start = offset;
    ++*count;
    return low + 1;
}

/* No two equal neighbours from piece first - 1 to piece end. */
static void unite(cover_piece *list, uint32_t *count, uint32_t first, uint32_t end)
{
    uint32_t kept = first > 0 ? first : 1, i = kept;
    for (; i < *count && i <= end; i++) {
        if (!equal_counts(&list[i], &list[kept - 1]))
            list[kept++] = list[i];
    }
    if (kept < i)
        memmove(list + kept, list + i, (*count - i) * sizeof(*list));
    *count -= i - kept;
}

/* Counts of [start, end) change by add and remove (a kind, or COVER_KINDS); changed: bytes of each kind. */
static uint32_t change_list(cover_piece *list, uint32_t count, uint32_t start, uint32_t end, int add,
                            int remove, int64_t *changed)
{
    uint32_t first = split(list, &count, start);
    uint32_t last = split(list, &count, end);
    for (uint32_t i = first; i < last; i++) {
        int64_t length = (int64_t)list[i + 1].start - list[i].start;
        int before = kind_of(&list[i]);
        if (add < COVER_KINDS)
            list[i].counts[add]++;
        if (remove < COVER_KINDS)
            list[i].counts[remove]--;
        changed[before] -= length;
        changed[kind_of(&list[i])] += length;
    }
    unite(list, &count, first, last);
    return count;
}

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

static void account(cxl_engine *engine, extent *x, const int64_t *changed)
{
    segment_state *segment = segment_of(engine, x);
    int64_t total = 0;
    for (int kind = 0; kind < COVER_KINDS; kind++) {
        if (changed[kind] == 0)
            continue;
        atomic_fetch_add_explicit(&engine->covered[kind], (uint64_t)changed[kind], memory_order_relaxed);
        x->covered[kind] += (uint64_t)changed[kind];
        total += changed[kind];
    }
    if (total == 0)
        return;
    atomic_fetch_add_explicit(&segment->covered, (uint64_t)total, memory_order_relaxed);
    if (x->leased != 0)
        atomic_fetch_add_explicit(&segment->covered_open, (uint64_t)total, memory_order_relaxed);
}

/* The stripe is held. Few pieces are changed on the stack, and memory is wanted only for more. */
static bool change_locked(cxl_engine *engine, extent *x, uint32_t start, uint32_t end, int add, int remove,
                          int64_t *changed)
{
    cover_piece work[WORK];
    if (x->cover == NULL) {
        memcpy(work, x->cover_few, sizeof(x->cover_few));
        uint32_t count = change_list(work, x->cover_count, start, end, add, remove, changed);
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
    x->cover_count = change_list(x->cover, x->cover_count, start, end, add, remove, changed);
    return true;
}

static void stay(cxl_engine *engine, extent *x)
{
    x->cover_stays = true;
    atomic_fetch_add_explicit(&engine->uncounted, 1, memory_order_relaxed);
}

static int change(cxl_engine *engine, extent *x, uint64_t start, uint64_t length, int add, int remove,
                  bool must)
{
    int64_t changed[COVER_KINDS + 1] = {0};
    int result = 0;
    if (engine->closing)
        return 0;                /* nobody will ask */
    pthread_mutex_lock(stripe_of(engine, x));
    if (!x->cover_stays) {
        if (change_locked(engine, x, (uint32_t)start, (uint32_t)(start + length), add, remove, changed))
            account(engine, x, changed);
        else if (must)
            stay(engine, x);
        else
            result = -ENOMEM;
    }
    if (add == COVER_KINDS)
        referrers_gone(engine, x);
    pthread_mutex_unlock(stripe_of(engine, x));
    return result;
}

bool cover_run(const extent *x, uint64_t start, uint64_t end, uint64_t *first, uint64_t *last)
{
    const cover_piece *list = x->cover != NULL ? x->cover : x->cover_few;
    uint32_t low = 0, high = x->cover_count;
    *first = start;
    *last = end;
    if (x->cover_stays)
        return start < end;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (list[middle].start <= start)
            low = middle;
        else
            high = middle;
    }
    for (; low < x->cover_count && kind_of(&list[low]) == COVER_KINDS; low++)
        ;
    if (low == x->cover_count || list[low].start >= end)
        return false;
    *first = larger(start, list[low].start);
    for (; low < x->cover_count && kind_of(&list[low]) != COVER_KINDS; low++)
        ;
    *last = low == x->cover_count ? end : smaller(end, list[low].start);
    return *first < *last;
}

/* ------------------------------------------------------------------------------------ references */

int cover_add(cxl_engine *engine, const reference *ref, int kind, bool must)
{
    return change(engine, ref->extent, ref->extent_offset, ref->length, kind, COVER_KINDS, must);
}

void cover_remove(cxl_engine *engine, const reference *ref, int kind)
{
    change(engine, ref->extent, ref->extent_offset, ref->length, COVER_KINDS, kind, true);
}

void cover_convert(cxl_engine *engine, const reference *ref, int from, int to)
{
    change(engine, ref->extent, ref->extent_offset, ref->length, to, from, true);
}

/* The part of a reference that lies in [start, end) of the file. */
static reference clipped(const reference *ref, uint64_t start, uint64_t end)
{
    uint64_t first = larger(ref->file_offset, start), last = smaller(reference_end(ref), end);
    return (reference){first, last - first, ref->extent, ref->extent_offset + (first - ref->file_offset)};
}

/* What was taken off comes back; who refers to it may have been forgotten. */
static void restore(cxl_engine *engine, const tree *content, const reference *part)
{
    cover_add(engine, part, content->kind, true);
    referrers_add(engine, part, content->owner);
}

/* Take what stands in [start, end) off the counts, up to the reference at stop; how far it came. */
static int remove_range(cxl_engine *engine, const tree *content, uint64_t start, uint64_t end, bool must)
{
    const reference *ref;
    tree_position at = tree_find(content, start);
    for (; (ref = tree_at(content, at)) != NULL && ref->file_offset < end; at = tree_next(content, at)) {
        reference part = clipped(ref, start, end);
        if (change(engine, part.extent, part.extent_offset, part.length, COVER_KINDS, content->kind, must) != 0) {
            /* What was taken off has room to come back. */
            while (tree_step_back(content, &at)) {
                ref = tree_at(content, at);
                if (reference_end(ref) <= start)
                    break;
                part = clipped(ref, start, end);
                restore(engine, content, &part);
            }
            return -ENOMEM;
        }
    }
    return 0;
}

int cover_replace(cxl_engine *engine, const tree *content, uint64_t start, uint64_t end, const reference *with,
                  size_t count, bool must)
{
    int result = 0;
    size_t done = 0;
    while (done < count && result == 0) {
        result = cover_add(engine, &with[done], content->kind, must);
        if (result == 0)
            referrers_add(engine, &with[done++], content->owner);
    }
    if (result == 0)
        result = remove_range(engine, content, start, end, must);
    if (result != 0) {
        while (done > 0)
            cover_remove(engine, &with[--done], content->kind);
    }
    return result;
}

void cover_restore(cxl_engine *engine, const tree *content, uint64_t start, uint64_t end, const reference *with,
                   size_t count)
{
    const reference *ref;
    for (tree_position at = tree_find(content, start);
         (ref = tree_at(content, at)) != NULL && ref->file_offset < end; at = tree_next(content, at)) {
        reference part = clipped(ref, start, end);
        restore(engine, content, &part);
    }
    for (size_t i = 0; i < count; i++)
        cover_remove(engine, &with[i], content->kind);
}

void cover_set_kind(cxl_engine *engine, tree *content, int kind)
{
    const reference *ref;
    if (content->kind == kind)
        return;
    for (tree_position at = {0, 0}; (ref = tree_at(content, at)) != NULL; at = tree_next(content, at))
        cover_convert(engine, ref, content->kind, kind);
    content->kind = (uint8_t)kind;
}

/* --------------------------------------------------------------------------------------- extents */

void cover_init(extent *x)
{
    x->cover_count = 1;
}

void cover_destroy(cxl_engine *engine, extent *x)
{
    int64_t rest[COVER_KINDS + 1] = {0};
    for (int kind = 0; kind < COVER_KINDS; kind++)
        rest[kind] = -(int64_t)x->covered[kind];
    account(engine, x, rest);
    engine_release(engine, x->cover, x->cover_capacity * sizeof(*x->cover));
}

void cover_open(cxl_engine *engine, extent *x, uint64_t capacity)
{
    pthread_mutex_lock(stripe_of(engine, x));
    segment_state *segment = segment_of(engine, x);
    atomic_fetch_add_explicit(&segment->leased, capacity, memory_order_relaxed);
    atomic_fetch_add_explicit(&engine->leased, capacity, memory_order_relaxed);
    x->leased = capacity;
    pthread_mutex_unlock(stripe_of(engine, x));
}

void cover_close(cxl_engine *engine, extent *x)
{
    pthread_mutex_lock(stripe_of(engine, x));
    segment_state *segment = segment_of(engine, x);
    uint64_t covered = x->covered[COVER_KEPT] + x->covered[COVER_REPLACED] + x->covered[COVER_ASIDE];
    atomic_fetch_sub_explicit(&segment->leased, x->leased, memory_order_relaxed);
    atomic_fetch_sub_explicit(&engine->leased, x->leased, memory_order_relaxed);
    atomic_fetch_sub_explicit(&segment->covered_open, covered, memory_order_relaxed);
    x->leased = 0;
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
    for (uint64_t i = 0; i < segment_count; i++) {
        segment_state *segment = &engine->segments[i];
        used[i] = atomic_load(&segment->covered) + atomic_load(&segment->leased) -
                  atomic_load(&segment->covered_open);
    }
    return 0;
}
