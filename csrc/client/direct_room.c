/* direct_room.c - room of one file: asked for, locked, and given back.
 *
 * Never: stores file data; keeps room locked that the daemon has taken back and this process has noticed.
 *
 * Invariants
 * - What the daemon answers is checked against the medium before it is used.
 * - The order is: the daemon gives room, it is locked, the watch is found; and back: nothing is stored there any more,
 *   it is unlocked, the daemon is told. The daemon ends the watch before it looks for locks, and the kernel does before
 *   another daemon can look: who finds it after he has locked is seen by whoever looks.
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
    const client_range range = {slip->offset, slip->offset + slip->length};
    client_ranges_drop(file->client, &range, 1);
    free(slip);
}

static int slip_new(cxl_direct_file *file, uint64_t offset, uint64_t length, uint64_t watch)
{
    direct_slip *slip = calloc(1, sizeof *slip);
    if (slip == NULL)
        return -ENOMEM;
    slip->offset = offset;
    slip->length = length;
    slip->watch = watch;
    slip->users = 1;
    const client_range range = {offset, offset + length};
    int result = client_ranges_add(file->client, &range, 1);
    if (result != 0) {
        free(slip);
        return result;
    }
    file->slip = slip;
    return 0;
}

/* All that is locked so far is this slip's, and stays apart. -ESTALE: it is not, or may not be. */
static int slip_check(const cxl_direct_file *file)
{
    uint64_t state = 0;
    if (!client_sees(file->client, file->slip->watch))
        return -ESTALE;
    int result = slip_state(file->client, file->slip, &state);
    return result == 0 && state != file->slip->appended ? -EAGAIN : result;
}

static client_range range_of(const direct_lease *lease)
{
    return (client_range){lease->room.media_offset, lease->room.media_offset + lease->length};
}

/* Out of the leases of the file; busy ones are not. */
static void leases_unlock(cxl_client *client, direct_lease **leases, uint32_t count)
{
    client_range ranges[RANGES_AT_ONCE] = {{0, 0}};
    for (uint32_t i = 0; i < count; i++)
        ranges[i] = range_of(leases[i]);
    client_ranges_drop(client, ranges, count);
}

static void leases_free(cxl_direct_file *file, direct_lease **leases, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        slip_leave(file, leases[i]->slip);
        free(leases[i]);
    }
}

static void leases_end(cxl_direct_file *file, direct_lease **leases, uint32_t count)
{
    leases_unlock(file->client, leases, count);
    leases_free(file, leases, count);
}

static void finished_end(cxl_direct_file *file)
{
    leases_end(file, file->finished, file->finished_count);
    file->finished_count = 0;
}

static void take_out(cxl_direct_file *file, const direct_lease *lease)
{
    for (int i = 0; i < LEASES_AT_ONCE; i++)
        if (file->leases[i] == lease)
            file->leases[i] = NULL;
    pthread_cond_broadcast(&file->idle);
}

/* Those of a slip, or all, that are not busy. */
static void leases_drop(cxl_direct_file *file, const direct_slip *slip)
{
    direct_lease *dropped[LEASES_AT_ONCE];
    uint32_t count = 0;
    for (int i = 0; i < LEASES_AT_ONCE; i++) {
        direct_lease *lease = file->leases[i];
        if (lease == NULL || lease->busy || (slip != NULL && lease->slip != slip))
            continue;
        file->leases[i] = NULL;
        dropped[count++] = lease;
    }
    finished_end(file);     /* whose room may be given back by now */
    leases_end(file, dropped, count);
    pthread_cond_broadcast(&file->idle);
}

void slip_is_closed(cxl_direct_file *file, direct_slip *slip)
{
    bool is_current = file->slip == slip;   /* else it may be gone with its leases */
    slip->closed = true;
    leases_drop(file, slip);
    if (is_current) {
        file->slip = NULL;
        slip_leave(file, slip);
    }
}

void lease_not_busy(cxl_direct_file *file, direct_lease *lease)
{
    lease->busy = false;
    if (lease->slip->closed) {
        take_out(file, lease);
        leases_end(file, &lease, 1);
    } else {
        pthread_cond_broadcast(&file->idle);
    }
}

void leases_drop_all(cxl_direct_file *file)
{
    leases_drop(file, NULL);
    if (file->slip != NULL)
        slip_is_closed(file, file->slip);
}

void slip_end(cxl_direct_file *file)
{
    uint64_t before;
    if (file->slip != NULL)     /* where the medium fails the daemon closes it */
        (void)cxl_media_or_u64(file->client->media, file->slip->offset + offsetof(cxl_slip, state), CXL_SLIP_CLOSED,
                               &before);
}

