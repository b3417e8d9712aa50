/* threads.h - what the parts of threads.c share. */
#ifndef CXLFS_TESTS_THREADS_H
#define CXLFS_TESTS_THREADS_H

#include <stdio.h>
#include <unistd.h>

#include "transport/transport.h"

enum {
    KERNELS = 3, WORKERS = 2, SLOTS = 4, FILES = 3,
    STEADY = 2,                   /* the first files lose nothing; the others are cut and punched, too */
    REGION = 64 << 10, FILE_BYTES = REGION * KERNELS * SLOTS,
    PIECE_MAX = 40000, MESSAGE_MAX = 1 << 16,
    SEGMENT_BYTES = 128 << 10, SEGMENTS = 400, CHUNK = 4096, FIRST = 4096,
    DISCARDED_MIN = 40,           /* references of what ends: more are dropped in steps */
    REQUEST_MAX = CONTROL_BYTES_MAX, POLL_NS = 20000, WAITING_MAX = 3 * PIECE_MAX, OTHER = 3, HANDLE_READ_ONLY = 100,
};

#define CHECK(condition, ...)     \
    do {                          \
        if (!(condition)) {       \
            printf(__VA_ARGS__);  \
            putchar('\n');        \
            fflush(stdout);       \
            _exit(1);             \
        }                         \
    } while (0)

typedef struct {
    cxl_map *live, *committed;
    cxl_port *port;
} file;

extern cxl_engine *engine;
extern file files[FILES];
extern pthread_mutex_t store;       /* of the contents, leases and segments, as in the daemon */
extern uint64_t seed, steps;
extern atomic_bool done;

static inline uint64_t random_below(uint64_t *state, uint64_t limit)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (*state >> 33) % limit;
}

/* threads_store.c; the first five with the lock of the store held */
void store_begin(void);
void commit(file *f, bool written);
void drop_discarded(void);
uint64_t open_extent(void);
void one_step(uint64_t *rng, cxl_transport *transport);
/* threads_snapshots.c; the first one with the lock of the store, the others without: true while some are being made */
void begin_snapshot(file *f, uint64_t *rng);
bool step_snapshots(uint64_t *rng);
void end_snapshots(uint64_t *rng);
/* Questions about everything, without a lock. */
void ask_everything(uint64_t *rng, cxl_transport *transport);

#endif
