/* write.c - one large write(2) or its like: what is asked, in which order, and what makes it the kernel's.
 *
 * Invariants
 * - A range of the file offset is taken with one lseek, as the kernel orders writes of all that share the offset, and
 *   all bytes of the call go there, one way or the other.
 * - The inode is held by a descriptor of its own (O_PATH, for this call alone): another thread may put another file in
 *   the place of fd at any time. That descriptor's closing is no request.
 * - Success is said after the daemon has taken the bytes in, and the kernel knows the size that the daemon says. What
 *   the daemon has not taken goes through the kernel: the same bytes to the same place.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <string.h>
#include <signal.h>
#include <sys/resource.h>

#include "run/run.h"

enum { TRIPS_MAX = 8 };
static const uint64_t KERNEL_BYTES_MAX = 0x7ffff000;     /* of one call */

typedef struct {
    run_file *file;
    int fd, inode_fd;            /* inode_fd: O_PATH */
    run_bytes from;
    bool at_position;
    uint64_t length, offset;
    run_identity is;
    run_reason reason;
} writing;

/* ---------------------------------------------------------------------------- the caller's words */

static uint64_t add_up(const run_bytes *from)
{
    uint64_t total = 0;
    for (int i = 0; i < from->count; i++) {
        if (from->pieces[i].iov_len > INT64_MAX - total)
            return 0;
        total += from->pieces[i].iov_len;
    }
    return total;
}

static bool is_within_limit(uint64_t end)
{
    struct rlimit limit;
    if (end > INT64_MAX || syscall(SYS_prlimit64, 0, RLIMIT_FSIZE, NULL, &limit) != 0)
        return false;
    return limit.rlim_cur == RLIM_INFINITY || end <= limit.rlim_cur;
}

static bool is_still(int fd, run_identity is)
{
    run_identity now;
    uint32_t mode;
    return run_identify(fd, &now, &mode) && run_is_same(now, is);
}

/* ----------------------------------------------------------------------------------- position */

/* Take [offset, offset + length) of the file offset. False: nothing was taken. */
static bool reserve(writing *job)
{
    off_t end = lseek(job->fd, (off_t)job->length, SEEK_CUR);
    if (end < (off_t)job->length)
        return false;
    job->offset = (uint64_t)end - job->length;
    if (is_still(job->fd, job->is))
        return true;
    /* Another file is there now, before lseek or after it: where the offset is that of after it, before. */
    if (lseek(job->fd, 0, SEEK_CUR) != end)
        return true;
    (void)lseek(job->fd, -(off_t)job->length, SEEK_CUR);
    return false;
}

static void give_back(const writing *job, uint64_t missing)
{
    if (job->at_position && missing > 0 && is_still(job->fd, job->is))
        (void)lseek(job->fd, -(off_t)missing, SEEK_CUR);
}

/* --------------------------------------------------------------------------------- the kernel */

/* The file of a descriptor, opened anew. */
static int open_again(int fd, int flags)
{
    char path[32] = "/proc/self/fd/";
    size_t length = strlen(path);
    uint32_t number = (uint32_t)fd, scale = 1;
    while (number / scale >= 10)
        scale *= 10;
    for (; scale > 0; scale /= 10)
        path[length++] = (char)('0' + number / scale % 10);
    path[length] = '\0';
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, 0);
}

/* A descriptor that holds the inode, whatever becomes of fd: -1: it is another one by now. */
static int open_inode(const writing *job)
{
    int fd = open_again(job->fd, O_PATH);
    if (fd >= 0 && !is_still(fd, job->is)) {
        (void)syscall(SYS_close, fd);
        return -1;
    }
    return fd;
}

/* Bytes from done on. How many of the call are written then, or -errno where none are. */
static int64_t through_kernel(writing *job, uint64_t done)
{
    int fd = is_still(job->fd, job->is) ? job->fd : open_again(job->inode_fd, O_WRONLY);
    uint64_t before = 0;
    int64_t result = fd < 0 ? -errno : 0;
    for (int i = 0; i < job->from.count && result >= 0; before += job->from.pieces[i++].iov_len) {
        const struct iovec *piece = &job->from.pieces[i];
        while (result >= 0 && done < before + piece->iov_len) {
            const uint8_t *bytes = (const uint8_t *)piece->iov_base + (done - before);
            uint64_t left = job->length - done, here = before + piece->iov_len - done;
            result = syscall(SYS_pwrite64, fd, bytes, here < left ? here : left, job->offset + done);
            if (result <= 0) {
                result = result < 0 ? -errno : -EIO;
                break;
            }
            done += (uint64_t)result;
            if (done == job->length)
                break;
        }
        if (done == job->length)
            break;
    }
    if (fd >= 0 && fd != job->fd)
        (void)syscall(SYS_close, fd);
    return done > 0 ? (int64_t)done : result;
}

/* -------------------------------------------------------------------------------- the direct way */

typedef struct {
    uint64_t size;
    int64_t changed;             /* time of modification */
    uint32_t changed_ns;
} content;

static bool content_of(int fd, int flags, content *is)
{
    struct statx found;
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH | flags, STATX_SIZE | STATX_MTIME, &found) != 0)
        return false;
    *is = (content){found.stx_size, found.stx_mtime.tv_sec, found.stx_mtime.tv_nsec};
    return true;
}

/* What was appended is content for everybody: the daemon takes it in before it answers, and the kernel believes the
 * answer unless another write has ended meanwhile: the size, and that mapped pages are to be dropped, for which it goes
 * by the time. */
