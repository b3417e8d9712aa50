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
 * Never: delivers bytes, reports damage (the read that wants the bytes finds it again), remembers what is
 * verified (ports.c).
 *
 * Invariants
 * - A worker does this only after long reads, and while another one waits for requests.
 */
#include "transport/transport.h"

enum { PIECE_BYTES = 128 << 10 };

void ahead_verify(cxl_worker *worker, cxl_map *map, const fuse_wire_read *in, uint64_t count)
{
    cxl_transport *t = worker->transport;
    extent_range next = {.extent = NULL};
    cxl_fault fault;
    if (!t->settings.verify || count < LONG_BYTES || !turn_others_wait(t->turns))
        return;
    map_hold_extent(map, in->offset + count, count, &next);
    uint64_t serial = handle_begin_ahead(t->ports, in->handle, in->offset, count, &next);
    for (uint64_t done = 0; serial != 0 && done < next.length;) {
        extent_range piece = next;
        piece.extent_offset += done;
        piece.length = smaller(PIECE_BYTES, next.length - done);
        if (extent_read(t->engine, &piece, NULL, true, &fault) != 0)
            break;
        done += piece.length;
        if (!handle_note_ahead(t->ports, in->handle, serial, done))
            break;
    }
    if (next.extent != NULL)
        extent_drop(t->engine, next.extent);
}
