/* forward.c - requests passed on over the socket, and the answers that come back.
 *
 * Who serves the other end does one thing after the other, and may be long about it. A worker does not wait for
 * room in the socket: what does not fit waits here, and the thread that passes answers back sends it when it
 * does.
 *
 * Never: lets a file's data travel over the socket.
 *
 * Invariants
 * - A message fits an ordinary user's socket: what could be larger is made smaller (READDIR), cut into
 *   several (BATCH_FORGET) or refused.
 * - Messages leave in the order in which they came, unless what waits would take more than its bound, or
 *   there is no memory: then the worker waits for the socket.
 * - Answers go to the kernel as they came but for INIT, where the kernel is told what libfuse has no
 *   words for.
 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport/backlog.h"

struct forwarding {
    forwarding_settings settings;
    int wake_fd;                  /* tells the relay that something waits */
    atomic_bool hurrying;         /* workers do not wait for the socket any more */
    atomic_bool stopping;
    pthread_t relay;              /* the thread that passes answers back */
    bool started;
    uint8_t *message;             /* the relay's */

    pthread_mutex_t lock;         /* of the following; held over sends that do not wait */
    backlog waiting;
    bool over;                    /* nobody serves the other end any more */

    _Atomic uint64_t count;
    _Atomic uint64_t init_unique; /* of the INIT request under way */
    _Atomic uint32_t kernel_flags; /* what it offers */
    _Atomic uint32_t kernel_flags2;
};

/* ------------------------------------------------------------------------------------ forward */

/* The errno, or 0. */
static int send_parts(const forwarding *f, const struct iovec *parts, size_t count, int flags)
{
    const struct msghdr message = {.msg_iov = (struct iovec *)(uintptr_t)parts, .msg_iovlen = count};
    ssize_t sent;
    do {
        sent = sendmsg(f->settings.control_fd, &message, MSG_NOSIGNAL | flags);
    } while (sent < 0 && errno == EINTR && !atomic_load(&f->hurrying));
    return sent < 0 ? errno : 0;
}

/* Nobody serves it any more: what waits must not wait for ever. Forgets have no answer. */
static void give_up(const forwarding *f, const fuse_wire_header *header)
{
    if (header->opcode != FUSE_WIRE_BATCH_FORGET && header->opcode != FUSE_WIRE_FORGET)
        reply(f->settings.fuse_fd, header->unique, -EIO, NULL, 0);
}

/* With the lock: send it, or let it wait behind the others. EAGAIN: neither is possible now. */
static int send_or_wait(forwarding *f, const struct iovec *parts, size_t count)
{
    if (f->over)
        return EPIPE;
    int error = f->waiting.first != NULL ? EAGAIN : send_parts(f, parts, count, MSG_DONTWAIT);
    if (error != EAGAIN)
        return error;
    waiting *w = waiting_new(parts, count);
    if (!backlog_has_room(&f->waiting, w)) {
        free(w);
        return EAGAIN;
    }
    backlog_put(&f->waiting, w);
    const uint64_t one = 1;
    return write(f->wake_fd, &one, sizeof(one)) == sizeof(one) || errno == EAGAIN ? 0 : errno;
}

static void send_message(forwarding *f, const struct iovec *parts, size_t count)
{
    atomic_fetch_add_explicit(&f->count, 1, memory_order_relaxed);
    pthread_mutex_lock(&f->lock);
    int error = send_or_wait(f, parts, count);
    pthread_mutex_unlock(&f->lock);
    if (error == EAGAIN)
        error = send_parts(f, parts, count, 0);
    if (error != 0)
        give_up(f, parts[0].iov_base);
}

/* With the lock: the oldest ones, as many as there is room for. */
static void send_waiting(forwarding *f)
{
    while (f->waiting.first != NULL) {
        const struct iovec all = {f->waiting.first->bytes, f->waiting.first->length};
        int error = send_parts(f, &all, 1, MSG_DONTWAIT);
        if (error == EAGAIN)
            return;
        waiting *w = backlog_take(&f->waiting);
        if (error != 0)
            give_up(f, (const void *)w->bytes);
        free(w);
    }
}

static void send_whole(forwarding *f, const request *r)
{
    const struct iovec all = {r->header, sizeof(*r->header) + r->length};
    send_message(f, &all, 1);
}

