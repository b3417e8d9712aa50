/* media.c - mapping a source and making what was stored durable: write back and fence.
 *
 * Never: retries a failed msync; decides what kind of source it is given.
 *
 * Invariants
 * - base is not moved and size does not change while the media lives.
 * - base is a multiple of the alignment asked for, unless there is no address space for that: the kernel maps
 *   huge pages only where address and file offset are alike modulo their size.
 * - PAGE: every page stored through write_back or copy lies in one of the dirty ranges until an
 *   msync that began later has covered it, or has failed for good.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "persist/persist.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23          /* Linux 5.14 */
#endif
enum { TMPFS = 0x01021994, RAMFS = 0x858458f6, HUGETLBFS = 0x958458f6, POPULATE_AT_ONCE = 8 << 20 };

/* -------------------------------------------------------------------------------- life */

static int new_media(uint64_t size, uint32_t granularity, cxl_media **out)
{
    *out = NULL;
    if (size == 0 || size > PTRDIFF_MAX || granularity > CXL_GRANULARITY_PAGE)
        return -EINVAL;
    int result = cxl_dispatch_init();
    if (result != 0)
        return result;
    if (granularity == CXL_GRANULARITY_LINE && !cxl_table.can_write_back)
        return -EOPNOTSUPP;
    if (cxl_fault_hit(CXL_FAULT_MAP))
        return -ENOMEM;
    result = cxl_guard_install();
    if (result != 0)
        return result;
    cxl_media *media = calloc(1, sizeof *media);
    if (media == NULL)
        return -ENOMEM;
    result = cxl_recorder_init(&media->recorder);
    if (result != 0) {
        free(media);
        return result;
    }
    /* Held for 20 ns after each chunk of 64 KiB: to sleep for it would cost as much as copying a MiB. Other C libraries
     * spin without being asked. */
    pthread_mutexattr_t spinning;
    pthread_mutexattr_init(&spinning);
#ifdef __GLIBC__
    pthread_mutexattr_settype(&spinning, PTHREAD_MUTEX_ADAPTIVE_NP);
#endif
    pthread_mutex_init(&media->dirty_lock, &spinning);
    pthread_mutexattr_destroy(&spinning);
    pthread_mutex_init(&media->fence_lock, NULL);
    media->size = size;
    media->granularity = granularity;
    media->base = MAP_FAILED;
    *out = media;
    return 0;
}

/* Address space for length bytes that begins at a multiple of the alignment; MAP_FAILED without any. */
static uint8_t *reserve_aligned(uint64_t length, uint64_t alignment)
{
    if (length > PTRDIFF_MAX - alignment)
        return MAP_FAILED;
    uint8_t *all = mmap(NULL, length + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED)
        return MAP_FAILED;
    uint64_t before = (alignment - (uintptr_t)all % alignment) % alignment;
    if (before > 0)
        munmap(all, before);
    if (before < alignment)
        munmap(all + before + length, alignment - before);
    return all + before;
}

static int map_into(cxl_media *media, int protection, int flags, int fd, uint64_t alignment)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), length = (media->size + page - 1) / page * page;
    uint8_t *place = alignment > page ? reserve_aligned(length, alignment) : MAP_FAILED;
    if (place == MAP_FAILED) {
        media->base = mmap(NULL, media->size, protection, flags, fd, 0);
    } else {
        media->base = mmap(place, media->size, protection, flags | MAP_FIXED, fd, 0);
        if (media->base == MAP_FAILED) {
            int error = errno;
            munmap(place, length);
            errno = error;
        }
    }
    if (media->base == MAP_FAILED)
        return -errno;
    /* A core dump of a whole device helps nobody; where this is refused nothing is lost. */
    (void)madvise(media->base, media->size, MADV_DONTDUMP);
    return 0;
}

/* A file in memory: elsewhere a page that was touched for writing is written to a disk, or the mapping is
 * that of a device, whose first touches are few. */
static bool is_in_memory(int fd)
{
    struct stat file;
    struct statfs system;
    return fstat(fd, &file) == 0 && S_ISREG(file.st_mode) && fstatfs(fd, &system) == 0 &&
           ((uint32_t)system.f_type == TMPFS || (uint32_t)system.f_type == RAMFS ||
            (uint32_t)system.f_type == HUGETLBFS);
}

