/* copy.c - copies with ragged ends on top of the line copies of the CPU, with and without a checksum.
 *
 * Never: fences; touches a byte of the target outside the range, not even by rewriting its old value.
 *
 * Invariants
 * - Every line of the target is either stored past the cache as a whole, or stored and written back.
 * - A checksum is of what was stored, whoever changes the source meanwhile: each byte of the source is loaded once, or
 *   the target, which nobody else stores into, is summed.
 */
#include <string.h>

#include "persist/persist.h"

/* Shorter copies go through the cache: whole-line stores past it pay from a few lines on. */
enum { LINES_FROM = 256 };

static void copy_piece(uint8_t *target, const uint8_t *source, size_t length, bool write_back)
{
    if (length == 0)
        return;
    memcpy(target, source, length);
    if (write_back)
        cxl_table.write_back(target, length);
}

static size_t head_length(const void *target)
{
    return -(uintptr_t)target & (CXL_LINE - 1);
}

void cxl_copy_out(void *target, const void *source, size_t length, bool write_back)
{
    uint8_t *to = target;
    const uint8_t *from = source;
    if (length >= LINES_FROM) {
        size_t head = head_length(to);
        copy_piece(to, from, head, write_back);
        size_t body = (length - head) / CXL_LINE * CXL_LINE;
        cxl_table.copy_lines(to + head, from + head, body / CXL_LINE);
        to += head + body;
        from += head + body;
        length -= head + body;
    }
    copy_piece(to, from, length, write_back);
}

static uint32_t copy_piece_crc(uint32_t crc, uint8_t *target, const uint8_t *source, size_t length,
                               bool write_back)
{
    if (length == 0)
        return crc;
    memcpy(target, source, length);
    crc = cxl_table.crc32c(crc, target, length);
    if (write_back)
        cxl_table.write_back(target, length);
    return crc;
}

/* Where no routine does both at once: store a block, sum it and write it back while it is in L1. */
static uint32_t copy_blocks_crc(uint32_t crc, uint8_t *target, const uint8_t *source, size_t length)
{
    while (length > 0) {
        size_t block = length < CXL_COPY_BLOCK ? length : CXL_COPY_BLOCK;
        crc = copy_piece_crc(crc, target, source, block, true);
        target += block;
        source += block;
        length -= block;
    }
    return crc;
}

uint32_t cxl_copy_out_crc(uint32_t crc, void *target, const void *source, size_t length, bool write_back)
{
    uint8_t *to = target;
    const uint8_t *from = source;
    if (length >= LINES_FROM) {
        size_t head = head_length(to);
        crc = copy_piece_crc(crc, to, from, head, write_back);
        size_t body = (length - head) / CXL_LINE * CXL_LINE;
        if (cxl_table.copy_lines_crc != NULL)
            crc = cxl_table.copy_lines_crc(crc, to + head, from + head, body / CXL_LINE);
        else
            crc = copy_blocks_crc(crc, to + head, from + head, body);
        to += head + body;
        from += head + body;
        length -= head + body;
    }
    return copy_piece_crc(crc, to, from, length, write_back);
}

/* memcpy that asks for the source two blocks ahead: blocks this short, with the sum between them, keep the
 * prefetcher of the CPU from finding a stream (with the checksum 19 GB/s from memory, without asking 9). */
static void copy_in_block(uint8_t *target, const uint8_t *source, size_t length)
{
    size_t done = 0;
    for (; length - done >= CXL_LINE; done += CXL_LINE) {
        __builtin_prefetch(source + done + (size_t)2 * CXL_COPY_BLOCK);
        memcpy(target + done, source + done, CXL_LINE);
    }
    memcpy(target + done, source + done, length - done);
}

uint32_t cxl_copy_in_crc(uint32_t crc, void *target, const void *source, size_t length)
{
    uint8_t *to = target;
    const uint8_t *from = source;
    while (length > 0) {
        size_t block = length < CXL_COPY_BLOCK ? length : CXL_COPY_BLOCK;
        copy_in_block(to, from, block);
        crc = cxl_table.crc32c(crc, to, block);
        to += block;
        from += block;
        length -= block;
    }
    return crc;
}

void cxl_copy_lines_plain(void *target, const void *source, size_t count)
{
    enum { LINES = CXL_COPY_BLOCK / CXL_LINE };     /* written back while they are still in L1 */
    uint8_t *to = target;
    const uint8_t *from = source;
    while (count > 0) {
        size_t lines = count < LINES ? count : LINES;
        copy_piece(to, from, lines * CXL_LINE, true);
        to += lines * CXL_LINE;
        from += lines * CXL_LINE;
        count -= lines;
    }
}
