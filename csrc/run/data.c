/* data.c - the calls that move bytes: write and its like, read and its like, and those that move from one descriptor to
 * another.
 *
 * Never: moves any by itself: transfer.c and reading.c do, or the kernel, after what was stored has been settled.
 *
 * Invariants
 * - A descriptor that is not one of a mount costs a load and a comparison.
 */
#include <fcntl.h>
#include <limits.h>

#include "run/run.h"

/* Of pieces, the array itself is the program's: a bad one is the kernel's to refuse. */
static bool can_be_listed(const struct iovec *pieces, int count)
{
    struct iovec copy[IOV_MAX], target = {copy, 0}, source = {(void *)pieces, 0};
    if (count <= 0 || count > IOV_MAX)
        return false;
    target.iov_len = source.iov_len = (size_t)count * sizeof *copy;
    int saved = errno;
    ssize_t got = process_vm_readv(getpid(), &target, 1, &source, 1, 0);
    bool known = got == (ssize_t)target.iov_len || (got < 0 && (errno == EPERM || errno == ENOSYS));
    errno = saved;
    return known;
}

static inline bool is_stored_into(int fd)
{
    return RUN_UNLIKELY(run_slot(fd) != RUN_NOBODY) && run_slot(fd) != RUN_INTERNAL;
}

/* ----------------------------------------------------------------------------------- writing */

RUN_EXPORT ssize_t write(int fd, const void *bytes, size_t length)
{
    ssize_t done;
    struct iovec piece = {(void *)bytes, length};
    if (is_stored_into(fd) && run_write(fd, &piece, 1, RUN_POSITION, &done))
        return done;
    return REAL(write)(fd, bytes, length);
}

RUN_EXPORT ssize_t writev(int fd, const struct iovec *pieces, int count)
{
    ssize_t done;
    if (is_stored_into(fd) && can_be_listed(pieces, count) && run_write(fd, pieces, count, RUN_POSITION, &done))
        return done;
    return REAL(writev)(fd, pieces, count);
}

RUN_EXPORT ssize_t pwrite64(int fd, const void *bytes, size_t length, off64_t offset)
{
    ssize_t done;
    struct iovec piece = {(void *)bytes, length};
    if (is_stored_into(fd) && offset >= 0 && run_write(fd, &piece, 1, offset, &done))
        return done;
    return REAL(pwrite64)(fd, bytes, length, offset);
}

RUN_EXPORT ssize_t pwritev64(int fd, const struct iovec *pieces, int count, off64_t offset)
{
    ssize_t done;
    if (is_stored_into(fd) && offset >= 0 && can_be_listed(pieces, count) &&
        run_write(fd, pieces, count, offset, &done))
        return done;
    return REAL(pwritev64)(fd, pieces, count, offset);
}

RUN_EXPORT ssize_t pwritev64v2(int fd, const struct iovec *pieces, int count, off64_t offset, int flags)
{
    ssize_t done;
    if (flags == 0 && offset >= RUN_POSITION && is_stored_into(fd) && can_be_listed(pieces, count) &&
        run_write(fd, pieces, count, offset, &done))
        return done;
    return REAL(pwritev64v2)(fd, pieces, count, offset, flags);
}

RUN_EXPORT ssize_t pwrite(int fd, const void *bytes, size_t length, off_t offset)
{
    return pwrite64(fd, bytes, length, offset);
}

RUN_EXPORT ssize_t pwritev(int fd, const struct iovec *pieces, int count, off_t offset)
{
    return pwritev64(fd, pieces, count, offset);
}

RUN_EXPORT ssize_t pwritev2(int fd, const struct iovec *pieces, int count, off_t offset, int flags)
{
    return pwritev64v2(fd, pieces, count, offset, flags);
}

/* ----------------------------------------------------------------------------------- reading */

static inline void settle_first(int fd)
{
    if (RUN_UNLIKELY(run_slot(fd) > RUN_INTERNAL))
        (void)run_settle(fd);
}

static inline bool is_read_from(int fd, size_t length)
{
    return RUN_UNLIKELY(run_slot(fd) != RUN_NOBODY) && length >= RUN_READ_FROM && run_slot(fd) != RUN_INTERNAL &&
           (run_slot(fd) == RUN_FRESH || run_only_reads(fd));
}

static bool read_one(int fd, void *bytes, size_t length, off_t offset, ssize_t *done)
{
    struct iovec piece = {bytes, length};
    return run_read(fd, &piece, 1, offset, done);
}

