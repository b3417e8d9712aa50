/* client.c - the client library against a daemon that is a function of this program: its medium is a file in memory,
 * room is handed out front to back, and what was stored is absorbed by the real engine.
 *
 * Usage: client SEED; prints what is wrong and exits 1. */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/direct_copy.h"
#include "client/mapped.h"
#include "cxl_direct.h"

enum { SEGMENT = 4 << 20, SEGMENTS = 96, CHUNK = 16384, ROOMS = 64, FILE_MAX = 64 << 20 };

static int failures;

#define CHECK(condition, ...) ((condition) ? (void)0 : failed(__LINE__, __VA_ARGS__))

__attribute__((format(printf, 2, 3))) static void failed(int line, const char *format, ...)
{
    va_list arguments;
    if (failures++ > 20)
        return;
    va_start(arguments, format);
    printf("line %d: ", line);
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
    fflush(stdout);
}

static uint64_t random_state;

static uint64_t random_below(uint64_t count)
{
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (random_state >> 33) % count;
}

/* ------------------------------------------------------------------------------------ the daemon */

typedef struct {
    pthread_mutex_t lock;
    int medium_fd;
    cxl_media *media;
    cxl_engine *engine;
    cxl_map *map;
    cxl_held *held;
    cxl_direct_room rooms[ROOMS];
    uint64_t places[ROOMS], lengths[ROOMS], room_count;
    uint64_t next_segment, next_id, slip_at, absorbed;
    uint64_t watch, slip_watch, next_watch;
    uint64_t lease_bytes;        /* at most */
    bool one_at_a_time;          /* a request gets one lease, whatever it asks */
    int refuse;                  /* what LEASE answers */
    bool closes;                 /* the slip, as soon as room was given */
    int gone;                    /* what everything answers */
    uint64_t leases, settles, attaches, looks, requests;
    bool is_verified;            /* what MAP says of any content */
    uint64_t piece_bytes;        /* of what is verified together; 0: it is not */
    uint64_t others_take;        /* bytes behind each piece that others compare */
    uint64_t next_piece, pieces_given, pieces_done, forgets_after, wrong_at;
    int pauses;                  /* answers without a piece */
    bool leads_nowhere;          /* whatever is asked for, the answer is as good as none */
    cxl_client_channel channel;
} daemon_state;

static bool is_locked(const daemon_state *d, uint64_t start, uint64_t length)
{
    for (uint64_t at = start; at < start + length;) {
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)at,
                             .l_len = (off_t)(start + length - at)};
        if (fcntl(d->medium_fd, F_OFD_GETLK, &lock) != 0)
            abort();
        if (lock.l_type == F_UNLCK || (uint64_t)lock.l_start > at)
            return false;
        at = (uint64_t)(lock.l_start + lock.l_len);
    }
    return true;
}

static bool any_lock(const daemon_state *d)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = (off_t)SEGMENT * SEGMENTS};
    if (fcntl(d->medium_fd, F_OFD_GETLK, &lock) != 0)
        abort();
    return lock.l_type != F_UNLCK;
}

static void set_watch(const daemon_state *d, uint64_t watch, short type)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)watch, .l_len = 1};
    if (fcntl(d->medium_fd, F_OFD_SETLK, &lock) != 0)
        abort();
}

static uint64_t begin_watch(daemon_state *d)
{
    uint64_t watch = (UINT64_C(1) << 61) + d->next_watch++;
    set_watch(d, watch, F_RDLCK);
    return watch;
}

static void absorb_until(daemon_state *d, uint64_t last)
{
    cxl_fault fault;
    uint64_t bytes;
    uint32_t wrong;
    int64_t count = cxl_map_absorb(d->map, d->slip_at, d->absorbed, last, d->rooms, d->room_count, FILE_MAX, &bytes,
                                   &wrong, &fault);
    CHECK((uint64_t)count == last - d->absorbed, "absorbed %ld of %lu: error %d, wrong %u", (long)count,
          (unsigned long)(last - d->absorbed), fault.error, wrong);
    d->absorbed = last;
    cxl_media_store_u64(d->media, d->slip_at + offsetof(cxl_slip, absorbed), last);
}

static void close_slip(daemon_state *d)
{
    uint64_t before, place, length;
    if (d->slip_at == 0)
        return;
    CHECK(cxl_media_or_u64(d->media, d->slip_at, CXL_SLIP_CLOSED, &before) == 0, "the slip cannot be closed");
    absorb_until(d, before & ~CXL_SLIP_CLOSED);
    for (uint64_t i = 0; i < d->room_count; i++)
        CHECK(cxl_engine_close_lease(d->engine, d->rooms[i].id, &place, &length) == 0, "a lease cannot be closed");
    set_watch(d, d->slip_watch, F_UNLCK);
    d->room_count = 0;
    d->slip_at = 0;
}

