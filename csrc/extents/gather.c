/* gather.c - what is alive in parts of the media, in the order of the files it belongs to: what a cleaner
 * needs before copy_ranges.c.
 *
 * Never: decides what is worth moving; changes a map or a source.
 *
 * Invariants
 * - Bytes that several references share are one range, with every owner of any of them.
 * - What history refers to and may lose (COVER_PAST) is not alive.
 *
 * Cost of cxl_engine_live_ranges: the extents in the segments that the spans are part of, and a search for what each of
 * those in the spans says of who refers to it (referrers.c); where that is lost, one look at each reference there is.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "extents/referrers.h"

/* One reference of one owner, cut to its span. */
typedef struct {
    uint64_t extent_id;
    uint64_t start;           /* extent offsets */
    uint64_t end;
    uint64_t owner;
    uint64_t file_offset;
    uint64_t span;
} share;

typedef struct {
    cxl_engine *engine;
    const cxl_span *spans;
    uint64_t count;
    uint8_t *busy;
    uint8_t *segments;        /* 1 where spans lie */
    growing_list shares;
    growing_list extents;     /* extent *, held: those in the spans */
    growing_list places;      /* where references to them may be, */
    bool anywhere;            /* and to some of them anywhere else */
} gathering_state;

/* ------------------------------------------------------------------------------------ spans */

/* Spans are sorted, apart, and each lies in one segment: marks which. */
static int mark_segments(gathering_state *state)
{
    uint64_t end = 0, segment;
    state->segments = cxl_allocate_zeroed(state->engine->segment_count + 1, 1);
    if (state->segments == NULL)
        return -ENOMEM;
    for (uint64_t i = 0; i < state->count; i++) {
        const cxl_span *span = &state->spans[i];
        if (span->media_offset < end || !extent_place(state->engine, span->media_offset, span->length, &segment))
            return -EINVAL;
        end = span->media_offset + span->length;
        state->segments[segment] = 1;
    }
    return 0;
}

static uint64_t span_at(const gathering_state *state, uint64_t media_offset)
{
    return span_behind(state->spans, state->count, media_offset);
}

/* All extents of a segment that lie in spans; none, where one is open: it may grow, and has no final checksum; or where
 * one is held for readers: its place would not become free. engine.lock is held. */
static int hold_segment(gathering_state *state, uint64_t segment)
{
    cxl_engine *engine = state->engine;
    const segment_state *in = &engine->segments[segment];
    for (const extent *x = in->first; x != NULL; x = x->segment_next) {
        if (x->open || atomic_load_explicit(&x->readers, memory_order_relaxed) != 0) {
            state->segments[segment] = 2;
            return 0;
        }
    }
    for (extent *x = in->first; x != NULL; x = x->segment_next) {
        uint64_t i = span_at(state, x->media_offset);
        if (i == state->count || state->spans[i].media_offset >= x->media_offset + x->length)
            continue;
        extent **place = list_add(&state->extents);
        if (place == NULL)
            return -ENOMEM;
        extent_hold(x);
        *place = x;
    }
    return 0;
}

static int hold_extents(gathering_state *state)
{
    cxl_engine *engine = state->engine;
    uint64_t done = UINT64_MAX;
    int result = 0;
    pthread_mutex_lock(&engine->lock);
    for (uint64_t i = 0; i < state->count && result == 0; i++) {
        uint64_t segment = (state->spans[i].media_offset - engine->first) / engine->segment_size;
        if (segment != done)
            result = hold_segment(state, segment);
        done = segment;
        state->busy[i] = state->segments[segment] == 2;
    }
    pthread_mutex_unlock(&engine->lock);
    return result;
}

static void drop_extents(gathering_state *state)
{
    extent **held = state->extents.items;
    for (uint64_t i = 0; i < state->extents.count; i++)
        extent_drop(state->engine, held[i]);
    free(held);
}

