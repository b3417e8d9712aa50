/* crc32c.c - the entry point, the table-driven CRC32C for CPUs without help, and the checksum of what
 * is known by its checksums alone.
 *
 * Never: allocates; the tables are 8 KiB, filled once.
 *
 * Polynomial 0x1EDC6F41 (Castagnoli), reflected 0x82F63B78, initial value and final XOR all ones; the
 * check value of "123456789" is 0xE3069283 (RFC 3720, appendix B.4 has more).
 *
 * A state is a polynomial over GF(2) modulo P, its highest bit the coefficient of x^0, and a byte more multiplies
 * it by x^8. Checksums are linear in data of one length: crc(A || B) = crc(A) * x^(8 |B|) + crc(B), where the
 * initial value of B meets the final XOR of A.
 */
#include <string.h>

#include "persist/persist.h"

#define POLYNOMIAL 0x82F63B78u

/* tables[k][b]: the checksum state after byte b and k zero bytes ("slicing by 8"). */
static uint32_t tables[8][256];
/* powers[k]: x to the power 8 * 2^k, by which 2^k bytes more multiply a state. */
static uint32_t powers[64];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static uint32_t multiply(uint32_t left, uint32_t right)
{
    uint32_t product = 0;
    for (int bit = 0; bit < 32; bit++) {
        product ^= right & -(left >> 31);
        left <<= 1;
        right = right >> 1 ^ (POLYNOMIAL & -(right & 1u));
    }
    return product;
}

static void fill_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t state = byte;
        for (int bit = 0; bit < 8; bit++)
            state = state >> 1 ^ (POLYNOMIAL & -(state & 1u));
        tables[0][byte] = state;
    }
    for (int zeros = 1; zeros < 8; zeros++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t state = tables[zeros - 1][byte];
            tables[zeros][byte] = state >> 8 ^ tables[0][state & 255];
        }
    powers[0] = 1u << 23;    /* x^8 */
    for (int power = 1; power < 64; power++)
        powers[power] = multiply(powers[power - 1], powers[power - 1]);
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

/* What a checksum becomes where length bytes more follow, but for what these add. */
static uint32_t shift(uint32_t crc, uint64_t length)
{
    pthread_once(&once, fill_tables);
    for (int power = 0; length != 0; power++, length >>= 1) {
        if (length & 1)
            crc = multiply(crc, powers[power]);
    }
    return crc;
}

uint32_t cxl_crc32c_zeros(uint32_t crc, uint64_t length)
{
    return ~shift(~crc, length);
}

uint32_t cxl_crc32c_combine(uint32_t first, uint32_t second, uint64_t second_length)
{
    return shift(first, second_length) ^ second;
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
