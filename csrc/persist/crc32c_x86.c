/* crc32c_x86.c - CRC32C with the CRC32 instruction in three streams, by carry-less folding of 256 bytes
 * at a time, and by both at once; each alone or while the same bytes are stored past the cache.
 *
 * Never: runs on a CPU that lacks the instructions (dispatch.c decides).
 *
 * Method: Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel
 * 2009. With P the CRC32C polynomial, and registers holding bit-reflected polynomials,
 *   fold by D bits    low half times x^(D+63) mod P, high half times x^(D-1) mod P, both in bits 63..32
 *   shift by N bytes  state times x^(8N-33) mod P; the CRC32 instruction supplies the missing x^33
 * The CRC32 instruction over 128 folded bits is their remainder.
 *
 * Invariants
 * - A copy loads each byte of the source once: what is summed is what was stored, even while another thread changes the
 *   source. What was loaded passes through an empty asm, so that the compiler cannot load it again.
 */
#include "persist/persist.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#define SSE42 __attribute__((target("sse4.2,pclmul")))
#define VPCLMUL256 __attribute__((target("sse4.2,pclmul,avx2,vpclmulqdq")))
#define VPCLMUL __attribute__((target("sse4.2,pclmul,avx2,avx512f,vpclmulqdq")))

/* ------------------------------------------------------------- CRC32 instruction */

SSE42 static inline uint64_t step8(uint64_t state, const uint8_t *data)
{
    uint64_t word;
    memcpy(&word, data, sizeof word);
    return _mm_crc32_u64(state, word);
}

/* One stream: for what is too short for more. state is the inverted checksum. */
SSE42 static inline uint32_t serial(uint32_t state, const uint8_t *data, size_t length)
{
    uint64_t wide = state;
    for (; length >= 8; data += 8, length -= 8)
        wide = step8(wide, data);
    state = (uint32_t)wide;
    for (; length > 0; data++, length--)
        state = _mm_crc32_u8(state, *data);
    return state;
}

SSE42 static inline uint32_t shift(uint32_t state, uint32_t factor)
{
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi32_si128((int)state),
                                           _mm_cvtsi32_si128((int)factor), 0);
    return (uint32_t)_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}

/* Eight bytes, summed and stored past the cache. */
SSE42 static inline uint64_t copy8(uint64_t state, uint8_t *target, const uint8_t *source)
{
    uint64_t word;
    memcpy(&word, source, sizeof word);
    __asm__("" : "+r"(word));
    _mm_stream_si64((long long *)(void *)target, (long long)word);
    return _mm_crc32_u64(state, word);
}

/* One line, summed and stored past the cache. */
SSE42 static inline uint32_t copy_line(uint32_t state, uint8_t *target, const uint8_t *source)
{
    uint64_t wide = state;
    for (size_t index = 0; index < CXL_LINE; index += 8)
        wide = copy8(wide, target + index, source + index);
    return (uint32_t)wide;
}

/* Three streams of span bytes each, which hides the latency (3 cycles) of the instruction; unless target
 * is NULL each line is also copied there. Streams this short keep the prefetcher of the CPU from
 * finding them: the lines of the next turn are asked for (7 instead of 22 GB/s without). */
SSE42 static inline __attribute__((always_inline)) uint32_t three_streams(
    uint32_t state, uint8_t *target, const uint8_t *source, size_t span, uint32_t by_one, uint32_t by_two)
{
    uint64_t first = state, second = 0, third = 0;
    for (size_t line = 0; line < span; line += CXL_LINE) {
        const uint8_t *data = source + line;
        for (size_t stream = 0; stream < 3; stream++)
            _mm_prefetch((const char *)source + 3 * (span + line) + stream * CXL_LINE, _MM_HINT_T0);
        for (size_t index = 0; index < CXL_LINE && target == NULL; index += 8) {
            first = step8(first, data + index);
            second = step8(second, data + span + index);
            third = step8(third, data + 2 * span + index);
        }
        for (size_t index = 0; index < CXL_LINE && target != NULL; index += 8) {
            uint8_t *to = target + line + index;
            first = copy8(first, to, data + index);
            second = copy8(second, to + span, data + span + index);
            third = copy8(third, to + 2 * span, data + 2 * span + index);
        }
    }
    return shift((uint32_t)first, by_two) ^ shift((uint32_t)second, by_one) ^ (uint32_t)third;
}

