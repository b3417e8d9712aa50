/* mapping.c - mmap of a file that is open for reading: the pages of the medium themselves, where they may be private.
 *
 * A private mapping need not show what others write later (POSIX leaves that open), so that a snapshot is one. A shared
 * one has to, and stays with the kernel.
 *
 * Never: maps the medium so that a store could reach it.
 *
 * Invariants
 * - Each mapping has an open file description of its own, which holds the bytes: the program may close its descriptor.
 * - Address space goes back as a whole, when all of it was unmapped: until then parts become pages that cannot be used,
 *   where these are not parts of pages themselves (a DAX device, hugetlbfs).
 * - A child has the memory of its parent, and nothing else of this: there munmap is the kernel's.
 */
#include <fcntl.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/sysmacros.h>

#include "run/run.h"

enum { MAPPINGS = 1024, RANGES = 16 };
enum { MAP_FROM = 1 << 20 };     /* less is read sooner than asked for */

typedef struct {
    uintptr_t start, end;
} address_range;

typedef struct {
    cxl_mapped *mapped;          /* NULL: this one is free */
    int fd;
    bool kept;                   /* for good: something else lies in its address space, or it is in too many parts */
    uint32_t range_count;
    address_range ranges[RANGES];   /* what the program has of it */
} mapping;

static mapping mappings[MAPPINGS];
static pthread_mutex_t mappings_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_uintptr_t lowest = UINTPTR_MAX, above_highest;

static uintptr_t page_up(uintptr_t value)
{
    uintptr_t mask = (uintptr_t)getpagesize() - 1;
    return value > UINTPTR_MAX - mask ? UINTPTR_MAX & ~mask : (value + mask) & ~mask;
}

static bool may_be_ours(uintptr_t start, uintptr_t end)
{
    return RUN_UNLIKELY(start < atomic_load(&above_highest) && end > atomic_load(&lowest));
}

/* ------------------------------------------------------------------------------------ mapping */

