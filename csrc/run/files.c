/* files.c - the table of files that this process stores into just now: a cache, checked by who uses it.
 *
 * Invariants
 * - An entry says nothing of a descriptor: who has one asks the kernel for device and inode, and looks here for them.
 * - Device and inode of an entry are those of the open file on which its space was leased. While its ring is open that
 *   file is open in the daemon, so that the numbers are not given to another one; when it is not, nothing that is
 *   appended is taken in, and the caller sees that (store.c).
 */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/sysmacros.h>
#include <time.h>

#include "run/run.h"

#define IDLE_NS UINT64_C(200000000)
#define REFUSED_NS UINT64_C(10000000000)

run_region *run_all;

uint64_t run_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

bool run_is_ours(void)
{
    int process = (int)syscall(SYS_getpid), before = 0;
    return atomic_load_explicit(&run_all->process, memory_order_relaxed) == process ||
           atomic_compare_exchange_strong(&run_all->process, &before, process) || before == process;
}

bool run_identify(int fd, run_identity *is, uint32_t *mode)
{
    struct statx found;
    unsigned wanted = STATX_TYPE | STATX_MODE | STATX_INO;
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, wanted, &found) != 0)
        return false;
    is->device = makedev(found.stx_dev_major, found.stx_dev_minor);
    is->inode = found.stx_ino;
    *mode = found.stx_mode;
    return S_ISREG(found.stx_mode) && is->inode != 0;
}

bool run_is_same(run_identity left, run_identity right)
{
    return left.device == right.device && left.inode == right.inode;
}

/* ------------------------------------------------------------------------------------- files */

static bool try_lock(atomic_int *flag)
{
    return atomic_exchange_explicit(flag, 1, memory_order_acquire) == 0;
}

void run_leave(run_file *file)
{
    atomic_store_explicit(&file->busy, 0, memory_order_release);
}

static run_file *find(run_identity is)
{
    for (int i = 0; i < RUN_FILES; i++)
        if (run_is_same(run_all->files[i].is, is))
            return &run_all->files[i];
    return NULL;
}

/* An unused place, or the one that was used last of all, its flag set. */
static run_file *take_place(void)
{
    run_file *oldest = NULL;
    for (int i = 0; i < RUN_FILES; i++) {
        run_file *file = &run_all->files[i];
        if (!try_lock(&file->busy))
            continue;
        if (oldest != NULL && oldest->used_ns <= file->used_ns) {
            run_leave(file);
            continue;
        }
        if (oldest != NULL)
            run_leave(oldest);
        oldest = file;
    }
    return oldest;
}

run_file *run_take(run_identity is, bool fresh)
{
    run_file *file = find(is);
    if (file != NULL) {
        if (!try_lock(&file->busy))
            return NULL;
        if (run_is_same(file->is, is))
            return file;
        run_leave(file);
    }
    if (!fresh || !try_lock(&run_all->leasing))
        return NULL;
    file = find(is) == NULL ? take_place() : NULL;      /* else another thread has come before */
    if (file != NULL) {
        run_end(file);
        file->next_bytes = 0;
        file->is = is;
    }
    atomic_store_explicit(&run_all->leasing, 0, memory_order_release);
    return file;
}

void run_end(run_file *file)
{
    if (!file->leased)
        return;
    run_close_slip(file);
    for (int i = 0; i < RUN_MAPS; i++) {
        if (file->maps[i].base != NULL)
            (void)syscall(SYS_munmap, file->maps[i].base, file->maps[i].length);
        file->maps[i].base = NULL;
    }
    file->leased = false;
    atomic_fetch_sub(&run_all->used, 1);
}

void run_end_idle(void)
{
    uint64_t now_ns = run_now_ns();
    for (int i = 0; i < RUN_FILES; i++) {
        run_file *file = &run_all->files[i];
        if (!try_lock(&file->busy))
            continue;
        if (file->leased && now_ns - file->used_ns > IDLE_NS)
            run_end(file);
        run_leave(file);
    }
}

/* ---------------------------------------------------------------------------------- refusals */

run_reason run_refused(run_identity is)
{
    run_reason found = RUN_DIRECT;
    uint64_t now_ns = run_now_ns();
    if (!try_lock(&run_all->leasing))
        return RUN_BUSY;
    for (int i = 0; i < RUN_REFUSALS; i++) {
        const run_refusal *refusal = &run_all->refusals[i];
        if (refusal->is.device == is.device && (refusal->is.inode == 0 || refusal->is.inode == is.inode) &&
            refusal->until_ns > now_ns)
            found = refusal->reason;
    }
    atomic_store_explicit(&run_all->leasing, 0, memory_order_release);
    return found;
}

void run_refuse(run_identity is, bool whole_mount, run_reason reason)
{
    run_refusal refusal = {is, reason, run_now_ns() + (whole_mount ? REFUSED_NS : REFUSED_NS / 10)};
    if (whole_mount)
        refusal.is.inode = 0;
    if (!try_lock(&run_all->leasing))
        return;
    run_all->refusals[run_all->next_refusal++ % RUN_REFUSALS] = refusal;
    atomic_store_explicit(&run_all->leasing, 0, memory_order_release);
}
