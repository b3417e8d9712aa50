/* main.c - plays random programs one after the other, each in a process of its own, and prints their reports.
 *
 *     fuzz DIRECTORY [option...] SEED...
 *       steps=N       steps of each program
 *       only=A,B      kinds to draw, or without=A,B
 *       keep=3,7-9    the other steps are left out
 *       mode=pair     two processes that share descriptors take turns
 *       mode=saves    files are saved one at a time, into what is in the directory; they stay there
 *       mode=look     the files that are there are reported
 *       strict=1      see fuzz.h
 */
#include <dirent.h>
#include <stdarg.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include "fuzz.h"

world *shared;
uint8_t *source, *target;
slot slots[SLOTS];
mapping maps[MAPS];
FILE *streams[STREAMS];
uint64_t seed;
int step;
char player = 'a';
const char *playing = "";
bool strict;

enum { PATIENCE_SECONDS = 60, KINDS_MAX = 64, NAME_BYTES = 16 };

static uint64_t state;
static bool large;                   /* this program writes large pieces */
static int step_count = 100;
static bool left_out[STEPS_MAX];
static const char *mode = "single";
static const char *only, *without;
static const kind *kinds[KINDS_MAX];
static unsigned total_weight, kind_count;

/* ----------------------------------------------------------------------------------- draws */

static uint64_t mix(uint64_t value)
{
    value += 0x9e3779b97f4a7c15;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
    value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
    return value ^ (value >> 31);
}

uint64_t draw(void)
{
    state += 0x9e3779b97f4a7c15;
    return mix(state);
}

size_t a_length(void)
{
    switch (below(large ? 12 : 9)) {
    case 0: return 1 + below(100);
    case 1: return 1 + below(5000);
    case 2: return (size_t)PAGE * (1 + below(16));
    case 3: return 64 * KIB;
    case 4: return 64 * KIB + below(128 * KIB);
    case 5: return 256 * KIB;
    case 6: return 128 * KIB + below(256 * KIB);
    case 7: return below(20) == 0 ? 0 : 1 + below(600);
    case 8: return 256 * KIB + below(512 * KIB);
    case 9: return MIB;
    case 10: return 512 * KIB + below(MIB);
    default: return MIB + below(LARGEST - MIB);
    }
}

off_t an_offset(void)
{
    switch (below(6)) {
    case 0: return 0;
    case 1: return below(10000);
    case 2: return (off_t)PAGE * below(512);
    case 3: return (off_t)2 * MIB * below(3);
    case 4: return below(MIB);
    default: return below(OFFSET_MAX);
    }
}

const uint8_t *some_bytes(size_t length)
{
    return source + below((unsigned)(SOURCE_BYTES - length));
}

uint64_t sum_of(const void *bytes, size_t length)
{
    uint64_t lanes[4] = {1, 2, 3, length}, words[4];
    const uint8_t *next = bytes;
    for (; length >= sizeof words; length -= sizeof words, next += sizeof words) {
        memcpy(words, next, sizeof words);
        for (int i = 0; i < 4; i++)
            lanes[i] = (lanes[i] ^ words[i]) * 0x9fb21c651e98df25, lanes[i] ^= lanes[i] >> 32;
    }
    memset(words, 0, sizeof words);
    memcpy(words, next, length);
    for (int i = 0; i < 4; i++)
        lanes[i] = mix(lanes[i] ^ words[i]);
    return mix(lanes[0] + 3 * lanes[1] + 5 * lanes[2] + 7 * lanes[3]) >> 24;
}

/* ---------------------------------------------------------------------------------- reports */

void say(const char *format, ...)
{
    char line[512];
    va_list list;
    int length = snprintf(line, sizeof line, "%d%c %s: ", step, player, playing);
    va_start(list, format);
    length += vsnprintf(line + length, sizeof line - (size_t)length - 1, format, list);
    va_end(list);
    if (length > (int)sizeof line - 2)
        length = sizeof line - 2;
    line[length++] = '\n';
    unsigned at = atomic_fetch_add(&shared->used, (unsigned)length);
    if (at + (unsigned)length <= LOG_BYTES)
        memcpy(shared->text + at, line, (size_t)length);
}

