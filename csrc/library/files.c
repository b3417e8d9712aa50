/* files.c - files of the installed library: directly where that can be, else through the kernel.
 *
 * Never: commits but with close(2) and fsync(2); gathers what is written, or reads ahead.
 *
 * Invariants
 * - A piece that cannot go directly goes through the kernel with the same descriptor, in its place among the others.
 * - A forked child reads and writes through the kernel.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "library/library.h"

enum { READ_FROM = 4 << 10 };    /* bytes of one call: shorter ones are the kernel's */
/* Bytes of a file that are read before it is read directly, and before it is tried again. */
enum { READER_FROM = 1 << 20, READER_AGAIN_FROM = 64 << 20 };
enum { KERNEL_MAX = 0x7ffff000 };/* of one call */

int64_t library_result(int64_t result)
{
    if (result >= 0)
        return result;
    errno = (int)-result;
    return -1;
}

const char *library_reason(int error)
{
    switch (error) {
    case 0:
        return NULL;
    case ENOTTY:
        return "not on a mounted store that offers it";
    case EPERM:
    case EACCES:
        return "not for this user: root, or the one that the store's daemon runs as";
    case ENOENT:
    case ENXIO:
        return "the medium of the store is not to be found from here";
    case ENOTCONN:
        return "the daemon of the mount is gone";
    case EBUSY:
        return "somebody has it open for writing";
    case EINVAL:
        return "it is open for appending, or with O_SYNC or O_DSYNC";
    default:
        return strerror(error);
    }
}

unsigned cxlfs_client_version(void)
{
    return CXLFS_CLIENT_VERSION;
}

/* ---------------------------------------------------------------------------------------- life */

static void begin_direct(cxlfs_file *file)
{
    int result;
    if ((file->flags & O_ACCMODE) == O_RDONLY)
        return;
    if ((file->flags & (O_APPEND | O_DSYNC)) != 0)      /* of which O_SYNC has one */
        result = -EINVAL;
    else
        result = cxl_direct_open(file->fd, &file->direct);
    if (result == 0)
        cxl_direct_permit_ahead(file->direct);
    file->error = -result;
}

cxlfs_file *cxlfs_fdopen(int fd, int flags)
{
    int found = fcntl(fd, F_GETFL);
    if (found < 0)
        return NULL;
    if ((found & O_PATH) != 0) {
        errno = EBADF;
        return NULL;
    }
    cxlfs_file *file = calloc(1, sizeof *file);
    if (file == NULL)
        return NULL;
    off_t position = lseek(fd, 0, SEEK_CUR);
    file->fd = fd;
    file->flags = found;
    file->process = getpid();
    file->is_overwrite = (flags & (O_TRUNC | O_EXCL)) != 0 && (found & O_ACCMODE) != O_RDONLY;
    file->name = (library_name){-1, -1, NULL};
    file->position = position > 0 ? position : 0;
    file->until_reader = (found & O_ACCMODE) == O_RDONLY ? READER_FROM : INT64_MAX;
    pthread_mutex_init(&file->lock, NULL);
    pthread_rwlock_init(&file->reader_lock, NULL);
    begin_direct(file);
    return file;
}

cxlfs_file *cxlfs_open(const char *path, int flags, unsigned permissions)
{
    int fd = open(path, flags | O_CLOEXEC, permissions);
    if (fd < 0)
        return NULL;
    cxlfs_file *file = cxlfs_fdopen(fd, flags);
    if (file == NULL) {
        int error = errno;
        close(fd);
        errno = error;
    }
    return file;
}

int cxlfs_close(cxlfs_file *file)
{
    int result = 0;
    if (file->reader != NULL)
        cxl_reader_close(file->reader, -1);             /* close(2) says the rest */
    if (file->direct != NULL)
        result = cxl_direct_close(file->direct);
    if (close(file->fd) != 0 && result == 0)
        result = -errno;
    if (file->is_reverted)
        result = 0;
    else if (result != 0)
        library_name_remove(&file->name);
    library_name_end(&file->name);
    pthread_mutex_destroy(&file->lock);
    pthread_rwlock_destroy(&file->reader_lock);
    free(file);
    return (int)library_result(result);
}