static void absorb(daemon_state *d)
{
    uint64_t state;
    if (d->slip_at == 0 || cxl_media_load_u64(d->media, d->slip_at, &state) != 0)
        return;
    if ((state & CXL_SLIP_CLOSED) != 0)     /* by the program */
        close_slip(d);
    else
        absorb_until(d, state);
}

static void take_back(daemon_state *d, const uint64_t lease_ids[CXL_DIRECT_LEASES])
{
    uint64_t place, length;
    for (int j = 0; j < CXL_DIRECT_LEASES; j++) {
        for (uint64_t i = 0; i < d->room_count; i++) {
            if (d->rooms[i].id != lease_ids[j])
                continue;
            CHECK(!is_locked(d, d->places[i], d->lengths[i]), "a lease was returned that is locked");
            CHECK(cxl_engine_close_lease(d->engine, d->rooms[i].id, &place, &length) == 0, "a lease cannot be closed");
            d->room_count--;
            d->rooms[i] = d->rooms[d->room_count];
            d->places[i] = d->places[d->room_count];
            d->lengths[i] = d->lengths[d->room_count];
            break;
        }
    }
}

static void give_room(daemon_state *d, cxl_direct_room_given *room)
{
    uint64_t at = d->next_segment++ * SEGMENT, skew = random_below(64) * 64;
    if (d->slip_at == 0) {
        d->slip_at = at;
        d->slip_watch = begin_watch(d);
        d->absorbed = 0;
        static const uint8_t nothing[CXL_SLIP_DESCRIPTORS_AT];
        cxl_media_store(d->media, at, nothing, sizeof nothing);
    }
    uint64_t place = at + CXL_SLIP_BYTES + skew, length = SEGMENT - CXL_SLIP_BYTES - 4096;
    if (length > d->lease_bytes)
        length = d->lease_bytes;
    uint64_t id = d->next_id++, sums = (length / CHUNK + 1) * 4 / 64 * 64 + 64;
    CHECK(cxl_engine_lease(d->engine, id, place, length) == 0, "no lease");
    d->rooms[d->room_count] = (cxl_direct_room){id, place + length - sums, length - sums};
    d->places[d->room_count] = place;
    d->lengths[d->room_count++] = length;
    room->lease_id = id;
    room->media_offset = place;
    room->capacity_bytes = length - sums;
    room->crc_offset = place + length - sums;
    room->length_bytes = length;
    d->leases++;
}

static int serve_lease(daemon_state *d, cxl_direct_lease *request)
{
    if (d->refuse != 0)
        return d->refuse;
    CHECK(request->count >= 1 && request->count <= CXL_DIRECT_LEASES, "%u leases at once", request->count);
    absorb(d);
    take_back(d, request->returned_lease_ids);
    if (d->room_count == ROOMS)
        return -EBUSY;
    if (d->next_segment >= SEGMENTS)
        return -ENOSPC;
    /* Writes through the kernel need the other half. */
    bool several = d->next_segment < SEGMENTS / 2 && !d->one_at_a_time;
    uint64_t given = 0, bytes = 0, count_max = several ? 1 + random_below(request->count) : 1;
    while (given < count_max && (given == 0 || bytes < request->wanted_bytes) && d->room_count < ROOMS &&
           d->next_segment < SEGMENTS) {
        give_room(d, &request->rooms[given]);
        bytes += request->rooms[given++].length_bytes;
    }
    request->count = (uint32_t)given;
    request->slip_offset = d->slip_at;
    request->watch = d->slip_watch;
    request->slip_bytes = CXL_SLIP_BYTES;
    if (d->closes)
        close_slip(d);
    return 0;
}

static int serve_confirm(daemon_state *d)
{
    cxl_span *spans;
    uint64_t count;
    bool locked = d->held != NULL && cxl_held_ranges(d->held, CXL_DIRECT_LOCK_GAP, &spans, &count) == 0;
    for (uint64_t i = 0; locked && i < count; i++)
        locked = is_locked(d, spans[i].media_offset, spans[i].length);
    cxl_free(spans);
    return locked ? 0 : -EINVAL;
}

