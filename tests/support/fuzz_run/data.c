/* data.c - steps that move bytes through descriptors: write and read in all their forms, and from one descriptor to
 * another.
 */
#include <sys/sendfile.h>

#include "fuzz.h"

enum { PIECES_MAX = 9, PIPE_PIECE = 48 * KIB };

/* Cuts a buffer into pieces, some of them empty. */
static int cut(struct iovec *pieces, const void *bytes, size_t length)
{
    int count = 1 + (int)below(PIECES_MAX);
    size_t done = 0;
    for (int i = 0; i < count; i++) {
        size_t here = i == count - 1 ? length - done : below((unsigned)(length - done) + 1);
        pieces[i] = (struct iovec){(uint8_t *)bytes + done, here};
        done += here;
    }
    return count;
}

long write_somehow(unsigned way, int fd, const void *bytes, size_t length, off_t offset)
{
    struct iovec pieces[PIECES_MAX];
    int count = cut(pieces, bytes, length);
    bool at = offset >= 0;
    switch (way) {
    case 0:
    case 1: return at ? pwrite(fd, bytes, length, offset) : write(fd, bytes, length);
    case 2:
        return at ? syscall(SYS_pwrite64, fd, bytes, length, offset) : syscall(SYS_write, fd, bytes, length);
    case 3: return at ? pwritev(fd, pieces, count, offset) : writev(fd, pieces, count);
    case 4:
        return at ? syscall(SYS_pwritev, fd, pieces, count, offset, 0) : syscall(SYS_writev, fd, pieces, count);
    default: return pwritev2(fd, pieces, count, offset, 0);
    }
}

long read_somehow(unsigned way, int fd, void *bytes, size_t length, off_t offset)
{
    struct iovec pieces[PIECES_MAX];
    int count = cut(pieces, bytes, length);
    bool at = offset >= 0;
    switch (way) {
    case 0:
    case 1: return at ? pread(fd, bytes, length, offset) : read(fd, bytes, length);
    case 2: return at ? syscall(SYS_pread64, fd, bytes, length, offset) : syscall(SYS_read, fd, bytes, length);
    case 3: return at ? preadv(fd, pieces, count, offset) : readv(fd, pieces, count);
    case 4:
        return at ? syscall(SYS_preadv, fd, pieces, count, offset, 0) : syscall(SYS_readv, fd, pieces, count);
    default: return preadv2(fd, pieces, count, offset, 0);
    }
}

long read_all(int fd, void *bytes, size_t length, off_t offset)
{
    size_t done = 0;
    long got = 1;
    while (done < length && (got > 0 || got == -EINTR)) {
        got = answer(syscall(SYS_pread64, fd, (uint8_t *)bytes + done, length - done, offset + (off_t)done));
        if (got == -EINTR)
            say("interrupted, with %zu of %zu", done, length);
        if (got > 0 && done > 0)
            say("read in pieces: %zu of %zu, then %ld", done, length, got);
        done += got > 0 ? (size_t)got : 0;
    }
    return done > 0 ? (long)done : got;
}

static size_t same_bytes(const uint8_t *one, const uint8_t *other, size_t length)
{
    size_t same = 0;
    while (same < length && one[same] == other[same])
        same++;
    return same;
}

int whole_blocks(int fd, const uint8_t *bytes, size_t length, int count)
{
    unsigned used = 0;
    int whole = 0;
    for (int i = 0; i < count; i++) {
        long got = read_all(fd, target, length, (off_t)length * i);
        size_t longest = 0;
        int like = -1;
        for (int k = 0; k < count; k++) {
            size_t same = used >> k & 1 ? 0 : same_bytes(target, bytes + k * 4096, got > 0 ? (size_t)got : 0);
            if (same > longest)
                longest = same, like = k;
        }
        if (longest == length) {
            used |= 1U << like;
            whole++;
        } else {
            say("block %d: %ld bytes, the first %zu of %d", i, got, longest, like);
        }
    }
    return whole;
}

static void say_read(const char *what, unsigned way, size_t length, long got)
{
    long result = answer(got);
    say("%s way %u, %zu = %ld, sum %llx", what, way, length, result,
        result > 0 ? (unsigned long long)sum_of(target, (size_t)result) : 0);
}

static void play_write(void)
{
    slot *one = pick();
    size_t length = a_length();
    unsigned way = below(WAYS);
    long result = answer(write_somehow(way, one->fd, some_bytes(length), length, -1));
    changed(one->file);
    say("way %u, %zu = %ld", way, length, result);
}

static void play_pwrite(void)
{
    slot *one = pick();
    size_t length = a_length();
    off_t offset = an_offset();
    unsigned way = below(WAYS);
    long result = answer(write_somehow(way, one->fd, some_bytes(length), length, offset));
    changed(one->file);
    say("way %u, %zu at %lld = %ld", way, length, (long long)offset, result);
}

static void play_pwritev2(void)
{
    static const int sets[] = {0, RWF_APPEND, RWF_DSYNC, RWF_SYNC, RWF_HIPRI, RWF_APPEND | RWF_DSYNC, 1 << 30};
    slot *one = pick();
    size_t length = a_length();
    struct iovec pieces[PIECES_MAX];
    int count = cut(pieces, some_bytes(length), length), flags = sets[below(7)];
    off_t offset = below(2) ? -1 : an_offset();
    bool raw = below(2);
    long result = raw ? syscall(SYS_pwritev2, one->fd, pieces, count, offset, 0, flags)
                      : pwritev2(one->fd, pieces, count, offset, flags);
    result = answer(result);
    changed(one->file);
    say("raw %d, flags %x, %zu at %lld = %ld", raw, flags, length, (long long)offset, result);
}