/* hugetlbfs maps whole pages of its own: what is longer than asked for would cover a neighbour. */
static bool has_part_of_a_page(int fd, uint64_t size)
{
    struct statfs system;
    return fstatfs(fd, &system) == 0 && (uint32_t)system.f_type == HUGETLBFS &&
           size % (uint64_t)system.f_bsize != 0;
}

int cxl_media_map(int fd, uint64_t size, uint64_t alignment, uint32_t flags, uint32_t granularity, cxl_media **out)
{
    *out = NULL;
    if (alignment == 0 || (alignment & (alignment - 1)) != 0 || has_part_of_a_page(fd, size))
        return -EINVAL;
    int result = new_media(size, granularity, out);
    if (result != 0)
        return result;
    bool read_only = (flags & CXL_MAP_READ_ONLY) != 0;
    int mode = (flags & CXL_MAP_SYNC) != 0 ? MAP_SHARED_VALIDATE | MAP_SYNC : MAP_SHARED;
    bool closed = (flags & CXL_MAP_CLOSED) != 0;
    (*out)->read_only = read_only;
    (*out)->fenced_by_others = closed;
    (*out)->populates = !read_only && is_in_memory(fd);
    int protection = closed ? PROT_NONE : read_only ? PROT_READ : PROT_READ | PROT_WRITE;
    result = map_into(*out, protection, mode, fd, alignment);
    bool alone = (flags & (CXL_MAP_CLOSED | CXL_MAP_ALONE)) != 0;
    if (result == 0 && alone && madvise((*out)->base, size, MADV_DONTFORK) != 0)
        result = -errno;
    if (result != 0) {
        cxl_media_close(*out);
        *out = NULL;
        return result;
    }
    /* tmpfs mounted huge=advise asks for this; elsewhere it is refused, or changes nothing. */
    if (is_in_memory(fd))
        (void)madvise((*out)->base, size, MADV_HUGEPAGE);
    return 0;
}

int cxl_media_anonymous(uint64_t size, uint32_t granularity, cxl_media **out)
{
    int result = new_media(size, granularity, out);
    if (result != 0)
        return result;
    (*out)->anonymous = true;
    result = map_into(*out, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 1);
    if (result != 0) {
        cxl_media_close(*out);
        *out = NULL;
    }
    return result;
}

void cxl_media_close(cxl_media *media)
{
    if (media == NULL)
        return;
    if (media->base != MAP_FAILED)
        munmap(media->base, media->size);
    cxl_recorder_destroy(&media->recorder);
    pthread_mutex_destroy(&media->dirty_lock);
    pthread_mutex_destroy(&media->fence_lock);
    free(media);
}

uint64_t cxl_media_size(const cxl_media *media)
{
    return media->size;
}

uint32_t cxl_media_granularity(const cxl_media *media)
{
    return media->granularity;
}

void *cxl_media_base(const cxl_media *media)
{
    return media->base;
}

int cxl_media_permit(cxl_media *media, uint64_t offset, uint64_t length, uint64_t granule, bool allowed)
{
    if (offset > media->size || length > media->size - offset)
        return -ERANGE;
    uint64_t start = offset & ~(granule - 1), end = (offset + length + granule - 1) & ~(granule - 1);
    int protection = !allowed ? PROT_NONE : media->read_only ? PROT_READ : PROT_READ | PROT_WRITE;
    if (end > media->size)      /* its last page is one, too */
        end = media->size;
    return mprotect(media->base + start, end - start, protection) == 0 ? 0 : -errno;
}

int64_t cxl_media_populate(cxl_media *media, uint64_t offset, uint64_t length)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), done = 0;
    if (offset > media->size || length > media->size - offset)
        return -ERANGE;
    uint64_t start = offset / page * page, end = (offset + length + page - 1) / page * page;
    if (end > media->size)
        end = media->size / page * page;
    while (start < end && atomic_load(&media->populates)) {
        uint64_t piece = POPULATE_AT_ONCE - start % POPULATE_AT_ONCE;      /* no huge page twice */
        if (piece > end - start)
            piece = end - start;
        if (madvise(media->base + start, piece, MADV_POPULATE_WRITE) != 0) {
            if (errno == EINVAL)
                atomic_store(&media->populates, false);
            break;
        }
        start += piece;
        done += piece;
    }
    return (int64_t)done;
}

int cxl_media_populates(const cxl_media *media)
{
    return atomic_load(&media->populates);
}

/* -------------------------------------------------------------------------- write back */

