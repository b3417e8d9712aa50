/* tree.c - the sorted references of one content, in a row of leaves: life, search, memory.
 *
 * Never: locks (its caller holds the map for writing, or for reading), touches media bytes.
 *
 * Invariants
 * - References are sorted, apart, not empty; two that continue each other are one.
 * - Each reference has a hold on its extent.
 * - Memory is taken before anything is changed: a failed call has changed nothing.
 *
 * Cost: two binary searches and the copy of at most a leaf or two for each change, and for each new
 * leaf a move of the row of leaf pointers (128 KiB for a million references).
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "extents/reference_snapshot.h"

static size_t leaf_bytes(uint32_t capacity)
{
    return offsetof(leaf, refs) + capacity * sizeof(reference);
}

leaf *leaf_new(cxl_engine *engine, tree *content, uint32_t capacity)
{
    leaf *fresh = content->spares;
    if (fresh != NULL) {
        content->spares = fresh->next_spare;
        fresh->count = 0;
        atomic_init(&fresh->snapshot, NULL);
        return fresh;
    }
    fresh = engine_allocate(engine, leaf_bytes(capacity));
    if (fresh != NULL) {
        fresh->count = 0;
        fresh->capacity = capacity;
        atomic_init(&fresh->snapshot, NULL);
    }
    return fresh;
}

static void leaf_free(cxl_engine *engine, leaf *old)
{
    engine_release(engine, old, leaf_bytes(old->capacity));
}

void leaf_retire(cxl_engine *engine, tree *content, leaf *old)
{
    leaf_keep(engine, old);
    if (content->batch_capacity != 0 && old->capacity >= content->batch_capacity) {
        old->next_spare = content->spares;
        content->spares = old;
    } else {
        leaf_free(engine, old);
    }
}

/* Sizes 1, 3, 7 ... LEAF_MAX: most files have one reference, none should pay for 127. */
uint32_t leaf_capacity_for(uint64_t count)
{
    uint32_t capacity = 1;
    while (capacity < count)
        capacity = capacity * 2 + 1;
    return capacity;
}

int tree_reserve_row(cxl_engine *engine, tree *content, uint64_t leaves)
{
    uint64_t capacity = (uint64_t)content->leaf_capacity * 2;
    if (leaves <= content->leaf_capacity)
        return 0;
    capacity = larger(capacity, leaves);
    if (capacity > UINT32_MAX)
        return -ENOMEM;
    leaf **row = engine_allocate(engine, capacity * sizeof(leaf *));
    if (row == NULL)
        return -ENOMEM;
    memcpy(row, content->leaves, content->leaf_count * sizeof(leaf *));
    if (content->leaves != &content->only)
        engine_release(engine, content->leaves, content->leaf_capacity * sizeof(leaf *));
    content->leaves = row;
    content->leaf_capacity = (uint32_t)capacity;
    return 0;
}

/* -------------------------------------------------------------------------------- life, search */

void tree_init(tree *content, uint64_t owner)
{
    memset(content, 0, sizeof(*content));
    content->owner = owner;
    content->leaves = &content->only;
    content->leaf_capacity = 1;
}

void tree_free_leaves(cxl_engine *engine, tree *content)
{
    leaves_keep(engine, content, 0, content->leaf_count);
    while (content->leaf_count > 0)
        leaf_free(engine, content->leaves[--content->leaf_count]);
    if (content->leaves != &content->only)
        engine_release(engine, content->leaves, content->leaf_capacity * sizeof(leaf *));
}

void tree_clear(cxl_engine *engine, tree *content)
{
    leaves_keep(engine, content, 0, content->leaf_count);
    cover_drop_all(engine, content);
    promise_clear(engine, content);
    tree_unreserve(engine, content);
    tree_free_leaves(engine, content);
    cover_refs(engine, content, -(int64_t)content->refs);
    tree_init(content, content->owner);
}

/* Into leaves that have room for all of them. */
static void copy_references(const tree *source, tree *target)
{
    uint32_t index = 0;
    for (uint32_t i = 0; i < source->leaf_count; i++) {
        const reference *from = source->leaves[i]->refs;
        for (uint32_t rest = source->leaves[i]->count; rest > 0;) {
            leaf *to = target->leaves[index];
            uint32_t piece = (uint32_t)smaller(rest, to->capacity - to->count);
            memcpy(to->refs + to->count, from, piece * sizeof(*from));
            to->count += piece;
            from += piece;
            rest -= piece;
            if (to->count == to->capacity)
                index++;
        }
    }
    target->refs = source->refs;
    target->bytes = source->bytes;
}

