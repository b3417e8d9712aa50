/* coverage_pieces.c - the pieces of one extent, and how references that come and go change them.
 *
 * Never: locks (its caller holds the stripe), takes memory, knows an engine.
 *
 * Invariants
 * - The pieces are sorted, begin at 0, neighbours differ, and the last one covers nothing: the same bytes
 *   covered the same number of times are the same pieces, whatever way they came.
 */
#include <string.h>

#include "extents/coverage.h"

static bool equal_counts(const cover_piece *a, const cover_piece *b)
{
    return memcmp(a->counts, b->counts, sizeof(a->counts)) == 0;
}

/* The piece that begins at offset, made if there is none; the list has room for it. */
static uint32_t split(cover_piece *list, uint32_t *count, uint32_t offset, cover_change *change)
{
    uint32_t low = 0, high = *count;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (list[middle].start <= offset)
            low = middle;
        else
            high = middle;
    }
    if (list[low].start == offset)
        return low;
    memmove(list + low + 2, list + low + 1, (*count - low - 1) * sizeof(*list));
    change->pieces += *count - low - 1;
    list[low + 1] = list[low];
    list[low + 1].start = offset;
    ++*count;
    return low + 1;
}

/* No two equal neighbours from piece first - 1 to piece end. */
static void unite(cover_piece *list, uint32_t *count, uint32_t first, uint32_t end, cover_change *change)
{
    uint32_t kept = first > 0 ? first : 1, i = kept;
    for (; i < *count && i <= end; i++) {
        if (!equal_counts(&list[i], &list[kept - 1]))
            list[kept++] = list[i];
    }
    if (kept < i) {
        memmove(list + kept, list + i, (*count - i) * sizeof(*list));
        change->pieces += *count - i;
    }
    *count -= i - kept;
}

/* The counts of one piece, and how its bytes count. */
static void change_counts(cover_piece *piece, uint64_t length, uint32_t times, cover_change *change)
{
    int before = kind_of(piece);
    if (change->add < COVER_KINDS)
        piece->counts[change->add] += times;
    if (change->remove < COVER_KINDS)
        piece->counts[change->remove] -= times;
    change->bytes[before] -= (int64_t)length;
    change->bytes[kind_of(piece)] += (int64_t)length;
}

uint32_t pieces_change(cover_piece *list, uint32_t count, uint32_t start, uint32_t end, cover_change *change)
{
    uint32_t first = split(list, &count, start, change);
    uint32_t last = split(list, &count, end, change);
    for (uint32_t i = first; i < last; i++)
        change_counts(&list[i], list[i + 1].start - list[i].start, 1, change);
    unite(list, &count, first, last, change);
    change->pieces += last - first + 1;
    return count;
}

uint32_t pieces_merge(const cover_piece *list, uint32_t count, const cover_range *ranges, uint64_t range_count,
                      cover_piece *out, cover_change *change)
{
    uint32_t made = 0, taken = 0;
    uint64_t first = 0, last = 0, at = 0, next;  /* ranges that have begun, and ended */
    for (;; at = next) {
        if (taken < count && list[taken].start == at)
            taken++;
        while (first < range_count && ranges[first].start == at)
            first++;
        while (last < range_count && ranges[last].end == at)
            last++;
        next = taken < count ? list[taken].start : UINT64_MAX;
        if (first < range_count)
            next = smaller(next, ranges[first].start);
        if (last < range_count)
            next = smaller(next, ranges[last].end);
        cover_piece piece = list[taken - 1];
        piece.start = (uint32_t)at;
        if (first != last)
            change_counts(&piece, next - at, (uint32_t)(first - last), change);
        if (made == 0 || !equal_counts(&piece, &out[made - 1]))
            out[made++] = piece;
        if (next == UINT64_MAX)
            break;
    }
    change->pieces += count + made;
    return made;
}

bool cover_run(const extent *x, int below, uint64_t start, uint64_t end, uint64_t *first, uint64_t *last)
{
    const cover_piece *list = x->cover != NULL ? x->cover : x->cover_few;
    uint32_t low = 0, high = x->cover_count;
    *first = start;
    *last = end;
    if (x->cover_stays)
        return start < end;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (list[middle].start <= start)
            low = middle;
        else
            high = middle;
    }
    for (; low < x->cover_count && kind_of(&list[low]) >= below; low++)
        ;
    if (low == x->cover_count || list[low].start >= end)
        return false;
    *first = larger(start, list[low].start);
    for (; low < x->cover_count && kind_of(&list[low]) < below; low++)
        ;
    *last = low == x->cover_count ? end : smaller(end, list[low].start);
    return *first < *last;
}
