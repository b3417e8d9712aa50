/* threads_store.c - for threads.c: what the store does to files while others read and write them. */
#include <errno.h>

#include "threads.h"

static uint32_t free_segments[SEGMENTS], free_count;
static uint64_t next_id = 1;

/* --------------------------------------------------------------------- the store: its lock is held */

void store_begin(void)
{
    for (free_count = 0; free_count < SEGMENTS; free_count++)
        free_segments[free_count] = free_count;
}

static void collect_dead(void)
{
    uint64_t dead[64];
    int64_t count;
    while ((count = cxl_engine_dead_segments(engine, dead, 64)) > 0)
        for (int64_t i = 0; i < count; i++)
            free_segments[free_count++] = (uint32_t)dead[i];
}

void commit(file *f, bool written)
{
    cxl_delta *delta;
    CHECK(cxl_map_take_delta(f->live, &delta) == 0, "a delta cannot be taken");
    if (!written)
        cxl_delta_cancel(delta, f->live);
    else
        CHECK(cxl_delta_apply(delta, f->live, f->committed) == 0, "a delta cannot be applied");
}

void drop_discarded(void)
{
    while (cxl_engine_drop_discarded(engine, DISCARDED_MIN))
        ;
}

uint64_t open_extent(void)
{
    if (free_count == 0)
        collect_dead();
    for (int i = 0; free_count == 0 && i < FILES; i++) {
        commit(&files[i], true);
        drop_discarded();
        collect_dead();
    }
    CHECK(free_count > 0, "no segment is free");
    uint64_t place = FIRST + (uint64_t)free_segments[--free_count] * SEGMENT_BYTES;
    CHECK(cxl_engine_lease(engine, next_id, place, SEGMENT_BYTES) == 0, "a lease at %lu", (unsigned long)place);
    return next_id++;
}

static void close_leases(file *f)
{
    uint64_t place, length;
    while (cxl_map_close_lease(f->live, &place, &length) > 1)
        ;
}

static void swap_content(file *f)
{
    cxl_map *old = f->live;
    cxl_port_stop(f->port);
    close_leases(f);
    commit(f, true);
    CHECK(cxl_map_clone(old, 0, &f->live) == 0, "a content cannot be cloned");
    cxl_port_set_map(f->port, f->live);
    cxl_map_free(old);
}

/* A write that was under way when the port was stopped has ended. */
static void check_stopped(file *f)
{
    cxl_port_stop(f->port);
    commit(f, true);
    usleep(300);
    CHECK(!cxl_map_is_dirty(f->live), "a stopped file was written to");
}

static int list_alive(uint64_t segment, cxl_live_range **ranges, uint64_t *count)
{
    cxl_span span = {FIRST + segment * SEGMENT_BYTES, SEGMENT_BYTES};
    uint64_t *owners, owner_count;
    uint8_t busy;
    int result = cxl_engine_live_ranges(engine, &span, 1, 0, &busy, ranges, count, &owners, &owner_count);
    if (result == 0)
        cxl_free(owners);
    return result;
}

/* As the cleaner does: everything in a segment that nobody writes to moves elsewhere. */
static void move_segment(uint64_t segment)
{
    cxl_live_range *ranges;
    uint64_t count, place, length, bad;
    cxl_fault fault;
    cxl_move move;
    CHECK(list_alive(segment, &ranges, &count) == 0, "what is alive in a segment");
    uint64_t target = open_extent();
    for (uint64_t i = 0; i < count; i++) {
        int64_t result = cxl_engine_copy_ranges(engine, &ranges[i], 1, target, &move, &bad, &fault);
        if (result == 0 || result == -ENOENT)
            continue;                 /* it is gone meanwhile, or the room is */
        CHECK(result == 1, "copy of %lu bytes: %ld", (unsigned long)ranges[i].length, (long)result);
        CHECK(cxl_engine_publish(engine, target) == 0, "the copy cannot be published");
        for (int f = 0; f < FILES; f++) {
            cxl_map *maps[] = {files[f].live, files[f].committed};
            CHECK(cxl_maps_move(engine, maps, 2, &move, 1, &bad) == 0, "references cannot be moved");
        }
    }
    cxl_free(ranges);
    CHECK(cxl_engine_close_lease(engine, target, &place, &length) == 0, "the copy cannot be closed");
}

