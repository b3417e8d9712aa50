/* direct_room.c - room of one file: asked for, locked, confirmed, and given back.
 *
 * Never: stores file data; keeps room locked that the daemon has taken back and this process has noticed.
 *
 * Invariants
 * - What the daemon answers is checked against the medium before it is used.
 * - The order is: the daemon gives room, it is locked, the daemon confirms that it saw the lock; and back: nothing is
 *   stored there any more, it is unlocked, the daemon is told.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/direct_file.h"
#include "cxl_direct.h"

/* ---------------------------------------------------------------------------------- slip */

int slip_state(const cxl_client *client, const direct_slip *slip, uint64_t *state)
{
    return cxl_media_load_u64(client->media, slip->offset + offsetof(cxl_slip, state), state);
}

static void slip_leave(cxl_direct_file *file, direct_slip *slip)
{
    if (--slip->users > 0)
        return;
    client_range_drop(file->client, slip->offset, CXL_SLIP_BYTES);
    free(slip);
}

static int slip_new(cxl_direct_file *file, uint64_t offset)
{
    uint64_t state = 0;
    direct_slip *slip = calloc(1, sizeof *slip);
    if (slip == NULL)
        return -ENOMEM;
    slip->offset = offset;
    slip->users = 1;
    int result = client_range_add(file->client, offset, CXL_SLIP_BYTES);
    if (result != 0) {
        free(slip);
        return result;
    }
    file->slip = slip;
    result = slip_state(file->client, slip, &state);
    if (result == 0 && state != 0)      /* not one that was just made, or closed already */
        result = -EAGAIN;
    if (result != 0)
        slip_is_closed(file, slip);
    return result;
}

static void lease_drop(cxl_direct_file *file, direct_lease *lease)
{
    for (int i = 0; i < LEASES_AT_ONCE; i++)
        if (file->leases[i] == lease)
            file->leases[i] = NULL;
    client_range_drop(file->client, lease->media_offset, lease->length);
    slip_leave(file, lease->slip);
    free(lease);
    pthread_cond_broadcast(&file->idle);
}

void slip_is_closed(cxl_direct_file *file, direct_slip *slip)
{
    slip->closed = true;
    for (int i = 0; i < LEASES_AT_ONCE; i++) {
        direct_lease *lease = file->leases[i];
        if (lease != NULL && lease->slip == slip && !lease->busy)
            lease_drop(file, lease);
    }
    if (file->slip == slip) {
        file->slip = NULL;
        slip_leave(file, slip);
    }
}

void lease_not_busy(cxl_direct_file *file, direct_lease *lease)
{
    lease->busy = false;
    if (lease->slip->closed)
        lease_drop(file, lease);
    else
        pthread_cond_broadcast(&file->idle);
}

void leases_drop_all(cxl_direct_file *file)
{
    for (int i = 0; i < LEASES_AT_ONCE; i++)
        if (file->leases[i] != NULL)
            lease_drop(file, file->leases[i]);
    if (file->slip != NULL)
        slip_is_closed(file, file->slip);
}

/* What the next request returns. */
static void tell_returned(cxl_direct_file *file, uint64_t lease_ids[CXL_DIRECT_LEASES])
{
    memcpy(lease_ids, file->returned, file->returned_count * sizeof *lease_ids);
    file->returned_count = 0;
}

int file_settle(cxl_direct_file *file, uint32_t flags)
{
    cxl_direct_settled request = {.flags = flags};
    tell_returned(file, request.returned_lease_ids);
    atomic_fetch_add(&client_counted()->settles, 1);
    return client_request(file->channel, file->fd, CXL_DIRECT_SETTLE, &request);
}

int slip_make_room(cxl_direct_file *file, direct_slip *slip)
{
    uint64_t done;
    if (slip->appended - slip->absorbed < CXL_SLIP_DESCRIPTORS)
        return 0;
    for (int i = 0; i < 2; i++) {
        uint64_t at = slip->offset + offsetof(cxl_slip, absorbed);
        int result = cxl_media_load_u64(file->client->media, at, &done);
        if (result != 0)
            return result;
        if (done >= slip->absorbed && done <= slip->appended)
            slip->absorbed = done;
        if (slip->appended - slip->absorbed < CXL_SLIP_DESCRIPTORS)
            return 0;
        if (i == 0 && (result = file_settle(file, 0)) != 0)
            return result;
    }
    slip_is_closed(file, slip);     /* nobody absorbs this one any more */
    return -EAGAIN;
}

/* ---------------------------------------------------------------------------------- leases */

static bool lies_in(uint64_t offset, uint64_t length, uint64_t start, uint64_t end)
{
    return offset >= start && offset <= end && length <= end - offset;
}

static bool room_makes_sense(const cxl_client *client, const cxl_direct_room_given *room)
{
    uint64_t size = client->identity.media_bytes, chunk = client->identity.chunk_bytes, start = room->media_offset;
    if (room->lease_id == 0 || room->capacity_bytes == 0 || !lies_in(start, room->length_bytes, 0, size))
        return false;
    uint64_t end = start + room->length_bytes, chunks = (room->capacity_bytes - 1) / chunk + 1;
    if (!lies_in(start, room->capacity_bytes, start, end) || start % CXL_LINE != 0)
        return false;
    return lies_in(room->crc_offset, chunks * sizeof(uint32_t), start + room->capacity_bytes, end) &&
           room->crc_offset % sizeof(uint32_t) == 0;
}

