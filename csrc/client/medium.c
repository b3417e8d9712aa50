/* medium.c - finds the medium that a daemon has named, and opens it, as far as the kernel lets this process.
 *
 * Never: opens for writing what is not what the daemon has open, or what a stranger's file system names.
 *
 * Invariants
 * - Nothing is opened but to look at its kind (O_PATH) before its numbers were compared: opening alone does things
 *   to some devices.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "client/parts.h"

/* Where descriptors of programs that count theirs, or close all that are below a number, are seldom found. */
enum { DESCRIPTOR_FROM = 512 };
enum { DAX_GRANULE = 2 << 20 };
enum { HUGETLBFS = 0x958458f6 };

bool medium_is(int fd, const cxl_direct_attach *identity)
{
    struct stat found;
    return fstat(fd, &found) == 0 && found.st_dev == identity->device && found.st_ino == identity->inode &&
           found.st_rdev == identity->special_device;
}

static bool is_dax_device(const struct stat *file)
{
    char path[64], target[256];
    snprintf(path, sizeof path, "/sys/dev/char/%u:%u/subsystem", major(file->st_rdev), minor(file->st_rdev));
    ssize_t length = readlink(path, target, sizeof target - 1);
    if (length <= 0)
        return false;
    target[length] = '\0';
    const char *name = strrchr(target, '/');
    return strcmp(name != NULL ? name + 1 : target, "dax") == 0;
}

static bool can_be_a_medium(int fd)
{
    struct stat file;
    if (fstat(fd, &file) != 0)
        return false;
    return S_ISREG(file.st_mode) || S_ISBLK(file.st_mode) || (S_ISCHR(file.st_mode) && is_dax_device(&file));
}

int medium_open(const cxl_direct_attach *identity)
{
    const char *path = (const char *)identity->path;
    char again[64];
    if (memchr(identity->path, 0, sizeof identity->path) == NULL || *path != '/')
        return -ENXIO;
    int looked_at = open(path, O_PATH | O_CLOEXEC);
    if (looked_at < 0)
        return -errno;
    if (!medium_is(looked_at, identity) || !can_be_a_medium(looked_at)) {
        close(looked_at);
        return -ENXIO;
    }
    snprintf(again, sizeof again, "/proc/self/fd/%d", looked_at);
    int fd = open(again, O_RDWR | O_CLOEXEC);
    int result = fd < 0 ? -errno : fd;
    close(looked_at);
    if (fd < 0)
        return result;
    int high = fcntl(fd, F_DUPFD_CLOEXEC, DESCRIPTOR_FROM);
    if (high < 0)
        return fd;
    close(fd);
    return high;
}

/* Device DAX and hugetlbfs map in multiples of their own, and nothing else is permitted or forbidden there. */
uint64_t medium_granule(int fd)
{
    struct stat file;
    struct statfs system;
    char path[96], text[32] = "";
    if (fstatfs(fd, &system) == 0 && (uint32_t)system.f_type == HUGETLBFS)
        return (uint64_t)system.f_bsize;
    if (fstat(fd, &file) != 0 || !S_ISCHR(file.st_mode))
        return (uint64_t)sysconf(_SC_PAGESIZE);
    snprintf(path, sizeof path, "/sys/dev/char/%u:%u/align", major(file.st_rdev), minor(file.st_rdev));
    int attribute = open(path, O_RDONLY | O_CLOEXEC);
    if (attribute >= 0) {
        if (read(attribute, text, sizeof text - 1) < 0)
            text[0] = '\0';
        close(attribute);
    }
    uint64_t align = strtoull(text, NULL, 0);
    return align != 0 && (align & (align - 1)) == 0 ? align : DAX_GRANULE;
}
