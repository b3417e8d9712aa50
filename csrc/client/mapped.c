/* mapped.c - a file as memory: pages of the medium mapped one behind the other, and copies where they do not fit.
 *
 * Never: writes to the medium, which is open for reading here; maps a page of which a part is not the file's.
 *
 * Invariants
 * - Everything that the file refers to is locked, and the daemon has confirmed it, before it is looked at.
 * - The locks are those of an open file description of its own. They end when nobody has it or a mapping of it any
 *   more, also in a forked child, which inherits the memory.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/mapped.h"

enum { COPIES_SHARE = 16 };         /* at most this part of the machine's memory */
enum { STITCHES_MAX = 16384 };      /* of the 65530 mappings that a process may have */

/* ----------------------------------------------------------------------------------- locks */

static int compare_spans(const void *left, const void *right)
{
    const client_range *a = left, *b = right;
    return a->start < b->start ? -1 : a->start > b->start;
}

/* All extents of the file, those that all but touch with one lock. */
static int lock_all(const cxl_mapped *mapped)
{
    client_range *spans = malloc((mapped->row_count + 1) * sizeof *spans);
    int result = 0;
    if (spans == NULL)
        return -ENOMEM;
    for (uint64_t i = 0; i < mapped->row_count; i++) {
        const cxl_direct_row *row = &mapped->rows[i].is;
        spans[i] = (client_range){row->extent_media_offset, row->extent_media_offset + row->extent_length};
    }
    qsort(spans, mapped->row_count, sizeof *spans, compare_spans);
    for (uint64_t i = 0; i < mapped->row_count && result == 0;) {
        client_range span = spans[i];
        for (; i < mapped->row_count && spans[i].start <= span.end + CXL_DIRECT_LOCK_GAP; i++)
            span.end = spans[i].end > span.end ? spans[i].end : span.end;
        struct flock lock = {
            .l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = (off_t)span.start,
            .l_len = (off_t)(span.end - span.start),
        };
        if (fcntl(mapped->medium_fd, F_OFD_SETLK, &lock) != 0)
            result = -errno;
    }
    free(spans);
    return result;
}

static int lock_and_confirm(const cxl_mapped *mapped)
{
    cxl_direct_confirm request = {0};
    if (mapped->row_count == 0)
        return 0;
    int result = lock_all(mapped);
    return result != 0 ? result : client_request(mapped->channel, mapped->fd, CXL_DIRECT_CONFIRM, &request);
}

static int open_medium(cxl_mapped *mapped)
{
    char path[64];
    const cxl_client *client = mapped->client;
    if (!medium_is(client->medium_fd, &client->identity))
        return -EBADF;
    snprintf(path, sizeof path, "/proc/self/fd/%d", client->medium_fd);
    mapped->medium_fd = open(path, O_RDONLY | O_CLOEXEC);
    if (mapped->medium_fd < 0)
        return -errno;
    int result = medium_is(mapped->medium_fd, &client->identity) ? 0 : -ENXIO;
    if (result == 0 && mapped->is_compared_alone)
        mapped->media = client->view;
    else if (result == 0)
        result = cxl_media_map(mapped->medium_fd, client->identity.media_bytes, client->granule, CXL_MAP_READ_ONLY,
                               client->identity.granularity, &mapped->media);
    return result;
}

/* ------------------------------------------------------------------------------- stitching */

static int reserve(cxl_mapped *mapped)
{
    uint64_t align = mapped->client->granule > LARGE_PAGE ? mapped->client->granule : LARGE_PAGE;
    mapped->reserved_bytes = ((mapped->size + align) & ~(align - 1)) + align;
    void *reserved = mmap(NULL, mapped->reserved_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED)
        return -errno;
    (void)madvise(reserved, mapped->reserved_bytes, MADV_DONTDUMP);
    mapped->reserved = reserved;
    mapped->base = (uint8_t *)(((uintptr_t)reserved + align - 1) & ~(uintptr_t)(align - 1));
    return 0;
}

static uint64_t media_offset_of(const cxl_direct_row *row)
{
    return row->extent_media_offset + row->extent_offset;
}

