/* clients.c - media that this process has mapped for its files of mounts: one of each mount, as long as it is used, and
 * one that is not used just now.
 *
 * Never: stores anything; asks the daemon while the table is locked.
 *
 * Invariants
 * - The table is the only global of the library, with its lock and the counters.
 * - What a forked child inherits is ended there: it closes the descriptors, so that the locks stay the parent's alone,
 *   and the mappings it does not have (MADV_DONTFORK).
 * - A process keeps the lock at CXL_DIRECT_MARK + its number on each medium that it has mapped.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "client/ahead.h"
#include "client/parts.h"

enum { FUSE_MAGIC = 0x65735546 };
#define CXL_DIRECT_MARK (INT64_C(1) << 62)

/* In place of a descriptor, of what a forked child has no part in. */
enum { INHERITED = -2 };

/* A mount that refused is not asked again for a while. */
enum { REFUSALS = 8 };
#define REFUSED_NS UINT64_C(10000000000)
typedef struct {
    uint64_t mount;
    uint64_t until_ns;
    int error;
} refusal;

static struct {
    pthread_mutex_t lock;
    cxl_client *first;
    refusal refusals[REFUSALS];
    uint32_t next_refusal;
    client_counters counters;
} table = {.lock = PTHREAD_MUTEX_INITIALIZER};
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

client_counters *client_counted(void)
{
    return &table.counters;
}

int client_refuse(int result)
{
    if (result < 0) {
        atomic_fetch_add(&table.counters.refused, 1);
        atomic_store(&table.counters.last_errno, -result);
    }
    return result;
}

int client_request(const cxl_client_channel *channel, int fd, unsigned long number, void *argument)
{
    if (channel != NULL)
        return channel->request(channel->context, fd, number, argument);
    while (syscall(SYS_ioctl, fd, number, argument) != 0) {     /* C libraries differ in the number's type */
        if (errno != EINTR)
            return errno == ENOSYS || errno == EOPNOTSUPP ? -ENOTTY : -errno;
    }
    return 0;
}

/* --------------------------------------------------------------------------------------- forks */

static void before_fork(void)
{
    pthread_mutex_lock(&table.lock);
    ahead_before_fork();
}

static void after_fork(void)
{
    ahead_after_fork();
    pthread_mutex_unlock(&table.lock);
}

static void in_child(void)
{
    ahead_in_child();
    for (cxl_client *client = table.first; client != NULL; client = client->next) {
        atomic_store(&client->ended, true);
        if (medium_is(client->medium_fd, &client->identity))
            close(client->medium_fd);
        client->medium_fd = INHERITED;
    }
    table.first = NULL;         /* their files have what is left of them */
    pthread_mutex_unlock(&table.lock);
}

static void watch_forks(void)
{
    pthread_atfork(before_fork, after_fork, in_child);
}

/* ---------------------------------------------------------------------------------------- life */

static void destroy(cxl_client *client)
{
    if (client == NULL)
        return;
    if (client->medium_fd >= 0 && medium_is(client->medium_fd, &client->identity))
        close(client->medium_fd);
    if (client->medium_fd != INHERITED) {   /* there something else may lie at that address by now */
        cxl_media_close(client->media);
        cxl_media_close(client->view);
    }
    free((void *)client->touched);
    free(client->ranges);
    pthread_mutex_destroy(&client->ranges_lock);
    free(client);
}

/* By the daemon of this mount: the program may have put another file in the place of fd since it was believed. */
static int attach(int fd, const cxl_client_channel *channel, uint64_t mount, cxl_direct_attach *identity)
{
    struct stat file;
    memset(identity, 0, sizeof *identity);
    identity->version = CXL_DIRECT_VERSION;
    int result = client_request(channel, fd, CXL_DIRECT_ATTACH, identity);
    if (result != 0)
        return result;
    if (fstat(fd, &file) != 0 || file.st_dev != mount)
        return -EBADF;
    uint32_t chunk = identity->chunk_bytes;
    bool known = identity->version == CXL_DIRECT_VERSION && identity->media_bytes != 0 &&
                 identity->granularity <= CXL_GRANULARITY_PAGE && chunk >= 64 && (chunk & (chunk - 1)) == 0;
    return known ? 0 : -ENOTTY;
}

static int set_mark(int fd)
{
    struct flock mark = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = CXL_DIRECT_MARK + getpid(), .l_len = 1};
    return fcntl(fd, F_OFD_SETLK, &mark) == 0 ? 0 : -errno;
}

