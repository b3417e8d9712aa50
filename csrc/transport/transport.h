/* transport.h - what the files of the transport share: requests, buffers, open files, calls.
 *
 * Never: touches Python, decides when data is committed, waits for the control plane while holding a
 * lock that the control plane may want.
 *
 * A request is read into the worker's own buffer, so that the payload of a WRITE begins on a page, and is
 * copied from there to the media with its checksum in the same pass (cxl_map_write). Reading it straight
 * into the media instead needs no second copy but was not faster: the kernel's copy then misses the
 * cache, and the checksum is a pass of its own (measured on two cores, 1 MiB writes: 3.1 against 3.4 GB/s
 * with one writer, 6.4 against 6.8 with two, and on line-granular media 2.9 and 5.5); splice through a
 * pipe was slower than both.
 *
 * Locks, in the order in which they are taken: handles, port.lock. None is held over a copy, a system
 * call, or a lock of the extent map. turns.lock and workers_lock are taken alone.
 *
 * Invariants
 * - Every request that the kernel waits for is answered once: here, by the control plane (a call), or
 *   by whoever serves the other end of the socket.
 * - A worker that has taken a request waits for nobody but the kernel, and for room in the socket.
 * - Between cxl_port_stop and the next cxl_handle_allow no write of a worker is under way.
 */
#ifndef CXLFS_TRANSPORT_H
#define CXLFS_TRANSPORT_H

#include <time.h>

#include "extents/extents.h"
#include "transport/fuse_wire.h"

enum {
    HEADROOM_BYTES = 4096,        /* of a buffer, before the payload of a WRITE */
    PREFIX_BYTES = sizeof(fuse_wire_header) + sizeof(fuse_wire_write),
    CONTROL_BYTES_MAX = 128 << 10, /* of one message: an ordinary user's socket takes about 208 KiB */
    MESSAGE_BYTES = CONTROL_BYTES_MAX + BLOCK_BYTES,
    HANDLE_BUCKETS_MIN = 64,
    WRITERS_MAX = 8,              /* threads of one handle that may write without a call */
    /* A request from here on is long: all workers wait for the next one. Of a program that is alone 256 KiB
     * are a tenth faster with one worker, which polls, 1 MiB a tenth slower. */
    LONG_BYTES = 512 << 10,
};

struct cxl_port {
    uint64_t inode;
    pthread_mutex_t lock;         /* of the following */
    pthread_cond_t quiet;         /* writing became 0 */
    cxl_map *map;
    uint64_t generation;          /* handles allowed in an older one must ask again */
    uint64_t written_ns;
    uint32_t writing;             /* writes that are being copied */
    uint32_t users;               /* handles, requests, and the owner */
};

/* What the next read of a handle will want, verified already: ahead.c. */
typedef struct {
    uint64_t serial;              /* of the work on it; 0: there is none */
    uint64_t extent_id;
    uint64_t extent_offset;
    uint64_t done;                /* bytes verified */
    uint64_t began_ns;
} verified_ahead;

typedef struct handle handle;
struct handle {
    handle *next;                 /* in its bucket */
    uint64_t id;
    cxl_port *port;
    bool readable;
    uint64_t allowed;             /* generation of the port; 0: never */
    uint32_t writers[WRITERS_MAX];
    uint32_t writer_count;
    uint64_t read_end;            /* port->lock, as the following: where the last long read ended */
    verified_ahead ahead;
};

/* A request between reading and answering it: header, arguments and payload, one after the other. */
typedef struct {
    fuse_wire_header *header;
    uint8_t *arguments;
    size_t length;                /* of the arguments with the payload */
} request;

/* Who reads the next request: turns.c. */
typedef struct {
    pthread_mutex_t lock;         /* of the following */
    pthread_cond_t rest;
    pthread_cond_t look;
    uint32_t active;              /* workers that wait for a request, or serve one */
    uint32_t busy;                /* of these: serve one */
    uint32_t client;              /* the thread whose request came last */
    uint32_t in_a_row;            /* requests of that thread, none of them long */
    uint64_t taken;               /* requests */
    bool looking;                 /* one of those that rest sees to it that the active one is enough */
    bool dozing;                  /* nothing happens, so it waits to be told */
    bool polling_pays;
} turns;

