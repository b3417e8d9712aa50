/* upcalls.c - which worker goes with a request to the control plane.
 *
 * An upcall is served by the thread that read the request, which spares a hand-over. It may take long: a
 * fallocate, a rename that publishes gigabytes, the lock that all of them want. Reads and writes are
 * nobody's business but the workers', so the last of them never goes: what it reads meanwhile waits here,
 * and whoever comes back from an upcall takes the next one along. Reads of a megabyte beside three programs
 * that do nothing but fallocate, two workers: 5.2 k/s where both may go, 12.7 k/s with nobody else.
 *
 * What is done in steps (a write that makes room) is put back behind the others that wait, and goes on
 * when it is its turn again.
 *
 * Never: reads requests, answers.
 *
 * Invariants
 * - Of several workers one at least is without an upcall, unless what waits would take more than the
 *   bound, or there is no memory: then the last one goes, too, and reads wait for it.
 * - Upcalls wait only while all workers but one are with one: each that comes back looks here first.
 */
#include "transport/backlog.h"

struct upcalls {
    pthread_mutex_t lock;         /* of the following */
    uint32_t workers;
    uint32_t under_way;
    backlog waiting;
};

upcalls *upcalls_new(uint64_t waiting_bytes_max)
{
    upcalls *u = cxl_allocate_zeroed(1, sizeof(*u));
    if (u == NULL)
        return NULL;
    pthread_mutex_init(&u->lock, NULL);
    backlog_init(&u->waiting, waiting_bytes_max);
    return u;
}

void upcalls_free(upcalls *u)
{
    if (u == NULL)
        return;
    backlog_clear(&u->waiting);
    pthread_mutex_destroy(&u->lock);
    free(u);
}

void upcalls_add_worker(upcalls *u)
{
    pthread_mutex_lock(&u->lock);
    u->workers++;
    pthread_mutex_unlock(&u->lock);
}

void upcalls_remove_worker(upcalls *u, upcall_state *own)
{
    pthread_mutex_lock(&u->lock);
    u->workers--;
    u->under_way -= own->under_way;
    own->under_way = false;
    pthread_mutex_unlock(&u->lock);
    free(own->held);
    own->held = NULL;
}

/* With the lock. */
static bool go(upcalls *u, upcall_state *own, bool must)
{
    if (!must && u->workers > 1 && u->under_way + 1 >= u->workers)
        return false;
    u->under_way++;
    own->under_way = true;
    return true;
}

bool upcall_begin(upcalls *u, upcall_state *own, const cxl_upcall *upcall)
{
    pthread_mutex_lock(&u->lock);
    bool goes = go(u, own, false);
    pthread_mutex_unlock(&u->lock);
    if (goes)
        return true;

    const struct iovec arguments = {(void *)(uintptr_t)upcall->arguments, upcall->length};
    waiting *w = waiting_new(&arguments, upcall->length > 0 ? 1 : 0);  /* that of a lease has none */
    if (w != NULL) {
        w->upcall = *upcall;
        w->upcall.arguments = w->bytes;
    }
    pthread_mutex_lock(&u->lock);
    goes = go(u, own, !backlog_has_room(&u->waiting, w));
    if (!goes)
        backlog_put(&u->waiting, w);
    pthread_mutex_unlock(&u->lock);
    if (goes)
        free(w);
    return goes;
}

bool upcall_next(upcalls *u, upcall_state *own, cxl_upcall *out)
{
    free(own->held);
    own->held = NULL;
    if (!own->under_way)
        return false;
    pthread_mutex_lock(&u->lock);
    own->held = backlog_take(&u->waiting);
    if (own->held == NULL) {
        u->under_way--;
        own->under_way = false;
    }
    pthread_mutex_unlock(&u->lock);
    if (own->held == NULL)
        return false;
    *out = own->held->upcall;
    return true;
}

bool upcall_put_back(upcalls *u, upcall_state *own, const cxl_upcall *upcall)
{
    waiting *w = own->held;
    if (w == NULL) {
        const struct iovec arguments = {(void *)(uintptr_t)upcall->arguments, upcall->length};
        w = waiting_new(&arguments, 1);
        if (w == NULL)
            return false;
        w->upcall = *upcall;
        w->upcall.arguments = w->bytes;
    }
    w->upcall.done = upcall->done;
    pthread_mutex_lock(&u->lock);
    bool any = u->waiting.first != NULL && backlog_has_room(&u->waiting, w);
    if (any) {
        backlog_put(&u->waiting, w);
        own->held = NULL;
    }
    pthread_mutex_unlock(&u->lock);
    if (!any && w != own->held)
        free(w);
    return any;
}

uint64_t upcalls_waited(upcalls *u)
{
    pthread_mutex_lock(&u->lock);
    uint64_t count = u->waiting.count;
    pthread_mutex_unlock(&u->lock);
    return count;
}
