/* extent_io.c - the bytes of extents: append with checksum, verify, deliver.
 *
 * Never: changes a byte below an extent's length, delivers an unverified byte when asked to verify.
 *
 * Invariants
 * - What was appended counts from append_commit on; before it, or without it, nobody can see it and
 *   the next append writes over it.
 * - A checksum and the length it belongs to are read and changed together, under a stripe.
 * - A verified byte that is delivered was loaded once, for its checksum and for its target: a bit that
 *   flips behind that is not delivered, and gets no new checksum where the byte goes on to.
 */
#include <errno.h>
#include <string.h>

#include "extents/append.h"
#include "extents/sums.h"

enum { CHUNKS_AT_ONCE = 64 };   /* checksums taken at once, on the stack */

static const uint8_t zeros[PUBLISH_ALIGN];

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "seeds are little-endian numbers");

uint32_t chunk_seed(uint64_t id, uint64_t chunk)
{
    const uint64_t words[2] = {id, chunk};
    return cxl_crc32c(0, words, sizeof(words));
}

uint64_t extent_checksums(cxl_engine *engine, extent *x, uint64_t first, uint64_t count,
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
} chunk_view;

/* Bytes of one chunk to deliver: extent offsets, and where to. */
typedef struct {
    uint64_t start;
    uint64_t end;
    uint8_t *target;
} chunk_part;

