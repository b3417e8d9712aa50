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

int file_settle(cxl_direct_file *file, uint64_t returned_lease_id, uint32_t flags)
{
    cxl_direct_settled request = {.returned_lease_id = returned_lease_id, .flags = flags};
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
        if (i == 0 && (result = file_settle(file, 0, 0)) != 0)
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

static bool makes_sense(const cxl_client *client, const cxl_direct_lease *answer)
{
    uint64_t size = client->identity.media_bytes, chunk = client->identity.chunk_bytes;
    uint64_t start = answer->media_offset;
    if (answer->lease_id == 0 || answer->capacity_bytes == 0 || !lies_in(start, answer->length_bytes, 0, size))
        return false;
    uint64_t end = start + answer->length_bytes, chunks = (answer->capacity_bytes - 1) / chunk + 1;
    if (!lies_in(start, answer->capacity_bytes, start, end) || start % CXL_LINE != 0)
        return false;
    if (!lies_in(answer->crc_offset, chunks * sizeof(uint32_t), start + answer->capacity_bytes, end))
        return false;
    return answer->slip_bytes == CXL_SLIP_BYTES && answer->slip_offset % CXL_LINE == 0 &&
           lies_in(answer->slip_offset, CXL_SLIP_BYTES, 0, size) && answer->crc_offset % sizeof(uint32_t) == 0;
}

static void fill(direct_lease *lease, const cxl_direct_lease *answer)
{
    lease->id = answer->lease_id;
    lease->media_offset = answer->media_offset;
    lease->length = answer->length_bytes;
    lease->capacity = answer->capacity_bytes;
    lease->crc_offset = answer->crc_offset;
}

/* Lock what was given, and have it confirmed. */
static int take(cxl_direct_file *file, direct_lease *lease, uint64_t slip_offset)
{
    cxl_direct_confirm request = {.lease_id = lease->id};
    int result = 0;
    if (file->slip != NULL && file->slip->offset != slip_offset)
        slip_is_closed(file, file->slip);
    if (file->slip == NULL)
        result = slip_new(file, slip_offset);
    if (result != 0)
        return result;
    result = client_range_add(file->client, lease->media_offset, lease->length);
    if (result != 0)
        return result;
    result = client_request(file->channel, file->fd, CXL_DIRECT_CONFIRM, &request);
    if (result != 0) {
        client_range_drop(file->client, lease->media_offset, lease->length);
        return result;
    }
    lease->slip = file->slip;
    lease->slip->users++;
    return 0;
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

int lease_ask(cxl_direct_file *file, uint64_t wanted, uint64_t file_offset, direct_lease **out)
{
    int place = 0;
    while (place < LEASES_AT_ONCE && file->leases[place] != NULL)
        place++;
    if (place == LEASES_AT_ONCE)
        return -EAGAIN;
    int result = check_medium(file);
    if (result != 0)
        return refused(file, result);
    uint64_t size = wanted > file->next_bytes ? wanted : file->next_bytes;
    cxl_direct_lease answer = {
        .wanted_bytes = size < LEASE_LARGEST ? size : LEASE_LARGEST, .file_offset = file_offset,
    };
    result = client_request(file->channel, file->fd, CXL_DIRECT_LEASE, &answer);
    if (result != 0)
        return refused(file, result);
    file->has_asked = true;
    direct_lease *lease = calloc(1, sizeof *lease);
    result = lease == NULL ? -ENOMEM : !makes_sense(file->client, &answer) ? -ENOTTY : 0;
    if (result == 0) {
        fill(lease, &answer);
        result = take(file, lease, answer.slip_offset);
    }
    if (result != 0) {
        free(lease);
        (void)file_settle(file, answer.lease_id, 0);
        return refused(file, result);
    }
    if (file->next_bytes < LEASE_LARGEST)
        file->next_bytes *= 2;
    (void)cxl_guard_install();      /* the program may have put a handler of its own in its place */
    atomic_fetch_add(&client_counted()->leases, 1);
    file->leases[place] = *out = lease;
    return 0;
}

int lease_return(cxl_direct_file *file, direct_lease *lease)
{
    uint64_t id = lease->id;
    lease_drop(file, lease);
    return file_settle(file, id, 0);
}
