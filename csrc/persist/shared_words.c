/* shared_words.c - words of the media that several processes change: each change is one instruction.
 *
 * Never: makes a word durable; looks at what it means.
 *
 * Invariants
 * - Guarded and recorded as every change of media bytes is: as a store of what the word is then.
 */
#include <errno.h>

#include "persist/persist.h"

typedef struct {
    uint64_t *word;
    uint64_t expected;
    uint64_t value;
    uint64_t found;
    uint64_t after;
} change;

static void add_body(void *argument)
{
    change *job = argument;
    job->found = __atomic_fetch_add(job->word, job->value, __ATOMIC_SEQ_CST);
    job->after = job->found + job->value;
}

static void swap_body(void *argument)
{
    change *job = argument;
    job->found = job->expected;
    bool done = __atomic_compare_exchange_n(job->word, &job->found, job->value, false, __ATOMIC_SEQ_CST,
                                            __ATOMIC_SEQ_CST);
    job->after = done ? job->value : job->found;
}

static int run(cxl_media *media, uint64_t offset, void (*body)(void *), change *job)
{
    bool held;
    if (offset > media->size || sizeof job->value > media->size - offset)
        return -ERANGE;
    if (offset % sizeof job->value != 0)
        return -EINVAL;
    if (media->read_only)
        return -EROFS;
    int result = cxl_recorder_begin(&media->recorder, sizeof job->value, &held);
    if (result != 0)
        return result;
    job->word = (uint64_t *)(void *)(media->base + offset);
    result = cxl_guarded(media->base, media->size, body, job, NULL);
    if (held)
        cxl_recorder_end(&media->recorder, result, CXL_EVENT_STORE, offset, sizeof job->after, &job->after);
    return result;
}

int cxl_media_add_u64(cxl_media *media, uint64_t offset, uint64_t value, uint64_t *found)
{
    change job = {.value = value};
    int result = run(media, offset, add_body, &job);
    if (result == 0)
        *found = job.found;
    return result;
}

int cxl_media_swap_u64(cxl_media *media, uint64_t offset, uint64_t expected, uint64_t value, uint64_t *found)
{
    change job = {.expected = expected, .value = value};
    int result = run(media, offset, swap_body, &job);
    if (result == 0)
        *found = job.found;
    return result;
}