long answer(long result)
{
    if (result >= 0)
        return result;
    if (errno == ENOTCONN || errno == ECONNABORTED || errno == EIO)
        atomic_store(&shared->stopped, true);
    return -errno;
}

/* ---------------------------------------------------------------------- descriptors and names */

const char *name_of(int name)
{
    static const char *const names[] = {"f0", "f1", "f2", "f3"};
    return names[name];
}

slot *pick(void)
{
    unsigned first = below(SLOTS);
    for (unsigned i = 0; i < SLOTS; i++)
        if (slots[(first + i) % SLOTS].fd >= 0)
            return &slots[(first + i) % SLOTS];
    return &slots[first];
}

int make_file(void)
{
    return shared->files < FILES_MAX - 1 ? shared->files++ : FILES_MAX - 1;
}

void changed(int file)
{
    if (file >= 0)
        shared->changes[file]++;
}

void close_slot(slot *one)
{
    if (one->fd >= 0)
        say("close before = %ld", answer(close(one->fd)));
    *one = (slot){-1, -1};
}

void be_killed_with_parent(void)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
}

int finish_child(pid_t child)
{
    int status = 0;
    while (waitpid(child, &status, __WALL) < 0 && errno == EINTR)
        ;
    return WIFSIGNALED(status) ? 1000 + WTERMSIG(status) : WEXITSTATUS(status);
}

/* ------------------------------------------------------------------------------ one program */

static bool is_listed(const char *list, const char *name)
{
    size_t length = strlen(name);
    for (const char *at = list; (at = strstr(at, name)) != NULL; at++)
        if ((at == list || at[-1] == ',') && (at[length] == 0 || at[length] == ','))
            return true;
    return false;
}

static void choose_kinds(void)
{
    const kind *const groups[] = {data_kinds, size_kinds, descriptor_kinds, memory_kinds, process_kinds, stream_kinds,
                                  thread_kinds, ring_kinds};
    bool saves = strcmp(mode, "saves") == 0;
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++)
        for (const kind *one = groups[i]; one->name != NULL; one++) {
            if ((only != NULL && !is_listed(only, one->name)) || (without != NULL && is_listed(without, one->name)) ||
                (saves && one->use == ALONE))
                continue;
            kinds[kind_count++] = one;
            total_weight += one->weight;
        }
}

static const kind *play_one(void)
{
    unsigned at = below(total_weight), i = 0;
    for (; at >= kinds[i]->weight; i++)
        at -= kinds[i]->weight;
    playing = kinds[i]->name;
    kinds[i]->play();
    return kinds[i];
}

static void begin_step(int number)
{
    step = number;
    playing = "";
    state = mix(seed * 1000003 + (uint64_t)number);
}

static void begin(void)
{
    large = seed % 3 == 0;
    for (int i = 0; i < SLOTS; i++)
        slots[i] = (slot){-1, -1};
    for (int i = 0; i < NAMES; i++)
        shared->names[i] = -1;
}

/* Files that are there from the beginning, and their descriptors. */
static void make_first_files(void)
{
    begin_step(STEPS_MAX);
    playing = "begin";
    for (int i = 0; i < NAMES - 1; i++) {
        size_t length = i == 0 ? MIB : a_length();
        int fd = open(name_of(i), O_RDWR | O_CREAT | O_TRUNC, 0644);
        say("write %d = %ld", i, answer(write(fd, some_bytes(length), length)));
        shared->names[i] = make_file();
        slots[i] = (slot){fd, shared->names[i]};
    }
}

static void say_content(const char *what, int number, int fd)
{
    uint64_t sum = 0;
    long total = 0, got;
    while ((got = read_all(fd, target, MIB, total)) > 0) {
        sum = sum * 31 + sum_of(target, (size_t)got);
        total += got;
    }
    say("%s %d: %ld bytes, last %ld, sum %llx", what, number, total, got, (unsigned long long)sum);
}

static void end(void)
{
    step = step_count;
    playing = "end";
    for (int i = 0; i < MAPS; i++)
        report_mapping(&maps[i]);
    for (int i = 0; i < STREAMS; i++)
        if (streams[i] != NULL)
            say("fclose %d = %d", i, fclose(streams[i]));
    for (int i = 0; i < SLOTS; i++)
        if (slots[i].fd >= 0) {
            say("position = %ld", answer(syscall(SYS_lseek, slots[i].fd, 0, SEEK_CUR)));
            say_content("slot", i, slots[i].fd);
            say("close = %ld", answer(close(slots[i].fd)));
        }
}

