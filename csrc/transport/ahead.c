/* ahead.c - verifies what a program that reads a file from front to back will ask for next.
 *
 * A program that reads alone waits for three things in turn: the checksum of a megabyte, the kernel's copy of
 * it, and being woken. While it is woken, and uses what it got, the worker has nothing to do: so it verifies
 * the next bytes then, and the next answer is only a copy. Two mounts side by side, two cores, in several runs:
 * reads of 1 MiB 1.09 to 1.17 times as fast with one reader, 1.04 to 1.08 with two; of 512 KiB 1.10 to 1.14 and
 * 0.99 to 1.09.
 *
 * Whoever answers the next read takes what is verified by then, verifies the rest itself, and ends the work of
 * the other: nobody waits, and no more than a piece is verified twice.
 *
 * Never: delivers bytes, reports damage (the read that wants the bytes finds it again).
 *
 * Invariants
 * - Bytes count as verified for one answer, within AHEAD_NS_MAX, and only where they still are the same bytes
 *   of the same extent: those never change, and no id is given twice.
 * - A worker does this only after long reads, and while another one waits for requests.
 */
#include "transport/transport.h"

enum {
    AHEAD_NS_MAX = 100000000,     /* a page cache would deliver for minutes what it verified once */
    PIECE_BYTES = 128 << 10,
};

uint64_t ahead_take(cxl_transport *t, uint64_t id, const extent_range *range)
{
    uint64_t done = 0;
    handle *h = handle_lock(t, id);
    if (h == NULL)
        return 0;
    verified_ahead *a = &h->ahead;
    if (a->extent_id == range->extent->id && a->extent_offset == range->extent_offset &&
        monotonic_ns() - a->began_ns <= AHEAD_NS_MAX)
        done = smaller(a->done, range->length);
    *a = (verified_ahead){.serial = 0};
    handle_unlock(t, h);
    return done;
}

/* The number of the work on next, or 0: the read before was none of a row, or nothing is left. */
static uint64_t begin(cxl_transport *t, const fuse_wire_read *in, uint64_t count,
                      const extent_range *next)
{
    uint64_t serial = 0;
    handle *h = handle_lock(t, in->handle);
    if (h == NULL)
        return 0;
    if (next->extent != NULL && h->read_end == in->offset) {
        serial = atomic_fetch_add(&t->ahead_serial, 1) + 1;
        h->ahead = (verified_ahead){
            .serial = serial, .extent_id = next->extent->id, .extent_offset = next->extent_offset,
            .began_ns = monotonic_ns(),
        };
    }
    h->read_end = in->offset + count;
    handle_unlock(t, h);
    return serial;
}

/* False: somebody took it, or began anew. */
static bool note(cxl_transport *t, uint64_t id, uint64_t serial, uint64_t done)
{
    handle *h = handle_lock(t, id);
    if (h == NULL)
        return false;
    bool same = h->ahead.serial == serial;
    if (same)
        h->ahead.done = done;
    handle_unlock(t, h);
    return same;
}

void ahead_verify(cxl_worker *worker, cxl_map *map, const fuse_wire_read *in, uint64_t count)
{
    cxl_transport *t = worker->transport;
    extent_range next = {.extent = NULL};
    cxl_fault fault;
    if (!t->settings.verify || count < LONG_BYTES || !turn_others_wait(&t->turns))
        return;
    map_hold(map, in->offset + count, count, &next);
    uint64_t serial = begin(t, in, count, &next);
    for (uint64_t done = 0; serial != 0 && done < next.length;) {
        extent_range piece = next;
        piece.extent_offset += done;
        piece.length = smaller(PIECE_BYTES, next.length - done);
        if (extent_read(t->engine, &piece, NULL, true, &fault) != 0)
            break;
        done += piece.length;
        if (!note(t, in->handle, serial, done))
            break;
    }
    if (next.extent != NULL)
        extent_drop(t->engine, next.extent);
}
