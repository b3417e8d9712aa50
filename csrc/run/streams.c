/* streams.c - stdio: libc's streams write with a system call of their own, past write(2), and so through the kernel.
 * What is large goes to the descriptor here, as POSIX lets two handles of one open file description take turns.
 *
 * Never: looks into a stream; replaces one (fopencookie), whose fileno and position programs use.
 *
 * Invariants
 * - A stream is flushed before its descriptor is written to, and told the position with fseeko after it.
 * - What remains after an error or a short count is fwrite's: the stream learns of it.
 */
#include <fcntl.h>

#include "run/run.h"

#undef fwrite_unlocked

enum { STREAM_FROM = 256 << 10 };       /* below it a copy into the buffer of the stream costs less */

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

RUN_EXPORT FILE *fopen64(const char *path, const char *mode)
{
    FILE *stream = REAL(fopen64)(path, mode);
    if (stream != NULL && run_depth == 0)
        run_opened(fileno(stream), flags_of(mode));
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
        run_opened(fileno(result), flags_of(mode));
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

static bool is_large(size_t size, size_t count, size_t *total)
{
    return !__builtin_mul_overflow(size, count, total) && RUN_UNLIKELY(*total >= STREAM_FROM);
}

RUN_EXPORT size_t fwrite(const void *bytes, size_t size, size_t count, FILE *stream)
{
    size_t total;
    if (!is_large(size, count, &total) || run_depth != 0)
        return REAL(fwrite)(bytes, size, count, stream);
    flockfile(stream);
    size_t done = write_past(bytes, total, stream);
    if (done < total)
        done += REAL(fwrite_unlocked)((const uint8_t *)bytes + done, 1, total - done, stream);
    funlockfile(stream);
    return done == total ? count : done / size;
}

RUN_EXPORT size_t fwrite_unlocked(const void *bytes, size_t size, size_t count, FILE *stream)
{
    size_t total;
    if (!is_large(size, count, &total) || run_depth != 0)
        return REAL(fwrite_unlocked)(bytes, size, count, stream);
    size_t done = write_past(bytes, total, stream);
    if (done < total)
        done += REAL(fwrite_unlocked)((const uint8_t *)bytes + done, 1, total - done, stream);
    return done == total ? count : done / size;
}
