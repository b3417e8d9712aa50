/* map.c - one content of one file: life, size, and references that come from elsewhere (replay,
 * image, cleaner, another file).
 *
 * Never: touches media bytes (map_read.c and map_write.c do).
 *
 * Invariants
 * - A change holds map.writer throughout and map.lock for writing while it shows.
 * - Offsets and sizes stay at or below FILE_OFFSET_MAX.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "extents/discard.h"

enum { FEW = 4 };                /* references of a change that need no memory of their own */

/* --------------------------------------------------------------------------------------- life */

cxl_map *map_allocate(cxl_engine *engine, uint64_t owner)
{
    cxl_map *map = engine_allocate(engine, sizeof(*map));
    if (map == NULL)
        return NULL;
    memset(map, 0, sizeof(*map));
    map->engine = engine;
    map->owner = owner;
    atomic_init(&map->users, 1);
    tree_init(&map->content, owner);
    pthread_mutex_init(&map->writer, NULL);
    pthread_rwlock_init(&map->lock, NULL);
    return map;
}

static cxl_map **owner_bucket(cxl_engine *engine, uint64_t owner)
{
    return &engine->owners[engine_hash(engine, owner) & (engine->owners_size - 1)];
}

/* Without memory the table stays as it is: slower, not wrong. engine.maps_lock is held. */
static void grow_owners(cxl_engine *engine)
{
    uint64_t old_size = engine->owners_size;
    cxl_map **old = engine->owners, **fresh = cxl_allocate_zeroed(2 * old_size, sizeof(*fresh));
    if (fresh == NULL)
        return;
    engine->owners = fresh;
    engine->owners_size = 2 * old_size;
    for (uint64_t i = 0; i < old_size; i++) {
        for (cxl_map *map = old[i], *next; map != NULL; map = next) {
            cxl_map **bucket = owner_bucket(engine, map->owner);
            next = map->next_owner;
            map->next_owner = *bucket;
            *bucket = map;
        }
    }
    free(old);
}

/* Once for many maps, instead of doubling again and again. */
static void make_room_for_owners(cxl_engine *engine, uint64_t count)
{
    pthread_mutex_lock(&engine->maps_lock);
    uint64_t before = 0;
    while (engine->map_count + count > engine->owners_size && engine->owners_size != before) {
        before = engine->owners_size;
        grow_owners(engine);
    }
    pthread_mutex_unlock(&engine->maps_lock);
}

static void owner_link(cxl_map *map)
{
    cxl_engine *engine = map->engine;
    if (engine->map_count > engine->owners_size)
        grow_owners(engine);
    cxl_map **bucket = owner_bucket(engine, map->owner);
    map->next_owner = *bucket;
    *bucket = map;
}

static void owner_unlink(cxl_map *map)
{
    cxl_map **link = owner_bucket(map->engine, map->owner);
    while (*link != map)
        link = &(*link)->next_owner;
    *link = map->next_owner;
}

cxl_map *map_of_owner(cxl_engine *engine, uint64_t owner, const cxl_map *before)
{
    cxl_map *map = before == NULL ? *owner_bucket(engine, owner) : before->next_owner;
    while (map != NULL && map->owner != owner)
        map = map->next_owner;
    return map;
}

void map_link(cxl_map *map)
{
    cxl_engine *engine = map->engine;
    pthread_mutex_lock(&engine->maps_lock);
    map->next = engine->map_list;
    if (map->next != NULL)
        map->next->previous = map;
    engine->map_list = map;
    engine->map_count++;
    owner_link(map);
    pthread_mutex_unlock(&engine->maps_lock);
}

static void map_unlink(cxl_map *map)
{
    cxl_engine *engine = map->engine;
    pthread_mutex_lock(&engine->maps_lock);
    if (map->next != NULL)
        map->next->previous = map->previous;
    if (map->previous != NULL)
        map->previous->next = map->next;
    else
        engine->map_list = map->next;
    engine->map_count--;
    owner_unlink(map);
    pthread_mutex_unlock(&engine->maps_lock);
}

