/* splice.c - long answers: given to the kernel as pages, not as an address.
 *
 * For an answer that is written with writev(2) the kernel looks up the pages behind its address one at a
 * time; vmsplice(2) looks up many, and splice(2) hands them over. Two mounts side by side, two cores,
 * verified reads with one and with two programs, rate and processor time of the daemon: 1 MiB 1.17 and 1.08,
 * 0.78 and 0.87; 256 KiB 1.26 and 1.04, 0.82 and 0.90; 64 KiB 1.13 and 1.22, 0.89 and 0.79; 16 KiB 0.99 and
 * 0.91, 1.00 and 1.14: there the second system call costs what the first one saves. The other way, a WRITE
 * through a pipe, the kernel copies twice (transport.h).
 *
 * Never: copies a byte, leaves one in the pipe: what a failed call may have left goes with the pipe.
 *
 * A pipe has a slot for each page of an answer and one for its header, and the kernel wants the whole answer in
 * the pipe: a pipe of 1 MiB, which is what fs.pipe-max-size permits a daemon without CAP_SYS_RESOURCE (that of
 * any ordinary container), takes answers of up to 255 pages, and so none of 1 MiB. Where that is all there is,
 * the kernel is told at mounting to ask for 512 KiB at most (max_read; fuse/request_sizes.py): two such answers
 * through the pipe are a tenth faster than one that is written. A user whose pipes take up
 * fs.pipe-user-pages-soft gets pipes of two pages: answers are written then.
 *
 * Invariants
 * - The pipe holds pages only within pipe_reply, so no longer than the caller holds what they belong to.
 * - Where pipe_reply says no, nothing was answered, or the kernel has answered with an error what it could
 *   not take; then it takes no other answer for that request, which is no error (is_gone).
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include "transport/transport.h"

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* What data needs in a pipe: a page for the header, and each that data touches. */
static size_t room_for(const void *data, size_t length)
{
    size_t page = page_bytes();
    size_t begin = (size_t)((uintptr_t)data % page);
    return page + (begin + length + page - 1) / page * page;
}

void pipe_open(answer_pipe *p, size_t longest, size_t shortest)
{
    *p = (answer_pipe){.longest = longest, .shortest = shortest};
    if (shortest == 0 || pipe2(p->ends, O_CLOEXEC) != 0)
        return;
    size_t wanted = room_for((const void *)1, longest);
    while (fcntl(p->ends[1], F_SETPIPE_SZ, (int)wanted) < 0 && wanted > shortest)
        wanted /= 2;
    p->bytes = (size_t)fcntl(p->ends[1], F_GETPIPE_SZ);
}

void pipe_close(answer_pipe *p)
{
    if (p->bytes == 0)
        return;
    close(p->ends[0]);
    close(p->ends[1]);
    p->bytes = 0;
}

bool pipe_reply(answer_pipe *p, int fuse_fd, fuse_wire_reply *header, const void *data, size_t length)
{
    if (length < p->shortest || room_for(data, length) > p->bytes)
        return false;
    const ssize_t all = (ssize_t)(sizeof(*header) + length);
    const struct iovec parts[2] = {
        {header, sizeof(*header)},
        {(void *)(uintptr_t)data, length},
    };
    if (vmsplice(p->ends[1], parts, 2, SPLICE_F_NONBLOCK) == all && !cxl_fault_hit(CXL_FAULT_SPLICE) &&
        splice(p->ends[0], NULL, fuse_fd, NULL, (size_t)all, 0) == all)
        return true;
    pipe_close(p);
    pipe_open(p, p->longest, p->shortest);
    return false;
}
