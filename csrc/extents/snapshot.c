/* snapshot.c - what the journal knows of all extents as of one moment, in slices: whatever is about to
 * change is taken down before it does.
 *
 * Never: references, or extents that no record has defined yet.
 *
 * Invariants
 * - A snapshot has every extent that was published when it began and is held when it is looked at, with
 *   its length and checksums of that moment; each once.
 * - Published lengths and the table change only behind snapshot_keep, or in cxl_engine_define, which no
 *   snapshot is made beside.
 * - What cannot be taken down for want of memory makes the whole snapshot fail, nothing else.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "extents/extents.h"

/* Room for count more items; snapshot.lock is held. */
static bool reserve(void **items, uint64_t used, uint64_t *capacity, uint64_t count, size_t size)
{
    if (count <= *capacity - used)
        return true;
    uint64_t wanted = larger(*capacity * 2, larger(used + count, 64));
    void *fresh = cxl_reallocate(*items, wanted * size);
    if (fresh == NULL)
        return false;
    *items = fresh;
    *capacity = wanted;
    return true;
}

static void forget(extent_snapshots *all)
{
    free(all->infos);
    free(all->crcs);
    all->infos = NULL;
    all->crcs = NULL;
    all->info_count = all->info_capacity = all->crc_count = all->crc_capacity = 0;
    all->failed = false;
    atomic_store(&all->active, false);
}

/* snapshot.lock is held: nobody publishes more of x meanwhile. */
static void take_down(cxl_engine *engine, extent *x)
{
    extent_snapshots *all = &engine->snapshots;
    pthread_mutex_lock(stripe_of(engine, x));
    uint64_t count = chunks_of(engine, x->published);
    pthread_mutex_unlock(stripe_of(engine, x));
    x->snapshot = all->number;
    if (count == 0 || all->failed)
        return;
    void *infos = all->infos, *crcs = all->crcs;
    bool fits = reserve(&infos, all->info_count, &all->info_capacity, 1, sizeof(*all->infos));
    all->infos = infos;
    fits = fits && reserve(&crcs, all->crc_count, &all->crc_capacity, count, sizeof(*all->crcs));
    all->crcs = crcs;
    if (!fits) {
        all->failed = true;
        return;
    }
    cxl_extent_info *info = &all->infos[all->info_count++];
    info->crc_index = all->crc_count;
    extent_describe_published(engine, x, info, all->crcs + all->crc_count, count);
    all->crc_count += count;
}

void snapshot_keep(cxl_engine *engine, extent *x)
{
    extent_snapshots *all = &engine->snapshots;
    if (!atomic_load_explicit(&all->active, memory_order_relaxed))
        return;
    pthread_mutex_lock(&all->lock);
    if (atomic_load(&all->active) && x->snapshot != all->number)
        take_down(engine, x);
    pthread_mutex_unlock(&all->lock);
}

int cxl_snapshot_begin(cxl_engine *engine)
{
    extent_snapshots *all = &engine->snapshots;
    int result = 0;
    pthread_mutex_lock(&engine->lock);
    pthread_mutex_lock(&all->lock);
    if (atomic_load(&all->active)) {
        result = -EBUSY;
    } else {
        all->number++;
        all->cursor = 0;
        all->table_size = engine->table_size;
        atomic_store(&all->active, true);
    }
    pthread_mutex_unlock(&all->lock);
    pthread_mutex_unlock(&engine->lock);
    return result;
}

int cxl_snapshot_step(cxl_engine *engine, uint64_t buckets)
{
    extent_snapshots *all = &engine->snapshots;
    int result = 0;
    pthread_mutex_lock(&engine->lock);
    pthread_mutex_lock(&all->lock);
    if (all->table_size != engine->table_size) {  /* other buckets: what is done is told by its mark */
        all->table_size = engine->table_size;
        all->cursor = 0;
    }
    for (; buckets > 0 && all->cursor < engine->table_size; buckets--, all->cursor++) {
        for (extent *x = engine->table[all->cursor]; x != NULL; x = x->next) {
            if (x->snapshot != all->number && atomic_load(&x->holds) > (x->kept ? 1 : 0))
                take_down(engine, x);
        }
    }
    if (!atomic_load(&all->active))
        result = -EINVAL;
    else if (all->failed)
        result = -ENOMEM;
    else
        result = all->cursor < engine->table_size;
    pthread_mutex_unlock(&all->lock);
    pthread_mutex_unlock(&engine->lock);
    return result;
}

int cxl_snapshot_take(cxl_engine *engine, cxl_extent_info **infos, uint64_t *info_count, uint32_t **crcs,
                      uint64_t *crc_count)
{
    extent_snapshots *all = &engine->snapshots;
    int result = -EINVAL;
    pthread_mutex_lock(&all->lock);
    if (atomic_load(&all->active)) {
        void *first = all->infos, *second = all->crcs;
        bool fits = reserve(&first, all->info_count, &all->info_capacity, 1, sizeof(**infos));
        all->infos = first;             /* never NULL, even when empty */
        fits = fits && reserve(&second, all->crc_count, &all->crc_capacity, 1, sizeof(**crcs));
        all->crcs = second;
        result = fits && !all->failed ? 0 : -ENOMEM;
        if (result == 0) {
            *infos = all->infos;
            *info_count = all->info_count;
            *crcs = all->crcs;
            *crc_count = all->crc_count;
            all->infos = NULL;
            all->crcs = NULL;
        }
        forget(all);
    }
    pthread_mutex_unlock(&all->lock);
    return result;
}

void cxl_snapshot_cancel(cxl_engine *engine)
{
    pthread_mutex_lock(&engine->snapshots.lock);
    forget(&engine->snapshots);
    pthread_mutex_unlock(&engine->snapshots.lock);
}
