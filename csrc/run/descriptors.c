/* descriptors.c - where descriptors come from and where they go: open, dup, fcntl, close.
 *
 * Never: keeps the program from a number that it asks for, but where the library itself lies there.
 *
 * Invariants
 * - What was stored is settled before the descriptor is closed: close(2) commits it, and tells what became of it.
 * - The library's descriptors do not exist for the program: to close them is EBADF, and a range leaves them out.
 */
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>

#include "run/run.h"

/* What has been opened, known to the table; the library's own is moved out of the way. */
static int opened(int fd, int flags)
{
    if (fd < 0)
        return fd;
    if (RUN_UNLIKELY(run_depth != 0))
        fd = run_move_away(fd);
    run_opened(fd, flags);
    return fd;
}

static mode_t mode_of(int flags, va_list rest)
{
    return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, mode_t) : 0;
}

#define WITH_MODE(call)                                                                                               \
    va_list rest;                                                                                                     \
    va_start(rest, flags);                                                                                            \
    mode_t mode = mode_of(flags, rest);                                                                               \
    va_end(rest);                                                                                                     \
    return opened(call, flags)

RUN_EXPORT int open(const char *path, int flags, ...)
{
    WITH_MODE(REAL(open)(path, flags, mode));
}

RUN_EXPORT int open64(const char *path, int flags, ...)
{
    WITH_MODE(REAL(open64)(path, flags, mode));
}

RUN_EXPORT int openat(int directory, const char *path, int flags, ...)
{
    WITH_MODE(REAL(openat)(directory, path, flags, mode));
}

RUN_EXPORT int openat64(int directory, const char *path, int flags, ...)
{
    WITH_MODE(REAL(openat64)(directory, path, flags, mode));
}

RUN_EXPORT int creat(const char *path, mode_t mode)
{
    return opened(REAL(creat)(path, mode), O_WRONLY);
}

RUN_EXPORT int creat64(const char *path, mode_t mode)
{
    return opened(REAL(creat64)(path, mode), O_WRONLY);
}

RUN_EXPORT int __open_2(const char *path, int flags)
{
    return opened(REAL(__open_2)(path, flags), flags);
}

RUN_EXPORT int __open64_2(const char *path, int flags)
{
    return opened(REAL(__open64_2)(path, flags), flags);
}

RUN_EXPORT int __openat_2(int directory, const char *path, int flags)
{
    return opened(REAL(__openat_2)(directory, path, flags), flags);
}

RUN_EXPORT int __openat64_2(int directory, const char *path, int flags)
{
    return opened(REAL(__openat64_2)(directory, path, flags), flags);
}

/* ------------------------------------------------------------------------------ mkstemp */

RUN_EXPORT int mkostemps(char *name, int suffix, int flags)
{
    return opened(REAL(mkostemps)(name, suffix, flags), O_RDWR | flags);
}

RUN_EXPORT int mkostemps64(char *name, int suffix, int flags)
{
    return opened(REAL(mkostemps64)(name, suffix, flags), O_RDWR | flags);
}

RUN_EXPORT int mkstemp(char *name)
{
    return mkostemps(name, 0, 0);
}

RUN_EXPORT int mkstemp64(char *name)
{
    return mkostemps64(name, 0, 0);
}

RUN_EXPORT int mkostemp(char *name, int flags)
{
    return mkostemps(name, 0, flags);
}

RUN_EXPORT int mkostemp64(char *name, int flags)
{
    return mkostemps64(name, 0, flags);
}

RUN_EXPORT int mkstemps(char *name, int suffix)
{
    return mkostemps(name, suffix, 0);
}

RUN_EXPORT int mkstemps64(char *name, int suffix)
{
    return mkostemps64(name, suffix, 0);
}

/* ------------------------------------------------------------------------------ duplicates */

static bool is_hidden(int fd)
{
    return run_slot(fd) == RUN_INTERNAL && run_depth == 0 && run_process == getpid();
}

RUN_EXPORT int dup(int fd)
{
    run_before_duplicate(fd);
    int copy = REAL(dup)(fd);
    if (copy >= 0)
        run_duplicated(fd, copy);
    return copy;
}

/* Whatever lies at target is about to be closed by dup2 and dup3, which do not tell what became of it. */
static bool make_way(int fd, int target)
{
    if (fd == target || run_process != getpid())
        return true;
    if (is_hidden(target)) {
        errno = EBUSY;
        return false;
    }
    if (run_slot(target) != RUN_NOBODY && REAL(fcntl)(fd, F_GETFD) >= 0)
        (void)run_before_close(target);
    run_before_duplicate(fd);
    return true;
}