static int fail_range(const extent_range *range, const chunk_view *chunk, int error,
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

static int fail_check(cxl_engine *engine, const extent_range *range, const chunk_view *chunk, uint32_t expected,
                      uint32_t actual, cxl_fault *fault)
{
    atomic_fetch_add_explicit(&engine->checksum_errors, 1, memory_order_relaxed);
    fail_range(range, chunk, -EBADMSG, range->extent->media_offset + chunk->start, fault);
    if (fault != NULL) {
        fault->expected = expected;
        fault->actual = actual;
    }
    return -EIO;
}

/* Sum a chunk and deliver parts of it (sorted, apart) in one pass, each byte loaded once: what lies
 * between the parts is summed where it lies, the parts where they arrive. */
static int sum_chunk(cxl_engine *engine, const extent *x, const chunk_view *chunk, const chunk_part *parts,
                     unsigned count, uint32_t *crc, uint64_t *at)
{
    uint64_t offset = chunk->start;
    for (unsigned i = 0; i < count; i++) {
        const chunk_part *part = &parts[i];
        int result = cxl_media_crc(engine->media, x->media_offset + offset, part->start - offset, crc, at);
        if (result == 0)
            result = cxl_media_read_crc(engine->media, x->media_offset + part->start, part->target,
                                        part->end - part->start, crc, at);
        if (result != 0)
            return result;
        offset = part->end;
    }
    return cxl_media_crc(engine->media, x->media_offset + offset, chunk->end - offset, crc, at);
}

/* Deliver parts of a chunk that has its checksum; range: whose fault it is when it has not. */
static int deliver_chunk(cxl_engine *engine, const extent_range *range, const chunk_view *chunk,
                         uint32_t expected, const chunk_part *parts, unsigned count, cxl_fault *fault)
{
    const extent *x = range->extent;
    uint64_t at = x->media_offset + chunk->start;
    uint32_t actual = chunk_seed(x->id, chunk->index);
    atomic_fetch_add_explicit(&engine->chunks_verified, 1, memory_order_relaxed);
    int result = sum_chunk(engine, x, chunk, parts, count, &actual, &at);
    if (result == 0 && actual == expected)
        return 0;
    for (unsigned i = 0; i < count; i++)   /* nothing that failed its check leaves this function */
        memset(parts[i].target, 0, parts[i].end - parts[i].start);
    if (result != 0)
        return fail_range(range, chunk, result, at, fault);
    return fail_check(engine, range, chunk, expected, actual, fault);
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
    return fail_range(range, &chunk, -EIO, at, fault);
}

const uint8_t *range_address(const cxl_engine *engine, const extent_range *range)
{
    return (const uint8_t *)cxl_media_base(engine->media) + range->extent->media_offset +
           range->extent_offset;
}

int extent_read(cxl_engine *engine, const extent_range *range, uint8_t *target, bool verify,
                cxl_fault *fault)
{
    uint32_t crcs[CHUNKS_AT_ONCE];
    uint64_t end = range->extent_offset + range->length;
    uint64_t last = chunks_of(engine, end);
    if (!verify)
        return read_unverified(engine, range, target, fault);
    for (uint64_t index = range->extent_offset >> engine->chunk_shift; index < last;) {
        uint64_t count = smaller(last - index, CHUNKS_AT_ONCE);
        uint64_t length = extent_checksums(engine, range->extent, index, count, crcs);
        for (uint64_t i = 0; i < count; i++, index++) {
            chunk_view chunk = {.index = index, .start = index << engine->chunk_shift};
            chunk.end = smaller(chunk.start + engine->chunk, length);
            chunk_part part = {
                larger(chunk.start, range->extent_offset), smaller(chunk.end, end), target,
            };
            int result = deliver_chunk(engine, range, &chunk, crcs[i], &part, target != NULL, fault);
            if (result != 0)
                return result;
            if (target != NULL)
                target += part.end - part.start;
        }
    }
    return 0;
}

static uint64_t first_chunk(const cxl_engine *engine, const extent_range *range)
{
    return range->extent_offset >> engine->chunk_shift;
}

static bool in_one_chunk(const cxl_engine *engine, const extent_range *range)
{
    return (range->extent_offset + range->length - 1) >> engine->chunk_shift == first_chunk(engine, range);
}

/* Where a part goes among sorted ones, or false: it overlaps one of them. */
static bool insert_part(chunk_part *parts, unsigned count, chunk_part fresh)
{
    unsigned at = count;
    for (; at > 0 && parts[at - 1].start >= fresh.end; at--)
        ;
    if (at > 0 && parts[at - 1].end > fresh.start)
        return false;
    memmove(parts + at + 1, parts + at, (count - at) * sizeof(*parts));
    parts[at] = fresh;
    return true;
}

/* The first of the ranges, with those behind it that lie in the same chunk; done: which they are. */
static int read_together(cxl_engine *engine, const extent_range *ranges, uint8_t *const *targets,
                         unsigned count, bool *done, cxl_fault *fault)
{
    chunk_part parts[READ_BATCH];
    uint32_t expected;
    unsigned found = 0;
    uint64_t index = first_chunk(engine, ranges);
    for (unsigned i = 0; i < count; i++) {
        const extent_range *range = &ranges[i];
        chunk_part part = {range->extent_offset, range->extent_offset + range->length, targets[i]};
        if (done[i] || range->extent != ranges->extent || first_chunk(engine, range) != index ||
            !in_one_chunk(engine, range) || !insert_part(parts, found, part))
            continue;
        done[i] = true;
        found++;
    }
    uint64_t length = extent_checksums(engine, ranges->extent, index, 1, &expected);
    chunk_view chunk = {.index = index, .start = index << engine->chunk_shift};
    chunk.end = smaller(chunk.start + engine->chunk, length);
    return deliver_chunk(engine, ranges, &chunk, expected, parts, found, fault);
}

int extent_read_each(cxl_engine *engine, const extent_range *ranges, uint8_t *const *targets,
                     unsigned count, bool verify, cxl_fault *fault)
{
    bool done[READ_BATCH] = {false};
    int result = 0;
    for (unsigned i = 0; i < count && result == 0; i++) {
        if (done[i])
            continue;
        if (verify && in_one_chunk(engine, &ranges[i]))
            result = read_together(engine, ranges + i, targets + i, count - i, done + i, fault);
        else
            result = extent_read(engine, &ranges[i], targets[i], verify, fault);
    }
    return result;
}

/* --------------------------------------------------------------------- checksums of checksums */

/* The checksum of [start, end) of a chunk, all of which is verified in the same pass. */
static int sum_part(cxl_engine *engine, const extent_range *range, const chunk_view *chunk, uint64_t start,
                    uint64_t end, uint32_t expected, uint32_t *crc, cxl_fault *fault)
{
    const extent *x = range->extent;
    uint64_t at = x->media_offset + chunk->start;
    uint32_t actual = chunk_seed(x->id, chunk->index), part = 0;
    atomic_fetch_add_explicit(&engine->chunks_verified, 1, memory_order_relaxed);
    int result = cxl_media_crc(engine->media, x->media_offset + chunk->start, start - chunk->start, &actual, &at);
    if (result == 0)
        result = cxl_media_crc(engine->media, x->media_offset + start, end - start, &part, &at);
    actual = cxl_crc32c_combine(actual, part, end - start);
    if (result == 0)
        result = cxl_media_crc(engine->media, x->media_offset + end, chunk->end - end, &actual, &at);
    if (result != 0)
        return fail_range(range, chunk, result, at, fault);
    if (actual != expected)
        return fail_check(engine, range, chunk, expected, actual, fault);
    *crc = cxl_crc32c_combine(*crc, part, end - start);
    return 0;
}

/* A chunk's checksum is that of its seed and its bytes, one behind the other: taking out what the seed adds is the
 * same as adding it where the bytes begin. */
static uint32_t sum_whole(const extent *x, const chunk_view *chunk, uint32_t crc, uint32_t stored)
{
    return cxl_crc32c_combine(crc ^ chunk_seed(x->id, chunk->index), stored, chunk->end - chunk->start);
}

int extent_sum(cxl_engine *engine, const extent_range *range, uint32_t *crc, uint64_t *work, uint64_t *done,
               cxl_fault *fault)
{
    uint32_t stored[CHUNKS_AT_ONCE];
    uint64_t end = range->extent_offset + range->length;
    uint64_t last = chunks_of(engine, end);
    *done = 0;
    for (uint64_t index = range->extent_offset >> engine->chunk_shift; index < last && *work != 0;) {
        uint64_t count = smaller(last - index, CHUNKS_AT_ONCE);
        uint64_t length = extent_checksums(engine, range->extent, index, count, stored);
        for (uint64_t i = 0; i < count && *work != 0; i++, index++) {
            chunk_view chunk = {.index = index, .start = index << engine->chunk_shift};
            chunk.end = smaller(chunk.start + engine->chunk, length);
            uint64_t from = larger(chunk.start, range->extent_offset), to = smaller(chunk.end, end);
            uint64_t cost = CHUNK_WORK;
            if (from == chunk.start && to == chunk.end) {
                *crc = sum_whole(range->extent, &chunk, *crc, stored[i]);
            } else {
                int result = sum_part(engine, range, &chunk, from, to, stored[i], crc, fault);
                if (result != 0)
                    return result;
                cost += chunk.end - chunk.start;
            }
            *work -= smaller(cost, *work);
            *done += to - from;
        }
    }
    return 0;
}

/* ------------------------------------------------------------------------------------- verify */

/* A chunk is a fault of its own; what cannot be read for want of memory is none. */
int cxl_engine_verify(cxl_engine *engine, uint64_t id, cxl_fault *faults, uint64_t capacity,
                      uint64_t *count, uint64_t *bytes)
{
    cxl_fault fault;
    *count = *bytes = 0;
    extent *x = extent_take(engine, id);
    if (x == NULL)
        return -ENOENT;
    uint64_t length = extent_checksums(engine, x, 0, 0, NULL);
    for (uint64_t offset = 0; offset < length; offset += engine->chunk) {
        uint64_t piece = smaller(engine->chunk, length - offset);
        extent_range range = {
            .extent = x, .extent_offset = offset, .length = piece,
            .reference_start = 0, .reference_end = length,
        };
        if (extent_read(engine, &range, NULL, true, &fault) != 0) {
            if (*count < capacity)
                faults[*count] = fault;
            ++*count;
        }
        *bytes += piece;
    }
    extent_drop(engine, x);
    return 0;
}
