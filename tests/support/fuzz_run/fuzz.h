/* fuzz.h - what the files of the random programs share: the world that all processes of a program see, random draws,
 * descriptors and names, and how results are reported.
 *
 * A program is a seed and a list of steps. Step S of seed N draws from a generator of its own, so that some can be left
 * out without changing the others. Each step plays one kind of operation and reports what the calls returned.
 *
 * Invariants
 * - What is reported is the same on every file system that does what POSIX and Linux say: no times, no numbers of
 *   processes, inodes or blocks, no order that a scheduler chooses.
 * - Nothing is asked of the kernel beyond what a step is about: a question could make a stale answer right.
 */
#ifndef FUZZ_H
#define FUZZ_H

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SLOTS = 8, NAMES = 4, STREAMS = 2, MAPS = 3, FILES_MAX = 512, STEPS_MAX = 1024 };
enum { DESCRIPTORS = 1024 };
enum { KIB = 1 << 10, MIB = 1 << 20, PAGE = 4096 };
enum { SOURCE_BYTES = 8 * MIB, LARGEST = 3 * MIB, OFFSET_MAX = 6 * MIB, LOG_BYTES = 1 * MIB };

typedef struct {
    int fd;                          /* -1: closed */
    int file;                        /* index in changes of the world, -1: none */
} slot;

typedef struct {
    uint8_t *base;                   /* NULL: unmapped */
    size_t bytes;
    int file;
    unsigned version;                /* changes of the file when it was mapped */
    bool shared, writable;
} mapping;

/* Shared by all processes of a program. */
typedef struct {
    int names[NAMES];                /* file of each name, -1: none */
    int files;                       /* used ones of changes */
    unsigned changes[FILES_MAX];     /* steps that may have changed the content of a file */
    atomic_uint turn;                /* step whose turn it is, of two processes */
    atomic_uint handled;             /* signals that were handled */
    atomic_uint flag;                /* of one step */
    atomic_bool stopped;             /* the daemon is gone */
    atomic_uint used;                /* bytes of text */
    char text[LOG_BYTES];
} world;

enum use { ALONE, SAVES, PUBLISHES };   /* SAVES: touches the picked slot alone, maps nothing: played in saves, too;
                                           PUBLISHES: and closes copies of it, or has it made durable */
typedef struct {
    const char *name;
    unsigned weight;
    void (*play)(void);
    enum use use;
} kind;

extern world *shared;
extern uint8_t *source;              /* random bytes */
extern uint8_t *target;              /* private memory to read into, LARGEST bytes */
extern slot slots[SLOTS];
extern mapping maps[MAPS];
extern FILE *streams[STREAMS];
extern uint64_t seed;
extern int step;
extern char player;                  /* 'a', or 'b' for the second process */
extern const char *playing;          /* name of the kind */
extern bool strict;                  /* private mappings are compared after later writes, too */

extern const kind data_kinds[], size_kinds[], descriptor_kinds[], memory_kinds[], process_kinds[], stream_kinds[],
    thread_kinds[], ring_kinds[];

/* --------------------------------------------------------------------------------- main.c */

uint64_t draw(void);
static inline unsigned below(unsigned n)
{
    return (unsigned)((draw() >> 20) % n);
}
size_t a_length(void);
off_t an_offset(void);
const uint8_t *some_bytes(size_t length);   /* random bytes, other ones each time */
uint64_t sum_of(const void *bytes, size_t length);
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* A result, or -errno. Marks the world as stopped when the daemon is gone. */
long answer(long result);
const char *name_of(int name);
slot *pick(void);                            /* an open slot if there is one */
int make_file(void);
void changed(int file);
void close_slot(slot *one);
void be_killed_with_parent(void);
int finish_child(pid_t child);               /* waits; the signal that ended it, or its status */

/* --------------------------------------------------------------------------------- data.c */

/* One of the ways to call write or pwrite (offset -1: at the position). */
long write_somehow(unsigned way, int fd, const void *bytes, size_t length, off_t offset);
long read_somehow(unsigned way, int fd, void *bytes, size_t length, off_t offset);
enum { WAYS = 6 };
/* All of it as far as the file goes, whatever pieces it comes in: a call that was interrupted, or gave fewer bytes than
 * there were, is reported, and repeated. */
long read_all(int fd, void *bytes, size_t length, off_t offset);
/* How many blocks of a file are those at 4096 more of bytes each, in any order; the others are reported. */
int whole_blocks(int fd, const uint8_t *bytes, size_t length, int count);

/* --------------------------------------------------------------------------------- memory.c */

void install_handlers(void);
void report_mapping(mapping *one);

/* --------------------------------------------------------------------------------- processes.c */

int exec_child(int argc, char **argv);
enum { WORLD_FD = 200 };

#endif
