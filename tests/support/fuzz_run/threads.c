/* threads.c - steps with threads and signals: several writers of one file, handlers that write or open in the middle of
 * a write, small stacks, and memory that changes while it is written.
 */
#include <sys/auxv.h>

#include "fuzz.h"

enum { STACK_BYTES = 64 * KIB, STACK_LEFT = 5 * KIB, GUARD_BYTES = 32 * KIB, SIGNALS = 3 };

/* ---------------------------------------------------------------------------------- threads */

typedef struct {
    int fd;
    unsigned way;
    const uint8_t *bytes;
    size_t length, written;
    off_t offset;
    long result;
    atomic_bool *done;
} work;

static void *write_part(void *argument)
{
    work *one = argument;
    one->result = answer(pwrite(one->fd, one->bytes, one->length, one->offset));
    return NULL;
}

/* Not a descriptor, or one whose writes lie in the order in which they come. */
static bool appends(int fd)
{
    long flags = syscall(SYS_fcntl, fd, F_GETFL);
    return flags < 0 || (flags & O_APPEND) != 0;
}

static void play_parts(void)
{
    slot *one = pick();
    enum { THREADS = 3 };
    work parts[THREADS];
    pthread_t threads[THREADS];
    off_t offset = an_offset();
    for (int i = 0; i < THREADS; i++) {
        size_t length = a_length();
        parts[i] = (work){.fd = one->fd, .bytes = some_bytes(length), .length = length, .offset = offset};
        offset += (off_t)length;
    }
    if (appends(one->fd))
        return;
    changed(one->file);
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, write_part, &parts[i]);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < THREADS; i++)
        say("%zu at %lld = %ld", parts[i].length, (long long)parts[i].offset, parts[i].result);
}

static void *write_blocks(void *argument)
{
    work *one = argument;
    for (int i = 0; i < 4; i++)
        one->result += write(one->fd, one->bytes + i * 4096, one->length);
    return NULL;
}

/* Two threads write at one position: blocks in some order, each whole. */
static void play_blocks(void)
{
    enum { BLOCKS = 8 };
    size_t length = 1 + (below(2) ? below(150 * KIB) : 256 * KIB + below(128 * KIB));
    const uint8_t *bytes = source + below(MIB);
    int fd = open("blocks", O_RDWR | O_CREAT | O_TRUNC, 0644);
    work first = {.fd = fd, .bytes = bytes, .length = length};
    work second = {.fd = fd, .bytes = bytes + (BLOCKS / 2) * 4096, .length = length};
    pthread_t thread;
    pthread_create(&thread, NULL, write_blocks, &first);
    write_blocks(&second);
    pthread_join(thread, NULL);
    int whole = whole_blocks(fd, bytes, length, BLOCKS);
    say("%zu: %ld and %ld bytes, %d whole, end %ld", length, first.result, second.result, whole,
        answer(lseek(fd, 0, SEEK_CUR)));
    close(fd);
    unlink("blocks");
}

/* A reader and a closer of other descriptors beside a writer. */
static void *read_and_close(void *argument)
{
    work *one = argument;
    uint8_t *room = malloc(64 * KIB);
    do {
        int copy = dup(one->fd);
        one->result += pread(copy, room, 64 * KIB, 0) < 0;
        one->result += close(copy) != 0;
    } while (!atomic_load(one->done));
    free(room);
    return NULL;
}

static void play_beside(void)
{
    slot *one = pick();
    size_t length = a_length();
    const uint8_t *bytes = some_bytes(length);
    atomic_bool done = false;
    int fd = open(name_of((int)below(NAMES)), O_RDONLY);
    work other = {.fd = fd, .done = &done};
    pthread_t thread;
    if (fd < 0)
        return;
    changed(one->file);
    pthread_create(&thread, NULL, read_and_close, &other);
    long first = answer(write(one->fd, bytes, length)), second = answer(write(one->fd, bytes, length));
    atomic_store(&done, true);
    pthread_join(thread, NULL);
    say("%zu = %ld, %ld; beside %ld", length, first, second, other.result);
    close(fd);
}

/* ------------------------------------------------------------------- memory that is changing */

static void *change(void *argument)
{
    work *one = argument;
    for (int i = 0; !atomic_load(one->done); i++)
        memset((uint8_t *)one->bytes, i % 2 ? 0x11 : 0x22, one->length);
    return NULL;
}

/* Any mixture of both may be stored, and what is stored can be read. */
static void play_changing(void)
{
    size_t length = 64 * KIB + below(512 * KIB);
    off_t offset = an_offset();
    int name = (int)below(NAMES), fd = open(name_of(name), O_RDWR);
    if (fd < 0)
        return;
    changed(shared->names[name]);
    uint8_t *bytes = malloc(length);
    memset(bytes, 0x11, length);
    atomic_bool done = false;
    work other = {.bytes = bytes, .length = length, .done = &done};
    pthread_t thread;
    pthread_create(&thread, NULL, change, &other);
    long written = 0, got, wrong = 0;
    for (int i = 0; i < 4; i++)
        written += pwrite(fd, bytes, length, offset);
    atomic_store(&done, true);
    pthread_join(thread, NULL);
    got = answer(syscall(SYS_pread64, fd, target, length, offset));
    for (long i = 0; i < got; i++)
        wrong += target[i] != 0x11 && target[i] != 0x22;
    say("%zu = %ld, read %ld, wrong %ld", length, written, got, wrong);
    say("over it = %ld", answer(syscall(SYS_pwrite64, fd, source, length, offset)));
    say("close = %ld", answer(close(fd)));
    free(bytes);
}

