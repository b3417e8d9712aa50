/* engine.c - the engine itself: its life, its memory and its counters.
 *
 * Never: touches media bytes, knows what an extent or a map holds.
 *
 * Invariants
 * - An engine ends with its maps: those that are left are freed with it.
 * - Memory that engine_allocate gave is counted until engine_release takes it back, of the same size.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "extents/discard.h"
#include "extents/reference_snapshot.h"

enum { OWNERS_SIZE_MIN = 64 };

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
    pthread_mutex_init(&engine->maps_lock, NULL);
    pthread_mutex_init(&engine->lock, NULL);
    pthread_mutex_init(&engine->discards_lock, NULL);
    pthread_mutex_init(&engine->references_lock, NULL);
    pthread_mutex_init(&engine->held_lock, NULL);
    pthread_mutex_init(&engine->snapshots.lock, NULL);
    for (int i = 0; i < STRIPES; i++)
        pthread_mutex_init(&engine->stripes[i], NULL);
}

static void destroy_locks(cxl_engine *engine)
{
    pthread_mutex_destroy(&engine->maps_lock);
    pthread_mutex_destroy(&engine->lock);
    pthread_mutex_destroy(&engine->discards_lock);
    pthread_mutex_destroy(&engine->references_lock);
    pthread_mutex_destroy(&engine->held_lock);
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
    engine->discard_min = UINT64_MAX;
    engine->segments = cxl_allocate_zeroed(segment_count + 1, sizeof(*engine->segments));
    engine->owners_size = OWNERS_SIZE_MIN;
    engine->owners = cxl_allocate_zeroed(OWNERS_SIZE_MIN, sizeof(*engine->owners));
    if (engine->segments == NULL || engine->owners == NULL || table_init(engine) != 0) {
        free(engine->owners);
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
    reference_snapshots_free(engine);
    while (engine->map_list != NULL)
        cxl_map_free(engine->map_list);
    discards_free(engine);
    helds_free(engine);
    cxl_snapshot_cancel(engine);
    table_free(engine);
    destroy_locks(engine);
    free(engine->owners);
    free(engine->segments);
    free(engine);
}

void cxl_engine_statistics(cxl_engine *engine, cxl_engine_stats *out)
{
    memset(out, 0, sizeof(*out));
    pthread_mutex_lock(&engine->maps_lock);
    out->maps = engine->map_count;
    pthread_mutex_unlock(&engine->maps_lock);
    pthread_mutex_lock(&engine->lock);
    out->extents = engine->extent_count;
    pthread_mutex_unlock(&engine->lock);
    out->refs = atomic_load(&engine->refs);
    out->discarded_refs = atomic_load(&engine->discarded_refs);
    out->crcs = atomic_load(&engine->crcs);
    out->kept_bytes = atomic_load(&engine->covered[COVER_KEPT]);
    out->replaced_bytes = atomic_load(&engine->covered[COVER_REPLACED]);
    out->aside_bytes = atomic_load(&engine->covered[COVER_ASIDE]);
    out->held_bytes = atomic_load(&engine->covered[COVER_HELD]);
    out->past_bytes = atomic_load(&engine->covered[COVER_PAST]);
    out->past_refs = atomic_load(&engine->past_refs);
    out->leased_bytes = atomic_load(&engine->leased);
    out->uncounted_extents = atomic_load(&engine->uncounted);
    out->memory = atomic_load(&engine->memory);
    out->bytes_written = atomic_load(&engine->bytes_written);
    out->bytes_read = atomic_load(&engine->bytes_read);
    out->checksum_errors = atomic_load(&engine->checksum_errors);
    out->chunks_verified = atomic_load(&engine->chunks_verified);
    out->refs_visited = atomic_load(&engine->refs_visited);
    out->pieces_visited = atomic_load(&engine->pieces_visited);
}

uint64_t cxl_engine_table_bytes(cxl_engine *engine, uint64_t extent_bytes, uint64_t ref_bytes, uint64_t crc_bytes)
{
    pthread_mutex_lock(&engine->lock);
    uint64_t extents = engine->extent_count - atomic_load(&engine->past_extents);
    pthread_mutex_unlock(&engine->lock);
    return extents * extent_bytes + (atomic_load(&engine->refs) - atomic_load(&engine->past_refs)) * ref_bytes +
           (atomic_load(&engine->crcs) - atomic_load(&engine->past_crcs)) * crc_bytes;
}
