/* places.c - the processor that a worker runs on, and whether it stays there together with whom it answers.
 *
 * Who waits for an answer and who gives it take turns. On one processor that is a switch from one thread to the
 * other; on two of them the one that has nothing to do halts meanwhile, and is woken by an interrupt: 3.4 against
 * 38 to 65 us for a question and an answer through pipes, two processors of a virtual machine that halt at once.
 * The kernel leaves two threads where they are, together or apart. So a worker that serves one thread alone goes
 * where that thread is, or leaves its processor, whichever is quicker (trial.c); what other threads of the program
 * have to do has the other processors.
 *
 * The answer parts them again: who waits for it is woken on an idle processor, as its own one is busy with the very
 * worker that wakes it, and when the worker follows, the processor that it has just left is the idle one. So it gives
 * the answer in the background (SCHED_IDLE): a processor that has nothing but such threads counts as idle, so that the
 * other one stays, and goes on at once. 3.4 us for both changes.
 *
 * In the background a thread has hardly any part of a processor that others want. So this is done for the one system
 * call of the answer, without a lock, only while the machine has a processor for each thread that wants one, and
 * somebody watches who is back in a millisecond or two (turns.c). Coming back from there is a privilege (CAP_SYS_NICE,
 * RLIMIT_NICE), which is tried before anything depends on it.
 *
 * Never: binds a thread: where the kernel moves it after that is the kernel's business.
 *
 * Invariants
 * - Which processors a thread may run on is afterwards what it was before.
 * - Only a thread of the ordinary class (SCHED_OTHER) goes to the background, and is of that class afterwards.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "transport/transport.h"

enum { FIELDS_TO_PROCESSOR = 36 };  /* behind the state, which follows the name: field 39 of proc(5) */

static const struct sched_param no_priority = {0};

/* The text of a small file, ended by a zero; false: there is none. */
static bool read_text(const char *path, char *text, size_t room)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t length = read(fd, text, room - 1);
    close(fd);
    text[length > 0 ? length : 0] = 0;
    return length > 0;
}

/* Of a thread, as /proc tells; -1: it does not. */
static int processor_of(uint32_t thread)
{
    char path[64], text[1024];
    snprintf(path, sizeof(path), "/proc/%u/stat", thread);
    if (!read_text(path, text, sizeof(text)))
        return -1;
    char *at = strrchr(text, ')');  /* the name may hold any character */
    for (int field = 0; at != NULL && field <= FIELDS_TO_PROCESSOR; field++)
        at = strchr(at + 1, ' ');
    return at == NULL ? -1 : atoi(at + 1);
}

/* To one of these, of those that are allowed: bound there for a moment. */
static bool go_to(const cpu_set_t *there, const cpu_set_t *allowed)
{
    if (CPU_COUNT(there) == 0 || sched_setaffinity(0, sizeof(*there), there) != 0)
        return false;
    sched_setaffinity(0, sizeof(*allowed), allowed);
    return true;
}

bool place_beside(uint32_t thread, bool *moved)
{
    cpu_set_t allowed, there;
    *moved = false;
    int processor = processor_of(thread);
    if (processor < 0 || processor >= CPU_SETSIZE)
        return false;
    if (processor == sched_getcpu())
        return true;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0)
        return false;
    CPU_ZERO(&there);
    if (CPU_ISSET((size_t)processor, &allowed))
        CPU_SET((size_t)processor, &there);
    *moved = go_to(&there, &allowed);
    return *moved;
}

void place_away(uint32_t thread)
{
    cpu_set_t allowed, there;
    int processor = processor_of(thread);
    if (processor < 0 || processor != sched_getcpu() || sched_getaffinity(0, sizeof(allowed), &allowed) != 0)
        return;
    there = allowed;
    CPU_CLR((size_t)processor, &there);
    (void)go_to(&there, &allowed);
}

bool place_is_roomy(void)
{
    char text[128];
    if (!read_text("/proc/loadavg", text, sizeof(text)))
        return false;
    /* "0.20 0.18 0.12 1/80 11206": so many that run or want to, the caller one of them, of 80. */
    char *at = strchr(text, '/');
    while (at != NULL && at > text && at[-1] != ' ')
        at--;
    return at != NULL && atol(at) <= sysconf(_SC_NPROCESSORS_ONLN);
}

bool place_step_back(void)
{
    return sched_getscheduler(0) == SCHED_OTHER && sched_setscheduler(0, SCHED_IDLE, &no_priority) == 0;
}

int place_come_back(pid_t thread)
{
    return sched_setscheduler(thread, SCHED_OTHER, &no_priority);
}

static void *go_there_and_back(void *is_back)
{
    *(bool *)is_back = place_step_back() && place_come_back(0) == 0;
    return NULL;
}

bool place_may_step_back(void)
{
    pthread_t thread;
    bool is_back = false;
    if (pthread_create(&thread, NULL, go_there_and_back, &is_back) != 0)
        return false;
    pthread_join(thread, NULL);
    return is_back;
}
