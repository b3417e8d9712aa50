/* faults.c - turns a fault of a copy into "the kernel is to do it".
 *
 * A program may give write(2) an address that nobody can read, or unmap it meanwhile: the kernel says EFAULT, and no
 * signal comes. A medium may fail. So SIGSEGV and SIGBUS are handled here, from before main() on, unless somebody else
 * handles them then or later: programs that do write through the kernel.
 *
 * Invariants
 * - The handlers are put in place once, before the program runs, and never again: no handler of the program is lost.
 * - A fault of anything but a guarded copy ends the process as it would have without them.
 */
#include <signal.h>
#include <string.h>

#include "run/run.h"

_Thread_local sigjmp_buf *run_guard __attribute__((tls_model("initial-exec")));

/* As the kernel has it, which asks for less stack than libc's. */
typedef struct {
    void (*handler)(int, siginfo_t *, void *);
    unsigned long flags;
    void (*restorer)(void);
    uint64_t mask;
} kernel_action;

static const int HANDLED[] = {SIGSEGV, SIGBUS};

static void on_fault(int number, siginfo_t *info, void *context)
{
    (void)context;
    if (info == NULL)       /* a handler of the program hands on what it was not told: it goes on by itself */
        return;
    if (run_guard != NULL && info->si_code > 0)
        siglongjmp(*run_guard, 1);
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = SIG_DFL;
    (void)sigaction(number, &action, NULL);
    if (info->si_code <= 0)         /* somebody sent it: a fault comes again by itself */
        (void)syscall(SYS_rt_tgsigqueueinfo, getpid(), syscall(SYS_gettid), number, info);
}

void run_faults_begin(void)
{
    struct sigaction action, before;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    for (size_t i = 0; i < sizeof HANDLED / sizeof *HANDLED; i++) {
        if (sigaction(HANDLED[i], NULL, &before) == 0 && (before.sa_flags & SA_SIGINFO) == 0 &&
            before.sa_handler == SIG_DFL)
            (void)sigaction(HANDLED[i], &action, NULL);
    }
}

bool run_faults_are_ours(uint64_t blocked)
{
    for (size_t i = 0; i < sizeof HANDLED / sizeof *HANDLED; i++) {
        kernel_action now;
        if ((blocked >> (HANDLED[i] - 1) & 1) != 0 ||
            syscall(SYS_rt_sigaction, HANDLED[i], NULL, &now, sizeof now.mask) != 0 || now.handler != on_fault)
            return false;
    }
    return true;
}

bool run_guarded(bool (*body)(void *), void *argument)
{
    sigjmp_buf resume;
    if (sigsetjmp(resume, 0) != 0) {
        run_guard = NULL;
        return false;
    }
    run_guard = &resume;
    atomic_signal_fence(memory_order_seq_cst);
    bool result = body(argument);
    atomic_signal_fence(memory_order_seq_cst);
    run_guard = NULL;
    return result;
}