/* Where what lies in spans may be referred to. */
static int find_places(gathering_state *state)
{
    extent **held = state->extents.items;
    int result = 0;
    for (uint64_t i = 0; i < state->extents.count && result == 0; i++) {
        extent *x = held[i];
        uint64_t end = x->media_offset + x->length;
        uint64_t first = span_at(state, x->media_offset), behind = span_at(state, end - 1);
        if (behind < state->count && state->spans[behind].media_offset < end)
            behind++;
        if (!referrers_find(state->engine, x, COVER_PAST, &state->spans[first], behind - first, &state->places,
                            &result))
            state->anywhere = true;
    }
    places_sort(&state->places);
    return result;
}

static int add_shares(gathering_state *state, const cxl_map *map, const reference *ref)
{
    const extent *x = ref->extent;
    uint64_t begin = x->media_offset + ref->extent_offset, end = begin + ref->length;
    for (uint64_t i = span_at(state, begin); i < state->count && state->spans[i].media_offset < end; i++) {
        const cxl_span *span = &state->spans[i];
        uint64_t from = larger(begin, span->media_offset);
        uint64_t to = smaller(end, span->media_offset + span->length);
        if (state->busy[i])
            continue;
        if (!extent_is_known(state->engine, ref->extent, to - x->media_offset)) {
            state->busy[i] = 1;
            continue;
        }
        share *fresh = list_add(&state->shares);
        if (fresh == NULL)
            return -ENOMEM;
        *fresh = (share){
            .extent_id = x->id, .start = from - x->media_offset, .end = to - x->media_offset,
            .owner = map->owner, .file_offset = ref->file_offset + (from - begin), .span = i,
        };
    }
    return 0;
}

typedef struct {
    gathering_state *state;
    const cxl_map *map;
} map_visit;

static int visit_part(void *context, const reference *part)
{
    const map_visit *visit = context;
    return add_shares(visit->state, visit->map, part);
}

/* In all maps of one owner. engine.maps_lock is held. */
static int collect_owner(gathering_state *state, const referrer_place *places, uint64_t count)
{
    cxl_engine *engine = state->engine;
    uint64_t looked_at = 0;
    int result = 0;
    for (cxl_map *map = map_of_owner(engine, places->owner, NULL); map != NULL && result == 0;
         map = map_of_owner(engine, places->owner, map)) {
        map_visit visit = {state, map};
        if (map->content.kind == COVER_PAST)
            continue;
        pthread_rwlock_rdlock(&map->lock);
        result = places_visit(&map->content, places, count, visit_part, &visit, &looked_at);
        pthread_rwlock_unlock(&map->lock);
    }
    atomic_fetch_add_explicit(&engine->refs_visited, looked_at, memory_order_relaxed);
    return result;
}

/* What all maps have of extents of which it is not known who refers to them. */
static int collect_map(gathering_state *state, cxl_map *map)
{
    int result = 0;
    pthread_rwlock_rdlock(&map->lock);
    const tree *content = &map->content;
    for (uint32_t i = 0; i < content->leaf_count && result == 0; i++) {
        const leaf *in = content->leaves[i];
        for (uint32_t slot = 0; slot < in->count && result == 0; slot++) {
            const extent *x = in->refs[slot].extent;
            if (x->referrers_lost && state->segments[x->segment] == 1)
                result = add_shares(state, map, &in->refs[slot]);
        }
    }
    atomic_fetch_add_explicit(&state->engine->refs_visited, content->refs, memory_order_relaxed);
    pthread_rwlock_unlock(&map->lock);
    return result;
}

static int collect_maps(gathering_state *state)
{
    cxl_engine *engine = state->engine;
    int result = 0;
    uint64_t count;
    pthread_mutex_lock(&engine->maps_lock);
    const referrer_place *places = state->places.items;
    for (uint64_t i = 0; i < state->places.count && result == 0; i += count) {
        for (count = 1; i + count < state->places.count && places[i + count].owner == places[i].owner; count++)
            ;
        result = collect_owner(state, &places[i], count);
    }
    for (cxl_map *map = engine->map_list; map != NULL && result == 0 && state->anywhere; map = map->next)
        result = map->content.kind == COVER_PAST ? 0 : collect_map(state, map);
    pthread_mutex_unlock(&engine->maps_lock);
    return result;
}

