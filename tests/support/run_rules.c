/* run_rules.c - scenes of what no library before libc can see (raw calls, other processes, signals); see run_scenes.c.
 *
 * Never: depends on time, numbers of processes, or the order of threads.
 */
#include <dirent.h>
#include <dlfcn.h>
#include <sys/file.h>
#include <sys/ioctl.h>

#include "run_scenes.h"

enum { PART = 512 << 10 };

static void ended(pid_t child)
{
    int status = -1;
    waitpid(child, &status, 0);
    said("ended", status);
}

/* ------------------------------------------------------------------------- memory that changes */

static atomic_bool over;
static uint8_t *changing;

static void *change(void *nothing)
{
    while (!atomic_load(&over))
        for (size_t i = 0; i < PART; i += 64)
            ((volatile uint8_t *)changing)[i] ^= 0xff;
    return nothing;
}

/* Whatever is stored, it can be read, and is in the end what the kernel says. */
static void changed(void)
{
    pthread_t thread;
    int fd = make("changed", O_RDWR | O_TRUNC);
    uint8_t *back = malloc(PART);
    changing = malloc(PART);
    memcpy(changing, bytes, PART);
    pthread_create(&thread, NULL, change, NULL);
    for (int i = 0; i < 60; i++)
        if (write(fd, changing, PART - (size_t)i) != PART - i)
            said("short", i);
    atomic_store(&over, true);
    pthread_join(thread, NULL);
    int bad = 0;
    for (off_t at = 0; at < 30 * PART; at += PART)
        bad += pread(fd, back, PART, at) != PART;
    said("unreadable", bad);
    said("cut", ftruncate(fd, 0));
    said("close", close(fd));
}

/* --------------------------------------------------------------------------------- sizes */

static int grown(void)
{
    int fd = make("grown", O_RDWR | O_TRUNC);
    said("write", write(fd, bytes, BYTES));
    return fd;
}

static void known(void)
{
    int fd = grown(), other = make("other", O_RDWR | O_TRUNC), count = -1;
    said("set", lseek(fd, 0, SEEK_SET));
    said("asked", ioctl(fd, FIONREAD, &count));
    said("left", count);
    close(fd);
    fd = grown();
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_END, .l_len = 1};
    said("lock", fcntl(fd, F_SETLK, &lock));
    pid_t child = fork();
    if (child == 0) {
        struct flock seen = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 0};
        fcntl(fd, F_GETLK, &seen);
        said("locked from", seen.l_start);
        _exit(0);
    }
    ended(child);
    close(fd);
    fd = grown();
    struct statx status;
    said("statx", statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_SIZE, &status));
    said("size", (long long)status.stx_size);
    close(fd);
    fd = grown();
    off_t start = 0;
    said("sent", sendfile(other, fd, &start, 100 * MIB));
    struct iovec piece = {bytes, 1000};
    said("appended", pwritev2(fd, &piece, 1, 0, RWF_APPEND));
    said("end", lseek(fd, 0, SEEK_END));
    uint8_t *page = mmap(NULL, BYTES, PROT_READ, MAP_SHARED, fd, 0);
    said("mapped", page != MAP_FAILED);
    sum("mapped", page, BYTES);
    said("close", close(fd));
    said("close", close(other));
}

/* ------------------------------------------------------------------------- raw calls and others */

/* A number is another file's from one call to the next, by calls that go past libc. */
static void replaced(void)
{
    int one = make("one", O_RDWR | O_TRUNC), two = make("two", O_RDWR | O_TRUNC), three;
    for (int i = 0; i < 4; i++) {
        int keep = fcntl(one, F_DUPFD, 50);
        said("one", write(one, bytes + i, BYTES));
        said("over", syscall(SYS_dup3, two, one, O_CLOEXEC) == one);
        said("two", write(one, bytes + i + 100, MIB));
        said("back", syscall(SYS_dup3, keep, one, 0) == one);
        said("close", (long long)syscall(SYS_close, keep));
        position(one);
        position(two);
    }
    three = open("one", O_WRONLY);
    said("three", write(three, bytes + 7, MIB));
    said("one", write(one, bytes + 8, MIB));
    said("close", close(one));
    said("close", close(two));
    said("close", close(three));
}

