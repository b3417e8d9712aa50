/* run_processes.c - scenes of processes, threads and mappings; see run_scenes.c.
 *
 * Never: depends on time, numbers of processes, or the order of threads.
 */
#include "run_scenes.h"

enum { RECORD = 50000, RECORDS = 40 };

static char *this_program;

static void wait_for(pid_t child)
{
    int status = -1;
    waitpid(child, &status, 0);
    said("ended", status);
}

/* ------------------------------------------------------------------------------------ processes */

static void forked(void)
{
    int fd = make("forked", O_RDWR | O_TRUNC), own = make("own", O_WRONLY | O_TRUNC);
    said("write", write(fd, bytes, BYTES));
    for (int i = 0; i < 3; i++) {
        pid_t child = fork();
        if (child == 0) {
            uint8_t *back = malloc(BYTES);
            said("child reads", pread(fd, back, BYTES, 0));
            sum("read", back, BYTES);
            said("child", write(fd, bytes + i + 1, BYTES));
            int its = make("childs", O_WRONLY | O_TRUNC);
            said("child's own", write(its, bytes + i, BYTES));
            said("close", close(its));
            exit(i);
        }
        wait_for(child);
        position(fd);
        said("parent", write(fd, bytes + i + 2, BYTES));
        said("own", write(own, bytes + i, BYTES));
    }
    said("close", close(fd));
    said("close", close(own));
}

static void write_records(int fd, int writer)
{
    uint8_t *record = malloc(RECORD);
    for (int i = 0; i < RECORDS; i++) {
        memset(record, writer * RECORDS + i, RECORD);
        if (write(fd, record, RECORD) != RECORD)
            said("short", writer);
    }
    free(record);
}

/* Every record is there, whole, once, in whatever order. */
static void check_records(int fd, int writers)
{
    uint8_t *record = malloc(RECORD);
    bool seen[256] = {false};
    int good = 0;
    for (int i = 0; i < writers * RECORDS; i++) {
        if (pread(fd, record, RECORD, (off_t)i * RECORD) != RECORD)
            break;
        bool whole = memcmp(record, record + 1, RECORD - 1) == 0 && !seen[record[0]];
        seen[record[0]] = true;
        good += whole;
    }
    said("whole records", good);
    said("truncated", ftruncate(fd, 0));    /* their order differs from run to run */
    free(record);
}

/* Processes that share an offset write at the same time. */
static void crowd(void)
{
    int fd = make("crowd", O_RDWR | O_TRUNC);
    write_records(fd, 0);
    for (int writer = 1; writer < 4; writer++) {
        if (fork() == 0) {
            write_records(fd, writer);
            _exit(0);
        }
    }
    write_records(fd, 4);
    while (wait(NULL) > 0)
        ;
    position(fd);
    check_records(fd, 5);
    said("close", close(fd));
}

static void *write_in_thread(void *argument)
{
    int *given = argument;
    write_records(given[0], given[1]);
    for (int i = 0; i < 20; i++)
        pwrite(given[2], bytes + given[1], 300000, (off_t)(given[1] * 20 + i) * 300000);
    return NULL;
}

static void threads(void)
{
    pthread_t ids[4];
    int fd = make("threads", O_RDWR | O_TRUNC), apart = make("apart", O_WRONLY | O_TRUNC), given[4][3];
    said("write", write(fd, bytes, 0));
    for (int i = 0; i < 4; i++) {
        given[i][0] = fd;
        given[i][1] = i;
        given[i][2] = apart;
        pthread_create(&ids[i], NULL, write_in_thread, given[i]);
    }
    for (int i = 0; i < 4; i++)
        pthread_join(ids[i], NULL);
    position(fd);
    check_records(fd, 4);
    said("close", close(fd));
    said("close", close(apart));
}

static void spawned(void)
{
    extern char **environ;
    int fd = make("spawned", O_WRONLY | O_TRUNC), status;
    pid_t child;
    char *arguments[] = {"sh", "-c", "echo of the child >&9; wc -c < spawned", NULL};
    posix_spawn_file_actions_t actions;
    said("write", write(fd, bytes, BYTES));
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fd, 9);
    status = posix_spawnp(&child, "sh", &actions, NULL, arguments, environ);
    wait_for(child);
    said("spawn", status);
    said("write", write(fd, bytes, BYTES));
    child = vfork();
    if (child == 0) {
        dup2(fd, 9);
        close(fd);
        close_range(10, 1000, 0);
        execvp("sh", arguments);
        _exit(1);
    }
    wait_for(child);
    position(fd);
    said("write", write(fd, bytes, BYTES));
    status = system("wc -c < spawned");
    said("system", status);
    FILE *pipe = popen("md5sum < spawned", "r");
    char line[100] = "";
    said("line", fgets(line, sizeof line, pipe) != NULL);
    printf("%s", line);
    said("close", pclose(pipe));
    said("write", write(fd, bytes + 1, BYTES));
    said("close", close(fd));
}

static void executed(void)
{
    int fd = make("executed", O_WRONLY | O_TRUNC);
    char number[16];
    said("write", write(fd, bytes, BYTES));
    snprintf(number, sizeof number, "%d", fd);
    setenv("SCENE_DESCRIPTOR", number, 1);
    said("fails", execl("nowhere", "nowhere", NULL));
    said("write", write(fd, bytes, MIB));
    execl(this_program, this_program, "goes_on", NULL);
    said("exec", -1);
}

