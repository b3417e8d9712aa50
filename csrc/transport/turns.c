/* turns.c - how many workers wait for requests, and how.
 *
 * A processor with nothing to do halts, and waking it takes a virtual machine 30 to 90 us, a real one that
 * sleeps deeply as long. Who saves a small file waits for six requests, one after the other; with a sleeping
 * worker woken for each, waking is a third of the time. So a client that is alone and asks for little is
 * served by one worker, which looks for the next request for a while before it sleeps, as KVM does before it
 * halts a guest's processor (halt_poll_ns): 1.2 ms become 0.8 for the save, two cores. The others rest here,
 * not in read(2): there the kernel wakes one for every request, for nothing where one that is awake takes it.
 * Where that is quicker (trial.c) that one goes where the client is (places.c), so that the client is not woken on
 * another processor either: there it sleeps, and does not look. Where it may not go it looks from where it is. That the
 * kernel has parted them shows in the time until the next request: some microseconds, or what it takes to wake
 * processors. So that they are not parted again it steps back to answer: always after what took the control plane's
 * time, and for a while after it has moved, as an answer that takes some microseconds does not part them by itself.
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
 * - Who answers in the background is back there when that has taken LOOK_NS, to twice that.
 * - At most one worker polls, and only where polling has just paid, beside a client on another processor.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include "transport/transport.h"

/* Who reads the next request. */
struct turns {
    int fuse_fd;
    uint64_t poll_ns;
    atomic_bool stopping;
    pthread_mutex_t lock;         /* of the following */
    pthread_cond_t rest;
    pthread_cond_t look;
    uint32_t active;              /* workers that wait for a request, or serve one */
    uint32_t busy;                /* of these: serve one */
    uint32_t client;              /* the thread whose request came last */
    uint32_t in_a_row;            /* requests of that thread, none of them long */
    uint64_t taken;               /* requests */
    bool looking;                 /* one of those that rest sees to it that the active one is enough */
    bool dozing;                  /* nothing happens, so it waits to be told */
    bool polling_pays;
    trial calls, quick;           /* whether the active worker goes where its client is, while some of the requests */
    uint32_t since_call;          /* take the control plane, and while none does: for so many requests by now */
    bool stays;                   /* what is in force of that */
    uint64_t last_ns;             /* when the last request came */
    bool together;                /* the active worker was on the client's processor when it looked last */
    uint32_t place_in;            /* requests until it looks again */
    uint32_t late;                /* requests since then that came as late as from another processor */
    uint32_t patience;            /* so many of them until it looks sooner */
    bool roomy;                   /* others did not want its processor then */
    uint32_t settling;            /* quick answers for which it still steps back */
    pid_t behind;                 /* the thread that answers in the background; 0: none */
    bool may_step_back;
};

enum {
    LOOK_NS = 1000000,
    ALONE_REQUESTS = 16,    /* of one thread, none of them long, until the others rest */
    PLACE_REQUESTS = 128,   /* until the active one looks again whether it is where its client is: 17 us */
    QUICK_REQUESTS = 64,    /* without a call, until they are of the other kind */
    AWAY_REQUESTS = 32,     /* the same for one that keeps away: answers to calls bring the client to it. 9 us */
    LATE_NS_MIN = 22000,    /* from another processor: on the same one it takes some microseconds, */
    LATE_NS_MAX = 200000,   /* and this is a pause */
    PATIENCE_MIN = 2,       /* where looking was of use; doubled each time that it was not */
    PATIENCE_MAX = 16,
    SETTLE_ANSWERS = 32,    /* until two that were apart stay together by themselves */
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

/* With the lock. */
static trial *trial_now(turns *s)
{
    return s->since_call < QUICK_REQUESTS ? &s->calls : &s->quick;
}

static void fix(turns *s, int stays)
{
    trial_fix(&s->calls, stays);
    trial_fix(&s->quick, stays);
}

turns *turns_new(int fuse_fd, uint64_t poll_ns)
{
    turns *s = cxl_allocate_zeroed(1, sizeof(*s));
    if (s == NULL)
        return NULL;
    s->fuse_fd = fuse_fd;
    s->poll_ns = poll_ns;
    fix(s, TRIAL_OF_BOTH);
    s->stays = trial_now(s)->stays;
    s->patience = PATIENCE_MIN;
    s->may_step_back = place_may_step_back();
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->rest, NULL);
    pthread_cond_init(&s->look, &attributes);
    pthread_condattr_destroy(&attributes);
    return s;
}

void turns_free(turns *s)
{
    if (s == NULL)
        return;
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->rest);
    pthread_cond_destroy(&s->look);
    free(s);
}

void turns_stop(turns *s)
{
    atomic_store(&s->stopping, true);
    pthread_mutex_lock(&s->lock);
    pthread_cond_broadcast(&s->rest);
    pthread_cond_broadcast(&s->look);
    pthread_mutex_unlock(&s->lock);
}

/* With the lock: the worker goes where the client is, or does so no more. */
static void follow_trial(turns *s)
{
    bool stays = trial_now(s)->stays;
    if (stays == s->stays)
        return;
    s->stays = stays;
    s->together = false;
    s->place_in = 0;
}

void turns_stay(turns *s, int stays)
{
    pthread_mutex_lock(&s->lock);
    fix(s, stays);
    follow_trial(s);
    pthread_mutex_unlock(&s->lock);
}

