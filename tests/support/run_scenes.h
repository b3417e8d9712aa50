/* run_scenes.h - what all files of scenes use: bytes to write, and saying what a call answered. */
#ifndef RUN_SCENES_H
#define RUN_SCENES_H

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MIB = 1 << 20, BYTES = 3 * MIB + 12345 };

extern uint8_t *bytes;

/* With errno of what has failed; what succeeds leaves errno as it was. */
static inline void said(const char *what, long long result)
{
    int error = errno;
    printf("%s %lld", what, result);
    if (error != 0)
        printf(" %s", strerrorname_np(error));
    printf("\n");
    fflush(stdout);
    errno = 0;
}

static inline int make(const char *name, int flags)
{
    int fd = open(name, flags | O_CREAT, 0644);
    if (fd < 0)
        said(name, fd);
    return fd;
}

static inline void position(int fd)
{
    said("position", lseek(fd, 0, SEEK_CUR));
}

static inline void sum(const char *what, const uint8_t *data, size_t length)
{
    uint64_t value = 1469598103934665603;
    for (size_t i = 0; i < length; i++)
        value = (value ^ data[i]) * 1099511628211;
    said(what, (long long)(value >> 1));
}



/* One of run_rules.c, of run_processes.c; false: there is none of this name. */
bool play_rules(const char *name);
bool play_other(const char *name, char *program);

#endif
