/* client_verified.h - the rest of client.c: what several verify together, as the daemon gives it out, and who takes
 * whose word. */

/* Pieces front to back, of which others have compared some already; one that nobody has is waited for in vain. */
static int serve_verify(daemon_state *d, cxl_direct_verify *request)
{
    uint64_t size = cxl_held_size(d->held);
    if ((request->flags & CXL_DIRECT_WRONG) != 0) {
        d->wrong_at = request->done_offset;
        return -EINVAL;
    }
    CHECK(request->done_bytes == 0 || request->done_offset % d->piece_bytes == 0, "no piece is done");
    d->pieces_done += request->done_bytes != 0;
    if (d->forgets_after != 0 && d->pieces_done >= d->forgets_after)
        return -EINVAL;
    request->length_bytes = 0;
    if (d->next_piece < size && d->pauses-- <= 0) {
        request->offset = d->next_piece;
        request->length_bytes = size - d->next_piece < d->piece_bytes ? size - d->next_piece : d->piece_bytes;
        d->next_piece += request->length_bytes + d->others_take;
        d->pieces_given++;
        d->pauses = 2;
    }
    if (d->next_piece >= size && d->pieces_done == d->pieces_given)
        request->flags = CXL_DIRECT_VERIFIED;
    return 0;
}
