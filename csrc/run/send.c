/* send.c - sendfile into a file of a mount: read from the one descriptor, stored through the other. Copies of whole
 * files are made so (shutil.copyfile, and whatever moves a file here from elsewhere).
 *
 * Never: changes what the kernel would have answered, but for a count that is short: callers go on from there.
 *
 * Invariants
 * - Before the first byte is stored all of it can still be the kernel's; after it, what is not stored is not read.
 * - The offset of the source moves by what was stored, and at the end, as in the kernel.
 */
#include "run/run.h"

enum { SEND_FROM = 256 << 10 };      /* less is the kernel's: it comes in pieces that are not worth it */
enum { SEND_BYTES = 1 << 20 };       /* read at a time */

/* Of a regular file into another one. */
static bool is_copying(int out, int in)
{
    struct statx to, from;
    unsigned wanted = STATX_TYPE | STATX_INO;
    if (statx(in, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, wanted, &from) != 0 || !S_ISREG(from.stx_mode))
        return false;
    return statx(out, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, wanted, &to) == 0 &&
           (to.stx_ino != from.stx_ino || run_device_of(&to) != run_device_of(&from));
}

/* What stands at an address of the program's, which may be a bad one. */
static bool look_up(const off64_t *address, off64_t *value)
{
    struct iovec target = {value, sizeof *value}, source = {(void *)address, sizeof *value};
    return process_vm_readv(getpid(), &target, 1, &source, 1, 0) == (ssize_t)sizeof *value;
}

/* Bytes sent, as far as that went. */
static size_t send_through(int out, int in, off64_t from, size_t count, uint8_t *buffer)
{
    size_t total = 0;
    while (total < count) {
        size_t wanted = count - total < SEND_BYTES ? count - total : SEND_BYTES;
        ssize_t got = REAL(pread64)(in, buffer, wanted, from + (off64_t)total), stored;
        if (got <= 0)
            break;
        struct iovec piece = {buffer, (size_t)got};
        if (!run_write(out, &piece, 1, RUN_POSITION, &stored) || stored <= 0)
            break;
        total += (size_t)stored;
        if (stored < got)
            break;
    }
    return total;
}

bool run_send(int out, int in, off64_t *offset, size_t count, ssize_t *done)
{
    enum { KERNEL_BYTES_MAX = 0x7ffff000 };
    int saved = errno;
    off64_t from = -1;
    if (count >= SEND_FROM && is_copying(out, in) && (offset == NULL || !look_up(offset, &from)))
        from = offset == NULL ? REAL(lseek64)(in, 0, SEEK_CUR) : -1;
    if (from < 0) {
        errno = saved;
        return false;
    }
    uint8_t *buffer = REAL(mmap64)(NULL, SEND_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer == MAP_FAILED) {
        errno = saved;
        return false;
    }
    size_t total = send_through(out, in, from, count < KERNEL_BYTES_MAX ? count : KERNEL_BYTES_MAX, buffer);
    REAL(munmap)(buffer, SEND_BYTES);
    if (total > 0 && offset != NULL)
        *offset = from + (off64_t)total;
    else if (total > 0)
        (void)REAL(lseek64)(in, from + (off64_t)total, SEEK_SET);
    errno = saved;
    *done = (ssize_t)total;
    return total > 0;
}
