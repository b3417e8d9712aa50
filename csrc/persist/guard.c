/* guard.c - turns a SIGBUS on guarded memory (poison, a file that shrank, a full disk behind a sparse
 * file) into -EIO, on the thread that took it.
 *
 * Never: swallows a signal that is not about guarded memory: it goes to the handler that was there
 * before, or kills the process as it would have.
 *
 * Invariants
 * - The handler reads one thread-local pointer, which lives in the static TLS block: reading it from a
 *   signal handler allocates nothing.
 * - The handler runs unmasked (SA_NODEFER), so that the jump out of it has no mask to restore and a
 *   guard costs no system call.
 */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>

#include "persist/persist.h"

typedef struct guard {
    jmp_buf resume;
    uintptr_t base;
    uint64_t size;
    volatile uint64_t fault_offset;     /* set between the two returns of setjmp */
    struct guard *outer;
} guard;

static _Thread_local guard *innermost __attribute__((tls_model("initial-exec")));
/* Depth of foreign signals being handed on by this thread; see hand_on. */
static _Thread_local int handing_on __attribute__((tls_model("initial-exec")));

static pthread_mutex_t install_lock = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction previous;

static void die_of(int signal_number)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = SIG_DFL;
    sigaction(signal_number, &action, NULL);
    raise(signal_number);
}

/* A mark in the bytes behind what the kernel tells of a signal, which it clears for each delivery. */
static uint64_t *mark_of(siginfo_t *info)
{
    return (uint64_t *)(void *)((char *)info + sizeof *info - sizeof(uint64_t));
}

static const uint64_t HANDED_ON = UINT64_C(0x63786c667373);

/* A handler that was there before may itself remember ours as its predecessor. It may hand the signal back (then the
 * delivery is marked), or raise it again (faulthandler does): either ends the process instead of turning in circles. A
 * fault of its own begins anew: the handler before may have jumped away, as ours does. */
static void hand_on(int signal_number, siginfo_t *info, void *context)
{
    if (*mark_of(info) == HANDED_ON) {
        die_of(signal_number);
        return;
    }
    bool has_handler = (previous.sa_flags & SA_SIGINFO) != 0 || previous.sa_handler != SIG_DFL;
    if (info->si_code > 0)
        handing_on = 0;
    if (handing_on > 0 || !has_handler) {
        die_of(signal_number);
        return;
    }
    if ((previous.sa_flags & SA_SIGINFO) == 0 && previous.sa_handler == SIG_IGN) {
        if (info->si_code > 0)      /* a fault cannot be ignored: the instruction would repeat */
            die_of(signal_number);
        return;
    }
    handing_on++;
    *mark_of(info) = HANDED_ON;
    if ((previous.sa_flags & SA_SIGINFO) != 0)
        previous.sa_sigaction(signal_number, info, context);
    else
        previous.sa_handler(signal_number);
    *mark_of(info) = 0;
    handing_on--;
}

static bool is_access_fault(const siginfo_t *info)
{
    return info->si_code == BUS_ADRERR || info->si_code == BUS_OBJERR || info->si_code == BUS_MCEERR_AR;
}

static void on_bus_error(int signal_number, siginfo_t *info, void *context)
{
    if (info == NULL)       /* a handler of the program hands on what it was not told: it goes on by itself */
        return;
    if (is_access_fault(info)) {
        uintptr_t address = (uintptr_t)info->si_addr;
        for (guard *entry = innermost; entry != NULL; entry = entry->outer) {
            if (address < entry->base || address - entry->base >= entry->size)
                continue;
            entry->fault_offset = address - entry->base;
            _longjmp(entry->resume, 1);
        }
    }
    hand_on(signal_number, info, context);
}

int cxl_guard_install(void)
{
    struct sigaction action, current;
    int result = 0;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    pthread_mutex_lock(&install_lock);
    if (sigaction(SIGBUS, NULL, &current) != 0) {
        result = -errno;
    } else if ((current.sa_flags & SA_SIGINFO) == 0 || current.sa_sigaction != on_bus_error) {
        previous = current;
        if (sigaction(SIGBUS, &action, NULL) != 0)
            result = -errno;
    }
    pthread_mutex_unlock(&install_lock);
    return result;
}

int cxl_guarded(const void *base, uint64_t size, void (*body)(void *), void *argument,
                uint64_t *fault_offset)
{
    guard entry;
    entry.base = (uintptr_t)base;
    entry.size = size;
    entry.fault_offset = 0;
    entry.outer = innermost;
    if (_setjmp(entry.resume) != 0) {
        innermost = entry.outer;
        if (fault_offset != NULL)
            *fault_offset = entry.fault_offset;
        return -EIO;
    }
    innermost = &entry;
    atomic_signal_fence(memory_order_seq_cst);
    body(argument);
    atomic_signal_fence(memory_order_seq_cst);
    innermost = entry.outer;
    return 0;
}