static void play_read(void)
{
    slot *one = pick();
    size_t length = a_length();
    unsigned way = below(WAYS);
    say_read("read", way, length, read_somehow(way, one->fd, target, length, -1));
}

static void play_pread(void)
{
    slot *one = pick();
    size_t length = a_length();
    unsigned way = below(WAYS);
    say_read("pread", way, length, read_somehow(way, one->fd, target, length, an_offset()));
}

/* Memory, counts and offsets that the kernel refuses. At the beginning of the file: tmpfs makes a file as long as the
 * offset of a write of which it could read nothing.
 */
static void play_refused(void)
{
    slot *one = pick();
    size_t length = a_length() + 1;
    uint8_t *bad = mmap(NULL, LARGEST + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct iovec pieces[2] = {{bad, length}, {target, 5}};
    long result;
    unsigned way = below(7);
    syscall(SYS_lseek, one->fd, 0, SEEK_SET);
    switch (way) {
    case 0: result = write(one->fd, bad, length); break;
    case 1: result = pwrite(one->fd, bad, length, 0); break;
    case 2: result = writev(one->fd, pieces, 2); break;
    case 3: result = writev(one->fd, (struct iovec *)bad, 3); break;
    case 4: result = pwrite(one->fd, target, length, -5); break;
    case 5: result = writev(one->fd, pieces, -1); break;
    default: result = pwritev(one->fd, pieces, 2000, 0); break;
    }
    say("way %u, %zu = %ld", way, length, answer(result));
    munmap(bad, LARGEST + PAGE);
}

/* --------------------------------------------------------------- from one descriptor to another */

/* The first one is not of the same file: what a copy onto itself leaves depends on the size of its pieces. */
static slot *pick_other(slot *one)
{
    slot *other = pick();
    return other->file == one->file ? NULL : other;
}

static void play_copy_range(void)
{
    slot *out = pick(), *in = pick_other(out);
    if (in == NULL)
        return;
    size_t length = a_length();
    off64_t from = an_offset(), to = an_offset(), total = 0;
    bool from_given = below(2), to_given = below(2), raw = below(2);
    long result;
    do {
        off64_t *a = from_given ? &from : NULL, *b = to_given ? &to : NULL;
        size_t rest = length - (size_t)total;
        result = raw ? syscall(SYS_copy_file_range, in->fd, a, out->fd, b, rest, 0)
                     : copy_file_range(in->fd, a, out->fd, b, rest, 0);
        total += result > 0 ? result : 0;
    } while (result > 0 && (size_t)total < length);
    changed(out->file);
    say("raw %d, %zu = %ld, %lld bytes from %lld to %lld", raw, length, result < 0 ? answer(result) : 0,
        (long long)total, (long long)from, (long long)to);
}

static void play_sendfile(void)
{
    slot *out = pick(), *in = pick_other(out);
    if (in == NULL)
        return;
    size_t length = a_length();
    off_t from = an_offset(), total = 0;
    bool given = below(2), raw = below(2);
    long result;
    do {
        size_t rest = length - (size_t)total;
        result = raw ? syscall(SYS_sendfile, out->fd, in->fd, given ? &from : NULL, rest)
                     : sendfile(out->fd, in->fd, given ? &from : NULL, rest);
        total += result > 0 ? result : 0;
    } while (result > 0 && (size_t)total < length);
    changed(out->file);
    say("raw %d, %zu = %ld, %lld bytes, from %lld", raw, length, result < 0 ? answer(result) : 0, (long long)total,
        (long long)from);
}

static void play_splice_in(void)
{
    slot *one = pick();
    size_t length = 1 + below(PIPE_PIECE);
    off64_t at = an_offset();
    bool given = below(2), raw = below(2);
    int ends[2];
    if (pipe(ends) != 0)
        return;
    long filled = write(ends[1], some_bytes(length), length), total = 0, result;
    close(ends[1]);
    do {
        result = raw ? syscall(SYS_splice, ends[0], NULL, one->fd, given ? &at : NULL, length, 0)
                     : splice(ends[0], NULL, one->fd, given ? &at : NULL, length, 0);
        total += result > 0 ? result : 0;
    } while (result > 0);
    close(ends[0]);
    changed(one->file);
    say("raw %d, %ld = %ld, %ld bytes, at %lld", raw, filled, answer(result), total, (long long)at);
}

static void play_splice_out(void)
{
    slot *one = pick();
    size_t length = 1 + below(PIPE_PIECE);
    off64_t at = an_offset();
    bool given = below(2);
    int ends[2];
    if (pipe(ends) != 0)
        return;
    long result = answer(splice(one->fd, given ? &at : NULL, ends[1], NULL, length, 0)), got = 0;
    close(ends[1]);
    if (result > 0)
        got = read(ends[0], target, (size_t)result);
    close(ends[0]);
    say("%zu = %ld, %ld bytes, at %lld, sum %llx", length, result, got, (long long)at,
        got > 0 ? (unsigned long long)sum_of(target, (size_t)got) : 0);
}

const kind data_kinds[] = {
    {"write", 16, play_write, SAVES},
    {"pwrite", 12, play_pwrite, SAVES},
    {"pwritev2", 5, play_pwritev2, SAVES},
    {"read", 9, play_read, SAVES},
    {"pread", 6, play_pread, SAVES},
    {"refused", 2, play_refused, SAVES},
    {"copy_range", 3, play_copy_range, ALONE},
    {"sendfile", 3, play_sendfile, ALONE},
    {"splice_in", 2, play_splice_in, SAVES},
    {"splice_out", 2, play_splice_out, SAVES},
    {NULL, 0, NULL, ALONE},
};
