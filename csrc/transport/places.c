/* places.c - the processor that a worker runs on.
 *
 * Who waits for an answer and who gives it take turns. On one processor that is a switch from one thread to the
 * other; on two of them the one that has nothing to do halts meanwhile, and is woken by an interrupt: 3.4 against
 * 38 to 65 us for a question and an answer through pipes, two processors of a virtual machine that halt at once.
 * The kernel leaves two threads where they are, together or apart. So a worker that serves one thread alone goes
 * where that thread is; what other threads of the program have to do has the other processors.
 *
 * Never: binds a thread: where the kernel moves it after that is the kernel's business.
 *
 * Invariants
 * - Which processors a thread may run on is afterwards what it was before.
 */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "transport/transport.h"

enum { FIELDS_TO_PROCESSOR = 36 };  /* behind the state, which follows the name: field 39 of proc(5) */

/* Of a thread, as /proc tells; -1: it does not. */
static int processor_of(uint32_t thread)
{
    char text[1024];
    snprintf(text, sizeof(text), "/proc/%u/stat", thread);
    int fd = open(text, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t length = read(fd, text, sizeof(text) - 1);
    close(fd);
    if (length <= 0)
        return -1;
    text[length] = 0;
    const char *at = strrchr(text, ')');  /* the name may hold any character */
    for (int field = 0; at != NULL && field <= FIELDS_TO_PROCESSOR; field++)
        at = strchr(at + 1, ' ');
    return at == NULL ? -1 : atoi(at + 1);
}

bool place_beside(uint32_t thread)
{
    cpu_set_t allowed, there;
    int processor = processor_of(thread);
    if (processor < 0 || processor >= CPU_SETSIZE)
        return false;
    if (processor == sched_getcpu())
        return true;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || !CPU_ISSET((size_t)processor, &allowed))
        return false;
    CPU_ZERO(&there);
    CPU_SET((size_t)processor, &there);
    if (sched_setaffinity(0, sizeof(there), &there) != 0)
        return false;
    sched_setaffinity(0, sizeof(allowed), &allowed);
    return true;
}
