/* streams.c - stdio: libc's streams write and read with system calls of their own, past write(2) and read(2), and so
 * through the kernel. What is large goes to the descriptor here, as POSIX lets two handles of one open file description
 * take turns.
 *
 * Never: looks into a stream; replaces one (fopencookie), whose fileno and position programs use.
 *
 * Invariants
 * - A stream is flushed before its descriptor is written to, and told the position with fseeko after it; and before it
 *   is read, which forgets what was read ahead, and the position as well.
 * - What remains after an error or a short count is fwrite's or fread's: the stream learns of it, and of the end.
 * - A stream into which something was pushed back, or that libc maps, is libc's alone.
 */
#include <fcntl.h>
#include <wchar.h>

#include "run/run.h"

#undef fwrite_unlocked
#undef fread_unlocked

enum { STREAM_FROM = 256 << 10 };       /* below it a copy into the buffer of the stream costs less */
enum { STREAM_READ_FROM = 64 << 10 };   /* and what was read ahead would be read again */

static atomic_bool is_libcs[RUN_DESCRIPTORS];

/* Flags do not matter but for reading and appending, which the mode begins with. */
static int flags_of(const char *mode)
{
    bool both = false;
    for (const char *letter = mode; *letter != '\0'; letter++)
        both = both || *letter == '+';
    if (mode[0] == 'a')
        return O_WRONLY | O_APPEND;
    return both ? O_RDWR : mode[0] == 'r' ? O_RDONLY : O_WRONLY;
}

static void leave_to_libc(int fd, bool left)
{
    if ((unsigned)fd < RUN_DESCRIPTORS)
        atomic_store_explicit(&is_libcs[fd], left, memory_order_relaxed);
}

static void opened(FILE *stream, const char *mode)
{
    bool is_mapped = false;
    for (const char *letter = mode; *letter != '\0' && *letter != ','; letter++)
        is_mapped = is_mapped || *letter == 'm';
    run_opened(fileno(stream), flags_of(mode));
    leave_to_libc(fileno(stream), is_mapped);
}

RUN_EXPORT FILE *fopen64(const char *path, const char *mode)
{
    FILE *stream = REAL(fopen64)(path, mode);
    if (stream != NULL && run_depth == 0)
        opened(stream, mode);
    return stream;
}

RUN_EXPORT FILE *fopen(const char *path, const char *mode)
{
    return fopen64(path, mode);
}

static void before_closing(FILE *stream)
{
    int fd = run_depth == 0 ? fileno(stream) : -1;
    if (fd >= 0 && run_slot(fd) != RUN_NOBODY)
        (void)run_before_close(fd);
}

RUN_EXPORT FILE *freopen64(const char *path, const char *mode, FILE *stream)
{
    before_closing(stream);
    FILE *result = REAL(freopen64)(path, mode, stream);
    if (result != NULL && path != NULL && run_depth == 0)
        opened(result, mode);
    return result;
}

RUN_EXPORT FILE *freopen(const char *path, const char *mode, FILE *stream)
{
    return freopen64(path, mode, stream);
}

RUN_EXPORT int fclose(FILE *stream)
{
    int stored = 0, fd = run_depth == 0 ? fileno(stream) : -1;
    if (fd >= 0 && run_slot(fd) != RUN_NOBODY)
        stored = run_before_close(fd);
    int result = REAL(fclose)(stream);
    if (result == 0 && stored != 0) {
        errno = -stored;
        return EOF;
    }
    return result;
}

/* Bytes written past the stream; the rest is fwrite's. */
static size_t write_past(const void *bytes, size_t length, FILE *stream)
{
    size_t done = 0;
    int fd = fileno_unlocked(stream);
    if (run_slot(fd) == RUN_NOBODY || run_slot(fd) == RUN_INTERNAL || ferror_unlocked(stream))
        return 0;
    if (fflush_unlocked(stream) != 0)
        return 0;
    while (done < length) {
        ssize_t now;
        struct iovec piece = {(uint8_t *)bytes + done, length - done};
        if (!run_write(fd, &piece, 1, RUN_POSITION, &now) || now <= 0)
            break;
        done += (size_t)now;
    }
    if (done > 0) {
        off64_t position = lseek64(fd, 0, SEEK_CUR);
        if (position >= 0)
            (void)fseeko64(stream, position, SEEK_SET);
    }
    return done;
}

