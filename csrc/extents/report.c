/* report.c - questions about everything at once: which extents there are, what is published.
 *
 * Never: changes anything.
 *
 * Invariants
 * - O(R log R) in the number of references.
 * - Each map is seen as of one moment; maps that change meanwhile may be seen before or after.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "extents/extents.h"

void *list_add(growing_list *to)
{
    if (to->count == to->capacity) {
        uint64_t capacity = larger(to->capacity * 2, 64);
        void *fresh = cxl_reallocate(to->items, capacity * to->size);
        if (fresh == NULL)
            return NULL;
        to->items = fresh;
        to->capacity = capacity;
    }
    return (char *)to->items + to->count++ * to->size;
}

void *list_give(growing_list *from)
{
    if (from->items == NULL)
        return from->items = cxl_allocate(from->size);
    void *smaller_one = realloc(from->items, larger(from->count, 1) * from->size);
    if (smaller_one != NULL)
        from->items = smaller_one;
    return from->items;
}

/* --------------------------------------------------------------------------- lists of extents */

typedef struct {
    uint64_t media_offset;
    extent *extent;
} place;

enum { DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS };

/* By media offset, digit by digit from the lowest one on; returns which of list and other is sorted. A
 * million in a fifth of the time that comparing them takes: they come in the order of a hash table. */
static place *sort_places(place *list, place *other, uint64_t count)
{
    uint64_t all = 0;
    for (uint64_t i = 0; i < count; i++)
        all |= list[i].media_offset;
    for (unsigned shift = 0; shift < 64 && all >> shift != 0; shift += DIGIT_BITS) {
        uint64_t starts[DIGITS] = {0}, sum = 0;
        for (uint64_t i = 0; i < count; i++)
            starts[(list[i].media_offset >> shift) % DIGITS]++;
        for (unsigned digit = 0; digit < DIGITS; digit++) {
            uint64_t number = starts[digit];
            starts[digit] = sum;
            sum += number;
        }
        for (uint64_t i = 0; i < count; i++)
            other[starts[(list[i].media_offset >> shift) % DIGITS]++] = list[i];
        place *sorted = other;
        other = list;
        list = sorted;
    }
    return list;
}

static uint64_t places_of_all(cxl_engine *engine, place *list)
{
    uint64_t found = 0, size = engine->table_size;
    for (uint64_t i = 0; i < size; i++) {
        if (size - i > AHEAD)
            __builtin_prefetch(engine->table[i + AHEAD]);
        for (extent *x = engine->table[i]; x != NULL; x = x->next)
            list[found++] = (place){x->media_offset, x};
    }
    return found;
}

int cxl_engine_list(cxl_engine *engine, cxl_extent_info **out, uint64_t *count)
{
    pthread_mutex_lock(&engine->lock);
    uint64_t room = engine->extent_count + 1;
    cxl_extent_info *infos = cxl_allocate(room * sizeof(*infos));
    place *places = cxl_allocate(2 * room * sizeof(*places));
    bool enough = infos != NULL && places != NULL;
    if (enough) {
        *count = places_of_all(engine, places);
        const place *sorted = sort_places(places, places + room, *count);
        for (uint64_t i = 0; i < *count; i++) {
            extent *x = sorted[i].extent;
            if (*count - i > AHEAD)
                __builtin_prefetch(sorted[i + AHEAD].extent);
            infos[i] = (cxl_extent_info){
                .id = x->id, .media_offset = x->media_offset,
                .length = extent_checksums(engine, x, 0, 0, NULL),
            };
        }
    }
    pthread_mutex_unlock(&engine->lock);
    free(places);
    if (!enough) {
        free(infos);
        return -ENOMEM;
    }
    *out = infos;
    return 0;
}

static int compare_ids(const void *a, const void *b)
{
    const extent *x = *(extent *const *)a, *y = *(extent *const *)b;
    return (x->id > y->id) - (x->id < y->id);
}

/* Every extent that anybody but its definition holds, by id: equal states give equal images, whatever
 * the order in the table. held has room for all; engine.lock is held. */
static uint64_t held_extents(cxl_engine *engine, extent **held)
{
    uint64_t count = 0;
    for (uint64_t i = 0; i < engine->table_size; i++) {
        for (extent *x = engine->table[i]; x != NULL; x = x->next) {
            if (atomic_load(&x->holds) > (x->kept ? 1 : 0))
                held[count++] = x;
        }
    }
    qsort(held, count, sizeof(*held), compare_ids);
    return count;
}

