/* absent.c - names of which it is known that they mean nothing.
 *
 * Who saves one file after the other under a temporary name makes the name that his last rename took away. The
 * kernel asks for it first, as the rename has taken along what it knew of it, and the answer needs nobody but this:
 * a twentieth of such a save.
 *
 * Never: finds out by itself that a name is absent, nor that it is not any more.
 *
 * Invariants
 * - When a name was taken back nobody is being told that it is absent.
 */
#include <stdlib.h>
#include <string.h>

#include "transport/transport.h"

enum { NAME_BYTES_MAX = 255 };

typedef struct {
    uint64_t directory;
    size_t length;                /* 0: none */
    char bytes[NAME_BYTES_MAX];
} absent_name;

struct absent_names {
    pthread_mutex_t lock;         /* of the following */
    pthread_cond_t quiet;         /* telling became 0 */
    uint32_t telling;             /* answers that are being given */
    uint32_t next;                /* place of the oldest one */
    absent_name names[CXL_ABSENT_NAMES_MAX];
};

absent_names *absent_new(void)
{
    absent_names *a = cxl_allocate_zeroed(1, sizeof(*a));
    if (a == NULL)
        return NULL;
    pthread_mutex_init(&a->lock, NULL);
    pthread_cond_init(&a->quiet, NULL);
    return a;
}

void absent_free(absent_names *a)
{
    if (a == NULL)
        return;
    pthread_mutex_destroy(&a->lock);
    pthread_cond_destroy(&a->quiet);
    free(a);
}

/* With the lock: NULL: it is not known to be absent. */
static absent_name *find(absent_names *a, uint64_t directory, const char *name, size_t length)
{
    for (uint32_t i = 0; i < CXL_ABSENT_NAMES_MAX; i++) {
        absent_name *each = &a->names[i];
        if (each->length == length && each->directory == directory && memcmp(each->bytes, name, length) == 0)
            return each;
    }
    return NULL;
}

void absent_note(absent_names *a, uint64_t directory, const char *name, size_t length)
{
    if (length == 0 || length > NAME_BYTES_MAX)
        return;
    pthread_mutex_lock(&a->lock);
    if (find(a, directory, name, length) == NULL) {
        absent_name *oldest = &a->names[a->next++ % CXL_ABSENT_NAMES_MAX];
        oldest->directory = directory;
        oldest->length = length;
        memcpy(oldest->bytes, name, length);
    }
    pthread_mutex_unlock(&a->lock);
}

/* With the lock. */
static void wait_until_told(absent_names *a)
{
    while (a->telling != 0)
        pthread_cond_wait(&a->quiet, &a->lock);
}

void absent_take_back(absent_names *a, uint64_t directory, const char *name, size_t length)
{
    pthread_mutex_lock(&a->lock);
    absent_name *there = length == 0 ? NULL : find(a, directory, name, length);
    if (there != NULL)
        there->length = 0;
    wait_until_told(a);
    pthread_mutex_unlock(&a->lock);
}

void absent_take_all_back(absent_names *a)
{
    pthread_mutex_lock(&a->lock);
    for (uint32_t i = 0; i < CXL_ABSENT_NAMES_MAX; i++)
        a->names[i].length = 0;
    wait_until_told(a);
    pthread_mutex_unlock(&a->lock);
}

bool absent_begin(absent_names *a, const request *r)
{
    const char *name = (const char *)r->arguments;
    size_t length = strnlen(name, r->length);
    if (length == 0 || length == r->length)
        return false;
    pthread_mutex_lock(&a->lock);
    bool is_absent = find(a, r->header->inode, name, length) != NULL;
    a->telling += is_absent;
    pthread_mutex_unlock(&a->lock);
    return is_absent;
}

void absent_end(absent_names *a)
{
    pthread_mutex_lock(&a->lock);
    if (--a->telling == 0)
        pthread_cond_broadcast(&a->quiet);
    pthread_mutex_unlock(&a->lock);
}
