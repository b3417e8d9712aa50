/* tree_change.c - the one way in which sorted references change: a range is replaced.
 *
 * Never: locks (its caller holds the map for writing), touches media bytes.
 *
 * Invariants
 * - Memory is taken before anything is changed: a failed call has changed nothing.
 * - Holds of new references are taken before those of old ones are dropped.
 *
 * Cost: two binary searches and the copy of at most a leaf or two for each change, and for each new
 * leaf a move of the row of leaf pointers (128 KiB for a million references).
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "extents/reference_snapshot.h"

enum { MIDDLE_SMALL = 8 };       /* references put together on the stack */

/* References [from, to) make way for the middle ones. */
typedef struct {
    tree_position from;
    tree_position to;
    reference *middle;
    size_t count;
    reference small[MIDDLE_SMALL];
    size_t middle_capacity;
} change;

static bool continues(const reference *a, const reference *b)
{
    return reference_end(a) == b->file_offset && a->extent == b->extent &&
           a->extent_offset + a->length == b->extent_offset;
}

static void push(change *work, reference ref)
{
    if (work->count > 0 && continues(&work->middle[work->count - 1], &ref))
        work->middle[work->count - 1].length += ref.length;
    else
        work->middle[work->count++] = ref;
}

/* What stands in [start, end) afterwards, with the parts of references that stick out at both
 * sides, and with neighbours that it continues. */
static void plan(const tree *content, uint64_t start, uint64_t end, const reference *with,
                 size_t count, change *work)
{
    work->from = tree_find(content, start);
    reference *ref = tree_at(content, work->from);
    if (ref != NULL && ref->file_offset < start) {
        reference left = *ref;
        left.length = start - ref->file_offset;
        push(work, left);
    } else {
        tree_position before = work->from;
        if (count > 0 && tree_step_back(content, &before) &&
            continues(tree_at(content, before), with)) {
            work->from = before;
            push(work, *tree_at(content, before));
        }
    }
    for (size_t i = 0; i < count; i++)
        push(work, with[i]);
    work->to = tree_find(content, end);
    ref = tree_at(content, work->to);
    if (ref == NULL) {
        if (work->from.leaf == content->leaf_count && content->leaf_count > 0) {
            work->from.leaf--;   /* behind everything: at the end of the last leaf */
            work->from.slot = content->leaves[work->from.leaf]->count;
            work->to = work->from;
        }
        return;
    }
    if (ref->file_offset < end) {
        reference right = *ref;
        right.file_offset = end;
        right.length = reference_end(ref) - end;
        right.extent_offset += end - ref->file_offset;
        push(work, right);
        work->to = tree_next(content, work->to);
    } else if (work->count > 0 && continues(&work->middle[work->count - 1], ref)) {
        push(work, *ref);
        work->to = tree_next(content, work->to);
    }
}

/* Holds and counters: the new references first, so that an extent in both never falls to none. */
static void account(cxl_engine *engine, tree *content, const change *work)
{
    uint64_t removed = 0;
    for (size_t i = 0; i < work->count; i++) {
        extent_hold(work->middle[i].extent);
        content->bytes += work->middle[i].length;
    }
    for (tree_position at = work->from; at.leaf != work->to.leaf || at.slot != work->to.slot;
         at = tree_next(content, at)) {
        reference *ref = tree_at(content, at);
        content->bytes -= ref->length;
        extent_drop(engine, ref->extent);
        removed++;
    }
    content->refs += work->count - removed;
    cover_refs(engine, content, (int64_t)(work->count - removed));
}

/* Put count leaves in the place of leaves [first, end) of the row, which has room. */
static void splice_row(tree *content, uint32_t first, uint32_t end, leaf *const *with,
                       uint32_t count)
{
    memmove(content->leaves + first + count, content->leaves + end,
            (content->leaf_count - end) * sizeof(leaf *));
    if (count != 0)
        memcpy(content->leaves + first, with, count * sizeof(leaf *));
    content->leaf_count = content->leaf_count - (end - first) + count;
}

/* After a change at a leaf: no empty leaves, and no two neighbours that would fit in half a one. */
static void tidy(cxl_engine *engine, tree *content, uint32_t index)
{
    if (index >= content->leaf_count)
        return;
    leaf *at = content->leaves[index];
    if (at->count == 0) {
        splice_row(content, index, index + 1, NULL, 0);
        leaf_retire(engine, content, at);
        return;
    }
    if (index + 1 >= content->leaf_count)
        return;
    leaf *next = content->leaves[index + 1];
    if (at->count + next->count > LEAF_MAX / 2)
        return;
    leaf_keep(engine, at);
    memcpy(at->refs + at->count, next->refs, next->count * sizeof(reference));
    at->count += next->count;
    splice_row(content, index + 1, index + 2, NULL, 0);
    leaf_retire(engine, content, next);
}

