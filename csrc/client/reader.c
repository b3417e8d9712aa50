/* reader.c - a file whose bytes are copied out of the medium, in place of read(2), as long as nobody may change it.
 *
 * The daemon keeps a byte beyond the medium locked as long as the file is what it was and its bytes stay (direct.h,
 * CXL_DIRECT_WATCH). It unlocks it before anybody is told that he may write, and before any of the bytes goes; the
 * kernel does when the daemon dies, and before another daemon can take the medium over.
 *
 * Never: locks anything; stores to the medium, of which it has a mapping to be read; asks the daemon in between.
 *
 * Invariants
 * - The lock is seen after the last byte was copied. It is not taken anew by any daemon, so that it was there from the
 *   beginning on, and what was copied is the content of the file during all of the copy. Else it is not used.
 * - Bytes are compared with their checksum as they were copied, or, where a chunk is not copied as a whole, before:
 *   each chunk once.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/mapped.h"

struct cxl_reader {
    cxl_mapped at;               /* where it lies; nothing of it is mapped on its own */
    uint64_t watch;
};

/* ---------------------------------------------------------------------------------------- life */

static int build(cxl_reader *reader)
{
    int result = client_need_view(reader->at.client);
    if (result != 0)
        return result;
    reader->at.media = reader->at.client->view;
    result = mapped_ask(&reader->at, CXL_DIRECT_WATCH, &reader->watch);
    if (result == 0 && (reader->watch < reader->at.client->identity.media_bytes || reader->watch > INT64_MAX - 1))
        result = -ENOTTY;
    return result;
}

int cxl_reader_open_through(int fd, const cxl_client_channel *channel, cxl_reader **out)
{
    struct stat status;
    int result = client_check_file(fd, channel, O_RDONLY, &status);
    if (result == 0 && (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY)
        result = -EINVAL;
    if (result != 0)
        return client_refuse(result);
    cxl_reader *reader = calloc(1, sizeof *reader);
    if (reader == NULL)
        return client_refuse(-ENOMEM);
    reader->at.fd = fd;
    reader->at.channel = channel;
    reader->at.process = getpid();
    result = client_take(fd, channel, CLIENT_SERVED, &reader->at.client);
    if (result == 0)
        result = build(reader);
    if (result != 0) {
        cxl_reader_close(reader, fd);
        return client_refuse(result);
    }
    *out = reader;
    return 0;
}

int cxl_reader_open(int fd, cxl_reader **out)
{
    return cxl_reader_open_through(fd, NULL, out);
}

void cxl_reader_close(cxl_reader *reader, int fd)
{
    cxl_direct_unmap request = {0};
    if (reader->at.is_held && fd >= 0 && reader->at.process == getpid())
        (void)client_request(reader->at.channel, fd, CXL_DIRECT_UNMAP, &request);
    if (reader->at.client != NULL)
        client_leave(reader->at.client);
    free(reader->at.rows);
    free(reader->at.sums);
    free((void *)reader->at.verified);
    free(reader);
}

uint64_t cxl_reader_size(const cxl_reader *reader)
{
    return reader->at.size;
}

bool cxl_reader_holds(const cxl_reader *reader)
{
    return client_sees(reader->at.client, reader->watch);
}

/* ------------------------------------------------------------------------------------- copying */

/* length bytes from offset of the medium on, to where *to is, which moves on; *crc, where it is not NULL, goes on over
 * them. */
static int copy_part(const cxl_reader *reader, uint8_t **to, uint64_t offset, uint64_t length, uint32_t *crc)
{
    int result = crc != NULL ? cxl_media_read_crc(reader->at.media, offset, *to, length, crc, NULL)
                             : cxl_media_read(reader->at.media, offset, *to, length, NULL);
    *to += length;
    return result;
}

static bool is_verified(const cxl_reader *reader, uint64_t which)
{
    return atomic_load_explicit(&reader->at.verified[which], memory_order_relaxed) != 0;
}

/* Bytes [start, end) of the file, which a row has. */
static int copy_row(cxl_reader *reader, const mapped_row *row, uint8_t **to, uint64_t start, uint64_t end)
{
    uint64_t chunk = reader->at.client->identity.chunk_bytes, media = row->is.extent_media_offset;
    uint64_t from = start - row->is.file_offset + row->is.extent_offset;      /* of the extent */
    uint64_t until = end - start + from;
    while (from < until) {
        uint64_t index = from / chunk, which = row->sums + index - row->is.first_chunk;
        uint64_t first = index * chunk, last = first + chunk;
        if (last > row->is.extent_length)
            last = row->is.extent_length;
        if (is_verified(reader, which)) {       /* and all that follow it and are, too */
            for (uint64_t next = last; next < until && is_verified(reader, ++which); next += chunk)
                last = next + chunk;
            last = last < until ? last : until;
            int result = copy_part(reader, to, media + from, last - from, NULL);
            if (result != 0)
                return result;
        } else if (first == from && last <= until) {
            uint32_t crc = client_chunk_seed(row->is.extent_id, index);
            int result = copy_part(reader, to, media + from, last - from, &crc);
            if (result != 0 || crc != reader->at.sums[which])
                return -EIO;
            atomic_store_explicit(&reader->at.verified[which], 1, memory_order_relaxed);
        } else {
            uint64_t shift = row->is.extent_offset - row->is.file_offset;
            last = last < until ? last : until;
            int result = mapped_verify_row(&reader->at, row, from - shift, last - shift, NULL, NULL);
            if (result == 0)
                result = copy_part(reader, to, media + from, last - from, NULL);
            if (result != 0)
                return result;
        }
        from = last;
    }
    return 0;
}

static int copy_all(cxl_reader *reader, uint8_t **to, uint64_t start, uint64_t end)
{
    int result = 0;
    for (uint64_t i = mapped_find(&reader->at, start); start < end && result == 0; i++) {
        bool is_last = i >= reader->at.row_count || reader->at.rows[i].is.file_offset >= end;
        uint64_t from = is_last ? end : reader->at.rows[i].is.file_offset;
        if (from > start) {
            memset(*to, 0, from - start);
            *to += from - start;
            start = from;
        }
        if (is_last || result != 0)
            break;
        const mapped_row *row = &reader->at.rows[i];
        uint64_t row_end = row->is.file_offset + row->is.length_bytes;
        row_end = row_end < end ? row_end : end;
        result = copy_row(reader, row, to, start, row_end);
        start = row_end;
    }
    return result;
}

int cxl_reader_copy(cxl_reader *reader, void *bytes, uint64_t length, uint64_t offset)
{
    uint8_t *to = bytes;
    if (offset > reader->at.size || length > reader->at.size - offset)
        return -ERANGE;
    if (!cxl_reader_holds(reader))
        return -ESTALE;
    int result = copy_all(reader, &to, offset, offset + length);
    atomic_thread_fence(memory_order_acquire);      /* no byte is loaded after the lock was seen */
    if (!cxl_reader_holds(reader))
        return -ESTALE;
    if (result != 0)
        return -EAGAIN;
    atomic_fetch_add_explicit(&client_counted()->read_bytes, length, memory_order_relaxed);
    return 0;
}
