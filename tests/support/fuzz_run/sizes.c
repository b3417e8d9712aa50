/* sizes.c - steps about positions, sizes, flags, locks, and what a file says of itself. */
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/resource.h>

#include "fuzz.h"

static void play_seek(void)
{
    slot *one = pick();
    int whence = (int)below(3);
    off_t offset = whence == SEEK_SET ? an_offset() : (off_t)below(200000) - 100000;
    bool raw = below(2);
    long result = raw ? syscall(SYS_lseek, one->fd, offset, whence) : lseek(one->fd, offset, whence);
    say("raw %d, %lld, whence %d = %ld", raw, (long long)offset, whence, answer(result));
}

static bool is_zero(int fd, off_t from, off_t to)
{
    while (from < to) {
        size_t wanted = to - from < MIB ? (size_t)(to - from) : MIB;
        long got = syscall(SYS_pread64, fd, target, wanted, from);
        if (got <= 0)
            return got == 0;
        for (long i = 0; i < got; i++)
            if (target[i] != 0)
                return false;
        from += got;
    }
    return true;
}

/* Where data begins depends on the file system: no byte of a hole may be other than zero. */
static void play_holes(void)
{
    slot *one = pick();
    off_t from = an_offset(), after = an_offset();
    long end = syscall(SYS_lseek, one->fd, 0, SEEK_END);
    long data = lseek(one->fd, from, SEEK_DATA);
    int error = data < 0 ? errno : 0;
    bool behind = from >= end, sound = true;
    if (data >= 0)
        sound = data >= from && data < end;
    long hole = lseek(one->fd, from, SEEK_HOLE);
    bool readable = pread(one->fd, target, 1, 0) >= 0;
    if (readable && !behind && data >= 0)
        sound = sound && is_zero(one->fd, from, data);
    if (readable && !behind && error == ENXIO)
        sound = sound && is_zero(one->fd, from, end);
    if (hole >= 0)
        sound = sound && hole >= from && hole <= end && (data < 0 || data > from || hole > from || hole == end);
    if (readable && !behind && hole >= 0 && hole < end)
        sound = sound && is_zero(one->fd, hole, hole + 1);
    say("%lld of %ld: %s, %s, %s", (long long)from, answer(end), behind ? strerrorname_np(error) : "inside",
        hole >= 0 ? "hole" : strerrorname_np(errno), sound ? "sound" : "WRONG");
    say("then %ld", answer(lseek(one->fd, after, SEEK_SET)));
}

static void play_resize(void)
{
    slot *one = pick();
    off_t size = below(3) ? an_offset() : 0;
    int name = (int)below(NAMES);
    unsigned way = below(4);
    int file = way == 3 ? shared->names[name] : one->file;
    long result = way == 0   ? syscall(SYS_ftruncate, one->fd, size)
                  : way == 3 ? truncate(name_of(name), size)
                             : ftruncate(one->fd, size);
    changed(file);
    say("way %u, %lld = %ld", way, (long long)size, answer(result));
}

static void play_fallocate(void)
{
    static const int modes[] = {0, FALLOC_FL_KEEP_SIZE, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE};
    slot *one = pick();
    off_t offset = an_offset();
    size_t length = a_length() + 1;
    unsigned way = below(5);
    long result;
    do                                  /* tmpfs is interrupted by the end of an io_uring, without a signal */
        result = way == 4   ? posix_fallocate(one->fd, offset, (off_t)length)
                 : way == 3 ? syscall(SYS_fallocate, one->fd, 0, offset, length)
                            : fallocate(one->fd, modes[way], offset, (off_t)length);
    while (result == EINTR || (result < 0 && errno == EINTR));
    changed(one->file);
    say("way %u, %zu at %lld = %ld", way, length, (long long)offset, answer(result));
}

/* Each way alone: some of them refresh what the kernel believes. */
static void play_look(void)
{
    slot *one = pick();
    struct stat status = {0};
    struct statx found = {0};
    int name = (int)below(NAMES), waiting = -1;
    unsigned way = below(6);
    switch (way) {
    case 0: {
        long result = answer(fstat(one->fd, &status));
        say("fstat = %ld, %lld bytes, %d links", result, (long long)status.st_size, (int)status.st_nlink);
        break;
    }
    case 1: {
        long result = answer(stat(name_of(name), &status));
        say("stat %d = %ld, %lld bytes, %d links", name, result, (long long)status.st_size, (int)status.st_nlink);
        break;
    }
    case 2:
    case 3: {
        int flags = AT_EMPTY_PATH | (way == 2 ? AT_STATX_DONT_SYNC : AT_STATX_FORCE_SYNC);
        long result = answer(statx(one->fd, "", flags, STATX_SIZE | STATX_NLINK, &found));
        say("statx %u = %ld, %llu bytes, %u links", way, result, (unsigned long long)found.stx_size, found.stx_nlink);
        break;
    }
    default: {
        long result = answer(ioctl(one->fd, FIONREAD, &waiting));
        say("FIONREAD = %ld, %d", result, waiting);
    }
    }
}

