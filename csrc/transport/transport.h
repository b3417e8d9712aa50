/* transport.h - what the files of the transport share: requests, and what each part does for the others.
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
 * Each part keeps its state and its locks to itself. None is held over a copy, a system call that may
 * sleep, or a lock of the extent map, and none while another part is called.
 *
 * Invariants
 * - Every request that the kernel waits for is answered once: here, by the control plane (an upcall), or
 *   by whoever serves the other end of the socket.
 * - A worker that has taken a request waits for nobody but the kernel; what cannot go on at once is put
 *   aside (backlog.h). Only where that is full a worker goes with it, or waits for room in the socket.
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
    /* A request from here on is long: all workers wait for the next one. Of a program that is alone 256 KiB
     * are a tenth faster with one worker, which polls, 1 MiB a tenth slower. */
    LONG_BYTES = 512 << 10,
};

/* A request between reading and answering it: header, arguments and payload, one after the other. */
typedef struct {
    fuse_wire_header *header;
    uint8_t *arguments;
    size_t length;                /* of the arguments with the payload */
} request;

static inline uint64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

/* -------------------------------------------------------------------------- ports.c: open files */

typedef struct ports ports;

ports *ports_new(void);            /* NULL: no memory */
void ports_free(ports *p);
/* As cxl_handle_open, cxl_handle_close and cxl_handle_allow. */
int handle_open(ports *p, uint64_t id, cxl_port *port, bool readable);
void handle_close(ports *p, uint64_t id);
void handle_allow(ports *p, uint64_t id, uint32_t pid);
/* The port of a handle for reading, in use until port_drop, with its map in use; or NULL. */
cxl_port *port_for_read(ports *p, uint64_t id, cxl_map **map);
/* The same for a write by pid, counted as being copied until port_wrote; NULL: it must be an upcall. */
cxl_port *port_for_write(ports *p, uint64_t id, uint32_t pid, cxl_map **map);
void port_wrote(cxl_port *port, bool any);
void port_drop(cxl_port *port);
uint64_t port_inode(const cxl_port *port);

/* What the next read of a handle will want, verified already: ahead.c. How many bytes at the beginning of
 * range are, for one answer. */
uint64_t handle_take_ahead(ports *p, uint64_t id, const extent_range *range);
/* A long read of count bytes at offset is answered. The number of the work on next, which follows, or 0:
 * the read was none of a row, or nothing is left. */
uint64_t handle_begin_ahead(ports *p, uint64_t id, uint64_t offset, uint64_t count, const extent_range *next);
/* So many bytes of that work are done. False: somebody took them, or began anew. */
bool handle_note_ahead(ports *p, uint64_t id, uint64_t serial, uint64_t done);

/* ------------------------------------------------- trial.c: which way to serve a client is quicker */

typedef struct {
    bool stays;                   /* on the client's processor: what is to be done now */
    bool usual;                   /* what was quicker last */
    bool fixed;                   /* there are no trials */
    uint32_t block;               /* of a trial; behind the last: none is under way */
    uint32_t left;                /* requests, until the next block or trial */
    uint32_t won;                 /* pairs of blocks by the way that is not usual */
    uint64_t took_ns[2];          /* the last block of each way, this one so far */
    uint64_t least_ns[2];         /* of a trial, the shortest block of each way */
    uint32_t again;               /* requests from one trial to the next */
    uint32_t slow;                /* blocks since then that took longer */
    uint64_t ended;               /* trials */
} trial;

enum { TRIAL_OF_BOTH = -1 };

/* Stay, keep away, or TRIAL_OF_BOTH: find out, and stay until then. */
void trial_fix(trial *t, int stays);
/* What comes now is another client's: a pair that is under way begins anew. */
void trial_change_client(trial *t);
/* A request of a client that is alone came so long after the one before. */
void trial_took(trial *t, uint64_t length_ns);

/* ----------------------------------------------------------- turns.c: who reads the next request */

typedef struct turns turns;

/* A worker's own part. */
typedef struct {
    uint64_t began_ns;            /* to wait for a request */
    bool active;                  /* it waits for a request, or serves one */
    bool busy;                    /* it serves one */
    bool steps_back;              /* it gives an answer in the background */
} turn;

turns *turns_new(int fuse_fd, uint64_t poll_ns);
void turns_free(turns *s);
/* Let go of the workers that rest; nobody rests or polls from here on. */
void turns_stop(turns *s);
/* As cxl_transport_stay. */
void turns_stay(turns *s, int stays);
/* What is in force for requests of which some are calls, or was before the trial under way; how many have ended. */
bool turns_tried(turns *s, uint64_t *trials);
void turns_count(turns *s, uint32_t *active, uint32_t *busy);
/* Return when it is this worker's turn to read a request, or all is to stop. */
void turn_begin(turns *s, turn *own);
void turn_took(turns *s, turn *own, const request *r);
/* Around an answer that somebody waits for, and holds no lock of the control plane. */
void turn_answers(turns *s, turn *own, bool quick);
void turn_answered(turns *s, turn *own);
/* The request that it took, if any, is served. */
void turn_end(turns *s, turn *own);
/* Whether requests are taken without the caller, who serves one. */
bool turn_others_wait(turns *s);
/* It will not begin again for now. */
void turn_leave(turns *s, turn *own);

/* ------------------------------------------------------- places.c: the processor that a worker runs on */

/* Take the calling thread to the processor that another one runs on. True: it is there; *moved: it was not. */
bool place_beside(uint32_t thread, bool *moved);
/* Take it to another one, where it is on that and may. */
void place_away(uint32_t thread);
/* There is a processor for each thread that wants one. */
bool place_is_roomy(void);
/* The calling thread, and others that it starts, may step back, and come back. */
bool place_may_step_back(void);
/* Let those who are woken run first, and where they are; and end that, of any thread. */
bool place_step_back(void);
int place_come_back(pid_t thread);

