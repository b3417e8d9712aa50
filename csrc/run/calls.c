/* calls.c - the functions that stand before libc's.
 *
 * Does not: intercept anything that is not made faster by it, but for close, which ends leases sooner than they would.
 *
 * Invariants
 * - A small write costs one comparison.
 * - Constructors of other libraries may run before the one here: until then the kernel is called by number.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "run/run.h"

size_t run_write_from = RUN_WRITE_FROM;
uint64_t run_file_from = RUN_FILE_FROM;
bool run_takes_any_pages;

static ssize_t (*real_write)(int, const void *, size_t);
static ssize_t (*real_pwrite)(int, const void *, size_t, off_t);
static ssize_t (*real_writev)(int, const struct iovec *, int);
static ssize_t (*real_pwritev)(int, const struct iovec *, int, off_t);
static ssize_t (*real_pwritev2)(int, const struct iovec *, int, off_t, int);
static int (*real_close)(int);

/* The kernel has the offset in two halves, of which a machine of 64 bits uses the first. */
enum { HIGH_HALF = 0 };

/* Copy pieces by the kernel, which says where they cannot be read; false: they are for it. */
static bool take_pieces(struct iovec own[RUN_PIECES], const struct iovec *pieces, int count)
{
    size_t length = 0;
    if (run_all == NULL || count < 1 || count > RUN_PIECES)
        return false;
    struct iovec from = {(void *)(uintptr_t)pieces, (size_t)count * sizeof *pieces};
    struct iovec to = {own, from.iov_len};
    int saved_errno = errno;
    bool known = syscall(SYS_process_vm_readv, (long)getpid(), &to, 1UL, &from, 1UL, 0UL) == (long)from.iov_len;
    errno = saved_errno;
    for (int i = 0; known && i < count && length < run_write_from; i++)
        length += own[i].iov_len < run_write_from ? own[i].iov_len : run_write_from;
    return known && length >= run_write_from;
}

/* write(2) is where a thread is cancelled. */
static bool takes(int fd, run_bytes from, off_t offset, ssize_t *done)
{
    if (run_all == NULL)
        return false;
    pthread_testcancel();
    return run_write(fd, from, offset, done);
}

RUN_EXPORT ssize_t write(int fd, const void *bytes, size_t length)
{
    struct iovec piece = {(void *)(uintptr_t)bytes, length};
    ssize_t done;
    if (length >= run_write_from && takes(fd, (run_bytes){&piece, 1}, RUN_POSITION, &done))
        return done;
    return real_write != NULL ? real_write(fd, bytes, length) : syscall(SYS_write, fd, bytes, length);
}

RUN_EXPORT ssize_t pwrite(int fd, const void *bytes, size_t length, off_t offset)
{
    struct iovec piece = {(void *)(uintptr_t)bytes, length};
    ssize_t done;
    if (length >= run_write_from && offset >= 0 && takes(fd, (run_bytes){&piece, 1}, offset, &done))
        return done;
    return real_pwrite != NULL ? real_pwrite(fd, bytes, length, offset)
                               : syscall(SYS_pwrite64, fd, bytes, length, offset);
}

RUN_EXPORT ssize_t writev(int fd, const struct iovec *pieces, int count)
{
    struct iovec own[RUN_PIECES];
    ssize_t done;
    if (take_pieces(own, pieces, count) && takes(fd, (run_bytes){own, count}, RUN_POSITION, &done))
        return done;
    return real_writev != NULL ? real_writev(fd, pieces, count) : syscall(SYS_writev, fd, pieces, count);
}

RUN_EXPORT ssize_t pwritev(int fd, const struct iovec *pieces, int count, off_t offset)
{
    struct iovec own[RUN_PIECES];
    ssize_t done;
    if (offset >= 0 && take_pieces(own, pieces, count) && takes(fd, (run_bytes){own, count}, offset, &done))
        return done;
    return real_pwritev != NULL ? real_pwritev(fd, pieces, count, offset)
                                : syscall(SYS_pwritev, fd, pieces, count, offset, HIGH_HALF);
}