enum { LONG = 1024, SHORT = 128 };      /* bytes of one stream in one turn */

/* As many bytes as fill turns of three streams; returns how many. */
SSE42 static inline __attribute__((always_inline)) size_t sum_streams(
    uint32_t *state, uint8_t *target, const uint8_t *source, size_t length)
{
    size_t done = 0;
    for (; length - done >= 3 * LONG; done += 3 * LONG)
        *state = three_streams(*state, target != NULL ? target + done : NULL, source + done, LONG,
                               0x170076fa, 0xa51b6135);
    for (; length - done >= 3 * SHORT; done += 3 * SHORT)
        *state = three_streams(*state, target != NULL ? target + done : NULL, source + done, SHORT,
                               0x0d3b6092, 0xb9e02b86);
    return done;
}

SSE42 uint32_t cxl_crc32c_sse42(uint32_t crc, const void *data, size_t length)
{
    uint32_t state = ~crc;
    size_t done = sum_streams(&state, NULL, data, length);
    return ~serial(state, (const uint8_t *)data + done, length - done);
}

SSE42 uint32_t cxl_copy_lines_sse42(uint32_t crc, void *target, const void *source, size_t count)
{
    uint32_t state = ~crc;
    const uint8_t *from = source;
    size_t length = count * CXL_LINE;
    for (size_t done = sum_streams(&state, target, from, length); done < length; done += CXL_LINE)
        state = copy_line(state, (uint8_t *)target + done, from + done);
    return ~state;
}

/* ------------------------------------------------- folding and the instruction at once, 256 bits
 *
 * For CPUs that multiply 256 bits but not 512: there folding takes as long as the CRC32 instruction, and
 * each leaves the units of the other idle. So lines are taken in pairs. The first is folded; the second
 * goes through the instruction from a state of zero, and the result enters the first bytes of the next
 * pair, as a state does. One pair waits for another only in the folding, which is short.
 *
 * Measured with one thread, AMD EPYC (Zen 3) VM, best of 400, GB/s, against three streams of the instruction:
 *   CRC of 64 KiB in L2                     40    24 (folding alone 26)
 *   CRC of 64 KiB pieces of 512 MiB         23    21 (without asking ahead 17; memcpy 22)
 *   copy + CRC, 1 MiB pieces, from L3       22.8  16.7 (the copy alone 22.9)
 *   copy + CRC, 1 MiB pieces of 512 MiB     19    15 (the copy alone 19)
 * Two or three pairs a turn are slower (39).
 */

enum { PAIR = 2 * CXL_LINE };
enum { AHEAD = 2048 };                  /* bytes asked for ahead; from memory 1 KiB costs 1 GB/s, 4 KiB 3 */

VPCLMUL256 static inline __m256i fold256(__m256i sum, __m256i factors, __m256i next)
{
    __m256i low = _mm256_clmulepi64_epi128(sum, factors, 0x00);
    __m256i high = _mm256_clmulepi64_epi128(sum, factors, 0x11);
    return _mm256_xor_si256(_mm256_xor_si256(low, next), high);
}

VPCLMUL256 static inline __m256i repeat256(uint64_t low, uint64_t high)
{
    return _mm256_broadcastsi128_si256(_mm_set_epi64x((int64_t)high, (int64_t)low));
}

