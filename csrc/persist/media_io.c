/* media_io.c - every load and store of media bytes: range checks, the guard, the recorder.
 *
 * Never: makes anything durable by itself (media.c does), touches bytes outside the range given.
 *
 * Invariants
 * - A call that fails with -ERANGE, -EROFS, -EINVAL or -ENOMEM changed nothing; after -EIO the range may
 *   hold any mixture of old and new.
 * - A checksum result is written only on success.
 */
#include <errno.h>
#include <string.h>

#include "persist/persist.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the media is little-endian");

typedef struct {
    cxl_media *media;
    uint64_t offset;
    const void *source;      /* outgoing */
    void *target;            /* incoming */
    uint64_t length;
    uint64_t value;          /* of a word, */
    uint64_t before;         /* and what it was */
    uint32_t crc;
    bool with_crc;
    uint64_t piece;          /* each has a checksum of its own, */
    uint32_t *crcs;          /* these */
} transfer;

static int check_range(const cxl_media *media, uint64_t offset, uint64_t length)
{
    return offset > media->size || length > media->size - offset ? -ERANGE : 0;
}

/* ------------------------------------------------------------------------------ stores */

static void store_body(void *argument)
{
    const transfer *job = argument;
    memcpy(job->media->base + job->offset, job->source, job->length);
}

static void store_word_body(void *argument)
{
    const transfer *job = argument;
    uint64_t *word = (uint64_t *)(void *)(job->media->base + job->offset);
    __atomic_store_n(word, job->value, __ATOMIC_RELEASE);
}

static void or_word_body(void *argument)
{
    transfer *job = argument;
    uint64_t *word = (uint64_t *)(void *)(job->media->base + job->offset);
    job->before = __atomic_fetch_or(word, job->value, __ATOMIC_SEQ_CST);
    job->value |= job->before;
}

static void copy_body(void *argument)
{
    transfer *job = argument;
    uint8_t *target = job->media->base + job->offset;
    bool lines = job->media->granularity == CXL_GRANULARITY_LINE;
    if (job->with_crc)
        job->crc = cxl_copy_out_crc(job->crc, target, job->source, job->length, lines);
    else
        cxl_copy_out(target, job->source, job->length, lines);
}

static int change(transfer *job, void (*body)(void *), uint32_t event)
{
    cxl_media *media = job->media;
    bool held;
    int result = check_range(media, job->offset, job->length);
    if (result == 0 && media->read_only)
        result = -EROFS;
    if (result != 0 || job->length == 0)
        return result;
    result = cxl_recorder_begin(&media->recorder, job->length, &held);
    if (result != 0)
        return result;
    result = cxl_guarded(media->base, media->size, body, job, NULL);
    if (event == CXL_EVENT_COPY && media->granularity == CXL_GRANULARITY_PAGE)
        cxl_media_remember_dirty(media, job->offset, job->length);
    if (held)
        cxl_recorder_end(&media->recorder, result, event, job->offset, job->length, job->source);
    return result;
}

int cxl_media_store(cxl_media *media, uint64_t offset, const void *source, uint64_t length)
{
    transfer job = {.media = media, .offset = offset, .source = source, .length = length};
    return change(&job, store_body, CXL_EVENT_STORE);
}

int cxl_media_store_u64(cxl_media *media, uint64_t offset, uint64_t value)
{
    transfer job = {
        .media = media, .offset = offset, .source = &value, .length = sizeof value, .value = value,
    };
    if (offset % sizeof value != 0)
        return -EINVAL;
    return change(&job, store_word_body, CXL_EVENT_STORE);
}

int cxl_media_or_u64(cxl_media *media, uint64_t offset, uint64_t bits, uint64_t *before)
{
    transfer job = {.media = media, .offset = offset, .length = sizeof bits, .value = bits};
    job.source = &job.value;    /* as it is when the event is recorded */
    if (offset % sizeof bits != 0)
        return -EINVAL;
    int result = change(&job, or_word_body, CXL_EVENT_STORE);
    if (result == 0)
        *before = job.before;
    return result;
}

int cxl_media_copy(cxl_media *media, uint64_t offset, const void *source, uint64_t length)
{
    transfer job = {.media = media, .offset = offset, .source = source, .length = length};
    if (cxl_fault_hit(CXL_FAULT_COPY))
        return -EIO;
    return change(&job, copy_body, CXL_EVENT_COPY);
}

