/* memory.c - steps about mappings of files, and the handlers of the signals that an access may raise.
 *
 * How many pages a mapping has tells what the kernel believes of the size of its file. The last page that can be read
 * is never written to: what lies in it behind the end of the file is left open by POSIX.
 */
#include "fuzz.h"

static __thread sigjmp_buf back;
static __thread volatile sig_atomic_t expected;

static void handle_fault(int number, siginfo_t *about, void *context)
{
    (void)context;
    if (expected)
        siglongjmp(back, number);
    atomic_fetch_add(&shared->handled, 1);
    if (about == NULL || about->si_code <= 0)
        return;                         /* sent by somebody */
    struct sigaction action = {.sa_handler = SIG_DFL};
    sigaction(number, &action, NULL);
}

static void install(struct sigaction *before)
{
    struct sigaction action = {.sa_sigaction = handle_fault, .sa_flags = SA_NODEFER | SA_SIGINFO};
    sigaction(SIGBUS, &action, &before[0]);
    sigaction(SIGSEGV, &action, &before[1]);
}

static void put_back(const struct sigaction *before)
{
    sigaction(SIGBUS, &before[0], NULL);
    sigaction(SIGSEGV, &before[1], NULL);
}

/* For good: a library may do without what needs them where the program has its own. */
void install_handlers(void)
{
    struct sigaction before[2];
    install(before);
}

/* Pages that can be read from the beginning on, and the sum of their bytes. */
static size_t readable(const uint8_t *base, size_t bytes, uint64_t *sum)
{
    volatile size_t done = 0;
    volatile uint64_t total = 0;
    struct sigaction before[2];
    install(before);
    expected = 1;
    if (sigsetjmp(back, 0) == 0)
        for (; done < bytes; done += PAGE) {
            total = total * 31 + sum_of(base + done, PAGE);
            *sum = total;
        }
    expected = 0;
    put_back(before);
    return done / PAGE;
}

/* Bytes of a mapping that can be written to; what is written; true: all of it. */
static bool store(mapping *one, size_t at, const uint8_t *bytes, size_t length)
{
    volatile bool stored = false;
    struct sigaction before[2];
    install(before);
    expected = 1;
    if (sigsetjmp(back, 0) == 0) {
        memcpy(one->base + at, bytes, length);
        stored = true;
    }
    expected = 0;
    put_back(before);
    return stored;
}

/* POSIX leaves open whether a private mapping shows what is written to the file later. */
static bool is_specified(const mapping *one)
{
    return one->shared || strict || one->file < 0 || one->version == shared->changes[one->file];
}

void report_mapping(mapping *one)
{
    uint64_t sum = 0;
    if (one->base == NULL || !is_specified(one))
        return;
    size_t pages = readable(one->base, one->bytes, &sum);
    say("mapping %d: %zu pages, sum %llx", (int)(one - maps), pages, (unsigned long long)sum);
}

static mapping *pick_mapping(void)
{
    unsigned first = below(MAPS);
    for (unsigned i = 0; i < MAPS; i++)
        if (maps[(first + i) % MAPS].base != NULL)
            return &maps[(first + i) % MAPS];
    return NULL;
}

static void unmap(mapping *one)
{
    if (one->base != NULL)
        say("munmap = %ld", answer(munmap(one->base, one->bytes)));
    one->base = NULL;
}

static void play_map(void)
{
    slot *from = pick();
    mapping *one = &maps[below(MAPS)];
    bool is_shared = below(2), writable = below(3) > 0, raw = below(3) == 0;
    size_t bytes = below(2) ? (size_t)PAGE * (1 + below(64)) : MIB + (size_t)PAGE * below(256);
    off_t offset = below(3) ? 0 : (off_t)PAGE * below(128);
    int protection = PROT_READ | (writable ? PROT_WRITE : 0), flags = is_shared ? MAP_SHARED : MAP_PRIVATE;
    flags |= below(8) == 0 ? MAP_POPULATE : 0;
    unmap(one);
    void *base = raw ? (void *)syscall(SYS_mmap, NULL, bytes, protection, flags, from->fd, offset)
                     : mmap(NULL, bytes, protection, flags, from->fd, offset);
    say("raw %d, shared %d, writable %d, %zu at %lld = %ld", raw, is_shared, writable, bytes, (long long)offset,
        base == MAP_FAILED ? -(long)errno : 0);
    if (base == MAP_FAILED)
        return;
    unsigned version = from->file >= 0 ? shared->changes[from->file] : 0;
    *one = (mapping){base, bytes, from->file, version, is_shared, writable};
    if (below(4) > 0)
        report_mapping(one);
}

static void play_look_mapped(void)
{
    mapping *one = pick_mapping();
    if (one != NULL)
        report_mapping(one);
}

