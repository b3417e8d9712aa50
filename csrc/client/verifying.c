/* verifying.c - all of a mapped file compared with its checksums: by several threads, and by all the programs together
 * that map the same content just now, each of which gets pieces of it from the daemon (direct.h, CXL_DIRECT_VERIFY).
 *
 * Never: takes the word of others for a mapping that was to be verified by itself (CXL_MAPPED_ALONE); leaves a thread
 * behind.
 *
 * Invariants
 * - What the daemon is told of was compared by this process after it had mapped it.
 * - Whatever the daemon does not say is compared here: it is asked for pieces, never needed, nor waited for for ever.
 */
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "client/mapped.h"

enum { PIECE = 16 << 20 };          /* of what is verified without the daemon */
enum { THREADS_MAX = 4 };           /* memory has no more to give */
/* The kernel maps 64 KiB around a page that is touched. A page that is looked at before all of its page table was
 * filled so costs 0.2 us more, another walk of it: of 512 MiB in pages of 4 KiB, looked at once, 39 ms, and 12 with
 * this (Zen 5, virtual; MADV_POPULATE_READ, which visits each page: 27). */
enum { TOUCH_STEP = 64 << 10 };
#define TOUCHED_MAX (UINT64_C(8) << 30) /* of what is not compared: whoever maps more of it may want a part */
/* Some ten seconds, after half of which the daemon gives what others have not compared to somebody else. */
enum { WAIT_FIRST_US = 100, WAIT_LONGEST_US = 2000, WAITS_MAX = 5000 };

typedef struct {
    cxl_mapped *mapped;
    atomic_bool shared;             /* the daemon gives pieces */
    atomic_bool by_all;             /* and has said that there are no more */
    atomic_bool stop;
    bool only_touch;                /* it is verified */
    atomic_uint_least64_t next;     /* of the pieces of this process alone */
    pthread_mutex_t lock;           /* of the three below */
    int result;
    uint64_t bad_offset, bad_length;
} comparing;

/* Others are not to believe what was verified before, and the daemon looks for itself. */
static void tell_damage(const cxl_mapped *mapped, uint64_t offset, uint64_t length)
{
    cxl_direct_verify request = {.done_offset = offset, .done_bytes = length, .flags = CXL_DIRECT_WRONG};
    if (mapped->is_held && mapped->process == getpid())
        (void)client_request(mapped->channel, mapped->fd, CXL_DIRECT_VERIFY, &request);
}

int cxl_mapped_verify(cxl_mapped *mapped, uint64_t offset, uint64_t length, uint64_t *bad_offset, uint64_t *bad_length)
{
    uint64_t wrong_at = offset, wrong_bytes = length;
    bad_offset = bad_offset != NULL ? bad_offset : &wrong_at;
    bad_length = bad_length != NULL ? bad_length : &wrong_bytes;
    if (offset > mapped->size || length > mapped->size - offset)
        return -ERANGE;
    if (mapped->is_compared_alone && mapped->process != getpid())
        return -ENXIO;              /* a child has no view of the medium */
    if (atomic_load(&mapped->is_verified))
        return 0;
    for (uint64_t i = mapped_find(mapped, offset); i < mapped->row_count; i++) {
        if (mapped->rows[i].is.file_offset >= offset + length)
            break;
        int result = mapped_verify_row(mapped, &mapped->rows[i], offset, offset + length, bad_offset, bad_length);
        if (result == -EIO)
            tell_damage(mapped, *bad_offset, *bad_length);
        if (result != 0)
            return result;
    }
    return 0;
}

/* The first damage of the file that any of the threads has met. */
static void failed(comparing *job, int result, uint64_t offset, uint64_t length)
{
    pthread_mutex_lock(&job->lock);
    if (job->result == 0 || offset < job->bad_offset) {
        job->result = result;
        job->bad_offset = offset;
        job->bad_length = length;
    }
    pthread_mutex_unlock(&job->lock);
    atomic_store(&job->stop, true);
}

/* ---------------------------------------------------------------------------------- page tables */

typedef struct {
    const volatile uint8_t *first, *end;
} touching;

/* Of this thread. */
static long faults_so_far(void)
{
    struct rusage used;
    return getrusage(RUSAGE_THREAD, &used) == 0 ? used.ru_minflt : 0;
}

/* Where two looks far apart in a large page are one fault, or none, all of it is there. More looks are not free: each
 * fetches a line that no cache has. */
static void touch_body(void *argument)
{
    const touching *job = argument;
    long before = faults_so_far();
    for (const volatile uint8_t *at = job->first, *next; at < job->end; at = next) {
        next = (const volatile uint8_t *)((uintptr_t)at / LARGE_PAGE * LARGE_PAGE + LARGE_PAGE);
        if (next > job->end)
            next = job->end;
        (void)*at;
        (void)*(next - 1);
        long after = faults_so_far();
        for (const volatile uint8_t *step = at + TOUCH_STEP; after - before > 1 && step < next; step += TOUCH_STEP)
            (void)*step;
        before = after - before > 1 ? faults_so_far() : after;
    }
}

/* Pages of [offset, offset + length) become known to the process. What is wrong with them whoever looks will meet. */
static void touch(const cxl_mapped *mapped, uint64_t offset, uint64_t length)
{
    if (mapped->base == NULL)       /* it is looked at where the medium is mapped */
        return;
    touching job = {mapped->base + offset, mapped->base + offset + length};
    (void)cxl_guarded(mapped->base, mapped->size, touch_body, &job, NULL);
}

