/* coverage_batch.c - many references are counted extent by extent, in one pass over the pieces of each.
 *
 * A file of which much was overwritten here and there refers to its extents crosswise: counted in the order of the
 * file, each reference comes to another extent, whose pieces it looks for and moves. So they are sorted first, by
 * extent and place.
 *
 * Never: locks a map (its caller does), decides what a kind means.
 *
 * Invariants
 * - All of them, or none for want of memory; where it must not fail, one after the other without memory.
 * - What is counted in the end is what counting them in any order gives.
 *
 * Cost: 32 bytes for each reference meanwhile; a pass over all of them for each 8 bits by which their extents and
 * places differ (radix sort, least digit first: Knuth, The Art of Computer Programming, volume 3, section 5.2.5).
 */
#include <errno.h>
#include <stdlib.h>

#include "extents/coverage.h"

enum {
    FEW = 16,                    /* references that are not worth sorting */
    MERGE_RANGES_MIN = 4,        /* of one extent; fewer are counted one by one, */
    MERGE_PIECES = 16,           /* as are those of which each would look at more pieces */
    DIGIT_BITS = 8,
    DIGITS = 1 << DIGIT_BITS,
};

typedef enum { BY_EXTENT, BY_START, BY_END } sort_key;

/* ------------------------------------------------------------------------------------ references */

typedef struct {
    const tree *content;         /* NULL: of the list */
    tree_position at;
    uint64_t start;
    uint64_t end;
    const reference *refs;
    uint64_t count;              /* how many are left */
} reference_source;

static const reference *next_reference(reference_source *from)
{
    const reference *ref = from->refs;
    if (from->content == NULL) {
        from->refs++;
    } else {
        ref = tree_at(from->content, from->at);
        from->at = tree_next(from->content, from->at);
    }
    from->count--;
    return ref;
}

static uint64_t take(reference_source *from, cover_range *out, uint64_t room)
{
    uint64_t count = smaller(from->count, room);
    for (uint64_t i = 0; i < count; i++) {
        const reference *ref = next_reference(from);
        uint64_t base = ref->extent_offset - ref->file_offset;
        uint64_t first = larger(ref->file_offset, from->start), last = smaller(reference_end(ref), from->end);
        out[i] = (cover_range){ref->extent, (uint32_t)(base + first), (uint32_t)(base + last)};
    }
    return count;
}

/* How many references there are from one position to another. */
static uint64_t count_between(const tree *content, tree_position from, tree_position to)
{
    uint64_t count = 0;
    for (uint32_t i = from.leaf; i < to.leaf; i++)
        count += content->leaves[i]->count;
    return count + to.slot - from.slot;
}

/* ----------------------------------------------------------------------------------------- sort */

static inline uint64_t key_of(const cover_range *range, sort_key key)
{
    if (key == BY_EXTENT)
        return (uint64_t)(uintptr_t)range->extent;
    return key == BY_START ? range->start : range->end;
}

static void sort_by_digit(const cover_range *from, cover_range *to, uint64_t count, sort_key key, int shift)
{
    uint64_t places[DIGITS] = {0}, before = 0;
    for (uint64_t i = 0; i < count; i++)
        places[(key_of(&from[i], key) >> shift) % DIGITS]++;
    for (int digit = 0; digit < DIGITS; digit++) {
        uint64_t here = places[digit];
        places[digit] = before;
        before += here;
    }
    for (uint64_t i = 0; i < count; i++)
        to[places[(key_of(&from[i], key) >> shift) % DIGITS]++] = from[i];
}

/* Equal ones stay in their order. The sorted ones are in ranges, and what was there in room. */
static void sort_by(cover_range **ranges, cover_range **room, uint64_t count, sort_key key)
{
    uint64_t first = key_of(*ranges, key), differing = 0;
    for (uint64_t i = 1; i < count; i++)
        differing |= key_of(*ranges + i, key) ^ first;
    while (differing != 0) {
        int shift = __builtin_ctzll(differing);
        cover_range *sorted = *room;
        sort_by_digit(*ranges, sorted, count, key, shift);
        differing &= ~((uint64_t)(DIGITS - 1) << shift);
        *room = *ranges;
        *ranges = sorted;
    }
}

