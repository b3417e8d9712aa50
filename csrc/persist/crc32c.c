/* crc32c.c - the entry point, and the table-driven CRC32C for CPUs without help.
 *
 * Never: allocates; the table is 8 KiB, filled once.
 *
 * Polynomial 0x1EDC6F41 (Castagnoli), reflected 0x82F63B78, initial value and final XOR all ones; the
 * check value of "123456789" is 0xE3069283 (RFC 3720, appendix B.4 has more).
 */
#include <string.h>

#include "persist/persist.h"

/* tables[k][b]: the checksum state after byte b and k zero bytes ("slicing by 8"). */
static uint32_t tables[8][256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void fill_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t state = byte;
        for (int bit = 0; bit < 8; bit++)
            state = state >> 1 ^ (0x82F63B78u & -(state & 1u));
        tables[0][byte] = state;
    }
    for (int zeros = 1; zeros < 8; zeros++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t state = tables[zeros - 1][byte];
            tables[zeros][byte] = state >> 8 ^ tables[0][state & 255];
        }
}

uint32_t cxl_crc32c_table(uint32_t crc, const void *data, size_t length)
{
    const uint8_t *bytes = data;
    uint32_t state = ~crc;
    pthread_once(&once, fill_tables);
    for (; length >= 8; bytes += 8, length -= 8) {
        uint64_t word;
        memcpy(&word, bytes, sizeof word);
        word ^= state;
        state = 0;
        for (int index = 0; index < 8; index++)
            state ^= tables[7 - index][word >> 8 * index & 255];
    }
    for (; length > 0; bytes++, length--)
        state = state >> 8 ^ tables[0][(state ^ *bytes) & 255];
    return ~state;
}

uint32_t cxl_crc32c(uint32_t crc, const void *data, size_t length)
{
    return cxl_table.crc32c(crc, data, length);
}

void cxl_crc32c_each(uint32_t crc, const void *base, const uint64_t *offset, const uint64_t *length, uint64_t count,
                     uint32_t *out)
{
    for (uint64_t i = 0; i < count; i++)
        out[i] = cxl_crc32c(crc, (const uint8_t *)base + offset[i], length[i]);
}