/* An open file description of its own, of the same inode. */
static int open_again(int fd)
{
    struct stat before, after;
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (fstat(fd, &before) != 0)
        return -1;
    int again = REAL(open)(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (again < 0 && errno == ESTALE)   /* its size was not known to the kernel (docs/direct.md); now it is */
        again = REAL(open)(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    again = run_move_away(again);
    if (again < 0)
        return -1;
    if (fstat(again, &after) == 0 && before.st_dev == after.st_dev && before.st_ino == after.st_ino) {
        run_opened(again, O_RDONLY);
        return again;
    }
    REAL(close)(again);
    return -1;
}

/* Who looks at the head of a file and then loads it maps it twice: it is compared with its checksums once, also where
 * the daemon remembers nothing. */
static void trust_earlier(cxl_mapped *mapped)
{
    pthread_mutex_lock(&mappings_lock);
    for (int i = 0; i < MAPPINGS; i++)
        if (mappings[i].mapped != NULL)
            cxl_mapped_trust(mapped, mappings[i].mapped);
    pthread_mutex_unlock(&mappings_lock);
}

static int open_mapped(int fd, bool for_writing, cxl_mapped **out)
{
    uint32_t flags = run_set.verifies_always ? CXL_MAPPED_ALONE : 0;
    int result = cxl_mapped_open(fd, flags | CXL_MAPPED_PRIVATE, out);
    if ((result == -EINVAL || result == -EOPNOTSUPP) && !for_writing)
        result = cxl_mapped_open(fd, flags, out);   /* a DAX device, hugetlbfs */
    if (result == 0 && for_writing) {       /* while there are no pages: 12 ms for 2 GiB in those of 4 KiB */
        result = cxl_mapped_permit_writes(*out);
        if (result != 0)
            cxl_mapped_close(*out);
    }
    /* Who maps to write, as PyTorch does, uses all of it; who only looks may want a header. */
    if (result == 0 && for_writing && (!run_set.verifies || cxl_mapped_is_verified(*out)))
        cxl_mapped_touch(*out);
    if (result != 0 || !run_set.verifies)
        return result;
    if (!run_set.verifies_always && !cxl_mapped_is_shared(*out))
        trust_earlier(*out);
    result = cxl_mapped_verify_all(*out, NULL, NULL);
    if (result != 0)
        cxl_mapped_close(*out);
    return result;
}

/* Once for each mount: a private mapping that may be written to is the kernel's there. */
static void tell_no_private(run_mount *mount)
{
    if (!atomic_exchange(&mount->no_private, true))
        run_log("mount %u:%u: mappings that are written to go through the kernel: the medium has no private pages",
                major(mount->device), minor(mount->device));
}

static void remember(cxl_mapped *mapped, int fd, uintptr_t start, uintptr_t end, bool *done)
{
    *done = false;
    pthread_mutex_lock(&mappings_lock);
    for (int i = 0; i < MAPPINGS && !*done; i++) {
        mapping *free_one = &mappings[i];
        if (free_one->mapped != NULL)
            continue;
        *free_one = (mapping){.mapped = mapped, .fd = fd, .range_count = 1};
        free_one->ranges[0] = (address_range){start, end};
        if (start < atomic_load(&lowest))
            atomic_store(&lowest, start);
        if (end > atomic_load(&above_highest))
            atomic_store(&above_highest, end);
        *done = true;
    }
    pthread_mutex_unlock(&mappings_lock);
}

static void *map_inside(size_t length, int protection, int fd, off64_t offset)
{
    struct statx found;
    cxl_mapped *mapped;
    bool done = false, for_writing = (protection & PROT_WRITE) != 0;
    if (statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE | STATX_INO, &found) != 0)
        return NULL;
    run_mount *mount = S_ISREG(found.stx_mode) ? run_mount_of(fd, run_device_of(&found)) : NULL;
    if (mount == NULL || atomic_load(&mount->verdict) < 0 || (REAL(fcntl)(fd, F_GETFL) & O_ACCMODE) != O_RDONLY ||
        (for_writing && atomic_load(&mount->no_private)))
        return NULL;
    int again = open_again(fd);
    if (again < 0)
        return NULL;
    int result = open_mapped(again, for_writing, &mapped);
    run_judge(mount, again, result);
    if (result == 0) {
        uint8_t *base = (uint8_t *)cxl_mapped_base(mapped) + offset;
        uint64_t size = cxl_mapped_size(mapped);
        uintptr_t end = page_up((uintptr_t)base + length);
        bool fits = (uint64_t)offset < size && end <= page_up((uintptr_t)cxl_mapped_base(mapped) + size);
        if (fits)
            remember(mapped, again, (uintptr_t)base, end, &done);
        if (done) {
            run_count_mapped(length);
            return base;
        }
        cxl_mapped_close(mapped);
    } else if (result == -EINVAL && for_writing) {
        tell_no_private(mount);
    }
    REAL(close)(again);
    run_detach_internal(again);
    return NULL;
}

/* Something of the program's own comes to lie there: what is ours below it is never given back. */
static void keep_below(uintptr_t start, uintptr_t end)
{
    pthread_mutex_lock(&mappings_lock);
    for (int i = 0; i < MAPPINGS; i++) {
        mapping *one = &mappings[i];
        for (uint32_t k = 0; one->mapped != NULL && k < one->range_count; k++)
            one->kept = one->kept || (one->ranges[k].start < end && one->ranges[k].end > start);
    }
    pthread_mutex_unlock(&mappings_lock);
}

RUN_EXPORT void *mmap64(void *address, size_t length, int protection, int flags, int fd, off64_t offset)
{
    enum { HARMLESS = MAP_NORESERVE | MAP_POPULATE | MAP_FILE };
    run_visit visit;
    uintptr_t start = (uintptr_t)address;
    if ((flags & MAP_FIXED) != 0 && may_be_ours(start, page_up(start + length)) && run_enter(&visit)) {
        keep_below(start, page_up(start + length));
        run_leave(&visit);
    }
    if ((flags & MAP_ANONYMOUS) != 0 || RUN_UNLIKELY(fd < 0) || run_slot(fd) == RUN_NOBODY)
        return REAL(mmap64)(address, length, protection, flags, fd, offset);
    if (run_slot(fd) != RUN_INTERNAL && run_only_reads(fd) && run_set.maps && address == NULL && length >= MAP_FROM &&
        offset >= 0 && (flags & ~HARMLESS) == MAP_PRIVATE && (protection & ~PROT_WRITE) == PROT_READ &&
        offset % getpagesize() == 0 && length <= INTPTR_MAX && run_enter(&visit)) {
        void *place = map_inside(length, protection, fd, offset);
        run_leave(&visit);
        if (place != NULL)
            return place;
    }
    if ((flags & MAP_TYPE) != MAP_PRIVATE)
        run_retire(fd);
    else
        (void)run_settle(fd);
    return REAL(mmap64)(address, length, protection, flags, fd, offset);
}

RUN_EXPORT void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset)
{
    return mmap64(address, length, protection, flags, fd, offset);
}

/* ---------------------------------------------------------------------------------- unmapping */

