/* transfer.c - bytes of one call of write(2) and its like: what the client takes, and the rest through the kernel.
 *
 * Never: leaves the file offset elsewhere than the kernel would have.
 *
 * Invariants
 * - The room of a write at the file offset is taken before it is filled, with one lseek, as the kernel orders writes of
 *   all that share the offset.
 * - What the client does not take goes to the kernel within the same call: a short count is the kernel's.
 * - Memory of the caller that cannot be read is the kernel's to refuse: the ends of each piece are tried first. A hole
 *   in the middle of a piece is not seen.
 */
#include <limits.h>
#include <sys/resource.h>

#include "run/run.h"

static const uint64_t KERNEL_BYTES_MAX = 0x7ffff000;     /* of one call */
enum { ENDS_AT_ONCE = 32 };
enum { LARGE_PIECE = 256 << 10 };     /* of these the client takes the first one already */

int64_t run_add_up(const struct iovec *pieces, int count, struct iovec *out, int *used)
{
    uint64_t total = 0;
    *used = 0;
    if (count < 0 || count > IOV_MAX)
        return -1;
    for (int i = 0; i < count && total < KERNEL_BYTES_MAX; i++) {
        uint64_t room = KERNEL_BYTES_MAX - total, length = pieces[i].iov_len;
        if (length > INT64_MAX)
            return -1;
        if (length == 0)
            continue;
        out[*used] = (struct iovec){pieces[i].iov_base, length < room ? length : room};
        total += out[(*used)++].iov_len;
    }
    return (int64_t)total;
}

/* The first and the last byte of each piece can be read: asked of the kernel, which answers without a signal. */
static bool can_be_read(const struct iovec *pieces, int count)
{
    struct iovec ends[ENDS_AT_ONCE], target;
    uint8_t bytes[ENDS_AT_ONCE];
    for (int first = 0; first < count; first += ENDS_AT_ONCE / 2) {
        int here = 0;
        for (int i = first; i < count && here < ENDS_AT_ONCE; i++) {
            uint8_t *base = pieces[i].iov_base;
            ends[here++] = (struct iovec){base, 1};
            ends[here++] = (struct iovec){base + pieces[i].iov_len - 1, 1};
        }
        target = (struct iovec){bytes, (size_t)here};
        ssize_t got = process_vm_readv(getpid(), &target, 1, ends, (unsigned long)here, 0);
        if (got != here && !(got < 0 && (errno == EPERM || errno == ENOSYS)))   /* forbidden: it is not known */
            return false;
    }
    return true;
}

static bool is_within_limit(uint64_t end)
{
    struct rlimit limit;
    if (end > INT64_MAX)
        return false;
    return getrlimit(RLIMIT_FSIZE, &limit) == 0 && (limit.rlim_cur == RLIM_INFINITY || end <= limit.rlim_cur);
}

/* What is not taken, from byte skip of pieces[0] on, through the kernel: small pieces up to the next large one, which
 * the client may want; all the rest where it was a large one that was not taken. *used: pieces written, or begun. */
static int64_t through_kernel(int fd, struct iovec *pieces, int count, uint64_t skip, off_t offset, int *used)
{
    uint64_t wanted = 0;
    pieces[0].iov_base = (uint8_t *)pieces[0].iov_base + skip;
    pieces[0].iov_len -= skip;
    for (*used = 0; *used < count; ++*used) {
        if (*used > 0 && pieces[0].iov_len < LARGE_PIECE && pieces[*used].iov_len >= LARGE_PIECE)
            break;
        wanted += pieces[*used].iov_len;
    }
    ssize_t done = REAL(pwritev64)(fd, pieces, *used, offset);
    if (done < 0)
        return -errno;
    if ((uint64_t)done < wanted)
        *used = count;          /* a short count ends it all */
    return done;
}

/* Bytes stored, or -errno where none were. */
static int64_t store(run_file *file, int fd, struct iovec *pieces, int count, off_t offset)
{
    int64_t total = 0;
    uint64_t done = 0;
    for (int i = 0; i < count;) {
        const uint8_t *bytes = (const uint8_t *)pieces[i].iov_base + done;
        uint64_t length = pieces[i].iov_len - done;
        int64_t taken = cxl_direct_pwrite(file->direct, bytes, length, (uint64_t)(offset + total));
        int used = 0;
        if (taken == -EAGAIN)
            taken = through_kernel(fd, pieces + i, count - i, done, offset + total, &used);
        else if (taken > 0)
            atomic_store_explicit(&file->dirty, true, memory_order_relaxed);
        if (taken < 0)
            return total > 0 ? total : taken;
        total += taken;
        done = used > 0 || (uint64_t)taken == length ? 0 : done + (uint64_t)taken;
        i += used > 0 ? used : done == 0;
    }
    return total;
}

static bool store_at_position(run_file *file, int fd, struct iovec *pieces, int count, int64_t total, int64_t *result)
{
    off_t end = REAL(lseek64)(fd, total, SEEK_CUR);
    if (end < 0)
        return false;
    if (!is_within_limit((uint64_t)end)) {
        REAL(lseek64)(fd, -total, SEEK_CUR);
        return false;
    }
    *result = store(file, fd, pieces, count, end - total);
    int64_t missing = total - (*result > 0 ? *result : 0);
    if (missing > 0)
        REAL(lseek64)(fd, -missing, SEEK_CUR);
    return true;
}

/* The file is one that is stored into; its lock is held for reading. */
static run_file *take_bound(int fd, uint64_t total)
{
    run_file *file = run_take(fd, false);
    if (file == NULL)
        return NULL;
    bool bound = file->direct != NULL;
    if (!bound && !file->refused)
        atomic_fetch_add(&file->seen, total);
    bool refused = file->refused;
    if (bound)
        return file;
    run_give(file);
    if (refused) {
        run_detach(fd);
        return NULL;
    }
    file = run_take(fd, true);
    if (file == NULL)
        return NULL;
    bound = run_bind(file, fd);
    run_give(file);
    if (!bound)
        return NULL;
    file = run_take(fd, false);
    if (file != NULL && file->direct == NULL) {
        run_give(file);
        return NULL;
    }
    return file;
}

static bool write_inside(int fd, const struct iovec *pieces, int count, off_t offset, int64_t *result)
{
    struct iovec own[IOV_MAX];
    int used;
    int64_t total = run_add_up(pieces, count, own, &used);
    if (total <= 0)
        return false;
    run_file *file = take_bound(fd, (uint64_t)total);
    if (file == NULL)
        return false;
    bool known = can_be_read(own, used);
    if (known && offset != RUN_POSITION)
        known = is_within_limit((uint64_t)offset + (uint64_t)total);
    if (known && offset != RUN_POSITION)
        *result = store(file, fd, own, used, offset);
    else if (known)
        known = store_at_position(file, fd, own, used, total, result);
    run_give(file);
    return known;
}

bool run_write(int fd, const struct iovec *pieces, int count, off_t offset, ssize_t *done)
{
    run_visit visit;
    int64_t result = 0;
    if (!run_enter(&visit))
        return false;
    bool known = write_inside(fd, pieces, count, offset, &result);
    run_leave(&visit);
    if (known)
        *done = run_answer(result);
    return known;
}