/* Make one of neighbours with no more than gap between them. */
static void join_dirty(cxl_media *media, uint64_t gap)
{
    dirty_range *list = media->dirty;
    uint32_t last = 0;
    for (uint32_t i = 1; i < media->dirty_count; i++) {
        if (list[i].first <= list[last].end || list[i].first - list[last].end <= gap) {
            if (list[i].end > list[last].end)
                list[last].end = list[i].end;
        } else {
            list[++last] = list[i];
        }
    }
    media->dirty_count = last + 1;
}

static uint64_t smallest_gap(const cxl_media *media)
{
    uint64_t smallest = UINT64_MAX;
    for (uint32_t i = 1; i < media->dirty_count; i++) {
        uint64_t gap = media->dirty[i].first - media->dirty[i - 1].end;
        if (gap < smallest)
            smallest = gap;
    }
    return smallest;
}

void cxl_media_remember_dirty(cxl_media *media, uint64_t offset, uint64_t length)
{
    if (media->fenced_by_others)
        return;
    pthread_mutex_lock(&media->dirty_lock);
    dirty_range *list = media->dirty;
    uint32_t place = media->dirty_count++;
    for (; place > 0 && list[place - 1].first > offset; place--)
        list[place] = list[place - 1];
    list[place] = (dirty_range){offset, offset + length};
    join_dirty(media, DIRTY_GAP);
    if (media->dirty_count > DIRTY_RANGES)
        join_dirty(media, smallest_gap(media));
    pthread_mutex_unlock(&media->dirty_lock);
}

typedef struct {
    const uint8_t *address;
    uint64_t length;
} range;

static void write_back_body(void *argument)
{
    const range *lines = argument;
    cxl_table.write_back(lines->address, lines->length);
}

int cxl_media_write_back(cxl_media *media, uint64_t offset, uint64_t length)
{
    if (offset > media->size || length > media->size - offset)
        return -ERANGE;
    if (media->read_only)
        return -EROFS;
    if (cxl_fault_hit(CXL_FAULT_WRITE_BACK))
        return -EIO;
    if (length == 0)
        return 0;
    bool held;
    int result = cxl_recorder_begin(&media->recorder, 0, &held);
    if (result != 0)
        return result;
    if (media->granularity == CXL_GRANULARITY_LINE) {
        range lines = {media->base + offset, length};
        result = cxl_guarded(media->base, media->size, write_back_body, &lines, NULL);
    } else if (media->granularity == CXL_GRANULARITY_PAGE) {
        cxl_media_remember_dirty(media, offset, length);
    }
    if (held)
        cxl_recorder_end(&media->recorder, result, CXL_EVENT_WRITE_BACK, offset, length, NULL);
    return result;
}

/* ------------------------------------------------------------------------------- fence */

static int sync_pages(cxl_media *media, uint64_t first, uint64_t end)
{
    if (cxl_fault_hit(CXL_FAULT_MSYNC))
        return -EIO;
    if (media->anonymous)
        return 0;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    first -= first % page;
    while (msync(media->base + first, end - first, MS_SYNC) != 0) {
        if (errno != EINTR)      /* the only error that says nothing about the pages */
            return -errno;
    }
    return 0;
}

static int fence_pages(cxl_media *media)
{
    dirty_range list[DIRTY_RANGES];
    pthread_mutex_lock(&media->fence_lock);
    pthread_mutex_lock(&media->dirty_lock);
    uint32_t count = media->dirty_count;
    memcpy(list, media->dirty, count * sizeof(list[0]));
    media->dirty_count = 0;
    pthread_mutex_unlock(&media->dirty_lock);
    for (uint32_t i = 0; i < count && !atomic_load(&media->failed); i++) {
        if (sync_pages(media, list[i].first, list[i].end) != 0)
            atomic_store(&media->failed, true);
    }
    int result = atomic_load(&media->failed) ? -EIO : 0;
    pthread_mutex_unlock(&media->fence_lock);
    return result;
}

void cxl_media_order(cxl_media *media)
{
    (void)media;
    cxl_table.fence();
}

int cxl_media_fence(cxl_media *media)
{
    if (cxl_fault_hit(CXL_FAULT_FENCE))
        return -EIO;
    bool held;
    int result = cxl_recorder_begin(&media->recorder, 0, &held);
    if (result != 0)
        return result;
    if (media->granularity == CXL_GRANULARITY_PAGE)
        result = fence_pages(media);
    else
        cxl_table.fence();
    if (held)
        cxl_recorder_end(&media->recorder, result, CXL_EVENT_FENCE, 0, 0, NULL);
    return result;
}
