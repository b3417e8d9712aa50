/* discard.c - the end of many references at once, in short steps: a large file is removed, replaced or cut.
 *
 * Taking a reference off what its extent counts as covered takes 40 ns, and so does the hold that it has: for
 * 10^6 of them everybody would wait. So their leaves are taken off the content at once, which is short, and wait
 * here. Then they are brought into the order of their extents (in file order each would come to another extent),
 * and dropped extent by extent.
 *
 * Never: decides what is many, or when a step is due.
 *
 * Invariants
 * - Until it is dropped a reference counts as covering its bytes and holds its extent: more counts as used than
 *   is, never less. No map has it: nobody finds it alive, nothing moves it.
 * - A step does a bounded number of references, those of one extent together as far as that allows.
 *
 * Cost: 32 bytes for each reference meanwhile, in the place of the 32 of its leaf; where there is no memory for
 * that they are dropped in the order of the file. Two passes for each 8 bits by which the addresses of the extents
 * differ (radix sort, least digit first, as in coverage_batch.c).
 */
#include <errno.h>
#include <string.h>

#include "extents/coverage.h"
#include "extents/discard.h"
#include "extents/reference_snapshot.h"

enum {
    DIGIT_BITS = 8,
    DIGITS = 1 << DIGIT_BITS,
    SORTED_FOR_ONE = 8,        /* references sorted in the time that dropping one takes, */
    TAKEN_FOR_ONE = 4,         /* and taken out of their leaves */
};

typedef enum { TAKE, COUNT, PLACE, DROP } discard_phase;

struct discard {
    discard *next;
    tree content;              /* what is not in ranges yet: leaves are taken from the end */
    cover_range *ranges;
    cover_range *room;         /* for as many, to sort */
    uint64_t capacity;
    uint64_t count;
    uint64_t done;             /* of these, in this phase */
    uint64_t differing;        /* bits of the extents' addresses that are not sorted by yet */
    int shift;
    discard_phase phase;
    uint64_t places[DIGITS];
};

static inline uint64_t address(const cover_range *range)
{
    return (uint64_t)(uintptr_t)range->extent;
}

/* ---------------------------------------------------------------------------------------- begin */

/* The first leaf of which everything begins at or behind start. */
static uint32_t first_behind(const tree *content, uint64_t start)
{
    tree_position at = tree_find(content, start);
    if (at.leaf < content->leaf_count && (at.slot != 0 || tree_at(content, at)->file_offset < start))
        at.leaf++;
    return at.leaf;
}

static uint64_t refs_in(const tree *content, uint32_t first, uint32_t end)
{
    uint64_t refs = 0;
    for (uint32_t i = first; i < end; i++)
        refs += content->leaves[i]->count;
    return refs;
}

static uint64_t bytes_in(const tree *content, uint32_t first, uint32_t end)
{
    uint64_t bytes = 0;
    for (uint32_t i = first; i < end; i++) {
        const leaf *in = content->leaves[i];
        for (uint32_t slot = 0; slot < in->count; slot++)
            bytes += in->refs[slot].length;
    }
    return bytes;
}

/* Leaves from first on are those of d. */
static void hand_over(cxl_engine *engine, tree *content, uint32_t first, uint64_t refs, discard *d)
{
    uint32_t end = content->leaf_count;
    /* Of both parts the shorter one is added up. */
    uint64_t bytes = first < end - first ? content->bytes - bytes_in(content, 0, first) : bytes_in(content, first, end);
    memcpy(d->content.leaves, content->leaves + first, (end - first) * sizeof(leaf *));
    d->content.leaf_count = end - first;
    d->content.refs = refs;
    d->content.kind = content->kind;
    content->leaf_count = first;
    content->refs -= refs;
    content->bytes -= bytes;
    cover_refs(engine, content, -(int64_t)refs);
    atomic_fetch_add(&engine->discarded_refs, refs);
    pthread_mutex_lock(&engine->discards_lock);
    discard **last = &engine->discards;
    while (*last != NULL)
        last = &(*last)->next;
    *last = d;
    pthread_mutex_unlock(&engine->discards_lock);
}

void tree_discard(cxl_engine *engine, tree *content, uint64_t start)
{
    if (content->refs <= engine->discard_min || engine->closing)
        return;
    uint32_t first = first_behind(content, start);
    uint64_t refs = refs_in(content, first, content->leaf_count);
    if (refs <= engine->discard_min)
        return;
    discard *d = engine_allocate(engine, sizeof(*d));
    if (d == NULL)
        return;
    memset(d, 0, sizeof(*d));
    tree_init(&d->content, content->owner);
    if (tree_reserve_row(engine, &d->content, content->leaf_count - first) != 0) {
        engine_release(engine, d, sizeof(*d));
        return;
    }
    promise_before(engine, content, start, UINT64_MAX);
    hand_over(engine, content, first, refs, d);
    promise_after(engine, content, start, UINT64_MAX);
}

/* ----------------------------------------------------------------------------------------- sort */

/* The next digit to sort by, or the end of sorting. */
static void next_digit(discard *d)
{
    d->done = 0;
    d->phase = DROP;
    if (d->differing == 0)
        return;
    d->shift = __builtin_ctzll(d->differing);
    d->differing &= ~((uint64_t)(DIGITS - 1) << d->shift);
    memset(d->places, 0, sizeof(d->places));
    d->phase = COUNT;
}

