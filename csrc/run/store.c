/* store.c - copies bytes of one call into leased space with their checksums, and appends them to the file's ring.
 *
 * All of it touches memory of the program and of the medium, either of which may fault: it runs guarded, and what it
 * has done when a fault comes counts for nothing, since nothing was appended, or the caller writes it again.
 *
 * Invariants
 * - As of client/direct_copy.c: this thread is counted in the slip from before it looks at the state until it stores
 *   nothing more; a descriptor is appended after its bytes and their checksums are durable, or seen by everybody.
 * - Each byte of the program's memory is loaded once (persist/copy.c).
 */
#include <sys/resource.h>

#include "run/run.h"

enum { ZEROS = 4096 };
static const uint8_t zeros[ZEROS];

typedef struct {
    run_file *file;
    const run_bytes *from;
    uint64_t at;                 /* in them */
    uint64_t length, offset;
    uint64_t stored;
    bool is_counted;
} storing;

static cxl_slip *slip_of(const run_file *file)
{
    return (cxl_slip *)(void *)file->slip;
}

/* ----------------------------------------------------------------------------------- storing */

/* At the end of what a room has. */
static void fill(const run_file *file, run_room *room, const uint8_t *bytes, uint64_t length)
{
    bool lines = file->granularity == CXL_GRANULARITY_LINE;
    while (length > 0) {
        uint64_t at = room->room.used, inside = at % file->chunk_bytes, piece = file->chunk_bytes - inside;
        piece = piece < length ? piece : length;
        if (inside == 0)
            room->crc = client_chunk_seed(room->id, at / file->chunk_bytes);
        room->crc = cxl_copy_out_crc(room->crc, room->data + at, bytes, piece, lines);
        room->room.used += piece;
        length -= piece;
        bytes += piece;
        if (room->room.used % file->chunk_bytes != 0)
            continue;
        uint32_t *sum = &room->sums[at / file->chunk_bytes];
        *sum = room->crc;
        if (lines)
            cxl_table.write_back(sum, sizeof *sum);
    }
}

/* Bytes [at, at + length) of the pieces. */
static void fill_pieces(const run_file *file, run_room *room, const run_bytes *from, uint64_t at, uint64_t length)
{
    for (int i = 0; i < from->count && length > 0; i++) {
        uint64_t here = from->pieces[i].iov_len;
        if (at >= here) {
            at -= here;
            continue;
        }
        uint64_t part = here - at < length ? here - at : length;
        fill(file, room, (const uint8_t *)from->pieces[i].iov_base + at, part);
        length -= part;
        at = 0;
    }
}

/* False: the daemon wants no more. */
static bool append(run_file *file, const run_room *room, const placement *place, uint64_t file_offset)
{
    cxl_slip *slip = slip_of(file);
    uint64_t expected = file->appended;
    cxl_slip_descriptor *at =
        (cxl_slip_descriptor *)(void *)(file->slip + CXL_SLIP_DESCRIPTORS_AT) + expected % CXL_SLIP_DESCRIPTORS;
    *at = (cxl_slip_descriptor){
        .sequence = expected,
        .lease_id = room->id,
        .file_offset = file_offset,
        .extent_offset = place->extent_offset,
        .length_bytes = place->length,
        .tail_crc = room->room.used % file->chunk_bytes != 0 ? room->crc : 0,
    };
    if (!__atomic_compare_exchange_n(&slip->state, &expected, expected + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        return false;
    file->appended++;
    return true;
}

/* One piece into one room. False: it is not in the ring. */
static bool store_one(storing *job, run_room *room, const placement *place)
{
    run_file *file = job->file;
    run_room filled = *room;
    while (filled.room.used < place->extent_offset) {
        uint64_t gap = place->extent_offset - filled.room.used;
        fill(file, &filled, zeros, gap < ZEROS ? gap : ZEROS);
    }
    fill_pieces(file, &filled, job->from, job->at + job->stored, place->length);
    cxl_table.fence();
    if (!append(file, &filled, place, job->offset + job->stored))
        return false;
    *room = filled;
    job->stored += place->length;
    return true;
}

static bool store_body(void *argument)
{
    storing *job = argument;
    run_file *file = job->file;
    cxl_slip *slip = slip_of(file);
    __atomic_fetch_add(&slip->copying, 1, __ATOMIC_SEQ_CST);
    job->is_counted = true;
    if (__atomic_load_n(&slip->state, __ATOMIC_SEQ_CST) != file->appended)
        return false;
    for (; job->stored < job->length && file->room < file->rooms_count; file->room++) {
        run_room *room = &file->rooms[file->room];
        placement place;
        while ((place = direct_place(&room->room, job->offset + job->stored, job->length - job->stored)).length > 0) {
            if (!store_one(job, room, &place))
                return false;
            if (job->stored == job->length)
                return true;
        }
    }
    return true;
}

static bool uncount_body(void *argument)
{
    const storing *job = argument;
    __atomic_fetch_sub(&slip_of(job->file)->copying, 1, __ATOMIC_SEQ_CST);
    return true;
}

bool run_store(run_file *file, const run_bytes *from, uint64_t at, uint64_t length, uint64_t offset, uint64_t *stored)
{
    storing job = {.file = file, .from = from, .at = at, .length = length, .offset = offset};
    bool result = run_guarded(store_body, &job);
    if (job.is_counted)
        result = run_guarded(uncount_body, &job) && result;
    *stored = job.stored;
    return result;
}

/* -------------------------------------------------------------------------------------- ring */

static bool is_taken_body(void *argument)
{
    const run_file *file = argument;
    return __atomic_load_n(&slip_of(file)->absorbed, __ATOMIC_SEQ_CST) == file->appended;
}

bool run_is_taken(run_file *file)
{
    return run_guarded(is_taken_body, file);
}

static bool close_body(void *argument)
{
    const run_file *file = argument;
    __atomic_fetch_or(&slip_of(file)->state, CXL_SLIP_CLOSED, __ATOMIC_SEQ_CST);
    return true;
}

void run_close_slip(run_file *file)
{
    (void)run_guarded(close_body, file);
}

/* ------------------------------------------------------------------------------------- pages */

static bool touch_body(void *argument)
{
    const volatile uint8_t *page = argument;
    (void)page[0];
    (void)page[LARGE_PAGE - 1];
    return true;
}

static long faults_so_far(void)
{
    struct rusage used;
    return syscall(SYS_getrusage, RUSAGE_THREAD, &used) == 0 ? used.ru_minflt : 0;
}

/* Two looks far apart in one large page are one fault, or none. */
bool run_may_use(const run_file *file)
{
    const run_map *map = &file->maps[1];
    if (run_takes_any_pages)
        return true;
    if (map->length < LARGE_PAGE)
        return false;
    long before = faults_so_far();
    return run_guarded(touch_body, map->base) && faults_so_far() - before < 2;
}
