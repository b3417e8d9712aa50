/* descriptors.c - steps that open, copy, replace, pass and close descriptors, and change names of open files. */
#include <linux/close_range.h>
#include <linux/openat2.h>
#include <sys/socket.h>

#include "fuzz.h"

static int file_opened(int name, int flags)
{
    if (shared->names[name] < 0 && (flags & O_CREAT) != 0)
        shared->names[name] = make_file();
    if ((flags & O_TRUNC) != 0)
        changed(shared->names[name]);
    return shared->names[name];
}

static int some_flags(void)
{
    static const int sets[] = {
        O_RDONLY,           O_WRONLY | O_CREAT,           O_RDWR | O_CREAT,    O_RDWR | O_CREAT | O_TRUNC,
        O_RDWR,             O_WRONLY | O_CREAT | O_TRUNC, O_RDWR | O_APPEND,   O_RDWR | O_CREAT | O_DIRECT,
        O_RDWR | O_SYNC,    O_WRONLY | O_APPEND | O_CREAT, O_RDWR | O_CREAT | O_EXCL, O_RDWR | O_CLOEXEC,
    };
    return sets[below(12)];
}

/* In half of the programs a file is opened by one at a time, as savers do: others may take another way. */
static void close_others(int name)
{
    for (int i = 0; i < SLOTS; i++)
        if (seed % 2 == 0 && slots[i].fd >= 0 && slots[i].file == shared->names[name])
            close_slot(&slots[i]);
}

static void play_open(void)
{
    slot *one = &slots[below(SLOTS)];
    int name = (int)below(NAMES), flags = some_flags();
    unsigned way = below(5);
    close_slot(one);
    close_others(name);
    struct open_how how = {.flags = (uint64_t)flags, .mode = (flags & O_CREAT) ? 0644 : 0};
    if (way == 3)
        flags = O_WRONLY | O_CREAT | O_TRUNC;
    int fd = way == 0   ? (int)syscall(SYS_openat, AT_FDCWD, name_of(name), flags, 0644)
             : way == 1 ? (int)syscall(SYS_openat2, AT_FDCWD, name_of(name), &how, sizeof how)
             : way == 2 ? openat(AT_FDCWD, name_of(name), flags, 0644)
             : way == 3 ? creat(name_of(name), 0644)
                        : open(name_of(name), flags, 0644);
    say("way %u, file %d, flags %x = %ld", way, name, flags, answer(fd));
    if (fd >= 0)
        *one = (slot){fd, file_opened(name, flags)};
}

/* Through /proc: another description of the same inode, whatever its name is now. */
static void play_reopen(void)
{
    if (seed % 2 == 0)
        return;
    slot *from = pick(), *one = &slots[below(SLOTS)];
    static const int sets[] = {O_RDONLY, O_RDWR, O_WRONLY, O_RDWR | O_APPEND};
    int flags = sets[below(4)];
    char path[64];
    if (one == from || from->fd < 0)
        return;
    close_slot(one);
    snprintf(path, sizeof path, "/proc/self/fd/%d", from->fd);
    int fd = open(path, flags);
    say("flags %x = %ld", flags, answer(fd));
    if (fd >= 0)
        *one = (slot){fd, from->file};
}

static void play_close(void)
{
    slot *one = pick();
    unsigned way = below(4);
    long result = way == 0   ? syscall(SYS_close, one->fd)
                  : way == 1 ? close_range((unsigned)one->fd, (unsigned)one->fd, 0)
                             : close(one->fd);
    say("way %u = %ld", way, answer(result));
    *one = (slot){-1, -1};
}

