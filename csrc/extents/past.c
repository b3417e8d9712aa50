/* past.c - finds what history holds in a segment.
 *
 * Never: decides what is given back, frees a map.
 *
 * Invariants
 * - A map is listed once, and only if it counts as past and refers to bytes in the segment.
 *
 * Cost: the extents of the segment, and a search for what each says of who refers to it (referrers.c). Where that is
 * lost: one look at each reference of each map that counts as past.
 */
#include <errno.h>
#include <stdlib.h>

#include "extents/referrers.h"

typedef struct {
    cxl_engine *engine;
    uint64_t segment;
    growing_list places;      /* where references to it may be, */
    bool anywhere;            /* and to some of it anywhere else */
    growing_list found;       /* cxl_map * */
} past_search;

/* engine.lock is held: no extent goes. */
static int find_places(past_search *search)
{
    cxl_engine *engine = search->engine;
    int result = 0;
    for (extent *x = engine->segments[search->segment].first; x != NULL && result == 0; x = x->segment_next) {
        const cxl_span all = {x->media_offset, x->length};
        bool known = x->length == 0 ||
                     referrers_find(engine, x, COVER_KINDS, &all, 1, &search->places, &result);
        search->anywhere = search->anywhere || !known || x->past_lost;
    }
    return result;
}

static int add_map(past_search *search, cxl_map *map)
{
    cxl_map **place = list_add(&search->found);
    if (place == NULL)
        return -ENOMEM;
    *place = map;
    return 0;
}

static int one_is_enough(void *context, const reference *part)
{
    (void)context;
    (void)part;
    return 1;
}

static bool refers_to(const tree *content, uint64_t segment, uint64_t *looked_at)
{
    bool found = false;
    for (uint32_t i = 0; i < content->leaf_count && !found; i++) {
        const leaf *in = content->leaves[i];
        for (uint32_t slot = 0; slot < in->count && !found; slot++, ++*looked_at)
            found = in->refs[slot].extent->segment == segment;
    }
    return found;
}

/* engine.maps_lock is held. */
static int find_of_owner(past_search *search, const referrer_place *places, uint64_t count)
{
    cxl_engine *engine = search->engine;
    uint64_t looked_at = 0;
    int result = 0;
    for (cxl_map *map = map_of_owner(engine, places->owner, NULL); map != NULL && result == 0;
         map = map_of_owner(engine, places->owner, map)) {
        pthread_rwlock_rdlock(&map->lock);
        bool found = false;
        if (map->content.kind == COVER_PAST)
            found = map->content.refs <= count
                        ? refers_to(&map->content, search->segment, &looked_at)
                        : places_visit(&map->content, places, count, one_is_enough, NULL, &looked_at) != 0;
        pthread_rwlock_unlock(&map->lock);
        if (found)
            result = add_map(search, map);
    }
    atomic_fetch_add_explicit(&engine->refs_visited, looked_at, memory_order_relaxed);
    return result;
}

/* engine.maps_lock is held. */
static int find_anywhere(past_search *search)
{
    uint64_t looked_at = 0;
    int result = 0;
    for (cxl_map *map = search->engine->map_list; map != NULL && result == 0; map = map->next) {
        pthread_rwlock_rdlock(&map->lock);
        bool found = map->content.kind == COVER_PAST && refers_to(&map->content, search->segment, &looked_at);
        pthread_rwlock_unlock(&map->lock);
        if (found)
            result = add_map(search, map);
    }
    atomic_fetch_add_explicit(&search->engine->refs_visited, looked_at, memory_order_relaxed);
    return result;
}

static int find_maps(past_search *search)
{
    if (search->anywhere)
        return find_anywhere(search);
    places_sort(&search->places);
    const referrer_place *places = search->places.items;
    uint64_t count;
    int result = 0;
    for (uint64_t i = 0; i < search->places.count && result == 0; i += count) {
        for (count = 1; i + count < search->places.count && places[i + count].owner == places[i].owner; count++)
            ;
        result = find_of_owner(search, &places[i], count);
    }
    return result;
}

int cxl_engine_past_maps(cxl_engine *engine, uint64_t segment, cxl_map ***maps, uint64_t *count)
{
    past_search search = {
        .engine = engine, .segment = segment,
        .places = {.size = sizeof(referrer_place)}, .found = {.size = sizeof(cxl_map *)},
    };
    if (segment >= engine->segment_count)
        return -EINVAL;
    pthread_mutex_lock(&engine->maps_lock);
    pthread_mutex_lock(&engine->lock);
    int result = find_places(&search);
    pthread_mutex_unlock(&engine->lock);
    if (result == 0)
        result = find_maps(&search);
    pthread_mutex_unlock(&engine->maps_lock);
    free(search.places.items);
    *count = search.found.count;
    if (result == 0 && (*maps = list_give(&search.found)) == NULL)
        result = -ENOMEM;
    if (result != 0)
        free(search.found.items);
    return result;
}

uint64_t cxl_engine_past_segments(cxl_engine *engine)
{
    uint64_t occupied = atomic_load(&engine->occupied_segments), used = atomic_load(&engine->used_segments);
    return occupied > used ? occupied - used : 0;
}
