/* moves.c - what was copied elsewhere is looked for there: references are re-aimed, many at once.
 *
 * Never: touches media bytes, marks a map as changed (its bytes are what they were).
 *
 * Invariants
 * - Each map is re-aimed as a whole or not at all: looked at where the sources say that it refers to them
 *   (referrers.c), or walked once for all moves where that is less, or not known.
 * - A reference that a move covers in part is divided; two that continue each other become one.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "extents/referrers.h"

/* Moves of one source: [first, end) of the list. */
typedef struct {
    extent *source;
    uint64_t first;
    uint64_t end;
} source_moves;

typedef struct {
    const cxl_move *moves;
    extent **targets;         /* of each move, held */
    uint64_t count;
    source_moves *slots;      /* hashed by the address of the source, held; NULL: empty */
    uint64_t slot_count;      /* a power of two, at least twice the sources */
    growing_list places;      /* where references to the sources may be, */
    bool anywhere;            /* and to some of them anywhere else */
} move_table;

static uint64_t slot_of(const move_table *table, const extent *source)
{
    uint64_t hash = (uint64_t)(uintptr_t)source * UINT64_C(0x9e3779b97f4a7c15);
    return (hash >> 32) & (table->slot_count - 1);
}

static source_moves *find_source(const move_table *table, const extent *source)
{
    uint64_t slot = slot_of(table, source);
    while (table->slots[slot].source != NULL && table->slots[slot].source != source)
        slot = (slot + 1) & (table->slot_count - 1);
    return &table->slots[slot];
}

static void table_drop(cxl_engine *engine, move_table *table)
{
    for (uint64_t i = 0; i < table->slot_count; i++) {
        if (table->slots[i].source != NULL)
            extent_drop(engine, table->slots[i].source);
    }
    for (uint64_t i = 0; i < table->count; i++) {
        if (table->targets[i] != NULL)
            extent_drop(engine, table->targets[i]);
    }
    free(table->slots);
    free(table->targets);
    free(table->places.items);
}

/* Sorted by source, apart, no sum that wraps. */
static bool moves_fit(const cxl_move *moves, uint64_t count, uint64_t *bad)
{
    for (uint64_t i = 0; i < count; i++) {
        const cxl_move *move = &moves[i], *before = &moves[i == 0 ? 0 : i - 1];
        *bad = i;
        if (move->length > UINT64_MAX - move->source_offset)
            return false;
        if (i != 0 && (move->source_id < before->source_id ||
                       (move->source_id == before->source_id &&
                        move->source_offset < before->source_offset + before->length)))
            return false;
    }
    return true;
}

/* The target of a move, held; NULL: it does not exist, or not so far. */
static extent *take_target(cxl_engine *engine, const cxl_move *move)
{
    extent *x = extent_take(engine, move->target_id);
    if (x == NULL)
        return NULL;
    uint64_t known = extent_checksums(engine, x, 0, 0, NULL);
    if (move->target_offset <= known && move->length <= known - move->target_offset)
        return x;
    extent_drop(engine, x);
    return NULL;
}

/* Where what moves [first, end) take from an extent may be referred to. */
static int find_places(cxl_engine *engine, move_table *table, extent *source, uint64_t first, uint64_t end)
{
    cxl_span *spans = cxl_allocate((end - first) * sizeof(*spans));
    int result = 0;
    if (spans == NULL)
        return -ENOMEM;
    for (uint64_t i = first; i < end; i++) {
        const cxl_move *move = &table->moves[i]; /* a record may say anything; nothing refers behind the end */
        uint64_t from = smaller(move->source_offset, source->length);
        uint64_t to = smaller(move->source_offset + move->length, source->length);
        spans[i - first] = (cxl_span){source->media_offset + from, to - from};
    }
    if (!referrers_find(engine, source, COVER_PAST, spans, end - first, &table->places, &result))
        table->anywhere = true;
    free(spans);
    return result;
}

/* The targets of moves [table->count, end), which have one source, and that source, held. Nothing can
 * refer to one that does not exist: its moves are left out. */
static int add_source(cxl_engine *engine, move_table *table, uint64_t end, uint64_t *bad)
{
    uint64_t first = table->count;
    int result = 0;
    extent *source = extent_take(engine, table->moves[first].source_id);
    if (source != NULL) {
        *find_source(table, source) = (source_moves){source, first, end};
        result = find_places(engine, table, source, first, end);
    }
    for (; table->count < end; table->count++) {
        *bad = table->count;
        extent *target = source == NULL ? NULL : take_target(engine, &table->moves[*bad]);
        if (source != NULL && target == NULL)
            return -EINVAL;
        table->targets[*bad] = target;
    }
    return result;
}

static int table_fill(cxl_engine *engine, move_table *table, uint64_t count, uint64_t *bad)
{
    const cxl_move *moves = table->moves;
    int result = 0;
    while (table->count < count && result == 0) {
        uint64_t end = table->count + 1;
        while (end < count && moves[end].source_id == moves[table->count].source_id)
            end++;
        result = add_source(engine, table, end, bad);
    }
    return result;
}

