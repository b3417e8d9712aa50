/* chains.c - handlers of SIGBUS that hand on to each other, and a fault that belongs to nobody. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <signal.h>

#include "persist/persist.h"

static struct sigaction before;

static void hand_back(int number, siginfo_t *info, void *context)
{
    if ((before.sa_flags & SA_SIGINFO) != 0)
        before.sa_sigaction(number, info, context);
}

int main(void)
{
    struct sigaction action = {.sa_sigaction = hand_back, .sa_flags = SA_SIGINFO | SA_NODEFER};
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    if (cxl_guard_install() != 0 || sigaction(SIGBUS, &action, &before) != 0 || cxl_guard_install() != 0)
        return 2;
    FILE *empty = tmpfile();
    if (empty == NULL)
        return 2;
    volatile uint8_t *page = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fileno(empty), 0);
    return page[0];
}