const char *cxlfs_why_not(const cxlfs_file *file, int *error)
{
    int found = file->error;
    if (error != NULL)
        *error = found;
    return library_reason(found);
}

/* ------------------------------------------------------------------------------------- writing */

static int64_t write_by_kernel(const cxlfs_file *file, const uint8_t *bytes, size_t length, int64_t offset)
{
    ssize_t taken;
    do
        taken = pwrite(file->fd, bytes, length, (off_t)offset);
    while (taken < 0 && errno == EINTR);
    if (taken == 0)
        return -EIO;            /* which no file says of bytes that it could take */
    return taken > 0 ? taken : -errno;
}

static int64_t store(cxlfs_file *file, const void *bytes, size_t length, int64_t offset)
{
    const uint8_t *from = bytes;
    if (offset < 0)
        return -EINVAL;
    for (size_t done = 0; done < length;) {
        int64_t taken = file->is_reverted ? -ECANCELED : -EAGAIN;
        uint64_t place = (uint64_t)offset + done;
        if (place > INT64_MAX)
            return -EFBIG;
        if (file->direct != NULL && taken == -EAGAIN)
            taken = cxl_direct_pwrite(file->direct, from + done, length - done, place);
        if (taken == -EAGAIN)
            taken = write_by_kernel(file, from + done, length - done, (int64_t)place);
        if (taken < 0)
            return taken;
        done += (size_t)taken;
    }
    return (int64_t)length;
}

ssize_t cxlfs_pwrite(cxlfs_file *file, const void *bytes, size_t length, int64_t offset)
{
    return (ssize_t)library_result(store(file, bytes, length, offset));
}

ssize_t cxlfs_write(cxlfs_file *file, const void *bytes, size_t length)
{
    pthread_mutex_lock(&file->lock);
    int64_t taken = store(file, bytes, length, file->position);
    if (taken > 0 && (file->flags & O_APPEND) != 0) {   /* pwrite(2) appends, too */
        struct stat status;
        file->position = fstat(file->fd, &status) == 0 ? status.st_size : file->position + taken;
    } else if (taken > 0) {
        file->position += taken;
    }
    pthread_mutex_unlock(&file->lock);
    return (ssize_t)library_result(taken);
}

int cxlfs_flush(cxlfs_file *file)
{
    return file->direct == NULL ? 0 : (int)library_result(cxl_direct_settle(file->direct));
}

int cxlfs_sync(cxlfs_file *file)
{
    return cxlfs_flush(file) == 0 ? fsync(file->fd) : -1;
}

int cxlfs_truncate(cxlfs_file *file, int64_t size)
{
    return cxlfs_flush(file) == 0 ? ftruncate(file->fd, (off_t)size) : -1;
}

/* ------------------------------------------------------------------------------------- reading */

static int64_t read_by_kernel(const cxlfs_file *file, uint8_t *bytes, size_t length, int64_t offset)
{
    for (size_t done = 0; done < length;) {
        size_t wanted = length - done < KERNEL_MAX ? length - done : KERNEL_MAX;
        ssize_t count = pread(file->fd, bytes + done, wanted, (off_t)(offset + (int64_t)done));
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0)
            return done > 0 ? (int64_t)done : -errno;   /* the next one meets it again */
        done += (size_t)count;
        if ((size_t)count < wanted)
            return (int64_t)done;
    }
    return (int64_t)length;
}

/* A reader of it, where it pays; the lock is held for writing. */
static void begin_reader(cxlfs_file *file, size_t wanted)
{
    if (file->reader != NULL || file->until_reader == INT64_MAX || file->process != getpid())
        return;
    file->until_reader -= wanted < READER_AGAIN_FROM ? (int64_t)wanted : READER_AGAIN_FROM;
    if (file->until_reader > 0)
        return;
    int result = cxl_reader_open(file->fd, &file->reader);
    bool again = result == -EBUSY || result == -ENOTCONN;
    file->until_reader = again ? READER_AGAIN_FROM : INT64_MAX;
    file->error = -result;
}