RUN_EXPORT ssize_t pwritev2(int fd, const struct iovec *pieces, int count, off_t offset, int flags)
{
    struct iovec own[RUN_PIECES];
    ssize_t done;
    if (flags == 0 && offset >= RUN_POSITION && take_pieces(own, pieces, count) &&
        takes(fd, (run_bytes){own, count}, offset, &done))
        return done;
    return real_pwritev2 != NULL ? real_pwritev2(fd, pieces, count, offset, flags)
                                 : syscall(SYS_pwritev2, fd, pieces, count, offset, HIGH_HALF, flags);
}

#define RUN_SAME_AS(name) RUN_EXPORT __attribute__((alias(name)))
RUN_SAME_AS("pwrite") ssize_t pwrite64(int fd, const void *bytes, size_t length, off_t offset);
RUN_SAME_AS("pwritev") ssize_t pwritev64(int fd, const struct iovec *pieces, int count, off_t offset);
RUN_SAME_AS("pwritev2") ssize_t pwritev64v2(int fd, const struct iovec *pieces, int count, off_t offset, int flags);

/* A hint: what is leased for the file comes back with its close, and not when it is needed elsewhere. */
static void before_close(int fd)
{
    run_identity is;
    uint32_t mode;
    int saved_errno = errno;
    uint64_t all = UINT64_MAX, blocked;
    if (run_is_ours() && run_identify(fd, &is, &mode)) {
        all &= ~(1ULL << (SIGSEGV - 1) | 1ULL << (SIGBUS - 1));
        (void)syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, &blocked, sizeof all);
        run_file *file = run_take(is, false);
        if (file != NULL) {
            run_end(file);
            run_leave(file);
        }
        (void)syscall(SYS_rt_sigprocmask, SIG_SETMASK, &blocked, NULL, sizeof all);
    }
    errno = saved_errno;
}

RUN_EXPORT int close(int fd)
{
    if (run_all != NULL && atomic_load_explicit(&run_all->used, memory_order_relaxed) > 0)
        before_close(fd);
    return real_close != NULL ? real_close(fd) : (int)syscall(SYS_close, fd);
}

/* ---------------------------------------------------------------------------------- beginning */

static bool is_set_to(const char *name, const char *word)
{
    const char *value = getenv(name);
    return value != NULL && strcmp(value, word) == 0;
}

static void resolve(void)
{
    *(void **)&real_write = dlsym(RTLD_NEXT, "write");
    *(void **)&real_pwrite = dlsym(RTLD_NEXT, "pwrite");
    *(void **)&real_writev = dlsym(RTLD_NEXT, "writev");
    *(void **)&real_pwritev = dlsym(RTLD_NEXT, "pwritev");
    *(void **)&real_pwritev2 = dlsym(RTLD_NEXT, "pwritev2");
    *(void **)&real_close = dlsym(RTLD_NEXT, "close");
}

__attribute__((constructor)) static void begin(void)
{
    resolve();
    if (is_set_to("CXLFS_RUN", "off") || is_set_to("CXLFS_RUN", "0") || cxl_dispatch_init() != 0)
        return;
    const char *from = getenv("CXLFS_RUN_FROM");
    if (from != NULL && strtoull(from, NULL, 10) > 0) {
        run_write_from = strtoull(from, NULL, 10);
        run_file_from = 0;
        run_takes_any_pages = true;
    }
    void *region = mmap(NULL, sizeof *run_all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (region == MAP_FAILED)
        return;
    if (madvise(region, sizeof *run_all, MADV_WIPEONFORK) != 0) {
        (void)munmap(region, sizeof *run_all);
        return;
    }
    (void)madvise(region, sizeof *run_all, MADV_DONTDUMP);
    run_faults_begin();
    run_report_begin();
    (void)cxl_crc32c(0, "", 1);         /* makes its tables, where it has some */
    atomic_store(&((run_region *)region)->process, (int)syscall(SYS_getpid));
    run_all = region;
}
