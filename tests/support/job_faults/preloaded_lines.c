/* preloaded_lines.c - beside the daemons and the ranks of a test (LD_PRELOAD): an ordinary file is persistent memory
 * that is mapped directly, and keeps what its medium is sure to have kept when the power fails.
 *
 * A file beside which SOURCE.durable lies can be mapped with MAP_SYNC, so that programs write lines of it back and
 * fence, as on a DAX device. In their table of routines (csrc/persist) write-back and fence are those below: what
 * stands in a line when it is written back is in SOURCE.durable when that thread has fenced, a little later. What was
 * stored and not written back, or not fenced, is not. What differs between the two files at any moment is what a power
 * cut may take, or leave.
 *
 * Several processes store into one medium. So each write-back has a number, which lies in SOURCE.lines beside the
 * lock: of two write-backs of a line the one that began later has seen what the other has, and is not overwritten.
 *
 * CXLFS_TEST_MEDIUM_FORGETS: the medium lies, and keeps nothing of what was fenced.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "persist/persist.h"

enum { MAPPINGS = 64, FENCE_MICROSECONDS = 50 };

typedef struct {
    _Atomic uint64_t next;       /* number of the next write-back */
    atomic_flag lock;
    uint64_t settled[];          /* of each line: the number of the write-back that is durable */
} numbers;

typedef struct {
    uintptr_t begin, end;        /* 0: not in use */
    uint8_t *durable;
    numbers *lines;
} mapping;

typedef struct {
    mapping where;
    uint64_t line, number;
    uint8_t content[CXL_LINE];
} written_back;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static mapping mappings[MAPPINGS];
static __thread written_back *waiting;       /* written back by this thread, and not fenced */
static __thread size_t count, room;

static void fail(const char *what)
{
    fprintf(stderr, "preloaded_lines: %s\n", what);
    abort();
}

/* ------------------------------------------------------------------------- the medium's side */

static void line_write_back(const void *address, size_t length)
{
    uintptr_t first = (uintptr_t)address & ~(uintptr_t)(CXL_LINE - 1), end = (uintptr_t)address + length;
    mapping found = {0};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAPPINGS && found.end == 0; i++) {
        if (first >= mappings[i].begin && first < mappings[i].end)
            found = mappings[i];
    }
    pthread_mutex_unlock(&lock);
    if (found.end == 0)
        fail("write-back of what is not mapped");
    uint64_t number = atomic_fetch_add(&found.lines->next, 1) + 1;
    for (; first < end; first += CXL_LINE) {
        if (count == room) {
            room = room == 0 ? 256 : 2 * room;
            waiting = realloc(waiting, room * sizeof *waiting);
            if (waiting == NULL)
                fail("no memory");
        }
        written_back *entry = &waiting[count++];
        entry->where = found;
        entry->line = (first - found.begin) / CXL_LINE;
        entry->number = number;
        memcpy(entry->content, (const void *)first, CXL_LINE);
    }
}

static void line_fence(void)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (count == 0)
        return;
    usleep(FENCE_MICROSECONDS);
    for (size_t i = 0; i < count && getenv("CXLFS_TEST_MEDIUM_FORGETS") == NULL; i++) {
        const written_back *entry = &waiting[i];
        numbers *lines = entry->where.lines;
        while (atomic_flag_test_and_set(&lines->lock))
            sched_yield();
        if (lines->settled[entry->line] < entry->number) {
            lines->settled[entry->line] = entry->number;
            memcpy(entry->where.durable + entry->line * CXL_LINE, entry->content, CXL_LINE);
        }
        atomic_flag_clear(&lines->lock);
    }
    count = 0;
}

/* ------------------------------------------------------------- the routines of the extension */