static void count_digits(discard *d, uint64_t count)
{
    uint64_t end = d->done + smaller(count, d->count - d->done), before = 0;
    for (; d->done < end; d->done++)
        d->places[(address(&d->ranges[d->done]) >> d->shift) % DIGITS]++;
    if (d->done < d->count)
        return;
    for (int digit = 0; digit < DIGITS; digit++) {
        uint64_t here = d->places[digit];
        d->places[digit] = before;
        before += here;
    }
    d->done = 0;
    d->phase = PLACE;
}

static void place_by_digit(discard *d, uint64_t count)
{
    uint64_t end = d->done + smaller(count, d->count - d->done);
    for (; d->done < end; d->done++)
        d->room[d->places[(address(&d->ranges[d->done]) >> d->shift) % DIGITS]++] = d->ranges[d->done];
    if (d->done < d->count)
        return;
    cover_range *sorted = d->room;
    d->room = d->ranges;
    d->ranges = sorted;
    next_digit(d);
}

/* ---------------------------------------------------------------------------------------- steps */

static void visited(cxl_engine *engine, uint64_t count)
{
    atomic_fetch_add_explicit(&engine->refs_visited, count, memory_order_relaxed);
}

/* Room for all of them; false: there is none. */
static bool make_room(cxl_engine *engine, discard *d)
{
    uint64_t capacity = d->content.refs;
    if (d->capacity != 0)
        return true;
    d->ranges = engine_allocate(engine, capacity * sizeof(*d->ranges));
    d->room = d->ranges == NULL ? NULL : engine_allocate(engine, capacity * sizeof(*d->room));
    if (d->room == NULL) {
        engine_release(engine, d->ranges, capacity * sizeof(*d->ranges));
        d->ranges = NULL;
        return false;
    }
    d->capacity = capacity;
    return true;
}

static void take(cxl_engine *engine, discard *d, uint64_t count)
{
    tree *content = &d->content;
    uint64_t end = d->count + count;
    while (content->leaf_count > 0 && d->count < end) {
        leaf *last = content->leaves[--content->leaf_count];
        for (uint32_t i = 0; i < last->count; i++) {
            const reference *ref = &last->refs[i];
            cover_range *range = &d->ranges[d->count++];
            *range = (cover_range){ref->extent, (uint32_t)ref->extent_offset,
                                   (uint32_t)(ref->extent_offset + ref->length)};
            d->differing |= address(range) ^ address(&d->ranges[0]);
        }
        visited(engine, last->count);
        content->refs -= last->count;
        leaf_retire(engine, content, last);
    }
    if (content->leaf_count == 0)
        next_digit(d);
}

static void dropped(cxl_engine *engine, uint64_t count)
{
    visited(engine, count);
    atomic_fetch_sub(&engine->discarded_refs, count);
}

/* In the order of the file: there is no memory for another. */
static void drop_unsorted(cxl_engine *engine, discard *d, uint64_t count)
{
    tree *content = &d->content;
    uint32_t first = content->leaf_count;
    uint64_t refs = 0;
    while (first > 0 && refs < count)
        refs += content->leaves[--first]->count;
    leaves_keep(engine, content, first, content->leaf_count);
    const cover_task task = {COVER_KINDS, content->kind, -1, true};
    cover_change_part(engine, content, content->leaves[first]->refs[0].file_offset, UINT64_MAX, task);
    while (content->leaf_count > first)
        leaf_retire(engine, content, content->leaves[--content->leaf_count]);
    content->refs -= refs;
    dropped(engine, refs);
    if (first == 0)
        next_digit(d);
}

static void drop(cxl_engine *engine, discard *d, uint64_t count)
{
    uint64_t end = d->done + smaller(count, d->count - d->done);
    while (d->done < end) {
        uint64_t first = d->done;
        while (d->done < d->count && d->done - first < count && d->ranges[d->done].extent == d->ranges[first].extent)
            d->done++;
        cover_drop_ranges(engine, d->ranges + first, d->room + first, d->done - first, d->content.kind);
        dropped(engine, d->done - first);
    }
}

static void discard_free(cxl_engine *engine, discard *d)
{
    tree_free_leaves(engine, &d->content);
    engine_release(engine, d->ranges, d->capacity * sizeof(*d->ranges));
    engine_release(engine, d->room, d->capacity * sizeof(*d->room));
    engine_release(engine, d, sizeof(*d));
}

static void step(cxl_engine *engine, discard *d, uint64_t count)
{
    if (d->phase == TAKE && make_room(engine, d))
        take(engine, d, count * TAKEN_FOR_ONE);
    else if (d->phase == TAKE)
        drop_unsorted(engine, d, count);
    else if (d->phase == COUNT)
        count_digits(d, count * SORTED_FOR_ONE);
    else if (d->phase == PLACE)
        place_by_digit(d, count * SORTED_FOR_ONE);
    else
        drop(engine, d, count);
}

int cxl_engine_drop_discarded(cxl_engine *engine, uint64_t count)
{
    pthread_mutex_lock(&engine->discards_lock);
    discard *d = engine->discards;
    if (d != NULL) {
        step(engine, d, larger(count, 1));
        if (d->phase == DROP && d->done == d->count) {
            engine->discards = d->next;
            discard_free(engine, d);
        }
    }
    pthread_mutex_unlock(&engine->discards_lock);
    return d != NULL;
}

void cxl_engine_discard(cxl_engine *engine, uint64_t refs_min)
{
    engine->discard_min = refs_min;
}

void discards_free(cxl_engine *engine)
{
    while (engine->discards != NULL) {
        discard *d = engine->discards;
        engine->discards = d->next;
        discard_free(engine, d);
    }
}