static int compare(comparing *job, uint64_t offset, uint64_t length, uint64_t *bad_offset, uint64_t *bad_length)
{
    int result = 0;
    for (uint64_t end = offset + length; offset < end && result == 0;) {
        uint64_t next = (offset / LARGE_PAGE + 1) * LARGE_PAGE;
        next = next < end ? next : end;
        touch(job->mapped, offset, next - offset);
        *bad_offset = offset;
        *bad_length = next - offset;
        result = cxl_mapped_verify(job->mapped, offset, next - offset, bad_offset, bad_length);
        offset = next;
    }
    if (result != 0)
        failed(job, result, *bad_offset, *bad_length);
    return result;
}

/* ------------------------------------------------------------------------------------ together */

static void wait_for_others(uint32_t *microseconds)
{
    struct timespec pause = {0, (long)*microseconds * 1000};
    (void)nanosleep(&pause, NULL);
    *microseconds = *microseconds * 2 < WAIT_LONGEST_US ? *microseconds * 2 : WAIT_LONGEST_US;
}

static uint32_t waits_max(const cxl_mapped *mapped)
{
    return mapped->channel != NULL && mapped->channel->waits_max != 0 ? mapped->channel->waits_max : WAITS_MAX;
}

/* Pieces from the daemon, until there are no more, or it gives none. */
static void compare_shared(comparing *job)
{
    const cxl_mapped *mapped = job->mapped;
    cxl_direct_verify request = {0};
    uint32_t pause = WAIT_FIRST_US, waits = 0;
    uint64_t left = mapped->size;   /* of what can be given: nothing comes twice while the daemon keeps count */
    while (atomic_load(&job->shared) && !atomic_load(&job->stop)) {
        uint64_t bad_offset, bad_length;
        int result = client_request(mapped->channel, mapped->fd, CXL_DIRECT_VERIFY, &request);
        if (result != 0 || request.offset > mapped->size || request.length_bytes > mapped->size - request.offset ||
            request.length_bytes > left || waits > waits_max(mapped)) {
            atomic_store(&job->shared, false);
            return;
        }
        if ((request.flags & CXL_DIRECT_VERIFIED) != 0) {
            atomic_store(&job->by_all, true);
            return;
        }
        uint64_t offset = request.offset, length = request.length_bytes;
        memset(&request, 0, sizeof request);
        if (length == 0) {
            wait_for_others(&pause);
            waits++;
            continue;
        }
        pause = WAIT_FIRST_US;
        waits = 0;
        left -= length;
        if (compare(job, offset, length, &bad_offset, &bad_length) == 0) {
            request.done_offset = offset;
            request.done_bytes = length;
        }
    }
}

/* --------------------------------------------------------------------------------------- alone */

static void compare_alone(comparing *job)
{
    uint64_t size = job->mapped->size, bad_offset, bad_length;
    while (!atomic_load(&job->stop)) {
        uint64_t offset = atomic_fetch_add(&job->next, PIECE);
        if (offset >= size)
            return;
        uint64_t length = size - offset < PIECE ? size - offset : PIECE;
        if (job->only_touch && offset < TOUCHED_MAX)
            touch(job->mapped, offset, length);
        else if (!job->only_touch)
            (void)compare(job, offset, length, &bad_offset, &bad_length);
    }
}

static void *work(void *argument)
{
    comparing *job = argument;
    compare_shared(job);
    if (!atomic_load(&job->by_all))
        compare_alone(job);
    return NULL;
}

/* -------------------------------------------------------------------------------------- threads */

static int threads_for(uint64_t size)
{
    cpu_set_t usable;
    int count = sched_getaffinity(0, sizeof usable, &usable) == 0 ? CPU_COUNT(&usable) : 1;
    uint64_t pieces = size / PIECE;
    count = count < THREADS_MAX ? count : THREADS_MAX;
    return (uint64_t)count < pieces ? count : (int)pieces;
}

/* One of them is the caller. The program's signals are none of the others'; faults of the medium are. */
static void work_in_threads(comparing *job, int count)
{
    pthread_t threads[THREADS_MAX];
    sigset_t theirs, before;
    int begun = 0, cancel_state;
    sigfillset(&theirs);
    sigdelset(&theirs, SIGBUS);
    sigdelset(&theirs, SIGSEGV);
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
    pthread_sigmask(SIG_BLOCK, &theirs, &before);
    while (begun + 1 < count && pthread_create(&threads[begun], NULL, work, job) == 0)
        begun++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    work(job);
    for (int i = 0; i < begun; i++)
        pthread_join(threads[i], NULL);
    pthread_setcancelstate(cancel_state, &cancel_state);
}

void cxl_mapped_touch(cxl_mapped *mapped)
{
    comparing job = {.mapped = mapped, .only_touch = true, .lock = PTHREAD_MUTEX_INITIALIZER};
    work_in_threads(&job, threads_for(mapped->size));
    pthread_mutex_destroy(&job.lock);
}

int cxl_mapped_verify_all(cxl_mapped *mapped, uint64_t *bad_offset, uint64_t *bad_length)
{
    if (atomic_load(&mapped->is_verified))
        return 0;
    comparing job = {.mapped = mapped, .lock = PTHREAD_MUTEX_INITIALIZER};
    atomic_store(&job.shared, mapped->is_shared && mapped->process == getpid());
    work_in_threads(&job, threads_for(mapped->size));
    pthread_mutex_destroy(&job.lock);
    if (job.result == 0) {
        atomic_store(&mapped->is_verified, true);
        return 0;
    }
    if (bad_offset != NULL)
        *bad_offset = job.bad_offset;
    if (bad_length != NULL)
        *bad_length = job.bad_length;
    return job.result;
}
