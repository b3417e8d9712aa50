/* report.c - says what the library did: a line for each way that large writes went (CXLFS_RUN_LOG), and counts in a
 * file that all processes share (CXLFS_RUN_COUNTS), so that one that is killed has told what it did until then.
 *
 * Does not: print anything that was not asked for; keep a file open; use stdio, whose stack is not small.
 *
 * Invariants
 * - A line is one write at the end of the file: lines of several processes do not mix.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "run/run.h"

enum { LINE = 512, PATH_BYTES = 512 };

static char log_path[PATH_BYTES];
static run_counts *counts;

static const char *const REASONS[RUN_REASONS] = {
    [RUN_DIRECT] = "direct",
    [RUN_NOT_TRUSTED] = "the mount is neither root's nor this user's",
    [RUN_NOT_PERMITTED] = "this user may not open the medium",
    [RUN_NO_MEDIUM] = "the medium cannot be opened or mapped from here",
    [RUN_SMALL_PAGES] = "the medium is mapped in pages of 4 KiB",
    [RUN_NO_SPACE] = "the daemon gives no space just now",
    [RUN_NOT_ALONE] = "others have the file open",
    [RUN_OTHER_HANDLERS] = "the program handles SIGSEGV or SIGBUS by itself",
    [RUN_BUSY] = "another thread writes to the same file",
    [RUN_NOT_TAKEN] = "the daemon did not take the bytes in",
};

/* ----------------------------------------------------------------------------------- text */

typedef struct {
    char text[LINE];
    size_t length;
} line;

static void add(line *out, const char *text)
{
    for (; *text != '\0' && out->length < LINE - 1; text++)
        out->text[out->length++] = *text;
}

static void add_number(line *out, uint64_t value)
{
    char digits[24];
    size_t at = sizeof digits;
    digits[--at] = '\0';
    do {
        digits[--at] = (char)('0' + value % 10);
        value /= 10;
    } while (value > 0);
    add(out, digits + at);
}

/* What is not printable ASCII becomes a question mark. */
static void add_name(line *out, const char *name)
{
    for (; *name != '\0' && out->length < LINE / 2; name++) {
        char letter[2] = {(unsigned char)*name < ' ' || (unsigned char)*name >= 0x7f ? '?' : *name, '\0'};
        add(out, letter);
    }
}

static void append(const char *path, const line *said)
{
    bool to_stderr = strcmp(path, "stderr") == 0;
    int flags = O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY;
    long fd = to_stderr ? STDERR_FILENO : syscall(SYS_openat, AT_FDCWD, path, flags, 0666);
    if (fd < 0)
        return;
    (void)!syscall(SYS_write, fd, said->text, said->length);
    if (!to_stderr)
        (void)syscall(SYS_close, fd);
}

/* ---------------------------------------------------------------------------------- saying */

void run_report_begin(void)
{
    const char *log = getenv("CXLFS_RUN_LOG"), *path = getenv("CXLFS_RUN_COUNTS");
    if (log != NULL && strlen(log) < PATH_BYTES)
        strcpy(log_path, log);
    long fd = path != NULL ? syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0) : -1;
    if (fd < 0)
        return;
    struct stat file;
    if (fstat((int)fd, &file) == 0 && file.st_size >= (off_t)sizeof *counts) {
        void *shared = mmap(NULL, sizeof *counts, PROT_READ | PROT_WRITE, MAP_SHARED, (int)fd, 0);
        counts = shared != MAP_FAILED ? shared : NULL;
    }
    (void)syscall(SYS_close, fd);
}

static __attribute__((noinline)) void say(run_reason reason)
{
    line said = {.length = 0};
    add(&said, "cxlfs run: ");
    add_name(&said, program_invocation_short_name);
    add(&said, "[");
    add_number(&said, (uint64_t)syscall(SYS_getpid));
    add(&said, reason == RUN_DIRECT ? "]: writes directly" : "]: writes through the kernel: ");
    if (reason != RUN_DIRECT)
        add(&said, REASONS[reason]);
    add(&said, "\n");
    append(log_path, &said);
}

void run_count(run_reason reason, uint64_t bytes)
{
    if (bytes == 0)
        return;
    if (counts != NULL) {
        atomic_fetch_add(reason == RUN_DIRECT ? &counts->direct_bytes : &counts->kernel_bytes, bytes);
        if (reason != RUN_DIRECT)
            strcpy(counts->reasons[reason], REASONS[reason]);
        if (atomic_exchange(&run_all->is_counted, 1) == 0)
            atomic_fetch_add(&counts->processes, 1);
    }
    if (log_path[0] != '\0' && (atomic_fetch_or(&run_all->said, 1U << reason) >> reason & 1) == 0)
        say(reason);
}

void run_count_lease(void)
{
    if (counts != NULL)
        atomic_fetch_add(&counts->leases, 1);
}