static void say_files(void)
{
    for (int i = 0; i < NAMES; i++) {
        int fd = (int)syscall(SYS_openat, AT_FDCWD, name_of(i), O_RDONLY, 0);
        if (fd < 0)
            say("file %d: %ld", i, answer(fd));
        else
            say_content("file", i, fd);
        syscall(SYS_close, fd);
    }
}

/* Until the step is played that comes before; a second process that has died plays none. */
static void wait_for_turn(int number, pid_t child)
{
    int status;
    for (unsigned looks = 1; atomic_load(&shared->turn) != (unsigned)number; looks++) {
        sched_yield();
        if (child > 0 && looks % 1024 == 0 && waitpid(child, &status, WNOHANG) == child &&
            atomic_load(&shared->turn) != (unsigned)number) {
            say("the second process died: %d", WIFSIGNALED(status) ? WTERMSIG(status) : -1);
            _exit(1);
        }
    }
}

/* Two processes play the same program: a step is played by one of them, while the other one waits. */
static void play_in_turns(void)
{
    pid_t child = -1;
    int fork_at = (int)(mix(seed) % 20);
    for (int number = 0; number < step_count; number++) {
        if (number == fork_at) {
            child = fork();
            if (child == 0) {
                be_killed_with_parent();
                player = 'b';
            }
        }
        if (left_out[number])
            continue;
        bool second = number >= fork_at && (mix(seed ^ mix((uint64_t)number)) & 1);
        if (second != (player == 'b'))
            continue;
        wait_for_turn(number, child);
        begin_step(number);
        play_one();
        int next = number + 1;
        while (next < step_count && left_out[next])
            next++;
        atomic_store(&shared->turn, (unsigned)next);
    }
    if (player == 'b') {
        wait_for_turn(step_count, child);
        end();
        _exit(0);
    }
    wait_for_turn(step_count, child);
    say("second process = %d", child > 0 ? finish_child(child) : 0);
    end();
}

/* Some steps on one file; then all that is in it is published, by close, fsync or rename. */
static void play_save(int name, unsigned way, int steps)
{
    const char *path = way == 0 ? "new" : name_of(name);
    slots[0].fd = open(path, O_RDWR | O_CREAT | (way == 2 ? 0 : O_TRUNC), 0644);
    say("open %d = %ld", name, answer(slots[0].fd < 0 ? -1 : 0));
    for (int i = 0; i < steps && !atomic_load(&shared->stopped); i++) {
        bool publishes = play_one()->use == PUBLISHES;
        playing = "save";
        if (publishes && !atomic_load(&shared->stopped))
            say_content("state", name, slots[0].fd);
    }
    if (!atomic_load(&shared->stopped))
        say_content("publishing", name, slots[0].fd);
    if (atomic_load(&shared->stopped))
        return;
    long result = way == 2 ? answer(fsync(slots[0].fd)) : 0;
    for (int i = 0; i < SLOTS; i++)
        if (slots[i].fd >= 0 && result == 0)
            result = answer(close(slots[i].fd)), slots[i].fd = -1;
    if (way == 0 && result == 0)
        result = answer(rename(path, name_of(name)));
    say("published %d = %ld", name, result);
}

static void play_saves(void)
{
    for (int number = 0; number < step_count && !atomic_load(&shared->stopped); number++) {
        begin_step(number);
        playing = "save";
        int name = (int)below(NAMES);
        unsigned way = below(3);
        play_save(name, way, 1 + (int)below(8));
    }
}

static void play_steps(void)
{
    int first = 0;
    while (first < step_count && left_out[first])
        first++;
    atomic_store(&shared->turn, (unsigned)first);
    make_first_files();
    if (strcmp(mode, "pair") == 0) {
        play_in_turns();
    } else {
        for (int number = first; number < step_count && !atomic_load(&shared->stopped); number++) {
            if (left_out[number])
                continue;
            begin_step(number);
            play_one();
        }
        end();
    }
    say_files();
}

