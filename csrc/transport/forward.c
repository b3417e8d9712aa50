/* forward.c - requests passed on over the socket, and the answers that come back.
 *
 * Never: lets a file's data travel over the socket.
 *
 * Invariants
 * - A message fits an ordinary user's socket: what could be larger is made smaller (READDIR), cut into
 *   several (BATCH_FORGET) or refused.
 * - Answers go to the kernel as they came but for INIT, where the kernel is told what libfuse has no
 *   words for.
 */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "transport/transport.h"

/* ------------------------------------------------------------------------------------ forward */

static void send_message(cxl_transport *t, const request *r, const struct iovec *parts, size_t count)
{
    const struct msghdr message = {.msg_iov = (struct iovec *)(uintptr_t)parts, .msg_iovlen = count};
    uint32_t opcode = r->header->opcode;
    ssize_t sent;
    atomic_fetch_add_explicit(&t->forwarded, 1, memory_order_relaxed);
    do {
        sent = sendmsg(t->control_fd, &message, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR && !atomic_load(&t->stopping));
    /* Nobody serves any more: what waits must not wait for ever. Forgets have no answer. */
    if (sent < 0 && opcode != FUSE_WIRE_BATCH_FORGET && opcode != FUSE_WIRE_FORGET)
        reply(t, r->header->unique, -EIO, NULL, 0);
}

static void send_whole(cxl_transport *t, const request *r)
{
    const struct iovec all = {r->header, sizeof(*r->header) + r->length};
    send_message(t, r, &all, 1);
}

/* Up to a mebibyte of forgotten inodes, which are independent of each other. */
static void send_forgets(cxl_transport *t, const request *r)
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
        send_message(t, r, parts, 3);
        next += count * FUSE_WIRE_FORGET_BYTES;
        left -= count;
    }
}

static void note_init(cxl_transport *t, const request *r)
{
    const fuse_wire_init *in = (const void *)r->arguments;
    atomic_store(&t->kernel_flags, in->flags);
    if (r->length >= sizeof(*in) && in->flags & FUSE_WIRE_INIT_EXT)
        atomic_store(&t->kernel_flags2, in->flags2);
    atomic_store(&t->init_unique, r->header->unique);
}

static void limit_listing(const request *r)
{
    fuse_wire_read *in = (void *)r->arguments;
    in->size = (uint32_t)smaller(in->size, CONTROL_BYTES_MAX);
}

void forward(cxl_transport *t, request *r)
{
    switch (r->header->opcode) {
    case FUSE_WIRE_BATCH_FORGET:
        send_forgets(t, r);
        return;
    case FUSE_WIRE_INTERRUPT:      /* no request takes long enough to be given up */
    case FUSE_WIRE_NOTIFY_REPLY:   /* to a question that nobody asks */
        return;
    case FUSE_WIRE_INIT:
        note_init(t, r);
        break;
    case FUSE_WIRE_READDIR:
    case FUSE_WIRE_READDIRPLUS:
        limit_listing(r);
        break;
    default:
        break;
    }
    if (r->length > CONTROL_BYTES_MAX)
        reply(t, r->header->unique, -E2BIG, NULL, 0);
    else
        send_whole(t, r);
}

/* -------------------------------------------------------------------------------------- relay */

/* What the kernel may do beyond what libfuse knows: see docs/architecture.md. */
static void improve_init(cxl_transport *t, uint8_t *message, size_t length)
{
    fuse_wire_init_reply answer;
    if (length < sizeof(fuse_wire_reply) + sizeof(answer))
        return;
    memcpy(&answer, message + sizeof(fuse_wire_reply), sizeof(answer));
    answer.flags |= atomic_load(&t->kernel_flags) & (FUSE_WIRE_PARALLEL_DIROPS | FUSE_WIRE_MAX_PAGES |
                                       FUSE_WIRE_INIT_EXT);
    answer.flags2 |= atomic_load(&t->kernel_flags2) & FUSE_WIRE2_DIRECT_IO_ALLOW_MMAP;
    answer.write_max = t->settings.request_max;
    answer.pages_max = (uint16_t)(t->settings.request_max / BLOCK_BYTES);
    memcpy(message + sizeof(fuse_wire_reply), &answer, sizeof(answer));
}

static void relay_message(cxl_transport *t, uint8_t *message, size_t length)
{
    fuse_wire_reply header;
    memcpy(&header, message, sizeof(header));
    if (header.unique != 0 && header.unique == atomic_load(&t->init_unique)) {
        atomic_store(&t->init_unique, 0);
        improve_init(t, message, length);
    }
    ssize_t written;
    do {
        written = write(t->fuse_fd, message, length);
    } while (written < 0 && errno == EINTR);
    /* What the kernel does not take from a serving process would leave somebody waiting. */
    if (written < 0 && errno != ENOENT && errno != ENODEV && header.unique != 0)
        reply(t, header.unique, -EIO, NULL, 0);
}

void *relay_main(void *transport)
{
    cxl_transport *t = transport;
    while (!atomic_load(&t->stopping)) {
        ssize_t length = recv(t->control_fd, t->message, MESSAGE_BYTES, 0);
        if (length < 0 && errno == EINTR)
            continue;
        if (length < (ssize_t)sizeof(fuse_wire_reply)) {
            /* The other end was closed, or makes no sense. Without answers what is passed on from
             * now on must fail at once, and the other end must see that it is over. */
            shutdown(t->control_fd, SHUT_RDWR);
            break;
        }
        relay_message(t, t->message, (size_t)length);
    }
    return NULL;
}
