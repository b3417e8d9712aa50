/* lease.c - leases space for a file, and maps it, without a descriptor of the medium in the program's table.
 *
 * The medium is opened by a child that shares the memory but not the table of descriptors (as vfork, without
 * CLONE_FILES): it closes the copies it was born with, opens the medium, locks and maps what was leased, and is gone.
 * The mappings keep the open file, and with it the locks. The program never has the descriptor: no fork, exec, closing
 * of everything, or change of user meets it. The daemon takes no notice of descriptors that are closed by a process
 * that has neither opened the file nor written to it.
 *
 * Invariants
 * - The order is that of client/direct_room.c: the daemon gives space, it is locked, the watch is found. Only then is
 *   anything stored there.
 * - What a mount answers is used only if the kernel says that root or this user made it, and if the descriptor is still
 *   of the file, and the answer is of this file: it names the inode.
 * - Leased space is not inherited by children of fork (MADV_DONTFORK).
 */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "client/parts.h"
#include "run/run.h"

enum { FIRST_BYTES = 32 << 20, LARGEST_BYTES = 512 << 20 };
#define MARK (INT64_C(1) << 62)

#ifndef CLOSE_RANGE_LAST
#define CLOSE_RANGE_LAST (~0U)
#endif

/* ------------------------------------------------------------------------------- the child */

static int lock(int fd, uint64_t start, uint64_t length)
{
    struct flock range = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = (off_t)start, .l_len = (off_t)length};
    return syscall(SYS_fcntl, fd, F_OFD_SETLK, &range) == 0 ? 0 : -errno;
}

/* The daemon, or another one, will see what was locked before this. */
static bool sees(int fd, const cxl_direct_attach *medium, uint64_t watch)
{
    struct flock range = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)watch, .l_len = 1};
    if (watch < medium->media_bytes || watch >= INT64_MAX)
        return false;
    return syscall(SYS_fcntl, fd, F_OFD_GETLK, &range) == 0 && range.l_type != F_UNLCK;
}

/* Whole granules around a piece, at an address that large pages can have. */
static int map_piece(const run_order *order, int fd, uint64_t start, uint64_t length, run_map *map)
{
    uint64_t mask = order->granule - 1, end = (start + length + mask) & ~mask;
    if (end > order->medium.media_bytes)
        end = order->medium.media_bytes;
    map->offset = start & ~mask;
    map->length = end - map->offset;
    bool synchronous = (order->medium.flags & CXL_DIRECT_SYNC) != 0;
    int flags = MAP_FIXED | (synchronous ? MAP_SHARED_VALIDATE | MAP_SYNC : MAP_SHARED);
    uint8_t *all = mmap(NULL, map->length + order->granule, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                        -1, 0);
    if (all == MAP_FAILED)
        return -errno;
    uint64_t before = -(uintptr_t)all & mask, page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t whole = (map->length + page - 1) / page * page;
    uint8_t *base = mmap(all + before, map->length, PROT_READ | PROT_WRITE, flags, fd, (off_t)map->offset);
    int result = base == MAP_FAILED ? -errno : 0;
    if (result != 0) {
        (void)munmap(all, map->length + order->granule);
        return result;
    }
    if (before > 0)
        (void)munmap(all, before);
    (void)munmap(base + whole, order->granule - before - (whole - map->length) / page * page);
    map->base = base;
    (void)madvise(base, map->length, MADV_HUGEPAGE);
    (void)madvise(base, map->length, MADV_DONTDUMP);
    return madvise(base, map->length, MADV_DONTFORK) == 0 ? 0 : -errno;
}

static int lock_and_map(run_order *order, int fd)
{
    const cxl_direct_lease *lease = &order->lease;
    struct stat file;
    int result = lock(fd, (uint64_t)MARK + (uint64_t)atomic_load(&run_all->process), 1);
    if (result == 0)
        result = lock(fd, lease->slip_offset, lease->slip_bytes);
    for (uint32_t i = 0; i < lease->count && result == 0; i++)
        result = lock(fd, lease->rooms[i].media_offset, lease->rooms[i].length_bytes);
    if (result != 0)
        return result;
    if (!sees(fd, &order->medium, lease->watch))
        return -ESTALE;
    if (fstat(fd, &file) != 0 || (S_ISREG(file.st_mode) && (uint64_t)file.st_size < order->medium.media_bytes))
        return -ENXIO;
    uint64_t granule = medium_granule(fd);
    order->granule = granule > LARGE_PAGE ? granule : LARGE_PAGE;
    result = map_piece(order, fd, lease->slip_offset, lease->slip_bytes, &order->maps[0]);
    for (uint32_t i = 0; i < lease->count && result == 0; i++)
        result = map_piece(order, fd, lease->rooms[i].media_offset, lease->rooms[i].length_bytes, &order->maps[i + 1]);
    return result;
}

static int in_child(void *argument)
{
    run_order *order = argument;
    int result;
    if (syscall(SYS_close_range, 0U, CLOSE_RANGE_LAST, 0U) != 0) {
        result = -errno;
    } else {
        result = medium_open(&order->medium);
        if (result >= 0)
            result = lock_and_map(order, result);
    }
    order->result = result;
    return 0;
}

static int with_child(run_order *order)
{
    int status;
    memset(order->maps, 0, sizeof order->maps);
    order->result = -EINTR;
    int child = clone(in_child, order->stack + sizeof order->stack, CLONE_VM | CLONE_VFORK, order);
    if (child < 0)
        return -errno;
    while (syscall(SYS_wait4, child, &status, __WALL, NULL) < 0 && errno == EINTR)
        ;
    return order->result;
}

