/* ahead.h - a thread of the process that asks for room before it is needed, so that nobody who copies waits for it. */
#ifndef CXLFS_AHEAD_H
#define CXLFS_AHEAD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct cxl_direct_file;

/* What a file has to do with it. */
typedef struct {
    bool is_permitted;           /* such a thread may be there; these two under the lock of the file */
    bool is_off;                 /* it has failed, or cannot be, until the file is settled */
    atomic_bool is_over;         /* the file is about to be closed */
    struct cxl_direct_file *next;/* of those that wait; from here on under the lock of ahead.c */
    enum { AHEAD_IDLE, AHEAD_WAITS, AHEAD_SERVED } state;
    uint64_t wanted;             /* of the request, */
    uint64_t file_offset;        /* and for what */
} ahead_file;

/* With the file locked: have so much asked for soon. Nothing happens where it waits already. */
void ahead_ask(struct cxl_direct_file *file, uint64_t wanted, uint64_t file_offset);
/* Nothing is asked for any more, and the thread does not know the file, when this returns. Without the lock. */
void ahead_forget(struct cxl_direct_file *file);

/* Around a fork: the child has no such thread, and nothing waits there. */
void ahead_before_fork(void);
void ahead_after_fork(void);
void ahead_in_child(void);

#endif
