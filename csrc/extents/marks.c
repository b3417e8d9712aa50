/* marks.c - what of a map's content changed since its last delta.
 *
 * Never: locks (its caller holds the map), forgets a change; may name more than changed.
 *
 * Invariants
 * - Intervals are sorted, apart and not adjacent, and at most DIRTY_MAX.
 * - Content beyond the cut is new or gone; below it, only the intervals are.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "extents/extents.h"

enum { CAPACITY_MIN = 2 };

void marks_release(cxl_engine *engine, marks *dirty)
{
    engine_release(engine, dirty->list, dirty->capacity * sizeof(interval));
    dirty->list = NULL;
    dirty->count = dirty->capacity = 0;
}

static int reserve(cxl_engine *engine, marks *dirty, uint64_t count)
{
    uint64_t capacity = larger(larger(count, CAPACITY_MIN), (uint64_t)dirty->capacity * 2);
    if (count <= dirty->capacity)
        return 0;
    interval *fresh = engine_allocate(engine, capacity * sizeof(*fresh));
    if (fresh == NULL)
        return -ENOMEM;
    if (dirty->count != 0)
        memcpy(fresh, dirty->list, dirty->count * sizeof(*fresh));
    engine_release(engine, dirty->list, dirty->capacity * sizeof(interval));
    dirty->list = fresh;
    dirty->capacity = (uint32_t)capacity;
    return 0;
}

int marks_reserve(cxl_engine *engine, marks *dirty)
{
    return reserve(engine, dirty, (uint64_t)dirty->count + 1);
}

static int compare_gaps(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Too many: join those that are closest, half of them. The gaps then count as changed, too. */
static void coalesce(marks *dirty)
{
    uint64_t gaps[DIRTY_MAX];
    uint32_t count = dirty->count - 1;
    for (uint32_t i = 0; i < count; i++)
        gaps[i] = dirty->list[i + 1].start - dirty->list[i].end;
    qsort(gaps, count, sizeof(gaps[0]), compare_gaps);
    uint64_t limit = gaps[count / 2];
    uint32_t kept = 0;
    for (uint32_t i = 1; i < dirty->count; i++) {
        if (dirty->list[i].start - dirty->list[kept].end <= limit)
            dirty->list[kept].end = dirty->list[i].end;
        else
            dirty->list[++kept] = dirty->list[i];
    }
    dirty->count = kept + 1;
}

/* The first interval that ends at or beyond offset. */
static uint32_t find(const marks *dirty, uint64_t offset)
{
    uint32_t first = 0, end = dirty->count;
    while (first < end) {
        uint32_t middle = first + (end - first) / 2;
        if (dirty->list[middle].end >= offset)
            end = middle;
        else
            first = middle + 1;
    }
    return first;
}

void marks_add(marks *dirty, uint64_t start, uint64_t end)
{
    uint32_t first = find(dirty, start), last = first;
    interval *list = dirty->list;
    while (last < dirty->count && list[last].start <= end) {
        start = smaller(start, list[last].start);
        end = larger(end, list[last].end);
        last++;
    }
    if (last != first + 1) {
        memmove(list + first + 1, list + last, (dirty->count - last) * sizeof(*list));
        dirty->count += 1 - (last - first);
    }
    list[first] = (interval){start, end};
    if (dirty->count >= DIRTY_MAX)
        coalesce(dirty);
}

void marks_cut(marks *dirty, uint64_t size)
{
    dirty->cut = smaller(dirty->cut, size);
    uint32_t first = find(dirty, size);
    if (first < dirty->count && dirty->list[first].start < size)
        dirty->list[first++].end = size;
    dirty->count = first;
}

bool marks_any(const marks *dirty, uint64_t size)
{
    return dirty->fresh || dirty->count != 0 || size != dirty->taken_size ||
           dirty->cut < dirty->taken_size;
}

void marks_return(cxl_engine *engine, marks *dirty, marks *older)
{
    dirty->cut = smaller(dirty->cut, older->cut);
    dirty->taken_size = older->taken_size;
    dirty->fresh = dirty->fresh || older->fresh;
    if (dirty->count == 0) {
        marks swap = *dirty;
        dirty->list = older->list;
        dirty->count = older->count;
        dirty->capacity = older->capacity;
        older->list = swap.list;
        older->capacity = swap.capacity;
    } else if (older->count != 0) {
        uint64_t most = (uint64_t)dirty->count + older->count;
        if (reserve(engine, dirty, most) == 0) {
            for (uint32_t i = 0; i < older->count; i++)
                marks_add(dirty, older->list[i].start, older->list[i].end);
        } else {
            /* No memory: everything from the first to the last mark. */
            const interval *a = &dirty->list[dirty->count - 1], *b = &older->list[older->count - 1];
            uint64_t end = larger(a->end, b->end);
            marks_add(dirty, smaller(dirty->list[0].start, older->list[0].start), end);
        }
    }
    marks_release(engine, older);
}
