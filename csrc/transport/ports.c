/* ports.c - open files and handles as the transport's threads see them.
 *
 * Never: changes content, or keeps a file open.
 *
 * Invariants
 * - A port lives while its owner, a handle or a request uses it; a map in use lives, too.
 * - port.writing counts exactly the writes between port_for_write and port_wrote.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "transport/transport.h"

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

/* ------------------------------------------------------------------------------------ handles */

int ports_init(cxl_transport *t)
{
    pthread_rwlock_init(&t->handles, NULL);
    t->bucket_count = HANDLE_BUCKETS_MIN;
    t->buckets = cxl_allocate_zeroed(t->bucket_count, sizeof(handle *));
    return t->buckets == NULL ? -ENOMEM : 0;
}

void ports_free(cxl_transport *t)
{
    for (uint64_t i = 0; t->buckets != NULL && i < t->bucket_count; i++) {
        while (t->buckets[i] != NULL)
            cxl_handle_close(t, t->buckets[i]->id);
    }
    free(t->buckets);
    pthread_rwlock_destroy(&t->handles);
}

/* Handles are numbered one after the other, so that their low bits spread them. */
static handle **bucket_of(cxl_transport *t, uint64_t id)
{
    return &t->buckets[id & (t->bucket_count - 1)];
}

static handle *find(cxl_transport *t, uint64_t id)
{
    handle *h = *bucket_of(t, id);
    while (h != NULL && h->id != id)
        h = h->next;
    return h;
}

/* Without memory the table stays as it is: slower, not wrong. */
static void grow(cxl_transport *t)
{
    handle **old = t->buckets;
    uint64_t old_count = t->bucket_count;
    handle **fresh = cxl_allocate_zeroed(old_count * 2, sizeof(*fresh));
    if (fresh == NULL)
        return;
    t->buckets = fresh;
    t->bucket_count = old_count * 2;
    for (uint64_t i = 0; i < old_count; i++) {
        for (handle *h = old[i], *next; h != NULL; h = next) {
            handle **bucket = bucket_of(t, h->id);
            next = h->next;
            h->next = *bucket;
            *bucket = h;
        }
    }
    free(old);
}

int cxl_handle_open(cxl_transport *transport, uint64_t id, cxl_port *port, int readable)
{
    handle *h = cxl_allocate_zeroed(1, sizeof(*h));
    if (h == NULL)
        return -ENOMEM;
    h->id = id;
    h->port = port;
    h->readable = readable != 0;
    pthread_rwlock_wrlock(&transport->handles);
    int result = find(transport, id) != NULL ? -EEXIST : 0;
    if (result == 0) {
        if (transport->handle_count >= transport->bucket_count)
            grow(transport);
        handle **bucket = bucket_of(transport, id);
        h->next = *bucket;
        *bucket = h;
        transport->handle_count++;
        pthread_mutex_lock(&port->lock);
        port->users++;
        pthread_mutex_unlock(&port->lock);
    }
    pthread_rwlock_unlock(&transport->handles);
    if (result != 0)
        free(h);
    return result;
}

void cxl_handle_close(cxl_transport *transport, uint64_t id)
{
    pthread_rwlock_wrlock(&transport->handles);
    handle **link = bucket_of(transport, id);
    while (*link != NULL && (*link)->id != id)
        link = &(*link)->next;
    handle *h = *link;
    if (h != NULL) {
        *link = h->next;
        transport->handle_count--;
    }
    pthread_rwlock_unlock(&transport->handles);
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

void cxl_handle_allow(cxl_transport *transport, uint64_t id, uint32_t pid)
{
    pthread_rwlock_rdlock(&transport->handles);
    handle *h = find(transport, id);
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
    pthread_rwlock_unlock(&transport->handles);
}

handle *handle_lock(cxl_transport *t, uint64_t id)
{
    pthread_rwlock_rdlock(&t->handles);
    handle *h = find(t, id);
    if (h != NULL)
        pthread_mutex_lock(&h->port->lock);
    else
        pthread_rwlock_unlock(&t->handles);
    return h;
}

void handle_unlock(cxl_transport *t, handle *h)
{
    pthread_mutex_unlock(&h->port->lock);
    pthread_rwlock_unlock(&t->handles);
}

/* ----------------------------------------------------------------------------------- requests */

cxl_port *port_for_read(cxl_transport *t, uint64_t id, cxl_map **map)
{
    cxl_port *port = NULL;
    pthread_rwlock_rdlock(&t->handles);
    handle *h = find(t, id);
    if (h != NULL && h->readable) {
        port = h->port;
        pthread_mutex_lock(&port->lock);
        port->users++;
        *map = port->map;
        map_use(*map);
        pthread_mutex_unlock(&port->lock);
    }
    pthread_rwlock_unlock(&t->handles);
    return port;
}

cxl_port *port_for_write(cxl_transport *t, uint64_t id, uint32_t pid, cxl_map **map)
{
    cxl_port *port = NULL;
    pthread_rwlock_rdlock(&t->handles);
    handle *h = find(t, id);
    if (h != NULL) {
        pthread_mutex_lock(&h->port->lock);
        if (h->allowed == h->port->generation && knows_writer(h, pid)) {
            port = h->port;
            port->users++;
            port->writing++;
            *map = port->map;
            map_use(*map);
        }
        pthread_mutex_unlock(&h->port->lock);
    }
    pthread_rwlock_unlock(&t->handles);
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
