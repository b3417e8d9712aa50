/* engine.c - the engine itself: its life, its counters, and leases, under which data is appended.
 *
 * Never: decides where a lease lies or when one is needed.
 *
 * Invariants
 * - An extent is open exactly while it has a lease, and only one map, or one cxl_engine_copy_ranges
 *   at a time, appends to it.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "extents/extents.h"

/* ------------------------------------------------------------------------------------- memory */

void *engine_allocate(cxl_engine *engine, size_t size)
{
    void *pointer = cxl_allocate(size);
    if (pointer != NULL)
        atomic_fetch_add_explicit(&engine->memory, size, memory_order_relaxed);
    return pointer;
}

void engine_release(cxl_engine *engine, void *pointer, size_t size)
{
    if (pointer == NULL)
        return;
    atomic_fetch_sub_explicit(&engine->memory, size, memory_order_relaxed);
    free(pointer);
}

void cxl_free(void *pointer)
{
    free(pointer);
}

/* --------------------------------------------------------------------------------------- life */

static uint64_t random_seed(void)
{
    uint64_t seed;
    struct timespec now;
    if (getrandom(&seed, sizeof(seed), GRND_NONBLOCK) == (ssize_t)sizeof(seed))
        return seed;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_nsec * UINT64_C(0x9e3779b97f4a7c15);
}

static void init_locks(cxl_engine *engine)
{
    pthread_mutex_init(&engine->maps, NULL);
    pthread_mutex_init(&engine->lock, NULL);
    pthread_mutex_init(&engine->snapshots.lock, NULL);
    for (int i = 0; i < STRIPES; i++)
        pthread_mutex_init(&engine->stripes[i], NULL);
}

static void destroy_locks(cxl_engine *engine)
{
    pthread_mutex_destroy(&engine->maps);
    pthread_mutex_destroy(&engine->lock);
    pthread_mutex_destroy(&engine->snapshots.lock);
    for (int i = 0; i < STRIPES; i++)
        pthread_mutex_destroy(&engine->stripes[i]);
}

int cxl_engine_new(cxl_media *media, uint64_t first, uint64_t segment_size, uint64_t segment_count,
                   uint32_t chunk, cxl_engine **out)
{
    uint64_t size = cxl_media_size(media);
    if (chunk < CHUNK_BYTES_MIN || chunk > CHUNK_BYTES_MAX || (chunk & (chunk - 1)) != 0)
        return -EINVAL;
    if (segment_size < SEGMENT_BYTES_MIN || first > size)
        return -EINVAL;
    if (segment_size > UINT32_MAX)
        return -EINVAL;
    if (segment_count > (size - first) / segment_size || segment_count > UINT32_MAX - 2)
        return -EINVAL;
    cxl_engine *engine = cxl_allocate_zeroed(1, sizeof(*engine));
    if (engine == NULL)
        return -ENOMEM;
    engine->media = media;
    engine->first = first;
    engine->segment_size = segment_size;
    engine->segment_count = segment_count;
    engine->chunk = chunk;
    engine->chunk_shift = (uint32_t)__builtin_ctz(chunk);
    engine->fenced_writes = cxl_media_granularity(media) != CXL_GRANULARITY_PAGE;
    engine->hash_seed = random_seed();
    engine->segments = cxl_allocate_zeroed(segment_count + 1, sizeof(*engine->segments));
    if (engine->segments == NULL || table_init(engine) != 0) {
        free(engine->segments);
        free(engine);
        return -ENOMEM;
    }
    init_locks(engine);
    *out = engine;
    return 0;
}

void cxl_engine_free(cxl_engine *engine)
{
    if (engine == NULL)
        return;
    engine->closing = true;
    while (engine->map_list != NULL)
        cxl_map_free(engine->map_list);
    cxl_snapshot_cancel(engine);
    table_free(engine);
    destroy_locks(engine);
    free(engine->segments);
    free(engine);
}

