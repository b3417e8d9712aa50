/* crc32c_arm.c - CRC32C with the CRC32CX instruction of Arm64.
 *
 * Never: runs on a CPU that lacks the instruction (dispatch.c decides).
 */
#include "persist/persist.h"

#if defined(__aarch64__)

#include <arm_acle.h>
#include <string.h>

__attribute__((target("+crc"))) uint32_t cxl_crc32c_arm(uint32_t crc, const void *data, size_t length)
{
    const uint8_t *bytes = data;
    uint32_t state = ~crc;
    for (; length >= 8; bytes += 8, length -= 8) {
        uint64_t word;
        memcpy(&word, bytes, sizeof word);
        state = __crc32cd(state, word);
    }
    for (; length > 0; bytes++, length--)
        state = __crc32cb(state, *bytes);
    return ~state;
}

#endif
