/* maps.c - mapped files of the installed library: pages of the medium, or, where these cannot be had, the kernel's.
 *
 * Never: takes a file that is damaged for one that must go through the kernel.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "library/library.h"
#include "persist/persist.h"

struct cxlfs_map {
    int fd;
    cxl_mapped *mapped;          /* or NULL: by the kernel */
    int error;                   /* why */
    uint8_t *base;
    uint64_t size;
};

static int map_directly(cxlfs_map *map, unsigned flags)
{
    uint32_t wanted = (flags & CXLFS_MAP_PRIVATE) != 0 ? CXL_MAPPED_PRIVATE : 0;
    wanted |= (flags & CXLFS_MAP_ALONE) != 0 ? CXL_MAPPED_ALONE : 0;
    int result = cxl_mapped_open(map->fd, wanted, &map->mapped);
    if (result == 0 && (flags & CXLFS_MAP_PRIVATE) != 0)    /* before it has pages, of which it would look at each */
        result = cxl_mapped_permit_writes(map->mapped);
    if (result == 0 && (flags & CXLFS_MAP_VERIFY) != 0)
        result = cxl_mapped_verify_all(map->mapped, NULL, NULL);
    if (result != 0 && map->mapped != NULL) {
        cxl_mapped_close(map->mapped);
        map->mapped = NULL;
    }
    if (result == 0) {
        map->base = (uint8_t *)(uintptr_t)cxl_mapped_base(map->mapped);
        map->size = cxl_mapped_size(map->mapped);
    }
    return result;
}

static int map_by_kernel(cxlfs_map *map, unsigned flags)
{
    struct stat status;
    bool is_private = (flags & CXLFS_MAP_PRIVATE) != 0;
    if (fstat(map->fd, &status) != 0)
        return -errno;
    map->size = (uint64_t)status.st_size;
    if (map->size == 0)
        return 0;
    void *base = mmap(NULL, map->size, is_private ? PROT_READ | PROT_WRITE : PROT_READ,
                      is_private ? MAP_PRIVATE : MAP_SHARED, map->fd, 0);
    if (base == MAP_FAILED)
        return -errno;
    map->base = base;
    int result = cxl_guard_install();
    if (result == 0 && (flags & CXLFS_MAP_VERIFY) != 0 && cxlfs_map_verify(map, 0, map->size, NULL, NULL) != 0)
        result = -errno;
    if (result != 0)
        munmap(base, map->size);
    return result;
}

cxlfs_map *cxlfs_map_fdopen(int fd, unsigned flags)
{
    cxlfs_map *map = calloc(1, sizeof *map);
    if (map == NULL)
        return NULL;
    map->fd = fd;
    int result = map_directly(map, flags);
    if (result != 0 && result != -EIO) {
        map->error = -result;
        result = map_by_kernel(map, flags);
    }
    if (result == 0)
        return map;
    free(map);
    errno = -result;
    return NULL;
}

cxlfs_map *cxlfs_map_open(const char *path, unsigned flags)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    cxlfs_map *map = cxlfs_map_fdopen(fd, flags);
    if (map == NULL) {
        int error = errno;
        close(fd);
        errno = error;
    }
    return map;
}

void cxlfs_unmap(cxlfs_map *map)
{
    if (map->mapped != NULL)
        cxl_mapped_close(map->mapped);
    else if (map->base != NULL)
        munmap(map->base, map->size);
    close(map->fd);
    free(map);
}

/* ----------------------------------------------------------------------------------- verifying */

typedef struct {
    const volatile uint8_t *base;
    uint64_t first, last, step;
} touching;

static void touch_body(void *argument)
{
    const touching *job = argument;
    for (uint64_t at = job->first; at <= job->last; at += job->step)
        (void)job->base[at];
}

/* What the mount delivers it has verified; what it cannot deliver is a SIGBUS for who looks at it. */
static int touch(const cxlfs_map *map, uint64_t offset, uint64_t length, uint64_t *bad_offset, uint64_t *bad_length)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), fault = 0;
    touching job = {map->base, offset / page * page, offset + length - 1, page};
    int result = cxl_guarded(map->base, (map->size + page - 1) / page * page, touch_body, &job, &fault);
    if (result == 0)
        return 0;
    fault = fault / page * page;
    if (bad_offset != NULL)
        *bad_offset = fault;
    if (bad_length != NULL)
        *bad_length = map->size - fault < page ? map->size - fault : page;
    return result;
}

int cxlfs_map_verify(cxlfs_map *map, uint64_t offset, uint64_t length, uint64_t *bad_offset, uint64_t *bad_length)
{
    int result = 0;
    if (offset > map->size || length > map->size - offset)
        result = -ERANGE;
    else if (length > 0 && length == map->size && map->mapped != NULL)
        result = cxl_mapped_verify_all(map->mapped, bad_offset, bad_length);
    else if (length > 0 && map->mapped != NULL)
        result = cxl_mapped_verify(map->mapped, offset, length, bad_offset, bad_length);
    else if (length > 0)
        result = touch(map, offset, length, bad_offset, bad_length);
    return (int)library_result(result);
}

const void *cxlfs_map_get(cxlfs_map *map, uint64_t offset, uint64_t length)
{
    if (cxlfs_map_verify(map, offset, length, NULL, NULL) != 0)
        return NULL;
    return (const uint8_t *)cxlfs_map_data(map) + offset;
}

void *cxlfs_map_data(const cxlfs_map *map)
{
    static uint8_t nothing[1];
    return map->base != NULL ? map->base : nothing;
}

uint64_t cxlfs_map_size(const cxlfs_map *map)
{
    return map->size;
}

const char *cxlfs_map_why_not(const cxlfs_map *map, int *error)
{
    if (error != NULL)
        *error = map->error;
    return library_reason(map->error);
}

/* ------------------------------------------------------------------------------------- process */

void cxlfs_statistics(cxlfs_counts *out, size_t size)
{
    cxl_client_counts counts;
    cxl_client_statistics(&counts);
    const cxlfs_counts found = {
        .direct_bytes = counts.direct_bytes, .kernel_bytes = counts.fuse_bytes, .read_bytes = counts.read_bytes,
        .mapped_bytes = counts.mapped_bytes, .copied_bytes = counts.copied_bytes, .media = counts.media,
        .verified_bytes = counts.verified_bytes,
    };
    memset(out, 0, size);
    memcpy(out, &found, size < sizeof found ? size : sizeof found);
}

void cxlfs_forget(void)
{
    cxl_client_forget();
}