/* Up to a mebibyte of forgotten inodes, which are independent of each other. */
static void send_forgets(forwarding *f, const request *r)
{
    enum { AT_ONCE = 4096 };
    fuse_wire_forgets forgets;
    if (r->length < sizeof(forgets))
        return;
    memcpy(&forgets, r->arguments, sizeof(forgets));
    const uint8_t *next = r->arguments + sizeof(forgets);
    uint64_t left = smaller(forgets.count, (r->length - sizeof(forgets)) / FUSE_WIRE_FORGET_BYTES);
    while (left > 0) {
        uint64_t count = smaller(left, AT_ONCE);
        fuse_wire_header header = *r->header;
        forgets.count = (uint32_t)count;
        header.length = (uint32_t)(sizeof(header) + sizeof(forgets) + count * FUSE_WIRE_FORGET_BYTES);
        const struct iovec parts[3] = {
            {&header, sizeof(header)},
            {&forgets, sizeof(forgets)},
            {(void *)(uintptr_t)next, count * FUSE_WIRE_FORGET_BYTES},
        };
        send_message(f, parts, 3);
        next += count * FUSE_WIRE_FORGET_BYTES;
        left -= count;
    }
}

static void note_init(forwarding *f, const request *r)
{
    const fuse_wire_init *in = (const void *)r->arguments;
    atomic_store(&f->kernel_flags, in->flags);
    if (r->length >= sizeof(*in) && in->flags & FUSE_WIRE_INIT_EXT)
        atomic_store(&f->kernel_flags2, in->flags2);
    atomic_store(&f->init_unique, r->header->unique);
}

static void limit_listing(const request *r)
{
    fuse_wire_read *in = (void *)r->arguments;
    in->size = (uint32_t)smaller(in->size, CONTROL_BYTES_MAX);
}

void forward(forwarding *f, request *r)
{
    switch (r->header->opcode) {
    case FUSE_WIRE_BATCH_FORGET:
        send_forgets(f, r);
        return;
    case FUSE_WIRE_INTERRUPT:      /* no request takes long enough to be given up */
    case FUSE_WIRE_NOTIFY_REPLY:   /* to a question that nobody asks */
        return;
    case FUSE_WIRE_INIT:
        note_init(f, r);
        break;
    case FUSE_WIRE_READDIR:
    case FUSE_WIRE_READDIRPLUS:
        limit_listing(r);
        break;
    default:
        break;
    }
    if (r->length > CONTROL_BYTES_MAX)
        reply(f->settings.fuse_fd, r->header->unique, -E2BIG, NULL, 0);
    else
        send_whole(f, r);
}

/* -------------------------------------------------------------------------------------- relay */

/* What the kernel may do beyond what libfuse knows: see docs/architecture.md. */
static void improve_init(forwarding *f, uint8_t *message, size_t length)
{
    fuse_wire_init_reply answer;
    if (length < sizeof(fuse_wire_reply) + sizeof(answer))
        return;
    memcpy(&answer, message + sizeof(fuse_wire_reply), sizeof(answer));
    answer.flags |= atomic_load(&f->kernel_flags) & (FUSE_WIRE_PARALLEL_DIROPS | FUSE_WIRE_MAX_PAGES |
                                       FUSE_WIRE_INIT_EXT);
    answer.flags2 |= atomic_load(&f->kernel_flags2) & FUSE_WIRE2_DIRECT_IO_ALLOW_MMAP;
    answer.write_max = f->settings.request_max;
    answer.pages_max = (uint16_t)(f->settings.request_max / (uint32_t)sysconf(_SC_PAGESIZE));
    memcpy(message + sizeof(fuse_wire_reply), &answer, sizeof(answer));
}

static void relay_message(forwarding *f, uint8_t *message, size_t length)
{
    fuse_wire_reply header;
    memcpy(&header, message, sizeof(header));
    if (header.unique != 0 && header.unique == atomic_load(&f->init_unique)) {
        atomic_store(&f->init_unique, 0);
        improve_init(f, message, length);
    }
    ssize_t written;
    do {
        written = write(f->settings.fuse_fd, message, length);
    } while (written < 0 && errno == EINTR);
    /* What the kernel does not take from a serving process would leave somebody waiting. */
    if (written < 0 && !is_gone(errno) && header.unique != 0)
        reply(f->settings.fuse_fd, header.unique, -EIO, NULL, 0);
}

/* One message from the other end, if there is one. False: there will be none any more. */
static bool relay_one(forwarding *f)
{
    ssize_t length = recv(f->settings.control_fd, f->message, MESSAGE_BYTES, MSG_DONTWAIT);
    if (length < 0 && (errno == EINTR || errno == EAGAIN))
        return true;
    if (length < (ssize_t)sizeof(fuse_wire_reply))
        return false;
    relay_message(f, f->message, (size_t)length);
    return true;
}

