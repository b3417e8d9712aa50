/* io.c - READ and WRITE, served from and to the extent map.
 *
 * Never: answers with bytes that were not verified where that is asked for, decides what a failed
 * request means (the control plane repeats it, and finds out).
 *
 * Invariants
 * - The extent that an answer lies in is held until the kernel has copied it.
 */
#include <errno.h>

#include "transport/transport.h"

/* --------------------------------------------------------------------------------------- read */

/* False: the kernel could not take them from here. */
static bool deliver_bytes(cxl_worker *worker, const request *r, const void *bytes, size_t length)
{
    cxl_transport *t = worker->transport;
    fuse_wire_reply *header = (void *)worker->buffer;  /* the request lies at the other end of the headroom */
    *header = (fuse_wire_reply){.length = (uint32_t)(sizeof(*header) + length), .unique = r->header->unique};
    turn_answers(t->turns, &worker->turn, true);
    bool spliced = pipe_reply(&worker->pipe, t->fuse_fd, header, bytes, length);
    bool answered = spliced || reply(t->fuse_fd, r->header->unique, 0, bytes, length) == 0;
    turn_answered(t->turns, &worker->turn);
    if (!answered)
        return false;
    atomic_fetch_add_explicit(&t->spliced_reads, spliced, memory_order_relaxed);
    atomic_fetch_add_explicit(&t->reads, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&t->read_bytes, length, memory_order_relaxed);
    return true;
}

/* What the media has in one piece goes to the kernel from there. */
static bool read_in_place(cxl_worker *worker, const request *r, const fuse_wire_read *in,
                          const extent_range *range)
{
    cxl_transport *t = worker->transport;
    extent_range rest = *range;
    cxl_fault fault;
    if (t->settings.verify) {
        uint64_t done = handle_take_ahead(t->ports, in->handle, range);
        rest.extent_offset += done;
        rest.length -= done;
        if (rest.length > 0 && extent_read(t->engine, &rest, NULL, true, &fault) != 0)
            return false;
        atomic_fetch_add_explicit(&t->ahead_bytes, done, memory_order_relaxed);
    }
    atomic_fetch_add_explicit(&t->engine->bytes_read, range->length, memory_order_relaxed);
    return deliver_bytes(worker, r, range_address(t->engine, range), range->length);
}

static bool read_map(cxl_worker *worker, const request *r, cxl_map *map, const fuse_wire_read *in)
{
    cxl_transport *t = worker->transport;
    uint8_t *copy = worker->buffer + HEADROOM_BYTES;
    extent_range range;
    cxl_fault fault;
    if (map_hold_extent(map, in->offset, in->size, &range) > 0) {
        bool delivered = read_in_place(worker, r, in, &range);
        extent_drop(t->engine, range.extent);
        if (delivered)
            ahead_verify(worker, map, in, range.length);
        return delivered;
    }

    int64_t count = cxl_map_read(map, in->offset, copy, in->size, t->settings.verify, &fault);
    if (count < 0)
        return false;
    atomic_fetch_add_explicit(&t->read_copies, count > 0, memory_order_relaxed);
    if (!deliver_bytes(worker, r, copy, (size_t)count))
        return false;
    ahead_verify(worker, map, in, (uint64_t)count);
    return true;
}

bool answer_read(cxl_worker *worker, const request *r)
{
    const fuse_wire_read *in = (const void *)r->arguments;
    cxl_map *map;
    if (r->length < sizeof(*in) || in->size > worker->transport->settings.request_max)
        return false;
    cxl_port *port = port_for_read(worker->transport->ports, in->handle, &map);
    if (port == NULL)
        return false;
    bool served = read_map(worker, r, map, in);
    cxl_map_free(map);
    port_drop(port);
    return served;
}

/* -------------------------------------------------------------------------------------- write */

/* Bytes of the request that are in the file now; *error: why they are not all, if a fence failed. */
static uint64_t write_map(cxl_map *map, const fuse_wire_write *in, const uint8_t *bytes, int *error)
{
    uint64_t done = 0, needed;
    cxl_fault fault = {.error = 0};
    while (done < in->size) {
        int64_t taken = cxl_map_write(map, in->offset + done, bytes + done, in->size - done,
                                      &needed, &fault);
        if (taken <= 0)
            break;
        done += (uint64_t)taken;
    }
    *error = fault.error == -EREMOTEIO ? -EREMOTEIO : 0;
    return done;
}

static bool is_plain_write(const cxl_transport *t, const request *r)
{
    const fuse_wire_write *in = (const void *)r->arguments;
    return r->length > sizeof(*in) && in->size == r->length - sizeof(*in) &&
           in->size <= t->settings.file_size_max && in->offset <= t->settings.file_size_max - in->size;
}

bool answer_write(cxl_worker *worker, const request *r, uint64_t *done, int *error)
{
    cxl_transport *t = worker->transport;
    const fuse_wire_write *in = (const void *)r->arguments;
    cxl_map *map;
    *done = 0;
    *error = 0;
    if (!is_plain_write(t, r))
        return false;
    cxl_port *port = port_for_write(t->ports, in->handle, r->header->pid, &map);
    if (port == NULL)
        return false;
    *done = write_map(map, in, r->arguments + sizeof(*in), error);
    if (cxl_map_wants_lease(map))
        worker->lease_inode = port_inode(port);
    cxl_map_free(map);
    port_wrote(port, *done > 0);
    port_drop(port);
    if (*done < in->size)
        return false;
    const fuse_wire_write_reply written = {.size = in->size};
    atomic_fetch_add_explicit(&t->writes, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&t->write_bytes, *done, memory_order_relaxed);
    turn_answers(t->turns, &worker->turn, true);
    cxl_transport_reply(t, r->header->unique, 0, &written, sizeof(written));
    turn_answered(t->turns, &worker->turn);
    return true;
}
