/* process.c - where one process becomes two, or another program, or ends.
 *
 * Never: keeps anything of the parent in a child: it goes on through the kernel with what it inherited.
 *
 * Invariants
 * - What was stored is settled before somebody else may have the descriptor. Whoever looks at the file would see it
 *   without that, too: the daemon takes over what was stored whenever anybody looks.
 * - The child of a vfork runs in the memory of its parent, and changes nothing of it (run_process).
 */
#include <stdarg.h>
#include <stdlib.h>
#include <unistd.h>

#include "run/run.h"

RUN_EXPORT pid_t fork(void)
{
    run_settle_all();
    run_report_before_fork();
    return REAL(fork)();
}

/* vfork returns twice into its caller, so that nothing may stand between them: settle, and jump there. (Through x16
 * where an Arm64 kernel guards branches: any other register may go to landing pads of jumps alone.) */
__attribute__((used)) static void *before_vfork(void)
{
    run_settle_all();
    return (void *)REAL(vfork);
}

#if defined(__x86_64__)
__asm__(".pushsection .text\n.globl vfork\n.type vfork, @function\nvfork:\n"
        "endbr64\nsubq $8, %rsp\ncall before_vfork\naddq $8, %rsp\njmp *%rax\n"
        ".size vfork, . - vfork\n.popsection\n");
#elif defined(__aarch64__)
__asm__(".pushsection .text\n.globl vfork\n.type vfork, %function\nvfork:\n"
        "stp x29, x30, [sp, #-16]!\nbl before_vfork\nldp x29, x30, [sp], #16\nmov x16, x0\nbr x16\n"
        ".size vfork, . - vfork\n.popsection\n");
#endif

RUN_EXPORT int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                           const posix_spawnattr_t *attributes, char *const arguments[], char *const environment[])
{
    run_settle_all();
    return REAL(posix_spawn)(pid, path, actions, attributes, arguments, environment);
}

RUN_EXPORT int posix_spawnp(pid_t *pid, const char *file, const posix_spawn_file_actions_t *actions,
                            const posix_spawnattr_t *attributes, char *const arguments[], char *const environment[])
{
    run_settle_all();
    return REAL(posix_spawnp)(pid, file, actions, attributes, arguments, environment);
}

RUN_EXPORT int system(const char *command)
{
    run_settle_all();
    return REAL(system)(command);
}

RUN_EXPORT FILE *popen(const char *command, const char *mode)
{
    run_settle_all();
    return REAL(popen)(command, mode);
}

/* ----------------------------------------------------------------------------------- exec */

static void before_exec(void)
{
    run_settle_all();
    run_report_end();
}

RUN_EXPORT int execve(const char *path, char *const arguments[], char *const environment[])
{
    before_exec();
    return REAL(execve)(path, arguments, environment);
}

RUN_EXPORT int execv(const char *path, char *const arguments[])
{
    before_exec();
    return REAL(execv)(path, arguments);
}

RUN_EXPORT int execvp(const char *file, char *const arguments[])
{
    before_exec();
    return REAL(execvp)(file, arguments);
}

RUN_EXPORT int execvpe(const char *file, char *const arguments[], char *const environment[])
{
    before_exec();
    return REAL(execvpe)(file, arguments, environment);
}

RUN_EXPORT int fexecve(int fd, char *const arguments[], char *const environment[])
{
    before_exec();
    return REAL(fexecve)(fd, arguments, environment);
}

RUN_EXPORT int execveat(int directory, const char *path, char *const arguments[], char *const environment[], int flags)
{
    before_exec();
    return REAL(execveat)(directory, path, arguments, environment, flags);
}

/* Arguments one by one, ended by NULL, as an array on the stack; what follows them stays in rest. */
#define LISTED(first, call)                                                                                           \
    va_list rest;                                                                                                     \
    size_t count = 1;                                                                                                 \
    va_start(rest, first);                                                                                            \
    for (const char *argument = first; argument != NULL; argument = va_arg(rest, const char *))                       \
        count++;                                                                                                      \
    va_end(rest);                                                                                                     \
    char *arguments[count];                                                                                           \
    va_start(rest, first);                                                                                            \
    arguments[0] = (char *)first;                                                                                     \
    for (size_t i = 1; i < count; i++)                                                                                \
        arguments[i] = va_arg(rest, char *);                                                                          \
    int result = call;                                                                                                \
    va_end(rest);                                                                                                     \
    return result

RUN_EXPORT int execl(const char *path, const char *first, ...)
{
    LISTED(first, execv(path, arguments));
}

RUN_EXPORT int execlp(const char *file, const char *first, ...)
{
    LISTED(first, execvp(file, arguments));
}

RUN_EXPORT int execle(const char *path, const char *first, ...)
{
    LISTED(first, execve(path, arguments, va_arg(rest, char *const *)));
}

/* ---------------------------------------------------------------------------------- exit */

RUN_EXPORT void _exit(int status)
{
    run_report_end();
    REAL(_exit)(status);
    __builtin_unreachable();
}

RUN_EXPORT void _Exit(int status)
{
    _exit(status);
}