static void play_flags(void)
{
    slot *one = pick();
    int flags = below(3) ? O_APPEND : 0;
    unsigned way = below(4);
    long result = -1, child = 0;
    if (way == 0) {
        result = fcntl(one->fd, F_SETFL, flags);
    } else if (way == 1) {
        result = syscall(SYS_fcntl, one->fd, F_SETFL, flags);
    } else {
        pid_t pid = way == 2 ? fork() : (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
        if (pid == 0)
            _exit(fcntl(one->fd, F_SETFL, flags) < 0 ? errno : 0);
        child = finish_child(pid);
        result = fcntl(one->fd, F_GETFL);
        result = result < 0 ? result : result & (O_APPEND | O_ACCMODE);
    }
    say("way %u, %x = %ld, child %ld", way, flags, answer(result), child);
}

static void play_sync(void)
{
    slot *one = pick();
    unsigned way = below(6);
    long result = way == 0   ? fdatasync(one->fd)
                  : way == 1 ? syscall(SYS_fsync, one->fd)
                  : way == 2 ? syncfs(one->fd)
                             : fsync(one->fd);
    say("way %u = %ld", way, answer(result));
}

/* What another process sees of a lock is in bytes of the file. */
static void play_lock(void)
{
    slot *one = pick();
    static const short whences[] = {SEEK_END, SEEK_END, SEEK_CUR, SEEK_SET};
    struct flock lock = {.l_type = below(3) ? F_WRLCK : F_RDLCK, .l_whence = whences[below(4)]};
    lock.l_start = (off_t)below(2000) - (lock.l_whence == SEEK_SET ? 0 : 1000);
    lock.l_len = (off_t)below(3) * 500;
    bool open_file = below(2), keep = below(2);
    long result = answer(fcntl(one->fd, open_file ? F_OFD_SETLK : F_SETLK, &lock));
    int name = (int)below(NAMES);
    pid_t pid = fork();
    if (pid == 0) {
        struct flock seen = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        int fd = (int)syscall(SYS_openat, AT_FDCWD, name_of(name), O_RDWR, 0);
        long asked = answer(fcntl(fd, F_OFD_GETLK, &seen));
        say("file %d: %ld, type %d at %lld, %lld long", name, asked, seen.l_type, (long long)seen.l_start,
            (long long)seen.l_len);
        _exit(0);
    }
    say("ofd %d, type %d, whence %d, %lld, %lld long = %ld, child %d", open_file, lock.l_type, lock.l_whence,
        (long long)lock.l_start, (long long)lock.l_len, result, finish_child(pid));
    if (!keep) {
        lock = (struct flock){.l_type = F_UNLCK, .l_whence = SEEK_SET};
        say("unlock = %ld", answer(fcntl(one->fd, open_file ? F_OFD_SETLK : F_SETLK, &lock)));
    }
}

/* A limit of sizes, in a child: writes are cut there, or refused. */
static void play_limit(void)
{
    slot *one = pick();
    size_t length = a_length();
    off_t offset = an_offset(), limit = an_offset() + 1;
    unsigned way = below(WAYS);
    const uint8_t *bytes = some_bytes(length);
    pid_t pid = fork();
    if (pid == 0) {
        signal(SIGXFSZ, SIG_IGN);
        struct rlimit rule = {(rlim_t)limit, RLIM_INFINITY};
        setrlimit(RLIMIT_FSIZE, &rule);
        long first = answer(write_somehow(way, one->fd, bytes, length, offset));
        long second = answer(write_somehow(way, one->fd, bytes, length, -1));
        say("limit %lld: %zu at %lld = %ld, then %ld, position %ld", (long long)limit, length, (long long)offset, first,
            second, answer(lseek(one->fd, 0, SEEK_CUR)));
        _exit(0);
    }
    changed(one->file);
    say("child %d", finish_child(pid));
}

const kind size_kinds[] = {
    {"seek", 9, play_seek, SAVES},
    {"holes", 2, play_holes, SAVES},
    {"resize", 4, play_resize, ALONE},
    {"fallocate", 3, play_fallocate, SAVES},
    {"look", 7, play_look, SAVES},
    {"flags", 4, play_flags, PUBLISHES},
    {"sync", 3, play_sync, PUBLISHES},
    {"lock", 2, play_lock, ALONE},
    {"limit", 1, play_limit, PUBLISHES},
    {NULL, 0, NULL, ALONE},
};