struct cxl_worker {
    cxl_transport *transport;
    cxl_worker *next;             /* transport.workers_lock */
    pthread_t thread;             /* that serves just now, if any */
    bool serving;                 /* transport.workers_lock */
    uint8_t *buffer;
    int pipe[2];
    size_t pipe_bytes;            /* 0: there is none */
    uint64_t lease_inode;         /* to be told with the next call; 0: none */
    uint64_t began_ns;            /* to wait for a request */
    bool active;                  /* counted as such in turns */
    bool busy;
};

struct cxl_transport {
    cxl_engine *engine;
    int fuse_fd;
    int control_fd;
    cxl_transport_settings settings;
    turns turns;

    atomic_bool stopping;
    pthread_t relay;
    bool relay_started;
    uint8_t *message;             /* the relay's */
    pthread_mutex_t workers_lock; /* of the workers' list */
    pthread_cond_t worker_left;
    cxl_worker *workers;

    pthread_rwlock_t handles;     /* of the following */
    handle **buckets;
    uint64_t bucket_count;
    uint64_t handle_count;

    _Atomic uint64_t init_unique; /* of the INIT request under way */
    _Atomic uint32_t kernel_flags; /* what it offers */
    _Atomic uint32_t kernel_flags2;

    _Atomic uint64_t reads, writes, read_bytes, write_bytes, call_count, forwarded, read_copies, spliced_reads,
                     ahead_bytes;
    _Atomic uint64_t ahead_serial;
};

static inline uint64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

/* ports.c */
int ports_init(cxl_transport *t);
void ports_free(cxl_transport *t);
/* The port of a handle for reading, in use until port_drop, with its map in use; or NULL. */
cxl_port *port_for_read(cxl_transport *t, uint64_t id, cxl_map **map);
/* The same for a write by pid, counted as being copied until port_wrote; NULL: it must be a call. */
cxl_port *port_for_write(cxl_transport *t, uint64_t id, uint32_t pid, cxl_map **map);
void port_wrote(cxl_port *port, bool any);
void port_drop(cxl_port *port);
/* The handle, which stays until handle_unlock, with its port's lock; NULL: it was closed. */
handle *handle_lock(cxl_transport *t, uint64_t id);
void handle_unlock(cxl_transport *t, handle *h);

/* ahead.c */
/* How many bytes at the beginning of range are verified, for one answer by this handle. */
uint64_t ahead_take(cxl_transport *t, uint64_t id, const extent_range *range);
/* After an answer of count bytes: verify the same number behind them, until a read wants them. */
void ahead_verify(cxl_worker *worker, cxl_map *map, const fuse_wire_read *in, uint64_t count);

/* io.c: false: the control plane must serve it. */
bool serve_read(cxl_worker *worker, const request *r);
/* *done: bytes that are in the file now; *error: -EREMOTEIO when a fence failed. */
bool serve_write(cxl_worker *worker, const request *r, uint64_t *done, int *error);

/* forward.c */
/* Pass a request to the other end of the socket. */
void forward(cxl_transport *t, request *r);
/* The thread that passes answers and notifications back. */
void *relay_main(void *transport);

/* splice.c */
/* Make the worker's pipe, if that is possible: else there is none. */
void splice_open(cxl_worker *worker);
void splice_close(cxl_worker *worker);
/* Answer with many bytes, which stay as they are meanwhile. False: they must be written instead. */
bool splice_reply(cxl_worker *worker, uint64_t unique, const void *data, size_t length);

/* turns.c */
void turns_init(turns *s);
void turns_free(turns *s);
/* Let go of the workers that rest; after stopping was set. */
void turns_stop(turns *s);
void turns_count(turns *s, uint32_t *active, uint32_t *busy);
/* Return when it is this worker's turn to read a request, or the transport is stopping. */
void turn_begin(cxl_worker *worker);
void turn_took(cxl_worker *worker, const request *r);
/* The request that it took, if any, is served. */
void turn_end(cxl_worker *worker);
/* Whether requests are taken without the caller, who serves one. */
bool turn_others_wait(turns *s);
/* It will not begin again for now. */
void turn_leave(cxl_worker *worker);

/* transport.c: write an answer to the kernel; that nobody waits for it any more is no error. */
int reply(cxl_transport *t, uint64_t unique, int error, const void *data, size_t length);

#endif
