/* absorb.c - what a program has stored by itself, and appended to its slip, becomes content of a file.
 *
 * Never: looks at the bytes of a file, trusts a descriptor or a checksum beyond the room that was given for it, waits
 * for a program.
 *
 * Invariants
 * - A descriptor is copied out of the media once, and checked as it was copied.
 * - It counts as a whole or not at all, and those that count are the first ones.
 * - Nobody appends to, or closes, an extent while a descriptor that names it is taken (extent_use_open).
 */
#include <errno.h>
#include <string.h>

#include "client/direct.h"
#include "extents/append.h"

typedef struct {
    cxl_map *map;
    const cxl_direct_room *rooms;
    uint64_t room_count;
    uint64_t file_size_max;
    const cxl_direct_room *room;   /* of the last descriptor, */
    extent *extent;                /* and its extent, in use; NULL: none is */
    uint32_t wrong;
} absorbing;

static int refuse(absorbing *work, uint32_t wrong)
{
    work->wrong = wrong;
    return -EINVAL;
}

static void release(absorbing *work)
{
    if (work->extent != NULL)
        extent_unused(work->map->engine, work->extent);
    work->extent = NULL;
}

/* The extent of that id is in use from here on, and its room known. Most descriptors name the one before them. */
static int use(absorbing *work, uint64_t id)
{
    extent *x;
    if (work->extent != NULL && work->room->id == id)
        return 0;
    release(work);
    const cxl_direct_room *room = work->rooms, *end = work->rooms + work->room_count;
    while (room < end && room->id != id)
        room++;
    if (room == end || extent_use_open(work->map->engine, id, &x) != 0)
        return refuse(work, CXL_WRONG_LEASE);
    work->room = room;
    work->extent = x;
    return 0;
}

/* Whether the journal knows of bytes that share a unit with what would come behind them. */
static bool ends_unaligned(cxl_engine *engine, extent *x)
{
    uint64_t published = extent_published(engine, x);
    return published != 0 && (x->media_offset + published) % PUBLISH_ALIGN != 0;
}

/* Everything but its checksums; the extent it names is in use then. */
static int check(absorbing *work, const cxl_slip_descriptor *d, uint64_t sequence)
{
    cxl_engine *engine = work->map->engine;
    if (d->sequence != sequence)
        return refuse(work, CXL_WRONG_SEQUENCE);
    if (d->flags != 0 || d->reserved[0] != 0 || d->reserved[1] != 0)
        return refuse(work, CXL_WRONG_RESERVED);
    int result = use(work, d->lease_id);
    if (result != 0)
        return result;
    const extent *x = work->extent;
    uint64_t capacity = smaller(work->room->capacity, x->capacity);
    if (d->length_bytes == 0 || d->extent_offset < x->length || d->extent_offset > capacity ||
        d->length_bytes > capacity - d->extent_offset)
        return refuse(work, CXL_WRONG_PLACE);
    if (d->file_offset > work->file_size_max || d->length_bytes > work->file_size_max - d->file_offset)
        return refuse(work, CXL_WRONG_FILE);
    if (d->tail_crc != 0 && ((d->extent_offset + d->length_bytes) & (engine->chunk - 1)) == 0)
        return refuse(work, CXL_WRONG_TAIL);
    if (ends_unaligned(engine, work->extent))
        return refuse(work, CXL_WRONG_PUBLISHED);
    return 0;
}

static int load_checksums(cxl_engine *engine, const cxl_direct_room *room, uint64_t first, uint64_t count,
                          uint32_t *out)
{
    uint64_t place = room->crc_offset + first * sizeof(*out);
    return place < room->crc_offset ? -ERANGE : cxl_media_read(engine->media, place, out, count * sizeof(*out), NULL);
}

/* The checksums of all chunks that the descriptor touches, and of those before it that nothing was said of. Nobody
 * looks at those that lie beyond the length, but the open chunk is below it. */
static int take_checksums(const absorbing *work, const cxl_slip_descriptor *d, append_state *state)
{
    cxl_engine *engine = work->map->engine;
    extent *x = work->extent;
    uint64_t end = d->extent_offset + d->length_bytes;
    uint64_t first = x->length >> engine->chunk_shift, partial = end >> engine->chunk_shift;
    *state = (append_state){
        .start = d->extent_offset, .offset = end, .first_chunk = first, .first_crc = d->tail_crc,
    };
    if (first == partial)
        return 0;
    int result = load_checksums(engine, work->room, first, 1, &state->first_crc);
    if (result == 0)
        result = load_checksums(engine, work->room, first + 1, partial - first - 1, x->crcs + first + 1);
    if ((end & (engine->chunk - 1)) != 0)
        x->crcs[partial] = d->tail_crc;
    return result;
}

static int take(absorbing *work, const cxl_slip_descriptor *d, uint64_t sequence)
{
    append_state state;
    cxl_engine *engine = work->map->engine;
    int result = check(work, d, sequence);
    if (result == 0)
        result = take_checksums(work, d, &state);
    if (result != 0)
        return result;
    const extent *x = work->extent;
    if (!engine->fenced_writes)  /* a program does not sync pages: the next fence does */
        result = cxl_media_write_back(engine->media, x->media_offset + x->length, state.offset - x->length);
    if (result != 0)
        return result;
    const reference fresh = {d->file_offset, d->length_bytes, work->extent, d->extent_offset};
    return map_show(work->map, &state, &fresh);
}

static uint64_t place_of(uint64_t slip_offset, uint64_t sequence)
{
    return slip_offset + CXL_SLIP_DESCRIPTORS_AT + sequence % CXL_SLIP_DESCRIPTORS * sizeof(cxl_slip_descriptor);
}

/* A descriptor as it is now; where there is no media there is no slip. */
static int load_descriptor(absorbing *work, uint64_t place, cxl_slip_descriptor *out)
{
    int result = cxl_media_read(work->map->engine->media, place, out, sizeof(*out), NULL);
    return result == -ERANGE ? refuse(work, CXL_WRONG_SLIP) : result;
}

int64_t cxl_map_absorb(cxl_map *map, uint64_t slip_offset, uint64_t first, uint64_t last, const cxl_direct_room *rooms,
                       uint64_t room_count, uint64_t file_size_max, uint64_t *bytes, uint32_t *wrong,
                       cxl_fault *fault)
{
    cxl_engine *engine = map->engine;
    cxl_slip_descriptor descriptor;
    absorbing work = {
        .map = map, .rooms = rooms, .room_count = room_count, .file_size_max = smaller(file_size_max, FILE_OFFSET_MAX),
    };
    uint64_t next = first;
    int result = 0;
    *bytes = 0;
    memset(fault, 0, sizeof(*fault));
    if (first > last || last - first > CXL_SLIP_DESCRIPTORS || slip_offset > cxl_media_size(engine->media))
        result = refuse(&work, CXL_WRONG_SLIP);
    pthread_mutex_lock(&map->writer);
    while (result == 0 && next < last) {
        result = load_descriptor(&work, place_of(slip_offset, next), &descriptor);
        if (result == 0)
            result = take(&work, &descriptor, next);
        if (result == 0) {
            *bytes += descriptor.length_bytes;
            next++;
        }
    }
    release(&work);
    pthread_mutex_unlock(&map->writer);
    atomic_fetch_add_explicit(&engine->bytes_written, *bytes, memory_order_relaxed);
    *wrong = work.wrong;
    if (result != 0) {
        fault->error = result;
        fault->media_offset = place_of(slip_offset, next);
    }
    return (int64_t)(next - first);
}
