/* direct_file.c - one file that a program stores into by itself: its life, and how a write finds its room.
 *
 * Never: commits anything; stores a byte (direct_copy.c does).
 *
 * Invariants
 * - A thread that waits for a lease waits for threads that are copying, and these wait for the daemon at most.
 * - What is refused is refused from some byte on: bytes that were taken are appended.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "client/direct_copy.h"

static int64_t left_to_kernel(uint64_t length)
{
    atomic_fetch_add_explicit(&client_counted()->fuse_bytes, length, memory_order_relaxed);
    return -EAGAIN;
}

int cxl_direct_open_through(int fd, const cxl_client_channel *channel, cxl_direct_file **out)
{
    struct stat status;
    cxl_client *client;
    int result = client_check_file(fd, channel, O_WRONLY, &status);
    if (result == 0)
        result = client_take(fd, channel, CLIENT_KNOWN, &client);
    if (result != 0)
        return client_refuse(result);
    cxl_direct_file *file = calloc(1, sizeof *file);
    if (file == NULL) {
        client_leave(client);
        return client_refuse(-ENOMEM);
    }
    file->fd = fd;
    file->channel = channel;
    file->client = client;
    file->next_bytes = LEASE_FIRST;
    file->expected_bytes = atomic_load(&client->last_bytes);
    pthread_mutex_init(&file->lock, NULL);
    pthread_cond_init(&file->idle, NULL);
    *out = file;
    return 0;
}

int cxl_direct_open(int fd, cxl_direct_file **out)
{
    return cxl_direct_open_through(fd, NULL, out);
}

/* An idle lease, or one that is in a moment: at best the one whose last byte is the one before offset, else one where
 * large pages of the file are such of the medium, else the first that nobody has begun. */
static bool is_rather(const direct_lease *left, const direct_lease *right, uint64_t offset)
{
    bool fits = direct_gap(&left->room, offset) <= left->room.capacity / GAP_SHARE;
    if (fits != (direct_gap(&right->room, offset) <= right->room.capacity / GAP_SHARE))
        return fits;
    return left->room.used == 0 && (right->room.used != 0 || left->number < right->number);
}

static direct_lease *idle_lease(const cxl_direct_file *file, uint64_t offset, int *count)
{
    direct_lease *found = NULL;
    *count = 0;
    for (int i = 0; i < LEASES_AT_ONCE; i++) {
        direct_lease *lease = file->leases[i];
        if (lease == NULL)
            continue;
        ++*count;
        if (lease->busy && !lease->is_touching)
            continue;
        if (lease->room.used != 0 && lease->file_end == offset)
            return lease;
        if (found == NULL || is_rather(lease, found, offset))
            found = lease;
    }
    return found;
}

/* The first lease behind *number that nobody has begun. */
static const direct_lease *next_unused(const cxl_direct_file *file, uint64_t *number)
{
    const direct_lease *found = NULL;
    for (int i = 0; i < LEASES_AT_ONCE; i++) {
        const direct_lease *lease = file->leases[i];
        if (lease != NULL && lease->room.used == 0 && (!lease->busy || lease->is_touching) && lease->number > *number &&
            (found == NULL || lease->number < found->number))
            found = lease;
    }
    if (found != NULL)
        *number = found->number;
    return found;
}

/* Once too little is left for what may be written while the daemon is asked for more. */
static void look_ahead(cxl_direct_file *file, const direct_lease *lease, const placement *place, uint64_t offset)
{
    uint64_t enough = file->given_bytes / 2 < AHEAD_FROM ? file->given_bytes / 2 : AHEAD_FROM;
    direct_lease filled = *lease;
    filled.room.used = place->extent_offset + place->length;
    filled.file_end = offset + place->length;
    uint64_t left = filled.room.capacity - filled.room.used, number = lease->number, end = filled.file_end;
    if (!file->ahead.is_permitted || file->ahead.is_off || file->asking)
        return;
    for (int i = 0; i < LEASES_AT_ONCE && left < enough; i++)
        if (file->leases[i] != NULL && file->leases[i]->room.used == 0 && file->leases[i] != lease)
            left += file->leases[i]->room.capacity;
    if (left >= enough)
        return;
    /* Where the file is when all of that is filled, one behind the other. */
    for (const direct_lease *next = &filled; next != NULL; next = next_unused(file, &number))
        end += direct_place(&next->room, end, INT64_MAX - end).length;
    /* What is asked for in vain is waited for when the file is closed. */
    if (filled.file_end <= file->expected_bytes && file->expected_bytes <= end)
        return;
    uint64_t most = LEASE_LARGEST - left;
    ahead_ask(file, file->next_bytes < most ? file->next_bytes : most, end);
}

/* A lease with room for the beginning of a piece at least, which is laid out. */
static int find_room(cxl_direct_file *file, uint64_t length, uint64_t offset, direct_lease **out, placement *place)
{
    for (;;) {
        int count, result;
        direct_lease *lease = idle_lease(file, offset, &count);
        if (lease == NULL ? count == LEASES_AT_ONCE : lease->is_touching) {
            pthread_cond_wait(&file->idle, &file->lock);
            continue;
        }
        if (lease == NULL) {
            result = lease_ask(file, length, offset);
            if (result != 0)
                return result;
            continue;
        }
        *place = direct_place(&lease->room, offset, length);
        if (place->length > 0) {
            look_ahead(file, lease, place, offset);
            *out = lease;
            return 0;
        }
        if (lease->room.used == 0 && !lease->is_ahead)   /* too small for anything */
            atomic_store(&file->refused_for, UINT64_MAX);
        result = lease_return(file, lease);
        if (result != 0)
            return result;
        if (atomic_load(&file->refused_for) != 0)
            return -EAGAIN;
    }
}