static bool is_large(size_t size, size_t count, size_t from, size_t *total)
{
    return !__builtin_mul_overflow(size, count, total) && RUN_UNLIKELY(*total >= from) && run_depth == 0;
}

static size_t write_all_of(const void *bytes, size_t size, size_t count, size_t total, FILE *stream)
{
    size_t done = write_past(bytes, total, stream);
    if (done < total)
        done += REAL(fwrite_unlocked)((const uint8_t *)bytes + done, 1, total - done, stream);
    return done == total ? count : done / size;
}

RUN_EXPORT size_t fwrite(const void *bytes, size_t size, size_t count, FILE *stream)
{
    size_t total;
    if (!is_large(size, count, STREAM_FROM, &total))
        return REAL(fwrite)(bytes, size, count, stream);
    flockfile(stream);
    size_t written = write_all_of(bytes, size, count, total, stream);
    funlockfile(stream);
    return written;
}

RUN_EXPORT size_t fwrite_unlocked(const void *bytes, size_t size, size_t count, FILE *stream)
{
    size_t total;
    if (!is_large(size, count, STREAM_FROM, &total))
        return REAL(fwrite_unlocked)(bytes, size, count, stream);
    return write_all_of(bytes, size, count, total, stream);
}

/* ------------------------------------------------------------------------------------ reading */

RUN_EXPORT int ungetc(int letter, FILE *stream)
{
    if (run_depth == 0)
        leave_to_libc(fileno(stream), true);
    return REAL(ungetc)(letter, stream);
}

/* Bytes read past the stream; the rest is fread's. */
static size_t read_past(void *bytes, size_t length, FILE *stream)
{
    size_t done = 0;
    int fd = fileno_unlocked(stream);
    if (run_slot(fd) == RUN_NOBODY || run_slot(fd) == RUN_INTERNAL || fwide(stream, 0) > 0)
        return 0;
    run_before_duplicate(fd);
    if (run_slot(fd) <= RUN_INTERNAL || !run_only_reads(fd) || atomic_load(&is_libcs[fd]) || ferror_unlocked(stream) ||
        feof_unlocked(stream) || fflush_unlocked(stream) != 0)
        return 0;
    while (done < length) {
        ssize_t now;
        struct iovec piece = {(uint8_t *)bytes + done, length - done};
        if (!run_read(fd, &piece, 1, RUN_POSITION, &now) || now <= 0)
            break;
        done += (size_t)now;
    }
    return done;
}

static size_t read_all_of(void *bytes, size_t size, size_t count, size_t total, FILE *stream)
{
    size_t done = read_past(bytes, total, stream);
    if (done < total)
        done += REAL(fread_unlocked)((uint8_t *)bytes + done, 1, total - done, stream);
    return done == total ? count : done / size;
}

RUN_EXPORT size_t fread(void *bytes, size_t size, size_t count, FILE *stream)
{
    size_t total;
    if (!is_large(size, count, STREAM_READ_FROM, &total))
        return REAL(fread)(bytes, size, count, stream);
    flockfile(stream);
    size_t were_read = read_all_of(bytes, size, count, total, stream);
    funlockfile(stream);
    return were_read;
}

RUN_EXPORT size_t fread_unlocked(void *bytes, size_t size, size_t count, FILE *stream)
{
    size_t total;
    if (!is_large(size, count, STREAM_READ_FROM, &total))
        return REAL(fread_unlocked)(bytes, size, count, stream);
    return read_all_of(bytes, size, count, total, stream);
}

/* What _FORTIFY_SOURCE makes of them where the room is known. */
void __chk_fail(void) __attribute__((noreturn));
size_t __fread_chk(void *bytes, size_t room, size_t size, size_t count, FILE *stream);
size_t __fread_unlocked_chk(void *bytes, size_t room, size_t size, size_t count, FILE *stream);

RUN_EXPORT size_t __fread_chk(void *bytes, size_t room, size_t size, size_t count, FILE *stream)
{
    size_t total;
    if (__builtin_mul_overflow(size, count, &total) || total > room)
        __chk_fail();
    return fread(bytes, size, count, stream);
}

RUN_EXPORT size_t __fread_unlocked_chk(void *bytes, size_t room, size_t size, size_t count, FILE *stream)
{
    size_t total;
    if (__builtin_mul_overflow(size, count, &total) || total > room)
        __chk_fail();
    return fread_unlocked(bytes, size, count, stream);
}