static void descriptors(const char *when)
{
    DIR *directory = opendir("/proc/self/fd");
    int count = -3;     /* . and .., and its own */
    while (readdir(directory) != NULL)
        count++;
    closedir(directory);
    said(when, count);
}

static void counted(void)
{
    descriptors("before");
    int fd = make("counted", O_WRONLY | O_TRUNC);
    said("write", write(fd, bytes, BYTES));
    descriptors("while");
    said("range", (long long)syscall(SYS_close_range, fd + 1, ~0U, 0));
    said("write", write(fd, bytes, BYTES));
    said("user", setresuid(65534, 65534, 65534));
    said("write", write(fd, bytes, BYTES));
    descriptors("as nobody");
    said("close", close(fd));
}

static void children(void)
{
    int fd = make("children", O_RDWR | O_TRUNC);
    said("write", write(fd, bytes, BYTES));
    pid_t child = fork();
    if (child == 0) {
        said("flags", fcntl(fd, F_SETFL, O_APPEND));
        _exit(0);
    }
    ended(child);
    said("set", lseek(fd, 0, SEEK_SET));
    said("write", write(fd, bytes + 1, MIB));
    said("end", lseek(fd, 0, SEEK_END));
    said("flags", fcntl(fd, F_SETFL, 0));
    child = fork();
    if (child == 0) {
        uint8_t *area = mmap(NULL, 2 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        sum("child", area, 2 * MIB);
        said("child", pwrite(fd, bytes + 3, MIB, MIB));
        sum("child", area, 2 * MIB);
        area[5] ^= 0xff;
        said("sync", msync(area, 4096, MS_SYNC));
        _exit(0);
    }
    ended(child);
    said("write", pwrite(fd, bytes + 4, MIB, MIB / 2));
    uint8_t *back = malloc(BYTES);
    said("read", pread(fd, back, BYTES, 0));
    sum("read", back, BYTES);
    said("close", close(fd));
}

/* A child that shares the memory, and writes itself. */
static void shared(void)
{
    for (int i = 0; i < 6; i++) {
        int fd = make(i % 2 == 0 ? "shared" : "shared2", O_WRONLY | O_TRUNC);
        said("write", write(fd, bytes + i, BYTES));
        pid_t child = vfork();
        if (child == 0) {
            ssize_t done = write(fd, bytes + i + 50, BYTES);
            close(fd);
            _exit(done == BYTES ? 3 : 4);
        }
        ended(child);
        said("write", write(fd, bytes + i + 90, BYTES));
        position(fd);
        said("close", close(fd));
    }
}

static void *write_on(void *argument)
{
    int fd = *(int *)argument;
    while (!atomic_load(&over))
        if (pwrite(fd, bytes, PART, 0) != PART)
            said("short", fd);
    return NULL;
}

/* Processes are forked, and descriptors duplicated, while threads write. */
static void beside(void)
{
    pthread_t threads[3];
    int fd = make("beside", O_RDWR | O_TRUNC), own = make("besides", O_WRONLY | O_TRUNC), given[3] = {fd, fd, own};
    for (int i = 0; i < 3; i++)
        pthread_create(&threads[i], NULL, write_on, &given[i]);
    int bad = 0;
    for (int i = 0; i < 20; i++) {
        int status;
        pid_t child = fork();
        if (child == 0) {
            int its = make("childs", O_WRONLY | O_TRUNC);
            _exit(write(its, bytes, PART) != PART || close(its) != 0);
        }
        waitpid(child, &status, 0);
        bad += status != 0;
        bad += close(dup(fd)) != 0;
    }
    atomic_store(&over, true);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    said("bad", bad);
    said("close", close(fd));
    said("close", close(own));
}

/* ----------------------------------------------------------------------------------- signals */

static int handler_fd, lowest, wrong;
static uint8_t *handler_area;

/* Opens, closes, writes: all of it is allowed in a handler. */
static void on_alarm(int number)
{
    int error = errno, fd = open("handled", O_RDWR | O_CREAT, 0644);
    (void)number;
    wrong += fd != lowest || close(fd) != 0;
    wrong += pwrite(handler_fd, bytes, PART, 0) != PART;
    wrong += write(handler_fd, bytes, 1000) != 1000;
    errno = error;
}

static void handled(void)
{
    struct itimerval soon = {{0, 0}, {0, 200}}, never = {{0, 0}, {0, 0}};
    int fd = make("handling", O_WRONLY | O_TRUNC);
    handler_fd = make("handled2", O_WRONLY | O_TRUNC);
    lowest = handler_fd + 1;
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    long long total = 0;
    for (int i = 0; i < 15; i++) {
        setitimer(ITIMER_REAL, &soon, NULL);
        total += write(fd, bytes, MIB);
    }
    setitimer(ITIMER_REAL, &never, NULL);
    said("total", total);
    said("wrong", wrong);
    said("cut", ftruncate(handler_fd, 0));
    said("close", close(fd));
}

static struct sigaction before;

static void on_fault(int number, siginfo_t *info, void *context)
{
    static const char TEXT[] = "handled\n";
    (void)!write(1, TEXT, sizeof TEXT - 1);
    if ((before.sa_flags & SA_SIGINFO) != 0)
        before.sa_sigaction(number, info, context);
    else
        signal(number, SIG_DFL);
}

/* A handler hands a fault on to the one before it, and the process dies of it. */
static void faults(void)
{
    const int numbers[] = {SIGSEGV, SIGBUS};
    int fd = make("faults", O_RDWR | O_TRUNC);
    said("write", write(fd, bytes, BYTES));
    for (int i = 0; i < 4; i++) {
        pid_t child = fork();
        if (child == 0) {
            struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
            struct rlimit none = {0, 0};
            setrlimit(RLIMIT_CORE, &none);
            if (i < 2)
                sigaction(numbers[i % 2], &action, &before);
            said("write", write(fd, bytes, BYTES));
            if (i % 2 == 0)
                *(volatile uint8_t *)16 = 1;
            int hole = memfd_create("hole", 0);
            *(volatile uint8_t *)mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, hole, 0) = 1;
            _exit(0);
        }
        ended(child);
    }
    raise(SIGCONT);
    said("close", close(fd));
}

