/* extent_io.c - the bytes of extents: append with checksum, verify, deliver.
 *
 * Never: changes a byte below an extent's length, delivers an unverified byte when asked to verify.
 *
 * Invariants
 * - What was appended counts from append_commit on; before it, or without it, nobody can see it and
 *   the next append writes over it.
 * - A checksum and the length it belongs to are read and changed together, under a stripe.
 */
#include <errno.h>
#include <string.h>

#include "extents/extents.h"

enum { SNAPSHOT_CHUNKS = 64 };   /* checksums taken at once, on the stack */

static const uint8_t zeros[PUBLISH_ALIGN];

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "seeds are little-endian numbers");

uint32_t chunk_seed(uint64_t id, uint64_t chunk)
{
    const uint64_t words[2] = {id, chunk};
    return cxl_crc32c(0, words, sizeof(words));
}

uint64_t extent_snapshot(cxl_engine *engine, extent *x, uint64_t first, uint64_t count,
                         uint32_t *crcs)
{
    pthread_mutex_lock(stripe_of(engine, x));
    uint64_t length = x->length;
    if (count != 0)
        memcpy(crcs, x->crcs + first, count * sizeof(*crcs));
    pthread_mutex_unlock(stripe_of(engine, x));
    return length;
}

/* ------------------------------------------------------------------------------------- append */

uint64_t append_padding(cxl_engine *engine, extent *x)
{
    uint64_t end = x->media_offset + x->length;
    uint64_t padding = (0 - end) % PUBLISH_ALIGN;
    pthread_mutex_lock(stripe_of(engine, x));
    bool published = x->published == x->length;
    pthread_mutex_unlock(stripe_of(engine, x));
    return published ? smaller(padding, x->capacity - x->length) : 0;
}

uint64_t append_room(cxl_engine *engine, extent *x)
{
    return x->capacity - x->length - append_padding(engine, x);
}

int append_begin(cxl_engine *engine, extent *x, uint64_t padding, append_state *state,
                 cxl_fault *fault)
{
    uint64_t chunk = x->length >> engine->chunk_shift;
    bool partial = (x->length & (engine->chunk - 1)) != 0;
    state->offset = x->length;
    state->start = x->length + padding;
    state->first_chunk = chunk;
    state->first_crc = partial ? x->crcs[chunk] : 0;
    state->crc = partial ? state->first_crc : chunk_seed(x->id, chunk);
    return padding != 0 ? append_bytes(engine, x, state, zeros, padding, fault) : 0;
}

int append_bytes(cxl_engine *engine, extent *x, append_state *state, const void *source,
                 uint64_t length, cxl_fault *fault)
{
    const uint8_t *bytes = source;
    while (length > 0) {
        uint64_t chunk = state->offset >> engine->chunk_shift;
        uint64_t piece = smaller(length, engine->chunk - (state->offset & (engine->chunk - 1)));
        uint64_t place = x->media_offset + state->offset;
        int result = cxl_media_copy_crc(engine->media, place, bytes, piece, &state->crc);
        if (result != 0) {
            fault->error = result;
            fault->extent_id = x->id;
            fault->chunk = (uint32_t)chunk;
            fault->media_offset = place;
            fault->length = piece;
            return result;
        }
        /* Nobody looks at checksums beyond the length, but the open chunk is below it. */
        if (chunk == state->first_chunk)
            state->first_crc = state->crc;
        else
            x->crcs[chunk] = state->crc;
        state->offset += piece;
        bytes += piece;
        length -= piece;
        if ((state->offset & (engine->chunk - 1)) == 0)
            state->crc = chunk_seed(x->id, chunk + 1);
    }
    return 0;
}

int append_fence(cxl_engine *engine)
{
    int result = engine->fenced_writes ? cxl_media_fence(engine->media) : 0;
    return result == -EIO ? -EREMOTEIO : result;
}

void append_commit(cxl_engine *engine, extent *x, const append_state *state)
{
    uint64_t more = chunks_of(engine, state->offset) - chunks_of(engine, x->length);
    atomic_fetch_add_explicit(&engine->crcs, more, memory_order_relaxed);
    pthread_mutex_lock(stripe_of(engine, x));
    if (state->offset > x->length) {
        x->crcs[state->first_chunk] = state->first_crc;
        x->length = state->offset;
    }
    pthread_mutex_unlock(stripe_of(engine, x));
}

/* ------------------------------------------------------------------------------------ deliver */