static void map_destroy(cxl_map *map)
{
    cxl_engine *engine = map->engine;
    promise_clear(engine, &map->content);
    tree_discard(engine, &map->content, 0);
    tree_clear(engine, &map->content);
    marks_release(engine, &map->dirty);
    pthread_mutex_destroy(&map->writer);
    pthread_rwlock_destroy(&map->lock);
    engine_release(engine, map, sizeof(*map));
}

int cxl_map_new(cxl_engine *engine, uint64_t owner, cxl_map **out)
{
    cxl_map *map = map_allocate(engine, owner);
    if (map == NULL)
        return -ENOMEM;
    map->dirty.fresh = true;
    map_link(map);
    *out = map;
    return 0;
}

int cxl_map_clone(cxl_map *map, int kind, cxl_map **out)
{
    if (kind < 0 || kind >= COVER_KINDS)
        return -EINVAL;
    cxl_map *copy = map_allocate(map->engine, map->owner);
    if (copy == NULL)
        return -ENOMEM;
    pthread_rwlock_rdlock(&map->lock);
    int result = tree_copy(map->engine, &map->content, kind, &copy->content);
    copy->size = copy->dirty.cut = copy->dirty.taken_size = map->size;
    pthread_rwlock_unlock(&map->lock);
    if (result != 0) {
        map_destroy(copy);
        return result;
    }
    map_link(copy);
    *out = copy;
    return 0;
}

void cxl_map_free(cxl_map *map)
{
    uint64_t media_offset, length;
    if (map == NULL || atomic_fetch_sub_explicit(&map->users, 1, memory_order_acq_rel) != 1)
        return;
    map_unlink(map);
    while (cxl_map_close_lease(map, &media_offset, &length) > 0)
        ;
    map_destroy(map);
}

/* ---------------------------------------------------------------------------------- questions */

uint64_t cxl_map_size(cxl_map *map)
{
    pthread_rwlock_rdlock(&map->lock);
    uint64_t size = map->size;
    pthread_rwlock_unlock(&map->lock);
    return size;
}

uint64_t cxl_map_ref_count(cxl_map *map)
{
    pthread_rwlock_rdlock(&map->lock);
    uint64_t count = map->content.refs;
    pthread_rwlock_unlock(&map->lock);
    return count;
}

uint64_t cxl_map_allocated(cxl_map *map)
{
    pthread_rwlock_rdlock(&map->lock);
    uint64_t bytes = map->content.bytes;
    pthread_rwlock_unlock(&map->lock);
    return bytes;
}

int cxl_map_is_dirty(cxl_map *map)
{
    pthread_rwlock_rdlock(&map->lock);
    int dirty = marks_any(&map->dirty, map->size);
    pthread_rwlock_unlock(&map->lock);
    return dirty;
}

int cxl_map_export(cxl_map *map, uint64_t offset, uint64_t length, cxl_ref **out, uint64_t *count)
{
    uint64_t end = length > UINT64_MAX - offset ? UINT64_MAX : offset + length, found = 0;
    pthread_rwlock_rdlock(&map->lock);
    const tree *content = &map->content;
    tree_position first = tree_find(content, offset), at = first;
    reference *ref;
    while ((ref = tree_at(content, at)) != NULL && ref->file_offset < end) {
        found++;
        at = tree_next(content, at);
    }
    cxl_ref *list = cxl_allocate(larger(found, 1) * sizeof(*list));
    at = first;
    for (uint64_t i = 0; list != NULL && i < found; i++, at = tree_next(content, at)) {
        ref = tree_at(content, at);
        uint64_t start = larger(ref->file_offset, offset);
        list[i] = (cxl_ref){
            .file_offset = start, .length = smaller(reference_end(ref), end) - start,
            .extent_id = ref->extent->id,
            .extent_offset = ref->extent_offset + (start - ref->file_offset),
        };
    }
    pthread_rwlock_unlock(&map->lock);
    if (list == NULL)
        return -ENOMEM;
    *out = list;
    *count = found;
    return 0;
}

/* --------------------------------------------------------------------------------------- size */

static void cut_content(cxl_map *map, uint64_t size)
{
    tree_discard(map->engine, &map->content, size);
    /* Removing up to the end needs no memory, so that this cannot fail. */
    tree_replace(map->engine, &map->content, size, UINT64_MAX, NULL, 0);
}

