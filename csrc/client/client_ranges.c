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

int client_range_add(cxl_client *client, uint64_t offset, uint64_t length)
{
    int result = 0;
    pthread_mutex_lock(&client->ranges_lock);
    if (client->range_count == client->range_capacity) {
        uint32_t capacity = client->range_capacity == 0 ? 16 : client->range_capacity * 2;
        client_range *ranges = realloc(client->ranges, capacity * sizeof *ranges);
        if (ranges == NULL) {
            pthread_mutex_unlock(&client->ranges_lock);
            return -ENOMEM;
        }
        client->ranges = ranges;
        client->range_capacity = capacity;
    }
    result = set_lock(client, offset, offset + length, F_RDLCK);
    if (result == 0) {
        result = cxl_media_permit(client->media, offset, length, client->reach_granule, true);
        if (result == 0)
            client->ranges[client->range_count++] = (client_range){offset, offset + length};
        else
            drop_locked(client, (client_range){offset, offset + length});
    }
    pthread_mutex_unlock(&client->ranges_lock);
    return result;
}

void client_range_drop(cxl_client *client, uint64_t offset, uint64_t length)
{
    pthread_mutex_lock(&client->ranges_lock);
    for (uint32_t i = 0; i < client->range_count; i++) {
        if (client->ranges[i].start == offset && client->ranges[i].end == offset + length) {
            client->ranges[i] = client->ranges[--client->range_count];
            drop_locked(client, (client_range){offset, offset + length});
            break;
        }
    }
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
