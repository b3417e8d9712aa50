/* replay.c - what a row of journal records says of extents and contents, in one call.
 *
 * Never: knows records or operations; what it is given was taken apart before.
 *
 * Invariants
 * - Definitions and changes take effect in the order of the records, each as a whole.
 * - No number it is given is used before it was compared with the length of what it points into.
 */
#include <errno.h>

#include "extents/extents.h"

/* Definitions [*done, end), all or none; *done: the first that took no effect, or is at fault. */
static int define_up_to(cxl_engine *engine, const cxl_extent_info *infos, uint64_t end,
                        const void *data, uint64_t length, uint64_t *done)
{
    uint64_t bad;
    int result = cxl_engine_define(engine, infos + *done, end - *done, data,
                                   length / sizeof(uint32_t), &bad);
    *done = result == 0 ? end : *done + bad;
    return result;
}

static int apply_change(cxl_map *map, const cxl_change *change, const void *data, uint64_t length)
{
    uint64_t bad;
    if (change->cut > FILE_OFFSET_MAX || change->refs_offset % 8 != 0 ||
        change->refs_offset > length || change->ref_count > (length - change->refs_offset) / sizeof(cxl_ref))
        return -EINVAL;
    const cxl_ref *refs = (const void *)((const uint8_t *)data + change->refs_offset);
    return cxl_map_replay(map, change->cut, refs, change->ref_count, change->size, &bad);
}

int cxl_engine_replay(cxl_engine *engine, const cxl_extent_info *infos, uint64_t info_count,
                      const cxl_change *changes, cxl_map *const *maps, uint64_t change_count, const void *data,
                      uint64_t length, uint64_t *definitions_done, uint64_t *changes_done)
{
    *definitions_done = *changes_done = 0;
    while (*changes_done < change_count) {
        const cxl_change *change = &changes[*changes_done];
        if (change->definitions < *definitions_done || change->definitions > info_count)
            return -EINVAL;
        int result = define_up_to(engine, infos, change->definitions, data, length, definitions_done);
        if (result == 0)
            result = apply_change(maps[*changes_done], change, data, length);
        if (result != 0)
            return result;
        ++*changes_done;
    }
    return define_up_to(engine, infos, info_count, data, length, definitions_done);
}