int cxl_map_truncate(cxl_map *map, uint64_t size)
{
    if (size > FILE_OFFSET_MAX)
        return -EFBIG;
    pthread_mutex_lock(&map->writer);
    pthread_rwlock_wrlock(&map->lock);
    cut_content(map, size);
    marks_cut(&map->dirty, size);
    map->size = size;
    pthread_rwlock_unlock(&map->lock);
    pthread_mutex_unlock(&map->writer);
    return 0;
}

static void set_size(cxl_map *map, uint64_t size)
{
    marks *dirty = &map->dirty;
    /* A new map that was only filled by replay is what the journal says, too. */
    bool clean = dirty->count == 0 && map->size == dirty->taken_size && dirty->cut == map->size;
    cut_content(map, size);
    marks_cut(dirty, size);
    if (clean) {
        dirty->cut = size;
        dirty->fresh = false;
    }
    dirty->taken_size = size;
    map->size = size;
}

int cxl_map_set_size(cxl_map *map, uint64_t size)
{
    if (size > FILE_OFFSET_MAX)
        return -EFBIG;
    pthread_mutex_lock(&map->writer);
    pthread_rwlock_wrlock(&map->lock);
    set_size(map, size);
    pthread_rwlock_unlock(&map->lock);
    pthread_mutex_unlock(&map->writer);
    return 0;
}

/* ---------------------------------------------------------------------------------------- set */

static bool range_of_file(uint64_t offset, uint64_t length)
{
    return length != 0 && offset <= FILE_OFFSET_MAX && length <= FILE_OFFSET_MAX - offset;
}

/* References with a hold on each extent; most changes have a few, which need no memory. */
typedef struct {
    reference *list;
    uint64_t count;
    reference few[FEW];
} held_references;

static void drop_all(cxl_engine *engine, held_references *held)
{
    for (uint64_t i = 0; i < held->count; i++) {
        if (held->list[i].extent != NULL)
            extent_drop(engine, held->list[i].extent);
    }
    if (held->list != held->few)
        free(held->list);
}

/* One reference (extent NULL: a hole) with a hold, which engine.lock is wanted for. */
static bool resolve_one_locked(cxl_engine *engine, const cxl_ref *ref, reference *out)
{
    *out = (reference){ref->file_offset, ref->length, NULL, ref->extent_offset};
    if (!range_of_file(ref->file_offset, ref->length))
        return false;
    if (ref->extent_id == 0)
        return true;
    extent *x = extent_find_locked(engine, ref->extent_id);
    if (x == NULL)
        return false;
    uint64_t known = extent_checksums(engine, x, 0, 0, NULL);
    if (ref->extent_offset > known || ref->length > known - ref->extent_offset)
        return false;
    extent_hold(x);
    out->extent = x;
    return true;
}

/* 0, or -EINVAL with *bad, or -ENOMEM; then nothing is held. */
static int resolve(cxl_engine *engine, const cxl_ref *refs, uint64_t count, held_references *out,
                   uint64_t *bad)
{
    bool good = true;
    out->count = 0;
    out->list = count <= FEW ? out->few : cxl_allocate(count * sizeof(reference));
    if (out->list == NULL)
        return -ENOMEM;
    pthread_mutex_lock(&engine->lock);
    while (good && out->count < count) {
        if (count - out->count > AHEAD)
            extent_prefetch(engine, refs[out->count + AHEAD].extent_id,
                            refs[out->count + AHEAD / 2].extent_id);
        good = resolve_one_locked(engine, &refs[out->count], &out->list[out->count]);
        out->count += good;
    }
    pthread_mutex_unlock(&engine->lock);
    if (good)
        return 0;
    *bad = out->count;
    drop_all(engine, out);
    return -EINVAL;
}

static int put_references(cxl_map *map, const reference *refs, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        size_t some = refs[i].extent != NULL;
        int result = tree_replace(map->engine, &map->content, refs[i].file_offset,
                                  reference_end(&refs[i]), &refs[i], some);
        if (result != 0)
            return result;
    }
    return 0;
}