static int collect(gathering_state *state)
{
    int result = mark_segments(state);
    if (result == 0)
        result = hold_extents(state);
    if (result == 0)
        result = find_places(state);
    if (result == 0)
        result = collect_maps(state);
    share *shares = state->shares.items;
    uint64_t kept = 0;
    for (uint64_t i = 0; i < state->shares.count; i++) {
        if (!state->busy[shares[i].span])   /* it may have turned out behind a few of its shares */
            shares[kept++] = shares[i];
    }
    state->shares.count = kept;
    return result;
}

/* ------------------------------------------------------------------------------------ ranges */

static int compare_places(const void *a, const void *b)
{
    const share *x = a, *y = b;
    if (x->extent_id != y->extent_id)
        return x->extent_id > y->extent_id ? 1 : -1;
    if (x->start != y->start)
        return x->start > y->start ? 1 : -1;
    if (x->owner != y->owner)
        return x->owner > y->owner ? 1 : -1;
    return (x->file_offset > y->file_offset) - (x->file_offset < y->file_offset);
}

static int compare_files(const void *a, const void *b)
{
    const cxl_live_range *x = a, *y = b;
    if (x->owner != y->owner)
        return x->owner > y->owner ? 1 : -1;
    if (x->file_offset != y->file_offset)
        return x->file_offset > y->file_offset ? 1 : -1;
    if (x->extent_id != y->extent_id)
        return x->extent_id > y->extent_id ? 1 : -1;
    return (x->extent_offset > y->extent_offset) - (x->extent_offset < y->extent_offset);
}

/* One more owner of the last range, unless it is one. */
static int add_owner(growing_list *owners, cxl_live_range *range, uint64_t owner)
{
    const uint64_t *known = owners->items;      /* NULL as long as there are none */
    for (uint64_t i = 0; i < range->owner_count; i++) {
        if (known[range->first_owner + i] == owner)
            return 0;
    }
    uint64_t *place = list_add(owners);
    if (place == NULL)
        return -ENOMEM;
    *place = owner;
    range->owner_count++;
    return 0;
}

/* Whether this owner's view decides where the range goes. */
static bool goes_before(const share *item, const cxl_live_range *range, uint64_t preferred)
{
    if (item->owner == range->owner)
        return item->file_offset < range->file_offset;
    if ((item->owner == preferred) != (range->owner == preferred))
        return item->owner == preferred;
    return item->owner < range->owner;
}

/* Sorted shares that overlap become one range. */
static int unite(const gathering_state *state, uint64_t preferred, growing_list *ranges, growing_list *owners)
{
    const share *shares = state->shares.items;
    cxl_live_range *last = NULL;
    int result = 0;
    for (uint64_t i = 0; i < state->shares.count && result == 0; i++) {
        const share *item = &shares[i];
        if (last == NULL || last->extent_id != item->extent_id ||
            last->extent_offset + last->length <= item->start) {
            last = list_add(ranges);
            if (last == NULL)
                return -ENOMEM;
            *last = (cxl_live_range){
                .extent_id = item->extent_id, .extent_offset = item->start,
                .length = item->end - item->start, .owner = item->owner,
                .file_offset = item->file_offset, .first_owner = owners->count, .span = item->span,
            };
        }
        last->length = larger(last->extent_offset + last->length, item->end) - last->extent_offset;
        if (goes_before(item, last, preferred)) {
            last->owner = item->owner;
            last->file_offset = item->file_offset;
        }
        result = add_owner(owners, last, item->owner);
    }
    return result;
}

