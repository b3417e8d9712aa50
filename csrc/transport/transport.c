/* transport.c - workers, which read and serve requests, and the life of a transport.
 *
 * Never: mounts or unmounts, closes a descriptor that it was given, starts a worker's thread.
 *
 * Invariants
 * - A request that was read is served, handed to the control plane or passed on, also while stopping.
 * - A worker that serves data never waits for the control plane: READ and WRITE that it can serve need
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

#include "client/direct.h"
#include "transport/transport.h"

enum { WAKE_AGAIN_NS = 5000000 };

/* ------------------------------------------------------------------------------------ answers */

bool is_gone(int error)
{
    /* ENOENT: the request was interrupted. ENODEV, ECONNABORTED: the mount is gone; the second one where it went
     * while the kernel was copying a request or an answer. */
    return error == ENOENT || error == ENODEV || error == ECONNABORTED;
}

int reply(int fuse_fd, uint64_t unique, int error, const void *data, size_t length)
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
        done = writev(fuse_fd, parts, length == 0 ? 1 : 2);
    } while (done < 0 && errno == EINTR);
    return done >= 0 || is_gone(errno) ? 0 : -errno;
}

int cxl_transport_reply(cxl_transport *transport, uint64_t unique, int error, const void *data,
                        uint64_t length)
{
    int result = reply(transport->fuse_fd, unique, -error, data, error == 0 ? length : 0);
    /* The requester's memory, or the bytes of the answer, cannot be reached. */
    if (result != 0)
        reply(transport->fuse_fd, unique, -EIO, NULL, 0);
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

/* Of a request and what belongs to it; few are as long as a WRITE may be, but no SETXATTR must be too long. */
static size_t request_bytes(const cxl_transport *t)
{
    return larger(t->settings.request_max, CONTROL_BYTES_MAX) + BLOCK_BYTES;
}

static size_t buffer_bytes(const cxl_transport *t)
{
    return HEADROOM_BYTES + request_bytes(t);
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
    pipe_open(&worker->pipe, transport->settings.read_max, transport->settings.splice_min);
    upcalls_add_worker(transport->upcalls);
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
    turn_leave(t->turns, &worker->turn);
    upcalls_remove_worker(t->upcalls, &worker->upcall);
    pthread_mutex_lock(&t->workers_lock);
    cxl_worker **link = &t->workers;
    while (*link != worker)
        link = &(*link)->next;
    *link = worker->next;
    pthread_mutex_unlock(&t->workers_lock);
    pipe_close(&worker->pipe);
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
    ssize_t length = read(t->fuse_fd, start, PREFIX_BYTES + request_bytes(t));
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

/* Nobody waits for the end of a file. */
static bool is_awaited(uint32_t opcode)
{
    return opcode != FUSE_WIRE_RELEASE;
}

static bool becomes_upcall(const cxl_transport *t, uint32_t opcode)
{
    return opcode < 64 && t->settings.upcalls >> opcode & 1;
}

/* What others than our own programs ask of a file is meant for devices: a Python that opens one asks whether it is a
 * terminal. */
static bool is_direct_request(const request *r)
{
    const fuse_wire_ioctl *in = (const void *)r->arguments;
    if (r->length < sizeof(*in) || in->flags & FUSE_WIRE_IOCTL_DIRECTORY)
        return false;
    switch (in->command) {
    case CXL_DIRECT_ATTACH:
    case CXL_DIRECT_LEASE:
    case CXL_DIRECT_CONFIRM:
    case CXL_DIRECT_SETTLE:
    case CXL_DIRECT_MAP:
    case CXL_DIRECT_UNMAP:
    case CXL_DIRECT_VERIFY:
        return true;
    default:
        return false;
    }
}

/* With the name as it is until absent_end. */
static void answer_absent(cxl_worker *worker, const request *r)
{
    cxl_transport *t = worker->transport;
    const fuse_wire_entry none = {.name_seconds = t->settings.absent_seconds};
    turn_answers(t->turns, &worker->turn, true);
    cxl_transport_reply(t, r->header->unique, 0, &none, sizeof(none));
    turn_answered(t->turns, &worker->turn);
    absent_end(t->absent);
}

/* Who asks for room ahead is on another processor than who copies; the worker was woken where it slept. */
static void go_to_who_asks_ahead(const request *r)
{
    const fuse_wire_ioctl *in = (const void *)r->arguments;
    const cxl_direct_lease *lease = (const void *)(r->arguments + sizeof(*in));
    bool moved;
    if (in->command != CXL_DIRECT_LEASE || r->length < sizeof(*in) + sizeof(*lease))
        return;
    if ((lease->flags & CXL_DIRECT_AHEAD) != 0)
        (void)place_beside(r->header->pid, &moved);
}

/* True: *out is for the control plane; false: the request is answered, or on its way. */
static bool needs_upcall(cxl_worker *worker, request *r, cxl_upcall *out)
{
    cxl_transport *t = worker->transport;
    const fuse_wire_header *header = r->header;
    uint64_t done = 0;
    int error = 0;
    if (header->opcode == FUSE_WIRE_READ) {
        if (answer_read(worker, r))
            return false;
    } else if (header->opcode == FUSE_WIRE_WRITE) {
        if (answer_write(worker, r, &done, &error))
            return false;
    } else if (header->opcode == FUSE_WIRE_LOOKUP && absent_begin(t->absent, r)) {
        answer_absent(worker, r);
        return false;
    } else if (!becomes_upcall(t, header->opcode)) {
        forward(t->forwarding, r);
        return false;
    } else if (header->opcode == FUSE_WIRE_IOCTL && !is_direct_request(r)) {
        cxl_transport_reply(t, header->unique, ENOTTY, NULL, 0);
        return false;
    }
    if (header->opcode == FUSE_WIRE_IOCTL)
        go_to_who_asks_ahead(r);
    *out = (cxl_upcall){
        .opcode = header->opcode, .uid = header->uid, .gid = header->gid, .pid = header->pid,
        .unique = header->unique, .inode = header->inode, .arguments = r->arguments,
        .length = r->length, .done = done, .error = error,
    };
    atomic_fetch_add_explicit(&t->upcall_count, 1, memory_order_relaxed);
    return true;
}

/* 1: the worker goes with *out to the control plane. */
static int serve_one(cxl_worker *worker, request *r, cxl_upcall *out)
{
    cxl_transport *t = worker->transport;
    turn_took(t->turns, &worker->turn, r);
    bool any = needs_upcall(worker, r, out);
    if (!any && worker->lease_inode != 0) {
        *out = (cxl_upcall){.opcode = CXL_UPCALL_LEASE, .inode = worker->lease_inode};
        any = true;
    }
    worker->lease_inode = 0;
    bool goes = any && upcall_begin(t->upcalls, &worker->upcall, out);
    if (!goes)
        turn_end(t->turns, &worker->turn);
    return goes;
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

int cxl_worker_put_back(cxl_worker *worker, const cxl_upcall *upcall)
{
    return upcall_put_back(worker->transport->upcalls, &worker->upcall, upcall);
}

int cxl_worker_serve(cxl_worker *worker, uint64_t unique, int error, const void *data,
                     uint64_t length, cxl_upcall *out)
{
    cxl_transport *t = worker->transport;
    int result = 0;
    request r;
    if (unique != 0 && worker->awaited)
        turn_answers(t->turns, &worker->turn, false);
    if (unique != 0)
        cxl_transport_reply(t, unique, error, data, length);
    if (unique != 0 && worker->awaited)
        turn_answered(t->turns, &worker->turn);
    if (upcall_next(t->upcalls, &worker->upcall, out)) {
        worker->awaited = is_awaited(out->opcode);
        return 1;
    }
    turn_end(t->turns, &worker->turn);
    enter(worker);
    while (result == 0 && !atomic_load(&t->stopping)) {
        turn_begin(t->turns, &worker->turn);
        int got = next_request(worker, &r);
        if (got < 0)
            result = got;
        else if (got > 0)
            result = serve_one(worker, &r, out);
    }
    worker->awaited = result > 0 && is_awaited(out->opcode);
    leave(worker);
    if (result <= 0)
        turn_leave(t->turns, &worker->turn);
    return result < 0 && is_gone(-result) ? 0 : result;
}

/* ---------------------------------------------------------------------------------------- life */

int wake_signal(void)
{
    return SIGRTMIN + 4;
}

static void wake_handler(int number)
{
    (void)number;                  /* it ends a system call with EINTR, no more */
}

static bool settings_make_sense(const cxl_transport_settings *settings)
{
    uint32_t page = (uint32_t)sysconf(_SC_PAGESIZE);
    return settings->request_max >= page && settings->request_max % page == 0 &&
           settings->request_max / page <= UINT16_MAX && settings->read_max <= settings->request_max;
}

int cxl_transport_new(cxl_engine *engine, int fuse_fd, int control_fd,
                      const cxl_transport_settings *settings, cxl_transport **out)
{
    if (!settings_make_sense(settings))
        return -EINVAL;
    const forwarding_settings passed_on = {
        .fuse_fd = fuse_fd, .control_fd = control_fd, .request_max = settings->request_max,
        .waiting_bytes_max = settings->waiting_bytes_max,
    };
    cxl_transport *t = cxl_allocate_zeroed(1, sizeof(*t));
    if (t == NULL)
        return -ENOMEM;
    const struct sigaction action = {.sa_handler = wake_handler};
    sigaction(wake_signal(), &action, NULL);
    t->engine = engine;
    t->fuse_fd = fuse_fd;
    t->settings = *settings;
    pthread_mutex_init(&t->workers_lock, NULL);
    pthread_cond_init(&t->worker_left, NULL);
    t->ports = ports_new();
    t->turns = turns_new(fuse_fd, settings->poll_ns);
    t->upcalls = upcalls_new(settings->waiting_bytes_max);
    t->absent = absent_new();
    int error = forwarding_new(&passed_on, &t->forwarding);
    if (error == 0 && (t->ports == NULL || t->turns == NULL || t->upcalls == NULL || t->absent == NULL))
        error = -ENOMEM;
    if (error != 0)
        cxl_transport_free(t);
    else
        *out = t;
    return error;
}

void cxl_transport_free(cxl_transport *transport)
{
    if (transport == NULL)
        return;
    if (transport->turns != NULL && transport->forwarding != NULL)
        cxl_transport_stop(transport);
    while (transport->workers != NULL)
        cxl_worker_free(transport->workers);
    ports_free(transport->ports);
    turns_free(transport->turns);
    upcalls_free(transport->upcalls);
    absent_free(transport->absent);
    forwarding_free(transport->forwarding);
    pthread_mutex_destroy(&transport->workers_lock);
    pthread_cond_destroy(&transport->worker_left);
    free(transport);
}

int cxl_transport_start(cxl_transport *transport)
{
    return forwarding_start(transport->forwarding);
}

struct timespec wake_again(void)
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
        const struct timespec until = wake_again();
        if (any)
            pthread_cond_timedwait(&t->worker_left, &t->workers_lock, &until);
    }
    pthread_mutex_unlock(&t->workers_lock);
}

void cxl_transport_stop(cxl_transport *transport)
{
    atomic_store(&transport->stopping, true);
    turns_stop(transport->turns);
    forwarding_hurry(transport->forwarding);
    stop_workers(transport);
    forwarding_stop(transport->forwarding);
}

void cxl_transport_stay(cxl_transport *transport, int stays)
{
    turns_stay(transport->turns, stays);
}

void cxl_transport_statistics(cxl_transport *transport, cxl_transport_stats *out)
{
    uint32_t active, busy;
    uint64_t forwards_waited;
    turns_count(transport->turns, &active, &busy);
    uint64_t trials;
    bool stays = turns_tried(transport->turns, &trials);
    uint64_t forwarded = forwarding_count(transport->forwarding, &forwards_waited);
    *out = (cxl_transport_stats){
        .reads = atomic_load(&transport->reads),
        .writes = atomic_load(&transport->writes),
        .read_bytes = atomic_load(&transport->read_bytes),
        .write_bytes = atomic_load(&transport->write_bytes),
        .upcalls = atomic_load(&transport->upcall_count),
        .forwarded = forwarded,
        .waited = upcalls_waited(transport->upcalls) + forwards_waited,
        .read_copies = atomic_load(&transport->read_copies),
        .ahead_bytes = atomic_load(&transport->ahead_bytes),
        .spliced_reads = atomic_load(&transport->spliced_reads),
        .active_workers = active,
        .busy_workers = busy,
        .stays = stays,
        .trials = trials,
        .direct_mapping = forwarding_direct_mapping(transport->forwarding) ? 1 : 0,
    };
}

/* ------------------------------------------------------------------------------------ handles */

int cxl_handle_open(cxl_transport *transport, uint64_t id, cxl_port *port, int readable)
{
    return handle_open(transport->ports, id, port, readable != 0);
}

void cxl_handle_close(cxl_transport *transport, uint64_t id)
{
    handle_close(transport->ports, id);
}

void cxl_handle_allow(cxl_transport *transport, uint64_t id, uint32_t pid)
{
    handle_allow(transport->ports, id, pid);
}

/* -------------------------------------------------------------------------------------- names */

void cxl_absent_note(cxl_transport *transport, uint64_t directory, const char *name, uint64_t length)
{
    absent_note(transport->absent, directory, name, length);
}

void cxl_absent_take_back(cxl_transport *transport, uint64_t directory, const char *name, uint64_t length)
{
    absent_take_back(transport->absent, directory, name, length);
}

void cxl_absent_take_all_back(cxl_transport *transport)
{
    absent_take_all_back(transport->absent);
}
