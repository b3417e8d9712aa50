/* map_copy.c - the same content once more, made a few references at a time.
 *
 * Never: decides how many at a time, or keeps the source from changing (its owner does).
 *
 * Invariants
 * - Between two parts bytes of the source may move elsewhere (cxl_maps_move), of the copy as well: it has the same
 *   owner, and is found as every map of that owner. Nothing else of either changes.
 * - A copy that is being made ends where the next part begins.
 * - A part that fails for want of memory has changed nothing.
 *
 * Cost of a part: what it copies, and a move of the row of leaf pointers when that grows.
 */
#include <errno.h>
#include <string.h>

#include "extents/coverage.h"
#include "extents/reference_snapshot.h"

static reference clipped(const reference *ref, uint64_t start)
{
    reference part = *ref;
    if (part.file_offset < start) {
        uint64_t before = start - part.file_offset;
        part.file_offset = start;
        part.extent_offset += before;
        part.length -= before;
    }
    return part;
}

/* Leaves for up to so many references of the source from start on, and those in them. */
static int fill_part(cxl_engine *engine, const tree *source, uint64_t start, uint64_t count, tree *part)
{
    const reference *ref;
    count = smaller(count, source->refs);
    int result = tree_reserve_row(engine, part, (count + LEAF_MAX - 1) / LEAF_MAX);
    for (tree_position at = tree_find(source, start);
         result == 0 && part->refs < count && (ref = tree_at(source, at)) != NULL; at = tree_next(source, at)) {
        if (part->refs % LEAF_MAX == 0) {
            leaf *fresh = leaf_new(engine, part, LEAF_MAX);
            if (fresh == NULL) {
                result = -ENOMEM;
                break;
            }
            part->leaves[part->leaf_count++] = fresh;
        }
        leaf *in = part->leaves[part->leaf_count - 1];
        in->refs[in->count++] = clipped(ref, start);
        part->bytes += in->refs[in->count - 1].length;
        part->refs++;
    }
    return result;
}

/* Room for so many references more, in leaves of their own: where there are several, each has all its room. */
static int reserve_behind(cxl_engine *engine, tree *copy, uint64_t count)
{
    int result = tree_reserve_row(engine, copy, copy->leaf_count + (count + LEAF_MAX - 1) / LEAF_MAX);
    leaf *only = copy->leaf_count == 1 ? copy->leaves[0] : NULL;
    if (result != 0 || only == NULL || only->capacity == LEAF_MAX)
        return result;
    leaf *fresh = leaf_new(engine, copy, LEAF_MAX);
    if (fresh == NULL)
        return -ENOMEM;
    memcpy(fresh->refs, only->refs, only->count * sizeof(reference));
    fresh->count = only->count;
    copy->leaves[0] = fresh;
    leaf_retire(engine, copy, only);
    return 0;
}

/* The first reference of a part may go on where the copy ends: its source was moved next to what came before. */
static void join(cxl_engine *engine, tree *copy, tree *part)
{
    leaf *first = part->leaves[0];
    const reference *next = &first->refs[0];
    reference *last = tree_ending_at(copy, next->file_offset);
    if (last == NULL || last->extent != next->extent || last->extent_offset + last->length != next->extent_offset)
        return;
    last->length += next->length;
    extent_drop(engine, next->extent); /* one hold is enough */
    part->refs--;
    memmove(first->refs, first->refs + 1, --first->count * sizeof(reference));
    if (first->count == 0) {
        leaf_retire(engine, part, first);
        memmove(part->leaves, part->leaves + 1, --part->leaf_count * sizeof(leaf *));
    }
}

static void append(cxl_engine *engine, tree *copy, tree *part)
{
    leaves_keep(engine, copy, smaller(copy->leaf_count, copy->leaf_count - 1), copy->leaf_count);
    join(engine, copy, part);
    if (part->leaf_count != 0)
        memcpy(copy->leaves + copy->leaf_count, part->leaves, part->leaf_count * sizeof(leaf *));
    copy->leaf_count += part->leaf_count;
    copy->refs += part->refs;
    copy->bytes += part->bytes;
    cover_refs(engine, copy, (int64_t)part->refs);
    part->leaf_count = 0;
}

/* A part of the source, counted and held as of the copy's kind; *end: where it ends in the file. */
static int take_part(cxl_map *map, const cxl_map *copy, uint64_t count, tree *part, uint64_t *end)
{
    cxl_engine *engine = map->engine;
    const cover_task task = {copy->content.kind, COVER_KINDS, 1, false};
    pthread_rwlock_rdlock(&map->lock);
    int result = fill_part(engine, &map->content, copy->size, count, part);
    if (result == 0 && part->refs != 0) {
        const leaf *last = part->leaves[part->leaf_count - 1];
        *end = reference_end(&last->refs[last->count - 1]);
        result = cover_change_part(engine, &map->content, copy->size, *end, task);
    }
    pthread_rwlock_unlock(&map->lock);
    atomic_fetch_add_explicit(&engine->refs_visited, part->refs, memory_order_relaxed);
    return result;
}

int cxl_map_copy_part(cxl_map *map, cxl_map *copy, uint64_t count)
{
    cxl_engine *engine = map->engine;
    tree part;
    uint64_t end = copy->size;
    tree_init(&part, copy->owner);
    pthread_mutex_lock(&copy->writer);
    uint64_t size = cxl_map_size(map);
    count = smaller(count, cxl_map_ref_count(map));
    int result = reserve_behind(engine, &copy->content, count);
    if (result == 0)
        result = take_part(map, copy, count, &part, &end);
    bool more = part.refs != 0;
    if (result == 0) {
        pthread_rwlock_wrlock(&copy->lock);
        if (more)
            append(engine, &copy->content, &part);
        copy->size = more ? end : size;
        copy->dirty.cut = copy->dirty.taken_size = copy->size;
        pthread_rwlock_unlock(&copy->lock);
    }
    tree_free_leaves(engine, &part);
    pthread_mutex_unlock(&copy->writer);
    return result != 0 ? result : more;
}

int cxl_map_begin_copy(cxl_map *map, int kind, cxl_map **out)
{
    if (kind < 0 || kind >= COVER_KINDS)
        return -EINVAL;
    cxl_map *copy = map_allocate(map->engine, map->owner);
    if (copy == NULL)
        return -ENOMEM;
    copy->content.kind = (uint8_t)kind;
    map_link(copy);
    *out = copy;
    return 0;
}
