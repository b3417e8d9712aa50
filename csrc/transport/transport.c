/* transport.c - workers, which read and serve requests, and the life of a transport.
 *
 * Never: mounts or unmounts, closes a descriptor that it was given, starts a worker's thread.
 *
 * Invariants
 * - A request that was read is served, handed to the control plane or passed on, also while stopping.
 * - A worker that reads data never waits for the control plane: READ and WRITE that it can serve need
 *   nothing but the extent map.
 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "transport/transport.h"

enum { WAKE_AGAIN_NS = 5000000 };

/* ------------------------------------------------------------------------------------ answers */

int reply(cxl_transport *t, uint64_t unique, int error, const void *data, size_t length)
{
    fuse_wire_reply header = {
        .length = (uint32_t)(sizeof(header) + length), .error = error, .unique = unique,
    };
    struct iovec parts[2] = {
        {&header, sizeof(header)},
        {(void *)(uintptr_t)data, length},
    };
    ssize_t done;
    do {
        done = writev(t->fuse_fd, parts, length == 0 ? 1 : 2);
    } while (done < 0 && errno == EINTR);
    /* ENOENT: the request was interrupted; ENODEV: the mount is gone. Nobody waits any more. */
    return done >= 0 || errno == ENOENT || errno == ENODEV ? 0 : -errno;
}

int cxl_transport_reply(cxl_transport *transport, uint64_t unique, int error, const void *data,
                        uint64_t length)
{
    int result = reply(transport, unique, -error, data, error == 0 ? length : 0);
    /* The requester's memory, or the bytes of the answer, cannot be reached. */
    if (result != 0)
        reply(transport, unique, -EIO, NULL, 0);
    return result;
}

/* The kernel waits with the answer for pages that are being read or written, that is for this very
 * process: the caller's thread must be one that no request needs. */
int cxl_fuse_invalidate(int fuse_fd, uint64_t inode, int attributes_only)
{
    struct {
        fuse_wire_reply header;
        fuse_wire_invalidate body;
    } message = {
        .header = {.length = sizeof(message), .error = FUSE_WIRE_NOTIFY_INVALIDATE_INODE},
        .body = {.inode = inode, .offset = attributes_only ? -1 : 0},
    };
    ssize_t written;
    do {
        written = write(fuse_fd, &message, sizeof(message));
    } while (written < 0 && errno == EINTR);
    return written < 0 ? -errno : 0;
}

/* ------------------------------------------------------------------------------------ workers */

static size_t buffer_bytes(const cxl_transport *t)
{
    return HEADROOM_BYTES + (size_t)t->settings.request_max + BLOCK_BYTES;
}