static int map_medium(cxl_client *client, const cxl_client_channel *channel)
{
    const cxl_direct_attach *identity = &client->identity;
    struct stat file;
    client->medium_fd = medium_open(identity);
    if (client->medium_fd < 0)
        return client->medium_fd;
    if (fstat(client->medium_fd, &file) != 0)
        return -errno;
    if (S_ISREG(file.st_mode) && (uint64_t)file.st_size < identity->media_bytes)
        return -ENXIO;
    client->granule = channel != NULL && channel->granule != 0 ? channel->granule : medium_granule(client->medium_fd);
    client->has_private_pages = !S_ISCHR(file.st_mode) && client->granule == (uint64_t)sysconf(_SC_PAGESIZE);
    int result = set_mark(client->medium_fd);
    if (result != 0)
        return result;
    uint64_t alignment = client->granule > LARGE_PAGE ? client->granule : LARGE_PAGE;
    client->reach_granule = alignment;
    uint32_t flags = CXL_MAP_CLOSED | ((identity->flags & CXL_DIRECT_SYNC) != 0 ? CXL_MAP_SYNC : 0);
    result = cxl_media_map(client->medium_fd, identity->media_bytes, alignment, flags, identity->granularity,
                           &client->media);
    if (result != 0)
        return result;
    client->touched = calloc(identity->media_bytes / TOUCH_BYTES + 1, 1);
    return client->touched != NULL ? 0 : -ENOMEM;
}

/* It stays, as the other mapping does: page tables that are there need not be made for the next file. */
int client_need_view(cxl_client *client)
{
    int result = 0;
    pthread_mutex_lock(&client->ranges_lock);
    if (client->view == NULL && !medium_is(client->medium_fd, &client->identity))
        result = -EBADF;
    else if (client->view == NULL)
        result = cxl_media_map(client->medium_fd, client->identity.media_bytes, client->reach_granule,
                               CXL_MAP_READ_ONLY | CXL_MAP_ALONE, client->identity.granularity, &client->view);
    pthread_mutex_unlock(&client->ranges_lock);
    return result;
}

static int make(int fd, const cxl_client_channel *channel, uint64_t mount, cxl_client **out)
{
    cxl_client *client = calloc(1, sizeof *client);
    if (client == NULL)
        return -ENOMEM;
    client->mount = mount;
    client->medium_fd = -1;
    client->users = 1;
    pthread_mutex_init(&client->ranges_lock, NULL);
    int result = attach(fd, channel, mount, &client->identity);
    atomic_store(&client->watch, client->identity.watch);
    if (result == 0)
        result = map_medium(client, channel);
    if (result != 0) {
        destroy(client);
        return result;
    }
    *out = client;
    return 0;
}

/* --------------------------------------------------------------------------------------- table */

uint64_t client_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static int refused_before_locked(uint64_t mount)
{
    uint64_t now_ns = client_now_ns();
    for (int i = 0; i < REFUSALS; i++)
        if (table.refusals[i].mount == mount && table.refusals[i].until_ns > now_ns)
            return table.refusals[i].error;
    return 0;
}

static cxl_client *find_locked(uint64_t mount)
{
    cxl_client *client = table.first;
    while (client != NULL && (client->mount != mount || atomic_load(&client->ended)))
        client = client->next;
    return client;
}

/* Take out those that nobody uses: all, or those that ended and those of other mounts. */
static cxl_client *unused_locked(bool all, uint64_t mount)
{
    cxl_client *out = NULL, **link = &table.first;
    while (*link != NULL) {
        cxl_client *client = *link;
        if (client->users == 0 && (all || atomic_load(&client->ended) || client->mount != mount)) {
            *link = client->next;
            client->next = out;
            out = client;
        } else {
            link = &client->next;
        }
    }
    return out;
}

static void destroy_all(cxl_client *clients)
{
    while (clients != NULL) {
        cxl_client *next = clients->next;
        destroy(clients);
        clients = next;
    }
}

static bool is_same(const cxl_direct_attach *left, const cxl_direct_attach *right)
{
    return left->device == right->device && left->inode == right->inode && left->chunk_bytes == right->chunk_bytes &&
           left->special_device == right->special_device && left->media_bytes == right->media_bytes &&
           left->granularity == right->granularity && memcmp(left->uuid, right->uuid, sizeof left->uuid) == 0;
}

/* A new one, or that of a thread that was quicker. */
static int add(int fd, const cxl_client_channel *channel, uint64_t mount, cxl_client **out)
{
    cxl_client *made = NULL, *unused;
    int result = make(fd, channel, mount, &made);
    pthread_mutex_lock(&table.lock);
    if (result == 0) {
        cxl_client *other = find_locked(mount);
        if (other != NULL && is_same(&other->identity, &made->identity)) {
            other->users++;
            atomic_store(&other->watch, atomic_load(&made->watch));
            *out = other;
        } else {
            made->next = table.first;
            table.first = made;
            *out = made;
            made = NULL;
        }
    } else if (channel == NULL && result != -ENOTCONN && result != -ENOMEM) {
        table.refusals[table.next_refusal++ % REFUSALS] = (refusal){mount, client_now_ns() + REFUSED_NS, result};
    }
    unused = unused_locked(false, mount);
    pthread_mutex_unlock(&table.lock);
    destroy(made);
    destroy_all(unused);
    return result;
}