static int table_make(cxl_engine *engine, move_table *table, const cxl_move *moves, uint64_t count,
                      uint64_t *bad)
{
    *table = (move_table){.moves = moves, .slot_count = 16, .places = {.size = sizeof(referrer_place)}};
    while (table->slot_count < 2 * count)
        table->slot_count *= 2;
    table->slots = cxl_allocate_zeroed(table->slot_count, sizeof(*table->slots));
    table->targets = cxl_allocate(count * sizeof(*table->targets));
    int result = -ENOMEM;
    if (table->slots == NULL)
        table->slot_count = 0;
    else if (table->targets != NULL)
        result = table_fill(engine, table, count, bad);
    places_sort(&table->places);
    if (result != 0)
        table_drop(engine, table);
    return result;
}

/* ----------------------------------------------------------------------------------- one map */

/* One more re-aimed piece; one that continues the last one makes that longer. */
static int add_piece(growing_list *pieces, reference fresh)
{
    if (pieces->count != 0) {
        reference *last = (reference *)pieces->items + pieces->count - 1;
        if (reference_end(last) == fresh.file_offset && last->extent == fresh.extent &&
            last->extent_offset + last->length == fresh.extent_offset) {
            last->length += fresh.length;
            return 0;
        }
    }
    reference *place = list_add(pieces);
    if (place == NULL)
        return -ENOMEM;
    *place = fresh;
    return 0;
}

/* The parts of a reference that moves cover, as they will be. */
static int re_aim(const move_table *table, const source_moves *of, const reference *ref, growing_list *pieces)
{
    uint64_t first = of->first, end = of->end, ref_end = ref->extent_offset + ref->length;
    int result = 0;
    while (first < end) {        /* the first move that ends behind the beginning of the reference */
        uint64_t middle = first + (end - first) / 2;
        if (table->moves[middle].source_offset + table->moves[middle].length > ref->extent_offset)
            end = middle;
        else
            first = middle + 1;
    }
    for (; first < of->end && table->moves[first].source_offset < ref_end && result == 0; first++) {
        const cxl_move *move = &table->moves[first];
        uint64_t from = larger(ref->extent_offset, move->source_offset);
        uint64_t to = smaller(ref_end, move->source_offset + move->length);
        if (from < to)
            result = add_piece(pieces, (reference){
                .file_offset = ref->file_offset + (from - ref->extent_offset),
                .length = to - from,
                .extent = table->targets[first],
                .extent_offset = move->target_offset + (from - move->source_offset),
            });
    }
    return result;
}

typedef struct {
    const move_table *table;
    growing_list pieces;
} re_aiming;

static int re_aim_part(void *context, const reference *part)
{
    re_aiming *work = context;
    const source_moves *of = find_source(work->table, part->extent);
    return of->source == NULL ? 0 : re_aim(work->table, of, part, &work->pieces);
}

static int re_aim_all(const tree *content, re_aiming *work)
{
    int result = 0;
    for (uint32_t i = 0; i < content->leaf_count && result == 0; i++) {
        const leaf *in = content->leaves[i];
        for (uint32_t slot = 0; slot < in->count && result == 0; slot++)
            result = re_aim_part(work, &in->refs[slot]);
    }
    return result;
}

static int move_map(cxl_map *map, const move_table *table)
{
    re_aiming work = {table, {.size = sizeof(reference)}};
    uint64_t count, looked_at = 0;
    const referrer_place *places = places_of(&table->places, map->owner, &count);
    int result = 0;
    pthread_mutex_lock(&map->writer);
    const tree *content = &map->content;
    if (table->anywhere || count >= content->refs) {
        looked_at = content->refs;
        result = re_aim_all(content, &work);
    } else if (count != 0) {
        result = places_visit(content, places, count, re_aim_part, &work, &looked_at);
    }
    atomic_fetch_add_explicit(&map->engine->refs_visited, looked_at, memory_order_relaxed);
    if (result == 0 && work.pieces.count != 0)
        result = map_put(map, work.pieces.items, work.pieces.count);
    pthread_mutex_unlock(&map->writer);
    free(work.pieces.items);
    return result;
}

int cxl_maps_move(cxl_engine *engine, cxl_map *const *maps, uint64_t map_count, const cxl_move *moves,
                  uint64_t move_count, uint64_t *bad)
{
    move_table table;
    *bad = 0;
    if (move_count == 0)
        return 0;
    if (!moves_fit(moves, move_count, bad))
        return -EINVAL;
    int result = table_make(engine, &table, moves, move_count, bad);
    if (result != 0)
        return result;
    for (uint64_t i = 0; i < map_count && result == 0; i++)
        result = move_map(maps[i], &table);
    table_drop(engine, &table);
    return result;
}