/* What the next request returns: how many of it are to be unlocked before. */
static uint32_t tell_returned(cxl_direct_file *file, uint64_t lease_ids[CXL_DIRECT_LEASES],
                              direct_lease *ended[CXL_DIRECT_LEASES])
{
    uint32_t count = file->returned_count, ended_count = file->finished_count;
    memcpy(lease_ids, file->returned, count * sizeof *lease_ids);
    memcpy(ended, file->finished, ended_count * sizeof *ended);
    for (uint32_t i = 0; i < ended_count; i++)
        lease_ids[count + i] = ended[i]->id;
    file->returned_count = file->finished_count = 0;
    return ended_count;
}

int file_settle(cxl_direct_file *file, uint32_t flags)
{
    cxl_direct_settled request = {.flags = flags};
    direct_lease *ended[CXL_DIRECT_LEASES];
    leases_end(file, ended, tell_returned(file, request.returned_lease_ids, ended));
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

static direct_lease *lease_new(cxl_direct_file *file, const cxl_direct_room_given *room)
{
    direct_lease *lease = calloc(1, sizeof *lease);
    if (lease == NULL)
        return NULL;
    lease->slip = file->slip;
    lease->id = room->lease_id;
    lease->number = ++file->numbers;
    lease->room.media_offset = room->media_offset;
    lease->length = room->length_bytes;
    lease->room.capacity = room->capacity_bytes;
    lease->crc_offset = room->crc_offset;
    file->given_bytes += room->capacity_bytes;
    lease->slip->users++;
    return lease;
}

/* Put what was given, all locked, where there are places for it, and unlock the rest. -ENOMEM: all of it. wanted: as
 * long as there is a slip. */
static int place_all(cxl_direct_file *file, const cxl_direct_lease *answer, bool wanted)
{
    client_range left[CXL_DIRECT_LEASES] = {{0, 0}};
    uint32_t taken = 0, count = 0;
    file->given_bytes = 0;
    for (int i = 0; wanted && i < LEASES_AT_ONCE && taken < answer->count; i++) {
        if (file->leases[i] != NULL)
            continue;
        file->leases[i] = lease_new(file, &answer->rooms[taken]);
        if (file->leases[i] == NULL)
            break;
        file->leases[i]->is_ahead = (answer->flags & CXL_DIRECT_AHEAD) != 0;
        taken++;
    }
    for (uint32_t i = taken; i < answer->count; i++) {
        const cxl_direct_room_given *room = &answer->rooms[i];
        left[count++] = (client_range){room->media_offset, room->media_offset + room->length_bytes};
    }
    client_ranges_drop(file->client, left, count);
    for (uint32_t i = taken; i < answer->count; i++) {
        if (file->returned_count + file->finished_count == CXL_DIRECT_LEASES)
            (void)file_settle(file, 0);
        file->returned[file->returned_count++] = answer->rooms[i].lease_id;
    }
    atomic_fetch_add(&client_counted()->leases, taken);
    return taken > 0 ? 0 : -ENOMEM;
}

static int lock_given(cxl_client *client, const cxl_direct_lease *answer)
{
    client_range ranges[CXL_DIRECT_LEASES] = {{0, 0}};
    for (uint32_t i = 0; i < answer->count; i++) {
        const cxl_direct_room_given *room = &answer->rooms[i];
        ranges[i] = (client_range){room->media_offset, room->media_offset + room->length_bytes};
    }
    return client_ranges_add(client, ranges, answer->count);
}

/* What was given, and is locked, with its slip, is this file's; see that it stays. */
static int take(cxl_direct_file *file, const cxl_direct_lease *answer)
{
    int result = 0;
    if (file->slip != NULL && (file->slip->offset != answer->slip_offset || file->slip->watch != answer->watch))
        slip_is_closed(file, file->slip);
    if (file->slip == NULL)
        result = slip_new(file, answer->slip_offset, answer->slip_bytes, answer->watch);
    int placed = place_all(file, answer, result == 0);
    if (result == 0)
        result = placed;
    if (result != 0)
        return result;
    result = slip_check(file);
    if (result != 0)
        slip_is_closed(file, file->slip);
    return result;
}

/* Whether room is to be asked for again soon; what the writer is told. */
static int refused(cxl_direct_file *file, int result)
{
    client_refuse(result);
    switch (-result) {
    case ENOSPC:
    case EAGAIN:
    case ESTALE:
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
    int result = client_take(file->fd, file->channel, file->distrusts ? CLIENT_ASKED : CLIENT_SERVED, &client);
    if (result != 0)
        return result;
    file->clients_before[file->distrusts] = file->client;
    file->client = client;
    file->is_checked = true;
    return 0;
}

/* Nothing of it is used. */
static void give_back(cxl_direct_file *file, const cxl_direct_lease *answer)
{
    if (file->returned_count + file->finished_count > 0)
        (void)file_settle(file, 0);
    for (uint32_t i = 0; i < CXL_DIRECT_LEASES && i < answer->count; i++)
        file->returned[file->returned_count++] = answer->rooms[i].lease_id;
    (void)file_settle(file, 0);
}

static int ask_once(cxl_direct_file *file, uint64_t wanted, uint64_t file_offset, uint32_t places, uint32_t flags)
{
    int result = check_medium(file);
    if (result != 0)
        return result;
    cxl_direct_lease answer = {
        .wanted_bytes = wanted, .file_offset = file_offset, .count = places, .flags = flags,
        .watch = file->slip != NULL ? file->slip->watch : 0,
    };
    direct_lease *ended[CXL_DIRECT_LEASES];
    uint32_t ended_count = tell_returned(file, answer.returned_lease_ids, ended);
    cxl_client *client = file->client;
    pthread_mutex_unlock(&file->lock);
    leases_unlock(client, ended, ended_count);
    result = client_request(file->channel, file->fd, CXL_DIRECT_LEASE, &answer);
    bool is_given = result == 0;
    answer.flags = flags;       /* not what it says of them */
    if (is_given)
        result = direct_answer_makes_sense(&client->identity, &answer, places) ? lock_given(client, &answer) : -ENOTTY;
    pthread_mutex_lock(&file->lock);
    leases_free(file, ended, ended_count);
    if (result == 0)
        result = take(file, &answer);
    if (result != 0 && is_given)
        give_back(file, &answer);
    return result;
}

static int ask(cxl_direct_file *file, uint64_t wanted, uint64_t file_offset, uint32_t flags)
{
    uint32_t places = 0;
    for (int i = 0; i < LEASES_AT_ONCE && places < CXL_DIRECT_LEASES; i++)
        places += file->leases[i] == NULL;
    if (places == 0)
        return -EAGAIN;
    file->asking = true;
    wanted = wanted < LEASE_LARGEST ? wanted : LEASE_LARGEST;
    int result = ask_once(file, wanted, file_offset, places, flags);
    if (result == -ESTALE && !file->has_asked && !file->distrusts) {    /* of this medium, nobody has heard of it */
        file->distrusts = true;
        file->is_checked = false;
        result = ask_once(file, wanted, file_offset, places, flags);
    }
    file->asking = false;
    pthread_cond_broadcast(&file->idle);
    file->has_asked = file->has_asked || result == 0 || result == -ESTALE;
    if (result == 0 && file->next_bytes < LEASE_LARGEST)
        file->next_bytes *= 2;
    return result;
}

int lease_ask(cxl_direct_file *file, uint64_t wanted, uint64_t file_offset)
{
    if (file->asking) {
        pthread_cond_wait(&file->idle, &file->lock);
        return 0;
    }
    int result = ask(file, wanted > file->next_bytes ? wanted : file->next_bytes, file_offset, 0);
    if (result != 0)
        return refused(file, result);
    (void)cxl_guard_install();      /* the program may have put a handler of its own in its place */
    return 0;
}

void lease_ask_ahead(cxl_direct_file *file, uint64_t wanted, uint64_t file_offset)
{
    if (!file->asking && file->slip != NULL && ask(file, wanted, file_offset, CXL_DIRECT_AHEAD) != 0)
        file->ahead.is_off = true;  /* whoever needs it asks, and hears why */
}

static direct_lease *next_untouched(const cxl_direct_file *file)
{
    direct_lease *found = NULL;
    for (int i = 0; i < LEASES_AT_ONCE; i++) {
        direct_lease *lease = file->leases[i];
        if (lease != NULL && !lease->is_touched && !lease->busy && lease->room.used == 0 &&
            (found == NULL || lease->number < found->number))
            found = lease;
    }
    return found;
}

void leases_touch(cxl_direct_file *file)
{
    bool goes_on = true;
    direct_lease *lease;
    while (goes_on && !atomic_load(&file->ahead.is_over) && (lease = next_untouched(file)) != NULL) {
        cxl_client *client = file->client;
        lease->is_touched = lease->is_touching = lease->busy = true;
        pthread_mutex_unlock(&file->lock);
        goes_on = client_touch_large(client, range_of(lease));
        pthread_mutex_lock(&file->lock);
        lease->is_touching = false;
        lease_not_busy(file, lease);
    }
}

int lease_return(cxl_direct_file *file, direct_lease *lease)
{
    take_out(file, lease);
    int result = 0;
    if (file->returned_count + file->finished_count == CXL_DIRECT_LEASES)
        result = file_settle(file, 0);
    file->finished[file->finished_count++] = lease;
    return result;
}
