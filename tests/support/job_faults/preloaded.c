/* preloaded.c - beside a daemon of a test (LD_PRELOAD): keeps what its medium, an ordinary file that
 * is mapped, is sure to have kept when the power fails, and sets its clock back.
 *
 * Beside SOURCE lies SOURCE.durable. What stands in the pages that msync covers, when it begins, is
 * there when it returns, as long later as a disk would take: so it has everything that was stored
 * before an msync which has returned, and nothing that never was stored. What differs between the two
 * files at any moment is what a power cut may take, or leave.
 *
 * CXLFS_TEST_CLOCK_BACK_SECONDS: so much earlier is it for this process.
 * CXLFS_TEST_MEDIUM_FORGETS: the medium lies, and keeps nothing of what msync covered.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { DISK_MICROSECONDS = 1000 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uintptr_t begin, end; /* of the mapping that was met last, */
static uint64_t origin;      /* where it begins in its file, */
static int kept = -1;        /* and what lies beside that; -1: nothing does */

/* The mapping around an address, from /proc/self/maps. */
static void find(uintptr_t address)
{
    char line[PATH_MAX + 256], path[PATH_MAX + 16];
    FILE *maps = fopen("/proc/self/maps", "re");
    begin = end = 0;
    if (kept >= 0)
        close(kept);
    kept = -1;
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        int name = 0;
        uintptr_t low, high;
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %*s %" SCNx64 " %*s %*s %n", &low, &high, &origin, &name) < 3 ||
            address < low || address >= high)
            continue;
        line[strcspn(line, "\n")] = 0;
        snprintf(path, sizeof path, "%s.durable", line + name);
        begin = low;
        end = high;
        kept = name != 0 && getenv("CXLFS_TEST_MEDIUM_FORGETS") == NULL ? open(path, O_RDWR | O_CLOEXEC) : -1;
        break;
    }
    if (maps != NULL)
        fclose(maps);
}

/* 0, or -1: it was not kept. */
static int keep(const void *address, size_t length)
{
    uintptr_t first = (uintptr_t)address;
    if (first < begin || first >= end)
        find(first);
    if (kept < 0)
        return 0;
    char *standing = malloc(length);
    if (standing == NULL)
        return -1;
    memcpy(standing, address, length);
    usleep(DISK_MICROSECONDS);
    size_t done = 0;
    while (done < length) {
        off_t offset = (off_t)(origin + (first - begin) + done);
        ssize_t moved = pwrite(kept, standing + done, length - done, offset);
        if (moved <= 0)
            break;
        done += (size_t)moved;
    }
    free(standing);
    return done == length ? 0 : -1;
}

int msync(void *address, size_t length, int flags)
{
    pthread_mutex_lock(&lock);
    int result = keep(address, length);
    pthread_mutex_unlock(&lock);
    if (result != 0) {
        errno = EIO;
        return -1;
    }
    return (int)syscall(SYS_msync, address, length, flags);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    const char *back = getenv("CXLFS_TEST_CLOCK_BACK_SECONDS");
    if (result == 0 && clock == CLOCK_REALTIME && back != NULL)
        now->tv_sec -= atol(back);
    return result;
}
