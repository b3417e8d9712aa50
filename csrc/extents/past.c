/* past.c - finds what history holds in a segment, and describes contents that no image has.
 *
 * Never: decides what is given back, frees a map.
 *
 * Invariants
 * - A map is listed once, and only if it counts as past and refers to bytes in the segment.
 * - A description of contents is whole: each extent that a reference names is in it once.
 *
 * Cost of finding: the extents of the segment, and a search for what each says of who refers to it (referrers.c).
 * Where that is lost: one look at each reference of each map that counts as past.
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

/* ------------------------------------------------------------------------------- describing contents */

typedef struct {
    growing_list refs;        /* cxl_ref */
    growing_list ids;         /* uint64_t, of extents */
    growing_list infos;       /* cxl_extent_info */
    growing_list crcs;        /* uint32_t */
} description;

static int describe_references(description *out, cxl_map *map)
{
    int result = 0;
    pthread_rwlock_rdlock(&map->lock);
    const reference *ref;
    for (tree_position at = {0, 0}; (ref = tree_at(&map->content, at)) != NULL && result == 0;
         at = tree_next(&map->content, at)) {
        cxl_ref *item = list_add(&out->refs);
        uint64_t *id = list_add(&out->ids);
        if (item == NULL || id == NULL) {
            result = -ENOMEM;
        } else {
            *item = (cxl_ref){ref->file_offset, ref->length, ref->extent->id, ref->extent_offset};
            *id = ref->extent->id;
        }
    }
    pthread_rwlock_unlock(&map->lock);
    return result;
}

static int compare_numbers(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static int describe_extent(cxl_engine *engine, description *out, uint64_t id)
{
    cxl_extent_info info;
    uint32_t *crcs;
    int result = cxl_engine_describe(engine, id, &info, &crcs);
    if (result != 0)
        return result;
    info.crc_index = out->crcs.count;
    cxl_extent_info *item = list_add(&out->infos);
    if (item == NULL)
        result = -ENOMEM;
    else
        *item = info;
    for (uint64_t i = 0; i < info.crc_count && result == 0; i++) {
        uint32_t *crc = list_add(&out->crcs);
        if (crc == NULL)
            result = -ENOMEM;
        else
            *crc = crcs[i];
    }
    free(crcs);
    return result;
}

static int describe_extents(cxl_engine *engine, description *out)
{
    uint64_t *ids = out->ids.items;
    int result = 0;
    if (out->ids.count > 1)
        qsort(ids, out->ids.count, sizeof(*ids), compare_numbers);
    for (uint64_t i = 0; i < out->ids.count && result == 0; i++) {
        if (i == 0 || ids[i] != ids[i - 1])
            result = describe_extent(engine, out, ids[i]);
    }
    return result;
}

int cxl_maps_describe(cxl_engine *engine, cxl_map *const *maps, uint64_t map_count, uint64_t *sizes,
                      uint64_t *counts, cxl_ref **refs, uint64_t *ref_count, cxl_extent_info **infos,
                      uint64_t *info_count, uint32_t **crcs, uint64_t *crc_count)
{
    description out = {
        .refs = {.size = sizeof(cxl_ref)}, .ids = {.size = sizeof(uint64_t)},
        .infos = {.size = sizeof(cxl_extent_info)}, .crcs = {.size = sizeof(uint32_t)},
    };
    int result = 0;
    for (uint64_t i = 0; i < map_count && result == 0; i++) {
        uint64_t before = out.refs.count;
        result = describe_references(&out, maps[i]);
        sizes[i] = cxl_map_size(maps[i]);
        counts[i] = out.refs.count - before;
    }
    if (result == 0)
        result = describe_extents(engine, &out);
    *ref_count = out.refs.count;
    *info_count = out.infos.count;
    *crc_count = out.crcs.count;
    if (result == 0 && ((*refs = list_give(&out.refs)) == NULL || (*infos = list_give(&out.infos)) == NULL ||
                        (*crcs = list_give(&out.crcs)) == NULL))
        result = -ENOMEM;
    free(out.ids.items);
    if (result != 0) {
        free(out.refs.items);
        free(out.infos.items);
        free(out.crcs.items);
    }
    return result;
}