static bool read_list(int fd, const struct iovec *pieces, int count, off_t offset, ssize_t *done)
{
    return is_read_from(fd, RUN_READ_FROM) && can_be_listed(pieces, count) && run_read(fd, pieces, count, offset, done);
}

RUN_EXPORT ssize_t read(int fd, void *bytes, size_t length)
{
    ssize_t done;
    if (is_read_from(fd, length) && read_one(fd, bytes, length, RUN_POSITION, &done))
        return done;
    settle_first(fd);
    return REAL(read)(fd, bytes, length);
}

RUN_EXPORT ssize_t readv(int fd, const struct iovec *pieces, int count)
{
    ssize_t done;
    if (read_list(fd, pieces, count, RUN_POSITION, &done))
        return done;
    settle_first(fd);
    return REAL(readv)(fd, pieces, count);
}

RUN_EXPORT ssize_t pread64(int fd, void *bytes, size_t length, off64_t offset)
{
    ssize_t done;
    if (offset >= 0 && is_read_from(fd, length) && read_one(fd, bytes, length, offset, &done))
        return done;
    settle_first(fd);
    return REAL(pread64)(fd, bytes, length, offset);
}

RUN_EXPORT ssize_t pread(int fd, void *bytes, size_t length, off_t offset)
{
    return pread64(fd, bytes, length, offset);
}

RUN_EXPORT ssize_t preadv64(int fd, const struct iovec *pieces, int count, off64_t offset)
{
    ssize_t done;
    if (offset >= 0 && read_list(fd, pieces, count, offset, &done))
        return done;
    settle_first(fd);
    return REAL(preadv64)(fd, pieces, count, offset);
}

RUN_EXPORT ssize_t preadv(int fd, const struct iovec *pieces, int count, off_t offset)
{
    return preadv64(fd, pieces, count, offset);
}

RUN_EXPORT ssize_t preadv64v2(int fd, const struct iovec *pieces, int count, off64_t offset, int flags)
{
    ssize_t done;
    if (flags == 0 && offset >= RUN_POSITION && read_list(fd, pieces, count, offset, &done))
        return done;
    settle_first(fd);
    return REAL(preadv64v2)(fd, pieces, count, offset, flags);
}

RUN_EXPORT ssize_t preadv2(int fd, const struct iovec *pieces, int count, off_t offset, int flags)
{
    return preadv64v2(fd, pieces, count, offset, flags);
}

/* What _FORTIFY_SOURCE makes of read and pread where the room is known. */
void __chk_fail(void) __attribute__((noreturn));
ssize_t __read_chk(int fd, void *bytes, size_t length, size_t room);
ssize_t __pread_chk(int fd, void *bytes, size_t length, off_t offset, size_t room);
ssize_t __pread64_chk(int fd, void *bytes, size_t length, off64_t offset, size_t room);

RUN_EXPORT ssize_t __read_chk(int fd, void *bytes, size_t length, size_t room)
{
    if (length > room)
        __chk_fail();
    return read(fd, bytes, length);
}

RUN_EXPORT ssize_t __pread64_chk(int fd, void *bytes, size_t length, off64_t offset, size_t room)
{
    if (length > room)
        __chk_fail();
    return pread64(fd, bytes, length, offset);
}

RUN_EXPORT ssize_t __pread_chk(int fd, void *bytes, size_t length, off_t offset, size_t room)
{
    return __pread64_chk(fd, bytes, length, offset, room);
}

/* ------------------------------------------------------------------- from descriptor to another */

RUN_EXPORT ssize_t sendfile64(int out, int in, off64_t *offset, size_t count)
{
    ssize_t done;
    settle_first(in);
    if (is_stored_into(out) && run_send(out, in, offset, count, &done))
        return done;
    settle_first(out);
    return REAL(sendfile64)(out, in, offset, count);
}

RUN_EXPORT ssize_t sendfile(int out, int in, off_t *offset, size_t count)
{
    return sendfile64(out, in, offset, count);
}

RUN_EXPORT ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t length, unsigned flags)
{
    settle_first(in);
    settle_first(out);
    return REAL(copy_file_range)(in, from, out, to, length, flags);
}

RUN_EXPORT ssize_t splice(int in, off64_t *from, int out, off64_t *to, size_t length, unsigned flags)
{
    settle_first(in);
    settle_first(out);
    return REAL(splice)(in, from, out, to, length, flags);
}
