/* parts.h - what the files of the client library share: media that the process has mapped, and what is locked there.
 *
 * Locks, in the order in which they are taken: of a file, of the ranges of a client, of the table of clients.
 *
 * Invariants
 * - Nothing is stored outside a range that is locked (client_ranges_add), nor before the watch of its slip was found
 *   after that (client_sees).
 * - A range can be reached and is locked as long as anybody in the process has it: ranges may overlap, where the daemon
 *   has handed out anew what a file of this process has not noticed yet to have lost.
 */
#ifndef CXLFS_CLIENT_PARTS_H
#define CXLFS_CLIENT_PARTS_H

#include "client/client.h"
#include "client/direct.h"
#include "client/placing.h"
#include "persist/persist.h"

struct stat;

/* How requests get to the daemon: ioctl(2), unless a test says otherwise. */
typedef struct {
    int (*request)(void *context, int fd, unsigned long number, void *argument);    /* 0 or -errno */
    int (*look)(void *context, int fd);     /* in the place of fstat(2) */
    void *context;
    uint64_t granule;            /* 0: that of the medium */
    uint64_t copies_max;         /* bytes of a mapped file; 0: as much as there is memory for */
    uint32_t waits_max;          /* for others that verify a file; 0: as many as there should be at most */
} cxl_client_channel;

int cxl_direct_open_through(int fd, const cxl_client_channel *channel, cxl_direct_file **out);
int cxl_mapped_open_through(int fd, uint32_t flags, const cxl_client_channel *channel, cxl_mapped **out);
int cxl_reader_open_through(int fd, const cxl_client_channel *channel, cxl_reader **out);

int client_request(const cxl_client_channel *channel, int fd, unsigned long number, void *argument);

/* -------------------------------------------------------------------------------------- media */

enum { TOUCH_BYTES = 2 << 20 };  /* pages are mapped ahead of their first use in pieces of this */

typedef struct {
    uint64_t start, end;
} client_range;

typedef struct cxl_client {
    struct cxl_client *next;
    uint64_t mount;              /* st_dev of its files */
    uint32_t users;              /* under the lock of the table */
    atomic_bool ended;           /* a forked child has it no more, or it turned out to be another medium's */
    cxl_direct_attach identity;  /* but for its watch: */
    atomic_uint_least64_t watch; /* of the daemon that said so last */
    atomic_uint_least64_t last_bytes;   /* where the last file that was closed ended, of what went directly; 0: none */
    int medium_fd;
    cxl_media *media;
    uint64_t granule;            /* pages can be mapped in multiples of this, */
    uint64_t reach_granule;      /* and are made reachable in those of this: a large page at least, which would be
                                  * divided into small ones otherwise */
    bool has_private_pages;      /* a DAX device has none, and hugetlbfs takes them from a pool that may be empty */
    _Atomic uint8_t *touched;    /* for each piece of TOUCH_BYTES: its pages are mapped */
    pthread_mutex_t ranges_lock; /* of the three below */
    client_range *ranges;
    uint32_t range_count;
    uint32_t range_capacity;
    cxl_media *view;             /* for readers: all of it, to be read; NULL before the first of them */
} cxl_client;

/* How much is known of the medium of a mount: that it was so once; that the daemon which said it still serves the
 * medium, which is enough where the answer to the next request is of use on that medium alone; that it says so now. */
typedef enum { CLIENT_KNOWN, CLIENT_SERVED, CLIENT_ASKED } client_certainty;

/* That of the mount where fd lies, one user more. */
int client_take(int fd, const cxl_client_channel *channel, client_certainty certainty, cxl_client **out);
void client_leave(cxl_client *client);
/* client->view is there when this returns 0. */
int client_need_view(cxl_client *client);
bool client_is_inherited(const cxl_client *client); /* this process is a child of the one that made it */
/* The byte of a watch is locked by somebody else: the daemon that has told of it. */
bool client_sees(const cxl_client *client, uint64_t watch);
/* A regular file, opened so that it can be read (O_RDONLY) or written (O_WRONLY), of a mount that may offer it. */
int client_check_file(int fd, const cxl_client_channel *channel, int access, struct stat *file);

/* Find the medium and open it: medium.c. */
int medium_open(const cxl_direct_attach *identity);
bool medium_is(int fd, const cxl_direct_attach *identity);
uint64_t medium_granule(int fd);
/* The user who mounted the file system of a device number, from an open table of mounts (/proc/self/mountinfo); -1: it
 * is not one of cxlfs. */
int64_t mount_owner(int mounts, uint64_t device);
/* 0: that is root, or who this process runs as. Nobody else is believed (-EPERM): anybody can serve a file system that
 * names a medium. -ENOTTY: no mount of cxlfs. */
int mount_trust(uint64_t device);

enum { RANGES_AT_ONCE = 32 };
/* All of them, or none: those that touch are locked, and made reachable, by one call of the kernel. */
int client_ranges_add(cxl_client *client, const client_range *ranges, uint32_t count);
void client_ranges_drop(cxl_client *client, const client_range *ranges, uint32_t count);
/* Pages of [offset, offset + length), which lies in [start, end), are about to be stored into. */
void client_touch(cxl_client *client, uint64_t offset, uint64_t length, uint64_t start, uint64_t end);
/* Those of a range, which stays reachable meanwhile, may be stored into later: as far as they are large, or false. */
bool client_touch_large(cxl_client *client, client_range range);

/* Monotonic. */
uint64_t client_now_ns(void);

/* ----------------------------------------------------------------------------------- counters */

typedef struct {
    atomic_uint_least64_t direct_bytes, fuse_bytes, leases, settles, mapped_bytes, copied_bytes, verified_bytes,
        read_bytes, refused;
    atomic_int last_errno;
} client_counters;

client_counters *client_counted(void);
int client_refuse(int result);   /* counts it; result */

#endif