static bool is_settled(const writing *job)
{
    for (int trip = 0; trip < TRIPS_MAX; trip++) {
        content is, known;
        if (!content_of(job->inode_fd, AT_STATX_FORCE_SYNC, &is) || !run_is_taken(job->file))
            return false;
        if (content_of(job->inode_fd, AT_STATX_DONT_SYNC, &known) && known.size == is.size &&
            known.changed == is.changed && known.changed_ns == is.changed_ns)
            return true;
    }
    return false;
}

/* Bytes that are stored and settled; fewer than all: job->reason says why. */
static uint64_t store_all(writing *job)
{
    run_file *file = job->file;
    uint64_t done = 0;
    while (done < job->length) {
        uint64_t stored = 0;
        bool has_room = file->leased && file->room < file->rooms_count;
        if (!has_room)
            job->reason = run_lease(file, job->fd, job->length - done, job->offset + done);
        if (job->reason != RUN_DIRECT)
            break;
        if (!run_store(file, &job->from, done, job->length - done, job->offset + done, &stored) ||
            (stored > 0 && !is_settled(job))) {
            job->reason = RUN_NOT_TAKEN;
            break;
        }
        if (stored == 0 && has_room == false) {
            job->reason = RUN_NO_SPACE;     /* too small for anything */
            break;
        }
        done += stored;
    }
    if (job->reason != RUN_DIRECT)
        run_end(file);
    return done;
}

/* The place of this write is known, and taken. */
static int64_t write_there(writing *job)
{
    uint64_t done = store_all(job);
    run_count(RUN_DIRECT, done);
    if (done == job->length)
        return (int64_t)done;
    run_count(job->reason, job->length - done);
    int64_t result = through_kernel(job, done);
    give_back(job, job->length - (result > 0 ? (uint64_t)result : 0));
    return result;
}

/* Where the bytes will go, as far as can be known before they have their place. */
static bool find_offset(writing *job, off_t offset)
{
    job->at_position = offset == RUN_POSITION;
    if (job->at_position)
        offset = lseek(job->fd, 0, SEEK_CUR);
    job->offset = (uint64_t)offset;
    return offset >= 0 && is_within_limit(job->offset + job->length);
}

/* With the file taken. False: the kernel is to do it. */
static bool write_file(writing *job, int64_t *result)
{
    run_file *file = job->file;
    if (file->leased && file->user != (uint32_t)syscall(SYS_geteuid)) {
        run_end(file);
        job->reason = RUN_NOT_PERMITTED;
        return false;
    }
    if (!file->leased)
        job->reason = run_lease(file, job->fd, job->length, job->offset);
    if (job->reason != RUN_DIRECT)
        return false;
    job->inode_fd = open_inode(job);
    if (job->inode_fd < 0)
        return false;
    bool known = !job->at_position || reserve(job);
    if (known)
        *result = write_there(job);
    (void)syscall(SYS_close, job->inode_fd);
    file->used_ns = run_now_ns();
    return known;
}

/* The thread is alone with itself: neither interrupted nor cancelled. */
static bool write_alone(writing *job, uint64_t blocked, int64_t *result)
{
    job->file = run_take(job->is, false);
    if (job->file == NULL) {
        if (job->offset + job->length < run_file_from)
            return false;
        job->reason = run_refused(job->is);
        if (job->reason == RUN_DIRECT && (job->file = run_take(job->is, true)) == NULL)
            job->reason = RUN_BUSY;
    }
    if (job->file != NULL && !run_faults_are_ours(blocked))
        job->reason = RUN_OTHER_HANDLERS;
    if (job->reason != RUN_DIRECT) {
        if (job->file != NULL)
            run_leave(job->file);
        return false;
    }
    bool known = write_file(job, result);
    run_leave(job->file);
    return known;
}

/* A regular file, open in a way in which a write does nothing but store. */
static bool is_ordinary(writing *job)
{
    uint32_t mode;
    if (!run_identify(job->fd, &job->is, &mode))
        return false;
    long flags = syscall(SYS_fcntl, job->fd, F_GETFL);
    bool stores = flags >= 0 && (flags & O_PATH) == 0 && (flags & O_ACCMODE) != O_RDONLY;
    return stores && (flags & (O_APPEND | O_DSYNC | O_DIRECT)) == 0 && (mode & (S_ISUID | S_ISGID)) == 0;
}

static bool write_prepared(writing *job, off_t offset, int64_t *result)
{
    uint64_t all = UINT64_MAX, blocked;
    int cancel_state;
    if (!is_ordinary(job) || !run_is_ours() || !find_offset(job, offset))
        return false;
    all &= ~(1ULL << (SIGSEGV - 1) | 1ULL << (SIGBUS - 1) | 1ULL << (SIGILL - 1) | 1ULL << (SIGFPE - 1) |
             1ULL << (SIGTRAP - 1) | 1ULL << (SIGSYS - 1));
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
    (void)syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, &blocked, sizeof all);
    bool known = write_alone(job, blocked, result);
    (void)syscall(SYS_rt_sigprocmask, SIG_SETMASK, &blocked, NULL, sizeof all);
    pthread_setcancelstate(cancel_state, &cancel_state);
    return known;
}

bool run_write(int fd, run_bytes from, off_t offset, ssize_t *done)
{
    writing job = {.fd = fd, .inode_fd = -1, .from = from, .reason = RUN_DIRECT};
    int64_t result = 0;
    int saved_errno = errno;
    job.length = add_up(&from);
    if (job.length > KERNEL_BYTES_MAX)
        job.length = KERNEL_BYTES_MAX;
    bool known = job.length > 0 && write_prepared(&job, offset, &result);
    if (!known && job.reason != RUN_DIRECT && job.reason != RUN_OTHER_SYSTEM)
        run_count(job.reason, job.length);
    errno = known && result < 0 ? (int)-result : saved_errno;
    if (known)
        *done = result < 0 ? -1 : result;
    return known;
}
