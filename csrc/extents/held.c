/* held.c - where the bytes of a file lie, as of one moment, for whoever reads them in place; they stay there.
 *
 * Never: keeps a map from changing, or a byte from being published, moved or cut: only its extent lives on.
 *
 * Invariants
 * - What is told of an extent is its length and its checksums when the content was held. The checksum of a chunk that
 *   was not full changes as the extent grows: it is kept here.
 * - Memory is taken for each reference, none for each chunk.
 * - What is held is not worth moving (gather.c): its segment would not become free.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/direct.h"
#include "extents/extents.h"

typedef struct {
    reference ref;
    uint64_t extent_length;
    uint32_t tail;            /* checksum of the last chunk, if that is not whole */
} held_row;

struct cxl_held {
    cxl_engine *engine;
    cxl_held *previous;       /* held_lock */
    cxl_held *next;
    uint64_t size;
    uint64_t count;
    held_row rows[];
};

static size_t held_bytes(uint64_t count)
{
    return offsetof(cxl_held, rows) + count * sizeof(held_row);
}

/* -------------------------------------------------------------------------------------- life */

static void fill_row(cxl_engine *engine, const reference *ref, held_row *row)
{
    extent *x = ref->extent;
    row->ref = *ref;
    extent_hold(x);
    atomic_fetch_add_explicit(&x->readers, 1, memory_order_relaxed);
    pthread_mutex_lock(stripe_of(engine, x));
    row->extent_length = x->length;
    row->tail = x->crcs[chunks_of(engine, x->length) - 1];
    pthread_mutex_unlock(stripe_of(engine, x));
}

static void link_held(cxl_held *held)
{
    cxl_engine *engine = held->engine;
    pthread_mutex_lock(&engine->held_lock);
    held->previous = NULL;
    held->next = engine->held;
    if (held->next != NULL)
        held->next->previous = held;
    engine->held = held;
    pthread_mutex_unlock(&engine->held_lock);
}

static void unlink_held(cxl_held *held)
{
    cxl_engine *engine = held->engine;
    pthread_mutex_lock(&engine->held_lock);
    if (held->next != NULL)
        held->next->previous = held->previous;
    if (held->previous != NULL)
        held->previous->next = held->next;
    else
        engine->held = held->next;
    pthread_mutex_unlock(&engine->held_lock);
}

int cxl_map_hold(cxl_map *map, cxl_held **out)
{
    cxl_engine *engine = map->engine;
    const reference *ref;
    pthread_rwlock_rdlock(&map->lock);
    uint64_t count = map->content.refs, filled = 0;
    cxl_held *held = engine_allocate(engine, held_bytes(count));
    if (held != NULL) {
        held->engine = engine;
        held->size = map->size;
        held->count = count;
        for (tree_position at = {0, 0}; (ref = tree_at(&map->content, at)) != NULL; at = tree_next(&map->content, at))
            fill_row(engine, ref, &held->rows[filled++]);
    }
    pthread_rwlock_unlock(&map->lock);
    if (held == NULL)
        return -ENOMEM;
    link_held(held);
    *out = held;
    return 0;
}

void cxl_held_free(cxl_held *held)
{
    if (held == NULL)
        return;
    cxl_engine *engine = held->engine;
    unlink_held(held);
    for (uint64_t i = 0; i < held->count; i++) {
        extent *x = held->rows[i].ref.extent;
        atomic_fetch_sub_explicit(&x->readers, 1, memory_order_relaxed);
        extent_drop(engine, x);
    }
    engine_release(engine, held, held_bytes(held->count));
}

void helds_free(cxl_engine *engine)
{
    while (engine->held != NULL) {
        cxl_held *held = engine->held;
        engine->held = held->next;
        engine_release(engine, held, held_bytes(held->count));
    }
}

uint64_t cxl_held_size(const cxl_held *held)
{
    return held->size;
}

/* -------------------------------------------------------------------------------------- rows */

/* The first one that ends behind offset. */
static uint64_t find_row(const cxl_held *held, uint64_t offset)
{
    uint64_t first = 0, end = held->count;
    while (first < end) {
        uint64_t middle = first + (end - first) / 2;
        if (reference_end(&held->rows[middle].ref) > offset)
            end = middle;
        else
            first = middle + 1;
    }
    return first;
}

/* What a row says from offset on, in room bytes for it and its checksums, if there are to be any; false: there is not
 * enough for it. */
static bool describe(const cxl_held *held, const held_row *row, uint64_t offset, bool with_sums, uint64_t room,
                     cxl_direct_row *out)
{
    const cxl_engine *engine = held->engine;
    const reference *ref = &row->ref;
    if (room < sizeof(*out) + sizeof(uint32_t))
        return false;
    uint64_t start = larger(ref->file_offset, offset), length = reference_end(ref) - start;
    uint64_t extent_offset = ref->extent_offset + (start - ref->file_offset);
    uint64_t first = extent_offset >> engine->chunk_shift;
    uint64_t count = chunks_of(engine, extent_offset + length) - first;
    uint64_t fitting = (room - sizeof(*out)) / sizeof(uint32_t);
    if (!with_sums) {
        count = 0;
    } else if (count > fitting) {
        count = fitting;
        length = ((first + count) << engine->chunk_shift) - extent_offset;
    }
    *out = (cxl_direct_row){
        .file_offset = start, .length_bytes = length, .extent_id = ref->extent->id, .extent_offset = extent_offset,
        .extent_media_offset = ref->extent->media_offset, .extent_length = row->extent_length,
        .first_chunk = (uint32_t)first, .crc_count = (uint32_t)count,
    };
    return true;
}