/* Rows [first, last) are one piece of the file and of the medium: map the whole granules of it. */
static int stitch(cxl_mapped *mapped, uint64_t first, uint64_t last)
{
    int mode = mapped->is_private ? MAP_PRIVATE : MAP_SHARED;
    uint64_t mask = mapped->client->granule - 1, media = media_offset_of(&mapped->rows[first].is);
    const cxl_direct_row *end = &mapped->rows[last - 1].is;
    uint64_t file = mapped->rows[first].is.file_offset, file_end = end->file_offset + end->length_bytes;
    uint64_t from = (file + mask) & ~mask, to = file_end & ~mask;
    if (((media - file) & mask) != 0 || from >= to)
        return 0;
    if (mapped->is_private && !mapped->client->has_private_pages)
        return -EINVAL;
    void *place = mmap(mapped->base + from, to - from, PROT_READ, mode | MAP_FIXED, mapped->medium_fd,
                       (off_t)(media + (from - file)));
    if (place == MAP_FAILED)
        return -errno;
    for (uint64_t i = first; i < last; i++) {
        mapped->rows[i].stitched_start = from;
        mapped->rows[i].stitched_end = to;
    }
    return 0;
}

static int stitch_all(cxl_mapped *mapped)
{
    uint64_t last;
    int count = 0, result = 0;
    for (uint64_t first = 0; first < mapped->row_count && count < STITCHES_MAX && result == 0; first = last) {
        for (last = first + 1; last < mapped->row_count; last++) {
            const cxl_direct_row *before = &mapped->rows[last - 1].is, *row = &mapped->rows[last].is;
            if (row->file_offset != before->file_offset + before->length_bytes ||
                media_offset_of(row) != media_offset_of(before) + before->length_bytes)
                break;
        }
        result = stitch(mapped, first, last);
        count++;
    }
    return result;
}

/* --------------------------------------------------------------------------------- copying */

/* Bytes [start, end) of a row, verified, into memory of its own. */
static int copy_part(cxl_mapped *mapped, const mapped_row *row, uint64_t start, uint64_t end)
{
    if (start >= end)
        return 0;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint8_t *first = mapped->base + start / page * page;
    uint64_t length = (end + page - 1) / page * page - start / page * page;
    int result = mapped_verify_row(mapped, row, start, end, NULL, NULL);
    if (result != 0)
        return result;
    if (mprotect(first, length, PROT_READ | PROT_WRITE) != 0)
        return -errno;
    uint64_t media = media_offset_of(&row->is) + (start - row->is.file_offset);
    result = cxl_media_read(mapped->media, media, mapped->base + start, end - start, NULL);
    if (mprotect(first, length, PROT_READ) != 0)
        return -errno;
    mapped->copied += end - start;
    return result;
}

/* Copies are memory of this process alone, which is not to be had back: a file of which much would be one is better
 * mapped by the kernel, whose pages all share. */
static int require_few_copies(const cxl_mapped *mapped)
{
    const cxl_client_channel *channel = mapped->channel;
    uint64_t all = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE), needed = 0;
    uint64_t most = channel != NULL && channel->copies_max != 0 ? channel->copies_max : all / COPIES_SHARE;
    for (uint64_t i = 0; i < mapped->row_count; i++) {
        const mapped_row *row = &mapped->rows[i];
        uint64_t from = row->is.file_offset, to = from + row->is.length_bytes;
        needed += row->is.length_bytes;
        from = from > row->stitched_start ? from : row->stitched_start;
        to = to < row->stitched_end ? to : row->stitched_end;
        needed -= from < to ? to - from : 0;
    }
    return needed <= most ? 0 : -ENOMEM;
}

/* Parts of rows outside of what was stitched. A granule that is mapped has no byte of another row's copy. */
static int copy_rest(cxl_mapped *mapped)
{
    int result = 0;
    for (uint64_t i = 0; i < mapped->row_count && result == 0; i++) {
        const mapped_row *row = &mapped->rows[i];
        uint64_t start = row->is.file_offset, end = start + row->is.length_bytes;
        uint64_t from = row->stitched_start, to = row->stitched_end;
        if (from == to) {
            result = copy_part(mapped, row, start, end);
            continue;
        }
        result = copy_part(mapped, row, start, end < from ? end : from);
        if (result == 0)
            result = copy_part(mapped, row, start > to ? start : to, end);
    }
    return result;
}

/* ------------------------------------------------------------------------------------ life */

