/* library.h - what the files of the installed library share.
 *
 * Never: a symbol that begins with cxlfs_ and is not in cxlfs_client.h: those alone are seen outside.
 */
#ifndef CXLFS_LIBRARY_H
#define CXLFS_LIBRARY_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "client/client.h"
#include "library/cxlfs_client.h"

/* The name that cxlfs_replace has made, as long as it means the file. */
typedef struct {
    int directory;               /* where it is; -1: there was one before */
    int made;                    /* the file (O_PATH), so that its number does not come to mean another one */
    char *name;
} library_name;

struct cxlfs_file {
    int fd;
    int flags;                   /* of the open file description */
    int process;
    bool is_overwrite;           /* what was there before may come back */
    atomic_bool is_reverted;
    atomic_int error;            /* why nothing goes directly; 0: it may */
    cxl_direct_file *direct;     /* or NULL: through the kernel */
    library_name name;
    pthread_mutex_t lock;        /* of the position; first of the two */
    int64_t position;
    pthread_rwlock_t reader_lock;/* of the two below; for writing where they change */
    cxl_reader *reader;          /* or NULL: through the kernel */
    int64_t until_reader;        /* bytes to be read before the file is read directly */
};

/* The end of a function that sets errno: result, or -1 where that is -errno. */
int64_t library_result(int64_t result);
/* What an errno of the client says, for who writes programs. */
const char *library_reason(int error);

/* Remove the name as long as it means the file that was made. */
void library_name_remove(const library_name *name);
void library_name_end(library_name *name);

#endif
