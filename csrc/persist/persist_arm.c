/* persist_arm.c - write-back and fence instructions of Arm64.
 *
 * Never: encodes an instruction by hand; each function names the architecture that has it.
 *
 * Durability: DC CVAP cleans a line to the point of persistence, DC CVADP to the point of deep
 * persistence; both complete at the next DSB of the same core. (Arm ARM, sections B2.3 and C5.3.)
 * Arm64 has no store that passes the cache: a non-temporal pair is a hint only, so a copy is made of
 * stores and write-backs.
 */
#include "persist/persist.h"

#if defined(__aarch64__)

#include <string.h>

/* Bytes of the smallest data cache line of all cores: CTR_EL0.DminLine is log2 of its words. */
static inline uintptr_t line_size(void)
{
    uint64_t type;
    __asm__("mrs %0, ctr_el0" : "=r"(type));
    return (uintptr_t)4 << (type >> 16 & 15);
}

__attribute__((target("arch=armv8.2-a"), noinline)) void cxl_write_back_cvap(const void *address, size_t length)
{
    uintptr_t size = line_size(), end = (uintptr_t)address + length;
    for (uintptr_t line = (uintptr_t)address & ~(size - 1); line < end; line += size)
        __asm__ volatile("dc cvap, %0" : : "r"(line) : "memory");
}

__attribute__((target("arch=armv8.5-a"), noinline)) void cxl_write_back_cvadp(const void *address, size_t length)
{
    uintptr_t size = line_size(), end = (uintptr_t)address + length;
    for (uintptr_t line = (uintptr_t)address & ~(size - 1); line < end; line += size)
        __asm__ volatile("dc cvadp, %0" : : "r"(line) : "memory");
}

__attribute__((noinline)) void cxl_fence_dsb(void)
{
    __asm__ volatile("dsb sy" : : : "memory");
}

#endif