int map_put(cxl_map *map, const reference *refs, uint64_t count)
{
    pthread_rwlock_wrlock(&map->lock);
    int result = tree_reserve(map->engine, &map->content, count);
    if (result == 0) {
        result = put_references(map, refs, count);
        tree_unreserve(map->engine, &map->content);
    }
    pthread_rwlock_unlock(&map->lock);
    return result;
}

int map_apply(cxl_map *map, uint64_t cut, const reference *refs, uint64_t count, uint64_t size)
{
    pthread_mutex_lock(&map->writer);
    pthread_rwlock_wrlock(&map->lock);
    int result = tree_reserve(map->engine, &map->content, count);
    if (result == 0) {
        set_size(map, smaller(map->size, cut));
        result = put_references(map, refs, count);
        if (result == 0)
            set_size(map, size);
        tree_unreserve(map->engine, &map->content);
    }
    pthread_rwlock_unlock(&map->lock);
    pthread_mutex_unlock(&map->writer);
    return result;
}

int cxl_map_replay(cxl_map *map, uint64_t cut, const cxl_ref *refs, uint64_t count, uint64_t size,
                   uint64_t *bad)
{
    held_references held;
    *bad = 0;
    if (size > FILE_OFFSET_MAX)
        return -EFBIG;
    int result = resolve(map->engine, refs, count, &held, bad);
    if (result != 0)
        return result;
    result = map_apply(map, cut, held.list, count, size);
    drop_all(map->engine, &held);
    return result;
}

/* ------------------------------------------------------------------------------------- import */

/* Sorted, apart, inside the size, no holes; *bad: the reference at fault. */
static bool import_fits(const cxl_ref *refs, uint64_t first, uint64_t end, uint64_t size,
                        uint64_t *bad)
{
    uint64_t before = 0;
    *bad = first;
    if (size > FILE_OFFSET_MAX)
        return false;
    for (uint64_t i = first; i < end; i++) {
        *bad = i;
        if (refs[i].extent_id == 0 || refs[i].file_offset < before || refs[i].file_offset > size ||
            refs[i].length == 0 || refs[i].length > size - refs[i].file_offset)
            return false;
        before = refs[i].file_offset + refs[i].length;
    }
    return true;
}

static int import_one(cxl_engine *engine, uint64_t owner, uint64_t size, const reference *list,
                      uint64_t count, cxl_map **out)
{
    cxl_map *map = map_allocate(engine, owner);
    if (map == NULL)
        return -ENOMEM;
    int result = count == 0 ? 0 : tree_replace(engine, &map->content, 0, UINT64_MAX, list, count);
    if (result != 0) {
        map_destroy(map);
        return result;
    }
    map->size = map->dirty.cut = map->dirty.taken_size = size;
    map_link(map);
    *out = map;
    return 0;
}

int cxl_maps_import(cxl_engine *engine, uint64_t map_count, const uint64_t *owners,
                    const uint64_t *sizes, const uint64_t *first, const cxl_ref *refs,
                    cxl_map **out, uint64_t *bad)
{
    held_references held;
    uint64_t done = 0;
    *bad = 0;
    if (map_count == 0)
        return 0;
    if (first[0] != 0)
        return -EINVAL;
    for (uint64_t i = 0; i < map_count; i++) {
        *bad = first[i];
        if (first[i + 1] < first[i])
            return -EINVAL;
    }
    for (uint64_t i = 0; i < map_count; i++) {
        if (!import_fits(refs, first[i], first[i + 1], sizes[i], bad))
            return -EINVAL;
    }
    uint64_t total = first[map_count];
    int result = resolve(engine, refs, total, &held, bad);
    if (result != 0)
        return result;
    make_room_for_owners(engine, map_count);
    for (; done < map_count && result == 0; done++) {
        if (map_count - done > AHEAD)
            __builtin_prefetch(owner_bucket(engine, owners[done + AHEAD]), 1);
        result = import_one(engine, owners[done], sizes[done], held.list + first[done],
                            first[done + 1] - first[done], &out[done]);
    }
    if (result != 0) {
        for (done--; done > 0; done--)
            cxl_map_free(out[done - 1]);
    }
    drop_all(engine, &held);
    return result;
}