int cxl_worker_new(cxl_transport *transport, cxl_worker **out)
{
    cxl_worker *worker = cxl_allocate_zeroed(1, sizeof(*worker));
    if (worker == NULL)
        return -ENOMEM;
    worker->transport = transport;
    void *buffer = cxl_fault_hit(CXL_FAULT_ALLOCATE) ? MAP_FAILED
        : mmap(NULL, buffer_bytes(transport), PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (buffer == MAP_FAILED) {
        free(worker);
        return -ENOMEM;
    }
    worker->buffer = buffer;
    splice_open(worker);
    pthread_mutex_lock(&transport->workers_lock);
    worker->next = transport->workers;
    transport->workers = worker;
    pthread_mutex_unlock(&transport->workers_lock);
    *out = worker;
    return 0;
}

void cxl_worker_free(cxl_worker *worker)
{
    if (worker == NULL)
        return;
    cxl_transport *t = worker->transport;
    turn_leave(worker);
    pthread_mutex_lock(&t->workers_lock);
    cxl_worker **link = &t->workers;
    while (*link != worker)
        link = &(*link)->next;
    *link = worker->next;
    pthread_mutex_unlock(&t->workers_lock);
    splice_close(worker);
    munmap(worker->buffer, buffer_bytes(t));
    free(worker);
}

/* Read one request: 1, 0 to try again, or -errno when there will be none any more. */
static int next_request(cxl_worker *worker, request *r)
{
    const cxl_transport *t = worker->transport;
    uint8_t *start = worker->buffer + HEADROOM_BYTES - PREFIX_BYTES;
    /* Arguments that a short request lacks must not be those of the one before. */
    memset(start, 0, PREFIX_BYTES);
    ssize_t length = read(t->fuse_fd, start, PREFIX_BYTES + t->settings.request_max + BLOCK_BYTES);
    if (length >= (ssize_t)sizeof(fuse_wire_header)) {
        r->header = (fuse_wire_header *)(void *)start;
        r->arguments = start + sizeof(fuse_wire_header);
        r->length = (size_t)length - sizeof(fuse_wire_header);
        return 1;
    }
    if (length >= 0)
        return -EIO;
    /* ENOENT: the request was interrupted before it was read. EAGAIN: somebody else was faster. */
    return errno == EINTR || errno == EAGAIN || errno == ENOENT ? 0 : -errno;
}

static bool becomes_call(const cxl_transport *t, uint32_t opcode)
{
    return opcode < 64 && t->settings.calls >> opcode & 1;
}

/* True: *out is for the control plane. */
static bool serve(cxl_worker *worker, request *r, cxl_call *out)
{
    cxl_transport *t = worker->transport;
    const fuse_wire_header *header = r->header;
    uint64_t done = 0;
    int error = 0;
    if (header->opcode == FUSE_WIRE_READ) {
        if (serve_read(worker, r))
            return false;
    } else if (header->opcode == FUSE_WIRE_WRITE) {
        if (serve_write(worker, r, &done, &error))
            return false;
    } else if (!becomes_call(t, header->opcode)) {
        forward(t, r);
        return false;
    }
    *out = (cxl_call){
        .opcode = header->opcode, .uid = header->uid, .gid = header->gid, .pid = header->pid,
        .unique = header->unique, .inode = header->inode, .arguments = r->arguments,
        .length = r->length, .done = done, .error = error,
    };
    atomic_fetch_add_explicit(&t->call_count, 1, memory_order_relaxed);
    return true;
}

/* 1: *out is for the control plane. */
static int serve_one(cxl_worker *worker, request *r, cxl_call *out)
{
    turn_took(worker, r);
    bool calls = serve(worker, r, out);
    if (!calls && worker->lease_inode != 0) {
        *out = (cxl_call){.opcode = CXL_CALL_LEASE, .inode = worker->lease_inode};
        calls = true;
    }
    worker->lease_inode = 0;
    if (!calls)
        turn_end(worker);
    return calls;
}

static void enter(cxl_worker *worker)
{
    pthread_mutex_lock(&worker->transport->workers_lock);
    worker->thread = pthread_self();
    worker->serving = true;
    pthread_mutex_unlock(&worker->transport->workers_lock);
}

static void leave(cxl_worker *worker)
{
    pthread_mutex_lock(&worker->transport->workers_lock);
    worker->serving = false;
    pthread_cond_broadcast(&worker->transport->worker_left);
    pthread_mutex_unlock(&worker->transport->workers_lock);
}

int cxl_worker_serve(cxl_worker *worker, uint64_t unique, int error, const void *data,
                     uint64_t length, cxl_call *out)
{
    cxl_transport *t = worker->transport;
    int result = 0;
    request r;
    if (unique != 0)
        cxl_transport_reply(t, unique, error, data, length);
    turn_end(worker);
    enter(worker);
    while (result == 0 && !atomic_load(&t->stopping)) {
        turn_begin(worker);
        int got = next_request(worker, &r);
        if (got < 0)
            result = got;
        else if (got > 0)
            result = serve_one(worker, &r, out);
    }
    leave(worker);
    if (result <= 0)
        turn_leave(worker);
    return result == -ENODEV ? 0 : result;
}

/* ---------------------------------------------------------------------------------------- life */

static int wake_signal(void)
{
    return SIGRTMIN + 4;
}

static void wake_handler(int number)
{
    (void)number;                  /* it ends a system call with EINTR, no more */
}

int cxl_transport_new(cxl_engine *engine, int fuse_fd, int control_fd,
                      const cxl_transport_settings *settings, cxl_transport **out)
{
    if (settings->request_max < CONTROL_BYTES_MAX || settings->request_max % BLOCK_BYTES != 0 ||
        settings->request_max / BLOCK_BYTES > UINT16_MAX)
        return -EINVAL;
    cxl_transport *t = cxl_allocate_zeroed(1, sizeof(*t));
    if (t == NULL)
        return -ENOMEM;
    const struct sigaction action = {.sa_handler = wake_handler};
    sigaction(wake_signal(), &action, NULL);
    t->engine = engine;
    t->fuse_fd = fuse_fd;
    t->control_fd = control_fd;
    t->settings = *settings;
    turns_init(&t->turns);
    pthread_mutex_init(&t->workers_lock, NULL);
    pthread_cond_init(&t->worker_left, NULL);
    t->message = cxl_allocate(MESSAGE_BYTES);
    if (ports_init(t) != 0 || t->message == NULL) {
        ports_free(t);
        turns_free(&t->turns);
        free(t->message);
        free(t);
        return -ENOMEM;
    }
    *out = t;
    return 0;
}

void cxl_transport_free(cxl_transport *transport)
{
    if (transport == NULL)
        return;
    cxl_transport_stop(transport);
    while (transport->workers != NULL)
        cxl_worker_free(transport->workers);
    ports_free(transport);
    free(transport->message);
    turns_free(&transport->turns);
    pthread_mutex_destroy(&transport->workers_lock);
    pthread_cond_destroy(&transport->worker_left);
    free(transport);
}

/* The relay takes no signal but the one that wakes it: those of the process are for other threads. */
int cxl_transport_start(cxl_transport *transport)
{
    sigset_t all, before;
    if (transport->relay_started)
        return -EINVAL;
    sigfillset(&all);
    sigdelset(&all, wake_signal());
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int result = cxl_fault_hit(CXL_FAULT_ALLOCATE)
        ? EAGAIN : pthread_create(&transport->relay, NULL, relay_main, transport);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (result == 0)
        pthread_setname_np(transport->relay, "cxlfs-relay");
    transport->relay_started = result == 0;
    return -result;
}

static struct timespec soon(void)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += WAKE_AGAIN_NS;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    return until;
}

