/* referrers.c - who refers to an extent: where to look for the references to it without a look at all there are.
 *
 * Each extent notes what came to refer to it, as owner and place in its file: the segment summary of Rosenblum and
 * Ousterhout, "The Design and Implementation of a Log-Structured File System" (ACM TOCS 10(1), 1992), section 3.1,
 * kept in DRAM. What goes is not taken off: coverage.c knows what nothing refers to any more, and the maps themselves
 * say what of the rest is still there.
 *
 * Never: locks a map (its caller does), decides what is alive.
 *
 * Invariants
 * - What a map refers to is noted before it shows, unless the notes of that extent are lost: then all maps must be
 *   looked through. They are lost for want of memory, or when most of them would be of what is gone (ranges copied to
 *   and fro); moving the data elsewhere gives it new ones.
 * - All maps of one owner are found by one note: a copy of a content refers to the same places.
 *
 * Cost: 24 bytes for each run of bytes that are next to each other in the file and in the extent; the first is part
 * of the extent.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "extents/referrers.h"

enum {
    CAPACITY_MIN = 4,
    GONE_MAX = 64,               /* notes of references that may be gone, beyond as many as there are */
};

static referrer *first_of(extent *x)
{
    return x->referrer_capacity == 0 ? &x->referrers.one : x->referrers.list;
}

static void lose(cxl_engine *engine, extent *x)
{
    if (x->referrer_capacity != 0)
        engine_release(engine, x->referrers.list, x->referrer_capacity * sizeof(referrer));
    x->referrer_capacity = x->referrer_count = 0;
    x->referrers_lost = true;
}

/* Room for so many, at least for those that there are. */
static bool resize(cxl_engine *engine, extent *x, uint32_t capacity)
{
    referrer *fresh = engine_allocate(engine, capacity * sizeof(*fresh));
    if (fresh == NULL)
        return false;
    memcpy(fresh, first_of(x), x->referrer_count * sizeof(*fresh));
    if (x->referrer_capacity != 0)
        engine_release(engine, x->referrers.list, x->referrer_capacity * sizeof(*fresh));
    x->referrers.list = fresh;
    x->referrer_capacity = capacity;
    return true;
}

static bool too_many(const extent *x)
{
    return x->referrer_count > 2 * atomic_load_explicit(&x->holds, memory_order_relaxed) + GONE_MAX;
}

static int compare_notes(const void *a, const void *b)
{
    const referrer *x = a, *y = b;
    if (x->owner != y->owner)
        return x->owner > y->owner ? 1 : -1;
    if (x->file_base != y->file_base)
        return x->file_base > y->file_base ? 1 : -1;
    return (x->start > y->start) - (x->start < y->start);
}

/* What is noted several times, once: what a file sees and what it has published are two maps, and each change of one
 * is noted, in turns with its neighbours. */
static void unite(extent *x)
{
    referrer *list = first_of(x);
    uint32_t kept = 0;
    qsort(list, x->referrer_count, sizeof(*list), compare_notes);
    for (uint32_t i = 1; i < x->referrer_count; i++) {
        referrer *last = &list[kept];
        if (list[i].owner == last->owner && list[i].file_base == last->file_base && list[i].start <= last->end)
            last->end = (uint32_t)larger(last->end, list[i].end);
        else
            list[++kept] = list[i];
    }
    x->referrer_count = kept + 1;
}

/* Those of bytes that something covers stay, once each. */
static void tidy(cxl_engine *engine, extent *x)
{
    referrer *list = first_of(x);
    uint32_t kept = 0;
    uint64_t from, to;
    for (uint32_t i = 0; i < x->referrer_count; i++) {
        if (cover_run(x, COVER_PAST, list[i].start, list[i].end, &from, &to))
            list[kept++] = list[i];
        else if (cover_run(x, COVER_KINDS, list[i].start, list[i].end, &from, &to))
            x->past_lost = true; /* who has it is no concern of those who move what is alive */
    }
    x->referrer_count = kept;
    if (kept > GONE_MAX) {
        unite(x);
        kept = x->referrer_count;
    }
    if (too_many(x))
        lose(engine, x);
    else if (x->referrer_capacity > CAPACITY_MIN && kept < x->referrer_capacity / 4)
        resize(engine, x, (uint32_t)larger(kept, CAPACITY_MIN)); /* without memory it stays as large */
}

/* Room for one more. */
static bool grow(cxl_engine *engine, extent *x)
{
    if (x->referrer_count < larger(x->referrer_capacity, 1))
        return true;
    return resize(engine, x, x->referrer_capacity == 0 ? CAPACITY_MIN : x->referrer_capacity * 2);
}

