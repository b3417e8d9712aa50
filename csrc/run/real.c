/* real.c - the functions that stand behind this library, and its own beginning.
 *
 * Never: decides anything about a descriptor.
 *
 * Invariants
 * - Whoever is called before the constructor resolves them: constructors of other libraries may run before.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include "run/run.h"

run_functions run_real;
run_settings run_set;
_Thread_local int run_depth __attribute__((tls_model("initial-exec")));
pid_t run_process;

void run_resolve(void)
{
#define RUN_LOOK_UP(name) *(void **)&run_real.name = dlsym(RTLD_NEXT, #name);
    RUN_FUNCTIONS(RUN_LOOK_UP)
#undef RUN_LOOK_UP
}

bool run_enter(run_visit *visit)
{
    if (run_depth != 0)
        return false;
    visit->saved_errno = errno;
    run_depth = 1;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &visit->cancel_state);
    return true;
}

void run_leave(const run_visit *visit)
{
    int ignored;
    pthread_setcancelstate(visit->cancel_state, &ignored);
    run_depth = 0;
    errno = visit->saved_errno;
}

static bool is_set_to(const char *name, const char *word)
{
    const char *value = getenv(name);
    return value != NULL && strcmp(value, word) == 0;
}

static bool is_off(const char *name)
{
    return is_set_to(name, "off") || is_set_to(name, "0");
}

static void in_child(void)
{
    run_process = getpid();
    run_depth = 0;
    run_forget_in_child();
    run_mapping_forget_in_child();
    run_report_forget_in_child();
}

__attribute__((constructor)) static void begin(void)
{
    run_resolve();
    run_process = getpid();
    run_set.off = is_off("CXLFS_RUN");
    run_set.maps = !is_off("CXLFS_RUN_MMAP");
    run_set.reads = !is_off("CXLFS_RUN_READ");
    run_set.verifies = !is_off("CXLFS_RUN_VERIFY");
    run_set.verifies_always = is_set_to("CXLFS_RUN_VERIFY", "always");
    run_report_begin();
    if (pthread_atfork(NULL, NULL, in_child) != 0)
        run_set.off = true;
}

__attribute__((destructor)) static void end(void)
{
    run_report_end();
}
