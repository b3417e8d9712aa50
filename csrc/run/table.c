/* table.c - which descriptors of the process are of which open file description.
 *
 * Never: moves bytes; asks the daemon anything but to settle and to end.
 *
 * Invariants
 * - A slot changes from a file to something else under that file's lock, held for writing.
 * - Files come from one array and go back to it: taking the lock of one that ended is harmless.
 */
#include <fcntl.h>
#include <string.h>
#include <sys/resource.h>

#include "run/run.h"

enum { FILES = 4096 };

_Atomic(uintptr_t) run_slots[RUN_DESCRIPTORS];

static run_file files[FILES];
static uint32_t files_used;
static run_file *files_free;
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int highest = -1;

int run_highest(void)
{
    return atomic_load(&highest);
}

static void set_slot(int fd, uintptr_t value)
{
    int known = atomic_load(&highest);
    while (value != RUN_NOBODY && fd > known && !atomic_compare_exchange_weak(&highest, &known, fd))
        ;
    atomic_store_explicit(&run_slots[fd], value, memory_order_release);
}

/* --------------------------------------------------------------------------------- files */

static run_file *new_file(void)
{
    run_file *file = files_free;
    if (file != NULL) {
        files_free = file->next_free;
    } else if (files_used < FILES) {
        file = &files[files_used++];
        if (pthread_rwlock_init(&file->lock, NULL) != 0)
            return NULL;
    } else {
        return NULL;
    }
    file->direct = NULL;
    file->reader = NULL;
    file->reads = false;
    file->refused = false;
    file->anchor = -1;
    file->process = run_process;
    file->descriptors = 1;
    atomic_store(&file->dirty, false);
    atomic_store(&file->seen, 0);
    return file;
}

static void free_file(run_file *file)
{
    file->next_free = files_free;
    files_free = file;
}

/* A descriptor that nobody looked at: now it is known what it is. */
static void examine(int fd)
{
    uintptr_t expected = RUN_FRESH;
    pthread_mutex_lock(&table_lock);
    if (run_slot(fd) == RUN_FRESH) {
        run_file *file = new_file();
        uintptr_t found = file == NULL ? RUN_NOBODY : run_examine(fd, file);
        if (file != NULL && found != (uintptr_t)file)
            free_file(file);
        atomic_compare_exchange_strong(&run_slots[fd], &expected, found);
    }
    pthread_mutex_unlock(&table_lock);
}

static bool is_ours(const run_file *file)
{
    return file->process == getpid();
}

/* The lock is held for writing. The descriptor is no more (still: it is, and about to be closed). */
static int leave_file(run_file *file, int fd, bool still)
{
    int result = 0;
    set_slot(fd, RUN_NOBODY);
    pthread_mutex_lock(&table_lock);
    bool last = --file->descriptors == 0;
    pthread_mutex_unlock(&table_lock);
    if (file->direct != NULL && (last || fd == file->anchor)) {
        if (still && run_is_still(fd, file->device, file->inode))
            result = cxl_direct_close(file->direct);
        else
            cxl_direct_abandon(file->direct);
        if (!last && still)
            run_tell_kernel(fd);
        file->direct = NULL;
        file->anchor = -1;
        atomic_store(&file->dirty, false);
    }
    if (file->reader != NULL && last) {
        cxl_reader_close(file->reader, -1);     /* the daemon learns of it with the close */
        file->reader = NULL;
    }
    pthread_rwlock_unlock(&file->lock);
    if (last) {
        pthread_mutex_lock(&table_lock);
        free_file(file);
        pthread_mutex_unlock(&table_lock);
    }
    return result;
}

run_file *run_take(int fd, bool exclusive)
{
    if (run_slot(fd) == RUN_FRESH)
        examine(fd);
    uintptr_t slot = run_slot(fd);
    if (slot <= RUN_INTERNAL)
        return NULL;
    run_file *file = (run_file *)slot;
    if (!is_ours(file))
        return NULL;
    if (exclusive)
        pthread_rwlock_wrlock(&file->lock);
    else
        pthread_rwlock_rdlock(&file->lock);
    if (run_slot(fd) == slot && run_is_still(fd, file->device, file->inode))
        return file;
    pthread_rwlock_unlock(&file->lock);
    pthread_rwlock_wrlock(&file->lock);     /* closed behind our back, by a system call or inside of libc */
    if (run_slot(fd) == slot)
        leave_file(file, fd, false);
    else
        pthread_rwlock_unlock(&file->lock);
    return NULL;
}

void run_give(run_file *file)
{
    pthread_rwlock_unlock(&file->lock);
}

/* --------------------------------------------------------------------- what becomes of them */

static void lose(int fd)
{
    uintptr_t slot = run_slot(fd);
    if (slot <= RUN_INTERNAL) {
        set_slot(fd, RUN_NOBODY);
        return;
    }
    run_file *file = (run_file *)slot;
    if (!is_ours(file))
        return;
    pthread_rwlock_wrlock(&file->lock);
    if (run_slot(fd) == slot)
        leave_file(file, fd, false);
    else
        pthread_rwlock_unlock(&file->lock);
}

