/* threads_direct.c - a program that stores file data by itself, the store that takes it in and takes the room back at
 * any time, and readers, in one engine, for ThreadSanitizer.
 *
 * The program's thread fills leases and appends to its slip as the client library does: it asks the store, under its
 * lock, for room alone. One thread absorbs, one closes the slip, publishes, cuts and recycles, and one reads: through
 * the content, and in place what it holds. Every byte of the file is known from its offset.
 * Usage: threads_direct SECONDS SEED; prints what is wrong and exits 1. */
#include <stdlib.h>
#include <string.h>

#include "client/direct.h"
#include "cxl_direct.h"
#include "threads.h"

enum {
    SLIP_AT = 4096, START = SLIP_AT + CXL_SLIP_BYTES, DATA_BYTES = SEGMENT_BYTES - 4096, LEASES_MAX = 3,
    PARTS = 64, FILE_MAX = 4 << 20, WRITE_MAX = 20000,
};

typedef struct {
    cxl_direct_room rooms[LEASES_MAX];
    uint64_t places[LEASES_MAX];
    uint64_t count;
    uint64_t absorbed;
    bool closed;
} slip_state;

static cxl_media *media;
static cxl_engine *direct_engine;
static cxl_map *live, *committed;
static pthread_mutex_t store_lock = PTHREAD_MUTEX_INITIALIZER;
static slip_state slip;                 /* store_lock, as are the next ones */
static uint32_t free_list[PARTS], free_count;
static uint64_t next_id;
static atomic_bool finished;
enum { WAITS_MAX = 6000, WAIT_US = 10000 };
static _Atomic uint64_t taken, closings, refusals, holds;

/* Relaxed, so that counting orders nothing between the threads under test. */
static void tally(_Atomic uint64_t *counter, uint64_t more)
{
    atomic_fetch_add_explicit(counter, more, memory_order_relaxed);
}

static uint64_t counted(_Atomic uint64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed);
}

static bool all_was_done(void)
{
    return counted(&taken) > 0 && counted(&closings) > 0 && counted(&refusals) > 0 && counted(&holds) > 0;
}

uint64_t seed;

static uint8_t byte_at(uint64_t offset)
{
    return (uint8_t)(1 + (offset * 31 + offset / 253) % 251);
}

static void fill(uint8_t *bytes, uint64_t offset, uint64_t length)
{
    for (uint64_t i = 0; i < length; i++)
        bytes[i] = byte_at(offset + i);
}

static uint64_t word(uint64_t at)
{
    uint64_t value;
    CHECK(cxl_media_load_u64(media, SLIP_AT + at, &value) == 0, "a word of the slip");
    return value;
}

static uint64_t *word_place(uint64_t at)
{
    return (uint64_t *)(void *)((uint8_t *)cxl_media_base(media) + SLIP_AT + at);
}

/* ------------------------------------------------------------------------- the store: its lock is held */

static void absorb_up_to(uint64_t last)
{
    cxl_fault fault;
    uint64_t bytes;
    uint32_t wrong;
    int64_t count = cxl_map_absorb(live, SLIP_AT, slip.absorbed, last, slip.rooms, slip.count, FILE_MAX, &bytes, &wrong,
                                   &fault);
    CHECK(fault.error == 0 && (uint64_t)count == last - slip.absorbed, "descriptor %lu of %lu: error %d, %u",
          (unsigned long)(slip.absorbed + (uint64_t)count), (unsigned long)last, fault.error, wrong);
    slip.absorbed = last;
    tally(&taken, bytes);
    CHECK(cxl_media_store_u64(media, SLIP_AT + offsetof(cxl_slip, absorbed), last) == 0, "absorbed");
}

static void absorb_all(void)
{
    if (!slip.closed)
        absorb_up_to(word(offsetof(cxl_slip, state)));
}

static void return_rooms(void)
{
    uint64_t place, length;
    for (; slip.count > 0; slip.count--)
        CHECK(cxl_engine_close_lease(direct_engine, slip.rooms[slip.count - 1].id, &place, &length) == 0, "a lease");
}

