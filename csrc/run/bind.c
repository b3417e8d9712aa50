/* bind.c - what a descriptor is, and whether its mount lets this process store into the medium.
 *
 * Never: sends a request of cxlfs to a file system that is not FUSE; asks a mount again that has said no to the user.
 *
 * Invariants
 * - A mount is logged once when it is used directly, and once when it is not, with the reason.
 * - Files for appending, with synchronous writes, or that a write takes rights away from, go through the kernel.
 */
#include <fcntl.h>
#include <string.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>

#include "run/run.h"

enum { MOUNTS = 64 };
enum { BIND_FROM = 64 << 10 };   /* bytes of a file before its mount is asked for anything */
/* The same of a file that is read: where the medium is mapped already, where it is not, and after it was refused for
 * now; and as a part of a large file, of which there is more to be told. */
enum { READ_FROM = 1 << 20, READ_FIRST_FROM = 8 << 20, READ_AGAIN_FROM = 64 << 20, READ_PART = 256 };

static const long FUSE_MAGIC = 0x65735546;
static run_mount mounts[MOUNTS];
static atomic_int mount_count;
static pthread_mutex_t mounts_lock = PTHREAD_MUTEX_INITIALIZER;

static bool look_at(int fd, struct statx *found)
{
    unsigned wanted = STATX_TYPE | STATX_MODE | STATX_INO | STATX_SIZE;
    return statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, wanted, found) == 0;
}

dev_t run_device_of(const struct statx *found)
{
    return makedev(found->stx_dev_major, found->stx_dev_minor);
}

bool run_is_still(int fd, dev_t device, ino_t inode)
{
    struct statx found;
    return look_at(fd, &found) && found.stx_ino == inode && run_device_of(&found) == device;
}

void run_tell_kernel(int fd)
{
    struct statx found;
    (void)!statx(fd, "", AT_EMPTY_PATH | AT_STATX_FORCE_SYNC, STATX_SIZE, &found);
}

run_mount *run_mount_of(int fd, dev_t device)
{
    struct statfs kind;
    int count = atomic_load_explicit(&mount_count, memory_order_acquire);
    for (int i = 0; i < count; i++) {
        if (mounts[i].device == device)
            return &mounts[i];
    }
    if (fstatfs(fd, &kind) != 0 || kind.f_type != FUSE_MAGIC)
        return NULL;
    run_mount *found = NULL;
    pthread_mutex_lock(&mounts_lock);
    count = atomic_load(&mount_count);
    for (int i = 0; i < count && found == NULL; i++) {
        if (mounts[i].device == device)
            found = &mounts[i];
    }
    if (found == NULL && count < MOUNTS) {
        found = &mounts[count];
        found->device = device;
        atomic_store(&found->verdict, 0);
        atomic_store(&found->no_private, false);
        atomic_store_explicit(&mount_count, count + 1, memory_order_release);
    }
    pthread_mutex_unlock(&mounts_lock);
    return found;
}

/* Errors that say something of the mount and this process, and not of one file at one moment. */
static bool is_of_mount(int result)
{
    switch (-result) {
    case ENOTTY: case ENOSYS: case EPERM: case EACCES: case ENOENT: case ENXIO: case EOPNOTSUPP: case EPROTO:
        return true;
    default:
        return false;
    }
}

static void name_of(int fd, char *name, size_t length)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t got = readlink(link, name, length - 1);
    name[got > 0 ? got : 0] = '\0';
}

void run_judge(run_mount *mount, int fd, int result)
{
    char name[512];
    int before = 0, verdict = result == 0 ? 1 : result;
    if (result != 0 && !is_of_mount(result))
        return;
    if (!atomic_compare_exchange_strong(&mount->verdict, &before, verdict))
        return;
    name_of(fd, name, sizeof name);
    if (result == 0)
        run_log("mount %u:%u: direct (%s)", major(mount->device), minor(mount->device), name);
    else
        run_log("mount %u:%u: through the kernel: %s (%s)", major(mount->device), minor(mount->device),
                strerror(-result), name);
}

static bool is_ordinary(int flags)
{
    return flags >= 0 && (flags & (O_APPEND | O_DSYNC | O_PATH)) == 0;
}

static uint64_t read_bind_from(const run_mount *mount, uint64_t size)
{
    uint64_t least = atomic_load(&mount->verdict) > 0 ? READ_FROM : READ_FIRST_FROM;
    return size / READ_PART > least ? size / READ_PART : least;
}

uintptr_t run_examine(int fd, run_file *file)
{
    struct statx found;
    if (!look_at(fd, &found) || !S_ISREG(found.stx_mode) || (found.stx_mode & (S_ISUID | S_ISGID)) != 0)
        return RUN_NOBODY;
    run_mount *mount = run_mount_of(fd, run_device_of(&found));
    if (mount == NULL || atomic_load(&mount->verdict) < 0)
        return RUN_NOBODY;
    int flags = REAL(fcntl)(fd, F_GETFL);
    if (!is_ordinary(flags))
        return RUN_NOBODY;
    file->reads = (flags & O_ACCMODE) == O_RDONLY;
    file->bind_from = file->reads ? read_bind_from(mount, found.stx_size) : BIND_FROM;
    file->device = run_device_of(&found);
    file->inode = found.stx_ino;
    file->mount = mount;
    return (uintptr_t)file;
}

bool run_bind(run_file *file, int fd)
{
    if (file->direct != NULL)
        return true;
    if (file->refused || file->reads || atomic_load(&file->seen) < file->bind_from)
        return false;
    int result = atomic_load(&file->mount->verdict) < 0 ? -ENOTTY : 0;
    if (result == 0 && !is_ordinary(REAL(fcntl)(fd, F_GETFL)))
        result = -EBUSY;
    if (result == 0)
        result = cxl_direct_open(fd, &file->direct);
    run_judge(file->mount, fd, result);
    file->refused = result != 0;
    file->anchor = fd;
    return result == 0;
}

bool run_bind_reader(run_file *file, int fd)
{
    if (file->reader != NULL)
        return true;
    if (file->refused || !run_set.reads || atomic_load(&file->seen) < file->bind_from)
        return false;
    int result = atomic_load(&file->mount->verdict) < 0 ? -ENOTTY : cxl_reader_open(fd, &file->reader);
    run_judge(file->mount, fd, result);
    atomic_store(&file->seen, 0);
    file->bind_from = READ_AGAIN_FROM;
    file->refused = result != 0 && result != -EBUSY && result != -EAGAIN && result != -ENOTCONN;
    return result == 0;
}