static void end_reader(cxlfs_file *file, cxl_reader *ended)
{
    pthread_rwlock_wrlock(&file->reader_lock);
    if (file->reader == ended && file->process == getpid()) {
        cxl_reader_close(ended, file->fd);
        file->reader = NULL;
        file->until_reader = READER_AGAIN_FROM;
    }
    pthread_rwlock_unlock(&file->reader_lock);
}

/* From the medium; -EAGAIN: it is the kernel's. */
static int64_t read_directly(cxlfs_file *file, void *bytes, size_t length, int64_t offset)
{
    bool is_over = false;
    int64_t count = -EAGAIN;
    pthread_rwlock_rdlock(&file->reader_lock);
    if (file->reader == NULL && file->until_reader != INT64_MAX) {
        pthread_rwlock_unlock(&file->reader_lock);
        pthread_rwlock_wrlock(&file->reader_lock);
        begin_reader(file, length);
        pthread_rwlock_unlock(&file->reader_lock);
        pthread_rwlock_rdlock(&file->reader_lock);
    }
    cxl_reader *reader = file->reader;
    if (reader != NULL && file->process == getpid()) {
        uint64_t size = cxl_reader_size(reader), place = (uint64_t)offset;
        uint64_t wanted = place >= size ? 0 : size - place < length ? size - place : length;
        if (wanted > 0 && cxl_reader_copy(reader, bytes, wanted, place) == 0)
            count = (int64_t)wanted;
        else
            is_over = !cxl_reader_holds(reader);
    }
    pthread_rwlock_unlock(&file->reader_lock);
    if (is_over)
        end_reader(file, reader);
    return count;
}

static int64_t load(cxlfs_file *file, void *bytes, size_t length, int64_t offset)
{
    if (offset < 0)
        return -EINVAL;
    if (length > SSIZE_MAX)
        length = SSIZE_MAX;
    int64_t count = length >= READ_FROM ? read_directly(file, bytes, length, offset) : -EAGAIN;
    return count != -EAGAIN ? count : read_by_kernel(file, bytes, length, offset);
}

ssize_t cxlfs_pread(cxlfs_file *file, void *bytes, size_t length, int64_t offset)
{
    return (ssize_t)library_result(load(file, bytes, length, offset));
}

ssize_t cxlfs_read(cxlfs_file *file, void *bytes, size_t length)
{
    pthread_mutex_lock(&file->lock);
    int64_t count = load(file, bytes, length, file->position);
    if (count > 0)
        file->position += count;
    pthread_mutex_unlock(&file->lock);
    return (ssize_t)library_result(count);
}

/* --------------------------------------------------------------------------------------- place */

static int64_t place_from(cxlfs_file *file, int whence)
{
    struct stat status;
    if (whence == SEEK_SET)
        return 0;
    if (whence == SEEK_CUR)
        return file->position;
    if (whence != SEEK_END)
        return -EINVAL;
    if (cxlfs_flush(file) != 0 || fstat(file->fd, &status) != 0)
        return -errno;
    return status.st_size;
}

int64_t cxlfs_seek(cxlfs_file *file, int64_t offset, int whence)
{
    int64_t place;
    pthread_mutex_lock(&file->lock);
    int64_t from = place_from(file, whence);
    if (from < 0)
        place = from;
    else if (__builtin_add_overflow(from, offset, &place))
        place = -EOVERFLOW;
    else if (place < 0)
        place = -EINVAL;
    else
        file->position = place;
    pthread_mutex_unlock(&file->lock);
    return library_result(place);
}

int cxlfs_fileno(cxlfs_file *file)
{
    int result = -1;
    pthread_mutex_lock(&file->lock);
    if (cxlfs_flush(file) == 0 && (lseek(file->fd, (off_t)file->position, SEEK_SET) >= 0 || errno == ESPIPE))
        result = file->fd;
    pthread_mutex_unlock(&file->lock);
    return result;
}