/* Those of them that are published; -EAGAIN: there is no room for the checksums of one. engine.lock is
 * held. */
static int fill_extents(cxl_engine *engine, extent **held, cxl_extent_info *infos, uint64_t *info_count,
                        uint32_t *crcs, uint64_t room, uint64_t *crc_count)
{
    uint64_t found = 0, total = 0, count = held_extents(engine, held);
    for (uint64_t i = 0; i < count; i++) {
        infos[found].crc_index = total;
        if (!extent_describe_published(engine, held[i], &infos[found], crcs + total, room - total))
            return -EAGAIN;
        total += infos[found].crc_count;
        found += infos[found].length != 0;
    }
    *info_count = found;
    *crc_count = total;
    return 0;
}

static int export_extents(cxl_engine *engine, cxl_extent_info **infos, uint64_t *info_count,
                          uint32_t **crcs, uint64_t *crc_count)
{
    int result;
    do {                         /* again when more was published while we looked */
        pthread_mutex_lock(&engine->lock);
        uint64_t room = atomic_load(&engine->crcs) + 1, count = engine->extent_count + 1;
        extent **held = cxl_allocate(count * sizeof(*held));
        *infos = cxl_allocate(count * sizeof(**infos));
        *crcs = cxl_allocate(room * sizeof(**crcs));
        result = -ENOMEM;
        if (held != NULL && *infos != NULL && *crcs != NULL)
            result = fill_extents(engine, held, *infos, info_count, *crcs, room, crc_count);
        pthread_mutex_unlock(&engine->lock);
        free(held);
        if (result != 0) {
            free(*infos);
            free(*crcs);
        }
    } while (result == -EAGAIN);
    return result;
}

static int export_map(cxl_map *map, growing_list *refs)
{
    int result = 0;
    pthread_rwlock_rdlock(&map->lock);
    const reference *ref;
    for (tree_position at = {0, 0}; (ref = tree_at(&map->content, at)) != NULL && result == 0;
         at = tree_next(&map->content, at)) {
        cxl_ref *item = list_add(refs);
        if (item == NULL)
            result = -ENOMEM;
        else if (ref->extent_offset + ref->length > extent_published(map->engine, ref->extent))
            result = -EINVAL;
        else
            *item = (cxl_ref){ref->file_offset, ref->length, ref->extent->id, ref->extent_offset};
    }
    pthread_rwlock_unlock(&map->lock);
    return result;
}

int cxl_maps_export(cxl_engine *engine, cxl_map *const *maps, uint64_t map_count,
                    uint64_t *counts, cxl_ref **refs, uint64_t *ref_count,
                    cxl_extent_info **infos, uint64_t *info_count, uint32_t **crcs,
                    uint64_t *crc_count)
{
    growing_list found = {.size = sizeof(cxl_ref)};
    int result = 0;
    for (uint64_t i = 0; i < map_count && result == 0; i++) {
        uint64_t before = found.count;
        result = export_map(maps[i], &found);
        counts[i] = found.count - before;
    }
    *ref_count = found.count;
    if (result == 0 && (*refs = list_give(&found)) == NULL)
        result = -ENOMEM;
    if (result == 0)
        result = export_extents(engine, infos, info_count, crcs, crc_count);
    if (result != 0)
        free(found.items);
    return result;
}

int cxl_maps_references(cxl_map *const *maps, uint64_t map_count, uint64_t refs_max, uint64_t *sizes,
                        uint64_t *counts, cxl_ref **refs, uint64_t *ref_count)
{
    growing_list found = {.size = sizeof(cxl_ref)};
    int result = 0;
    for (uint64_t i = 0; i < map_count && result == 0; i++) {
        uint64_t before = found.count;
        bool many = cxl_map_ref_count(maps[i]) > refs_max;
        if (!many)
            result = export_map(maps[i], &found);
        sizes[i] = cxl_map_size(maps[i]);
        counts[i] = many ? UINT64_MAX : found.count - before;
    }
    if (map_count != 0)
        atomic_fetch_add_explicit(&maps[0]->engine->refs_visited, found.count, memory_order_relaxed);
    *ref_count = found.count;
    if (result == 0 && (*refs = list_give(&found)) == NULL)
        result = -ENOMEM;
    if (result != 0)
        free(found.items);
    return result;
}