/* ----------------------------------------------------------- absent.c: names that mean nothing */

typedef struct absent_names absent_names;

absent_names *absent_new(void);    /* NULL: no memory */
void absent_free(absent_names *a);
/* As cxl_absent_note, cxl_absent_take_back and cxl_absent_take_all_back. */
void absent_note(absent_names *a, uint64_t directory, const char *name, size_t length);
void absent_take_back(absent_names *a, uint64_t directory, const char *name, size_t length);
void absent_take_all_back(absent_names *a);
/* Whether the name that a LOOKUP asks for is absent. If so it stays until absent_end. */
bool absent_begin(absent_names *a, const request *r);
void absent_end(absent_names *a);

/* ---------------------------------------- upcalls.c: which worker goes with a request to the control plane */

typedef struct upcalls upcalls;

/* A worker's own part. */
typedef struct {
    bool under_way;
    struct waiting *held;         /* what its upcall's arguments lie in, where it had to wait */
} upcall_state;

upcalls *upcalls_new(uint64_t waiting_bytes_max);
void upcalls_free(upcalls *u);
void upcalls_add_worker(upcalls *u);
void upcalls_remove_worker(upcalls *u, upcall_state *own);
/* True: the caller goes with it; false: it waits for another worker, and the caller serves on. */
bool upcall_begin(upcalls *u, upcall_state *own, const cxl_upcall *upcall);
/* The caller is back from its upcall, if it was with one. True: *out is the next one for it. */
bool upcall_next(upcalls *u, upcall_state *own, cxl_upcall *out);
/* It goes on later, behind those that wait, with the done of *upcall. False: none waits, or there is no room. */
bool upcall_put_back(upcalls *u, upcall_state *own, const cxl_upcall *upcall);
uint64_t upcalls_waited(upcalls *u);

/* ----------------------------------------- forward.c: requests for the other end of the socket, and answers */

typedef struct forwarding forwarding;

typedef struct {
    int fuse_fd;
    int control_fd;
    uint32_t request_max;         /* what the kernel is told at INIT */
    uint64_t waiting_bytes_max;
} forwarding_settings;

int forwarding_new(const forwarding_settings *settings, forwarding **out);
void forwarding_free(forwarding *f);
int forwarding_start(forwarding *f);
/* A worker that waits for room in the socket, and is woken, gives its request up. */
void forwarding_hurry(forwarding *f);
/* End the thread that passes answers back; what waits is answered with EIO. Idempotent. */
void forwarding_stop(forwarding *f);
void forward(forwarding *f, request *r);
uint64_t forwarding_count(forwarding *f, uint64_t *waited);
/* The kernel lets files that bypass its page cache be mapped. */
bool forwarding_direct_mapping(forwarding *f);

/* --------------------------------------------------------------------- splice.c: long answers */

typedef struct {
    int ends[2];
    size_t bytes;                 /* 0: there is none */
    size_t longest, shortest;     /* answers that it is for */
} answer_pipe;

/* Make it as large as the longest answer needs, or as is permitted; or there is none. */
void pipe_open(answer_pipe *p, size_t longest, size_t shortest);
void pipe_close(answer_pipe *p);
/* Answer with many bytes, which stay as they are meanwhile, as does header, a page of its own. False: they
 * must be written instead. */
bool pipe_reply(answer_pipe *p, int fuse_fd, fuse_wire_reply *header, const void *data, size_t length);

/* -------------------------------------------------------------------- transport.c: what joins them */

struct cxl_worker {
    cxl_transport *transport;
    cxl_worker *next;             /* transport.workers_lock */
    pthread_t thread;             /* that serves just now, if any */
    bool serving;                 /* transport.workers_lock */
    uint8_t *buffer;
    answer_pipe pipe;
    turn turn;
    upcall_state upcall;
    uint64_t lease_inode;         /* to be told with the next upcall; 0: none */
    bool awaited;                 /* a program waits for the answer to its upcall */
};

struct cxl_transport {
    cxl_engine *engine;
    int fuse_fd;
    cxl_transport_settings settings;
    ports *ports;
    turns *turns;
    upcalls *upcalls;
    absent_names *absent;
    forwarding *forwarding;

    atomic_bool stopping;
    pthread_mutex_t workers_lock; /* of the workers' list */
    pthread_cond_t worker_left;
    cxl_worker *workers;

    _Atomic uint64_t reads, writes, read_bytes, write_bytes, upcall_count, read_copies, spliced_reads, ahead_bytes;
};

/* Nobody waits for an answer any more: the request was interrupted, or the mount is gone. */
bool is_gone(int error);
/* Write an answer to the kernel; that nobody waits for it any more is no error. */
int reply(int fuse_fd, uint64_t unique, int error, const void *data, size_t length);
/* The signal that ends a system call of a worker, or of the thread that passes answers back. */
int wake_signal(void);
/* Who was woken in the moment before such a call is woken again then. */
struct timespec wake_again(void);

/* io.c: false: it is not answered, and the control plane must. */
bool answer_read(cxl_worker *worker, const request *r);
/* *done: bytes that are in the file now; *error: -EREMOTEIO when a fence failed. */
bool answer_write(cxl_worker *worker, const request *r, uint64_t *done, int *error);

/* ahead.c: after an answer of count bytes verify the same number behind them, until a read wants them. */
void ahead_verify(cxl_worker *worker, cxl_map *map, const fuse_wire_read *in, uint64_t count);

#endif
