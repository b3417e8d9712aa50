/* copy_ranges.c - ranges of extents are copied into a new one: what a cleaner does between gather.c and moves.c.
 *
 * Never: decides what is worth moving; changes a map or a source.
 *
 * Invariants
 * - What is copied is what was verified: each byte of a source is loaded once for both.
 * - A copy counts as a whole or not at all.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "extents/append.h"

/* Through memory: what was summed is what is copied. A piece lies in one chunk of the source. */
static int copy_range(cxl_engine *engine, extent *source, uint64_t offset, uint64_t length,
                      extent *target, append_state *state, uint8_t *buffer, cxl_fault *fault)
{
    int result = 0;
    while (length > 0 && result == 0) {
        uint64_t piece = smaller(length, engine->chunk - (offset & (engine->chunk - 1)));
        extent_range range = {
            .extent = source, .extent_offset = offset, .length = piece,
            .reference_start = offset, .reference_end = offset + piece,
        };
        result = extent_read(engine, &range, buffer, true, fault);
        if (result == 0)
            result = append_bytes(engine, target, state, buffer, piece, fault);
        offset += piece;
        length -= piece;
    }
    return result;
}

/* As much of a range as the target has room for; *move: what went where. */
static int append_range(cxl_engine *engine, const cxl_live_range *range, extent *target,
                        append_state *state, uint8_t *buffer, cxl_move *move, cxl_fault *fault)
{
    extent *source = extent_take(engine, range->extent_id);
    if (source == NULL)
        return -ENOENT;
    uint64_t known = extent_checksums(engine, source, 0, 0, NULL);
    int result = -EINVAL;
    if (source != target && range->extent_offset <= known && range->length <= known - range->extent_offset) {
        *move = (cxl_move){
            .source_id = range->extent_id, .source_offset = range->extent_offset,
            .length = smaller(range->length, target->capacity - state->offset),
            .target_id = target->id, .target_offset = state->offset,
        };
        result = copy_range(engine, source, range->extent_offset, move->length, target, state, buffer, fault);
    }
    extent_drop(engine, source);
    return result;
}

static int64_t append_ranges(cxl_engine *engine, const cxl_live_range *ranges, uint64_t count,
                             extent *target, uint8_t *buffer, cxl_move *moves, cxl_fault *fault,
                             uint64_t *bad)
{
    append_state state;
    uint64_t done = 0;
    int result = append_begin(engine, target, append_padding(engine, target), &state, fault);
    while (result == 0 && done < count && state.offset < target->capacity) {
        *bad = done;
        result = append_range(engine, &ranges[done], target, &state, buffer, &moves[done], fault);
        done++;
    }
    if (result == 0) {
        result = append_fence(engine);
        fault->error = result;
        result = result == -EREMOTEIO ? -EIO : result;
    }
    if (result != 0)
        return result;
    append_commit(engine, target, &state);
    return (int64_t)done;
}

int64_t cxl_engine_copy_ranges(cxl_engine *engine, const cxl_live_range *ranges, uint64_t count, uint64_t target_id,
                               cxl_move *moves, uint64_t *bad, cxl_fault *fault)
{
    extent *target;
    *bad = 0;
    memset(fault, 0, sizeof(*fault));
    int64_t result = extent_use_open(engine, target_id, &target);
    if (result != 0)
        return result;
    uint8_t *buffer = cxl_allocate(engine->chunk);
    result = -ENOMEM;
    if (buffer != NULL)
        result = append_ranges(engine, ranges, count, target, buffer, moves, fault, bad);
    free(buffer);
    extent_unused(engine, target);
    return result;
}