static void goes_on(void)
{
    int fd = atoi(getenv("SCENE_DESCRIPTOR"));
    position(fd);
    said("write", write(fd, bytes + 1, BYTES));
    position(fd);
    said("close", close(fd));
}

static void left_open(void)
{
    int fd = make("left", O_WRONLY | O_TRUNC), quick = make("quick", O_WRONLY | O_TRUNC);
    said("write", write(fd, bytes, BYTES));
    if (fork() == 0) {
        said("write", write(make("childs", O_WRONLY | O_TRUNC), bytes, BYTES));
        _exit(0);
    }
    wait(NULL);
    said("write", write(quick, bytes, BYTES));
}

static int signal_fd;

static void on_alarm(int number)
{
    int error = errno;
    (void)number;
    if (write(signal_fd, bytes, 1000) != 1000)
        abort();
    errno = error;
}

/* A handler writes to the file that is being written to: its bytes are in between, none are lost. */
static void signals(void)
{
    struct itimerval often = {{0, 500}, {0, 500}}, never = {{0, 0}, {0, 0}};
    int fd = signal_fd = make("signals", O_WRONLY | O_TRUNC);
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    struct stat status;
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    long long total = 0;
    for (int i = 0; i < 30; i++)
        total += write(fd, bytes, MIB);
    setitimer(ITIMER_REAL, &never, NULL);
    said("total", total);
    fstat(fd, &status);
    said("rest", (status.st_size - total) % 1000);
    said("position", lseek(fd, 0, SEEK_CUR) - status.st_size);
    said("cut", ftruncate(fd, 0));
    said("close", close(fd));
}

/* --------------------------------------------------------------------------------------- mmap */

static void make_file(const char *name)
{
    int fd = make(name, O_WRONLY | O_TRUNC);
    said("write", write(fd, bytes, BYTES));
    said("close", close(fd));
}

static void mapped(void)
{
    make_file("mapped");
    int fd = open("mapped", O_RDONLY);
    uint8_t *reading = mmap(NULL, BYTES, PROT_READ, MAP_PRIVATE, fd, 0);
    uint8_t *writing = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    uint8_t *part = mmap(NULL, 2 * MIB, PROT_READ, MAP_PRIVATE, fd, MIB);
    said("close", close(fd));
    sum("read", reading, BYTES);
    sum("part", part, 2 * MIB);
    said("rest", reading[BYTES] + reading[(BYTES | 4095) - 1]);
    for (size_t i = 0; i < BYTES; i += 1000)
        writing[i] ^= 0xff;
    sum("written", writing, BYTES);
    sum("read", reading, BYTES);
    if (fork() == 0) {
        sum("child", writing, BYTES);
        writing[0] ^= 1;
        said("unmap", munmap(reading, BYTES));
        sum("child", writing, BYTES);
        _exit(0);
    }
    wait(NULL);
    sum("written", writing, BYTES);
    said("protect", mprotect(reading, 8192, PROT_READ | PROT_WRITE));
    reading[5] ^= 1;
    said("unlink", unlink("mapped"));
    make_file("mapped");
    sum("read", reading, BYTES);
    said("unmap", munmap(reading, BYTES));
    said("unmap", munmap(writing, BYTES));
    sum("part", part, 2 * MIB);
    said("unmap", munmap(part, 2 * MIB));
}

static void unmapped(void)
{
    make_file("unmapped");
    int fd = open("unmapped", O_RDONLY);
    uint8_t *area = mmap(NULL, BYTES, PROT_READ, MAP_PRIVATE, fd, 0);
    said("sync", msync(area, BYTES, MS_SYNC));
    said("advise", madvise(area, BYTES, MADV_WILLNEED));
    said("advise", madvise(area, BYTES, MADV_DONTNEED));
    said("middle", munmap(area + MIB, 4096));
    said("again", munmap(area + MIB, 4096));
    sum("before", area, MIB);
    sum("behind", area + MIB + 4096, MIB);
    said("head", munmap(area, MIB));
    sum("behind", area + MIB + 4096, MIB);
    said("shorter", mremap(area + MIB + 4096, 2 * MIB, MIB, 0) == area + MIB + 4096);
    sum("behind", area + MIB + 4096, MIB);
    said("tail", munmap(area + MIB, BYTES - MIB));
    said("odd", munmap(area + 1, 4096));
    area = mmap(NULL, BYTES, PROT_READ, MAP_PRIVATE, fd, 0);
    void *over = mmap(area + MIB, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    said("over", over == area + MIB);
    memset(over, 7, MIB);
    said("unmap", munmap(area, MIB));
    said("unmap", munmap(area + 2 * MIB, BYTES - 2 * MIB));
    sum("over", over, MIB);
    said("beyond", mmap(NULL, BYTES, PROT_READ, MAP_PRIVATE, fd, 1) == MAP_FAILED);
    said("not to write", mmap(NULL, BYTES, PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
    said("close", close(fd));
}

bool play_other(const char *name, char *program)
{
    static const struct {
        const char *name;
        void (*play)(void);
    } scenes[] = {
        {"forked", forked},     {"crowd", crowd},         {"threads", threads}, {"spawned", spawned},
        {"executed", executed}, {"goes_on", goes_on},     {"left_open", left_open},
        {"signals", signals},   {"mapped", mapped},       {"unmapped", unmapped},
    };
    this_program = program;
    for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++) {
        if (strcmp(name, scenes[i].name) == 0) {
            scenes[i].play();
            return true;
        }
    }
    return false;
}
