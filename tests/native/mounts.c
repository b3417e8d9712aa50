/* mounts.c - says who owns the mount of a device, by a table of mounts on standard input. Arguments: major, minor. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/sysmacros.h>

#include "client/parts.h"

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    unsigned high = (unsigned)strtoul(argv[1], NULL, 10), low = (unsigned)strtoul(argv[2], NULL, 10);
    printf("%" PRId64, mount_owner(0, makedev(high, low)));
    return 0;
}