static void share(const file *f, uint64_t *rng)
{
    cxl_map *other;
    uint64_t refs;
    CHECK(cxl_map_new(engine, 99, &other) == 0, "no other map");
    uint64_t offset = random_below(rng, FILE_BYTES), length = random_below(rng, FILE_BYTES);
    int64_t shared = cxl_map_share(f->live, offset, length, other, 0);
    CHECK(shared >= 0 || shared == -EBUSY, "share: %ld", (long)shared);
    if (shared > 0)
        CHECK(cxl_map_mapped(other, 0, (uint64_t)shared, &refs) <= (uint64_t)shared, "more is mapped than shared");
    cxl_map_free(other);
}

static void open_and_close_handles(const file *f, cxl_transport *t)
{
    enum { MANY = 200 };
    for (uint64_t i = 0; i < MANY; i++)
        CHECK(cxl_handle_open(t, 1000 + i, f->port, 1) == 0, "a handle cannot be opened");
    for (uint64_t i = 0; i < MANY; i++)
        cxl_handle_close(t, 1000 + i);
}

void one_step(uint64_t *rng, cxl_transport *transport)
{
    uint64_t number = random_below(rng, FILES);
    file *f = &files[number];
    switch (random_below(rng, 15)) {
    case 0: check_stopped(f); break;
    case 1: case 2: commit(f, random_below(rng, 4) != 0); break;
    case 3: close_leases(f); break;
    case 4: swap_content(f); break;
    case 5: share(f, rng); break;
    case 6: open_and_close_handles(f, transport); break;
    case 7: cxl_port_written(f->port); cxl_port_stop(f->port); break;
    case 8:
        if (number >= STEADY)
            CHECK(cxl_map_truncate(f->live, random_below(rng, FILE_BYTES)) == 0, "a file cannot be cut");
        break;
    case 9:
        if (number >= STEADY)
            CHECK(cxl_map_punch(f->live, random_below(rng, FILE_BYTES), random_below(rng, REGION)) == 0, "no hole");
        break;
    case 10: case 11: begin_snapshot(f, rng); break;
    case 12: cxl_engine_drop_discarded(engine, 1 + random_below(rng, DISCARDED_MIN)); break;
    default: move_segment(random_below(rng, SEGMENTS)); break;
    }
    collect_dead();
    steps++;
}

/* ----------------------------------------------------------------------------- questions, without locks */

void ask_everything(uint64_t *rng, cxl_transport *transport)
{
    static uint64_t used[SEGMENTS];
    uint64_t count, bytes, faults;
    cxl_engine_stats stats;
    cxl_transport_stats transport_stats;
    cxl_live_range *ranges;
    cxl_extent_info *infos;
    cxl_fault fault;
    cxl_engine_statistics(engine, &stats);
    cxl_transport_statistics(transport, &transport_stats);
    CHECK(cxl_engine_usage(engine, used, SEGMENTS) == 0, "usage");
    CHECK(cxl_engine_list(engine, &infos, &count) == 0, "list");
    for (int i = 0; i < 3 && count > 0; i++) {
        uint64_t id = infos[random_below(rng, count)].id;
        int result = cxl_engine_verify(engine, id, &fault, 1, &faults, &bytes);
        CHECK(result == -ENOENT || faults == 0, "extent %lu: %lu damaged chunks", (unsigned long)id,
              (unsigned long)faults);
    }
    cxl_free(infos);
    if (list_alive(random_below(rng, SEGMENTS), &ranges, &count) == 0)
        cxl_free(ranges);
}
