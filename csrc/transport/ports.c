/* ports.c - open files and handles as the transport's threads see them, and what of each is verified ahead.
 *
 * Never: changes content, keeps a file open, verifies (ahead.c).
 *
 * Locks, in this order: ports.lock, port.lock.
 *
 * Invariants
 * - A port lives while its owner, a handle or a request uses it; a map in use lives, too.
 * - port.writing counts exactly the writes between port_for_write and port_wrote.
 * - Bytes count as verified for one answer, within AHEAD_NS_MAX, and only where they still are the same bytes
 *   of the same extent: those never change, and no id is given twice.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "transport/transport.h"

enum {
    HANDLE_BUCKETS_MIN = 64,
    WRITERS_MAX = 8,              /* threads of one handle that may write without an upcall */
    AHEAD_NS_MAX = 100000000,     /* a page cache would deliver for minutes what it verified once */
};

struct cxl_port {
    uint64_t inode;
    pthread_mutex_t lock;         /* of the following */
    pthread_cond_t quiet;         /* writing became 0 */
    cxl_map *map;
    uint64_t generation;          /* handles allowed in an older one must ask again */
    uint64_t written_ns;
    uint32_t writing;             /* writes that are being copied */
    bool asks;                    /* reads and writes are upcalls, whoever is allowed */
    uint32_t users;               /* handles, requests, and the owner */
};

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
    uint64_t allowed;             /* port->lock, as the following: generation of the port; 0: never */
    uint32_t writers[WRITERS_MAX];
    uint32_t writer_count;
    uint64_t read_end;            /* where the last long read ended */
    verified_ahead ahead;
};

struct ports {
    pthread_rwlock_t lock;        /* of the following */
    handle **buckets;
    uint64_t bucket_count;
    uint64_t handle_count;
    _Atomic uint64_t ahead_serial;
};

/* -------------------------------------------------------------------------------------- ports */

int cxl_port_new(uint64_t inode, cxl_map *live, cxl_port **out)
{
    cxl_port *port = cxl_allocate_zeroed(1, sizeof(*port));
    if (port == NULL)
        return -ENOMEM;
    port->inode = inode;
    port->generation = 1;
    port->users = 1;
    port->map = live;
    map_use(live);
    pthread_mutex_init(&port->lock, NULL);
    pthread_cond_init(&port->quiet, NULL);
    *out = port;
    return 0;
}

void port_drop(cxl_port *port)
{
    pthread_mutex_lock(&port->lock);
    bool last = --port->users == 0;
    pthread_mutex_unlock(&port->lock);
    if (!last)
        return;
    cxl_map_free(port->map);
    pthread_mutex_destroy(&port->lock);
    pthread_cond_destroy(&port->quiet);
    free(port);
}

uint64_t port_inode(const cxl_port *port)
{
    return port->inode;
}

void cxl_port_free(cxl_port *port)
{
    if (port != NULL)
        port_drop(port);
}

void cxl_port_set_map(cxl_port *port, cxl_map *live)
{
    map_use(live);
    pthread_mutex_lock(&port->lock);
    cxl_map *old = port->map;
    port->map = live;
    pthread_mutex_unlock(&port->lock);
    cxl_map_free(old);
}

uint64_t cxl_port_stop(cxl_port *port)
{
    pthread_mutex_lock(&port->lock);
    port->generation++;
    while (port->writing != 0)
        pthread_cond_wait(&port->quiet, &port->lock);
    uint64_t written_ns = port->written_ns;
    port->written_ns = 0;
    pthread_mutex_unlock(&port->lock);
    return written_ns;
}

uint64_t cxl_port_written(cxl_port *port)
{
    pthread_mutex_lock(&port->lock);
    uint64_t written_ns = port->written_ns;
    port->written_ns = 0;
    pthread_mutex_unlock(&port->lock);
    return written_ns;
}

void cxl_port_ask(cxl_port *port, int asks)
{
    pthread_mutex_lock(&port->lock);
    port->asks = asks != 0;
    pthread_mutex_unlock(&port->lock);
}