static void play_dup(void)
{
    slot *from = pick(), *one = &slots[below(SLOTS)];
    unsigned way = below(8);
    if (one == from)
        return;
    if (one->fd < 0 || way < 3 || way == 6)
        close_slot(one);
    if (one->fd < 0 && way >= 3 && way != 6)
        way = 7;
    int fd = way == 0   ? dup(from->fd)
             : way == 1 ? fcntl(from->fd, F_DUPFD, 20)
             : way == 2 ? fcntl(from->fd, F_DUPFD_CLOEXEC, 30)
             : way == 3 ? dup2(from->fd, one->fd)
             : way == 4 ? dup3(from->fd, one->fd, O_CLOEXEC)
             : way == 5 ? (int)syscall(SYS_dup2, from->fd, one->fd)
             : way == 6 ? (int)syscall(SYS_dup, from->fd)
             : one->fd < 0 ? dup(from->fd) : (int)syscall(SYS_dup3, from->fd, one->fd, 0);
    say("way %u = %ld", way, answer(fd));
    if (fd >= 0)
        *one = (slot){fd, from->file};
}

/* A number gets another file, by calls that no library sees: in this process, or by one that shares the table. */
static void play_replace(void)
{
    slot *one = pick();
    int name = (int)below(NAMES), number = one->fd;
    bool other = below(2), creates = below(2);
    int flags = O_RDWR | (creates ? O_CREAT : 0);
    if (number < 0 || (!creates && shared->names[name] < 0))
        return;
    pid_t child = other ? (pid_t)syscall(SYS_clone, SIGCHLD | 0x400 /* CLONE_FILES */, 0, 0, 0, 0) : 0;
    if (child == 0) {
        int fd = (int)syscall(SYS_openat, AT_FDCWD, name_of(name), flags, 0644);
        long result = syscall(SYS_dup2, fd, number);
        syscall(SYS_close, fd);
        if (other)
            _exit(result < 0);
    }
    say("other %d, file %d, child %d", other, name, child > 0 ? finish_child(child) : 0);
    *one = (slot){number, file_opened(name, flags)};
}

/* ------------------------------------------------------------------------------- passed on */

