/* waking.c - what it costs here to wake a thread on another processor that has nothing to do.
 *
 * On a virtual machine with two processors 16 us where they halt at once, 2.4 where they do not halt, 11 to 12 either
 * way while other programs run on both; and who waits for an answer is woken behind that, too. On one processor a
 * question and its answer cost 3.4 us together (places.c). So where waking is dear, client and worker are better on
 * one processor; where it is not they are better apart, as what a worker does behind its answer is then done beside
 * its client. A save by rename there, two mounts in turns: 430 us apart and 300 together where processors halt, 230
 * apart and 295 together where they do not (the mount option wakeup_latency=0).
 *
 * Never: takes longer than ten milliseconds or so on a machine that is idle.
 *
 * Invariants
 * - What the calling thread may run on is afterwards what it was before.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include "transport/transport.h"

enum {
    ROUNDS = 32,
    /* Before each the other one has had nothing to do for so long: hosts and kernels that poll before they halt do so
     * for 200 us at most, and training computes for longer. */
    IDLE_NS = 300000,
};

typedef struct {
    int asked;                    /* the end of a pipe */
    uint64_t took_ns[ROUNDS];
    atomic_uint rounds;           /* that are done */
} waking;

static void *be_woken(void *argument)
{
    waking *w = argument;
    uint64_t sent_ns;
    for (unsigned round = 0; round < ROUNDS; round++) {
        ssize_t length;
        do
            length = read(w->asked, &sent_ns, sizeof(sent_ns));
        while (length < 0 && errno == EINTR);
        if (length != sizeof(sent_ns))
            break;
        w->took_ns[round] = monotonic_ns() - sent_ns;
        atomic_store(&w->rounds, round + 1);
    }
    return NULL;
}

/* One of these other than own; -1: there is none. */
static int another_processor(const cpu_set_t *allowed, int own)
{
    for (int processor = 0; processor < CPU_SETSIZE; processor++)
        if (processor != own && CPU_ISSET((size_t)processor, allowed))
            return processor;
    return -1;
}

static cpu_set_t only(int processor)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET((size_t)processor, &one);
    return one;
}

static bool start_on(int processor, waking *w, pthread_t *thread)
{
    cpu_set_t there = only(processor);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    bool started = pthread_attr_setaffinity_np(&attributes, sizeof(there), &there) == 0 &&
                   pthread_create(thread, &attributes, be_woken, w) == 0;
    pthread_attr_destroy(&attributes);
    return started;
}

static void wait_ns(uint64_t length_ns)
{
    uint64_t begin_ns = monotonic_ns();
    while (monotonic_ns() - begin_ns < length_ns)
        ;
}

static int by_size(const void *a, const void *b)
{
    uint64_t first = *(const uint64_t *)a, second = *(const uint64_t *)b;
    return (first > second) - (first < second);
}

/* Wake the other thread again and again, from a processor that the caller does not leave meanwhile. */
static void wake(waking *w, int fd)
{
    for (unsigned round = 0; round < ROUNDS; round++) {
        wait_ns(IDLE_NS);
        uint64_t now_ns = monotonic_ns();
        if (write(fd, &now_ns, sizeof(now_ns)) != sizeof(now_ns))
            return;
        while (atomic_load(&w->rounds) <= round)
            ;
    }
}

uint64_t cxl_waking_ns(void)
{
    waking w = {0};
    int ends[2], own = sched_getcpu();
    cpu_set_t allowed, here = only(own);
    pthread_t thread;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0)
        return 0;
    int other = another_processor(&allowed, own);
    if (other < 0 || pipe2(ends, O_CLOEXEC) != 0)
        return 0;
    w.asked = ends[0];
    bool started = start_on(other, &w, &thread);
    if (started && sched_setaffinity(0, sizeof(here), &here) == 0) {
        wake(&w, ends[1]);
        sched_setaffinity(0, sizeof(allowed), &allowed);
    }
    close(ends[1]);               /* ends the other one's read, too */
    if (started)
        pthread_join(thread, NULL);
    close(ends[0]);
    if (atomic_load(&w.rounds) < ROUNDS)
        return 0;
    /* The lower quarter: what else runs here makes waking longer, hardly ever shorter. */
    qsort(w.took_ns, ROUNDS, sizeof(w.took_ns[0]), by_size);
    return w.took_ns[ROUNDS / 4];
}
