/* bare_server.c - what a FUSE server has to do at the least, as a yardstick beside a mounted store.
 *
 *     bare_server MOUNTPOINT MEMORY THREADS
 *
 * Mounts (as root), serves with so many threads that block in read(2), and ends when it is unmounted. Files lie in
 * MEMORY, a file on tmpfs that it makes: each in a part of its own, so that nothing is allocated but pages. What is
 * written is copied there with the routine of a store, which sums it in the same pass, and gets the answer. One
 * directory, no permissions, no commit: what a save takes here the kernel takes, and a switch from one thread to
 * another for each request.
 *
 * Never: anything that is not needed for that; keeps a file beyond its process.
 *
 * Invariants
 * - The kernel is told what the daemon of a store tells it: size of requests, flags, times that it may remember.
 * - A part is used again when the kernel has forgotten the file that had it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <linux/fuse.h>

#include "persist/persist.h"

enum { FILES = 256, NAME_BYTES = 64, PAGES_MAX = 256, HEADROOM = 4096, THREADS_MAX = 8, CACHE_SECONDS = 1 << 20 };
#define PART_BYTES ((uint64_t)1 << 30)
#define DIRECT_IO_ALLOW_MMAP ((uint64_t)1 << 36)

typedef struct {
    char name[NAME_BYTES];        /* empty: it has none */
    uint64_t lookups;
    uint64_t size;
    uint32_t crc;                 /* of what was written last */
} file;

static file files[FILES];         /* inode 2 is the first one's */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;  /* of names, lookups and sizes */
static uint8_t *memory;
static int fuse_fd;

/* ------------------------------------------------------------------------------------- answers */

static void answer(const struct fuse_in_header *in, int error, const void *data, size_t length)
{
    struct fuse_out_header header = {
        .len = (uint32_t)(sizeof(header) + length), .error = -error, .unique = in->unique,
    };
    struct iovec parts[2] = {{&header, sizeof(header)}, {(void *)(uintptr_t)data, length}};
    if (writev(fuse_fd, parts, length == 0 ? 1 : 2) < 0 && errno != ENOENT && errno != ENODEV)
        perror("bare_server: an answer");
}

static struct fuse_attr attributes(uint64_t inode)
{
    struct fuse_attr a = {.ino = inode, .nlink = 1, .blksize = 1 << 20};
    a.mode = inode == FUSE_ROOT_ID ? S_IFDIR | 0755 : S_IFREG | 0644;
    if (inode != FUSE_ROOT_ID)
        a.size = files[inode - 2].size;
    a.blocks = (a.size + 511) / 512;
    return a;
}

static struct fuse_entry_out entry(uint64_t inode)
{
    return (struct fuse_entry_out){
        .nodeid = inode, .entry_valid = CACHE_SECONDS, .attr_valid = CACHE_SECONDS, .attr = attributes(inode),
    };
}

static struct fuse_open_out opened(uint64_t inode)
{
    return (struct fuse_open_out){.fh = inode, .open_flags = FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES};
}

static void answer_init(const struct fuse_in_header *in, const struct fuse_init_in *asked)
{
    const uint64_t wanted = FUSE_ASYNC_READ | FUSE_ATOMIC_O_TRUNC | FUSE_BIG_WRITES | FUSE_PARALLEL_DIROPS |
                            FUSE_HANDLE_KILLPRIV | FUSE_MAX_PAGES | FUSE_INIT_EXT | DIRECT_IO_ALLOW_MMAP;
    uint64_t flags = wanted & (asked->flags | (uint64_t)asked->flags2 << 32);
    struct fuse_init_out out = {
        .major = FUSE_KERNEL_VERSION, .minor = 38, .max_readahead = asked->max_readahead,
        .flags = (uint32_t)flags, .flags2 = (uint32_t)(flags >> 32), .max_background = 12,
        .congestion_threshold = 9, .max_write = PAGES_MAX * 4096, .time_gran = 1, .max_pages = PAGES_MAX,
    };
    answer(in, 0, &out, sizeof(out));
}

/* --------------------------------------------------------------------------------------- names */

/* With the lock: the inode, or 0. */
static uint64_t find(const char *name)
{
    for (uint64_t i = 0; i < FILES; i++) {
        if (strcmp(files[i].name, name) == 0)
            return i + 2;
    }
    return 0;
}

