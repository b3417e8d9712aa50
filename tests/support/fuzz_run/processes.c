/* processes.c - steps in which other processes use what they inherit: children of every kind, and programs. */
#include <linux/sched.h>
#include <sched.h>
#include <spawn.h>

#include "fuzz.h"

extern char **environ;

/* -------------------------------------------------------------------------------- children */

/* What a child does with an inherited descriptor, and what it draws, is known before it begins. */
typedef struct {
    int fd;
    size_t written, read;
    off_t offset;                    /* -1: at the position */
    unsigned way;
    const uint8_t *bytes;
    bool closes;
} task;

static void play_task(const task *one)
{
    long written = answer(write_somehow(one->way, one->fd, one->bytes, one->written, one->offset));
    say("in child: way %u, write %zu at %lld = %ld", one->way, one->written, (long long)one->offset, written);
    long got = answer(read(one->fd, target, one->read));
    say("in child: read %zu = %ld, sum %llx", one->read, got,
        got > 0 ? (unsigned long long)sum_of(target, (size_t)got) : 0);
    if (one->closes)
        say("in child: close = %ld", answer(close(one->fd)));
}

static pid_t start_child(unsigned way)
{
    if (way == 0)
        return (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (way == 1) {
        struct clone_args arguments = {.exit_signal = SIGCHLD};
        return (pid_t)syscall(SYS_clone3, &arguments, sizeof arguments);
    }
    return fork();
}

static void play_child(void)
{
    slot *one = pick();
    unsigned way = below(4);
    task what = {one->fd, a_length(), a_length(), below(2) ? -1 : an_offset(), below(WAYS), NULL, below(2)};
    what.bytes = some_bytes(what.written);
    changed(one->file);
    pid_t pid = start_child(way);
    if (pid == 0) {
        play_task(&what);
        _exit(0);
    }
    int ended = finish_child(pid);
    say("way %u, child %d, position %ld", way, ended, answer(syscall(SYS_lseek, one->fd, 0, SEEK_CUR)));
}

/* It has the memory of its parent. */
static void play_vfork(void)
{
    slot *one = pick();
    size_t length = a_length();
    const uint8_t *bytes = some_bytes(length);
    int name = (int)below(NAMES), number = one->fd;
    unsigned way = below(3);
    if (way == 2 && shared->names[name] < 0)
        way = 0;
    changed(one->file);
    pid_t pid = vfork();
    if (pid == 0) {
        if (way == 1)
            close(number);
        if (way == 2) {                 /* its own table of descriptors, not its own memory */
            close(number);
            int fd = open(name_of(name), O_RDWR);
            dup2(fd, number);
        }
        syscall(SYS_exit_group, write(number, bytes, length) == (long)length);
    }
    int ended = finish_child(pid);
    if (way == 2)
        changed(shared->names[name]);
    say("way %u, %zu, child %d, position %ld", way, length, ended, answer(syscall(SYS_lseek, number, 0, SEEK_CUR)));
    say("write %zu = %ld", length, answer(write(number, bytes, length)));
}

/* It opens a file by itself, and ends without closing it; or the parent goes on after it has written. */
static void play_opening_child(void)
{
    int name = (int)below(NAMES);
    size_t length = a_length();
    const uint8_t *bytes = some_bytes(length);
    unsigned way = below(3), ends = below(3);
    int flags = O_RDWR | O_CREAT | (below(2) ? O_APPEND : 0) | (below(4) ? 0 : O_TRUNC);
    if (shared->names[name] < 0)
        shared->names[name] = make_file();
    changed(shared->names[name]);
    pid_t pid = start_child(way);
    if (pid == 0) {
        int fd = open(name_of(name), flags, 0644);
        long opened = answer(fd < 0 ? -1 : 0), written = answer(write(fd, bytes, length));
        say("in child: open %x = %ld, write %zu = %ld", flags, opened, length, written);
        if (ends == 0)
            close(fd);
        if (ends == 1)
            exit(0);
        _exit(0);
    }
    int ended = finish_child(pid);
    say("way %u, ends %u, child %d", way, ends, ended);
}

/* It closes all that it has, as a daemon does, and gives up its rights; what it opens is its own. */
static void play_bare_child(void)
{
    int name = (int)below(NAMES);
    size_t length = a_length();
    const uint8_t *bytes = some_bytes(length);
    unsigned way = below(3);
    if (shared->names[name] < 0)
        shared->names[name] = make_file();
    changed(shared->names[name]);
    pid_t pid = start_child(below(3));
    if (pid == 0) {
        int found = 0;
        if (way == 0)
            syscall(SYS_close_range, 3, ~0u, 0);
        else if (way == 1)
            close_range(3, ~0u, 0);
        else
            for (int fd = 3; fd < DESCRIPTORS; fd++)
                close(fd);
        int fd = open(name_of(name), O_RDWR | O_CREAT, 0644);
        long written = answer(pwrite(fd, bytes, length, 0));
        for (int i = 0; i < DESCRIPTORS; i++)
            found += syscall(SYS_fcntl, i, F_GETFD) >= 0;
        long got = answer(pread(fd, target, length, 0));
        say("in child: %d = open, pwrite %zu = %ld, pread %ld, %d descriptors, same %d", fd, length, written, got,
            found, memcmp(target, bytes, length) == 0);
        _exit(0);
    }
    say("way %u, child %d", way, finish_child(pid));
}

/* --------------------------------------------------------------------------------- programs */

/* fuzz child FD WAY LENGTH OFFSET SOURCE STEP PLAYER */
int exec_child(int argc, char **argv)
{
    if (argc < 9)
        return 2;
    size_t bytes = sizeof *shared + SOURCE_BYTES;
    shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, WORLD_FD, 0);
    if (shared == MAP_FAILED)
        return 3;
    source = (uint8_t *)(shared + 1);
    target = mmap(NULL, LARGEST + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    task what = {atoi(argv[2]), (size_t)atol(argv[4]), (size_t)atol(argv[4]), atol(argv[5]),
                 (unsigned)atoi(argv[3]), source + atol(argv[6]), false};
    step = atoi(argv[7]);
    player = argv[8][0];
    playing = "program";
    play_task(&what);
    return 0;
}

static void play_program(void)
{
    slot *one = pick();
    size_t length = a_length();
    unsigned way = below(3);
    if (one->fd < 0)
        return;
    char words[6][32], self[256];
    long got = readlink("/proc/self/exe", self, sizeof self - 1);
    self[got > 0 ? got : 0] = 0;
    int fd = fcntl(one->fd, F_DUPFD, 50);
    snprintf(words[0], 32, "%d", fd);
    snprintf(words[1], 32, "%u", below(WAYS - 2));
    snprintf(words[2], 32, "%zu", length);
    snprintf(words[3], 32, "%lld", below(2) ? -1LL : (long long)an_offset());
    snprintf(words[4], 32, "%ld", (long)(some_bytes(length) - source));
    snprintf(words[5], 32, "%d", step);
    char letter[2] = {player, 0};
    char *list[] = {self, "child", words[0], words[1], words[2], words[3], words[4], words[5], letter, NULL};
    pid_t pid = -1;
    changed(one->file);
    if (way == 0) {
        if (posix_spawn(&pid, self, NULL, NULL, list, environ) != 0)
            return;
    } else {
        pid = way == 1 ? fork() : vfork();
        if (pid == 0) {
            execv(self, list);
            _exit(99);
        }
    }
    int ended = finish_child(pid);
    close(fd);
    say("way %u, child %d, position %ld", way, ended, answer(syscall(SYS_lseek, one->fd, 0, SEEK_CUR)));
}

/* Two processes write through one description at the same time: no block is lost, or in two parts. */
static void play_crowd(void)
{
    enum { EACH = 4, BLOCKS = 2 * EACH };
    size_t length = 1 + (below(3) ? below(200 * KIB) : 256 * KIB + below(128 * KIB));
    bool appends = below(2);
    const uint8_t *bytes = source + below(MIB);
    int fd = open("crowd", O_RDWR | O_CREAT | O_TRUNC | (appends ? O_APPEND : 0), 0644);
    pid_t pid = start_child(below(3));
    if (pid == 0 && appends)
        fd = open("crowd", O_RDWR | O_APPEND);
    for (int i = 0; i < EACH; i++) {
        long written = answer(write(fd, bytes + (pid == 0 ? EACH + i : i) * 4096, length));
        if (written != (long)length)
            say("wrote %ld of %zu", written, length);
    }
    if (pid == 0)
        _exit(0);
    int ended = finish_child(pid);
    int whole = whole_blocks(fd, bytes, length, BLOCKS);
    say("%zu, appends %d: %d whole of %d, child %d, end %ld", length, appends, whole, BLOCKS, ended,
        answer(lseek(fd, 0, SEEK_END)));
    close(fd);
    unlink("crowd");
}

const kind process_kinds[] = {
    {"child", 5, play_child, PUBLISHES},
    {"vfork", 2, play_vfork, ALONE},
    {"opening_child", 2, play_opening_child, ALONE},
    {"bare_child", 1, play_bare_child, ALONE},
    {"program", 1, play_program, PUBLISHES},
    {"crowd", 1, play_crowd, ALONE},
    {NULL, 0, NULL, ALONE},
};