int cxl_engine_live_ranges(cxl_engine *engine, const cxl_span *spans, uint64_t span_count, uint64_t preferred,
                           uint8_t *busy, cxl_live_range **ranges, uint64_t *count, uint64_t **owners,
                           uint64_t *owner_count)
{
    gathering_state state = {
        .engine = engine, .spans = spans, .count = span_count, .busy = busy,
        .shares = {.size = sizeof(share)}, .extents = {.size = sizeof(extent *)},
        .places = {.size = sizeof(referrer_place)},
    };
    growing_list found = {.size = sizeof(cxl_live_range)}, all = {.size = sizeof(uint64_t)};
    int result = collect(&state);
    if (result == 0 && state.shares.count != 0) {
        qsort(state.shares.items, state.shares.count, sizeof(share), compare_places);
        result = unite(&state, preferred, &found, &all);
        if (result == 0)
            qsort(found.items, found.count, sizeof(cxl_live_range), compare_files);
    }
    *count = found.count;
    *owner_count = all.count;
    if (result == 0 && ((*ranges = list_give(&found)) == NULL || (*owners = list_give(&all)) == NULL))
        result = -ENOMEM;
    if (result != 0) {
        free(found.items);
        free(all.items);
    }
    drop_extents(&state);
    free(state.segments);
    free(state.shares.items);
    free(state.places.items);
    return result;
}

static int compare_spans(const void *a, const void *b)
{
    const cxl_span *x = a, *y = b;
    return (x->media_offset > y->media_offset) - (x->media_offset < y->media_offset);
}

/* Where references of a range of a map lie: one span for each. */
static int collect_spans(cxl_map *map, uint64_t offset, uint64_t end, growing_list *spans)
{
    int result = 0;
    const reference *ref;
    pthread_rwlock_rdlock(&map->lock);
    const tree *content = &map->content;
    for (tree_position at = tree_find(content, offset);
         (ref = tree_at(content, at)) != NULL && ref->file_offset < end && result == 0;
         at = tree_next(content, at)) {
        uint64_t from = larger(ref->file_offset, offset), to = smaller(reference_end(ref), end);
        uint64_t start = ref->extent->media_offset + ref->extent_offset + (from - ref->file_offset);
        cxl_span *span = list_add(spans);
        if (span == NULL)
            result = -ENOMEM;
        else
            *span = (cxl_span){start, to - from};
    }
    pthread_rwlock_unlock(&map->lock);
    return result;
}

/* Spans that overlap (bytes that the map has twice) become one. */
static void unite_spans(growing_list *spans)
{
    cxl_span *items = spans->items;
    uint64_t kept = 0;
    if (spans->count == 0)
        return;
    qsort(items, spans->count, sizeof(*items), compare_spans);
    for (uint64_t i = 1; i < spans->count; i++) {
        uint64_t end = items[kept].media_offset + items[kept].length;
        if (items[i].media_offset < end)
            items[kept].length = larger(end, items[i].media_offset + items[i].length) - items[kept].media_offset;
        else
            items[++kept] = items[i];
    }
    spans->count = kept + 1;
}

int cxl_map_live_ranges(cxl_map *map, uint64_t offset, uint64_t length, uint8_t *busy, cxl_live_range **ranges,
                        uint64_t *count, uint64_t **owners, uint64_t *owner_count)
{
    growing_list spans = {.size = sizeof(cxl_span)};
    uint64_t end = length > UINT64_MAX - offset ? UINT64_MAX : offset + length;
    uint8_t *each = NULL;
    int result = collect_spans(map, offset, end, &spans);
    if (result == 0) {
        unite_spans(&spans);
        each = cxl_allocate_zeroed(spans.count + 1, 1);
        result = each == NULL ? -ENOMEM
                              : cxl_engine_live_ranges(map->engine, spans.items, spans.count, map->owner, each,
                                                       ranges, count, owners, owner_count);
    }
    *busy = result == 0 && memchr(each, 1, spans.count) != NULL;
    free(each);
    free(spans.items);
    return result;
}