/* The remainder of one folded line: its four lanes are 384, 256, 128 and 0 bits from the end. */
VPCLMUL256 static inline uint32_t remainder256_of(__m256i first, __m256i second)
{
    const __m128i by_1_lane = _mm_set_epi64x(0x3171d43000000000, 0x3743f7bd00000000);
    __m256i half = fold256(first, repeat256(0x33ccbbbc00000000, 0xa2158b3400000000), second);
    __m128i low = _mm256_castsi256_si128(half), total = _mm256_extracti128_si256(half, 1);
    total = _mm_xor_si128(total, _mm_clmulepi64_si128(low, by_1_lane, 0x00));
    total = _mm_xor_si128(total, _mm_clmulepi64_si128(low, by_1_lane, 0x11));
    uint64_t state = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(total));
    return (uint32_t)_mm_crc32_u64(state, (uint64_t)_mm_extract_epi64(total, 1));
}

/* Half a line, loaded once for both purposes. */
VPCLMUL256 static inline __m256i take_half(const uint8_t *source, uint8_t *target, size_t offset, bool copies)
{
    __m256i half = _mm256_loadu_si256((const void *)(source + offset));
    __asm__("" : "+x"(half));
    if (copies)
        _mm256_stream_si256((void *)(target + offset), half);
    return half;
}

/* count pairs of lines, at least one; copies is a constant, so that the loop has no branch for it. */
VPCLMUL256 static inline __attribute__((always_inline)) uint32_t pairs(
    uint32_t state, uint8_t *target, const uint8_t *source, size_t count, bool copies)
{
    const __m256i by_pair = repeat256(0x6577b24500000000, 0x7417153f00000000);
    __m256i sum0 = _mm256_setzero_si256(), sum1 = _mm256_setzero_si256();
    for (size_t done = 0; done < count * PAIR; done += PAIR) {
        _mm_prefetch((const char *)source + done + AHEAD, _MM_HINT_T0);
        _mm_prefetch((const char *)source + done + AHEAD + CXL_LINE, _MM_HINT_T0);
        __m256i before = _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)state));
        sum0 = fold256(sum0, by_pair, _mm256_xor_si256(take_half(source, target, done, copies), before));
        sum1 = fold256(sum1, by_pair, take_half(source, target, done + 32, copies));
        uint64_t second = 0;
#pragma GCC unroll 8    /* as a loop 28 instead of 40 GB/s */
        for (size_t index = done + CXL_LINE; index < done + PAIR; index += 8)
            second = copies ? copy8(second, target + index, source + index) : step8(second, source + index);
        state = (uint32_t)second;
    }
    return shift(remainder256_of(sum0, sum1), 0x9e4addf8) ^ state;    /* by the last line */
}

VPCLMUL256 uint32_t cxl_crc32c_vpclmul256(uint32_t crc, const void *data, size_t length)
{
    const uint8_t *bytes = data;
    uint32_t state = ~crc;
    if (length >= PAIR) {
        state = pairs(state, NULL, bytes, length / PAIR, false);
        bytes += length / PAIR * PAIR;
        length %= PAIR;
    }
    return ~serial(state, bytes, length);
}

VPCLMUL256 uint32_t cxl_copy_lines_vpclmul256(uint32_t crc, void *target, const void *source, size_t count)
{
    uint8_t *to = target;
    const uint8_t *from = source;
    uint32_t state = ~crc;
    if (count >= 2)
        state = pairs(state, to, from, count / 2, true);
    if (count % 2 != 0)
        state = copy_line(state, to + count / 2 * PAIR, from + count / 2 * PAIR);
    return ~state;
}

/* ------------------------------------------------------------- carry-less folding */

VPCLMUL static inline __m512i fold(__m512i sum, __m512i factors, __m512i next)
{
    __m512i low = _mm512_clmulepi64_epi128(sum, factors, 0x00);
    __m512i high = _mm512_clmulepi64_epi128(sum, factors, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, 0x96);     /* a ^ b ^ c */
}

