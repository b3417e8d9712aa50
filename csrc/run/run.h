/* run.h - what the files of the preloaded library (`cxlfs run`) share.
 *
 * The rule: between two calls the library knows nothing that the kernel and the daemon do not know. It intercepts only
 * the calls that it makes faster: large writes. Each of them asks the kernel what the descriptor is, stores the bytes
 * into leased space of that file's ring, and returns after the daemon has taken them in and the kernel knows the size.
 * Whatever cannot be asked, or is answered otherwise, sends the whole call through the kernel. docs/direct.md has the
 * proof for each call.
 *
 * Does not: allocate; wait for a lock; keep a descriptor open between two calls; intercept anything for what it
 * remembers (close is a hint: it ends leases sooner).
 *
 * Invariants
 * - All that is remembered lies in one region of static size, which a child of fork finds empty (MADV_WIPEONFORK). A
 *   process that shares the memory and has another number (vfork) leaves it alone.
 * - A file in the table belongs to the thread that has set its busy flag. Nobody waits for the flag: who finds it set
 *   goes through the kernel.
 * - From the flag on until it is cleared the thread is neither interrupted (all signals but synchronous ones are
 *   blocked) nor cancelled.
 * - Functions use little stack: a signal handler on a small stack may write (limits: tests/native/test_run_library.py).
 */
#ifndef CXLFS_RUN_H
#define CXLFS_RUN_H

#include <setjmp.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include "client/direct.h"
#include "client/placing.h"
#include "persist/persist.h"

#define RUN_EXPORT __attribute__((visibility("default")))

/* Smaller writes are the kernel's: a trip to the daemon costs as much as they do (docs/benchmarks.md). */
enum { RUN_WRITE_FROM = 1 << 20 };
/* A file that ends before this is the kernel's: a lease costs as much as it does. */
enum { RUN_FILE_FROM = 8 << 20 };

enum { RUN_FILES = 16 };         /* with leases at the same time; each has so many mappings: */
enum { RUN_MAPS = CXL_DIRECT_LEASES + 1 };
enum { RUN_PIECES = 16 };        /* of one writev; more of them are the kernel's */

/* Why the kernel got a large write. A file of another file system has no reason. */
typedef enum {
    RUN_DIRECT,                  /* it did not */
    RUN_OTHER_SYSTEM,            /* no mount of cxlfs */
    RUN_NOT_TRUSTED,             /* somebody else's mount */
    RUN_NOT_PERMITTED,           /* this user may not open the medium */
    RUN_NO_MEDIUM,               /* it is not to be found from here, or cannot be mapped */
    RUN_SMALL_PAGES,             /* it is mapped in pages of 4 KiB */
    RUN_NO_SPACE,                /* the daemon gives no space just now */
    RUN_NOT_ALONE,               /* others have the file open, or it is for appending */
    RUN_OTHER_HANDLERS,          /* the program handles SIGSEGV or SIGBUS by itself */
    RUN_BUSY,                    /* another thread writes to the same file */
    RUN_NOT_TAKEN,               /* the daemon has not taken the bytes in */
    RUN_REASONS
} run_reason;

typedef struct {
    uint64_t device, inode;
} run_identity;

/* Of one call. The list is a copy of the program's, what it names is not. */
typedef struct {
    const struct iovec *pieces;
    int count;
} run_bytes;

typedef struct {
    uint8_t *base;               /* where the whole piece is mapped; NULL: nowhere */
    uint64_t offset, length;     /* of the medium */
} run_map;

typedef struct {
    uint64_t id;
    placing_room room;
    uint8_t *data;               /* the first byte of the extent */
    uint32_t *sums;
    uint32_t crc;                /* of the chunk that ends at used, as far as it goes */
} run_room;

typedef struct {
    atomic_int busy;
    run_identity is;             /* inode 0: nothing */
    uint64_t used_ns;            /* when it was used last */
    uint64_t next_bytes;         /* of the next lease */
    bool leased;                 /* all below is valid */
    uint32_t user;               /* who leased it */
    uint32_t chunk_bytes, granularity;
    uint64_t appended;           /* descriptors of this slip, all of them taken in by the daemon between two calls */
    uint8_t *slip;
    uint32_t room, rooms_count;  /* the one that is filled */
    run_room rooms[CXL_DIRECT_LEASES];
    run_map maps[RUN_MAPS];
} run_file;