static int serve_settle(daemon_state *d, cxl_direct_settled *request)
{
    d->settles++;
    absorb(d);
    take_back(d, request->returned_lease_ids);
    request->absorbed = d->absorbed;
    request->size_bytes = cxl_map_size(d->map);
    if ((request->flags & CXL_DIRECT_DONE) != 0)
        close_slip(d);
    return 0;
}

static int serve_map(daemon_state *d, cxl_direct_map *request)
{
    if (request->offset == 0) {
        absorb(d);
        cxl_held_free(d->held);
        CHECK(cxl_map_hold(d->map, &d->held) == 0, "nothing can be held");
    }
    request->size_bytes = cxl_held_size(d->held);
    bool accepts = (request->flags & CXL_DIRECT_VERIFIED) != 0, is_verified = accepts && d->is_verified;
    request->flags = is_verified ? CXL_DIRECT_VERIFIED : 0;
    if (accepts && d->piece_bytes != 0)
        request->flags |= CXL_DIRECT_SHARED;
    return cxl_held_rows(d->held, request->offset, !is_verified, request->payload, CXL_DIRECT_MAP_PAYLOAD,
                         &request->row_count, &request->crc_count, &request->next_offset);
}

#include "client_verified.h"

static int serve_attach(daemon_state *d, cxl_direct_attach *request)
{
    struct stat medium;
    if (fstat(d->medium_fd, &medium) != 0)
        abort();
    d->attaches++;
    request->version = CXL_DIRECT_VERSION;
    request->watch = d->watch;
    request->granularity = cxl_media_granularity(d->media);
    request->media_bytes = cxl_media_size(d->media);
    request->device = medium.st_dev;
    request->inode = medium.st_ino;
    request->special_device = medium.st_rdev;
    request->chunk_bytes = CHUNK;
    snprintf((char *)request->path, sizeof request->path, "/proc/self/fd/%d", d->medium_fd);
    return 0;
}

#include "client_nowhere.h"

static int serve(void *context, int fd, unsigned long number, void *argument)
{
    daemon_state *d = context;
    int result = -ENOTTY;
    (void)fd;
    pthread_mutex_lock(&d->lock);
    d->requests++;
    if (d->gone != 0)
        result = d->gone;
    else if (number == CXL_DIRECT_ATTACH)
        result = serve_attach(d, argument);
    else if (number == CXL_DIRECT_LEASE)
        result = serve_lease(d, argument);
    else if (number == CXL_DIRECT_CONFIRM)
        result = serve_confirm(d);
    else if (number == CXL_DIRECT_SETTLE)
        result = serve_settle(d, argument);
    else if (number == CXL_DIRECT_MAP)
        result = serve_map(d, argument);
    else if (number == CXL_DIRECT_VERIFY)
        result = serve_verify(d, argument);
    else if (number == CXL_DIRECT_UNMAP) {
        cxl_held_free(d->held);
        d->held = NULL;
        result = 0;
    }
    if (d->leads_nowhere && result == 0)
        lead_nowhere(number, argument);
    pthread_mutex_unlock(&d->lock);
    return result;
}

/* As attributes are asked for. */
static int look(void *context, int fd)
{
    daemon_state *d = context;
    (void)fd;
    pthread_mutex_lock(&d->lock);
    d->looks++;
    if (d->gone == 0)
        absorb(d);
    int result = d->gone;
    pthread_mutex_unlock(&d->lock);
    return result;
}

static daemon_state *begin(uint32_t granularity)
{
    char path[64];
    daemon_state *d = calloc(1, sizeof *d);
    int fd = memfd_create("medium", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)SEGMENT * SEGMENTS) != 0)
        abort();
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    d->medium_fd = open(path, O_RDWR | O_CLOEXEC);
    pthread_mutex_init(&d->lock, NULL);
    CHECK(cxl_media_map(fd, (uint64_t)SEGMENT * SEGMENTS, 1, 0, granularity, &d->media) == 0, "no medium");
    CHECK(cxl_engine_new(d->media, 0, SEGMENT, SEGMENTS, CHUNK, &d->engine) == 0, "no engine");
    CHECK(cxl_map_new(d->engine, 1, &d->map) == 0, "no map");
    close(fd);
    d->next_id = 1;
    d->next_segment = 1;
    d->lease_bytes = SEGMENT;
    d->watch = begin_watch(d);
    d->channel = (cxl_client_channel){.request = serve, .look = look, .context = d};
    return d;
}

static void end(daemon_state *d)
{
    cxl_client_forget();
    CHECK(!any_lock(d), "locks are left");
    cxl_client_counts counts;
    cxl_client_statistics(&counts);
    CHECK(counts.media == 0, "%u media are mapped", counts.media);
    cxl_held_free(d->held);
    cxl_map_free(d->map);
    cxl_engine_free(d->engine);
    cxl_media_close(d->media);
    close(d->medium_fd);
    free(d);
}

