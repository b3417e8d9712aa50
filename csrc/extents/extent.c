/* extent.c - the table of extents: finding, holding, making and forgetting them.
 *
 * Never: touches media bytes.
 *
 * Invariants
 * - An extent lies inside one segment, at one place for its whole life, and only grows.
 * - An extent without a hold is not in the table: the last hold is dropped under engine.lock.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "extents/extents.h"
#include "extents/referrers.h"

enum {
    TABLE_SIZE_MIN = 64,
    SEGMENT_NOT_QUEUED = 0,      /* in next_dead, which otherwise is an index + 1 ... */
};
#define SEGMENT_LAST UINT32_MAX  /* ... or this behind the last one */

/* -------------------------------------------------------------------------------------- table */

/* The finalizer of splitmix64 (Steele, Lea, Flood 2014) over the seeded id. */
uint64_t engine_hash(const cxl_engine *engine, uint64_t id)
{
    uint64_t z = id ^ engine->hash_seed;
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static extent **bucket_of(const cxl_engine *engine, uint64_t id)
{
    return &engine->table[engine_hash(engine, id) & (engine->table_size - 1)];
}

/* Without memory the table stays as it is: slower, not wrong. */
static void resize_table(cxl_engine *engine, uint64_t size)
{
    extent **old = engine->table;
    uint64_t old_size = engine->table_size;
    extent **fresh = engine_allocate(engine, size * sizeof(*fresh));
    if (fresh == NULL)
        return;
    memset(fresh, 0, size * sizeof(*fresh));
    engine->table = fresh;
    engine->table_size = size;
    for (uint64_t i = 0; i < old_size; i++) {
        for (extent *x = old[i], *next; x != NULL; x = next) {
            extent **bucket = bucket_of(engine, x->id);
            next = x->next;
            x->next = *bucket;
            *bucket = x;
        }
    }
    engine_release(engine, old, old_size * sizeof(*old));
}

void table_make_room(cxl_engine *engine, uint64_t count)
{
    uint64_t size = engine->table_size;
    while (size < engine->extent_count + count)
        size *= 2;
    if (size != engine->table_size)
        resize_table(engine, size);
}

int table_init(cxl_engine *engine)
{
    engine->table = engine_allocate(engine, TABLE_SIZE_MIN * sizeof(*engine->table));
    if (engine->table == NULL)
        return -ENOMEM;
    memset(engine->table, 0, TABLE_SIZE_MIN * sizeof(*engine->table));
    engine->table_size = TABLE_SIZE_MIN;
    return 0;
}

/* Bucket by bucket as they are: taking extents out one by one would shrink the table under the walk. */
void table_free(cxl_engine *engine)
{
    for (uint64_t i = 0; i < engine->table_size; i++) {
        for (extent *x = engine->table[i], *next; x != NULL; x = next) {
            next = x->next;
            cover_destroy(engine, x);
            referrers_destroy(engine, x);
            engine_release(engine, x->crcs, x->crc_capacity * sizeof(*x->crcs));
            engine_release(engine, x, sizeof(*x));
        }
    }
    engine_release(engine, engine->table, engine->table_size * sizeof(*engine->table));
}

bool extent_place(const cxl_engine *engine, uint64_t media_offset, uint64_t length,
                  uint64_t *segment)
{
    uint64_t relative = media_offset - engine->first;
    if (media_offset < engine->first || length == 0 || length > engine->segment_size)
        return false;
    *segment = relative / engine->segment_size;
    return *segment < engine->segment_count &&
           relative % engine->segment_size <= engine->segment_size - length;
}

void extent_prefetch(const cxl_engine *engine, uint64_t id, uint64_t sooner_id)
{
    __builtin_prefetch(bucket_of(engine, id));
    __builtin_prefetch(*bucket_of(engine, sooner_id));
}

extent *extent_find_locked(cxl_engine *engine, uint64_t id)
{
    extent *x = *bucket_of(engine, id);
    while (x != NULL && x->id != id)
        x = x->next;
    return x;
}

static void segment_add(cxl_engine *engine, segment_state *segment, extent *x)
{
    x->segment_next = segment->first;
    if (x->segment_next != NULL)
        x->segment_next->segment_previous = x;
    segment->first = x;
    if (segment->extents++ == 0)
        atomic_fetch_add_explicit(&engine->occupied_segments, 1, memory_order_relaxed);
}

static void segment_remove(cxl_engine *engine, segment_state *segment, extent *x)
{
    if (x->segment_next != NULL)
        x->segment_next->segment_previous = x->segment_previous;
    if (x->segment_previous != NULL)
        x->segment_previous->segment_next = x->segment_next;
    else
        segment->first = x->segment_next;
    if (--segment->extents == 0)
        atomic_fetch_sub_explicit(&engine->occupied_segments, 1, memory_order_relaxed);
}

extent *extent_create_locked(cxl_engine *engine, uint64_t id, uint64_t media_offset,
                             uint64_t chunks)
{
    extent *x = engine_allocate(engine, sizeof(*x));
    if (x == NULL)
        return NULL;
    memset(x, 0, sizeof(*x));
    x->id = id;
    x->media_offset = media_offset;
    x->segment = (uint32_t)((media_offset - engine->first) / engine->segment_size);
    cover_init(x);
    x->snapshot = engine->snapshots.number;
    if (extent_grow_crcs(engine, x, chunks) != 0) {
        engine_release(engine, x, sizeof(*x));
        return NULL;
    }
    if (engine->extent_count >= engine->table_size)
        resize_table(engine, engine->table_size * 2);
    extent **bucket = bucket_of(engine, id);
    x->next = *bucket;
    *bucket = x;
    engine->extent_count++;
    segment_add(engine, segment_of(engine, x), x);
    return x;
}

static void queue_dead(cxl_engine *engine, segment_state *segment)
{
    uint32_t name = (uint32_t)(segment - engine->segments) + 1;
    if (segment->next_dead != SEGMENT_NOT_QUEUED)
        return;
    segment->next_dead = SEGMENT_LAST;
    if (engine->dead_first == 0)
        engine->dead_first = name;
    else
        engine->segments[engine->dead_last - 1].next_dead = name;
    engine->dead_last = name;
}

void extent_destroy_locked(cxl_engine *engine, extent *x, bool count_dead)
{
    extent **link = bucket_of(engine, x->id);
    segment_state *segment = segment_of(engine, x);
    snapshot_keep(engine, x);
    while (*link != x)
        link = &(*link)->next;
    *link = x->next;
    engine->extent_count--;
    segment_remove(engine, segment, x);
    if (segment->extents == 0 && count_dead)
        queue_dead(engine, segment);
    atomic_fetch_sub(&engine->crcs, chunks_of(engine, x->length));
    cover_destroy(engine, x);
    referrers_destroy(engine, x);
    engine_release(engine, x->crcs, x->crc_capacity * sizeof(*x->crcs));
    engine_release(engine, x, sizeof(*x));
    if (engine->table_size > TABLE_SIZE_MIN && engine->extent_count < engine->table_size / 8)
        resize_table(engine, larger(engine->table_size / 4, TABLE_SIZE_MIN));
}

int64_t cxl_engine_dead_segments(cxl_engine *engine, uint64_t *indexes, uint64_t capacity)
{
    uint64_t count = 0;
    pthread_mutex_lock(&engine->lock);
    while (engine->dead_first != 0 && count < capacity) {
        segment_state *segment = &engine->segments[engine->dead_first - 1];
        uint32_t next = segment->next_dead;
        if (segment->extents == 0)   /* it may be in use again */
            indexes[count++] = engine->dead_first - 1;
        segment->next_dead = SEGMENT_NOT_QUEUED;
        engine->dead_first = next == SEGMENT_LAST ? 0 : next;
    }
    pthread_mutex_unlock(&engine->lock);
    return (int64_t)count;
}

/* -------------------------------------------------------------------------------------- holds */

extent *extent_take(cxl_engine *engine, uint64_t id)
{
    pthread_mutex_lock(&engine->lock);
    extent *x = extent_find_locked(engine, id);
    if (x != NULL)
        extent_hold(x);
    pthread_mutex_unlock(&engine->lock);
    return x;
}

void extent_drop_locked(cxl_engine *engine, extent *x)
{
    if (atomic_fetch_sub_explicit(&x->holds, 1, memory_order_acq_rel) == 1)
        extent_destroy_locked(engine, x, true);
}

void extent_drop(cxl_engine *engine, extent *x)
{
    uint64_t holds = atomic_load_explicit(&x->holds, memory_order_relaxed);
    while (holds > 1) {
        if (atomic_compare_exchange_weak_explicit(&x->holds, &holds, holds - 1,
                                                  memory_order_release, memory_order_relaxed))
            return;
    }
    pthread_mutex_lock(&engine->lock);
    extent_drop_locked(engine, x);
    pthread_mutex_unlock(&engine->lock);
}

void cxl_engine_drop_unreferenced(cxl_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    /* The table may shrink under the walk, which then begins again, with a fourth of the table. */
    uint64_t size = engine->table_size;
    for (uint64_t i = 0; i < engine->table_size; i++) {
        for (extent *x = engine->table[i], *next; x != NULL; x = next) {
            next = x->next;
            if (!x->kept)
                continue;
            x->kept = false;
            extent_drop_locked(engine, x);
            if (engine->table_size != size)
                break;
        }
        if (engine->table_size != size) {
            size = engine->table_size;
            i = UINT64_MAX;
        }
    }
    pthread_mutex_unlock(&engine->lock);
}

/* ---------------------------------------------------------------------------------- checksums */

int extent_grow_crcs(cxl_engine *engine, extent *x, uint64_t chunks)
{
    if (chunks <= x->crc_capacity)
        return 0;
    if (chunks > UINT32_MAX)
        return -ENOMEM;
    uint32_t *fresh = engine_allocate(engine, chunks * sizeof(*fresh));
    if (fresh == NULL)
        return -ENOMEM;
    pthread_mutex_lock(stripe_of(engine, x));
    uint32_t *old = x->crcs;
    uint32_t old_capacity = x->crc_capacity;
    if (old_capacity != 0)
        memcpy(fresh, old, old_capacity * sizeof(*fresh));
    x->crcs = fresh;
    x->crc_capacity = (uint32_t)chunks;
    pthread_mutex_unlock(stripe_of(engine, x));
    engine_release(engine, old, old_capacity * sizeof(*old));
    return 0;
}

/* Give back checksum room that an extent reserved and did not use; without memory it keeps it. */
static void shrink_crcs(cxl_engine *engine, extent *x)
{
    uint64_t chunks = chunks_of(engine, x->length);
    if (chunks == 0 || chunks == x->crc_capacity)
        return;
    uint32_t *fresh = engine_allocate(engine, chunks * sizeof(*fresh));
    if (fresh == NULL)
        return;
    pthread_mutex_lock(stripe_of(engine, x));
    uint32_t *old = x->crcs;
    uint32_t old_capacity = x->crc_capacity;
    memcpy(fresh, old, chunks * sizeof(*fresh));
    x->crcs = fresh;
    x->crc_capacity = (uint32_t)chunks;
    pthread_mutex_unlock(stripe_of(engine, x));
    engine_release(engine, old, old_capacity * sizeof(*old));
}

uint64_t extent_published(cxl_engine *engine, extent *x)
{
    pthread_mutex_lock(stripe_of(engine, x));
    uint64_t published = x->published;
    pthread_mutex_unlock(stripe_of(engine, x));
    return published;
}

bool extent_is_known(cxl_engine *engine, extent *x, uint64_t end)
{
    pthread_mutex_lock(stripe_of(engine, x));
    bool known = end <= x->published || x->past_chunks != 0;
    pthread_mutex_unlock(stripe_of(engine, x));
    return known;
}

void extent_set_published(cxl_engine *engine, extent *x, uint64_t length, uint32_t tail)
{
    snapshot_keep(engine, x);
    pthread_mutex_lock(stripe_of(engine, x));
    if (length > x->published) {
        x->published = length;
        x->published_tail = tail;
    }
    pthread_mutex_unlock(stripe_of(engine, x));
}

void extent_close(cxl_engine *engine, extent *x, uint64_t *media_offset, uint64_t *length)
{
    uint64_t end = x->media_offset + x->capacity;
    /* Room that another extent gets must not share a unit with bytes of this one. */
    uint64_t used = x->media_offset + x->length + PUBLISH_ALIGN - 1;
    *media_offset = smaller(used / PUBLISH_ALIGN * PUBLISH_ALIGN, end);
    *length = end - *media_offset;
    shrink_crcs(engine, x);
    cover_close(engine, x);
    pthread_mutex_lock(&engine->lock);
    x->open = false;
    x->attached = false;
    x->capacity = x->length;
    extent_drop_locked(engine, x);
    pthread_mutex_unlock(&engine->lock);
}