static void has_duplicated(int fd, int target, int result)
{
    if (result >= 0 && fd != target && run_process == getpid())
        run_duplicated(fd, target);
}

RUN_EXPORT int dup2(int fd, int target)
{
    if (!make_way(fd, target))
        return -1;
    int result = REAL(dup2)(fd, target);
    has_duplicated(fd, target, result);
    return result;
}

RUN_EXPORT int dup3(int fd, int target, int flags)
{
    if (!make_way(fd, target))
        return -1;
    int result = REAL(dup3)(fd, target, flags);
    has_duplicated(fd, target, result);
    return result;
}

static int control(int fd, int command, void *argument)
{
    bool duplicates = command == F_DUPFD || command == F_DUPFD_CLOEXEC;
    if (RUN_UNLIKELY(run_slot(fd) != RUN_NOBODY) && duplicates)
        run_before_duplicate(fd);
    if (RUN_UNLIKELY(run_slot(fd) != RUN_NOBODY) && command == F_SETFL &&
        ((intptr_t)argument & (O_APPEND | O_DSYNC)) != 0)
        run_retire(fd);
    int result = REAL(fcntl)(fd, command, argument);
    if (duplicates && result >= 0)
        run_duplicated(fd, result);
    return result;
}

#define WITH_ARGUMENT(call)                                                                                           \
    va_list rest;                                                                                                     \
    va_start(rest, command);                                                                                          \
    void *argument = va_arg(rest, void *);                                                                            \
    va_end(rest);                                                                                                     \
    return call

RUN_EXPORT int fcntl(int fd, int command, ...)
{
    WITH_ARGUMENT(control(fd, command, argument));
}

RUN_EXPORT int fcntl64(int fd, int command, ...)
{
    WITH_ARGUMENT(control(fd, command, argument));
}

/* Another process gets the descriptor: it shares the offset, and writes through the kernel. That is right, as it is in
 * a forked child; but it may pass it back to us, under another number. */
RUN_EXPORT ssize_t sendmsg(int socket, const struct msghdr *message, int flags)
{
    if (message != NULL && message->msg_controllen > 0) {
        for (struct cmsghdr *part = CMSG_FIRSTHDR(message); part != NULL;
             part = CMSG_NXTHDR((struct msghdr *)message, part)) {
            if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS || part->cmsg_len < CMSG_LEN(0))
                continue;
            size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            for (size_t i = 0; i < count; i++)
                run_retire(((const int *)(const void *)CMSG_DATA(part))[i]);
        }
    }
    return REAL(sendmsg)(socket, message, flags);
}

/* ---------------------------------------------------------------------------------- close */

RUN_EXPORT int close(int fd)
{
    if (run_slot(fd) == RUN_NOBODY)
        return REAL(close)(fd);
    if (is_hidden(fd)) {
        errno = EBADF;
        return -1;
    }
    int stored = run_before_close(fd);
    int result = REAL(close)(fd);
    if (result == 0 && stored != 0) {
        errno = -stored;
        return -1;
    }
    return result;
}

static void before_closing(unsigned first, unsigned last)
{
    unsigned end = run_highest() < 0 ? 0 : (unsigned)run_highest() + 1;
    if (run_process != getpid())
        return;
    for (unsigned fd = first; fd < end && fd <= last; fd++) {
        if (run_slot((int)fd) != RUN_NOBODY && !is_hidden((int)fd))
            (void)run_before_close((int)fd);
    }
}

static int close_around_hidden(unsigned first, unsigned last, int flags)
{
    unsigned end = run_highest() < 0 ? 0 : (unsigned)run_highest() + 1;
    for (unsigned fd = first; fd < end && fd <= last; fd++) {
        if (!is_hidden((int)fd))
            continue;
        if (fd > first && REAL(close_range)(first, fd - 1, flags) != 0)
            return -1;
        first = fd + 1;
    }
    return first <= last ? REAL(close_range)(first, last, flags) : 0;
}

RUN_EXPORT int close_range(unsigned first, unsigned last, int flags)
{
    if (first > last || (flags & CLOSE_RANGE_CLOEXEC) != 0)
        return REAL(close_range)(first, last, flags);
    before_closing(first, last);
    return close_around_hidden(first, last, flags);
}

RUN_EXPORT void closefrom(int first)
{
    unsigned from = first < 0 ? 0 : (unsigned)first;
    before_closing(from, ~0U);
    if (close_around_hidden(from, ~0U, 0) != 0)
        REAL(closefrom)(first);
}