static bool makes_sense(const cxl_client *client, const cxl_direct_lease *answer, uint32_t count_max)
{
    if (answer->count == 0 || answer->count > count_max || answer->slip_bytes != CXL_SLIP_BYTES ||
        answer->slip_offset % CXL_LINE != 0 ||
        !lies_in(answer->slip_offset, CXL_SLIP_BYTES, 0, client->identity.media_bytes))
        return false;
    for (uint32_t i = 0; i < answer->count; i++)
        if (!room_makes_sense(client, &answer->rooms[i]))
            return false;
    return true;
}

static direct_lease *lease_new(cxl_direct_file *file, const cxl_direct_room_given *room)
{
    direct_lease *lease = calloc(1, sizeof *lease);
    if (lease == NULL)
        return NULL;
    lease->slip = file->slip;
    lease->id = room->lease_id;
    lease->media_offset = room->media_offset;
    lease->length = room->length_bytes;
    lease->capacity = room->capacity_bytes;
    lease->crc_offset = room->crc_offset;
    if (client_range_add(file->client, lease->media_offset, lease->length) != 0) {
        free(lease);
        return NULL;
    }
    lease->slip->users++;
    return lease;
}

/* Lock what was given, as far as that is possible, and have it confirmed. */
static int take(cxl_direct_file *file, const cxl_direct_lease *answer)
{
    cxl_direct_confirm request = {{0}};
    uint32_t taken = 0;
    int result = 0;
    if (file->slip != NULL && file->slip->offset != answer->slip_offset)
        slip_is_closed(file, file->slip);
    if (file->slip == NULL)
        result = slip_new(file, answer->slip_offset);
    if (result != 0)
        return result;
    for (int i = 0; i < LEASES_AT_ONCE && taken < answer->count; i++) {
        if (file->leases[i] != NULL)
            continue;
        file->leases[i] = lease_new(file, &answer->rooms[taken]);
        if (file->leases[i] == NULL)
            break;
        request.lease_ids[taken++] = file->leases[i]->id;
    }
    for (uint32_t i = taken; i < answer->count; i++)
        file->returned[file->returned_count++] = answer->rooms[i].lease_id;
    if (taken == 0)
        return -ENOMEM;
    atomic_fetch_add(&client_counted()->leases, taken);
    result = client_request(file->channel, file->fd, CXL_DIRECT_CONFIRM, &request);
    for (int i = 0; result != 0 && i < LEASES_AT_ONCE; i++)
        for (uint32_t j = 0; file->leases[i] != NULL && j < taken; j++)
            if (file->leases[i]->id == request.lease_ids[j]) {
                lease_drop(file, file->leases[i]);
                break;
            }
    return result;
}

/* Whether room is to be asked for again soon; what the writer is told. */
static int refused(cxl_direct_file *file, int result)
{
    client_refuse(result);
    switch (-result) {
    case ENOSPC:
    case EAGAIN:
        atomic_store(&file->refused_for, REFUSED_FOR);
        return -EAGAIN;
    case EBUSY: case EPERM: case EACCES: case ENOTTY: case EROFS: case EINVAL: case EBADF: case ENOMEM: case ENXIO:
    case ENOENT:
        atomic_store(&file->refused_for, UINT64_MAX);
        return -EAGAIN;
    default:
        return result;
    }
}

/* The daemon may be another one than the one that the medium was mapped for. */
static int check_medium(cxl_direct_file *file)
{
    cxl_client *client;
    if (file->is_checked)
        return 0;
    int result = client_take(file->fd, file->channel, true, &client);
    if (result != 0)
        return result;
    file->client_before = file->client;
    file->client = client;
    file->is_checked = true;
    return 0;
}

/* Nothing of it is used. */
static void give_back(cxl_direct_file *file, const cxl_direct_lease *answer)
{
    if (file->returned_count > 0)
        (void)file_settle(file, 0);
    for (uint32_t i = 0; i < CXL_DIRECT_LEASES && i < answer->count; i++)
        file->returned[file->returned_count++] = answer->rooms[i].lease_id;
    (void)file_settle(file, 0);
}

int lease_ask(cxl_direct_file *file, uint64_t wanted, uint64_t file_offset)
{
    uint32_t places = 0;
    for (int i = 0; i < LEASES_AT_ONCE && places < CXL_DIRECT_LEASES; i++)
        places += file->leases[i] == NULL;
    if (places == 0)
        return -EAGAIN;
    int result = check_medium(file);
    if (result != 0)
        return refused(file, result);
    uint64_t size = wanted > file->next_bytes ? wanted : file->next_bytes;
    cxl_direct_lease answer = {
        .wanted_bytes = size < LEASE_LARGEST ? size : LEASE_LARGEST, .file_offset = file_offset, .count = places,
    };
    tell_returned(file, answer.returned_lease_ids);
    result = client_request(file->channel, file->fd, CXL_DIRECT_LEASE, &answer);
    if (result != 0)
        return refused(file, result);
    file->has_asked = true;
    result = makes_sense(file->client, &answer, places) ? take(file, &answer) : -ENOTTY;
    if (result != 0) {
        give_back(file, &answer);
        return refused(file, result);
    }
    if (file->next_bytes < LEASE_LARGEST)
        file->next_bytes *= 2;
    (void)cxl_guard_install();      /* the program may have put a handler of its own in its place */
    return 0;
}

int lease_return(cxl_direct_file *file, direct_lease *lease)
{
    uint64_t id = lease->id;
    lease_drop(file, lease);
    int result = file->returned_count == CXL_DIRECT_LEASES ? file_settle(file, 0) : 0;
    file->returned[file->returned_count++] = id;
    return result;
}