/* ------------------------------------------------------------------------------------ handles */

ports *ports_new(void)
{
    ports *p = cxl_allocate_zeroed(1, sizeof(*p));
    if (p == NULL)
        return NULL;
    p->bucket_count = HANDLE_BUCKETS_MIN;
    p->buckets = cxl_allocate_zeroed(p->bucket_count, sizeof(handle *));
    if (p->buckets == NULL) {
        free(p);
        return NULL;
    }
    pthread_rwlock_init(&p->lock, NULL);
    return p;
}

void ports_free(ports *p)
{
    if (p == NULL)
        return;
    for (uint64_t i = 0; i < p->bucket_count; i++) {
        while (p->buckets[i] != NULL)
            handle_close(p, p->buckets[i]->id);
    }
    free(p->buckets);
    pthread_rwlock_destroy(&p->lock);
    free(p);
}

/* Handles are numbered one after the other, so that their low bits spread them. */
static handle **bucket_of(ports *p, uint64_t id)
{
    return &p->buckets[id & (p->bucket_count - 1)];
}

static handle *find(ports *p, uint64_t id)
{
    handle *h = *bucket_of(p, id);
    while (h != NULL && h->id != id)
        h = h->next;
    return h;
}

/* Without memory the table stays as it is: slower, not wrong. */
static void grow(ports *p)
{
    handle **old = p->buckets;
    uint64_t old_count = p->bucket_count;
    handle **fresh = cxl_allocate_zeroed(old_count * 2, sizeof(*fresh));
    if (fresh == NULL)
        return;
    p->buckets = fresh;
    p->bucket_count = old_count * 2;
    for (uint64_t i = 0; i < old_count; i++) {
        for (handle *h = old[i], *next; h != NULL; h = next) {
            handle **bucket = bucket_of(p, h->id);
            next = h->next;
            h->next = *bucket;
            *bucket = h;
        }
    }
    free(old);
}

int handle_open(ports *p, uint64_t id, cxl_port *port, bool readable)
{
    handle *h = cxl_allocate_zeroed(1, sizeof(*h));
    if (h == NULL)
        return -ENOMEM;
    h->id = id;
    h->port = port;
    h->readable = readable;
    pthread_rwlock_wrlock(&p->lock);
    int result = find(p, id) != NULL ? -EEXIST : 0;
    if (result == 0) {
        if (p->handle_count >= p->bucket_count)
            grow(p);
        handle **bucket = bucket_of(p, id);
        h->next = *bucket;
        *bucket = h;
        p->handle_count++;
        pthread_mutex_lock(&port->lock);
        port->users++;
        pthread_mutex_unlock(&port->lock);
    }
    pthread_rwlock_unlock(&p->lock);
    if (result != 0)
        free(h);
    return result;
}

void handle_close(ports *p, uint64_t id)
{
    pthread_rwlock_wrlock(&p->lock);
    handle **link = bucket_of(p, id);
    while (*link != NULL && (*link)->id != id)
        link = &(*link)->next;
    handle *h = *link;
    if (h != NULL) {
        *link = h->next;
        p->handle_count--;
    }
    pthread_rwlock_unlock(&p->lock);
    if (h != NULL)
        port_drop(h->port);
    free(h);
}

static bool knows_writer(const handle *h, uint32_t pid)
{
    for (uint32_t i = 0; i < h->writer_count; i++) {
        if (h->writers[i] == pid)
            return true;
    }
    return false;
}

void handle_allow(ports *p, uint64_t id, uint32_t pid)
{
    pthread_rwlock_rdlock(&p->lock);
    handle *h = find(p, id);
    if (h != NULL) {
        pthread_mutex_lock(&h->port->lock);
        h->allowed = h->port->generation;
        if (!knows_writer(h, pid)) {
            /* A full table forgets the oldest, which then asks again. */
            if (h->writer_count == WRITERS_MAX)
                memmove(h->writers, h->writers + 1, --h->writer_count * sizeof(*h->writers));
            h->writers[h->writer_count++] = pid;
        }
        pthread_mutex_unlock(&h->port->lock);
    }
    pthread_rwlock_unlock(&p->lock);
}

