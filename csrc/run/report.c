/* report.c - what the library says: a line for each mount (CXLFS_RUN_LOG), a line of JSON at the end
 * (CXLFS_RUN_REPORT).
 *
 * Never: prints anything that was not asked for; keeps a file open.
 *
 * Invariants
 * - A line is one write at the end of the file: lines of several processes do not mix.
 * - What was reported before an exec that failed is not reported again.
 */
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "run/run.h"

enum { LINE = 1024 };

static cxl_client_counts reported, at_fork;
static atomic_uint_least64_t mapped_bytes, mapped_reported;
static char report_path[LINE], log_path[LINE];

static void remember(const char *name, char *path)
{
    const char *value = getenv(name);
    path[0] = '\0';
    if (value != NULL && strlen(value) < LINE)
        strcpy(path, value);
}

void run_report_begin(void)
{
    remember("CXLFS_RUN_REPORT", report_path);
    remember("CXLFS_RUN_LOG", log_path);
}

/* Asked before, and not in the child: there the client may not have got over the fork yet. */
void run_report_before_fork(void)
{
    cxl_client_statistics(&at_fork);
}

void run_report_forget_in_child(void)
{
    reported = at_fork;
    atomic_store(&mapped_reported, atomic_load(&mapped_bytes));
}

static void append(const char *path, const char *line, size_t length)
{
    bool to_stderr = strcmp(path, "stderr") == 0;
    int fd = to_stderr ? STDERR_FILENO : REAL(open)(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY, 0666);
    if (fd < 0)
        return;
    if (REAL(write)(fd, line, length) < 0)
        errno = 0;
    if (!to_stderr)
        REAL(close)(fd);
}

void run_log(const char *format, ...)
{
    char line[LINE];
    va_list arguments;
    int length;
    if (log_path[0] == '\0')
        return;
    length = snprintf(line, sizeof line, "cxlfs run: %s[%d]: ", program_invocation_short_name, (int)getpid());
    if (length < 0 || length >= LINE)
        return;
    va_start(arguments, format);
    int more = vsnprintf(line + length, (size_t)(LINE - length - 1), format, arguments);
    va_end(arguments);
    if (more < 0)
        return;
    length += more < LINE - length - 2 ? more : LINE - length - 2;
    for (int i = 0; i < length; i++) {
        if ((unsigned char)line[i] < ' ')
            line[i] = '?';
    }
    line[length++] = '\n';
    append(log_path, line, (size_t)length);
}

void run_count_mapped(uint64_t bytes)
{
    atomic_fetch_add(&mapped_bytes, bytes);
}

/* A name as JSON has it; what is not printable ASCII becomes a question mark. */
static void quote(char *out, size_t room, const char *name)
{
    size_t length = 0;
    for (; *name != '\0' && length + 3 < room; name++) {
        unsigned char letter = (unsigned char)*name;
        if (letter == '"' || letter == '\\')
            out[length++] = '\\';
        out[length++] = letter >= ' ' && letter < 0x7f ? (char)letter : '?';
    }
    out[length] = '\0';
}

void run_report_end(void)
{
    cxl_client_counts now;
    char line[LINE], program[128];
    run_visit visit;
    if (report_path[0] == '\0' || run_process != getpid() || !run_enter(&visit))
        return;
    cxl_client_statistics(&now);
    uint64_t mapped = atomic_load(&mapped_bytes);
    quote(program, sizeof program, program_invocation_short_name);
    int length = snprintf(
        line, sizeof line,
        "{\"program\": \"%s\", \"pid\": %d, \"direct_bytes\": %llu, \"fuse_bytes\": %llu, \"mapped_bytes\": %llu, "
        "\"copied_bytes\": %llu, \"verified_bytes\": %llu, \"read_bytes\": %llu, \"leases\": %llu, "
        "\"settles\": %llu, \"refused\": %llu, \"last_errno\": %d}\n",
        program, (int)run_process, (unsigned long long)(now.direct_bytes - reported.direct_bytes),
        (unsigned long long)(now.fuse_bytes - reported.fuse_bytes),
        (unsigned long long)(mapped - atomic_load(&mapped_reported)),
        (unsigned long long)(now.copied_bytes - reported.copied_bytes),
        (unsigned long long)(now.verified_bytes - reported.verified_bytes),
        (unsigned long long)(now.read_bytes - reported.read_bytes),
        (unsigned long long)(now.leases - reported.leases), (unsigned long long)(now.settles - reported.settles),
        (unsigned long long)(now.refused - reported.refused), (int)now.last_errno);
    if (length > 0 && length < LINE)
        append(report_path, line, (size_t)length);
    reported = now;
    atomic_store(&mapped_reported, mapped);
    run_leave(&visit);
}