/* Until one end of the socket is ready, or something waits that was not there before. */
static void wait_for_work(forwarding *f, struct pollfd *control)
{
    pthread_mutex_lock(&f->lock);
    bool waits = f->waiting.first != NULL;
    pthread_mutex_unlock(&f->lock);
    struct pollfd fds[2] = {
        {.fd = f->settings.control_fd, .events = (short)(waits ? POLLIN | POLLOUT : POLLIN)},
        {.fd = f->wake_fd, .events = POLLIN},
    };
    uint64_t told;
    if (poll(fds, 2, -1) < 0)
        fds[0].revents = 0;
    else if (fds[1].revents != 0 && read(f->wake_fd, &told, sizeof(told)) < 0)
        fds[1].revents = 0;
    *control = fds[0];
}

/* Without answers what is passed on from now on must fail at once, and the other end must see that it is
 * over. */
static void finish(forwarding *f)
{
    waiting *w;
    pthread_mutex_lock(&f->lock);
    f->over = true;
    pthread_mutex_unlock(&f->lock);
    shutdown(f->settings.control_fd, SHUT_RDWR);
    while ((w = backlog_take(&f->waiting)) != NULL) {
        give_up(f, (const void *)w->bytes);
        free(w);
    }
}

static void *relay_main(void *argument)
{
    forwarding *f = argument;
    bool goes_on = true;
    while (goes_on && !atomic_load(&f->stopping)) {
        struct pollfd control;
        wait_for_work(f, &control);
        if (control.revents & POLLOUT) {
            pthread_mutex_lock(&f->lock);
            send_waiting(f);
            pthread_mutex_unlock(&f->lock);
        }
        if (control.revents & ~POLLOUT)
            goes_on = relay_one(f);
    }
    finish(f);
    return NULL;
}

/* --------------------------------------------------------------------------------------- life */

int forwarding_new(const forwarding_settings *settings, forwarding **out)
{
    forwarding *f = cxl_allocate_zeroed(1, sizeof(*f));
    uint8_t *message = f == NULL ? NULL : cxl_allocate(MESSAGE_BYTES);
    int wake_fd = message == NULL ? -1 : eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd < 0) {
        int error = message == NULL ? -ENOMEM : -errno;
        free(message);
        free(f);
        return error;
    }
    f->settings = *settings;
    f->message = message;
    f->wake_fd = wake_fd;
    pthread_mutex_init(&f->lock, NULL);
    backlog_init(&f->waiting, settings->waiting_bytes_max);
    *out = f;
    return 0;
}

void forwarding_free(forwarding *f)
{
    if (f == NULL)
        return;
    backlog_clear(&f->waiting);
    pthread_mutex_destroy(&f->lock);
    close(f->wake_fd);
    free(f->message);
    free(f);
}

/* The relay takes no signal but the one that wakes it: those of the process are for other threads. */
int forwarding_start(forwarding *f)
{
    sigset_t all, before;
    if (f->started)
        return -EINVAL;
    sigfillset(&all);
    sigdelset(&all, wake_signal());
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int result = cxl_fault_hit(CXL_FAULT_ALLOCATE) ? EAGAIN : pthread_create(&f->relay, NULL, relay_main, f);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (result == 0)
        pthread_setname_np(f->relay, "cxlfs-relay");
    f->started = result == 0;
    return -result;
}

void forwarding_hurry(forwarding *f)
{
    atomic_store(&f->hurrying, true);
}

/* It may be about to enter a system call when the signal comes, and about to answer: wake it until it ends. */
void forwarding_stop(forwarding *f)
{
    atomic_store(&f->stopping, true);
    if (!f->started)
        return;
    const uint64_t one = 1;
    struct timespec until;
    do {
        if (write(f->wake_fd, &one, sizeof(one)) < 0)
            sched_yield();          /* it was told often enough */
        pthread_kill(f->relay, wake_signal());
        until = wake_again();
    } while (pthread_timedjoin_np(f->relay, NULL, &until) == ETIMEDOUT);
    f->started = false;
}

uint64_t forwarding_count(forwarding *f, uint64_t *waited)
{
    pthread_mutex_lock(&f->lock);
    *waited = f->waiting.count;
    pthread_mutex_unlock(&f->lock);
    return atomic_load(&f->count);
}

bool forwarding_direct_mapping(forwarding *f)
{
    return atomic_load(&f->kernel_flags2) & FUSE_WIRE2_DIRECT_IO_ALLOW_MMAP;
}