VPCLMUL static inline __m512i repeat(uint64_t low, uint64_t high)
{
    return _mm512_broadcast_i32x4(_mm_set_epi64x((int64_t)high, (int64_t)low));
}

/* The remainder of one folded line: its four lanes are 384, 256, 128 and 0 bits from the end. */
VPCLMUL static inline uint32_t remainder_of(__m512i sum)
{
    const __m512i factors = _mm512_set_epi64(
        0, 0, 0x3171d43000000000, 0x3743f7bd00000000, (int64_t)0xa2158b3400000000, 0x33ccbbbc00000000,
        0x6051243f00000000, (int64_t)0xa46ef4aa00000000);
    __m512i moved = fold(sum, factors, _mm512_setzero_si512());
    __m128i total = _mm512_extracti32x4_epi32(sum, 3);
    total = _mm_xor_si128(total, _mm512_castsi512_si128(moved));
    total = _mm_xor_si128(total, _mm512_extracti32x4_epi32(moved, 1));
    total = _mm_xor_si128(total, _mm512_extracti32x4_epi32(moved, 2));
    uint64_t state = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(total));
    return (uint32_t)_mm_crc32_u64(state, (uint64_t)_mm_extract_epi64(total, 1));
}

/* One line: loaded once for both purposes; target NULL for the checksum alone. */
VPCLMUL static inline __m512i take(const uint8_t **source, uint8_t **target)
{
    __m512i line = _mm512_loadu_si512(*source);
    __asm__("" : "+v"(line));
    *source += CXL_LINE;
    if (*target != NULL) {
        _mm512_stream_si512((void *)*target, line);
        *target += CXL_LINE;
    }
    return line;
}

/* count lines, at least four; four sums hide the latency of the multiplication. */
VPCLMUL static inline __attribute__((always_inline)) uint32_t fold_lines(
    uint32_t state, uint8_t *target, const uint8_t *source, size_t count)
{
    const __m512i by_4_lines = repeat(0xe9a5d8be00000000, 0x1426a81500000000);
    const __m512i by_1_line = repeat(0x1c19243b00000000, 0x75bba45b00000000);
    __m512i sum0 = take(&source, &target), sum1 = take(&source, &target);
    __m512i sum2 = take(&source, &target), sum3 = take(&source, &target);
    sum0 = _mm512_xor_si512(sum0, _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
    for (count -= 4; count >= 4; count -= 4) {
        sum0 = fold(sum0, by_4_lines, take(&source, &target));
        sum1 = fold(sum1, by_4_lines, take(&source, &target));
        sum2 = fold(sum2, by_4_lines, take(&source, &target));
        sum3 = fold(sum3, by_4_lines, take(&source, &target));
    }
    sum0 = fold(fold(fold(sum0, by_1_line, sum1), by_1_line, sum2), by_1_line, sum3);
    for (; count > 0; count--)
        sum0 = fold(sum0, by_1_line, take(&source, &target));
    return remainder_of(sum0);
}

VPCLMUL uint32_t cxl_crc32c_vpclmul(uint32_t crc, const void *data, size_t length)
{
    const uint8_t *bytes = data;
    uint32_t state = ~crc;
    if (length >= 4 * CXL_LINE) {
        state = fold_lines(state, NULL, bytes, length / CXL_LINE);
        bytes += length / CXL_LINE * CXL_LINE;
        length %= CXL_LINE;
    }
    return ~serial(state, bytes, length);
}

VPCLMUL uint32_t cxl_copy_lines_vpclmul(uint32_t crc, void *target, const void *source, size_t count)
{
    uint8_t *to = target;
    const uint8_t *from = source;
    if (count >= 4)
        return ~fold_lines(~crc, to, from, count);
    uint32_t state = ~crc;
    for (; count > 0; count--, from += CXL_LINE, to += CXL_LINE)
        state = copy_line(state, to, from);
    return ~state;
}

#endif