bool client_sees(const cxl_client *client, uint64_t watch)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)watch, .l_len = 1};
    if (watch < client->identity.media_bytes || watch >= INT64_MAX || atomic_load(&client->ended))
        return false;               /* of a forked child the descriptor may be anything */
    return fcntl(client->medium_fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

/* That of the mount has been named by this medium's daemon: device numbers of mounts come again, but then the one that
 * answers serves another medium, or the one whose watch this is does not live. */
static int make_certain(int fd, const cxl_client_channel *channel, client_certainty certainty, cxl_client **client)
{
    cxl_direct_attach identity;
    if (certainty == CLIENT_KNOWN)
        return 0;
    if (certainty == CLIENT_SERVED && client_sees(*client, atomic_load(&(*client)->watch)))
        return 0;
    int result = attach(fd, channel, (*client)->mount, &identity);
    if (result != 0)
        return result;
    if (is_same(&identity, &(*client)->identity)) {
        atomic_store(&(*client)->watch, identity.watch);
        return 0;
    }
    uint64_t mount = (*client)->mount;
    atomic_store(&(*client)->ended, true);
    client_leave(*client);
    *client = NULL;
    return add(fd, channel, mount, client);
}

int client_take(int fd, const cxl_client_channel *channel, client_certainty certainty, cxl_client **out)
{
    struct stat file;
    int result = 0;
    pthread_once(&fork_once, watch_forks);
    if (fstat(fd, &file) != 0)
        return -errno;
    pthread_mutex_lock(&table.lock);
    cxl_client *client = find_locked(file.st_dev);
    if (client != NULL)
        client->users++;
    else if (channel == NULL)
        result = refused_before_locked(file.st_dev);
    pthread_mutex_unlock(&table.lock);
    /* Also of a mount that was believed before: its number may be that of a stranger's by now. */
    bool asks = client == NULL || certainty != CLIENT_KNOWN;
    if (result == 0 && channel == NULL && asks)
        result = mount_trust(file.st_dev);
    if (result != 0 && client != NULL)
        client_leave(client);
    if (client == NULL || result != 0)
        return result != 0 ? result : add(fd, channel, file.st_dev, out);
    result = make_certain(fd, channel, certainty, &client);
    if (result == 0)
        *out = client;
    else if (client != NULL)
        client_leave(client);
    return result;
}

bool client_is_inherited(const cxl_client *client)
{
    return client->medium_fd == INHERITED;
}

void client_leave(cxl_client *client)
{
    cxl_client *unused;
    pthread_mutex_lock(&table.lock);
    client->users--;
    if (client_is_inherited(client)) {
        unused = client->users == 0 ? client : NULL;
        client->next = NULL;
    } else {
        unused = unused_locked(false, client->mount);
    }
    pthread_mutex_unlock(&table.lock);
    destroy_all(unused);
}

void cxl_client_forget(void)
{
    pthread_mutex_lock(&table.lock);
    cxl_client *unused = unused_locked(true, 0);
    pthread_mutex_unlock(&table.lock);
    destroy_all(unused);
}

int client_check_file(int fd, const cxl_client_channel *channel, int access, struct stat *file)
{
    struct statfs system;
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fstat(fd, file) != 0)
        return -errno;
    if (!S_ISREG(file->st_mode) || (flags & O_PATH) != 0)
        return -ENOTTY;
    if (channel == NULL && (fstatfs(fd, &system) != 0 || (uint32_t)system.f_type != FUSE_MAGIC))
        return -ENOTTY;
    if ((flags & O_ACCMODE) != access && (flags & O_ACCMODE) != O_RDWR)
        return -EINVAL;
    return access == O_WRONLY && (flags & O_APPEND) != 0 ? -EINVAL : 0;
}

void cxl_client_statistics(cxl_client_counts *out)
{
    const client_counters *counters = &table.counters;
    memset(out, 0, sizeof *out);
    out->direct_bytes = atomic_load(&counters->direct_bytes);
    out->fuse_bytes = atomic_load(&counters->fuse_bytes);
    out->leases = atomic_load(&counters->leases);
    out->settles = atomic_load(&counters->settles);
    out->mapped_bytes = atomic_load(&counters->mapped_bytes);
    out->copied_bytes = atomic_load(&counters->copied_bytes);
    out->verified_bytes = atomic_load(&counters->verified_bytes);
    out->read_bytes = atomic_load(&counters->read_bytes);
    out->refused = atomic_load(&counters->refused);
    out->last_errno = atomic_load(&counters->last_errno);
    pthread_mutex_lock(&table.lock);
    for (const cxl_client *client = table.first; client != NULL; client = client->next)
        out->media++;
    pthread_mutex_unlock(&table.lock);
}
