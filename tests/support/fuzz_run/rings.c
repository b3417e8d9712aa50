/* rings.c - steps through io_uring and libaio, by system calls alone: nothing of them passes through libc. */
#include <linux/aio_abi.h>
#include <linux/io_uring.h>

#include "fuzz.h"

/* --------------------------------------------------------------------------------- io_uring */

typedef struct {
    int fd;
    struct io_uring_params about;
    uint8_t *queue;
    struct io_uring_sqe *entries;
    size_t queue_bytes, entries_bytes;
} ring;

static bool open_ring(ring *one)
{
    one->about = (struct io_uring_params){0};
    one->fd = (int)syscall(SYS_io_uring_setup, 4, &one->about);
    if (one->fd < 0)
        return false;
    size_t first = one->about.sq_off.array + one->about.sq_entries * sizeof(uint32_t);
    size_t second = one->about.cq_off.cqes + one->about.cq_entries * sizeof(struct io_uring_cqe);
    one->queue_bytes = first > second ? first : second;
    one->entries_bytes = one->about.sq_entries * sizeof(struct io_uring_sqe);
    one->queue = mmap(NULL, one->queue_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, one->fd, IORING_OFF_SQ_RING);
    one->entries = mmap(NULL, one->entries_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, one->fd, IORING_OFF_SQES);
    return one->queue != MAP_FAILED && (void *)one->entries != MAP_FAILED;
}

static long submit(ring *one, const struct io_uring_sqe *entry)
{
    uint32_t *tail = (uint32_t *)(one->queue + one->about.sq_off.tail);
    uint32_t *array = (uint32_t *)(one->queue + one->about.sq_off.array);
    uint32_t *head = (uint32_t *)(one->queue + one->about.cq_off.head);
    struct io_uring_cqe *answers = (struct io_uring_cqe *)(one->queue + one->about.cq_off.cqes);
    uint32_t mask = *(uint32_t *)(one->queue + one->about.sq_off.ring_mask), at = *tail & mask;
    one->entries[at] = *entry;
    array[at] = at;
    __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
    while (syscall(SYS_io_uring_enter, one->fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0 && errno == EINTR)
        ;
    uint32_t answered = *head & *(uint32_t *)(one->queue + one->about.cq_off.ring_mask);
    long result = answers[answered].res;
    __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
    return result;
}

static void close_ring(ring *one)
{
    munmap(one->queue, one->queue_bytes);
    munmap(one->entries, one->entries_bytes);
    syscall(SYS_close, one->fd);
}

static void play_uring(void)
{
    slot *one = pick();
    ring it;
    size_t length = a_length();
    unsigned way = below(4);
    off_t offset = an_offset();         /* the position is not moved by what completes later, as with O_DIRECT */
    struct io_uring_sqe entry = {.fd = one->fd, .len = (uint32_t)length, .off = (uint64_t)offset};
    entry.opcode = way == 3 ? IORING_OP_READ : IORING_OP_WRITE;
    entry.addr = (uint64_t)(uintptr_t)(way == 3 ? target : some_bytes(length));
    entry.rw_flags = way == 2 ? RWF_APPEND : 0;
    if (!open_ring(&it)) {
        say("none: %ld", answer(-1));
        return;
    }
    long result = submit(&it, &entry);
    close_ring(&it);
    if (way != 3)
        changed(one->file);
    say("way %u, %zu at %lld = %ld, sum %llx", way, length, (long long)offset, result,
        way == 3 && result > 0 ? (unsigned long long)sum_of(target, (size_t)result) : 0);
}

/* ----------------------------------------------------------------------------------- libaio */

/* One for each process: to give it back takes the kernel 30 ms. */
static long open_context(aio_context_t *context)
{
    static aio_context_t own;
    static pid_t owner;
    if (owner != getpid()) {
        own = 0;
        if (syscall(SYS_io_setup, 4, &own) != 0)
            return -1;
        owner = getpid();
    }
    *context = own;
    return 0;
}

static void play_aio(void)
{
    slot *one = pick();
    aio_context_t context;
    size_t length = a_length();
    unsigned way = below(4);
    off_t offset = an_offset();
    struct iocb request = {.aio_fildes = (uint32_t)one->fd, .aio_nbytes = length, .aio_offset = offset};
    request.aio_lio_opcode = way == 3 ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
    request.aio_buf = (uint64_t)(uintptr_t)(way == 3 ? target : some_bytes(length));
    request.aio_rw_flags = way == 2 ? RWF_APPEND : 0;
    struct iocb *list[] = {&request};
    struct io_event event = {0};
    if (open_context(&context) != 0) {
        say("none: %ld", answer(-1));
        return;
    }
    long submitted = answer(syscall(SYS_io_submit, context, 1, list)), got = 0;
    while (submitted == 1 && (got = syscall(SYS_io_getevents, context, 1, 1, &event, NULL)) < 0 && errno == EINTR)
        ;                                   /* the end of an io_uring interrupts it, without a signal */
    long result = got == 1 ? (long)event.res : got;
    if (way != 3)
        changed(one->file);
    say("way %u, %zu at %lld = %ld, %ld, sum %llx", way, length, (long long)offset, submitted, result,
        way == 3 && result > 0 ? (unsigned long long)sum_of(target, (size_t)result) : 0);
}

const kind ring_kinds[] = {
    {"uring", 3, play_uring, SAVES},
    {"aio", 2, play_aio, SAVES},
    {NULL, 0, NULL, ALONE},
};