/* The checksums that belong to what the row says. */
static void copy_checksums(cxl_held *held, const held_row *row, const cxl_direct_row *said, uint32_t *crcs)
{
    cxl_engine *engine = held->engine;
    uint64_t last = row->extent_length >> engine->chunk_shift;   /* the chunk that is not whole, if there is one */
    extent_checksums(engine, row->ref.extent, said->first_chunk, said->crc_count, crcs);
    if (last - said->first_chunk < said->crc_count)
        crcs[last - said->first_chunk] = row->tail;
}

int cxl_held_rows(cxl_held *held, uint64_t offset, bool with_sums, void *payload, uint64_t room, uint32_t *row_count,
                  uint32_t *crc_count, uint64_t *next_offset)
{
    uint64_t first = find_row(held, offset), used = 0, at = offset, rows = 0, crcs = 0;
    cxl_direct_row *out = payload, said;
    room = smaller(room, UINT32_MAX);
    /* How many there are: the checksums come behind all of them. */
    while (first + rows < held->count &&
           describe(held, &held->rows[first + rows], at, with_sums, room - used, &said)) {
        used += sizeof(said) + said.crc_count * sizeof(uint32_t);
        at = said.file_offset + said.length_bytes;
        rows++;
        if (at < reference_end(&held->rows[first + rows - 1].ref))
            break;
    }
    if (rows == 0 && first < held->count)
        return -EINVAL;
    uint32_t *sums = (uint32_t *)(void *)(out + rows);
    used = 0;
    at = offset;
    for (uint64_t i = 0; i < rows; i++) {
        const held_row *row = &held->rows[first + i];
        describe(held, row, at, with_sums, room - used, &out[i]);
        used += sizeof(said) + out[i].crc_count * sizeof(uint32_t);
        at = out[i].file_offset + out[i].length_bytes;
        copy_checksums(held, row, &out[i], sums + crcs);
        crcs += out[i].crc_count;
    }
    *row_count = (uint32_t)rows;
    *crc_count = (uint32_t)crcs;
    bool all = first + rows == held->count && (rows == 0 || at == reference_end(&held->rows[held->count - 1].ref));
    *next_offset = all ? held->size : at;
    return 0;
}

/* ------------------------------------------------------------------------------------ ranges */

static int compare_spans(const void *a, const void *b)
{
    const cxl_span *x = a, *y = b;
    return (x->media_offset > y->media_offset) - (x->media_offset < y->media_offset);
}

int cxl_held_ranges(const cxl_held *held, uint64_t gap, cxl_span **out, uint64_t *count)
{
    growing_list found = {.count = held->count, .size = sizeof(cxl_span)};
    cxl_span *items = cxl_allocate(larger(held->count, 1) * sizeof(*items));
    uint64_t kept = 0;
    if (items == NULL)
        return -ENOMEM;
    for (uint64_t i = 0; i < held->count; i++) {
        const reference *ref = &held->rows[i].ref;
        items[i] = (cxl_span){ref->extent->media_offset + ref->extent_offset, ref->length};
    }
    qsort(items, held->count, sizeof(*items), compare_spans);
    for (uint64_t i = 0; i < held->count; i++) {
        cxl_span *last = &items[kept == 0 ? 0 : kept - 1];
        uint64_t end = last->media_offset + last->length;
        if (kept != 0 && (items[i].media_offset <= end || items[i].media_offset - end <= gap))
            last->length = larger(end, items[i].media_offset + items[i].length) - last->media_offset;
        else
            items[kept++] = items[i];
    }
    found.items = items;
    *count = found.count = kept;
    *out = list_give(&found);
    return 0;
}

/* ---------------------------------------------------------------------------------- identity */

enum { IDENTITY_WORDS = 7 };

static uint32_t sum_of_sums(cxl_held *held, const held_row *row)
{
    uint32_t crcs[256], sum = 0;
    cxl_direct_row said = {.first_chunk = (uint32_t)(row->ref.extent_offset >> held->engine->chunk_shift)};
    uint64_t end = chunks_of(held->engine, row->ref.extent_offset + row->ref.length);
    while (said.first_chunk < end) {
        said.crc_count = (uint32_t)smaller(end - said.first_chunk, sizeof(crcs) / sizeof(*crcs));
        copy_checksums(held, row, &said, crcs);
        sum = cxl_crc32c(sum, crcs, said.crc_count * sizeof(*crcs));
        said.first_chunk += said.crc_count;
    }
    return sum;
}

int cxl_held_identity(cxl_held *held, uint64_t **out, uint64_t *count)
{
    uint64_t *words = cxl_allocate((1 + held->count * IDENTITY_WORDS) * sizeof(*words));
    if (words == NULL)
        return -ENOMEM;
    *out = words;
    *count = 1 + held->count * IDENTITY_WORDS;
    *words++ = held->size;
    for (uint64_t i = 0; i < held->count; i++, words += IDENTITY_WORDS) {
        const held_row *row = &held->rows[i];
        const extent *x = row->ref.extent;
        const uint64_t said[IDENTITY_WORDS] = {row->ref.file_offset, row->ref.length, x->id, row->ref.extent_offset,
                                               x->media_offset, row->extent_length, sum_of_sums(held, row)};
        memcpy(words, said, sizeof(said));
    }
    return 0;
}
