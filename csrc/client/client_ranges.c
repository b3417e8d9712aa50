/* client_ranges.c - pieces of the medium that this process may store into just now: locked, and reachable.
 *
 * Never: locks anything for writing; makes reachable what is not locked.
 *
 * Invariants
 * - A byte stays locked and reachable until the last range that has it is dropped.
 * - A descriptor that the program has closed under the library, and opened as something else, is noticed before it is
 *   used. (The mapping keeps the locks that there are.)
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "client/parts.h"

enum { TOUCH_NS_MAX = 50000 };   /* of TOUCH_BYTES: 2000 to 3000 in a large page, 400000 in small ones */

static int set_lock(const cxl_client *client, uint64_t start, uint64_t end, short type)
{
    struct flock lock = {
        .l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)start, .l_len = (off_t)(end - start),
    };
    if (!medium_is(client->medium_fd, &client->identity))
        return -EBADF;
    return fcntl(client->medium_fd, F_OFD_SETLK, &lock) == 0 ? 0 : -errno;
}

static client_range pages_of(const cxl_client *client, client_range range)
{
    uint64_t mask = client->reach_granule - 1;
    return (client_range){range.start & ~mask, (range.end + mask) & ~mask};
}

/* The first part of range from *from on that no other range has, or false. in_pages: compared as pages. */
static bool next_alone(const cxl_client *client, client_range range, bool in_pages, uint64_t *from, client_range *out)
{
    uint64_t start = *from, end = range.end;
    for (bool moved = true; moved && start < end;) {
        moved = false;
        for (uint32_t i = 0; i < client->range_count; i++) {
            client_range other = in_pages ? pages_of(client, client->ranges[i]) : client->ranges[i];
            if (other.start <= start && start < other.end) {
                start = other.end;
                moved = true;
            }
        }
    }
    if (start >= end)
        return false;
    for (uint32_t i = 0; i < client->range_count; i++) {
        client_range other = in_pages ? pages_of(client, client->ranges[i]) : client->ranges[i];
        if (other.start > start && other.start < end)
            end = other.start;
    }
    *out = (client_range){start, end};
    *from = end;
    return true;
}

static void drop_locked(cxl_client *client, client_range range)
{
    client_range alone, pages = pages_of(client, range);
    uint64_t from = pages.start;
    while (next_alone(client, pages, true, &from, &alone)) {
        if (alone.end > client->identity.media_bytes)
            alone.end = client->identity.media_bytes;
        (void)cxl_media_permit(client->media, alone.start, alone.end - alone.start, client->reach_granule, false);
    }
    from = range.start;
    while (next_alone(client, range, false, &from, &alone))
        (void)set_lock(client, alone.start, alone.end, F_UNLCK);
}

/* Sorted ranges that are not there any more, as few: what lies between two of them is neither locked nor reachable
 * unless somebody has it. */
static uint32_t join_over_gaps(const cxl_client *client, client_range *joined, uint32_t count)
{
    uint32_t last = 0;
    for (uint32_t i = 1; i < count; i++) {
        client_range alone, both = pages_of(client, (client_range){joined[last].start, joined[i].end});
        uint64_t from = both.start;
        if (next_alone(client, both, true, &from, &alone) && alone.start == both.start && alone.end == both.end)
            joined[last].end = joined[i].end;
        else
            joined[++last] = joined[i];
    }
    return last + 1;
}

static int compare_ranges(const void *left, const void *right)
{
    const client_range *a = left, *b = right;
    return a->start < b->start ? -1 : a->start > b->start;
}

/* Sorted, what touches as one; how many there are then. */
static uint32_t join(const client_range *ranges, uint32_t count, client_range joined[RANGES_AT_ONCE])
{
    uint32_t last = 0;
    memcpy(joined, ranges, count * sizeof *joined);
    qsort(joined, count, sizeof *joined, compare_ranges);
    for (uint32_t i = 1; i < count; i++) {
        if (joined[i].start > joined[last].end)
            joined[++last] = joined[i];
        else if (joined[i].end > joined[last].end)
            joined[last].end = joined[i].end;
    }
    return last + 1;
}

