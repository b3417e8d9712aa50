/* copy_x86.c - whole lines stored past the cache.
 *
 * Never: runs on a CPU that lacks the instructions (dispatch.c decides); fences.
 *
 * Invariants
 * - The target is line-aligned; each line is stored as a whole, so that the write-combining buffer of
 *   the CPU sends it as one transfer.
 */
#include "persist/persist.h"

#if defined(__x86_64__)

#include <immintrin.h>

__attribute__((target("sse2"))) void cxl_copy_lines_sse2(void *target, const void *source, size_t count)
{
    __m128i *to = target;
    const __m128i *from = source;
    for (; count > 0; count--, to += 4, from += 4) {
        __m128i part0 = _mm_loadu_si128(from), part1 = _mm_loadu_si128(from + 1);
        __m128i part2 = _mm_loadu_si128(from + 2), part3 = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, part0);
        _mm_stream_si128(to + 1, part1);
        _mm_stream_si128(to + 2, part2);
        _mm_stream_si128(to + 3, part3);
    }
}

__attribute__((target("avx2"))) void cxl_copy_lines_avx2(void *target, const void *source, size_t count)
{
    __m256i *to = target;
    const __m256i *from = source;
    for (; count > 0; count--, to += 2, from += 2) {
        __m256i part0 = _mm256_loadu_si256(from), part1 = _mm256_loadu_si256(from + 1);
        _mm256_stream_si256(to, part0);
        _mm256_stream_si256(to + 1, part1);
    }
}

__attribute__((target("avx512f"))) void cxl_copy_lines_avx512(void *target, const void *source, size_t count)
{
    __m512i *to = target;
    const __m512i *from = source;
    for (; count > 0; count--, to++, from++)
        _mm512_stream_si512(to, _mm512_loadu_si512(from));
}

#endif