/* Where a symbol that is not exported lies in the extension, from its table of all symbols. */
static void *hidden(const char *path, uintptr_t base, const char *name)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat file;
    if (fd < 0 || fstat(fd, &file) != 0)
        fail("the extension cannot be read");
    const uint8_t *image = (void *)syscall(SYS_mmap, NULL, file.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (image == MAP_FAILED)
        fail("the extension cannot be mapped");
    const ElfW(Ehdr) *header = (const void *)image;
    const ElfW(Shdr) *sections = (const void *)(image + header->e_shoff);
    uintptr_t found = 0;
    for (int i = 0; i < header->e_shnum; i++) {
        if (sections[i].sh_type != SHT_SYMTAB)
            continue;
        const ElfW(Sym) *symbols = (const void *)(image + sections[i].sh_offset);
        const char *names = (const char *)image + sections[sections[i].sh_link].sh_offset;
        for (size_t j = 0; j < sections[i].sh_size / sizeof *symbols; j++) {
            if (strcmp(names + symbols[j].st_name, name) == 0)
                found = base + symbols[j].st_value;
        }
    }
    syscall(SYS_munmap, image, file.st_size);
    if (found == 0)
        fail("the extension was stripped of its symbols");
    return (void *)found;
}

static int take_over(struct dl_phdr_info *library, size_t size, void *argument)
{
    (void)size;
    (void)argument;
    const char *name = strrchr(library->dlpi_name, '/');
    if (name == NULL || strncmp(name, "/_native.", 9) != 0)
        return 0;
    cxl_routines *table = hidden(library->dlpi_name, library->dlpi_addr, "cxl_table");
    table->copy_lines = (void (*)(void *, const void *, size_t))hidden(
        library->dlpi_name, library->dlpi_addr, "cxl_copy_lines_plain");
    table->copy_lines_crc = NULL;
    table->write_back = line_write_back;
    table->fence = line_fence;
    return 1;
}

/* ------------------------------------------------------------------------------- the mapping */

static void *map(const char *path, size_t length, bool make)
{
    int fd = open(path, O_RDWR | O_CLOEXEC | (make ? O_CREAT : 0), 0600);
    if (fd < 0)
        return NULL;
    struct stat file;
    if (fstat(fd, &file) != 0 || ((size_t)file.st_size < length && ftruncate(fd, (off_t)length) != 0))
        fail("what lies beside the medium is too short");
    void *found = (void *)syscall(SYS_mmap, NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return found == MAP_FAILED ? NULL : found;
}

static bool beside(int fd, size_t length, mapping *found)
{
    char link[64], path[PATH_MAX], name[PATH_MAX + 16];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size <= 0)
        return false;
    path[size] = '\0';
    snprintf(name, sizeof name, "%s.durable", path);
    found->durable = access(name, F_OK) == 0 ? map(name, length, false) : NULL;
    if (found->durable == NULL)
        return false;
    snprintf(name, sizeof name, "%s.lines", path);
    found->lines = map(name, sizeof(numbers) + length / CXL_LINE * sizeof(uint64_t), true);
    return found->lines != NULL;
}

void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset)
{
    mapping found;
    bool is_medium = (flags & MAP_SHARED_VALIDATE) == MAP_SHARED_VALIDATE && (flags & MAP_SYNC) != 0 &&
                     beside(fd, length, &found);
    if (is_medium)
        flags = (flags & ~(MAP_SHARED_VALIDATE | MAP_SYNC)) | MAP_SHARED;
    void *place = (void *)syscall(SYS_mmap, address, length, protection, flags, fd, offset);
    if (!is_medium || place == MAP_FAILED)
        return place;
    found.begin = (uintptr_t)place;
    found.end = found.begin + length;
    int unused = 0;
    pthread_mutex_lock(&lock);
    while (unused < MAPPINGS && mappings[unused].end != 0)
        unused++;
    if (unused == MAPPINGS)
        fail("too many mappings");
    mappings[unused] = found;
    pthread_mutex_unlock(&lock);
    if (dl_iterate_phdr(take_over, NULL) == 0)
        fail("there is no extension");
    return place;
}

void *mmap64(void *address, size_t length, int protection, int flags, int fd, off_t offset)
{
    return mmap(address, length, protection, flags, fd, offset);
}

int munmap(void *address, size_t length)
{
    uintptr_t begin = (uintptr_t)address;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAPPINGS; i++) {
        if (mappings[i].end != 0 && mappings[i].begin >= begin && mappings[i].end <= begin + length)
            mappings[i].end = 0;
    }
    pthread_mutex_unlock(&lock);
    return (int)syscall(SYS_munmap, address, length);
}
