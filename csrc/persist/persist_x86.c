/* persist_x86.c - write-back and fence instructions of x86-64.
 *
 * Never: encodes an instruction by hand; the compiler knows the operand.
 *
 * Durability: CLWB and CLFLUSHOPT are ordered after older stores to the same line, and complete at the
 * next SFENCE of the same core; CLFLUSH is ordered by itself. (Intel SDM volume 2; AMD APM volume 3.)
 */
#include "persist/persist.h"

#if defined(__x86_64__)

#include <immintrin.h>

static inline const char *first_line(const void *address)
{
    return (const char *)((uintptr_t)address & ~(uintptr_t)(CXL_LINE - 1));
}

__attribute__((target("clwb"), noinline)) void cxl_write_back_clwb(const void *address, size_t length)
{
    const char *end = (const char *)address + length;
    for (const char *line = first_line(address); line < end; line += CXL_LINE)
        _mm_clwb((void *)(uintptr_t)line);
}

__attribute__((target("clflushopt"), noinline)) void cxl_write_back_clflushopt(const void *address, size_t length)
{
    const char *end = (const char *)address + length;
    for (const char *line = first_line(address); line < end; line += CXL_LINE)
        _mm_clflushopt((void *)(uintptr_t)line);
}

__attribute__((noinline)) void cxl_write_back_clflush(const void *address, size_t length)
{
    const char *end = (const char *)address + length;
    for (const char *line = first_line(address); line < end; line += CXL_LINE)
        _mm_clflush(line);
}

__attribute__((noinline)) void cxl_fence_sfence(void)
{
    _mm_sfence();
}

#endif
