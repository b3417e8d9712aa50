/* stream.c - a file of the library as a stream of the C library, which gathers small pieces.
 *
 * Never: knows what goes which way.
 */
#include <errno.h>
#include <stdlib.h>

#include "library/library.h"

enum { GATHER_BYTES = 1 << 20 };    /* from here on the requests of a write no longer show in its time */

/* glibc takes a negative count for bytes, and musl takes none for success. */
#ifdef __GLIBC__
enum { WRITE_FAILED = 0 };
#else
enum { WRITE_FAILED = -1 };
#endif

typedef struct {
    cxlfs_file *file;
    char buffer[GATHER_BYTES];
} cookie;

static ssize_t read_some(void *context, char *bytes, size_t length)
{
    return cxlfs_read(((cookie *)context)->file, bytes, length);
}

static ssize_t write_some(void *context, const char *bytes, size_t length)
{
    ssize_t taken = cxlfs_write(((cookie *)context)->file, bytes, length);
    return taken > 0 ? taken : WRITE_FAILED;
}

static int seek_to(void *context, off64_t *offset, int whence)
{
    int64_t place = cxlfs_seek(((cookie *)context)->file, *offset, whence);
    *offset = place >= 0 ? place : *offset;
    return place >= 0 ? 0 : -1;
}

static int end(void *context)
{
    cookie *ended = context;
    int result = cxlfs_close(ended->file);
    int error = errno;
    free(ended);
    errno = error;
    return result;
}

FILE *cxlfs_stream(cxlfs_file *file, const char *mode)
{
    cookie *made = malloc(sizeof *made);
    if (made == NULL)
        return NULL;
    made->file = file;
    cookie_io_functions_t functions = {.read = read_some, .write = write_some, .seek = seek_to, .close = end};
    FILE *stream = fopencookie(made, mode, functions);
    if (stream == NULL) {
        int error = errno;
        free(made);
        errno = error;
        return NULL;
    }
    (void)setvbuf(stream, made->buffer, _IOFBF, sizeof made->buffer);
    return stream;
}