static void play_program(void)
{
    target = mmap(NULL, LARGEST + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (seed % 4 == 1)
        install_handlers();
    begin();
    if (strcmp(mode, "saves") == 0)
        play_saves();
    else if (strcmp(mode, "look") == 0)
        say_files();
    else
        play_steps();
}

/* ------------------------------------------------------------------------------ all programs */

static void empty_directory(void)
{
    DIR *list = opendir(".");
    struct dirent *entry;
    while (list != NULL && (entry = readdir(list)) != NULL)
        if (entry->d_name[0] != '.')
            unlink(entry->d_name);
    if (list != NULL)
        closedir(list);
}

static void run_program(void)
{
    int status = 0;
    memset(shared, 0, sizeof *shared - LOG_BYTES);
    pid_t child = fork();
    if (child == 0) {
        setpgid(0, 0);
        be_killed_with_parent();
        alarm(PATIENCE_SECONDS);
        play_program();
        _exit(0);
    }
    waitpid(child, &status, 0);
    kill(-child, SIGKILL);
    unsigned used = atomic_load(&shared->used);
    int code = WIFSIGNALED(status) ? 1000 + WTERMSIG(status) : WEXITSTATUS(status);
    printf("program %llu %d\n", (unsigned long long)seed, code);
    fwrite(shared->text, 1, used < LOG_BYTES ? used : LOG_BYTES, stdout);
    fflush(stdout);
}

static void keep_steps(char *list)
{
    memset(left_out, true, sizeof left_out);
    for (char *part = strtok(list, ","); part != NULL; part = strtok(NULL, ",")) {
        int first, last;
        int count = sscanf(part, "%d-%d", &first, &last);
        if (count < 1)
            continue;
        for (int i = first; i <= (count == 2 ? last : first) && i < STEPS_MAX; i++)
            left_out[i] = false;
    }
}

static void set_option(char *option)
{
    char *value = strchr(option, '=') + 1;
    if (strncmp(option, "steps=", 6) == 0 && atoi(value) < STEPS_MAX)
        step_count = atoi(value);
    else if (strncmp(option, "only=", 5) == 0)
        only = value;
    else if (strncmp(option, "without=", 8) == 0)
        without = value;
    else if (strncmp(option, "keep=", 5) == 0)
        keep_steps(value);
    else if (strncmp(option, "mode=", 5) == 0)
        mode = value;
    else if (strncmp(option, "strict=", 7) == 0)
        strict = atoi(value) != 0;
    else
        exit(2);
}

/* The same in all ways, from the beginning of the process on: numbers above it are nobody's. */
static void limit_descriptors(char **argv)
{
    struct rlimit limit = {DESCRIPTORS, DESCRIPTORS}, now;
    if (getrlimit(RLIMIT_NOFILE, &now) == 0 && now.rlim_cur == DESCRIPTORS)
        return;
    if (setrlimit(RLIMIT_NOFILE, &limit) == 0)
        execv("/proc/self/exe", argv);
    exit(3);
}

/* Seen by every process of every program, whatever it closes or executes. */
static void make_world(void)
{
    int fd = memfd_create("world", 0);
    if (fd < 0 || dup2(fd, WORLD_FD) < 0 || ftruncate(fd, sizeof *shared + SOURCE_BYTES) != 0)
        exit(3);
    close(fd);
    shared = mmap(NULL, sizeof *shared + SOURCE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, WORLD_FD, 0);
    source = (uint8_t *)(shared + 1);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "child") == 0)
        return exec_child(argc, argv);
    if (argc < 3 || chdir(argv[1]) != 0)
        return 2;
    limit_descriptors(argv);
    make_world();
    for (size_t i = 0; i < SOURCE_BYTES; i += 8) {
        uint64_t word = mix(i);
        memcpy(source + i, &word, 8);
    }
    int next = 2;
    for (; next < argc && strchr(argv[next], '=') != NULL; next++)
        set_option(argv[next]);
    choose_kinds();
    bool keeps_files = strcmp(mode, "saves") == 0 || strcmp(mode, "look") == 0;
    for (; next < argc; next++) {
        seed = strtoull(argv[next], NULL, 0);
        if (!keeps_files)
            empty_directory();
        run_program();
    }
    if (!keeps_files)
        empty_directory();
    return 0;
}
