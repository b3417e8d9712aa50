/* direct_copy.c - stores a piece of a file into a lease, with its checksums, and tells the daemon.
 *
 * Never: stores anything once the slip is closed and this thread can know it; makes an msync (page media: the
 * daemon's commit covers what is appended).
 *
 * Invariants
 * - A descriptor is appended after its bytes and their checksums can be seen by everybody, and are durable on line and
 *   byte granularity.
 * - This thread is counted in the slip from before it looks at the state until it stores nothing more: a daemon that
 *   has closed the slip and finds nobody counted may hand the room out.
 */
#include <errno.h>
#include <string.h>

#include "client/direct_copy.h"

enum { SUMS_AT_ONCE = 64, ZEROS = 4096 };
static const uint8_t zeros[ZEROS];

/* --------------------------------------------------------------------------------- storing */

typedef struct {
    const cxl_client *client;
    const direct_lease *lease;
    uint64_t at;                 /* extent offset of the next byte */
    uint32_t crc;                /* of its chunk so far */
    uint32_t sums[SUMS_AT_ONCE]; /* of chunks that are complete, not stored yet: those before at */
    uint32_t sum_count;
} filling;

static int store_sums(filling *state)
{
    uint64_t chunk = state->client->identity.chunk_bytes;
    if (state->sum_count == 0)
        return 0;
    uint64_t first = state->at / chunk - state->sum_count;
    uint64_t offset = state->lease->crc_offset + first * sizeof(uint32_t);
    int result = cxl_media_store(state->client->media, offset, state->sums, state->sum_count * sizeof(uint32_t));
    state->sum_count = 0;
    return result;
}

/* Whole chunks. */
static int store_chunks(filling *state, const uint8_t *bytes, uint32_t count)
{
    uint64_t chunk = state->client->identity.chunk_bytes;
    uint32_t *sums = &state->sums[state->sum_count];
    for (uint32_t i = 0; i < count; i++)
        sums[i] = client_chunk_seed(state->lease->id, state->at / chunk + i);
    uint64_t offset = state->lease->room.media_offset + state->at;
    int result = cxl_media_copy_crcs(state->client->media, offset, bytes, chunk, count, sums);
    if (result == 0) {
        state->at += count * chunk;
        state->sum_count += count;
    }
    return result;
}

/* A part of a chunk, and its end, if that is reached. */
static int store_part(filling *state, const uint8_t *bytes, uint64_t length)
{
    uint64_t chunk = state->client->identity.chunk_bytes;
    if (state->at % chunk == 0)
        state->crc = client_chunk_seed(state->lease->id, state->at / chunk);
    uint64_t offset = state->lease->room.media_offset + state->at;
    int result = cxl_media_copy_crc(state->client->media, offset, bytes, length, &state->crc);
    if (result != 0)
        return result;
    state->at += length;
    if (state->at % chunk == 0)
        state->sums[state->sum_count++] = state->crc;
    return 0;
}

/* bytes NULL: zeros. */
static int store_bytes(filling *state, const uint8_t *bytes, uint64_t length)
{
    uint64_t chunk = state->client->identity.chunk_bytes;
    int result = 0;
    while (length > 0 && result == 0) {
        uint64_t piece = chunk - state->at % chunk, chunks = length / chunk;
        if (piece == chunk && chunks > 0 && bytes != NULL) {
            chunks = chunks < SUMS_AT_ONCE - state->sum_count ? chunks : SUMS_AT_ONCE - state->sum_count;
            piece = chunks * chunk;
            result = store_chunks(state, bytes, (uint32_t)chunks);
        } else {
            piece = piece < length ? piece : length;
            if (bytes == NULL && piece > ZEROS)
                piece = ZEROS;
            result = store_part(state, bytes != NULL ? bytes : zeros, piece);
        }
        length -= piece;
        if (bytes != NULL)
            bytes += piece;
        if (result == 0 && state->sum_count == SUMS_AT_ONCE)
            result = store_sums(state);
    }
    return result != 0 ? result : store_sums(state);
}

/* ------------------------------------------------------------------------------- appending */

/* With the file locked. */
static int append(cxl_direct_file *file, direct_lease *lease, const cxl_slip_descriptor *given)
{
    cxl_media *media = file->client->media;
    direct_slip *slip = lease->slip;
    cxl_slip_descriptor descriptor = *given;
    uint64_t found = 0;
    if (slip->closed)
        return -EAGAIN;
    int result = slip_make_room(file, slip);
    if (result != 0)
        return result;
    descriptor.sequence = slip->appended;
    uint64_t place = slip->appended % CXL_SLIP_DESCRIPTORS;
    result = cxl_media_store(media, slip->offset + CXL_SLIP_DESCRIPTORS_AT + place * sizeof descriptor, &descriptor,
                             sizeof descriptor);
    if (result == 0)
        result = cxl_media_swap_u64(media, slip->offset + offsetof(cxl_slip, state), slip->appended,
                                    slip->appended + 1, &found);
    if (result != 0)
        return result;
    if (found != slip->appended)
        return (found & CXL_SLIP_CLOSED) != 0 ? -EAGAIN : -EIO;
    slip->appended++;
    return 0;
}

static int copy_counted(cxl_direct_file *file, direct_lease *lease, const placement *place, const uint8_t *bytes,
                        uint64_t file_offset)
{
    uint64_t state_word = 0, chunk = file->client->identity.chunk_bytes;
    int result = slip_state(file->client, lease->slip, &state_word);
    if (result != 0)
        return result;
    if ((state_word & CXL_SLIP_CLOSED) != 0)
        return -EAGAIN;
    filling state = {.client = file->client, .lease = lease, .at = lease->room.used, .crc = lease->crc};
    uint64_t start = lease->room.media_offset, used = lease->room.used;
    client_touch(file->client, start + used, place->extent_offset + place->length - used, start,
                 start + lease->length);
    result = store_bytes(&state, NULL, place->extent_offset - lease->room.used);
    if (result == 0)
        result = store_bytes(&state, bytes, place->length);
    if (result != 0)
        return result;
    cxl_media_order(file->client->media);
    cxl_slip_descriptor descriptor = {
        .lease_id = lease->id,
        .file_offset = file_offset,
        .extent_offset = place->extent_offset,
        .length_bytes = place->length,
        .tail_crc = state.at % chunk != 0 ? state.crc : 0,
    };
    pthread_mutex_lock(&file->lock);
    result = append(file, lease, &descriptor);
    if (result == 0) {
        lease->room.used = state.at;
        lease->file_end = file_offset + place->length;
        file->stored_end = lease->file_end > file->stored_end ? lease->file_end : file->stored_end;
        lease->crc = state.crc;
    }
    pthread_mutex_unlock(&file->lock);
    return result;
}

int direct_copy(cxl_direct_file *file, direct_lease *lease, const placement *place, const uint8_t *bytes,
                uint64_t file_offset)
{
    uint64_t copying = lease->slip->offset + offsetof(cxl_slip, copying), found;
    int result = cxl_media_add_u64(file->client->media, copying, 1, &found);
    if (result != 0)
        return result;
    result = copy_counted(file, lease, place, bytes, file_offset);
    int uncounted = cxl_media_add_u64(file->client->media, copying, UINT64_MAX, &found);
    return result != 0 ? result : uncounted;
}