/* By this process, or by a child: what is private to the child must not come back. */
static void play_store(void)
{
    mapping *one = pick_mapping();
    uint64_t sum = 0;
    if (one == NULL || !one->writable)
        return;
    size_t pages = readable(one->base, one->bytes, &sum);
    if (pages < 2)
        return;
    unsigned way = below(4);
    size_t room = (pages - 1) * PAGE, at = below((unsigned)room), length = 1 + below((unsigned)(room - at));
    const uint8_t *bytes = some_bytes(length);
    int child = -1;
    bool stored = false;
    if (one->shared)
        changed(one->file);
    if (way > 1) {
        pid_t pid = way == 2 ? fork() : (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
        if (pid == 0) {
            store(one, at, bytes, length);
            _exit(0);
        }
        child = finish_child(pid);
    } else {
        stored = store(one, at, bytes, length);
    }
    say("way %u, %zu at %zu: %d, child %d", way, length, at, stored, child);
    if (way == 1 && one->shared)
        say("msync = %ld", answer(msync(one->base, room, below(2) ? MS_SYNC : MS_ASYNC)));
    report_mapping(one);
}

static void play_advise(void)
{
    mapping *one = pick_mapping();
    static const int kinds[] = {MADV_DONTNEED, MADV_DONTNEED, MADV_DONTNEED,
                                MADV_WILLNEED, MADV_RANDOM,   MADV_SEQUENTIAL};
    if (one == NULL)
        return;
    int advice = kinds[below(6)];
    bool whole = below(2);
    size_t pages = one->bytes / PAGE, first = whole ? 0 : below((unsigned)pages), count = whole ? pages : pages - first;
    long result = answer(madvise(one->base + first * PAGE, count * PAGE, advice));
    if (whole && advice == MADV_DONTNEED && one->file >= 0)
        one->version = shared->changes[one->file];
    say("advice %d, %zu pages from %zu = %ld", advice, count, first, result);
    report_mapping(one);
}

static void play_remap(void)
{
    mapping *one = pick_mapping();
    if (one == NULL)
        return;
    unsigned way = below(4);
    size_t bytes = (size_t)PAGE * (1 + below(400)), pages = one->bytes / PAGE;
    long result;
    if (way < 2) {                              /* shrinks, grows, moves */
        void *base = mremap(one->base, one->bytes, bytes, MREMAP_MAYMOVE);
        result = base == MAP_FAILED ? -errno : 0;
        if (base != MAP_FAILED)
            one->base = base, one->bytes = bytes;
    } else if (way == 2 && pages > 1) {         /* an end goes */
        size_t cut = 1 + below((unsigned)pages - 1);
        result = munmap(one->base + one->bytes - cut * PAGE, cut * PAGE);
        one->bytes -= cut * PAGE;
    } else {                                    /* memory of its own is laid over a part */
        size_t first = below((unsigned)pages);
        void *base = mmap(one->base + first * PAGE, PAGE, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        result = base == MAP_FAILED ? -errno : 0;
    }
    say("way %u, %zu of %zu = %ld", way, bytes, pages * PAGE, result);
    report_mapping(one);
}

static void play_protect(void)
{
    mapping *one = pick_mapping();
    if (one == NULL || !one->writable)
        return;
    uint64_t sum;
    long off = answer(mprotect(one->base, one->bytes, PROT_NONE));
    size_t pages = readable(one->base, one->bytes, &sum);
    long on = answer(mprotect(one->base, one->bytes, PROT_READ | PROT_WRITE));
    say("%ld, %zu pages, %ld", off, pages, on);
    report_mapping(one);
}

static void play_unmap(void)
{
    mapping *one = pick_mapping();
    if (one == NULL)
        return;
    if (one->shared && one->writable && below(2))
        say("msync = %ld", answer(msync(one->base, one->bytes, MS_SYNC)));
    unmap(one);
}

/* What a mapping has is written to a file, and what a file has is read into a mapping. */
static void play_through(void)
{
    mapping *one = pick_mapping();
    slot *to = pick();
    uint64_t sum = 0;
    if (one == NULL || !is_specified(one) || one->file == to->file)
        return;
    size_t pages = readable(one->base, one->bytes, &sum);
    bool reads = one->writable && below(2);
    if (pages < 2)
        return;
    size_t length = (pages - 1) * PAGE;
    off_t offset = an_offset();
    long result = reads ? pread(to->fd, one->base, length, offset) : pwrite(to->fd, one->base, length, offset);
    changed(reads && one->shared ? one->file : to->file);
    say("reads %d, %zu at %lld = %ld", reads, length, (long long)offset, answer(result));
    report_mapping(one);
}

/* A handler that hands on to the one that was there, as libraries install them: each is called once. */
static struct sigaction earlier;

static void hand_on(int number)
{
    if (expected)
        siglongjmp(back, number);
    atomic_fetch_add(&shared->handled, 1);
    if (earlier.sa_flags & SA_SIGINFO)
        earlier.sa_sigaction(number, NULL, NULL);
    else if (earlier.sa_handler != SIG_DFL && earlier.sa_handler != SIG_IGN)
        earlier.sa_handler(number);
}

static void play_chain(void)
{
    struct sigaction action = {.sa_handler = hand_on, .sa_flags = SA_NODEFER};
    bool raw = below(2);
    pid_t pid = fork();
    if (pid == 0) {
        unsigned before = atomic_load(&shared->handled);
        sigaction(SIGBUS, &action, &earlier);
        if (raw)
            syscall(SYS_tgkill, getpid(), syscall(SYS_gettid), SIGBUS);
        else
            raise(SIGBUS);
        say("handled %u", atomic_load(&shared->handled) - before);
        _exit(0);
    }
    say("child %d", finish_child(pid));
}

const kind memory_kinds[] = {
    {"map", 8, play_map, ALONE},
    {"look_mapped", 3, play_look_mapped, ALONE},
    {"store", 5, play_store, ALONE},
    {"advise", 4, play_advise, ALONE},
    {"remap", 3, play_remap, ALONE},
    {"protect", 1, play_protect, ALONE},
    {"unmap", 2, play_unmap, ALONE},
    {"through", 2, play_through, ALONE},
    {"chain", 1, play_chain, ALONE},
    {NULL, 0, NULL, ALONE},
};
