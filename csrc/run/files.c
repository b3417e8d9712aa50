/* files.c - calls that ask for the whole of a file, or change it as a whole: what was stored is settled first.
 *
 * Never: answers one of them: the kernel does.
 *
 * Invariants
 * - An error of what was stored is told by fsync and fdatasync, as one of writing back is.
 */
#include <fcntl.h>

#include "run/run.h"

static inline int settle(int fd)
{
    return RUN_UNLIKELY(run_slot(fd) > RUN_INTERNAL) ? run_settle(fd) : 0;
}

RUN_EXPORT off64_t lseek64(int fd, off64_t offset, int whence)
{
    if (whence != SEEK_SET && whence != SEEK_CUR)
        (void)settle(fd);
    return REAL(lseek64)(fd, offset, whence);
}

RUN_EXPORT off_t lseek(int fd, off_t offset, int whence)
{
    return lseek64(fd, offset, whence);
}

RUN_EXPORT int ftruncate64(int fd, off64_t length)
{
    (void)settle(fd);
    return REAL(ftruncate64)(fd, length);
}

RUN_EXPORT int ftruncate(int fd, off_t length)
{
    return ftruncate64(fd, length);
}

RUN_EXPORT int fallocate64(int fd, int mode, off64_t offset, off64_t length)
{
    (void)settle(fd);
    return REAL(fallocate64)(fd, mode, offset, length);
}

RUN_EXPORT int fallocate(int fd, int mode, off_t offset, off_t length)
{
    return fallocate64(fd, mode, offset, length);
}

RUN_EXPORT int posix_fallocate64(int fd, off64_t offset, off64_t length)
{
    (void)settle(fd);
    return REAL(posix_fallocate64)(fd, offset, length);
}

RUN_EXPORT int posix_fallocate(int fd, off_t offset, off_t length)
{
    return posix_fallocate64(fd, offset, length);
}

static int tell(int settled, int result)
{
    if (result != 0 || settled == 0)
        return result;
    errno = -settled;
    return -1;
}

RUN_EXPORT int fsync(int fd)
{
    int settled = settle(fd);
    return tell(settled, REAL(fsync)(fd));
}

RUN_EXPORT int fdatasync(int fd)
{
    int settled = settle(fd);
    return tell(settled, REAL(fdatasync)(fd));
}

RUN_EXPORT int syncfs(int fd)
{
    run_settle_all();
    return REAL(syncfs)(fd);
}

RUN_EXPORT void sync(void)
{
    run_settle_all();
    REAL(sync)();
}