/* What a child with a table of descriptors of its own is told, and answers. One at a time. */
typedef struct {
    cxl_direct_attach medium;
    cxl_direct_lease lease;
    uint64_t granule;
    int result;
    run_map maps[RUN_MAPS];      /* the slip, and the rooms */
    uint8_t stack[32 << 10] __attribute__((aligned(16)));
} run_order;

typedef struct {
    run_identity is;             /* inode 0: the whole mount */
    run_reason reason;
    uint64_t until_ns;
} run_refusal;

enum { RUN_REFUSALS = 16 };

typedef struct {
    atomic_int process;          /* whose memory this is; 0: nobody has come yet */
    atomic_int used;             /* files with a lease */
    atomic_int leasing;          /* flag of the order, the refusals, and of taking an unused file */
    uint32_t next_refusal;
    run_refusal refusals[RUN_REFUSALS];
    atomic_int is_counted;       /* this process, in the counts */
    atomic_uint said;            /* reasons that are logged: a bit each */
    run_file files[RUN_FILES];
    run_order order;
} run_region;

/* Of all processes of one `cxlfs run --report`, in a file that they share. */
enum { RUN_REASON_BYTES = 96 };
typedef struct {
    atomic_uint_least64_t direct_bytes, kernel_bytes, leases, processes;
    char reasons[RUN_REASONS][RUN_REASON_BYTES];     /* why the kernel got some; empty: not for this */
} run_counts;

extern run_region *run_all;      /* NULL: off */
/* CXLFS_RUN_FROM=BYTES, for tests: shorter writes, in files of any length, on pages of any size. */
extern size_t run_write_from;
extern uint64_t run_file_from;
extern bool run_takes_any_pages;




/* ------------------------------------------------------------------------------- files.c */

uint64_t run_now_ns(void);
/* The region is this process's; false in a child that shares the memory. */
bool run_is_ours(void);
/* What fd is now; false: not a regular file, or the kernel does not say. */
bool run_identify(int fd, run_identity *is, uint32_t *mode);
bool run_is_same(run_identity left, run_identity right);
/* The file, its flag set; NULL: there is none, or another thread has it. fresh: take an unused place for it. */
run_file *run_take(run_identity is, bool fresh);
void run_leave(run_file *file);
/* Its ring is closed and nothing of it mapped any more. Its flag is set. */
void run_end(run_file *file);
/* Files that nobody has written to for a while. */
void run_end_idle(void);
/* It was refused lately, or from now on for a while (device 0: this file alone). */
run_reason run_refused(run_identity is);
void run_refuse(run_identity is, bool whole_mount, run_reason reason);

/* ------------------------------------------------------------------------------ lease.c */

/* Lease space for bytes of the file from offset on. fd is a descriptor of it. RUN_DIRECT, or why not. */
run_reason run_lease(run_file *file, int fd, uint64_t wanted, uint64_t offset);

/* ------------------------------------------------------------------------------ store.c */

/* Store bytes from byte at of the pieces on, as content of the file from offset on, until all are stored or the leases
 * are full; *stored: how many. They are in the ring, and nobody has taken them in. False: nothing counts. */
bool run_store(run_file *file, const run_bytes *from, uint64_t at, uint64_t length, uint64_t offset, uint64_t *stored);
/* The daemon has taken in all that was appended. */
bool run_is_taken(run_file *file);
/* Nothing more is appended to the ring. */
void run_close_slip(run_file *file);
/* The rooms are mapped in large pages, or CXLFS_RUN_FROM says that this does not matter. */
bool run_may_use(const run_file *file);

/* ------------------------------------------------------------------------------ write.c */

enum { RUN_POSITION = -1 };      /* at the file offset, which moves on */

/* All of a write(2) or its like. False: nothing was done, the kernel is to do it. *done: what it returns, errno set. */
bool run_write(int fd, run_bytes from, off_t offset, ssize_t *done);

/* ----------------------------------------------------------------------------- faults.c */

extern _Thread_local sigjmp_buf *run_guard __attribute__((tls_model("initial-exec")));

void run_faults_begin(void);
/* SIGSEGV and SIGBUS are still handled here, and reach this thread (blocked: its mask). */
bool run_faults_are_ours(uint64_t blocked);
/* Run it with faults of any address caught: false where there was one. */
bool run_guarded(bool (*body)(void *), void *argument);

/* ----------------------------------------------------------------------------- report.c */

void run_report_begin(void);
/* So many bytes of a large write went this way, which is logged the first time (CXLFS_RUN_LOG). */
void run_count(run_reason reason, uint64_t bytes);
void run_count_lease(void);

#endif