static int reserve_locked(cxl_client *client, uint32_t count)
{
    uint32_t needed = client->range_count + count, capacity = client->range_capacity;
    if (needed <= capacity)
        return 0;
    capacity = needed > 2 * capacity ? needed : 2 * capacity;
    client_range *ranges = realloc(client->ranges, capacity * sizeof *ranges);
    if (ranges == NULL)
        return -ENOMEM;
    client->ranges = ranges;
    client->range_capacity = capacity;
    return 0;
}

int client_ranges_add(cxl_client *client, const client_range *ranges, uint32_t count)
{
    client_range joined[RANGES_AT_ONCE];
    if (count == 0)
        return 0;
    uint32_t joined_count = join(ranges, count, joined), done = 0;
    pthread_mutex_lock(&client->ranges_lock);
    int result = reserve_locked(client, count);
    for (; result == 0 && done < joined_count; done++) {
        result = set_lock(client, joined[done].start, joined[done].end, F_RDLCK);
        if (result == 0)
            result = cxl_media_permit(client->media, joined[done].start, joined[done].end - joined[done].start,
                                      client->reach_granule, true);
    }
    if (result == 0) {
        memcpy(client->ranges + client->range_count, ranges, count * sizeof *ranges);
        client->range_count += count;
    }
    for (uint32_t i = 0; result != 0 && i < done; i++)
        drop_locked(client, joined[i]);
    pthread_mutex_unlock(&client->ranges_lock);
    return result;
}

static void forget_locked(cxl_client *client, client_range range)
{
    for (uint32_t i = 0; i < client->range_count; i++) {
        if (client->ranges[i].start == range.start && client->ranges[i].end == range.end) {
            client->ranges[i] = client->ranges[--client->range_count];
            return;
        }
    }
}

void client_ranges_drop(cxl_client *client, const client_range *ranges, uint32_t count)
{
    client_range joined[RANGES_AT_ONCE];
    if (count == 0)
        return;
    uint32_t joined_count = join(ranges, count, joined);
    pthread_mutex_lock(&client->ranges_lock);
    for (uint32_t i = 0; i < count; i++)
        forget_locked(client, ranges[i]);
    joined_count = join_over_gaps(client, joined, joined_count);
    for (uint32_t i = 0; i < joined_count; i++)
        drop_locked(client, joined[i]);
    pthread_mutex_unlock(&client->ranges_lock);
}

void client_touch(cxl_client *client, uint64_t offset, uint64_t length, uint64_t start, uint64_t end)
{
    if (!cxl_media_populates(client->media))
        return;
    for (uint64_t piece = offset / TOUCH_BYTES; piece * TOUCH_BYTES < offset + length; piece++) {
        uint64_t first = piece * TOUCH_BYTES, last = first + TOUCH_BYTES;
        if (atomic_load_explicit(&client->touched[piece], memory_order_relaxed) != 0)
            continue;
        bool whole = first >= start && last <= end;
        if (!whole) {           /* once: leases are filled front to back */
            if (offset > (first > start ? first : start))
                continue;
            first = first > start ? first : start;
            last = last < end ? last : end;
        }
        (void)cxl_media_populate(client->media, first, last - first);
        if (whole)
            atomic_store_explicit(&client->touched[piece], 1, memory_order_relaxed);
    }
}

/* Whole pieces: what is reachable is so in large pages. Small ones are left to who stores into them, since of a range
 * that is never used they would be many, as memory that is not there yet would be much. */
bool client_touch_large(cxl_client *client, client_range range)
{
    uint64_t began_ns = client_now_ns(), ended_ns;
    for (uint64_t piece = range.start / TOUCH_BYTES; piece * TOUCH_BYTES < range.end; piece++, began_ns = ended_ns) {
        uint64_t first = piece * TOUCH_BYTES, left = client->identity.media_bytes - first;
        ended_ns = began_ns;
        if (!cxl_media_populates(client->media))
            return false;
        if (atomic_load_explicit(&client->touched[piece], memory_order_relaxed) != 0)
            continue;
        uint64_t length = left < TOUCH_BYTES ? left : TOUCH_BYTES;
        if (cxl_media_populate(client->media, first, length) != (int64_t)length)
            return false;
        atomic_store_explicit(&client->touched[piece], 1, memory_order_relaxed);
        ended_ns = client_now_ns();
        if (ended_ns - began_ns > TOUCH_NS_MAX)
            return false;
    }
    return true;
}