static bool is_worth_it(cxl_direct_file *file, uint64_t length)
{
    uint64_t refused = atomic_load(&file->refused_for);
    if (refused == UINT64_MAX)
        return false;
    if (refused > 0) {
        atomic_store(&file->refused_for, refused > length ? refused - length : 0);
        return false;
    }
    uint64_t offered = atomic_load_explicit(&file->offered, memory_order_relaxed);
    if (offered >= DIRECT_FROM)
        return true;
    return atomic_fetch_add(&file->offered, length) + length >= DIRECT_FROM;
}

/* What the file was opened with is over, and nothing else takes its place: a file that has not asked for room yet goes
 * by what another thread may have just found out, that another daemon's mount has got the number of one before. */
static bool is_over(cxl_direct_file *file)
{
    if (!atomic_load(&file->client->ended))
        return false;
    if (client_is_inherited(file->client))
        return true;                /* its lock may be held for ever */
    pthread_mutex_lock(&file->lock);
    bool over = file->is_checked;
    pthread_mutex_unlock(&file->lock);
    return over;
}

int64_t cxl_direct_pwrite(cxl_direct_file *file, const void *bytes, uint64_t length, uint64_t offset)
{
    uint64_t done = 0;
    int result = 0;
    if (length == 0)
        return 0;
    if (offset > INT64_MAX || length > INT64_MAX - offset)
        return -EFBIG;
    if (is_over(file) || !is_worth_it(file, length))
        return left_to_kernel(length);
    pthread_mutex_lock(&file->lock);
    while (done < length && result == 0) {
        direct_lease *lease;
        placement place;
        result = find_room(file, length - done, offset + done, &lease, &place);
        if (result != 0)
            break;
        lease->busy = true;
        pthread_mutex_unlock(&file->lock);
        result = direct_copy(file, lease, &place, (const uint8_t *)bytes + done, offset + done);
        pthread_mutex_lock(&file->lock);
        if (result == 0)
            done += place.length;
        else if (result == -EAGAIN)
            slip_is_closed(file, lease->slip);
        lease_not_busy(file, lease);
    }
    pthread_mutex_unlock(&file->lock);
    atomic_fetch_add_explicit(&client_counted()->direct_bytes, done, memory_order_relaxed);
    if (done > 0)
        return (int64_t)done;
    return result == -EAGAIN ? left_to_kernel(length) : result;
}

/* Some calls are answered from the size that the kernel has last heard of (copy_file_range, a mapping), and nothing
 * else tells it of bytes that went past it. By number: a library that stands before libc has an fstat of its own. The
 * daemon takes in what was appended before it answers. */
static int tell_kernel_the_size(const cxl_direct_file *file)
{
    struct stat status;
    if (file->channel != NULL)
        return file->channel->look(file->channel->context, file->fd);
    return syscall(SYS_fstat, file->fd, &status) == 0 ? 0 : -errno;
}

int cxl_direct_settle(cxl_direct_file *file)
{
    if (atomic_load(&file->client->ended))
        return 0;
    pthread_mutex_lock(&file->lock);
    int result = file->has_asked ? file_settle(file, 0) : 0;
    if (file->has_asked && result == 0)
        (void)tell_kernel_the_size(file);
    atomic_store(&file->refused_for, 0);
    file->ahead.is_off = false;
    pthread_mutex_unlock(&file->lock);
    return result;
}

static void end_file(cxl_direct_file *file)
{
    client_leave(file->client);
    for (int i = 0; i < 2; i++)
        if (file->clients_before[i] != NULL)
            client_leave(file->clients_before[i]);
    free(file);
}

void cxl_direct_permit_ahead(cxl_direct_file *file)
{
    file->ahead.is_permitted = true;
}

/* The end, without a word to anybody: in a forked child that of what it inherited. */
static void abandon(cxl_direct_file *file)
{
    if (!client_is_inherited(file->client))
        ahead_forget(file);
    for (int i = 0; i < LEASES_AT_ONCE; i++)
        free(file->leases[i]);
    for (uint32_t i = 0; i < file->finished_count; i++)
        free(file->finished[i]);
    free(file->slip);
    end_file(file);
}

int cxl_direct_close(cxl_direct_file *file)
{
    int result = 0;
    if (client_is_inherited(file->client)) {
        abandon(file);
        return 0;
    }
    ahead_forget(file);
    if (file->has_asked) {
        slip_end(file);
        leases_drop_all(file);
        result = tell_kernel_the_size(file);    /* one request settles, gives all room back, and tells the size */
    }
    if (file->stored_end > 0)
        atomic_store(&file->client->last_bytes, file->stored_end);
    pthread_mutex_destroy(&file->lock);
    pthread_cond_destroy(&file->idle);
    end_file(file);
    return result;
}
