/* reading.c - bytes of one call of read(2) and its like: copied out of the medium, or read by the kernel.
 *
 * Never: answers at the end of a file, or for a file that somebody may write to; leaves the file offset elsewhere than
 * the kernel would have.
 *
 * Invariants
 * - The offset moves by what is there to be read, with one lseek, before a byte is copied, and nobody was able to
 *   change the file from before that until all were copied: whoever shares the offset, or writes, sees one order of
 *   calls.
 * - What the client refuses is the kernel's within the same call, also its error.
 * - Memory of the caller that cannot be written is the kernel's to refuse: the ends of each piece are tried first. A
 *   hole in the middle of a piece is not seen.
 */
#include <limits.h>
#include <sys/syscall.h>

#include "run/run.h"

/* The first and the last bytes of each piece can be written, which are about to be something else in any case: asked of
 * the kernel, which answers without a signal. Of all calls that fill in two places getcpu costs least. */
static bool can_be_written(const struct iovec *pieces, int count)
{
    unsigned ignored;
    for (int i = 0; i < count; i++) {
        uint8_t *base = pieces[i].iov_base, *end = base + pieces[i].iov_len;
        if (pieces[i].iov_len < sizeof ignored)
            return false;       /* not worth a way of its own */
        if (syscall(SYS_getcpu, base, end - sizeof ignored, NULL) != 0 && errno == EFAULT)
            return false;       /* forbidden: it is not known */
    }
    return true;
}

/* How many pieces have room for length bytes, which they have; the last one is cut, by *cut bytes. */
static int shorten(struct iovec *pieces, uint64_t length, uint64_t *cut)
{
    int used = 0;
    for (; length > pieces[used].iov_len; used++)
        length -= pieces[used].iov_len;
    *cut = pieces[used].iov_len - length;
    pieces[used].iov_len = length;
    return used + 1;
}

/* Bytes from offset on, or of the offset of the description: *end is behind them. 0: none, or it is not known. */
static uint64_t claim(const run_file *file, int fd, uint64_t total, off_t offset, off_t *end)
{
    bool moves = offset == RUN_POSITION;
    uint64_t size = cxl_reader_size(file->reader);
    off_t start = moves ? REAL(lseek64)(fd, 0, SEEK_CUR) : offset;
    if (start < 0 || (uint64_t)start >= size)
        return 0;
    uint64_t length = size - (uint64_t)start < total ? size - (uint64_t)start : total;
    *end = moves ? REAL(lseek64)(fd, (off_t)length, SEEK_CUR) : start + (off_t)length;
    return *end < 0 ? 0 : length;
}

/* All that was asked for, from offset on; a file offset that has moved by length already moves to behind it. */
static int64_t through_kernel(int fd, const struct iovec *pieces, int count, off_t offset, uint64_t length, bool moves)
{
    ssize_t done = REAL(preadv64)(fd, pieces, count, offset);
    int64_t result = done < 0 ? -errno : done;
    int64_t missing = (done < 0 ? 0 : done) - (int64_t)length;
    if (moves && missing != 0)
        REAL(lseek64)(fd, missing, SEEK_CUR);
    return result;
}

/* False: nothing was done. *stale: the reader is of no use any more. */
static bool read_directly(run_file *file, int fd, struct iovec *pieces, int count, uint64_t total, off_t offset,
                          int64_t *result, bool *stale)
{
    off_t end;
    uint64_t cut;
    *stale = !cxl_reader_holds(file->reader);
    uint64_t length = *stale ? 0 : claim(file, fd, total, offset, &end);
    if (length == 0)
        return false;
    off_t start = end - (off_t)length;
    int used = shorten(pieces, length, &cut), failed = -EFAULT;
    if (can_be_written(pieces, used))
        failed = cxl_reader_copy(file->reader, pieces, used, (uint64_t)start);
    *stale = failed == -ESTALE;
    *result = (int64_t)length;
    pieces[used - 1].iov_len += cut;
    if (failed != 0)
        *result = through_kernel(fd, pieces, count, start, length, offset == RUN_POSITION);
    return true;
}

/* The file has a reader; its lock is held for reading. */
static run_file *take_bound(int fd, uint64_t total)
{
    run_file *file = run_take(fd, false);
    if (file == NULL || file->reader != NULL)
        return file;
    bool asks = file->reads && !file->refused && atomic_fetch_add(&file->seen, total) + total >= file->bind_from;
    run_give(file);
    file = asks ? run_take(fd, true) : NULL;
    if (file == NULL)
        return NULL;
    bool bound = run_bind_reader(file, fd);
    run_give(file);
    file = bound ? run_take(fd, false) : NULL;
    if (file == NULL || file->reader != NULL)
        return file;
    run_give(file);
    return NULL;
}

/* Somebody may write to the file, or has: it may be read directly again when he has gone. */
static void drop_reader(int fd)
{
    run_file *file = run_take(fd, true);
    if (file == NULL)
        return;
    if (file->reader != NULL && !cxl_reader_holds(file->reader)) {
        cxl_reader_close(file->reader, fd);
        file->reader = NULL;
    }
    run_give(file);
}

static bool read_inside(int fd, const struct iovec *pieces, int count, off_t offset, int64_t *result)
{
    struct iovec own[IOV_MAX];
    int used;
    bool stale = false;
    int64_t total = run_add_up(pieces, count, own, &used);
    if (total < RUN_READ_FROM)
        return false;
    run_file *file = take_bound(fd, (uint64_t)total);
    if (file == NULL)
        return false;
    bool known = read_directly(file, fd, own, used, (uint64_t)total, offset, result, &stale);
    run_give(file);
    if (stale)
        drop_reader(fd);
    return known;
}

bool run_read(int fd, const struct iovec *pieces, int count, off_t offset, ssize_t *done)
{
    run_visit visit;
    int64_t result = 0;
    if (!run_set.reads || !run_enter(&visit))
        return false;
    bool known = read_inside(fd, pieces, count, offset, &result);
    run_leave(&visit);
    if (known)
        *done = run_answer(result);
    return known;
}