static int build(cxl_mapped *mapped, uint32_t flags)
{
    uint64_t no_watch;
    int result = mapped->is_compared_alone ? client_need_view(mapped->client) : 0;
    if (result == 0)
        result = open_medium(mapped);
    if (result == 0)
        result = mapped_ask(mapped, (flags & (CXL_MAPPED_ALONE | CXL_MAPPED_COMPARE)) != 0 ? 0 : CXL_DIRECT_VERIFIED,
                            &no_watch);
    if (result == 0)
        result = lock_and_confirm(mapped);
    if (result != 0 || mapped->is_compared_alone)
        return result;
    result = reserve(mapped);
    if (result == 0)
        result = stitch_all(mapped);
    if (result == 0)
        result = require_few_copies(mapped);
    if (result == 0)
        result = copy_rest(mapped);
    if (result == 0 && (flags & CXL_MAPPED_VERIFY) != 0)
        result = cxl_mapped_verify_all(mapped, NULL, NULL);
    return result;
}

int cxl_mapped_open_through(int fd, uint32_t flags, const cxl_client_channel *channel, cxl_mapped **out)
{
    struct stat status;
    int result = client_check_file(fd, channel, O_RDONLY, &status);
    if (result != 0)
        return client_refuse(result);
    cxl_mapped *mapped = calloc(1, sizeof *mapped);
    if (mapped == NULL)
        return client_refuse(-ENOMEM);
    mapped->fd = fd;
    mapped->channel = channel;
    mapped->process = getpid();
    mapped->medium_fd = -1;
    mapped->is_private = (flags & CXL_MAPPED_PRIVATE) != 0;
    mapped->is_compared_alone = (flags & CXL_MAPPED_COMPARE) != 0;
    result = client_take(fd, channel, CLIENT_SERVED, &mapped->client);
    if (result == 0)
        result = build(mapped, flags);
    if (result != 0) {
        cxl_mapped_close(mapped);
        return client_refuse(result);
    }
    atomic_fetch_add(&client_counted()->mapped_bytes, mapped->size);
    atomic_fetch_add(&client_counted()->copied_bytes, mapped->copied);
    *out = mapped;
    return 0;
}

int cxl_mapped_open(int fd, uint32_t flags, cxl_mapped **out)
{
    return cxl_mapped_open_through(fd, flags, NULL, out);
}

void cxl_mapped_close(cxl_mapped *mapped)
{
    cxl_direct_unmap request = {0};
    if (mapped->reserved != NULL)
        munmap(mapped->reserved, mapped->reserved_bytes);
    if (!mapped->is_compared_alone)
        cxl_media_close(mapped->media);
    if (mapped->medium_fd >= 0 && medium_is(mapped->medium_fd, &mapped->client->identity))
        close(mapped->medium_fd);
    if (mapped->is_held && mapped->process == getpid())     /* a child may be gone before its parent */
        (void)client_request(mapped->channel, mapped->fd, CXL_DIRECT_UNMAP, &request);
    if (mapped->client != NULL)
        client_leave(mapped->client);
    free(mapped->rows);
    free(mapped->sums);
    free((void *)mapped->verified);
    free(mapped);
}

const void *cxl_mapped_base(const cxl_mapped *mapped)
{
    return mapped->base;
}

int cxl_mapped_permit_writes(cxl_mapped *mapped)
{
    if (!mapped->is_private)
        return -EINVAL;
    size_t length = mapped->reserved_bytes - (size_t)(mapped->base - mapped->reserved);
    return mprotect(mapped->base, length, PROT_READ | PROT_WRITE) == 0 ? 0 : -errno;
}

uint64_t cxl_mapped_size(const cxl_mapped *mapped)
{
    return mapped->size;
}

bool cxl_mapped_is_verified(const cxl_mapped *mapped)
{
    return atomic_load(&mapped->is_verified);
}

uint64_t cxl_mapped_copied(const cxl_mapped *mapped)
{
    return mapped->copied;
}

const void *cxl_mapped_lies(const cxl_mapped *mapped, uint64_t offset, uint64_t *length)
{
    uint64_t at = offset, first = mapped_find(mapped, offset);
    const uint8_t *found = NULL;
    *length = 0;
    if (!mapped->is_compared_alone || mapped->process != getpid())
        return NULL;
    for (uint64_t i = first; i < mapped->row_count && mapped->rows[i].is.file_offset <= at; i++) {
        const cxl_direct_row *row = &mapped->rows[i].is;
        const uint8_t *place = mapped->media->base + media_offset_of(row) + (at - row->file_offset);
        if (found != NULL && place != found + *length)
            break;
        if (found == NULL)
            found = place;
        at = row->file_offset + row->length_bytes;
        *length = at - offset;
    }
    return found;
}
