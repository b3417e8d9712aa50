/* run_forbidding.c - a library whose memory and locks cannot be had while forbidden is set: to be preloaded behind
 * what `cxlfs run` preloads. A call then ends the process.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

atomic_int forbidden;

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *pointer, size_t size);
extern void __libc_free(void *pointer);

static void check(void)
{
    static const char TEXT[] = "called within write\n";
    if (atomic_exchange(&forbidden, 0) != 0) {
        (void)!write(2, TEXT, sizeof TEXT - 1);
        abort();
    }
}

void *malloc(size_t size)
{
    check();
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    check();
    return __libc_calloc(count, size);
}

void *realloc(void *pointer, size_t size)
{
    check();
    return __libc_realloc(pointer, size);
}

void free(void *pointer)
{
    check();
    __libc_free(pointer);
}

/* Nobody else locks anything in the programs that this is for. */
int pthread_mutex_lock(pthread_mutex_t *mutex)
{
    (void)mutex;
    check();
    return 0;
}