int tree_copy(cxl_engine *engine, const tree *source, int kind, tree *target)
{
    tree_init(target, source->owner);
    target->kind = (uint8_t)kind;
    uint64_t leaves = (source->refs + LEAF_MAX - 1) / LEAF_MAX;
    int result = tree_reserve_row(engine, target, leaves);
    for (uint64_t i = 0; i < leaves && result == 0; i++) {
        uint32_t capacity = leaves == 1 ? leaf_capacity_for(source->refs) : LEAF_MAX;
        leaf *fresh = leaf_new(engine, target, capacity);
        if (fresh == NULL)
            result = -ENOMEM;
        else
            target->leaves[target->leaf_count++] = fresh;
    }
    if (result == 0)
        result = cover_hold_all(engine, source, kind);
    if (result != 0) {
        tree_clear(engine, target); /* of empty leaves */
        return result;
    }
    copy_references(source, target);
    cover_refs(engine, target, (int64_t)target->refs);
    return 0;
}

tree_position tree_find(const tree *content, uint64_t offset)
{
    uint32_t low = 0, high = content->leaf_count;
    /* The last leaf that begins at or before offset, else the first. */
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (content->leaves[middle]->refs[0].file_offset <= offset)
            low = middle;
        else
            high = middle;
    }
    if (content->leaf_count == 0)
        return (tree_position){0, 0};
    const leaf *in = content->leaves[low];
    uint32_t first = 0, end = in->count;
    while (first < end) {
        uint32_t middle = first + (end - first) / 2;
        if (reference_end(&in->refs[middle]) > offset)
            end = middle;
        else
            first = middle + 1;
    }
    return first == in->count ? (tree_position){low + 1, 0} : (tree_position){low, first};
}

reference *tree_at(const tree *content, tree_position position)
{
    if (position.leaf >= content->leaf_count)
        return NULL;
    return &content->leaves[position.leaf]->refs[position.slot];
}

tree_position tree_next(const tree *content, tree_position position)
{
    if (position.slot + 1 < content->leaves[position.leaf]->count)
        return (tree_position){position.leaf, position.slot + 1};
    return (tree_position){position.leaf + 1, 0};
}

bool tree_step_back(const tree *content, tree_position *position)
{
    if (position->slot > 0) {
        position->slot--;
        return true;
    }
    if (position->leaf == 0)
        return false;
    position->leaf--;
    position->slot = content->leaves[position->leaf]->count - 1;
    return true;
}

reference *tree_ending_at(const tree *content, uint64_t offset)
{
    tree_position position = tree_find(content, offset);
    if (!tree_step_back(content, &position))
        return NULL;
    reference *ref = tree_at(content, position);
    return reference_end(ref) == offset ? ref : NULL;
}

/* ------------------------------------------------------------------------------------- batches */

/* One leaf is enough, before, after and in between. */
static int reserve_small(cxl_engine *engine, tree *content, uint64_t most)
{
    leaf *old = content->leaf_count == 1 ? content->leaves[0] : NULL;
    if (old == NULL || old->capacity < most) {
        leaf *fresh = leaf_new(engine, content, leaf_capacity_for(most));
        if (fresh == NULL)
            return -ENOMEM;
        if (old == NULL) {
            fresh->next_spare = NULL;
            content->spares = fresh;
        } else {
            memcpy(fresh->refs, old->refs, old->count * sizeof(reference));
            fresh->count = old->count;
            content->leaves[0] = fresh;
            leaf_keep(engine, old);
            leaf_free(engine, old);
        }
    }
    content->batch_capacity = (uint32_t)most;
    return 0;
}

int tree_reserve(cxl_engine *engine, tree *content, uint64_t count)
{
    if (count == 0)
        return 0;
    /* Each replacement adds two references at most. */
    uint64_t most = content->refs + 2 * count;
    if (content->leaf_count <= 1 && most <= LEAF_MAX)
        return reserve_small(engine, content, most);
    /* A replacement adds one leaf at most, and then to a full one, of which there are as many as
     * leaves at first; a leaf split in two has room for more than 16 further ones. Three are in use
     * before the old ones are back. */
    uint64_t leaves = smaller(count, content->leaf_count + count / 16 + 2) + 3;
    int result = tree_reserve_row(engine, content, content->leaf_count + leaves);
    leaf *list = NULL;
    while (result == 0 && leaves > 0) {
        leaf *fresh = engine_allocate(engine, leaf_bytes(LEAF_MAX));
        if (fresh == NULL) {
            result = -ENOMEM;
        } else {
            fresh->capacity = LEAF_MAX;
            fresh->next_spare = list;
            list = fresh;
            leaves--;
        }
    }
    content->spares = list;
    content->batch_capacity = LEAF_MAX;
    if (result != 0)
        tree_unreserve(engine, content);
    return result;
}

void tree_unreserve(cxl_engine *engine, tree *content)
{
    while (content->spares != NULL) {
        leaf *old = content->spares;
        content->spares = old->next_spare;
        leaf_free(engine, old);
    }
    content->batch_capacity = 0;
}
