/* mapped_rows.c - where the bytes of a mapped file lie, as the daemon says, and whether they are what was written.
 *
 * Never: maps anything; believes a row that leaves the file or the medium.
 *
 * Invariants
 * - A checksum is of the whole chunk of its extent, also where the file has a part of it only.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/mapped.h"

enum { ROWS_MAX = 1 << 20 };         /* some 80 MiB of them: the daemon says thousands */

static int grow(void **list, uint64_t *capacity, uint64_t count, uint64_t more, size_t item)
{
    if (count + more <= *capacity)
        return 0;
    uint64_t wanted = *capacity * 2 > count + more ? *capacity * 2 : count + more;
    void *grown = realloc(*list, wanted * item);
    if (grown == NULL)
        return -ENOMEM;
    *list = grown;
    *capacity = wanted;
    return 0;
}

static bool makes_sense(const cxl_mapped *mapped, const cxl_direct_row *row, uint64_t file_from)
{
    uint64_t media = mapped->client->identity.media_bytes, chunk = mapped->client->identity.chunk_bytes;
    if (row->length_bytes == 0 || row->file_offset < file_from || row->file_offset > mapped->size ||
        row->length_bytes > mapped->size - row->file_offset)
        return false;
    if (row->extent_media_offset > media || row->extent_length > media - row->extent_media_offset)
        return false;
    if (row->extent_offset > row->extent_length || row->length_bytes > row->extent_length - row->extent_offset)
        return false;
    uint64_t first = row->extent_offset / chunk, last = (row->extent_offset + row->length_bytes - 1) / chunk;
    uint64_t count = atomic_load(&mapped->is_verified) ? 0 : last - first + 1;
    return row->first_chunk == first && row->crc_count == count;
}

static int take_part(cxl_mapped *mapped, const cxl_direct_map *answer, uint64_t *file_from)
{
    uint64_t rows = answer->row_count, sums = answer->crc_count;
    if (rows > CXL_DIRECT_MAP_PAYLOAD / sizeof(cxl_direct_row) || sums > CXL_DIRECT_MAP_PAYLOAD / sizeof(uint32_t) ||
        rows * sizeof(cxl_direct_row) + sums * sizeof(uint32_t) > CXL_DIRECT_MAP_PAYLOAD)
        return -EPROTO;
    if (grow((void **)&mapped->rows, &mapped->row_capacity, mapped->row_count, rows, sizeof(mapped_row)) != 0 ||
        grow((void **)&mapped->sums, &mapped->sum_capacity, mapped->sum_count, sums, sizeof(uint32_t)) != 0)
        return -ENOMEM;
    uint64_t used = 0;
    for (uint64_t i = 0; i < rows; i++) {
        mapped_row row = {.sums = mapped->sum_count + used};
        memcpy(&row.is, answer->payload + i * sizeof row.is, sizeof row.is);
        if (!makes_sense(mapped, &row.is, *file_from) || row.is.crc_count > sums - used)
            return -EPROTO;
        used += row.is.crc_count;
        *file_from = row.is.file_offset + row.is.length_bytes;
        mapped->rows[mapped->row_count++] = row;
    }
    if (sums > 0)
        memcpy(mapped->sums + mapped->sum_count, answer->payload + rows * sizeof(cxl_direct_row),
               sums * sizeof(uint32_t));
    mapped->sum_count += sums;
    return 0;
}