static void on_stack(int number)
{
    (void)number;
    wrong += write(handler_fd, handler_area, PART) != PART;
}

/* A handler with little more stack than its frame needs. */
static void little(void)
{
    enum { BELOW = 64 << 10 };
    long size = sysconf(_SC_MINSIGSTKSZ) + 3072;
    uint8_t *area = malloc(BELOW + (size_t)size);
    memset(area, 0x5a, BELOW);
    handler_area = bytes;
    handler_fd = make("little", O_WRONLY | O_TRUNC);
    stack_t stack = {.ss_sp = area + BELOW, .ss_size = (size_t)size};
    said("stack", sigaltstack(&stack, NULL));
    struct sigaction action = {.sa_handler = on_stack, .sa_flags = SA_ONSTACK};
    sigaction(SIGUSR1, &action, NULL);
    for (int i = 0; i < 20; i++)
        raise(SIGUSR1);
    long long wrote = 0;
    for (int i = 0; i < BELOW; i++)
        wrote += area[i] != 0x5a;
    said("below", wrote);
    said("wrong", wrong);
    said("close", close(handler_fd));
}

/* Memory and locks are forbidden within each write and close, where run_forbidding.c is preloaded. */
static void forbidding(void)
{
    atomic_int *forbidden = dlsym(RTLD_DEFAULT, "forbidden"), nothing;
    forbidden = forbidden != NULL ? forbidden : &nothing;
    for (int i = 0; i < 3; i++) {
        int fd = make("forbidding", O_WRONLY | O_TRUNC);
        atomic_store(forbidden, 1);
        ssize_t first = write(fd, bytes, BYTES), second = pwrite(fd, bytes, MIB, MIB);
        struct iovec pieces[2] = {{bytes, MIB}, {bytes + 5, MIB}};
        ssize_t third = writev(fd, pieces, 2);
        int closed = close(fd);
        atomic_store(forbidden, 0);
        said("write", first);
        said("pwrite", second);
        said("writev", third);
        said("close", closed);
    }
}

