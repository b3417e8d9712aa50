/* recorder.c - the log of stores, write-backs and fences from which tests make crash images.
 *
 * Never: runs unless a test switched it on; looks at the media itself (payloads come from the source).
 *
 * Invariants
 * - An entry is complete or absent; entries stand in the order in which the media changed, because
 *   the lock is held over both.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "persist/persist.h"

enum { FIRST_CAPACITY = 1 << 16 };

_Static_assert(sizeof(cxl_event) == 24, "readers of the log rely on it");

int cxl_recorder_init(cxl_recorder *recorder)
{
    memset(recorder, 0, sizeof *recorder);
    return -pthread_mutex_init(&recorder->lock, NULL);
}

void cxl_recorder_destroy(cxl_recorder *recorder)
{
    free(recorder->log);
    pthread_mutex_destroy(&recorder->lock);
}

static int make_room(cxl_recorder *recorder, uint64_t payload_length)
{
    uint64_t needed = recorder->length + sizeof(cxl_event) + (payload_length + 7) / 8 * 8;
    uint64_t capacity = recorder->capacity != 0 ? recorder->capacity : FIRST_CAPACITY;
    while (capacity < needed)
        capacity *= 2;
    if (capacity == recorder->capacity)
        return 0;
    void *log = realloc(recorder->log, capacity);
    if (log == NULL)
        return -ENOMEM;
    recorder->log = log;
    recorder->capacity = capacity;
    return 0;
}

int cxl_recorder_begin(cxl_recorder *recorder, uint64_t payload_length, bool *held)
{
    *held = false;
    if (!atomic_load_explicit(&recorder->on, memory_order_relaxed))
        return 0;
    pthread_mutex_lock(&recorder->lock);
    if (!atomic_load(&recorder->on)) {
        pthread_mutex_unlock(&recorder->lock);
        return 0;
    }
    int result = make_room(recorder, payload_length);
    if (result != 0) {
        pthread_mutex_unlock(&recorder->lock);
        return result;
    }
    *held = true;
    return 0;
}

void cxl_recorder_end(cxl_recorder *recorder, int result, uint32_t kind, uint64_t offset,
                      uint64_t length, const void *payload)
{
    if (result == 0) {
        cxl_event event = {
            .kind = kind, .thread = (uint32_t)syscall(SYS_gettid), .offset = offset, .length = length,
        };
        memcpy(recorder->log + recorder->length, &event, sizeof event);
        recorder->length += sizeof event;
        if (payload != NULL) {
            memcpy(recorder->log + recorder->length, payload, length);
            memset(recorder->log + recorder->length + length, 0, -length & 7);
            recorder->length += (length + 7) / 8 * 8;
        }
    }
    pthread_mutex_unlock(&recorder->lock);
}

int cxl_media_record(cxl_media *media, int on)
{
    cxl_recorder *recorder = &media->recorder;
    pthread_mutex_lock(&recorder->lock);
    if (on)
        recorder->length = 0;
    atomic_store(&recorder->on, on != 0);
    pthread_mutex_unlock(&recorder->lock);
    return 0;
}

int cxl_media_record_mark(cxl_media *media, uint64_t tag)
{
    bool held;
    int result = cxl_recorder_begin(&media->recorder, 0, &held);
    if (held)
        cxl_recorder_end(&media->recorder, result, CXL_EVENT_MARK, tag, 0, NULL);
    return result;
}

int cxl_media_record_view(cxl_media *media, const void **log, uint64_t *length)
{
    cxl_recorder *recorder = &media->recorder;
    pthread_mutex_lock(&recorder->lock);
    *log = recorder->log;
    *length = recorder->length;
    pthread_mutex_unlock(&recorder->lock);
    return 0;
}