void run_opened(int fd, int flags)
{
    run_visit visit;
    if ((unsigned)fd >= RUN_DESCRIPTORS || run_set.off)
        return;
    if (run_depth != 0) {
        set_slot(fd, RUN_INTERNAL);
        return;
    }
    if (run_slot(fd) > RUN_INTERNAL && run_enter(&visit)) {
        lose(fd);
        run_leave(&visit);
    }
    bool never = (flags & (O_PATH | O_DIRECTORY | O_APPEND | O_DSYNC)) != 0;
    if ((flags & O_ACCMODE) == O_RDONLY && !run_set.maps && !run_set.reads)
        never = true;
    set_slot(fd, never ? RUN_NOBODY : RUN_FRESH);
}

void run_before_duplicate(int fd)
{
    run_visit visit;
    if (run_slot(fd) != RUN_FRESH || !run_enter(&visit))
        return;
    examine(fd);
    run_leave(&visit);
}

void run_duplicated(int fd, int copy)
{
    run_visit visit;
    uintptr_t slot = run_slot(fd);
    if ((unsigned)copy >= RUN_DESCRIPTORS || fd == copy) {
        if (slot > RUN_INTERNAL && fd != copy)
            run_retire(fd);         /* one of its descriptors would not be known */
        return;
    }
    if (run_depth != 0) {
        set_slot(copy, RUN_INTERNAL);
        return;
    }
    if ((run_slot(copy) == RUN_NOBODY && slot == RUN_NOBODY) || !run_enter(&visit))
        return;
    lose(copy);
    if (slot > RUN_INTERNAL && is_ours((run_file *)slot)) {
        pthread_mutex_lock(&table_lock);
        if (run_slot(fd) == slot) {
            ((run_file *)slot)->descriptors++;
            set_slot(copy, slot);
        }
        pthread_mutex_unlock(&table_lock);
    }
    run_leave(&visit);
}

int run_before_close(int fd)
{
    run_visit visit;
    int result = 0;
    uintptr_t slot = run_slot(fd);
    if (slot <= RUN_INTERNAL) {
        if (slot != RUN_NOBODY && run_process == getpid())
            set_slot(fd, RUN_NOBODY);
        return 0;
    }
    run_file *file = (run_file *)slot;
    if (!is_ours(file) || !run_enter(&visit))
        return 0;
    pthread_rwlock_wrlock(&file->lock);
    if (run_slot(fd) == slot)
        result = leave_file(file, fd, true);
    else
        pthread_rwlock_unlock(&file->lock);
    run_leave(&visit);
    return result;
}

int run_settle(int fd)
{
    run_visit visit;
    int result = 0;
    if (run_only_reads(fd) || !run_enter(&visit))
        return 0;
    run_file *file = run_take(fd, false);
    if (file != NULL) {
        if (file->direct != NULL && atomic_exchange(&file->dirty, false)) {
            result = cxl_direct_settle(file->direct);
            run_tell_kernel(fd);
        }
        run_give(file);
    }
    run_leave(&visit);
    return result;
}

void run_settle_all(void)
{
    if (run_process != getpid())
        return;
    for (int fd = 0; fd <= run_highest(); fd++) {
        if (run_slot(fd) > RUN_INTERNAL)
            (void)run_settle(fd);
    }
}

void run_retire(int fd)
{
    run_visit visit;
    run_before_duplicate(fd);
    if (run_only_reads(fd) || !run_enter(&visit))
        return;
    run_file *file = run_take(fd, true);
    if (file != NULL) {
        if (file->direct != NULL) {
            (void)cxl_direct_close(file->direct);
            run_tell_kernel(fd);
        }
        file->direct = NULL;
        file->anchor = -1;
        file->refused = true;
        run_give(file);
    }
    run_leave(&visit);
}

void run_detach(int fd)
{
    run_file *file = run_take(fd, true);
    if (file != NULL)
        (void)leave_file(file, fd, true);
}

void run_detach_internal(int fd)
{
    if ((unsigned)fd < RUN_DESCRIPTORS)
        set_slot(fd, RUN_NOBODY);
}

int run_move_away(int fd)
{
    struct rlimit limit;
    if (fd < 0 || getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return fd;
    rlim_t from = limit.rlim_cur / 2 < 8192 ? limit.rlim_cur / 2 : 8192;
    int moved = (rlim_t)fd >= from ? -1 : REAL(fcntl)(fd, F_DUPFD_CLOEXEC, (int)from);
    if (moved < 0)
        return fd;
    REAL(close)(fd);
    return moved;
}

/* What the client had is left as it is: it has a handler of its own, which may not have run yet. */
void run_forget_in_child(void)
{
    pthread_mutex_init(&table_lock, NULL);
    for (int fd = 0; fd <= run_highest(); fd++)
        set_slot(fd, RUN_NOBODY);
    files_free = NULL;
    for (uint32_t i = 0; i < files_used; i++) {
        pthread_rwlock_init(&files[i].lock, NULL);
        files[i].direct = NULL;
        files[i].reader = NULL;
        free_file(&files[i]);
    }
}
