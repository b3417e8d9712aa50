/* replacing.c - files that get new content whole, or have what was there before.
 *
 * Never: temporary names: a mounted store keeps the old content until the new one is committed.
 *
 * Invariants
 * - A name that did not exist before does not exist after cxlfs_revert, or a cxlfs_close that failed, unless somebody
 *   else has made it.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "library/library.h"

#define OF_STORES "user.cxlfs.state"    /* an attribute that every file of a mounted store has */
#define REVERT "user.cxlfs.revert"

static bool is_same(const struct stat *left, const struct stat *right)
{
    return left->st_dev == right->st_dev && left->st_ino == right->st_ino;
}

void library_name_remove(const library_name *name)
{
    struct stat made, found;
    if (name->made >= 0 && fstat(name->made, &made) == 0 &&
        fstatat(name->directory, name->name, &found, AT_SYMLINK_NOFOLLOW) == 0 && is_same(&made, &found))
        (void)unlinkat(name->directory, name->name, 0);
}

void library_name_end(library_name *name)
{
    if (name->made >= 0)
        close(name->made);
    if (name->directory >= 0)
        close(name->directory);
    free(name->name);
    *name = (library_name){-1, -1, NULL};
}

/* The directory that path has the name in, and the name. 0 or -errno. */
static int open_directory(const char *path, library_name *out)
{
    const char *slash = strrchr(path, '/');
    out->name = strdup(slash != NULL ? slash + 1 : path);
    char *directory = slash == NULL ? strdup(".") : strndup(path, (size_t)(slash - path) + 1);
    int result = out->name == NULL || directory == NULL ? -ENOMEM : 0;
    if (result == 0) {
        out->directory = open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
        result = out->directory >= 0 ? 0 : -errno;
    }
    free(directory);
    return result;
}

/* A new file, which name refers to then. -EEXIST: there is something of that name. */
static int make_new(library_name *name, unsigned permissions, int *fd)
{
    *fd = openat(name->directory, name->name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, permissions);
    if (*fd < 0)
        return -errno;
    struct stat made, found;
    name->made = openat(name->directory, name->name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (name->made >= 0 && (fstat(*fd, &made) != 0 || fstat(name->made, &found) != 0 || !is_same(&made, &found))) {
        close(name->made);
        name->made = -1;        /* it is no longer ours to remove */
    }
    return 0;
}

cxlfs_file *cxlfs_replace(const char *path, unsigned permissions)
{
    int fd = -1;
    library_name name = {-1, -1, NULL};
    int result = open_directory(path, &name);
    if (result == 0)
        result = make_new(&name, permissions, &fd);
    if (result == -EEXIST) {    /* through links, as open(2) does */
        fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, permissions);
        result = fd >= 0 ? 0 : -errno;
    }
    cxlfs_file *file = result == 0 ? cxlfs_fdopen(fd, O_TRUNC) : NULL;
    if (file != NULL) {
        file->name = name;
        return file;
    }
    if (result == 0)
        result = -errno;
    library_name_remove(&name);
    if (fd >= 0)
        close(fd);
    library_name_end(&name);
    errno = -result;
    return NULL;
}

int cxlfs_revert(cxlfs_file *file)
{
    if (!file->is_overwrite)
        return (int)library_result(-EINVAL);
    if (atomic_exchange(&file->is_reverted, true))
        return 0;
    library_name_remove(&file->name);
    int result = ftruncate(file->fd, 0);
    if (fgetxattr(file->fd, OF_STORES, NULL, 0) >= 0)   /* elsewhere it would be set, and kept */
        result = fsetxattr(file->fd, REVERT, "", 0, 0);
    return file->name.made >= 0 ? 0 : result;           /* what has no name need not be empty */
}