/* With the lock: a part that the kernel knows nothing of, or 0. */
static uint64_t make(const char *name)
{
    for (uint64_t i = 0; i < FILES && strlen(name) < NAME_BYTES; i++) {
        if (files[i].name[0] == 0 && files[i].lookups == 0) {
            strcpy(files[i].name, name);
            files[i].size = 0;
            return i + 2;
        }
    }
    return 0;
}

static void look_up(const struct fuse_in_header *in, const char *name)
{
    pthread_mutex_lock(&lock);
    uint64_t inode = find(name);
    struct fuse_entry_out out = {.entry_valid = CACHE_SECONDS};
    if (inode != 0) {
        files[inode - 2].lookups++;
        out = entry(inode);
    }
    pthread_mutex_unlock(&lock);
    answer(in, 0, &out, sizeof(out));
}

static void create(const struct fuse_in_header *in, const struct fuse_create_in *asked)
{
    const char *name = (const char *)(asked + 1);
    struct {
        struct fuse_entry_out entry;
        struct fuse_open_out opened;
    } out;
    pthread_mutex_lock(&lock);
    uint64_t inode = find(name);
    if (inode == 0)
        inode = make(name);
    if (inode != 0) {
        files[inode - 2].lookups++;
        if (asked->flags & O_TRUNC)
            files[inode - 2].size = 0;
        out.entry = entry(inode);
        out.opened = opened(inode);
    }
    pthread_mutex_unlock(&lock);
    answer(in, inode == 0 ? ENOSPC : 0, &out, inode == 0 ? 0 : sizeof(out));
}

static void change_name(const struct fuse_in_header *in, const char *old, const char *fresh)
{
    pthread_mutex_lock(&lock);
    uint64_t inode = find(old), replaced = fresh == NULL ? 0 : find(fresh);
    if (replaced != 0)
        files[replaced - 2].name[0] = 0;
    if (inode != 0)
        snprintf(files[inode - 2].name, NAME_BYTES, "%s", fresh == NULL ? "" : fresh);
    pthread_mutex_unlock(&lock);
    answer(in, inode == 0 ? ENOENT : 0, NULL, 0);
}

static void forget(uint64_t inode, uint64_t lookups)
{
    pthread_mutex_lock(&lock);
    if (inode != FUSE_ROOT_ID)
        files[inode - 2].lookups -= lookups;
    pthread_mutex_unlock(&lock);
}

static void forget_all(const struct fuse_batch_forget_in *in)
{
    const struct fuse_forget_one *each = (const void *)(in + 1);
    for (uint32_t i = 0; i < in->count; i++)
        forget(each[i].nodeid, each[i].nlookup);
}

/* --------------------------------------------------------------------------------------- files */

static void open_file(const struct fuse_in_header *in, const struct fuse_open_in *asked)
{
    pthread_mutex_lock(&lock);
    if (asked->flags & O_TRUNC)
        files[in->nodeid - 2].size = 0;
    pthread_mutex_unlock(&lock);
    struct fuse_open_out out = opened(in->nodeid);
    answer(in, 0, &out, sizeof(out));
}

static void tell(const struct fuse_in_header *in, const struct fuse_setattr_in *change)
{
    pthread_mutex_lock(&lock);
    if (change != NULL && change->valid & FATTR_SIZE && change->size <= PART_BYTES)
        files[in->nodeid - 2].size = change->size;
    struct fuse_attr_out out = {.attr_valid = CACHE_SECONDS, .attr = attributes(in->nodeid)};
    pthread_mutex_unlock(&lock);
    answer(in, 0, &out, sizeof(out));
}

static void write_file(const struct fuse_in_header *in, const struct fuse_write_in *asked)
{
    file *f = &files[in->nodeid - 2];
    uint64_t end = asked->offset + asked->size;
    if (end > PART_BYTES) {
        answer(in, EFBIG, NULL, 0);
        return;
    }
    uint8_t *to = memory + (in->nodeid - 2) * PART_BYTES + asked->offset;
    uint32_t crc = cxl_copy_out_crc(0, to, asked + 1, asked->size, false);
    cxl_table.fence();
    pthread_mutex_lock(&lock);
    f->crc = crc;
    if (end > f->size)
        f->size = end;
    pthread_mutex_unlock(&lock);
    struct fuse_write_out out = {.size = asked->size};
    answer(in, 0, &out, sizeof(out));
}