/* ------------------------------------------------------------------------------------ mappings */

static int map_entries(void)
{
    FILE *list = fopen("/proc/self/maps", "r");
    int count = 0, letter;
    while ((letter = fgetc(list)) != EOF)
        count += letter == '\n';
    fclose(list);
    return count;
}

static void forgotten(void)
{
    int fd = make("forgotten", O_RDWR | O_TRUNC);
    said("write", write(fd, bytes, BYTES));
    said("grow", ftruncate(fd, (off_t)1 << 36));
    uint8_t *area = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    said("mapped", area != MAP_FAILED);
    memset(area, 1, MIB);
    said("forget", madvise(area, BYTES / 4096 * 4096, MADV_DONTNEED));
    sum("forgotten", area, BYTES);
    said("shrink", mremap(area, BYTES, MIB, 0) == area);
    sum("shrunk", area, MIB);
    said("lock", mlockall(MCL_FUTURE));
    said("write", pwrite(fd, bytes + 1, BYTES, 0));
    said("close", close(fd));
    int entries = map_entries();
    for (int i = 0; i < 200; i++)
        if (mmap(NULL, MIB, PROT_READ, MAP_PRIVATE, open("forgotten", O_RDONLY), 0) == MAP_FAILED)
            said("not mapped", i);
    said("entries", map_entries() - entries);
    descriptors("mapped");
    said("cut", truncate("forgotten", BYTES));
}

typedef struct {
    int fd;
    const uint8_t *from;
    off_t offset;
} half;

static void *write_half(void *argument)
{
    const half *own = argument;
    if (pwrite(own->fd, own->from, PART, own->offset) != PART)
        said("short", own->offset);
    return NULL;
}

/* Threads write beside each other, and a shared mapping shows what both wrote. */
static void viewed(void)
{
    int fd = make("viewed", O_RDWR | O_TRUNC), stale = 0;
    said("grow", ftruncate(fd, 2 * PART));
    const uint8_t *view = mmap(NULL, 2 * PART, PROT_READ, MAP_SHARED, fd, 0);
    for (int i = 0; i < 300; i++) {
        half first = {fd, bytes + i, 0}, second = {fd, bytes + i + 7, PART};
        pthread_t thread;
        pthread_create(&thread, NULL, write_half, &first);
        write_half(&second);
        pthread_join(thread, NULL);
        stale += memcmp(view, first.from, PART) != 0 || memcmp(view + PART, second.from, PART) != 0;
    }
    said("stale", stale);
    said("close", close(fd));
}

bool play_rules(const char *name)
{
    static const struct {
        const char *name;
        void (*play)(void);
    } scenes[] = {
        {"changed", changed},   {"known", known},   {"replaced", replaced}, {"counted", counted},
        {"children", children}, {"shared", shared}, {"beside", beside},     {"handled", handled},
        {"faults", faults},     {"little", little}, {"forgotten", forgotten},
        {"forbidding", forbidding}, {"viewed", viewed},
    };
    for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++) {
        if (strcmp(name, scenes[i].name) == 0) {
            scenes[i].play();
            return true;
        }
    }
    return false;
}
