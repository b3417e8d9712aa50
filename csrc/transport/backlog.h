/* backlog.h - requests that wait, first come first served: for a worker that may go with them to the control
 * plane, or for room in the socket.
 *
 * Each is a copy, as the buffer of the worker that read it is needed for the next request. What waits is
 * bounded in bytes: every request but FORGET has a thread of some program waiting for it, whose kernel
 * stack is larger than the request, but for a WRITE, which may bring megabytes.
 *
 * Never: locks (its owner does), answers.
 *
 * Invariants
 * - bytes is the sum of what the entries take.
 */
#ifndef CXLFS_BACKLOG_H
#define CXLFS_BACKLOG_H

#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "transport/transport.h"

typedef struct waiting waiting;
struct waiting {
    waiting *next;
    cxl_upcall upcall;            /* of those for the control plane; arguments: bytes */
    size_t length;
    uint8_t bytes[];
};

typedef struct {
    waiting *first;
    waiting **last;
    uint64_t bytes;
    uint64_t bytes_max;
    uint64_t count;               /* of all that ever waited */
} backlog;

static inline void backlog_init(backlog *b, uint64_t bytes_max)
{
    *b = (backlog){.last = &b->first, .bytes_max = bytes_max};
}

/* A copy, or NULL. */
static inline waiting *waiting_new(const struct iovec *parts, size_t count)
{
    size_t length = 0;
    for (size_t i = 0; i < count; i++)
        length += parts[i].iov_len;
    waiting *w = cxl_allocate(sizeof(*w) + length);
    if (w == NULL)
        return NULL;
    *w = (waiting){.length = length};
    uint8_t *to = w->bytes;
    for (size_t i = 0; i < count; i++) {
        memcpy(to, parts[i].iov_base, parts[i].iov_len);
        to += parts[i].iov_len;
    }
    return w;
}

static inline bool backlog_has_room(const backlog *b, const waiting *w)
{
    return w != NULL && b->bytes + sizeof(*w) + w->length <= b->bytes_max;
}

static inline void backlog_put(backlog *b, waiting *w)
{
    *b->last = w;
    b->last = &w->next;
    b->bytes += sizeof(*w) + w->length;
    b->count++;
}

/* NULL: nothing waits. */
static inline waiting *backlog_take(backlog *b)
{
    waiting *w = b->first;
    if (w == NULL)
        return NULL;
    b->first = w->next;
    if (b->first == NULL)
        b->last = &b->first;
    b->bytes -= sizeof(*w) + w->length;
    w->next = NULL;
    return w;
}

static inline void backlog_clear(backlog *b)
{
    for (waiting *w; (w = backlog_take(b)) != NULL;)
        free(w);
}

#endif