static void close_slip(void)
{
    uint64_t before;
    if (slip.closed)
        return;
    CHECK(cxl_media_or_u64(media, SLIP_AT, CXL_SLIP_CLOSED, &before) == 0, "a slip cannot be closed");
    slip.closed = true;
    absorb_up_to(before);
    while (word(offsetof(cxl_slip, copying)) != 0)
        usleep(10);
    return_rooms();
    tally(&closings, 1);
}

static void publish(void)
{
    cxl_delta *delta;
    CHECK(cxl_map_take_delta(live, &delta) == 0 && cxl_delta_apply(delta, live, committed) == 0, "a delta");
}

static void collect(void)
{
    uint64_t dead[16];
    int64_t count;
    while ((count = cxl_engine_dead_segments(direct_engine, dead, 16)) > 0)
        for (int64_t i = 0; i < count; i++)
            free_list[free_count++] = (uint32_t)dead[i];
}

static void cut(uint64_t size)
{
    close_slip();
    CHECK(cxl_map_truncate(live, size) == 0, "a file cannot be cut");
    publish();
    collect();
}

/* ----------------------------------------------------------------------------------- the program */

typedef struct {
    cxl_direct_room room;
    uint64_t place;
    uint64_t end;
    uint32_t crc;
    bool any;
} lease;

/* As the daemon answers LEASE: room, in a slip that is open. */
static bool ask_for_room(lease *out)
{
    pthread_mutex_lock(&store_lock);
    if (slip.closed) {
        __atomic_store_n(word_place(0), 0, __ATOMIC_SEQ_CST);
        slip.absorbed = 0;
        slip.closed = false;
        CHECK(cxl_media_store_u64(media, SLIP_AT + offsetof(cxl_slip, absorbed), 0) == 0, "absorbed");
    }
    collect();
    bool any = free_count > 0 && slip.count < LEASES_MAX;
    if (any) {
        uint64_t place = START + (uint64_t)free_list[--free_count] * SEGMENT_BYTES;
        CHECK(cxl_engine_lease(direct_engine, next_id, place, SEGMENT_BYTES) == 0, "no room");
        *out = (lease){.room = {next_id++, place + DATA_BYTES, DATA_BYTES}, .place = place, .any = true};
        slip.rooms[slip.count++] = out->room;
    } else {
        cut(0);
    }
    pthread_mutex_unlock(&store_lock);
    return any;
}

static void settle(void)
{
    pthread_mutex_lock(&store_lock);
    absorb_all();
    pthread_mutex_unlock(&store_lock);
}

static void store_bytes(lease *to, const uint8_t *bytes, uint64_t length)
{
    while (length > 0) {
        uint64_t index = to->end / CHUNK, before = to->end % CHUNK;
        uint64_t seeds[2] = {to->room.id, index}, piece = length < CHUNK - before ? length : CHUNK - before;
        if (before == 0)
            to->crc = cxl_crc32c(0, seeds, sizeof(seeds));
        CHECK(cxl_media_copy_crc(media, to->place + to->end, bytes, piece, &to->crc) == 0, "a copy");
        to->end += piece;
        if (to->end % CHUNK == 0)
            CHECK(cxl_media_copy(media, to->room.crc_offset + index * 4, &to->crc, 4) == 0, "a checksum");
        bytes += piece;
        length -= piece;
    }
    CHECK(cxl_media_fence(media) == 0, "a fence");
}