void referrers_add(cxl_engine *engine, const reference *ref, uint64_t owner)
{
    extent *x = ref->extent;
    uint64_t base = ref->file_offset - ref->extent_offset;
    uint32_t start = (uint32_t)ref->extent_offset, end = (uint32_t)(ref->extent_offset + ref->length);
    if (engine->closing)
        return;
    pthread_mutex_lock(stripe_of(engine, x));
    referrer *last = x->referrer_count == 0 ? NULL : first_of(x) + x->referrer_count - 1;
    if (last != NULL && last->owner == owner && last->file_base == base && start >= last->start &&
        start <= last->end) {
        last->end = (uint32_t)larger(last->end, end);
    } else if (!x->referrers_lost) {
        if (too_many(x))
            tidy(engine, x);
        if (!x->referrers_lost && grow(engine, x))
            first_of(x)[x->referrer_count++] = (referrer){owner, base, start, end};
        else
            lose(engine, x);
    }
    pthread_mutex_unlock(stripe_of(engine, x));
}

void referrers_gone(cxl_engine *engine, extent *x)
{
    if (too_many(x))
        tidy(engine, x);
}

void referrers_destroy(cxl_engine *engine, extent *x)
{
    if (x->referrer_capacity != 0)
        engine_release(engine, x->referrers.list, x->referrer_capacity * sizeof(referrer));
}

uint64_t span_behind(const cxl_span *spans, uint64_t count, uint64_t media_offset)
{
    uint64_t first = 0, end = count;
    while (first < end) {
        uint64_t middle = first + (end - first) / 2;
        if (spans[middle].media_offset + spans[middle].length > media_offset)
            end = middle;
        else
            first = middle + 1;
    }
    return first;
}

/* Those runs of [start, end) of what a note says that something of those kinds covers. */
static int add_places(extent *x, int below, const referrer *note, uint64_t start, uint64_t end, growing_list *places)
{
    for (uint64_t from, to = start; cover_run(x, below, to, end, &from, &to);) {
        referrer_place *place = list_add(places);
        if (place == NULL)
            return -ENOMEM;
        *place = (referrer_place){note->owner, {note->file_base + from, to - from, x, from}};
    }
    return 0;
}

bool referrers_find(cxl_engine *engine, extent *x, int below, const cxl_span *spans, uint64_t count,
                    growing_list *places, int *error)
{
    const uint64_t base = x->media_offset;
    pthread_mutex_lock(stripe_of(engine, x));
    bool known = !x->referrers_lost;
    const referrer *list = first_of(x);
    for (uint32_t i = 0; i < x->referrer_count && *error == 0; i++) {
        uint64_t begin = base + list[i].start, end = base + list[i].end;
        for (uint64_t at = span_behind(spans, count, begin);
             at < count && spans[at].media_offset < end && *error == 0; at++) {
            uint64_t from = larger(begin, spans[at].media_offset);
            uint64_t to = smaller(end, spans[at].media_offset + spans[at].length);
            *error = add_places(x, below, &list[i], from - base, to - base, places);
        }
    }
    pthread_mutex_unlock(stripe_of(engine, x));
    return known;
}

/* ------------------------------------------------------------------------------------- places */

static int compare_places(const void *a, const void *b)
{
    const referrer_place *x = a, *y = b;
    if (x->owner != y->owner)
        return x->owner > y->owner ? 1 : -1;
    return (x->ref.file_offset > y->ref.file_offset) - (x->ref.file_offset < y->ref.file_offset);
}

void places_sort(growing_list *places)
{
    if (places->count != 0)
        qsort(places->items, places->count, sizeof(referrer_place), compare_places);
}

const referrer_place *places_of(const growing_list *places, uint64_t owner, uint64_t *count)
{
    const referrer_place *items = places->items;
    uint64_t first = 0, end = places->count;
    while (first < end) {
        uint64_t middle = first + (end - first) / 2;
        if (items[middle].owner >= owner)
            end = middle;
        else
            first = middle + 1;
    }
    *count = 0;
    while (first + *count < places->count && items[first + *count].owner == owner)
        ++*count;
    return *count == 0 ? NULL : items + first;
}

int places_visit(const tree *content, const referrer_place *places, uint64_t count, place_visitor *visit, void *context,
                 uint64_t *looked_at)
{
    int result = 0;
    for (uint64_t i = 0; i < count && result == 0; i++) {
        const reference *place = &places[i].ref, *ref;
        tree_position at = tree_find(content, place->file_offset);
        for (; result == 0 && (ref = tree_at(content, at)) != NULL && ref->file_offset < reference_end(place);
             at = tree_next(content, at)) {
            ++*looked_at;
            if (ref->extent != place->extent ||
                ref->file_offset - ref->extent_offset != place->file_offset - place->extent_offset)
                continue;
            uint64_t from = larger(ref->file_offset, place->file_offset);
            uint64_t to = smaller(reference_end(ref), reference_end(place));
            const reference part = {from, to - from, ref->extent, ref->extent_offset + (from - ref->file_offset)};
            result = visit(context, &part);
        }
    }
    return result;
}