/* The change within leaves that exist; false when they have no room for it. */
static bool change_in_place(cxl_engine *engine, tree *content, const change *work)
{
    uint32_t from = work->from.leaf, to = work->to.leaf;
    if (from >= content->leaf_count)
        return work->count == 0;
    leaf *left = content->leaves[from];
    bool one = from == to || (to == from + 1 && work->to.slot == 0);
    uint32_t end = from == to ? work->to.slot : left->count;
    uint64_t total = work->from.slot + work->count + (one ? left->count - end : 0);
    if (total > left->capacity)
        return false;
    account(engine, content, work);
    if (one)
        memmove(left->refs + work->from.slot + work->count, left->refs + end,
                (left->count - end) * sizeof(reference));
    memcpy(left->refs + work->from.slot, work->middle, work->count * sizeof(reference));
    left->count = (uint32_t)total;
    if (!one) {
        for (uint32_t i = from + 1; i < to; i++)
            leaf_retire(engine, content, content->leaves[i]);
        if (to < content->leaf_count) {
            leaf *right = content->leaves[to];
            right->count -= work->to.slot;
            memmove(right->refs, right->refs + work->to.slot, right->count * sizeof(reference));
        }
        splice_row(content, from + 1, to, NULL, 0);
    }
    tidy(engine, content, from);
    if (from > 0)
        tidy(engine, content, from - 1);
    return true;
}

/* New leaves: what lies left of the change, the middle, what lies right of it. */
typedef struct {
    const reference *part[3];
    uint64_t count[3];
} gathering;

static void distribute(const gathering *all, uint64_t per_leaf, leaf *const *fresh)
{
    uint32_t index = 0;
    for (int part = 0; part < 3; part++) {
        const reference *from = all->part[part];
        for (uint64_t rest = all->count[part]; rest > 0;) {
            leaf *to = fresh[index];
            uint64_t room = per_leaf - to->count;
            uint64_t piece = smaller(rest, room);
            memcpy(to->refs + to->count, from, piece * sizeof(reference));
            to->count += (uint32_t)piece;
            from += piece;
            rest -= piece;
            if (to->count == per_leaf)
                index++;
        }
    }
}

static void free_leaves(cxl_engine *engine, tree *content, leaf **fresh, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        leaf_retire(engine, content, fresh[i]);
}

static int change_leaves(cxl_engine *engine, tree *content, const change *work)
{
    uint32_t from = work->from.leaf, to = work->to.leaf;
    gathering all = {.part = {NULL, work->middle, NULL}, .count = {0, work->count, 0}};
    if (from < content->leaf_count) {
        all.part[0] = content->leaves[from]->refs;
        all.count[0] = work->from.slot;
    }
    bool last = to >= content->leaf_count;
    if (!last) {
        all.part[2] = content->leaves[to]->refs + work->to.slot;
        all.count[2] = content->leaves[to]->count - work->to.slot;
    }
    uint32_t end = last ? content->leaf_count : to + 1;
    uint64_t total = all.count[0] + all.count[1] + all.count[2];
    uint64_t leaves = (total + LEAF_MAX - 1) / LEAF_MAX;
    /* Content that grows at its end fills its leaves; elsewhere they are left room for more. */
    uint64_t per_leaf = all.count[2] == 0 ? LEAF_MAX : (total + leaves - 1) / leaves;
    uint64_t after = content->leaf_count - (end - from) + leaves;
    bool single = after == 1;
    leaf *few[4], **fresh = few;
    if (leaves > 4)
        fresh = cxl_allocate(leaves * sizeof(*fresh));
    int result = fresh == NULL ? -ENOMEM : tree_reserve_row(engine, content, after);
    uint64_t made = 0;
    while (result == 0 && made < leaves) {
        fresh[made] = leaf_new(engine, content, single ? leaf_capacity_for(total) : LEAF_MAX);
        if (fresh[made] == NULL)
            result = -ENOMEM;
        else
            made++;
    }
    if (result != 0) {
        if (fresh != NULL)
            free_leaves(engine, content, fresh, made);
    } else {
        account(engine, content, work);
        distribute(&all, single ? fresh[0]->capacity : per_leaf, fresh);
        for (uint32_t i = from; i < end; i++)
            leaf_retire(engine, content, content->leaves[i]);
        splice_row(content, from, end, fresh, (uint32_t)leaves);
    }
    if (fresh != few)
        free(fresh);
    return result;
}

int tree_replace(cxl_engine *engine, tree *content, uint64_t start, uint64_t end,
                 const reference *with, size_t count)
{
    int result = 0;
    change work = {.count = 0};
    work.middle = work.small;
    if (count + 3 > MIDDLE_SMALL) {
        work.middle = cxl_allocate((count + 3) * sizeof(reference));
        if (work.middle == NULL)
            return -ENOMEM;
    }
    /* Cuts and batches have their memory, or need none. */
    bool must = content->batch_capacity != 0 || (count == 0 && end == UINT64_MAX);
    result = cover_replace(engine, content, start, end, with, count, must);
    if (result == 0) {
        plan(content, start, end, with, count, &work);
        leaves_keep(engine, content, work.from.leaf, (uint64_t)work.to.leaf + 1);
        promise_before(engine, content, start, end);
        if (!change_in_place(engine, content, &work))
            result = change_leaves(engine, content, &work);
        promise_after(engine, content, start, end);
        if (result != 0)
            cover_restore(engine, content, start, end, with, count);
    }
    if (work.middle != work.small)
        free(work.middle);
    return result;
}