/* --------------------------------------------------------------------------------- leasing */

static void unmap_all(run_map *maps)
{
    for (int i = 0; i < RUN_MAPS; i++)
        if (maps[i].base != NULL)
            (void)munmap(maps[i].base, maps[i].length);
}

static int request(int fd, unsigned long number, void *argument)
{
    while (syscall(SYS_ioctl, fd, number, argument) != 0)
        if (errno != EINTR)
            return -errno;
    return 0;
}

static run_reason reason_of(int result)
{
    switch (-result) {
    case EPERM: case EACCES:
        return RUN_NOT_PERMITTED;
    case EBUSY: case ESTALE: case EAGAIN:
        return RUN_NOT_ALONE;
    case ENOSPC: case ENOMEM:
        return RUN_NO_SPACE;
    default:
        return RUN_NO_MEDIUM;
    }
}

/* The daemon's answers to two requests on fd, which is of this file before and after them. */
static int ask(const run_file *file, int fd, uint64_t wanted, uint64_t offset)
{
    run_order *order = &run_all->order;
    run_identity now;
    uint32_t mode;
    memset(&order->medium, 0, sizeof order->medium);
    order->medium.version = CXL_DIRECT_VERSION;
    int result = request(fd, CXL_DIRECT_ATTACH, &order->medium);
    if (result != 0)
        return result;
    const cxl_direct_attach *medium = &order->medium;
    uint32_t chunk = medium->chunk_bytes;
    if (medium->version != CXL_DIRECT_VERSION || medium->granularity > CXL_GRANULARITY_PAGE || chunk < CXL_LINE ||
        (chunk & (chunk - 1)) != 0)
        return -ENOTTY;
    memset(&order->lease, 0, sizeof order->lease);
    order->lease.wanted_bytes = wanted;
    order->lease.file_offset = offset;
    order->lease.count = CXL_DIRECT_LEASES;
    result = request(fd, CXL_DIRECT_LEASE, &order->lease);
    if (result != 0)
        return result;
    if (!run_identify(fd, &now, &mode) || !run_is_same(now, file->is) || order->lease.wanted_bytes != file->is.inode)
        return -EBADF;
    return direct_answer_makes_sense(medium, &order->lease, CXL_DIRECT_LEASES) ? 0 : -ENOTTY;
}

static void take_over(run_file *file, const run_order *order)
{
    const cxl_direct_lease *lease = &order->lease;
    memcpy(file->maps, order->maps, sizeof file->maps);
    file->chunk_bytes = order->medium.chunk_bytes;
    file->granularity = order->medium.granularity;
    file->user = (uint32_t)syscall(SYS_geteuid);
    file->appended = 0;
    file->slip = file->maps[0].base + (lease->slip_offset - file->maps[0].offset);
    file->room = 0;
    file->rooms_count = lease->count;
    for (uint32_t i = 0; i < lease->count; i++) {
        const cxl_direct_room_given *given = &lease->rooms[i];
        const run_map *map = &file->maps[i + 1];
        uint64_t at = given->crc_offset;
        bool in_slip = at >= lease->slip_offset && at < lease->slip_offset + lease->slip_bytes;
        uint8_t *sums = in_slip ? file->slip + (at - lease->slip_offset) : map->base + (at - map->offset);
        file->rooms[i] = (run_room){
            .id = given->lease_id,
            .room = {given->media_offset, given->capacity_bytes, 0},
            .data = map->base + (given->media_offset - map->offset),
            .sums = (uint32_t *)(void *)sums,
        };
    }
    file->leased = true;
    atomic_fetch_add(&run_all->used, 1);
    run_count_lease();
}

static run_reason lease_alone(run_file *file, int fd, uint64_t wanted, uint64_t offset)
{
    run_order *order = &run_all->order;
    int trust = mount_trust(file->is.device);
    if (trust != 0)
        return trust == -ENOTTY ? RUN_OTHER_SYSTEM : RUN_NOT_TRUSTED;
    uint64_t bytes = file->next_bytes > FIRST_BYTES ? file->next_bytes : FIRST_BYTES;
    bytes = wanted > bytes ? wanted : bytes;
    int result = ask(file, fd, bytes < LARGEST_BYTES ? bytes : LARGEST_BYTES, offset);
    if (result == 0) {
        result = with_child(order);
        if (result != 0)
            unmap_all(order->maps);
    }
    if (result != 0)
        return reason_of(result);
    take_over(file, order);
    file->next_bytes = 2 * bytes < LARGEST_BYTES ? 2 * bytes : LARGEST_BYTES;
    return RUN_DIRECT;
}

run_reason run_lease(run_file *file, int fd, uint64_t wanted, uint64_t offset)
{
    run_end(file);
    run_end_idle();
    run_reason reason = run_refused(file->is);
    if (reason != RUN_DIRECT)
        return reason;
    if (atomic_exchange(&run_all->leasing, 1) != 0)
        return RUN_BUSY;
    reason = lease_alone(file, fd, wanted, offset);
    atomic_store(&run_all->leasing, 0);
    if (reason == RUN_DIRECT && !run_may_use(file)) {
        run_end(file);
        reason = RUN_SMALL_PAGES;
    }
    if (reason != RUN_DIRECT && reason != RUN_BUSY)
        run_refuse(file->is, reason < RUN_NO_SPACE, reason);
    return reason;
}
