/* turns.c - how many workers wait for requests, and how.
 *
 * A processor with nothing to do halts, and waking it takes a virtual machine 30 to 90 us, a real one that
 * sleeps deeply as long. Who saves a small file waits for six requests, one after the other; with a sleeping
 * worker woken for each, waking is a third of the time. So a client that is alone and asks for little is
 * served by one worker, which looks for the next request for a while before it sleeps, as KVM does before it
 * halts a guest's processor (halt_poll_ns): 1.2 ms become 0.8 for the save, two cores. The others rest here,
 * not in read(2): there the kernel wakes one for every request, for nothing where one that is awake takes it.
 *
 * With several clients, or long requests, all workers wait in read(2), and the kernel chooses: polling
 * gained nothing there, and took processors from the clients (two readers of 4 KiB: 0.6 times as fast).
 *
 * Never: reads a request, holds its lock over a system call that may sleep.
 *
 * Invariants
 * - A worker begins to rest only where one thread is served alone, and another worker waits for requests.
 * - They come back LOOK_NS after the first request that is long or of another thread, at the latest, and when
 *   the active one has been busy with one request for that long, to twice that.
 * - At most one worker polls, and only where polling has just paid.
 */
#include <errno.h>
#include <poll.h>

#include "transport/transport.h"

enum {
    LOOK_NS = 1000000,
    ALONE_REQUESTS = 16,    /* of one thread, none of them long, until the others rest */
};

/* READ and WRITE have their size at the same place. */
static bool takes_long(const request *r)
{
    const fuse_wire_read *in = (const void *)r->arguments;
    bool moves_data = r->header->opcode == FUSE_WIRE_READ || r->header->opcode == FUSE_WIRE_WRITE;
    return moves_data && r->length >= sizeof(*in) && in->size >= LONG_BYTES;
}

static bool is_alone(const turns *s)
{
    return s->in_a_row >= ALONE_REQUESTS;
}

void turns_init(turns *s)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->rest, NULL);
    pthread_cond_init(&s->look, &attributes);
    pthread_condattr_destroy(&attributes);
}

void turns_free(turns *s)
{
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->rest);
    pthread_cond_destroy(&s->look);
}

void turns_stop(turns *s)
{
    pthread_mutex_lock(&s->lock);
    pthread_cond_broadcast(&s->rest);
    pthread_cond_broadcast(&s->look);
    pthread_mutex_unlock(&s->lock);
}

void turns_count(turns *s, uint32_t *active, uint32_t *busy)
{
    pthread_mutex_lock(&s->lock);
    *active = s->active;
    *busy = s->busy;
    pthread_mutex_unlock(&s->lock);
}

/* ------------------------------------------------------------------------------------- resting */

/* With the lock: one look, by one of those that rest, at whether they are needed. While nothing happens
 * nobody looks: turn_took tells when it goes on. */
static void look(turns *s)
{
    uint64_t seen = s->taken;
    uint64_t at = monotonic_ns() + LOOK_NS;
    const struct timespec until = {(time_t)(at / 1000000000), (long)(at % 1000000000)};
    s->looking = true;
    if (pthread_cond_timedwait(&s->look, &s->lock, &until) == ETIMEDOUT && s->taken == seen) {
        if (s->busy >= s->active) {
            s->in_a_row = 0;
        } else {
            s->dozing = true;
            pthread_cond_wait(&s->look, &s->lock);
            s->dozing = false;
        }
    }
    s->looking = false;
}

/* With the lock: wait while the active ones are enough. Who comes back sends the next one to look. */
static void rest(cxl_transport *t)
{
    turns *s = &t->turns;
    while (is_alone(s) && s->active > 0 && !atomic_load(&t->stopping)) {
        if (s->looking)
            pthread_cond_wait(&s->rest, &s->lock);
        else
            look(s);
    }
    if (!s->looking)
        pthread_cond_signal(&s->rest);
}

/* --------------------------------------------------------------------------------------- turns */

static bool is_request_waiting(const cxl_transport *t)
{
    struct pollfd fuse = {.fd = t->fuse_fd, .events = POLLIN};
    return poll(&fuse, 1, 0) != 0;
}

void turn_begin(cxl_worker *worker)
{
    cxl_transport *t = worker->transport;
    turns *s = &t->turns;
    pthread_mutex_lock(&s->lock);
    s->active -= worker->active;
    if (is_alone(s) && s->active > s->busy)
        rest(t);
    s->active++;
    worker->active = true;
    bool polls = is_alone(s) && s->polling_pays;
    pthread_mutex_unlock(&s->lock);
    worker->began_ns = monotonic_ns();
    while (polls && !is_request_waiting(t))
        polls = monotonic_ns() - worker->began_ns < t->settings.poll_ns && !atomic_load(&t->stopping);
}

void turn_took(cxl_worker *worker, const request *r)
{
    const cxl_transport *t = worker->transport;
    turns *s = &worker->transport->turns;
    uint64_t waited_ns = monotonic_ns() - worker->began_ns;
    uint32_t client = r->header->pid;  /* 0: the kernel asks for something that nobody waits for */
    worker->busy = true;
    pthread_mutex_lock(&s->lock);
    s->polling_pays = waited_ns < t->settings.poll_ns;
    s->taken++;
    s->busy++;
    if (takes_long(r) || (client != 0 && client != s->client)) {
        s->client = client;
        s->in_a_row = 0;
    } else if (client != 0 && !is_alone(s)) {
        s->in_a_row++;
    }
    if (s->dozing)
        pthread_cond_signal(&s->look);
    pthread_mutex_unlock(&s->lock);
}

void turn_end(cxl_worker *worker)
{
    turns *s = &worker->transport->turns;
    if (!worker->busy)
        return;
    worker->busy = false;
    pthread_mutex_lock(&s->lock);
    s->busy--;
    pthread_mutex_unlock(&s->lock);
}

bool turn_others_wait(turns *s)
{
    uint32_t active, busy;
    turns_count(s, &active, &busy);
    return active > busy;
}

void turn_leave(cxl_worker *worker)
{
    turns *s = &worker->transport->turns;
    turn_end(worker);
    pthread_mutex_lock(&s->lock);
    s->active -= worker->active;
    worker->active = false;
    pthread_cond_signal(&s->look);
    pthread_mutex_unlock(&s->lock);
}