void cxl_engine_statistics(cxl_engine *engine, cxl_engine_stats *out)
{
    memset(out, 0, sizeof(*out));
    pthread_mutex_lock(&engine->maps);
    out->maps = engine->map_count;
    pthread_mutex_unlock(&engine->maps);
    pthread_mutex_lock(&engine->lock);
    out->extents = engine->extent_count;
    pthread_mutex_unlock(&engine->lock);
    out->refs = atomic_load(&engine->refs);
    out->crcs = atomic_load(&engine->crcs);
    out->kept_bytes = atomic_load(&engine->covered[COVER_KEPT]);
    out->replaced_bytes = atomic_load(&engine->covered[COVER_REPLACED]);
    out->aside_bytes = atomic_load(&engine->covered[COVER_ASIDE]);
    out->leased_bytes = atomic_load(&engine->leased);
    out->uncounted_extents = atomic_load(&engine->uncounted);
    out->memory = atomic_load(&engine->memory);
    out->bytes_written = atomic_load(&engine->bytes_written);
    out->bytes_read = atomic_load(&engine->bytes_read);
    out->checksum_errors = atomic_load(&engine->checksum_errors);
    out->chunks_verified = atomic_load(&engine->chunks_verified);
    out->refs_visited = atomic_load(&engine->refs_visited);
}

/* ------------------------------------------------------------------------------------- leases */

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

/* ----------------------------------------------------------------------------- single extents */

int cxl_engine_describe(cxl_engine *engine, uint64_t id, cxl_extent_info *info, uint32_t **crcs)
{
    extent *x = extent_take(engine, id);
    if (x == NULL)
        return -ENOENT;
    /* The length may grow in between: what is described is what the checksums are of. */
    uint64_t length = extent_snapshot(engine, x, 0, 0, NULL);
    uint64_t count = chunks_of(engine, length);
    int result = -ENOMEM;
    uint32_t *list = cxl_allocate(larger(count, 1) * sizeof(*list));
    while (list != NULL && result != 0) {
        uint64_t now = extent_snapshot(engine, x, 0, count, list);
        if (chunks_of(engine, now) <= count) {
            *info = (cxl_extent_info){
                .id = x->id, .media_offset = x->media_offset, .length = now,
                .crc_count = (uint32_t)count,
            };
            *crcs = list;
            result = 0;
        } else {
            count = chunks_of(engine, now);
            free(list);
            list = cxl_allocate(count * sizeof(*list));
        }
    }
    extent_drop(engine, x);
    return result;
}

int cxl_engine_publish(cxl_engine *engine, uint64_t id)
{
    extent *x = extent_take(engine, id);
    if (x == NULL)
        return -ENOENT;
    snapshot_keep(engine, x);
    pthread_mutex_lock(stripe_of(engine, x));
    if (x->length > 0) {
        x->published = x->length;
        x->published_tail = x->crcs[chunks_of(engine, x->length) - 1];
    }
    pthread_mutex_unlock(stripe_of(engine, x));
    extent_drop(engine, x);
    return 0;
}

/* A chunk is a fault of its own; what cannot be read for want of memory is none. */
int cxl_engine_verify(cxl_engine *engine, uint64_t id, cxl_fault *faults, uint64_t capacity,
                      uint64_t *count, uint64_t *bytes)
{
    cxl_fault fault;
    *count = *bytes = 0;
    extent *x = extent_take(engine, id);
    if (x == NULL)
        return -ENOENT;
    uint64_t length = extent_snapshot(engine, x, 0, 0, NULL);
    for (uint64_t offset = 0; offset < length; offset += engine->chunk) {
        uint64_t piece = smaller(engine->chunk, length - offset);
        extent_range range = {
            .extent = x, .extent_offset = offset, .length = piece,
            .reference_start = 0, .reference_end = length,
        };
        if (extent_read(engine, &range, NULL, true, &fault) != 0) {
            if (*count < capacity)
                faults[*count] = fault;
            ++*count;
        }
        *bytes += piece;
    }
    extent_drop(engine, x);
    return 0;
}