/* ------------------------------------------------------------------------------------ stacks */

static bool is_intact(const uint8_t *bytes, size_t length)
{
    for (size_t i = 0; i < length; i++)
        if (bytes[i] != 0xa5)
            return false;
    return true;
}

static void *write_and_read(void *argument)
{
    work *one = argument;
    one->result = answer(write(one->fd, one->bytes, one->length));
    one->written = (size_t)answer(pread(one->fd, target, one->length, 0));
    return NULL;
}

static work in_handler;

static void write_in_handler(int number)
{
    (void)number;
    int error = errno;
    write_and_read(&in_handler);
    errno = error;
}

/* A handler on a stack of its own: nothing below it changes. */
static void play_small_stack(void)
{
    slot *one = pick();
    size_t length = a_length();
    static uint8_t room[GUARD_BYTES + STACK_BYTES] __attribute__((aligned(64)));
    memset(room, 0xa5, sizeof room);
    stack_t stack = {.ss_sp = room + GUARD_BYTES, .ss_size = getauxval(AT_MINSIGSTKSZ) + STACK_LEFT}, before;
    struct sigaction action = {.sa_handler = write_in_handler, .sa_flags = SA_ONSTACK}, old;
    changed(one->file);
    in_handler = (work){.fd = one->fd, .bytes = some_bytes(length), .length = length};
    sigaltstack(&stack, &before);
    sigaction(SIGUSR2, &action, &old);
    raise(SIGUSR2);
    sigaction(SIGUSR2, &old, NULL);
    sigaltstack(&before, NULL);
    say("%zu = %ld, read %ld, below %s", length, in_handler.result, (long)in_handler.written,
        is_intact(room, GUARD_BYTES) ? "intact" : "CHANGED");
}

static void play_small_thread(void)
{
    slot *one = pick();
    size_t length = a_length();
    work what = {.fd = one->fd, .bytes = some_bytes(length), .length = length};
    pthread_attr_t attributes;
    pthread_t thread;
    changed(one->file);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 16 * KIB);
    int error = pthread_create(&thread, &attributes, write_and_read, &what);
    if (error == 0)
        pthread_join(thread, NULL);
    pthread_attr_destroy(&attributes);
    say("%zu: %d, %ld, read %ld", length, error, what.result, (long)what.written);
}

/* ----------------------------------------------------------------------------------- signals */

static int handler_fd;
static unsigned handler_way;
static long handler_result;

/* What POSIX lets a handler call: open, write, close, fsync. */
static void interrupt(int number)
{
    (void)number;
    int error = errno;
    unsigned count = atomic_load(&shared->handled);
    if (handler_way == 0) {
        handler_result += write(handler_fd, source + count * 4096, 80 * KIB);
    } else {
        int fd = open("handled", O_RDWR | O_CREAT | O_APPEND, 0644);
        handler_result += write(fd, source + count * 4096, 300 * KIB);
        handler_result += handler_way == 2 ? fsync(fd) : 0;
        handler_result += close(fd);
    }
    atomic_fetch_add(&shared->handled, 1);
    errno = error;
}

/* A child sends signals, each after the one before was handled, while this process writes. */
static void play_handlers(void)
{
    slot *one = pick();
    size_t length = a_length();
    const uint8_t *bytes = some_bytes(length);
    struct sigaction action = {.sa_handler = interrupt, .sa_flags = SA_RESTART}, old;
    handler_way = below(3);
    handler_result = 0;
    if (appends(one->fd))
        return;                         /* how often it writes is left open */
    handler_fd = open("interrupted", O_RDWR | O_CREAT | O_TRUNC, 0644);
    changed(one->file);
    atomic_store(&shared->handled, 0);
    sigaction(SIGUSR1, &action, &old);
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) {
        be_killed_with_parent();
        for (unsigned i = 0; i < SIGNALS; i++) {
            kill(parent, SIGUSR1);
            while (atomic_load(&shared->handled) == i)
                usleep(20);
        }
        _exit(0);
    }
    long total = 0, result = 1, writes = 0;
    while (atomic_load(&shared->handled) < SIGNALS && result >= 0) {
        result = pwrite(one->fd, bytes, length, 0);
        writes++;
        total += result == (long)length;
    }
    int ended = finish_child(pid);
    sigaction(SIGUSR1, &old, NULL);
    long first = answer(syscall(SYS_pread64, handler_fd, target, LARGEST, 0));
    say("way %u, %zu = %ld, all %d, handlers %ld, child %d, interrupted %ld, sum %llx", handler_way, length,
        answer(result < 0 ? result : 0), total == writes || result < 0, handler_result, ended, first,
        first > 0 ? (unsigned long long)sum_of(target, (size_t)first) : 0);
    close(handler_fd);
    int fd = open("handled", O_RDONLY);
    long second = fd < 0 ? 0 : answer(pread(fd, target, LARGEST, 0));
    say("handled %ld, sum %llx", second, second > 0 ? (unsigned long long)sum_of(target, (size_t)second) : 0);
    if (fd >= 0)
        close(fd);
    unlink("handled");
    unlink("interrupted");
}

const kind thread_kinds[] = {
    {"parts", 2, play_parts, ALONE},
    {"blocks", 1, play_blocks, ALONE},
    {"beside", 1, play_beside, ALONE},
    {"changing", 1, play_changing, ALONE},
    {"small_stack", 2, play_small_stack, SAVES},
    {"small_thread", 2, play_small_thread, SAVES},
    {"handlers", 1, play_handlers, ALONE},
    {NULL, 0, NULL, ALONE},
};
