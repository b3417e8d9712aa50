/* run.h - what the files of the preloaded library (cxlfs run) share: which descriptors of the process lie on a mount of
 * cxlfs, and who stores into them.
 *
 * The library stands before libc: open, close, rename, locks and all that is rare go on to the kernel; what a program
 * writes into a file of a mount goes through csrc/client. Whatever is refused there, and whatever is not known for
 * certain, takes the way through the kernel: slower, never wrong.
 *
 * Never: prints but where CXLFS_RUN_LOG and CXLFS_RUN_REPORT say; keeps a descriptor that the program closed.
 *
 * Invariants
 * - A descriptor that this process did not open itself, with a function that stands here, is the kernel's alone.
 * - All descriptors of one open file description have one run_file: dup and the like are seen, and what came from
 *   elsewhere is left alone.
 * - The kernel's file offset is always right: write(2) moves it before it stores, with one lseek, which is atomic for
 *   all that share it.
 * - A run_file is never freed: whoever took its lock looks at the slot again.
 * - A thread that is inside (run_enter) calls the kernel for all it calls itself, also from a signal handler.
 *
 * Locks, in the order in which they are taken: of a run_file, of the table. The client's come after both.
 */
#ifndef CXLFS_RUN_H
#define CXLFS_RUN_H

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include "client/client.h"

#define RUN_EXPORT __attribute__((visibility("default")))
#define RUN_UNLIKELY(condition) __builtin_expect(!!(condition), 0)

/* -------------------------------------------------------------------------- functions behind us */

/* Which libc exports without declaring them everywhere. */
int __open_2(const char *path, int flags);
int __open64_2(const char *path, int flags);
int __openat_2(int directory, const char *path, int flags);
int __openat64_2(int directory, const char *path, int flags);
int fcntl64(int fd, int command, ...);

#define RUN_FUNCTIONS(X) \
    X(open) X(open64) X(openat) X(openat64) X(creat) X(creat64) X(mkostemps) X(mkostemps64) \
    X(__open_2) X(__open64_2) X(__openat_2) X(__openat64_2) \
    X(close) X(dup) X(dup2) X(dup3) X(fcntl) X(close_range) X(closefrom) X(sendmsg) \
    X(write) X(writev) X(pwrite64) X(pwritev64) X(pwritev64v2) \
    X(read) X(readv) X(pread64) X(preadv64) X(preadv64v2) \
    X(lseek64) X(ftruncate64) X(fallocate64) X(posix_fallocate64) X(fsync) X(fdatasync) X(syncfs) X(sync) \
    X(sendfile64) X(copy_file_range) X(splice) \
    X(mmap64) X(munmap) X(mremap) \
    X(fopen64) X(freopen64) X(fclose) X(fwrite) X(fwrite_unlocked) X(fread) X(fread_unlocked) X(ungetc) \
    X(fork) X(vfork) X(posix_spawn) X(posix_spawnp) X(system) X(popen) X(_exit) \
    X(execve) X(execv) X(execvp) X(execvpe) X(fexecve) X(execveat)

typedef struct {
#define RUN_MEMBER(name) __typeof__(&name) name;
    RUN_FUNCTIONS(RUN_MEMBER)
#undef RUN_MEMBER
} run_functions;

extern run_functions run_real;
void run_resolve(void);

/* libc's own function of this name (or that of whoever is preloaded behind us). */
#define REAL(function)                                                                                                \
    (RUN_UNLIKELY(run_real.function == NULL) ? (run_resolve(), run_real.function) : run_real.function)

/* ------------------------------------------------------------------------------- settings */

typedef struct {
    bool off;                    /* CXLFS_RUN=off, or no room for what is needed */
    bool maps;                   /* CXLFS_RUN_MMAP is not off */
    bool verifies;               /* CXLFS_RUN_VERIFY is not off: of what is mapped, */
    bool verifies_always;        /* CXLFS_RUN_VERIFY is always: whatever others have verified */
    bool reads;                  /* CXLFS_RUN_READ is not off */
} run_settings;

extern run_settings run_set;

/* ------------------------------------------------------------------------------ descriptors */

enum { RUN_DESCRIPTORS = 1 << 16 };     /* those above go through the kernel */
enum {
    RUN_NOBODY = 0,              /* the kernel's alone */
    RUN_FRESH = 1,               /* opened here, and not looked at yet */
    RUN_INTERNAL = 2,            /* opened by this library: the program does not know it */
};                               /* anything else is a run_file */

extern _Atomic(uintptr_t) run_slots[RUN_DESCRIPTORS];

typedef struct {
    dev_t device;
    atomic_int verdict;          /* 0: not asked; 1: direct; -errno: through the kernel */
    atomic_bool no_private;      /* the medium has no private pages */
} run_mount;

/* An open file description of a regular file on a mount that may be one of cxlfs. */
typedef struct run_file {
    pthread_rwlock_t lock;       /* for reading: bytes are moved; for writing: all else */
    bool reads;                  /* it is for reading alone: direct is NULL; else reader is */
    cxl_direct_file *direct;     /* NULL before enough was written, and where it is not to be had */
    cxl_reader *reader;          /* the same for reading */
    bool refused;                /* for good */
    int anchor;                  /* the descriptor that direct was told */
    pid_t process;
    dev_t device;
    ino_t inode;
    run_mount *mount;
    atomic_bool dirty;           /* something was stored since it was settled */
    atomic_uint_least64_t seen;  /* bytes written or read before direct or reader was there */
    uint64_t bind_from;          /* so many of them, and it is asked for */
    uint32_t descriptors;        /* under the lock of the table */
    struct run_file *next_free;
} run_file;

