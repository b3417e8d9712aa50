/* faults.c - the switches with which tests make the n-th call of a kind fail, and the allocators that
 * obey them.
 *
 * Never: does anything while no switch is set, but load one word.
 *
 * Invariants
 * - One call fails for each cxl_fault_set, even when threads race for it.
 */
#include <errno.h>
#include <stdlib.h>

#include "persist/persist.h"

typedef struct {
    atomic_uint_least64_t nth;      /* the call that fails; 0: off */
    atomic_uint_least64_t count;    /* calls since the switch was set */
} fault_switch;

static fault_switch switches[CXL_FAULT_KINDS];

int cxl_fault_set(uint32_t kind, uint64_t nth)
{
    if (kind >= CXL_FAULT_KINDS)
        return -EINVAL;
    atomic_store(&switches[kind].nth, 0);
    atomic_store(&switches[kind].count, 0);
    atomic_store(&switches[kind].nth, nth);
    return 0;
}

uint64_t cxl_fault_count(uint32_t kind)
{
    return kind < CXL_FAULT_KINDS ? atomic_load(&switches[kind].count) : 0;
}

bool cxl_fault_hit(uint32_t kind)
{
    fault_switch *entry = &switches[kind];
    uint64_t nth = atomic_load_explicit(&entry->nth, memory_order_relaxed);
    if (nth == 0)
        return false;
    return atomic_fetch_add(&entry->count, 1) + 1 == nth;
}

void *cxl_allocate(size_t size)
{
    return cxl_fault_hit(CXL_FAULT_ALLOCATE) ? NULL : malloc(size);
}

void *cxl_allocate_zeroed(size_t count, size_t size)
{
    return cxl_fault_hit(CXL_FAULT_ALLOCATE) ? NULL : calloc(count, size);
}

void *cxl_reallocate(void *pointer, size_t size)
{
    return cxl_fault_hit(CXL_FAULT_ALLOCATE) ? NULL : realloc(pointer, size);
}