/* One chunk as a read wants it. */
typedef struct {
    uint64_t index;
    uint64_t start;           /* extent offsets of all its bytes */
    uint64_t end;
    uint64_t wanted_start;    /* and of those to deliver */
    uint64_t wanted_end;
} chunk_view;

static int report(const extent_range *range, const chunk_view *chunk, int error,
                  uint64_t media_offset, cxl_fault *fault)
{
    uint64_t start = larger(chunk->start, range->reference_start);
    uint64_t end = smaller(chunk->end, range->reference_end);
    if (fault == NULL)
        return -EIO;
    memset(fault, 0, sizeof(*fault));
    fault->error = error;
    fault->chunk = (uint32_t)chunk->index;
    fault->file_offset = range->file_base + start;
    fault->length = end - start;
    fault->extent_id = range->extent->id;
    fault->media_offset = media_offset;
    return -EIO;
}

static int check_chunk(cxl_engine *engine, const extent_range *range, const chunk_view *chunk,
                       uint32_t expected, uint8_t *target, cxl_fault *fault)
{
    uint64_t place = range->extent->media_offset + chunk->start;
    uint64_t length = chunk->end - chunk->start;
    bool whole = chunk->wanted_start == chunk->start && chunk->wanted_end == chunk->end;
    uint32_t actual = chunk_seed(range->extent->id, chunk->index);
    uint64_t at = place;
    int result;
    if (whole && target != NULL)
        result = cxl_media_read_crc(engine->media, place, target, length, &actual, &at);
    else
        result = cxl_media_crc(engine->media, place, length, &actual, &at);
    if (result == 0 && actual == expected) {
        if (whole || target == NULL)
            return 0;
        place = range->extent->media_offset + chunk->wanted_start;
        result = cxl_media_read(engine->media, place, target,
                                chunk->wanted_end - chunk->wanted_start, &at);
        return result == 0 ? 0 : report(range, chunk, result, at, fault);
    }
    if (whole && target != NULL)
        memset(target, 0, length);   /* nothing that failed its check leaves this function */
    if (result != 0)
        return report(range, chunk, result, at, fault);
    atomic_fetch_add_explicit(&engine->checksum_errors, 1, memory_order_relaxed);
    report(range, chunk, -EBADMSG, place, fault);
    if (fault != NULL) {
        fault->expected = expected;
        fault->actual = actual;
    }
    return -EIO;
}

static int read_unverified(cxl_engine *engine, const extent_range *range, uint8_t *target,
                           cxl_fault *fault)
{
    uint64_t at = 0;
    uint64_t place = range->extent->media_offset + range->extent_offset;
    if (target == NULL || cxl_media_read(engine->media, place, target, range->length, &at) == 0)
        return 0;
    uint64_t index = (at - range->extent->media_offset) >> engine->chunk_shift;
    chunk_view chunk = {
        .index = index, .start = index << engine->chunk_shift,
        .end = (index + 1) << engine->chunk_shift,
    };
    return report(range, &chunk, -EIO, at, fault);
}

const uint8_t *range_address(const cxl_engine *engine, const extent_range *range)
{
    return (const uint8_t *)cxl_media_base(engine->media) + range->extent->media_offset +
           range->extent_offset;
}

int extent_read(cxl_engine *engine, const extent_range *range, uint8_t *target, bool verify,
                cxl_fault *fault)
{
    uint32_t crcs[SNAPSHOT_CHUNKS];
    uint64_t end = range->extent_offset + range->length;
    uint64_t last = chunks_of(engine, end);
    if (!verify)
        return read_unverified(engine, range, target, fault);
    for (uint64_t index = range->extent_offset >> engine->chunk_shift; index < last;) {
        uint64_t count = smaller(last - index, SNAPSHOT_CHUNKS);
        uint64_t length = extent_snapshot(engine, range->extent, index, count, crcs);
        for (uint64_t i = 0; i < count; i++, index++) {
            chunk_view chunk = {.index = index, .start = index << engine->chunk_shift};
            chunk.end = smaller(chunk.start + engine->chunk, length);
            chunk.wanted_start = larger(chunk.start, range->extent_offset);
            chunk.wanted_end = smaller(chunk.end, end);
            int result = check_chunk(engine, range, &chunk, crcs[i], target, fault);
            if (result != 0)
                return result;
            if (target != NULL)
                target += chunk.wanted_end - chunk.wanted_start;
        }
    }
    return 0;
}