int mapped_ask(cxl_mapped *mapped, uint64_t flags, uint64_t *watch)
{
    uint64_t offset = 0, file_from = 0;
    int result;
    cxl_direct_map *answer = malloc(sizeof *answer);
    if (answer == NULL)
        return -ENOMEM;
    do {
        memset(answer, 0, offsetof(cxl_direct_map, payload));
        answer->offset = offset;
        answer->flags = flags;
        result = client_request(mapped->channel, mapped->fd, CXL_DIRECT_MAP, answer);
        if (result != 0)
            break;
        mapped->is_held = true;
        bool is_verified = (flags & answer->flags & CXL_DIRECT_VERIFIED) != 0;
        if (offset == 0) {
            mapped->size = answer->size_bytes;
            mapped->is_shared = (flags & CXL_DIRECT_VERIFIED) != 0 && (answer->flags & CXL_DIRECT_SHARED) != 0;
            atomic_store(&mapped->is_verified, is_verified);
            *watch = answer->watch;
        }
        if (is_verified != atomic_load(&mapped->is_verified) || answer->watch != *watch ||
            answer->size_bytes != mapped->size || answer->size_bytes > PTRDIFF_MAX / 2 ||
            answer->next_offset > mapped->size || (answer->next_offset <= offset && mapped->size != 0) ||
            (answer->next_offset < mapped->size && answer->row_count == 0) || mapped->row_count > ROWS_MAX) {
            result = -EPROTO;
            break;
        }
        offset = answer->next_offset;
        result = take_part(mapped, answer, &file_from);
    } while (result == 0 && offset < mapped->size);
    free(answer);
    if (result == 0) {
        mapped->verified = calloc(mapped->sum_count + 1, 1);
        result = mapped->verified != NULL ? 0 : -ENOMEM;
    }
    return result;
}

uint64_t mapped_find(const cxl_mapped *mapped, uint64_t offset)
{
    uint64_t low = 0, high = mapped->row_count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        const cxl_direct_row *row = &mapped->rows[middle].is;
        if (row->file_offset + row->length_bytes > offset)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* ------------------------------------------------------------------------------ verifying */

typedef struct {
    const uint8_t *bytes;
    uint64_t length;
    uint32_t crc;
} summing;

static void sum_body(void *argument)
{
    summing *job = argument;
    job->crc = cxl_crc32c(job->crc, job->bytes, job->length);
}

/* Summed where the program will look at it, which needs the pages mapped once, or else on the medium. */
static int sum_chunk(const cxl_mapped *mapped, const mapped_row *row, uint64_t start, uint64_t length, uint32_t *crc)
{
    bool is_of_file = start + row->is.file_offset >= row->is.extent_offset;
    uint64_t file = start + row->is.file_offset - row->is.extent_offset;
    if (is_of_file && file >= row->stitched_start && file < row->stitched_end && length <= row->stitched_end - file) {
        summing job = {mapped->base + file, length, *crc};
        int result = cxl_guarded(mapped->base, mapped->size, sum_body, &job, NULL);
        *crc = job.crc;
        return result;
    }
    return cxl_media_crc(mapped->media, row->is.extent_media_offset + start, length, crc, NULL);
}

int mapped_verify_row(cxl_mapped *mapped, const mapped_row *row, uint64_t start, uint64_t end, uint64_t *bad_offset,
                      uint64_t *bad_length)
{
    uint64_t chunk = mapped->client->identity.chunk_bytes, row_end = row->is.file_offset + row->is.length_bytes;
    start = start > row->is.file_offset ? start : row->is.file_offset;
    end = end < row_end ? end : row_end;
    if (start >= end || atomic_load(&mapped->is_verified))
        return 0;
    uint64_t shift = row->is.extent_offset - row->is.file_offset;           /* of an extent from a file offset */
    for (uint64_t index = (start + shift) / chunk; index <= (end - 1 + shift) / chunk; index++) {
        uint64_t which = row->sums + index - row->is.first_chunk, from = index * chunk;
        uint64_t to = from + chunk < row->is.extent_length ? from + chunk : row->is.extent_length;
        if (atomic_load_explicit(&mapped->verified[which], memory_order_relaxed) != 0)
            continue;
        uint32_t crc = client_chunk_seed(row->is.extent_id, index);
        int result = sum_chunk(mapped, row, from, to - from, &crc);
        if (result == 0 && crc == mapped->sums[which]) {
            atomic_store_explicit(&mapped->verified[which], 1, memory_order_relaxed);
            atomic_fetch_add_explicit(&client_counted()->verified_bytes, to - from, memory_order_relaxed);
            continue;
        }
        from = from > row->is.extent_offset ? from : row->is.extent_offset;
        to = to - shift < row_end ? to - shift : row_end;
        if (bad_offset != NULL)
            *bad_offset = from - shift;
        if (bad_length != NULL)
            *bad_length = to - (from - shift);
        return -EIO;
    }
    return 0;
}