/* Ranges that overlap are covered as often as others with the same starts and the same ends, both in order. */
static int sort_ends(cover_range **ranges, cover_range **room, uint64_t count)
{
    bool overlap = false;
    for (uint64_t i = 1; i < count && !overlap; i++)
        overlap = (*ranges)[i].extent == (*ranges)[i - 1].extent && (*ranges)[i].start < (*ranges)[i - 1].end;
    if (!overlap)
        return 0;
    uint32_t *starts = cxl_allocate(count * sizeof(*starts));
    if (starts == NULL)
        return -ENOMEM;
    for (uint64_t i = 0; i < count; i++)
        starts[i] = (*ranges)[i].start;
    sort_by(ranges, room, count, BY_END);
    sort_by(ranges, room, count, BY_EXTENT);
    for (uint64_t i = 0; i < count; i++)
        (*ranges)[i].start = starts[i];
    free(starts);
    return 0;
}

/* --------------------------------------------------------------------------------------- change */

static void undo(cxl_engine *engine, const cover_range *ranges, uint64_t count, cover_task task)
{
    const cover_task back = {task.remove, task.add, -task.holds, true};
    while (count > 0)
        cover_change_ranges(engine, &ranges[--count], 1, back, NULL);
}

static int change_each(cxl_engine *engine, const cover_range *ranges, uint64_t count, cover_task task)
{
    for (uint64_t i = 0; i < count; i++) {
        if (cover_change_ranges(engine, &ranges[i], 1, task, NULL) != 0) {
            undo(engine, ranges, i, task);
            return -ENOMEM;
        }
    }
    return 0;
}

/* How many of sorted ranges are of the first one's extent. */
static uint64_t of_one_extent(const cover_range *ranges, uint64_t count)
{
    uint64_t same = 1;
    while (same < count && ranges[same].extent == ranges->extent)
        same++;
    return same;
}

static int change_sorted(cxl_engine *engine, const cover_range *ranges, uint64_t count, cover_task task)
{
    cover_scratch scratch = {NULL, 0};
    uint64_t same;
    int result = 0;
    for (uint64_t done = 0; done < count && result == 0; done += same) {
        const cover_range *here = &ranges[done];
        same = of_one_extent(here, count - done);
        if (same >= MERGE_RANGES_MIN && cover_piece_count(engine, here->extent) <= same * MERGE_PIECES)
            result = cover_change_ranges(engine, here, same, task, &scratch);
        else
            result = change_each(engine, here, same, task);
        if (result != 0)
            undo(engine, ranges, done, task);
    }
    free(scratch.pieces);
    return result;
}

/* Ranges in any order, with room for as many. */
static int change_ranges(cxl_engine *engine, cover_range *ranges, cover_range *room, uint64_t count, cover_task task)
{
    sort_by(&ranges, &room, count, BY_START);
    sort_by(&ranges, &room, count, BY_EXTENT);
    int result = sort_ends(&ranges, &room, count);
    if (result == 0)
        result = change_sorted(engine, ranges, count, task);
    else if (task.must)
        result = change_each(engine, ranges, count, task);
    return result;
}

void cover_drop_ranges(cxl_engine *engine, cover_range *ranges, cover_range *room, uint64_t count, int kind)
{
    change_ranges(engine, ranges, room, count, (cover_task){COVER_KINDS, kind, -1, true});
}

static int change_many(cxl_engine *engine, reference_source *source, cover_task task)
{
    uint64_t count = source->count;
    cover_range few[FEW], *both = NULL, *ranges, *room;
    int result = 0;
    if (engine->closing)
        return 0;                /* nobody will ask, and extents go with the engine */
    if (count > FEW) {
        both = cxl_allocate(2 * count * sizeof(*both));
        if (both == NULL && !task.must)
            return -ENOMEM;
    }
    if (both == NULL) {
        while (result == 0 && source->count > 0) /* more than a few must succeed */
            result = change_each(engine, few, take(source, few, FEW), task);
        return result;
    }
    ranges = both;
    room = both + count;
    take(source, ranges, count);
    result = change_ranges(engine, ranges, room, count, task);
    free(both);
    return result;
}

int cover_change_list(cxl_engine *engine, const reference *refs, size_t count, cover_task task)
{
    reference_source source = {.end = UINT64_MAX, .refs = refs, .count = count};
    return change_many(engine, &source, task);
}

int cover_change_part(cxl_engine *engine, const tree *content, uint64_t start, uint64_t end, cover_task task)
{
    if (content->refs == 0)
        return 0;
    reference_source source = {content, tree_find(content, start), start, end, NULL, 0};
    tree_position behind = tree_find(content, end);
    const reference *last = tree_at(content, behind);
    source.count = count_between(content, source.at, behind) + (last != NULL && last->file_offset < end);
    return change_many(engine, &source, task);
}