bool turns_tried(turns *s, uint64_t *trials)
{
    pthread_mutex_lock(&s->lock);
    bool stays = s->calls.usual;
    *trials = s->calls.ended + s->quick.ended;
    pthread_mutex_unlock(&s->lock);
    return stays;
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
        if (s->behind != 0) {
            place_come_back(s->behind);
            s->behind = 0;
        } else if (s->busy >= s->active) {
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
static void rest(turns *s)
{
    while (is_alone(s) && s->active > 0 && !atomic_load(&s->stopping)) {
        if (s->looking)
            pthread_cond_wait(&s->rest, &s->lock);
        else
            look(s);
    }
    if (!s->looking)
        pthread_cond_signal(&s->rest);
}

/* --------------------------------------------------------------------------------------- turns */

static bool is_request_waiting(const turns *s)
{
    struct pollfd fuse = {.fd = s->fuse_fd, .events = POLLIN};
    return poll(&fuse, 1, 0) != 0;
}

/* With the lock: the active worker has looked where its client is. */
static void note_look(turns *s, bool moved)
{
    if (moved)
        s->patience = PATIENCE_MIN;
    else if (s->late >= s->patience && s->patience < PATIENCE_MAX)
        s->patience *= 2;
    s->late = 0;
}

/* With the lock: so many requests came late that the client may be elsewhere. */
static bool is_too_late(turns *s, uint64_t waited_ns)
{
    s->late += s->together && waited_ns >= LATE_NS_MIN && waited_ns < LATE_NS_MAX;
    return s->late >= s->patience;
}

void turn_begin(turns *s, turn *own)
{
    pthread_mutex_lock(&s->lock);
    s->active -= own->active;
    if (is_alone(s) && s->active > s->busy)
        rest(s);
    s->active++;
    own->active = true;
    bool alone = is_alone(s);
    bool looks = alone && s->place_in == 0, stays = s->stays;
    uint32_t client = s->client;
    if (looks)
        s->place_in = stays || s->since_call == QUICK_REQUESTS ? PLACE_REQUESTS : AWAY_REQUESTS;
    bool polls = alone && s->polling_pays && !s->together;
    pthread_mutex_unlock(&s->lock);
    if (looks && !stays) {
        place_away(client);
    } else if (looks) {
        bool moved;
        bool together = place_beside(client, &moved);
        bool roomy = together && s->may_step_back && place_is_roomy();
        pthread_mutex_lock(&s->lock);
        s->together = together && s->stays;
        s->roomy = roomy;
        if (moved)
            s->settling = SETTLE_ANSWERS;
        note_look(s, moved);
        pthread_mutex_unlock(&s->lock);
        polls = polls && !together;
    }
    own->began_ns = monotonic_ns();
    while (polls && !is_request_waiting(s))
        polls = monotonic_ns() - own->began_ns < s->poll_ns && !atomic_load(&s->stopping);
}

void turn_took(turns *s, turn *own, const request *r)
{
    uint64_t now_ns = monotonic_ns(), waited_ns = now_ns - own->began_ns;
    uint32_t client = r->header->pid;  /* 0: the kernel asks for something that nobody waits for */
    own->busy = true;
    pthread_mutex_lock(&s->lock);
    s->polling_pays = waited_ns < s->poll_ns;
    s->taken++;
    s->busy++;
    if (takes_long(r) || (client != 0 && client != s->client)) {
        s->client = client;
        s->in_a_row = 0;
        s->place_in = 0;
        s->together = false;
        trial_change_client(&s->calls);
        trial_change_client(&s->quick);
    } else if (client != 0 && !is_alone(s)) {
        s->in_a_row++;
    } else if (s->place_in > 0) {
        s->place_in = is_too_late(s, waited_ns) ? 0 : s->place_in - 1;
    }
    if (is_alone(s)) {
        trial_took(trial_now(s), now_ns - s->last_ns);
        follow_trial(s);
    }
    s->last_ns = now_ns;
    if (s->dozing)
        pthread_cond_signal(&s->look);
    pthread_mutex_unlock(&s->lock);
}

/* Only while one that rests watches it. */
void turn_answers(turns *s, turn *own, bool quick)
{
    pthread_mutex_lock(&s->lock);
    s->since_call = quick ? s->since_call + (s->since_call < QUICK_REQUESTS) : 0;
    own->steps_back = is_alone(s) && s->together && s->roomy && s->looking && (!quick || s->settling > 0);
    if (own->steps_back) {
        s->behind = gettid();
        s->settling -= quick;
    }
    pthread_mutex_unlock(&s->lock);
    if (own->steps_back)
        own->steps_back = place_step_back();
}

void turn_answered(turns *s, turn *own)
{
    if (!own->steps_back)
        return;
    place_come_back(0);
    pthread_mutex_lock(&s->lock);
    s->behind = 0;
    pthread_mutex_unlock(&s->lock);
}

void turn_end(turns *s, turn *own)
{
    if (!own->busy)
        return;
    own->busy = false;
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

void turn_leave(turns *s, turn *own)
{
    turn_end(s, own);
    pthread_mutex_lock(&s->lock);
    s->active -= own->active;
    own->active = false;
    pthread_cond_signal(&s->look);
    pthread_mutex_unlock(&s->lock);
}
