/* leases.c - leases: the room under which data is appended, its beginning, its users and its end.
 *
 * Never: touches media bytes, decides where a lease lies or when one is needed.
 *
 * Invariants
 * - An extent is open exactly while it has a lease, and only one map, or one cxl_engine_copy_ranges
 *   at a time, appends to it.
 */
#include <errno.h>

#include "extents/extents.h"

int cxl_engine_lease(cxl_engine *engine, uint64_t id, uint64_t media_offset, uint64_t capacity)
{
    uint64_t segment;
    int result = 0;
    if (id == 0 || media_offset % PUBLISH_ALIGN != 0)
        return -EINVAL;
    if (!extent_place(engine, media_offset, capacity, &segment))
        return -EINVAL;
    pthread_mutex_lock(&engine->lock);
    if (extent_find_locked(engine, id) != NULL) {
        result = -EEXIST;
    } else {
        extent *x = extent_create_locked(engine, id, media_offset, chunks_of(engine, capacity));
        if (x == NULL) {
            result = -ENOMEM;
        } else {
            x->capacity = capacity;
            x->open = true;
            cover_open(engine, x, capacity);
            extent_hold(x);
        }
    }
    pthread_mutex_unlock(&engine->lock);
    return result;
}

int cxl_map_attach_lease(cxl_map *map, uint64_t id)
{
    cxl_engine *engine = map->engine;
    int result = 0;
    pthread_mutex_lock(&map->writer);
    pthread_mutex_lock(&engine->lock);
    extent *x = extent_find_locked(engine, id);
    if (x == NULL) {
        result = -ENOENT;
    } else if (map->next_lease != NULL || !x->open || x->attached || x->busy) {
        result = -EBUSY;
    } else {
        x->attached = true;
        if (map->lease == NULL)
            map->lease = x;
        else
            map->next_lease = x;
    }
    pthread_mutex_unlock(&engine->lock);
    pthread_mutex_unlock(&map->writer);
    return result;
}

int cxl_map_close_lease(cxl_map *map, uint64_t *media_offset, uint64_t *length)
{
    *media_offset = *length = 0;
    pthread_mutex_lock(&map->writer);
    extent **last = map->next_lease != NULL ? &map->next_lease : &map->lease;
    int count = (map->lease != NULL) + (map->next_lease != NULL);
    if (*last != NULL)
        extent_close(map->engine, *last, media_offset, length);
    *last = NULL;
    pthread_mutex_unlock(&map->writer);
    return count;
}

int cxl_map_wants_lease(cxl_map *map)
{
    pthread_mutex_lock(&map->writer);
    const extent *x = map->lease;
    int wants = x != NULL && map->next_lease == NULL && x->capacity - x->length < x->capacity / 2;
    pthread_mutex_unlock(&map->writer);
    return wants;
}

int extent_use_open(cxl_engine *engine, uint64_t id, extent **out)
{
    int result = 0;
    pthread_mutex_lock(&engine->lock);
    extent *x = extent_find_locked(engine, id);
    if (x == NULL)
        result = -ENOENT;
    else if (!x->open || x->attached || x->busy)
        result = -EBUSY;
    else
        x->busy = true;
    pthread_mutex_unlock(&engine->lock);
    *out = x;
    return result;
}

void extent_unused(cxl_engine *engine, extent *x)
{
    pthread_mutex_lock(&engine->lock);
    x->busy = false;
    pthread_mutex_unlock(&engine->lock);
}

int cxl_engine_close_lease(cxl_engine *engine, uint64_t id, uint64_t *media_offset,
                           uint64_t *length)
{
    extent *x;
    *media_offset = *length = 0;
    int result = extent_use_open(engine, id, &x);
    if (result != 0)
        return result;
    extent_hold(x);
    extent_close(engine, x, media_offset, length);
    extent_unused(engine, x);
    extent_drop(engine, x);
    return 0;
}