/* What the program has of a mapping, without [start, end). */
static void cut(mapping *one, uintptr_t start, uintptr_t end)
{
    address_range left[RANGES + 1];
    uint32_t count = 0;
    for (uint32_t i = 0; i < one->range_count; i++) {
        address_range range = one->ranges[i];
        if (range.end <= start || range.start >= end) {
            left[count++] = range;
            continue;
        }
        if (range.start < start)
            left[count++] = (address_range){range.start, start};
        if (range.end > end && count <= RANGES)
            left[count++] = (address_range){end, range.end};
    }
    if (count > RANGES) {
        one->kept = true;
        return;
    }
    one->range_count = count;
    for (uint32_t i = 0; i < count; i++)
        one->ranges[i] = left[i];
}

static void let_go(mapping *one)
{
    int fd = one->fd;
    if (!one->kept) {
        cxl_mapped_close(one->mapped);
        REAL(close)(fd);
        run_detach_internal(fd);
        one->mapped = NULL;
    }
}

/* Unmap the part of [start, end) that is ours from start on, or that is not; where it ends. */
static uintptr_t unmap_first(uintptr_t start, uintptr_t end, int *result)
{
    uintptr_t next = end;
    for (int i = 0; i < MAPPINGS; i++) {
        mapping *one = &mappings[i];
        for (uint32_t k = 0; one->mapped != NULL && k < one->range_count; k++) {
            address_range range = one->ranges[k];
            if (range.end <= start || range.start >= end)
                continue;
            if (range.start > start) {
                next = range.start < next ? range.start : next;
                continue;
            }
            uintptr_t until = range.end < end ? range.end : end;
            void *place = REAL(mmap64)((void *)start, until - start, PROT_NONE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
            if (place == MAP_FAILED && errno != EINVAL) {   /* that is a part of a large page, which stays there */
                *result = -1;
                return end;
            }
            cut(one, start, until);
            if (one->range_count == 0)
                let_go(one);
            return until;
        }
    }
    *result = REAL(munmap)((void *)start, next - start);
    return *result == 0 ? next : end;
}

RUN_EXPORT int munmap(void *address, size_t length)
{
    run_visit visit;
    int result = 0;
    uintptr_t start = (uintptr_t)address, end = page_up(start + length);
    if (!may_be_ours(start, end) || length == 0 || start % (uintptr_t)getpagesize() != 0 || start + length < start ||
        !run_enter(&visit))
        return REAL(munmap)(address, length);
    pthread_mutex_lock(&mappings_lock);
    while (start < end)
        start = unmap_first(start, end, &result);
    pthread_mutex_unlock(&mappings_lock);
    int error = errno;
    run_leave(&visit);
    if (result != 0)
        errno = error;
    return result;
}

static bool is_ours(uintptr_t start, uintptr_t end)
{
    bool found = false;
    pthread_mutex_lock(&mappings_lock);
    for (int i = 0; i < MAPPINGS && !found; i++) {
        for (uint32_t k = 0; mappings[i].mapped != NULL && k < mappings[i].range_count; k++)
            found = found || (mappings[i].ranges[k].start < end && mappings[i].ranges[k].end > start);
    }
    pthread_mutex_unlock(&mappings_lock);
    return found;
}

/* One of ours can be made shorter; it neither grows nor moves, as a file that cannot be mapped there. */
RUN_EXPORT void *mremap(void *address, size_t old_length, size_t new_length, int flags, ...)
{
    run_visit visit;
    va_list rest;
    va_start(rest, flags);
    void *target = (flags & MREMAP_FIXED) != 0 ? va_arg(rest, void *) : NULL;
    va_end(rest);
    uintptr_t start = (uintptr_t)address, end = page_up(start + old_length);
    if (may_be_ours(start, end) && run_enter(&visit)) {
        bool ours = is_ours(start, end);
        run_leave(&visit);
        if (ours && new_length <= old_length && flags == 0 && new_length > 0) {
            uintptr_t kept_end = page_up(start + new_length);
            return kept_end >= end || munmap((void *)kept_end, end - kept_end) == 0 ? address : MAP_FAILED;
        }
        if (ours) {
            errno = ENOMEM;
            return MAP_FAILED;
        }
    }
    return REAL(mremap)(address, old_length, new_length, flags, target);
}

void run_mapping_forget_in_child(void)
{
    pthread_mutex_init(&mappings_lock, NULL);
    for (int i = 0; i < MAPPINGS; i++)
        mappings[i].mapped = NULL;
    atomic_store(&lowest, UINTPTR_MAX);
    atomic_store(&above_highest, 0);
}