/* False: the slip is closed. */
static bool append(cxl_slip_descriptor d)
{
    uint64_t state = word(0);
    while (!(state & CXL_SLIP_CLOSED)) {
        if (state - word(offsetof(cxl_slip, absorbed)) >= CXL_SLIP_DESCRIPTORS) {
            settle();
            state = word(0);
            continue;
        }
        d.sequence = state;
        uint64_t at = SLIP_AT + CXL_SLIP_DESCRIPTORS_AT + state % CXL_SLIP_DESCRIPTORS * sizeof(d);
        CHECK(cxl_media_store(media, at, &d, sizeof(d)) == 0, "a descriptor");
        if (__atomic_compare_exchange_n(word_place(0), &state, state + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return true;
    }
    return false;
}

/* True: it was taken. What was refused is written again, elsewhere, by the caller. */
static bool write_piece(lease *to, uint64_t offset, uint64_t length)
{
    static uint8_t bytes[WRITE_MAX];
    fill(bytes, offset, length);
    __atomic_fetch_add(word_place(offsetof(cxl_slip, copying)), 1, __ATOMIC_SEQ_CST);
    bool open = !(word(0) & CXL_SLIP_CLOSED);
    cxl_slip_descriptor d = {
        .lease_id = to->room.id, .file_offset = offset, .extent_offset = to->end, .length_bytes = length,
    };
    if (open) {
        store_bytes(to, bytes, length);
        d.tail_crc = to->end % CHUNK == 0 ? 0 : to->crc;
    }
    __atomic_fetch_sub(word_place(offsetof(cxl_slip, copying)), 1, __ATOMIC_SEQ_CST);
    return open && append(d);
}

static void *program_main(void *unused)
{
    uint64_t rng = seed, offset = 0;
    lease to = {.any = false};
    while (!atomic_load(&finished)) {
        uint64_t length = 1 + random_below(&rng, random_below(&rng, 4) ? WRITE_MAX - 1 : 100);
        if (!to.any || length > to.room.capacity - to.end) {
            to.any = false;
            if (!ask_for_room(&to))
                usleep(20);
            continue;
        }
        if (write_piece(&to, offset, length))
            offset = (offset + length + (random_below(&rng, 8) ? 0 : 3000)) % (FILE_MAX - WRITE_MAX);
        else
            to.any = false, tally(&refusals, 1);
    }
    return unused;
}

/* ------------------------------------------------------------------------------------- the others */

static void *absorb_main(void *unused)
{
    while (!atomic_load(&finished)) {
        settle();
        usleep(50);
    }
    return unused;
}

static void *close_main(void *unused)
{
    uint64_t rng = ~seed;
    while (!atomic_load(&finished)) {
        pthread_mutex_lock(&store_lock);
        switch (random_below(&rng, 6)) {
        case 0: cut(random_below(&rng, FILE_MAX)); break;
        case 1: case 2: close_slip(); publish(); break;
        case 3: close_slip(); break;
        default: absorb_all(); break;
        }
        collect();
        pthread_mutex_unlock(&store_lock);
        usleep(500);
    }
    return unused;
}

static void check_bytes(const uint8_t *bytes, uint64_t offset, uint64_t length, const char *what)
{
    for (uint64_t i = 0; i < length; i++)
        CHECK(bytes[i] == 0 || bytes[i] == byte_at(offset + i), "%s: byte %lu is %d", what,
              (unsigned long)(offset + i), bytes[i]);
}

/* One row as a reader in another process verifies it: every chunk that it touches, then its bytes. */
static void check_row(const cxl_direct_row *row, const uint32_t *crcs)
{
    const uint8_t *base = cxl_media_base(media);
    for (uint64_t i = 0; i < row->crc_count; i++) {
        uint64_t index = row->first_chunk + i, start = index * CHUNK, ids[2] = {row->extent_id, index};
        uint64_t end = row->extent_length < start + CHUNK ? row->extent_length : start + CHUNK;
        uint32_t crc = cxl_crc32c(0, ids, sizeof(ids));
        crc = cxl_crc32c(crc, base + row->extent_media_offset + start, end - start);
        CHECK(crc == crcs[i], "chunk %lu of extent %lu is damaged", (unsigned long)index,
              (unsigned long)row->extent_id);
    }
    check_bytes(base + row->extent_media_offset + row->extent_offset, row->file_offset, row->length_bytes, "in place");
}

static void read_in_place(uint64_t *rng)
{
    static uint64_t payload[CXL_DIRECT_MAP_PAYLOAD / 8];
    cxl_held *held;
    uint32_t rows, crcs;
    cxl_span *ranges;
    uint64_t count, offset = random_below(rng, FILE_MAX);
    CHECK(cxl_map_hold(random_below(rng, 2) ? live : committed, &held) == 0, "a content cannot be held");
    usleep((useconds_t)random_below(rng, 300));
    for (int i = 0; i < 3; i++) {
        uint64_t room = 64 + 8 * random_below(rng, sizeof(payload) / 8 - 8);
        CHECK(cxl_held_rows(held, offset, true, payload, room, &rows, &crcs, &offset) == 0, "rows");
        const cxl_direct_row *row = (const void *)payload;
        const uint32_t *sums = (const void *)(row + rows);
        for (uint32_t r = 0; r < rows; sums += row[r].crc_count, r++)
            check_row(&row[r], sums);
    }
    CHECK(cxl_held_ranges(held, 0, &ranges, &count) == 0, "ranges");
    cxl_free(ranges);
    cxl_held_free(held);
    tally(&holds, 1);
}

static void *read_main(void *unused)
{
    static uint8_t bytes[WRITE_MAX];
    uint64_t rng = seed ^ UINT64_C(0x5555555555);
    cxl_fault fault;
    while (!atomic_load(&finished)) {
        uint64_t offset = random_below(&rng, FILE_MAX);
        int64_t length = cxl_map_read(live, offset, bytes, WRITE_MAX, 1, &fault);
        CHECK(length >= 0, "a read at %lu: %ld", (unsigned long)offset, (long)length);
        check_bytes(bytes, offset, (uint64_t)length, "a read");
        read_in_place(&rng);
    }
    return unused;
}

/* --------------------------------------------------------------------------------------- one round */

static void run(uint32_t granularity, double seconds)
{
    void *(*const mains[])(void *) = {program_main, absorb_main, close_main, read_main};
    pthread_t threads[4];
    cxl_engine_stats stats;
    atomic_store(&finished, false);
    slip = (slip_state){.closed = true};
    next_id = 1;
    CHECK(cxl_media_anonymous(START + (uint64_t)PARTS * SEGMENT_BYTES, granularity, &media) == 0, "media");
    CHECK(cxl_engine_new(media, START, SEGMENT_BYTES, PARTS, CHUNK, &direct_engine) == 0, "engine");
    cxl_engine_statistics(direct_engine, &stats);
    uint64_t empty = stats.memory;
    for (free_count = 0; free_count < PARTS; free_count++)
        free_list[free_count] = free_count;
    CHECK(cxl_map_new(direct_engine, 1, &live) == 0 && cxl_map_new(direct_engine, 1, &committed) == 0, "map");
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, mains[i], NULL) == 0, "no thread");
    usleep((useconds_t)(seconds * 1e6));
    for (int i = 0; i < WAITS_MAX && !all_was_done(); i++) /* a busy machine takes its time */
        usleep(WAIT_US);
    atomic_store(&finished, true);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    CHECK(all_was_done(), "nothing was done");
    close_slip();
    cxl_map_free(live);
    cxl_map_free(committed);
    cxl_engine_statistics(direct_engine, &stats);
    CHECK(stats.extents == 0 && stats.refs == 0 && stats.maps == 0 && stats.memory == empty, "something is still held");
    cxl_engine_free(direct_engine);
    cxl_media_close(media);
}

int main(int count, char **arguments)
{
    double seconds = count > 1 ? atof(arguments[1]) : 1;
    seed = count > 2 ? strtoull(arguments[2], NULL, 10) : 1;
    CHECK(cxl_dispatch_init() == 0, "dispatch");
    /* Stores that the sanitizer sees. */
    cxl_table.copy_lines = cxl_copy_lines_plain;
    cxl_table.copy_lines_crc = NULL;
    cxl_table.crc32c = cxl_crc32c_table;
    run(CXL_GRANULARITY_PAGE, seconds / 2);
    if (cxl_table.can_write_back)
        run(CXL_GRANULARITY_LINE, seconds / 2);
    fprintf(stderr, "%lu bytes absorbed, %lu times closed, %lu writes refused, %lu contents held\n",
            (unsigned long)counted(&taken), (unsigned long)counted(&closings), (unsigned long)counted(&refusals),
            (unsigned long)counted(&holds));
    return 0;
}