/* By the kernel's way. */
static void write_through_kernel(daemon_state *d, const uint8_t *bytes, uint64_t length, uint64_t offset)
{
    cxl_fault fault;
    uint64_t needed, place, left;
    pthread_mutex_lock(&d->lock);
    absorb(d);
    while (length > 0) {
        int64_t taken = cxl_map_write(d->map, offset, bytes, length, &needed, &fault);
        if (taken == -EAGAIN) {
            cxl_map_close_lease(d->map, &place, &left);
            cxl_map_close_lease(d->map, &place, &left);
            CHECK(cxl_engine_lease(d->engine, d->next_id, d->next_segment++ * SEGMENT, SEGMENT) == 0, "no room");
            CHECK(cxl_map_attach_lease(d->map, d->next_id++) == 0, "no lease");
            continue;
        }
        CHECK(taken > 0, "a write: %ld", (long)taken);
        if (taken <= 0)
            break;
        bytes += taken;
        offset += (uint64_t)taken;
        length -= (uint64_t)taken;
    }
    pthread_mutex_unlock(&d->lock);
}

static uint64_t write_somehow(daemon_state *d, cxl_direct_file *file, const uint8_t *bytes, uint64_t length,
                              uint64_t offset)
{
    uint64_t direct = 0;
    for (uint64_t done = 0; done < length;) {
        int64_t taken = cxl_direct_pwrite(file, bytes + done, length - done, offset + done);
        CHECK(taken > 0 || taken == -EAGAIN, "cxl_direct_pwrite: %ld", (long)taken);
        if (taken <= 0) {
            write_through_kernel(d, bytes + done, length - done, offset + done);
            break;
        }
        done += (uint64_t)taken;
        direct += (uint64_t)taken;
    }
    return direct;
}

static void check_content(daemon_state *d, const uint8_t *expected, uint64_t size, const char *when)
{
    cxl_fault fault;
    uint8_t *found = malloc(size + 1);
    CHECK(cxl_map_size(d->map) == size, "%s: size %lu, not %lu", when, (unsigned long)cxl_map_size(d->map),
          (unsigned long)size);
    int64_t got = cxl_map_read(d->map, 0, found, size, 1, &fault);
    CHECK(got == (int64_t)size, "%s: read %ld of %lu", when, (long)got, (unsigned long)size);
    for (uint64_t i = 0; got == (int64_t)size && i < size; i++) {
        if (found[i] != expected[i]) {
            CHECK(false, "%s: byte %lu is %u, not %u", when, (unsigned long)i, found[i], expected[i]);
            break;
        }
    }
    free(found);
}

static int new_file(void)
{
    int fd = memfd_create("file", MFD_CLOEXEC);
    if (fd < 0)
        abort();
    return fd;
}

static void fill(uint8_t *bytes, uint64_t length)
{
    uint64_t value = random_below(UINT32_MAX) << 1 | 1;
    for (uint64_t i = 0; i < length; i++) {
        value = value * UINT64_C(6364136223846793005) + 1;
        bytes[i] = (uint8_t)(value >> 56);
    }
}

static uint8_t *filled(uint64_t length)
{
    uint8_t *bytes = malloc(length);
    if (bytes == NULL)
        abort();
    fill(bytes, length);
    return bytes;
}

static cxl_direct_file *opened(daemon_state *d, int fd)
{
    cxl_direct_file *file = NULL;
    CHECK(cxl_direct_open_through(fd, &d->channel, &file) == 0, "no file");
    return file;
}

#include "client_more.h"
#include "client_ahead.h"
#include "client_verified_tests.h"
#include "client_nowhere_tests.h"

int main(int count, char **arguments)
{
    random_state = count > 1 ? strtoull(arguments[1], NULL, 10) : 1;
    test_random_writes(CXL_GRANULARITY_PAGE);
    test_random_writes(CXL_GRANULARITY_LINE);
    test_many_small();
    test_threads(false);
    test_threads(true);
    test_mapped(0);
    test_mapped(1 << 20);
    test_mapped_rest();
    test_verified_by_others();
    test_answers_that_lead_nowhere();
    test_fork();
    test_number_again();
    test_requests();
    test_watches();
    test_ahead(false);
    test_ahead(true);
    test_ahead_and_fork();
    test_errors();      /* last: ThreadSanitizer takes what follows a fault for its handler */
    return failures != 0;
}