enum { RUN_READ_FROM = 4 << 10 };       /* shorter reads are the kernel's */

static inline uintptr_t run_slot(int fd)
{
    if ((unsigned)fd >= RUN_DESCRIPTORS)
        return RUN_NOBODY;
    return atomic_load_explicit(&run_slots[fd], memory_order_acquire);
}

/* It is not known to be for writing: what is stored through it need not be settled. */
static inline bool run_only_reads(int fd)
{
    uintptr_t slot = run_slot(fd);
    return slot <= RUN_INTERNAL || ((const run_file *)slot)->reads;
}

/* ------------------------------------------------------------------------------------ inside */

extern _Thread_local int run_depth __attribute__((tls_model("initial-exec")));
extern pid_t run_process;        /* of this table: a child of vfork or clone has another */

typedef struct {
    int saved_errno;
    int cancel_state;
} run_visit;

/* From here on this thread's calls are the library's own. False: they are already. */
bool run_enter(run_visit *visit);
/* errno is as it was before. */
void run_leave(const run_visit *visit);

/* ------------------------------------------------------------------------------- table.c */

/* The file that fd is a descriptor of, with its lock (exclusive: for writing), or NULL. */
run_file *run_take(int fd, bool exclusive);
void run_give(run_file *file);
/* fd was opened with these flags by the program, or by the library. */
void run_opened(int fd, int flags);
/* copy is another descriptor of what fd is. */
void run_duplicated(int fd, int copy);
/* fd is about to be duplicated: it must be known then what it is. */
void run_before_duplicate(int fd);
/* fd is about to be closed: 0, or what became of what was stored. */
int run_before_close(int fd);
/* What was stored through fd can be looked at. 0, or what became of it. */
int run_settle(int fd);
void run_settle_all(void);
/* Nothing is stored directly any more through what fd is of. */
void run_retire(int fd);
/* fd is the kernel's alone from now on. */
void run_detach(int fd);
/* One of the library's own descriptors has been closed. */
void run_detach_internal(int fd);
/* The library's own descriptors lie out of the way. */
int run_move_away(int fd);
int run_highest(void);           /* no slot above it is used */
void run_forget_in_child(void);

/* ------------------------------------------------------------------------------- bind.c */

/* What a descriptor is: RUN_NOBODY, or a file, put into *file. */
uintptr_t run_examine(int fd, run_file *file);
/* file->direct, or file->reader, is there when true; the lock is held for writing. */
bool run_bind(run_file *file, int fd);
bool run_bind_reader(run_file *file, int fd);
/* Whether the mount of a device may be one of cxlfs; notes what became of the last attempt. */
run_mount *run_mount_of(int fd, dev_t device);
void run_judge(run_mount *mount, int fd, int result);
/* The kernel learns how long the file is: it goes by that for O_APPEND, sendfile and the like. */
void run_tell_kernel(int fd);
/* fd is still of this inode: asked of the kernel, which answers from what it knows. */
dev_t run_device_of(const struct statx *found);
bool run_is_still(int fd, dev_t device, ino_t inode);

/* --------------------------------------------------------------------------- transfer.c */

enum { RUN_POSITION = -1 };      /* at the file offset, which moves on */

/* A count or -errno as a system call has it: the count, or -1 with errno set. */
static inline ssize_t run_answer(int64_t result)
{
    if (result < 0)
        errno = (int)-result;
    return result < 0 ? -1 : (ssize_t)result;
}

/* Store pieces; false: nothing was done, the kernel is to do it. *done: what write(2) would return, errno set. */
bool run_write(int fd, const struct iovec *pieces, int count, off_t offset, ssize_t *done);
/* Bytes of all pieces, as far as the kernel would take them at once, as *used of out (IOV_MAX); the last piece is cut.
 * -1: nothing for us. */
int64_t run_add_up(const struct iovec *pieces, int count, struct iovec *out, int *used);

/* ---------------------------------------------------------------------------- reading.c */

/* Read into pieces; false: nothing was done, the kernel is to do it. *done: what read(2) would return, errno set. */
bool run_read(int fd, const struct iovec *pieces, int count, off_t offset, ssize_t *done);

/* ------------------------------------------------------------------------------- send.c */

/* sendfile; false: nothing was done, the kernel is to do it. *done: what it returns. */
bool run_send(int out, int in, off64_t *offset, size_t count, ssize_t *done);

/* ----------------------------------------------------------------------- mapping.c, report.c */

void run_mapping_forget_in_child(void);
void run_report_begin(void);
void run_report_before_fork(void);
void run_report_forget_in_child(void);
void run_report_end(void);
/* One line, where CXLFS_RUN_LOG says. */
void run_log(const char *format, ...) __attribute__((format(printf, 1, 2)));
void run_count_mapped(uint64_t bytes);

#endif