/* A thread may be about to enter a system call when the signal comes: wake it until it has left. */
static void stop_workers(cxl_transport *t)
{
    bool any = true;
    pthread_mutex_lock(&t->workers_lock);
    while (any) {
        any = false;
        for (cxl_worker *worker = t->workers; worker != NULL; worker = worker->next) {
            if (worker->serving) {
                any = true;
                pthread_kill(worker->thread, wake_signal());
            }
        }
        const struct timespec until = soon();
        if (any)
            pthread_cond_timedwait(&t->worker_left, &t->workers_lock, &until);
    }
    pthread_mutex_unlock(&t->workers_lock);
}

void cxl_transport_stop(cxl_transport *transport)
{
    atomic_store(&transport->stopping, true);
    turns_stop(&transport->turns);
    stop_workers(transport);
    if (!transport->relay_started)
        return;
    struct timespec until;
    do {
        pthread_kill(transport->relay, wake_signal());
        until = soon();
    } while (pthread_timedjoin_np(transport->relay, NULL, &until) == ETIMEDOUT);
    transport->relay_started = false;
}

void cxl_transport_statistics(cxl_transport *transport, cxl_transport_stats *out)
{
    uint32_t active, busy, offered = atomic_load(&transport->kernel_flags2);
    turns_count(&transport->turns, &active, &busy);
    *out = (cxl_transport_stats){
        .reads = atomic_load(&transport->reads),
        .writes = atomic_load(&transport->writes),
        .read_bytes = atomic_load(&transport->read_bytes),
        .write_bytes = atomic_load(&transport->write_bytes),
        .calls = atomic_load(&transport->call_count),
        .forwarded = atomic_load(&transport->forwarded),
        .read_copies = atomic_load(&transport->read_copies),
        .ahead_bytes = atomic_load(&transport->ahead_bytes),
        .spliced_reads = atomic_load(&transport->spliced_reads),
        .active_workers = active,
        .busy_workers = busy,
        .direct_mapping = offered & FUSE_WIRE2_DIRECT_IO_ALLOW_MMAP ? 1 : 0,
    };
}