static void send_descriptor(int to, int fd)
{
    char byte = 'x', room[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec piece = {&byte, 1};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    sendmsg(to, &message, 0);
}

static int receive_descriptor(int from)
{
    char byte, room[CMSG_SPACE(sizeof(int))];
    struct iovec piece = {&byte, 1};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    int fd = -1;
    if (recvmsg(from, &message, 0) == 1 && CMSG_FIRSTHDR(&message) != NULL)
        memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    return fd;
}

/* To itself, to a child that writes through it, or from a child that has written through it. */
static void play_pass(void)
{
    slot *from = pick(), *one = &slots[below(SLOTS)];
    unsigned way = below(3);
    int ends[2], name = (int)below(NAMES), flags = O_RDWR | O_CREAT | (below(2) ? O_TRUNC : 0);
    size_t length = a_length();
    const uint8_t *bytes = some_bytes(length);
    if (from->fd < 0 || one == from || socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
        return;
    close_slot(one);
    pid_t child = way > 0 ? fork() : -1;
    if (child == 0) {
        int fd = way == 1 ? receive_descriptor(ends[1]) : open(name_of(name), flags, 0644);
        say("in child: write %zu = %ld", length, answer(write(fd, bytes, length)));
        if (way == 2)
            send_descriptor(ends[1], fd);
        _exit(0);
    }
    if (way < 2)
        send_descriptor(ends[0], from->fd);
    int fd = way == 0 ? receive_descriptor(ends[1]) : way == 2 ? receive_descriptor(ends[0]) : -1;
    int ended = child > 0 ? finish_child(child) : 0;
    close(ends[0]);
    close(ends[1]);
    int file = way == 2 ? file_opened(name, flags) : from->file;
    changed(file);
    if (fd >= 0)
        *one = (slot){fd, file};
    say("way %u = %d, child %d, position %ld", way, fd, ended,
        answer(syscall(SYS_lseek, fd >= 0 ? fd : from->fd, 0, SEEK_CUR)));
}

/* A descriptor taken out of a child, which goes on with it. */
static void play_take(void)
{
    slot *one = &slots[below(SLOTS)];
    int name = (int)below(NAMES), ready[2], go[2], flags = O_RDWR | O_CREAT | (below(2) ? O_TRUNC : 0);
    size_t length = a_length();
    const uint8_t *bytes = some_bytes(length);
    char byte = 'x';
    if (pipe(ready) != 0 || pipe(go) != 0)
        return;
    close_slot(one);
    pid_t child = fork();
    if (child == 0) {
        int fd = open(name_of(name), flags, 0644);
        close(go[1]);
        say("in child: write %zu = %ld", length, answer(write(fd, bytes, length)));
        if (write(ready[1], &fd, sizeof fd) == sizeof fd && read(go[0], &byte, 1) == 1)
            say("in child: write %zu = %ld", length, answer(write(fd, bytes, length)));
        _exit(0);
    }
    int theirs = -1, pid_descriptor = (int)syscall(SYS_pidfd_open, child, 0);
    if (read(ready[0], &theirs, sizeof theirs) != sizeof theirs)
        theirs = -1;
    int fd = (int)syscall(SYS_pidfd_getfd, pid_descriptor, theirs, 0);
    int error = errno;
    say("write %zu = %ld", length, fd < 0 ? -error : answer(write(fd, bytes, length)));
    if (write(go[1], &byte, 1) != 1)
        say("no child");
    int ended = finish_child(child);
    say("child %d, position %ld", ended, answer(syscall(SYS_lseek, fd, 0, SEEK_CUR)));
    close(pid_descriptor);
    for (int i = 0; i < 2; i++) {
        close(ready[i]);
        close(go[i]);
    }
    int file = file_opened(name, flags);
    changed(file);
    if (fd >= 0)
        *one = (slot){fd, file};
}

/* Copies at the end of the table, closed all at once; some of them only by an exec that does not come. */
static void play_range(void)
{
    slot *one = pick();
    bool raw = below(2);
    unsigned flags = below(3) ? 0 : CLOSE_RANGE_CLOEXEC;
    size_t length = a_length();
    int last = -1;
    for (int i = 0; i < 3; i++)
        last = fcntl(one->fd, F_DUPFD, 100);
    long result = raw ? syscall(SYS_close_range, 100, 120, flags) : close_range(100, 120, (int)flags);
    say("raw %d, flags %x = %ld", raw, flags, answer(result));
    say("write %zu = %ld", length, answer(write(last, some_bytes(length), length)));
    changed(one->file);
    syscall(SYS_close_range, 100, 120, 0);
}

/* The descriptors of a process are those that it opened. */
static void play_count(void)
{
    int found = 0;
    for (int fd = 0; fd < DESCRIPTORS; fd++)
        found += syscall(SYS_fcntl, fd, F_GETFD) >= 0;
    say("%d", found);
}

/* ------------------------------------------------------------------------------------ names */

static void play_rename(void)
{
    int from = (int)below(NAMES), to = (int)below(NAMES);
    long result = answer(rename(name_of(from), name_of(to)));
    say("%d to %d = %ld", from, to, result);
    if (result == 0 && from != to && shared->names[from] != shared->names[to]) {
        shared->names[to] = shared->names[from];
        shared->names[from] = -1;
    }
}

static void play_unlink(void)
{
    int name = (int)below(NAMES);
    long result = answer(unlink(name_of(name)));
    say("%d = %ld", name, result);
    if (result == 0)
        shared->names[name] = -1;
}

static void play_link(void)
{
    int from = (int)below(NAMES), to = (int)below(NAMES);
    long result = answer(link(name_of(from), name_of(to)));
    say("%d to %d = %ld", from, to, result);
    if (result == 0)
        shared->names[to] = shared->names[from];
}

const kind descriptor_kinds[] = {
    {"open", 14, play_open, ALONE},
    {"reopen", 2, play_reopen, ALONE},
    {"close", 3, play_close, ALONE},
    {"dup", 5, play_dup, PUBLISHES},
    {"replace", 2, play_replace, ALONE},
    {"pass", 2, play_pass, ALONE},
    {"take", 1, play_take, ALONE},
    {"range", 2, play_range, PUBLISHES},
    {"count", 1, play_count, ALONE},
    {"rename", 2, play_rename, ALONE},
    {"unlink", 1, play_unlink, ALONE},
    {"link", 1, play_link, ALONE},
    {NULL, 0, NULL, ALONE},
};