/* The handle, which stays until handle_unlock, with its port's lock; NULL: it was closed. */
static handle *handle_lock(ports *p, uint64_t id)
{
    pthread_rwlock_rdlock(&p->lock);
    handle *h = find(p, id);
    if (h != NULL)
        pthread_mutex_lock(&h->port->lock);
    else
        pthread_rwlock_unlock(&p->lock);
    return h;
}

static void handle_unlock(ports *p, handle *h)
{
    pthread_mutex_unlock(&h->port->lock);
    pthread_rwlock_unlock(&p->lock);
}

/* ----------------------------------------------------------------------------------- requests */

cxl_port *port_for_read(ports *p, uint64_t id, cxl_map **map)
{
    cxl_port *port = NULL;
    pthread_rwlock_rdlock(&p->lock);
    handle *h = find(p, id);
    if (h != NULL && h->readable) {
        pthread_mutex_lock(&h->port->lock);
        if (!h->port->asks) {
            port = h->port;
            port->users++;
            *map = port->map;
            map_use(*map);
        }
        pthread_mutex_unlock(&h->port->lock);
    }
    pthread_rwlock_unlock(&p->lock);
    return port;
}

cxl_port *port_for_write(ports *p, uint64_t id, uint32_t pid, cxl_map **map)
{
    cxl_port *port = NULL;
    pthread_rwlock_rdlock(&p->lock);
    handle *h = find(p, id);
    if (h != NULL) {
        pthread_mutex_lock(&h->port->lock);
        if (!h->port->asks && h->allowed == h->port->generation && knows_writer(h, pid)) {
            port = h->port;
            port->users++;
            port->writing++;
            *map = port->map;
            map_use(*map);
        }
        pthread_mutex_unlock(&h->port->lock);
    }
    pthread_rwlock_unlock(&p->lock);
    return port;
}

void port_wrote(cxl_port *port, bool any)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    pthread_mutex_lock(&port->lock);
    if (any)
        port->written_ns = (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
    if (--port->writing == 0)
        pthread_cond_broadcast(&port->quiet);
    pthread_mutex_unlock(&port->lock);
}

/* -------------------------------------------------------------------------------- verified ahead */

uint64_t handle_take_ahead(ports *p, uint64_t id, const extent_range *range)
{
    uint64_t done = 0;
    handle *h = handle_lock(p, id);
    if (h == NULL)
        return 0;
    verified_ahead *a = &h->ahead;
    if (a->extent_id == range->extent->id && a->extent_offset == range->extent_offset &&
        monotonic_ns() - a->began_ns <= AHEAD_NS_MAX)
        done = smaller(a->done, range->length);
    *a = (verified_ahead){.serial = 0};
    handle_unlock(p, h);
    return done;
}

uint64_t handle_begin_ahead(ports *p, uint64_t id, uint64_t offset, uint64_t count, const extent_range *next)
{
    uint64_t serial = 0;
    handle *h = handle_lock(p, id);
    if (h == NULL)
        return 0;
    if (next->extent != NULL && h->read_end == offset) {
        serial = atomic_fetch_add(&p->ahead_serial, 1) + 1;
        h->ahead = (verified_ahead){
            .serial = serial, .extent_id = next->extent->id, .extent_offset = next->extent_offset,
            .began_ns = monotonic_ns(),
        };
    }
    h->read_end = offset + count;
    handle_unlock(p, h);
    return serial;
}

bool handle_note_ahead(ports *p, uint64_t id, uint64_t serial, uint64_t done)
{
    handle *h = handle_lock(p, id);
    if (h == NULL)
        return false;
    bool same = h->ahead.serial == serial;
    if (same)
        h->ahead.done = done;
    handle_unlock(p, h);
    return same;
}
