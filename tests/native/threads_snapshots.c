/* threads_snapshots.c - for threads.c: the references of contents, taken down in steps by a thread of their own while
 * workers write to the files, the store cuts, moves, commits and frees their contents, and what has ended is dropped
 * in steps. Whatever happens, the rows are those of the moment at which the snapshot began. */
#include <errno.h>
#include <string.h>

#include "threads.h"

enum { STEP_REFS_MAX = 40 };

typedef struct {
    cxl_reference_snapshot *of;     /* NULL: none is being made */
    cxl_ref *rows, *expected;
    uint64_t count;
} snapshot;

static snapshot snapshots[FILES][2];
static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;  /* of them; behind the lock of the store */
static uint64_t begun, made;

static void begin(snapshot *s, cxl_map *map)
{
    uint64_t sizes[2], counts[2], refs;
    CHECK(cxl_maps_references(&map, 1, UINT64_MAX, &sizes[0], &counts[0], &s->expected, &refs) == 0, "references");
    CHECK(cxl_map_begin_snapshot(map, &sizes[1], &counts[1], &s->rows, &s->of) == 0, "a snapshot cannot be begun");
    CHECK(sizes[0] == sizes[1] && counts[0] == counts[1] && refs == counts[0], "another size or number of references");
    s->count = refs;
    begun++;
}

static void end(snapshot *s)
{
    cxl_reference_snapshot_end(s->of);
    CHECK(memcmp(s->rows, s->expected, s->count * sizeof(*s->rows)) == 0, "the rows are not those of the beginning");
    cxl_free(s->rows);
    cxl_free(s->expected);
    s->of = NULL;
    made++;
}

void begin_snapshot(file *f, uint64_t *rng)
{
    bool live = random_below(rng, 2);
    pthread_mutex_lock(&making);
    snapshot *s = &snapshots[f - files][live];
    if (s->of == NULL) {
        if (live) {                  /* published, and nobody writes to it at this moment */
            cxl_port_stop(f->port);
            commit(f, true);
        }
        begin(s, live ? f->live : f->committed);
    }
    pthread_mutex_unlock(&making);
}

bool step_snapshots(uint64_t *rng)
{
    bool more = false;
    for (int i = 0; i < FILES * 2; i++) {
        pthread_mutex_lock(&making);
        snapshot *s = &snapshots[i / 2][i % 2];
        if (s->of != NULL) {
            int result = cxl_reference_snapshot_step(s->of, 1 + random_below(rng, STEP_REFS_MAX));
            CHECK(result >= 0, "a step of a snapshot: %d", result);
            if (result == 0)
                end(s);
            more = true;
        }
        pthread_mutex_unlock(&making);
    }
    return more;
}

void end_snapshots(uint64_t *rng)
{
    while (step_snapshots(rng))
        ;
    CHECK(begun > 0 && begun == made, "%lu snapshots of %lu", (unsigned long)made, (unsigned long)begun);
}
