/* delta.c - what a journal record says of a map: taken, then applied to the committed content or
 * given back.
 *
 * Never: writes a record, or decides when.
 *
 * Invariants
 * - A delta holds every extent that it names until it is applied or cancelled.
 * - An extent counts as published only after a record that says so is durable (cxl_delta_apply).
 * - Between taking a delta and its end every change of the map is in its marks or in the delta.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "extents/append.h"

typedef struct {
    cxl_delta face;           /* what the caller sees, first */
    cxl_engine *engine;
    reference *held;          /* face.refs with their extents */
    extent **named;           /* the extents of face.extents */
    marks older;              /* what cancelling brings back */
} delta;

static void delta_free(delta *d)
{
    for (uint64_t i = 0; i < d->face.ref_count; i++) {
        if (d->held[i].extent != NULL)
            extent_drop(d->engine, d->held[i].extent);
    }
    marks_release(d->engine, &d->older);
    free(d->face.refs);
    free(d->face.extents);
    free(d->face.crcs);
    free(d->held);
    free(d->named);
    free(d);
}

/* --------------------------------------------------------------------------------- references */

/* Fills list (if any) with what now stands in [start, end), holes below the cut included: content
 * beyond it is cut anyway. Returns how many. */
static uint64_t collect_interval(const cxl_map *map, uint64_t start, uint64_t end, reference *list)
{
    uint64_t count = 0, hole_end = smaller(end, map->dirty.cut);
    const tree *content = &map->content;
    tree_position at = tree_find(content, start);
    while (start < end) {
        const reference *ref = tree_at(content, at);
        bool any = ref != NULL && ref->file_offset < end;
        uint64_t next = any ? larger(ref->file_offset, start) : end;
        if (start < smaller(next, hole_end)) {
            if (list != NULL)
                list[count] = (reference){start, smaller(next, hole_end) - start, NULL, 0};
            count++;
        }
        start = next;
        if (!any)
            break;
        uint64_t stop = smaller(reference_end(ref), end);
        if (list != NULL)
            list[count] = (reference){start, stop - start, ref->extent,
                                      ref->extent_offset + (start - ref->file_offset)};
        count++;
        start = stop;
        at = tree_next(content, at);
    }
    return count;
}

static uint64_t collect(const cxl_map *map, reference *list)
{
    uint64_t count = 0;
    if (map->dirty.fresh)
        return collect_interval(map, 0, map->size, list);
    for (uint32_t i = 0; i < map->dirty.count; i++) {
        const interval *range = &map->dirty.list[i];
        if (range->start < map->size)
            count += collect_interval(map, range->start, smaller(range->end, map->size),
                                      list != NULL ? list + count : NULL);
    }
    return count;
}

static int take_references(cxl_map *map, delta *d)
{
    uint64_t count = collect(map, NULL);
    d->held = cxl_allocate(larger(count, 1) * sizeof(*d->held));
    d->face.refs = cxl_allocate(larger(count, 1) * sizeof(*d->face.refs));
    if (d->held == NULL || d->face.refs == NULL)
        return -ENOMEM;
    collect(map, d->held);
    d->face.ref_count = count;
    for (uint64_t i = 0; i < count; i++) {
        const reference *ref = &d->held[i];
        if (ref->extent != NULL)
            extent_hold(ref->extent);
        d->face.refs[i] = (cxl_ref){
            .file_offset = ref->file_offset, .length = ref->length,
            .extent_id = ref->extent != NULL ? ref->extent->id : 0,
            .extent_offset = ref->extent_offset,
        };
    }
    return 0;
}

/* ------------------------------------------------------------------------------------ extents */

static int compare_extents(const void *a, const void *b)
{
    const extent *x = *(extent *const *)a, *y = *(extent *const *)b;
    return (x->id > y->id) - (x->id < y->id);
}

/* Length and published length as of one moment. */
static uint64_t lengths(cxl_engine *engine, extent *x, uint64_t *published)
{
    pthread_mutex_lock(stripe_of(engine, x));
    uint64_t length = x->length;
    *published = x->published;
    pthread_mutex_unlock(stripe_of(engine, x));
    return length;
}

/* The extents named that the journal does not know as they are, each once. */
static int take_extents(delta *d)
{
    uint64_t count = 0, kept = 0, published;
    d->named = cxl_allocate(larger(d->face.ref_count, 1) * sizeof(extent *));
    if (d->named == NULL)
        return -ENOMEM;
    for (uint64_t i = 0; i < d->face.ref_count; i++) {
        extent *x = d->held[i].extent;
        if (x == NULL || (count > 0 && d->named[count - 1] == x))
            continue;
        if (lengths(d->engine, x, &published) > published)
            d->named[count++] = x;
    }
    qsort(d->named, count, sizeof(extent *), compare_extents);
    for (uint64_t i = 0; i < count; i++) {
        if (kept == 0 || d->named[kept - 1] != d->named[i])
            d->named[kept++] = d->named[i];
    }
    d->face.extent_count = kept;
    return 0;
}