/* Within one guard, and without a look at anything between two pieces: of 64 KiB that takes a twentieth. */
static void copy_pieces_body(void *argument)
{
    transfer *job = argument;
    uint8_t *target = job->media->base + job->offset;
    const uint8_t *source = job->source;
    bool lines = job->media->granularity == CXL_GRANULARITY_LINE;
    for (uint64_t done = 0; done < job->length; done += job->piece)
        job->crcs[done / job->piece] = cxl_copy_out_crc(job->crcs[done / job->piece], target + done, source + done,
                                                        job->piece, lines);
}

int cxl_media_copy_crcs(cxl_media *media, uint64_t offset, const void *source, uint64_t piece, uint32_t count,
                        uint32_t *crcs)
{
    transfer job = {
        .media = media, .offset = offset, .source = source, .length = piece * count, .piece = piece, .crcs = crcs,
    };
    if (cxl_fault_hit(CXL_FAULT_COPY))
        return -EIO;
    return change(&job, copy_pieces_body, CXL_EVENT_COPY);
}

int cxl_media_copy_crc(cxl_media *media, uint64_t offset, const void *source, uint64_t length, uint32_t *crc)
{
    transfer job = {
        .media = media, .offset = offset, .source = source, .length = length, .crc = *crc, .with_crc = true,
    };
    if (cxl_fault_hit(CXL_FAULT_COPY))
        return -EIO;
    int result = change(&job, copy_body, CXL_EVENT_COPY);
    if (result == 0)
        *crc = job.crc;
    return result;
}

/* ------------------------------------------------------------------------------- loads */

static void read_body(void *argument)
{
    const transfer *job = argument;
    memcpy(job->target, job->media->base + job->offset, job->length);
}

static void load_word_body(void *argument)
{
    transfer *job = argument;
    const uint64_t *word = (const uint64_t *)(const void *)(job->media->base + job->offset);
    job->value = __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

static void crc_body(void *argument)
{
    transfer *job = argument;
    job->crc = cxl_table.crc32c(job->crc, job->media->base + job->offset, job->length);
}

static void read_crc_body(void *argument)
{
    transfer *job = argument;
    job->crc = cxl_copy_in_crc(job->crc, job->target, job->media->base + job->offset, job->length);
}

static int load(transfer *job, void (*body)(void *), uint64_t *fault_offset)
{
    int result = check_range(job->media, job->offset, job->length);
    if (result != 0 || job->length == 0)
        return result;
    return cxl_guarded(job->media->base, job->media->size, body, job, fault_offset);
}

/* For tests: what was just summed is not what lies there from now on. */
static void decay(const transfer *job)
{
    if (job->media->read_only || !cxl_fault_hit(CXL_FAULT_DECAY))
        return;
    for (uint64_t i = 0; i < job->length; i++)
        job->media->base[job->offset + i] ^= 1;
}

int cxl_media_read(cxl_media *media, uint64_t offset, void *target, uint64_t length, uint64_t *fault_offset)
{
    transfer job = {.media = media, .offset = offset, .target = target, .length = length};
    return load(&job, read_body, fault_offset);
}

int cxl_media_load_u64(cxl_media *media, uint64_t offset, uint64_t *value)
{
    transfer job = {.media = media, .offset = offset, .length = sizeof *value};
    if (offset % sizeof *value != 0)
        return -EINVAL;
    int result = load(&job, load_word_body, NULL);
    if (result == 0)
        *value = job.value;
    return result;
}

int cxl_media_crc(cxl_media *media, uint64_t offset, uint64_t length, uint32_t *crc, uint64_t *fault_offset)
{
    transfer job = {.media = media, .offset = offset, .length = length, .crc = *crc};
    int result = load(&job, crc_body, fault_offset);
    if (result == 0) {
        *crc = job.crc;
        decay(&job);
    }
    return result;
}

int cxl_media_read_crc(cxl_media *media, uint64_t offset, void *target, uint64_t length, uint32_t *crc,
                       uint64_t *fault_offset)
{
    transfer job = {.media = media, .offset = offset, .target = target, .length = length, .crc = *crc};
    int result = load(&job, read_crc_body, fault_offset);
    if (result == 0) {
        *crc = job.crc;
        decay(&job);
    }
    return result;
}