static void read_file(const struct fuse_in_header *in, const struct fuse_read_in *asked)
{
    const uint8_t *from = memory + (in->nodeid - 2) * PART_BYTES + asked->offset;
    pthread_mutex_lock(&lock);
    uint64_t size = files[in->nodeid - 2].size;
    pthread_mutex_unlock(&lock);
    uint64_t left = asked->offset < size ? size - asked->offset : 0;
    answer(in, 0, from, left < asked->size ? left : asked->size);
}

/* ------------------------------------------------------------------------------------- serving */

static void serve(const struct fuse_in_header *in, const void *arguments)
{
    const char *name = arguments;
    switch (in->opcode) {
    case FUSE_INIT: answer_init(in, arguments); break;
    case FUSE_LOOKUP: look_up(in, name); break;
    case FUSE_FORGET: forget(in->nodeid, ((const struct fuse_forget_in *)arguments)->nlookup); break;
    case FUSE_BATCH_FORGET: forget_all(arguments); break;
    case FUSE_INTERRUPT: break;
    case FUSE_GETATTR: tell(in, NULL); break;
    case FUSE_SETATTR: tell(in, arguments); break;
    case FUSE_CREATE: create(in, arguments); break;
    case FUSE_OPEN: open_file(in, arguments); break;
    case FUSE_WRITE: write_file(in, arguments); break;
    case FUSE_READ: read_file(in, arguments); break;
    case FUSE_UNLINK: change_name(in, name, NULL); break;
    case FUSE_RENAME: name += sizeof(struct fuse_rename_in); change_name(in, name, name + strlen(name) + 1); break;
    case FUSE_FLUSH:
    case FUSE_FSYNC:
    case FUSE_RELEASE: answer(in, 0, NULL, 0); break;
    case FUSE_IOCTL: answer(in, ENOTTY, NULL, 0); break;
    default: answer(in, ENOSYS, NULL, 0); break;
    }
}

/* The payload of a WRITE begins on a page, as in a store's daemon. */
static void *serve_all(void *unused)
{
    const size_t room = HEADROOM + PAGES_MAX * 4096;
    const size_t prefix = sizeof(struct fuse_in_header) + sizeof(struct fuse_write_in);
    uint8_t *buffer = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    uint8_t *start = buffer + HEADROOM - prefix;
    ssize_t length = buffer == MAP_FAILED ? -1 : 0;
    while (length >= 0) {
        memset(start, 0, prefix);
        length = read(fuse_fd, start, room - HEADROOM + prefix);
        if (length >= (ssize_t)sizeof(struct fuse_in_header))
            serve((const void *)start, start + sizeof(struct fuse_in_header));
        else if (length < 0 && (errno == EINTR || errno == EAGAIN || errno == ENOENT))
            length = 0;
    }
    return unused;
}

/* 0, or what failed. */
static const char *begin(const char *mountpoint, const char *path)
{
    char options[128];
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)(FILES * PART_BYTES)) != 0)
        return path;
    memory = mmap(NULL, FILES * PART_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (memory == MAP_FAILED)
        return path;
    fuse_fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    snprintf(options, sizeof(options), "fd=%d,rootmode=40000,user_id=0,group_id=0,max_read=%d", fuse_fd,
             PAGES_MAX * 4096);
    if (fuse_fd < 0 || mount("bare_server", mountpoint, "fuse", MS_NOSUID | MS_NODEV, options) != 0)
        return mountpoint;
    return NULL;
}

int main(int count, char **arguments)
{
    int threads = count == 4 ? atoi(arguments[3]) : 0;
    if (threads < 1 || threads > THREADS_MAX || cxl_dispatch_init() != 0) {
        fprintf(stderr, "usage: bare_server MOUNTPOINT MEMORY THREADS\n");
        return 2;
    }
    const char *failed = begin(arguments[1], arguments[2]);
    if (failed != NULL) {
        perror(failed);
        return 1;
    }
    pthread_t others[THREADS_MAX];
    for (int i = 1; i < threads; i++)
        pthread_create(&others[i], NULL, serve_all, NULL);
    serve_all(NULL);
    for (int i = 1; i < threads; i++)
        pthread_join(others[i], NULL);
    return 0;
}
