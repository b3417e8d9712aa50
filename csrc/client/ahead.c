/* ahead.c - the thread that asks for room ahead: one for all files of the process, while there is something to ask.
 *
 * A request takes 0.3 to 0.5 ms, in which a processor copies 16 MiB. The thread spends that waiting for the daemon, on
 * another processor than the one that copies: a thread is woken where it slept, or where its waker is, though another
 * processor has nothing to do, and the daemon comes to whom it serves; so all three would be on one, in turns.
 *
 * What it was given it also makes known to the process, page by page, which takes the lock that all memory of the
 * process has: a writer would stand still for that each time that this thread, or another one, locks or unlocks room.
 *
 * Never: copies anything; keeps a file longer than for one request; holds its lock while it asks.
 *
 * Invariants
 * - A file is in the list as long as its state is AHEAD_WAITS, and in use by the thread while it is AHEAD_SERVED.
 * - Locks are taken in this order: of a file, of this list.
 * - The program's signals are not delivered to the thread.
 */
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <time.h>

#include "client/direct_file.h"

enum { IDLE_NS = 200000000, STACK_BYTES = 256 << 10 };

static struct {
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    cxl_direct_file *first;
    bool runs;
    pthread_t thread;            /* as long as it runs, */
    cpu_set_t allowed;           /* and where it may: as who started it, */
    int avoided;                 /* but for this processor; -1: none */
} ahead = {.lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

/* The next file, or NULL after a while without any. */
static cxl_direct_file *next_locked(void)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += IDLE_NS;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    while (ahead.first == NULL)
        if (pthread_cond_timedwait(&ahead.work, &ahead.lock, &until) != 0)
            break;
    cxl_direct_file *file = ahead.first;
    if (file != NULL) {
        ahead.first = file->ahead.next;
        file->ahead.state = AHEAD_SERVED;
    }
    return file;
}

static void *serve(void *nothing)
{
    pthread_mutex_lock(&ahead.lock);
    for (cxl_direct_file *file; (file = next_locked()) != NULL;) {
        uint64_t wanted = file->ahead.wanted, file_offset = file->ahead.file_offset;
        pthread_mutex_unlock(&ahead.lock);
        pthread_mutex_lock(&file->lock);
        lease_ask_ahead(file, wanted, file_offset);
        leases_touch(file);
        pthread_mutex_unlock(&file->lock);
        pthread_mutex_lock(&ahead.lock);
        file->ahead.state = AHEAD_IDLE;
        pthread_cond_broadcast(&ahead.done);
    }
    ahead.runs = false;
    pthread_mutex_unlock(&ahead.lock);
    return nothing;
}

/* Who copies is just there. */
static void avoid_locked(int processor)
{
    cpu_set_t others = ahead.allowed;
    if (processor < 0 || processor >= CPU_SETSIZE || processor == ahead.avoided)
        return;
    CPU_CLR((size_t)processor, &others);
    if (CPU_COUNT(&others) > 0 && pthread_setaffinity_np(ahead.thread, sizeof others, &others) == 0)
        ahead.avoided = processor;
}

static bool start_locked(void)
{
    pthread_attr_t attributes;
    sigset_t all, before;
    if (pthread_attr_init(&attributes) != 0)
        return false;
    sigfillset(&all);
    sigdelset(&all, SIGBUS);    /* of the medium: see persist/guard.c */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    (void)pthread_attr_setstacksize(&attributes, STACK_BYTES);
    ahead.avoided = -1;
    if (sched_getaffinity(0, sizeof ahead.allowed, &ahead.allowed) != 0)
        CPU_ZERO(&ahead.allowed);
    ahead.runs = pthread_create(&ahead.thread, &attributes, serve, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return ahead.runs;
}

void ahead_ask(cxl_direct_file *file, uint64_t wanted, uint64_t file_offset)
{
    if (!file->ahead.is_permitted || file->ahead.is_off)
        return;
    pthread_mutex_lock(&ahead.lock);
    if (!ahead.runs && !start_locked()) {
        file->ahead.is_off = true;
    } else if (file->ahead.state == AHEAD_IDLE) {
        file->ahead.state = AHEAD_WAITS;
        file->ahead.wanted = wanted;
        file->ahead.file_offset = file_offset;
        file->ahead.next = ahead.first;
        ahead.first = file;
        avoid_locked(sched_getcpu());
        pthread_cond_signal(&ahead.work);
    }
    pthread_mutex_unlock(&ahead.lock);
}

void ahead_forget(cxl_direct_file *file)
{
    atomic_store(&file->ahead.is_over, true);
    pthread_mutex_lock(&ahead.lock);
    cxl_direct_file **link = &ahead.first;
    while (file->ahead.state == AHEAD_WAITS && *link != file)
        link = &(*link)->ahead.next;
    if (file->ahead.state == AHEAD_WAITS) {
        *link = file->ahead.next;
        file->ahead.state = AHEAD_IDLE;
    }
    while (file->ahead.state == AHEAD_SERVED)
        pthread_cond_wait(&ahead.done, &ahead.lock);
    pthread_mutex_unlock(&ahead.lock);
}

void ahead_before_fork(void)
{
    pthread_mutex_lock(&ahead.lock);
}

void ahead_after_fork(void)
{
    pthread_mutex_unlock(&ahead.lock);
}

void ahead_in_child(void)
{
    ahead.first = NULL;
    ahead.runs = false;
    pthread_cond_init(&ahead.work, NULL);   /* which may have counted the thread that waits there */
    pthread_cond_init(&ahead.done, NULL);
    pthread_mutex_unlock(&ahead.lock);
}
