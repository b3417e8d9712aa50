/* mounts.c - tells who mounted a file system, from the table that the kernel keeps (/proc/self/mountinfo).
 *
 * A FUSE server answers for its mount, and so can name any medium. An ordinary user can mount one, choose the name of
 * its source, and have root's program open a file there. So a program follows only mounts of cxlfs that root or its own
 * user made, by the word of the kernel.
 *
 * Does not: allocate, lock, use stdio: it may run in a signal handler, or in a child of vfork.
 *
 * Invariants
 * - Fields are told apart by single spaces: the kernel escapes spaces inside of names (\040). What another user chooses
 *   (mount point, source) is never read.
 * - In the last field the kernel itself writes user_id, after everything else that a name may be part of.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "client/parts.h"

static const char SYSTEM[] = "fuse.cxlfs", OWNER[] = "user_id=";

enum { WORD_BYTES = 32, READ_BYTES = 256 };
enum { DEVICE_FIELD = 2, OPTIONAL_FIELDS = 6 };     /* "36 35 98:0 /root /mount options [optional ...] - ..." */
enum { AFTER_TYPE = 1, AFTER_SOURCE, AFTER_OPTIONS }; /* "... - fuse.type source options" */

typedef struct {
    uint64_t device;             /* of the mount that is looked for */
    char word[WORD_BYTES];       /* the current one; what is longer is none that matters */
    uint32_t length;
    uint32_t field;              /* fields before it on its line, */
    uint32_t after;              /* and since the separator, with that; 0: before it */
    bool is_wanted, is_cxlfs;
    int64_t owner;               /* -1: none so far */
} mount_table;

/* Decimal digits up to end, or -1. */
static int64_t number(const char *from, const char *end)
{
    int64_t value = 0;
    if (from == end || end - from > 10)
        return -1;
    for (; from < end; from++) {
        if (*from < '0' || *from > '9')
            return -1;
        value = value * 10 + (*from - '0');
    }
    return value;
}

static bool is_device(const mount_table *table)
{
    const char *end = table->word + table->length, *colon = memchr(table->word, ':', table->length);
    return colon != NULL && number(table->word, colon) == (int64_t)major(table->device) &&
           number(colon + 1, end) == (int64_t)minor(table->device);
}

static bool is_word(const mount_table *table, const char *text)
{
    return table->length == strlen(text) && memcmp(table->word, text, table->length) == 0;
}

static void end_word(mount_table *table)
{
    size_t prefix = strlen(OWNER);
    bool known = table->length < WORD_BYTES;
    if (table->after == AFTER_OPTIONS && known && table->length >= prefix && memcmp(table->word, OWNER, prefix) == 0)
        table->owner = number(table->word + prefix, table->word + table->length);
    else if (table->after == AFTER_TYPE)
        table->is_cxlfs = known && is_word(table, SYSTEM);
    else if (table->after == 0 && table->field == DEVICE_FIELD)
        table->is_wanted = known && is_device(table);
    table->length = 0;
}

static void end_field(mount_table *table)
{
    bool separates = table->after == 0 && table->field >= OPTIONAL_FIELDS && is_word(table, "-");
    end_word(table);
    table->field++;
    if (table->after != 0 || separates)
        table->after++;
}

/* True at the end of the line that is looked for. */
static bool take(mount_table *table, char byte)
{
    if (byte == '\n') {
        bool is_whole = table->after == AFTER_OPTIONS;
        end_word(table);
        if (table->is_wanted && is_whole)
            return true;
        *table = (mount_table){.device = table->device, .owner = -1};
    } else if (byte == ' ') {
        end_field(table);
    } else if (byte == ',' && table->after == AFTER_OPTIONS) {
        end_word(table);
    } else {
        if (table->length < WORD_BYTES)
            table->word[table->length] = byte;
        table->length += table->length < WORD_BYTES;
    }
    return false;
}

int64_t mount_owner(int mounts, uint64_t device)
{
    char bytes[READ_BYTES];
    mount_table table = {.device = device, .owner = -1};
    for (;;) {
        long got = syscall(SYS_read, mounts, bytes, sizeof bytes);
        if (got <= 0)
            return -1;
        for (long i = 0; i < got; i++)
            if (take(&table, bytes[i]))
                return table.is_cxlfs ? table.owner : -1;
    }
}

/* Numbers of users in the table are those of the mount's namespace: they are this process's too if that is the first
 * one, where all numbers are themselves. */
static bool has_all_users(void)
{
    static const char ALL[] = "         0          0 4294967295\n";
    char text[sizeof ALL];
    long map = syscall(SYS_openat, AT_FDCWD, "/proc/self/uid_map", O_RDONLY | O_CLOEXEC, 0);
    if (map < 0)
        return false;
    long got = syscall(SYS_read, map, text, sizeof text);
    (void)syscall(SYS_close, map);
    return got == (long)sizeof ALL - 1 && memcmp(text, ALL, sizeof ALL - 1) == 0;
}

int mount_trust(uint64_t device)
{
    long mounts = syscall(SYS_openat, AT_FDCWD, "/proc/self/mountinfo", O_RDONLY | O_CLOEXEC, 0);
    if (mounts < 0)
        return -EPERM;
    int64_t owner = mount_owner((int)mounts, device);
    (void)syscall(SYS_close, mounts);
    if (owner == 0 || (owner > 0 && owner == syscall(SYS_geteuid) && has_all_users()))
        return 0;
    return owner < 0 ? -ENOTTY : -EPERM;
}