static int take_definitions(delta *d)
{
    cxl_engine *engine = d->engine;
    uint64_t published, total = 0, count = d->face.extent_count;
    d->face.extents = cxl_allocate(larger(count, 1) * sizeof(*d->face.extents));
    if (d->face.extents == NULL)
        return -ENOMEM;
    for (uint64_t i = 0; i < count; i++) {
        extent *x = d->named[i];
        uint64_t length = lengths(engine, x, &published);
        uint64_t first = published >> engine->chunk_shift;
        d->face.extents[i] = (cxl_extent_info){
            .id = x->id, .media_offset = x->media_offset, .length = length, .crc_index = total,
            .first_chunk = (uint32_t)first,
            .crc_count = (uint32_t)(chunks_of(engine, length) - first),
        };
        total += d->face.extents[i].crc_count;
    }
    d->face.crcs = cxl_allocate(larger(total, 1) * sizeof(*d->face.crcs));
    if (d->face.crcs == NULL)
        return -ENOMEM;
    d->face.crc_count = total;
    for (uint64_t i = 0; i < count; i++) {
        cxl_extent_info *info = &d->face.extents[i];
        uint32_t *crcs = d->face.crcs + info->crc_index;
        uint64_t end = (uint64_t)info->first_chunk + info->crc_count;
        uint64_t now =
            extent_checksums(engine, d->named[i], info->first_chunk, info->crc_count, crcs);
        /* Another map's open extent may have grown: then the checksum is of more. */
        info->length = smaller(now, end << engine->chunk_shift);
    }
    return 0;
}

/* ------------------------------------------------------------------------------- take and end */

/* Published bytes end where no later byte shares their unit. */
static int pad_lease(cxl_map *map)
{
    cxl_engine *engine = map->engine;
    extent *x = map->lease;
    append_state state;
    cxl_fault fault;
    static const uint8_t zeros[PUBLISH_ALIGN];
    if (x == NULL || x->length == 0)
        return 0;
    uint64_t padding = (0 - (x->media_offset + x->length)) % PUBLISH_ALIGN;
    padding = smaller(padding, x->capacity - x->length);
    if (padding == 0)
        return 0;
    int result = append_begin(engine, x, 0, &state, &fault);
    if (result == 0)
        result = append_bytes(engine, x, &state, zeros, padding, &fault);
    if (result == 0)
        result = append_fence(engine);
    if (result == 0)
        append_commit(engine, x, &state);
    return result;
}

static int take_locked(cxl_map *map, cxl_delta **out)
{
    int result = pad_lease(map);
    if (result != 0)
        return result;
    delta *d = cxl_allocate_zeroed(1, sizeof(*d));
    if (d == NULL)
        return -ENOMEM;
    d->engine = map->engine;
    d->face.size = map->size;
    d->face.cut = map->dirty.cut;
    result = take_references(map, d);
    if (result == 0)
        result = take_extents(d);
    if (result == 0)
        result = take_definitions(d);
    if (result != 0) {
        delta_free(d);
        return result;
    }
    pthread_rwlock_wrlock(&map->lock);
    d->older = map->dirty;
    map->dirty = (marks){.cut = map->size, .taken_size = map->size};
    pthread_rwlock_unlock(&map->lock);
    *out = &d->face;
    return 0;
}

int cxl_map_take_delta(cxl_map *map, cxl_delta **out)
{
    pthread_mutex_lock(&map->writer);
    int result = take_locked(map, out);
    pthread_mutex_unlock(&map->writer);
    return result;
}

int cxl_delta_apply(cxl_delta *face, cxl_map *map, cxl_map *target)
{
    delta *d = (delta *)(void *)face;
    if (target != NULL && target != map) {
        int result = map_apply(target, face->cut, d->held, face->ref_count, face->size);
        if (result != 0)
            return result;
    }
    for (uint64_t i = 0; i < face->extent_count; i++) {
        const cxl_extent_info *info = &face->extents[i];
        uint32_t tail = face->crcs[info->crc_index + info->crc_count - 1];
        extent_set_published(d->engine, d->named[i], info->length, tail);
    }
    delta_free(d);
    return 0;
}

void cxl_delta_cancel(cxl_delta *face, cxl_map *map)
{
    delta *d = (delta *)(void *)face;
    if (map != NULL) {
        pthread_mutex_lock(&map->writer);
        pthread_rwlock_wrlock(&map->lock);
        marks_return(map->engine, &map->dirty, &d->older);
        pthread_rwlock_unlock(&map->lock);
        pthread_mutex_unlock(&map->writer);
    }
    delta_free(d);
}
