/* client_more.h - the rest of client.c: random and small writes, threads, mapped files, forks, and what the daemon may
 * refuse. */

static void test_random_writes(uint32_t granularity)
{
    enum { SIZE = 3 << 20 };
    daemon_state *d = begin(granularity);
    uint8_t *model = calloc(1, SIZE), *bytes = malloc(SIZE);
    uint64_t size = 0, direct = 0;
    int fd = new_file();
    cxl_direct_file *file = opened(d, fd);
    for (int i = 0; i < 400; i++) {
        uint64_t length = 1 + random_below(random_below(4) == 0 ? 300000 : 9000), offset = random_below(SIZE - length);
        if (random_below(3) == 0 && size + length <= SIZE)
            offset = size;
        fill(bytes, length);
        direct += write_somehow(d, file, bytes, length, offset);
        memcpy(model + offset, bytes, length);
        size = offset + length > size ? offset + length : size;
        pthread_mutex_lock(&d->lock);
        if (random_below(20) == 0)
            close_slip(d);
        d->refuse = random_below(8) == 0 ? -EBUSY : 0;
        if (random_below(4) == 0)
            absorb(d);
        d->lease_bytes = random_below(3) == 0 ? 300000 : SEGMENT;
        pthread_mutex_unlock(&d->lock);
        if (random_below(12) == 0) {
            CHECK(cxl_direct_settle(file) == 0, "settle");
            check_content(d, model, size, "settled");
        }
    }
    CHECK(cxl_direct_close(file) == 0, "close");
    CHECK(direct > SIZE, "only %lu bytes went directly", (unsigned long)direct);
    check_content(d, model, size, "closed");
    close(fd);
    end(d);
    free(model);
    free(bytes);
}

/* More descriptors than a slip has. */
static void test_many_small(void)
{
    daemon_state *d = begin(CXL_GRANULARITY_PAGE);
    int fd = new_file();
    uint64_t size = DIRECT_FROM + 100 * 3000;
    uint8_t *model = filled(size);
    cxl_direct_file *file = opened(d, fd);
    CHECK(write_somehow(d, file, model, DIRECT_FROM, 0) == DIRECT_FROM, "the first");
    uint64_t settles = d->settles;
    for (uint64_t at = DIRECT_FROM; at < size; at += 100)
        CHECK(cxl_direct_pwrite(file, model + at, 100, at) == 100, "at %lu", (unsigned long)at);
    CHECK(d->settles - settles >= 3, "%lu settles", (unsigned long)(d->settles - settles));
    CHECK(cxl_direct_close(file) == 0, "close");
    check_content(d, model, size, "many");
    CHECK(cxl_map_ref_count(d->map) == 1, "%lu references", (unsigned long)cxl_map_ref_count(d->map));
    close(fd);
    end(d);
    free(model);
}

typedef struct {
    daemon_state *d;
    cxl_direct_file *file;
    const uint8_t *model;
    uint64_t start, end;
    atomic_bool *over;
} thread_job;

static void *write_part(void *argument)
{
    thread_job *job = argument;
    for (uint64_t at = job->start; at < job->end;) {
        uint64_t length = job->end - at < 70000 ? job->end - at : 70000;
        write_somehow(job->d, job->file, job->model + at, length, at);
        at += length;
    }
    return NULL;
}

static void *disturb(void *argument)
{
    thread_job *job = argument;
    while (!atomic_load(job->over)) {
        pthread_mutex_lock(&job->d->lock);
        close_slip(job->d);
        pthread_mutex_unlock(&job->d->lock);
        usleep(3000);
    }
    return NULL;
}

static void test_threads(bool disturbed)
{
    enum { WRITERS = 10, PART = 1 << 20 };
    daemon_state *d = begin(CXL_GRANULARITY_LINE);
    uint8_t *model = filled((uint64_t)WRITERS * PART);
    atomic_bool over = false;
    pthread_t threads[WRITERS], other;
    thread_job jobs[WRITERS];
    int fd = new_file();
    cxl_direct_file *file = opened(d, fd);
    for (uint64_t i = 0; i < WRITERS; i++) {
        jobs[i] = (thread_job){d, file, model, i * PART, (i + 1) * PART, &over};
        pthread_create(&threads[i], NULL, write_part, &jobs[i]);
    }
    if (disturbed)
        pthread_create(&other, NULL, disturb, &jobs[0]);
    for (int i = 0; i < WRITERS; i++)
        pthread_join(threads[i], NULL);
    atomic_store(&over, true);
    if (disturbed)
        pthread_join(other, NULL);
    CHECK(cxl_direct_close(file) == 0, "close");
    check_content(d, model, (uint64_t)WRITERS * PART, "threads");
    close(fd);
    end(d);
    free(model);
}

/* As many bytes of it may be copies as there are, or one less. */
static void check_limit_of_copies(daemon_state *d)
{
    cxl_mapped *mapped;
    int fd = new_file();
    CHECK(cxl_mapped_open_through(fd, 0, &d->channel, &mapped) == 0, "not mapped");
    uint64_t copied = cxl_mapped_copied(mapped);
    cxl_mapped_close(mapped);
    for (uint64_t less = 0; less < 2 && copied > 1; less++) {
        d->channel.copies_max = copied - less;
        int result = cxl_mapped_open_through(fd, 0, &d->channel, &mapped);
        CHECK(result == (less == 0 ? 0 : -ENOMEM), "%d with %lu bytes less", result, (unsigned long)less);
        if (result == 0)
            cxl_mapped_close(mapped);
    }
    d->channel.copies_max = 0;
    close(fd);
}

static void test_mapped(uint64_t granule)
{
    enum { SIZE = 10 * 1000 * 1000 };
    daemon_state *d = begin(CXL_GRANULARITY_PAGE);
    uint8_t *model = filled(SIZE);
    cxl_mapped *mapped;
    int fd = new_file();
    d->channel.granule = granule;
    cxl_direct_file *file = opened(d, fd);
    for (uint64_t at = 0; at < SIZE; at += 1 << 20)
        write_somehow(d, file, model + at, SIZE - at < 1 << 20 ? SIZE - at : 1 << 20, at);
    CHECK(cxl_direct_close(file) == 0, "close");
    check_limit_of_copies(d);
    uint64_t requests = d->requests;
    CHECK(cxl_mapped_open_through(fd, 0, &d->channel, &mapped) == 0, "not mapped");
    CHECK(cxl_mapped_size(mapped) == SIZE, "size %lu", (unsigned long)cxl_mapped_size(mapped));
    CHECK(d->requests - requests <= 3, "%lu requests", (unsigned long)(d->requests - requests));
    if (granule == 0)
        CHECK(cxl_mapped_copied(mapped) < 4096, "%lu bytes are copies", (unsigned long)cxl_mapped_copied(mapped));
    CHECK(memcmp(cxl_mapped_base(mapped), model, SIZE) == 0, "what is mapped is something else");
    CHECK(cxl_mapped_verify(mapped, 0, SIZE, NULL, NULL) == 0, "it does not verify");
    /* The file is overwritten, cut, and its room closed: what is mapped stays. */
    pthread_mutex_lock(&d->lock);
    CHECK(cxl_map_truncate(d->map, 0) == 0, "not cut");
    pthread_mutex_unlock(&d->lock);
    CHECK(memcmp(cxl_mapped_base(mapped), model, SIZE) == 0, "what is mapped has changed");
    cxl_mapped_close(mapped);
    CHECK(d->held == NULL, "it is still held");
    close(fd);
    end(d);
    free(model);
}

/* Holes, pieces by the kernel, overwritten parts; then damage. */
static void test_mapped_rest(void)
{
    enum { SIZE = 4 << 20, DAMAGED = 2500000 };
    daemon_state *d = begin(CXL_GRANULARITY_PAGE);
    uint8_t *model = calloc(1, SIZE);
    uint64_t bad_offset = 0, bad_length = 0;
    cxl_mapped *mapped;
    int fd = new_file();
    cxl_direct_file *file = opened(d, fd);
    fill(model + 1000001, 2000000);
    CHECK(write_somehow(d, file, model + 1000001, 2000000, 1000001) == 2000000, "it goes another way");
    fill(model + 3500000, 10000);
    write_through_kernel(d, model + 3500000, 10000, 3500000);
    for (int i = 0; i < 40; i++) {
        uint64_t offset = random_below(SIZE - 30000), length = 1 + random_below(30000);
        fill(model + offset, length);
        write_somehow(d, file, model + offset, length, offset);
    }
    fill(model + SIZE - 7, 7);
    write_somehow(d, file, model + SIZE - 7, 7, SIZE - 7);
    fill(model + DAMAGED - 300000, 600000);
    CHECK(write_somehow(d, file, model + DAMAGED - 300000, 600000, DAMAGED - 300000) == 600000, "the last one");
    CHECK(cxl_direct_close(file) == 0, "close");
    check_content(d, model, SIZE, "pieces");
    CHECK(cxl_mapped_open_through(fd, CXL_MAPPED_VERIFY, &d->channel, &mapped) == 0, "not mapped");
    CHECK(memcmp(cxl_mapped_base(mapped), model, SIZE) == 0, "what is mapped is something else");
    cxl_mapped_close(mapped);
    /* A byte of the medium changes: of the chunk that has it nothing verifies, of the others everything. */
    CHECK(cxl_mapped_open_through(fd, 0, &d->channel, &mapped) == 0, "not mapped");
    const cxl_direct_row *row = &mapped->rows[mapped_find(mapped, DAMAGED)].is;
    uint64_t media = row->extent_media_offset + row->extent_offset + (DAMAGED - row->file_offset);
    ((uint8_t *)cxl_media_base(d->media))[media] ^= 1;
    CHECK(cxl_mapped_verify(mapped, DAMAGED, 1, &bad_offset, &bad_length) == -EIO, "damage is not found");
    CHECK(bad_offset <= DAMAGED && DAMAGED < bad_offset + bad_length && bad_length <= CHUNK, "it is at %lu + %lu",
          (unsigned long)bad_offset, (unsigned long)bad_length);
    CHECK(cxl_mapped_verify(mapped, 0, bad_offset, NULL, NULL) == 0, "before it");
    CHECK(cxl_mapped_verify(mapped, bad_offset + bad_length, SIZE - bad_offset - bad_length, NULL, NULL) == 0,
          "behind it");
    CHECK(cxl_mapped_verify(mapped, 0, SIZE + 1, NULL, NULL) == -ERANGE, "beyond the end");
    cxl_mapped_close(mapped);
    CHECK(cxl_mapped_open_through(fd, CXL_MAPPED_VERIFY, &d->channel, &mapped) == -EIO, "opened, and verified");
    close(fd);
    end(d);
    free(model);
}

static void test_fork(void)
{
    enum { SIZE = 2 << 20 };
    daemon_state *d = begin(CXL_GRANULARITY_PAGE);
    uint8_t *model = filled(SIZE);
    int fd = new_file(), status;
    cxl_direct_file *file = opened(d, fd);
    CHECK(write_somehow(d, file, model, SIZE / 2, 0) == SIZE / 2, "the first half");
    pid_t child = fork();
    if (child == 0) {
        bool refused = cxl_direct_pwrite(file, model, SIZE / 2, 0) == -EAGAIN && cxl_direct_settle(file) == 0;
        _exit(refused && cxl_direct_close(file) == 0 ? 0 : 1);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0, "the child: %d", status);
    CHECK(write_somehow(d, file, model + SIZE / 2, SIZE / 2, SIZE / 2) == SIZE / 2, "the second half");
    CHECK(cxl_direct_close(file) == 0, "close");
    check_content(d, model, SIZE, "forked");
    close(fd);
    end(d);
    free(model);
}

/* Another daemon's mount has the number of one before, and two files find out: the second first. */
static void test_number_again(void)
{
    enum { SIZE = 1 << 20 };
    daemon_state *before = begin(CXL_GRANULARITY_PAGE), *d = begin(CXL_GRANULARITY_PAGE);
    uint8_t *model = filled(SIZE);
    cxl_direct_file *first, *second;
    int fd = new_file(), other = new_file();
    CHECK(cxl_direct_open_through(fd, &before->channel, &first) == 0, "no file of the daemon before");
    CHECK(cxl_direct_close(first) == 0, "close it");
    CHECK(cxl_direct_open_through(fd, &d->channel, &first) == 0, "no file");
    CHECK(cxl_direct_open_through(other, &d->channel, &second) == 0, "no second file");
    CHECK(cxl_direct_pwrite(second, model, SIZE, 0) == SIZE, "the second file");
    CHECK(cxl_direct_close(second) == 0, "close the second");
    close_slip(d);
    CHECK(cxl_direct_pwrite(first, model, SIZE, 0) == SIZE, "the first file");
    CHECK(cxl_direct_close(first) == 0, "close the first");
    check_content(d, model, SIZE, "the number again");
    close(other);
    close(fd);
    end(d);
    end(before);
    free(model);
}

static void test_errors(void)
{
    enum { SIZE = 1 << 20 };
    static const int refusals[] = {-EBUSY, -ENOSPC, -EPERM, -ENOTTY, -EROFS};
    daemon_state *d = begin(CXL_GRANULARITY_PAGE);
    uint8_t *model = filled(SIZE);
    cxl_direct_file *file;
    cxl_mapped *mapped;
    int fd = new_file();
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        file = opened(d, fd);
        d->refuse = refusals[i];
        CHECK(cxl_direct_pwrite(file, model, SIZE, 0) == -EAGAIN, "refused by %d", refusals[i]);
        uint64_t requests = d->requests;
        CHECK(cxl_direct_pwrite(file, model, SIZE, 0) == -EAGAIN && d->requests == requests, "asked again at once");
        d->refuse = 0;
        CHECK(cxl_direct_settle(file) == 0, "settle");
        CHECK(cxl_direct_pwrite(file, model, SIZE, 0) == SIZE, "not asked again after %d", refusals[i]);
        CHECK(cxl_direct_close(file) == 0, "close");
    }
    file = opened(d, fd);
    CHECK(cxl_direct_pwrite(file, model, 1000, 0) == -EAGAIN, "a small one");
    CHECK(cxl_direct_pwrite(file, model, SIZE, 0) == SIZE, "a large one");
    CHECK(cxl_direct_pwrite(file, model, 1000, 5000) == 1000, "a small one, behind a large one");
    d->gone = -ENOTCONN;
    CHECK(cxl_direct_settle(file) == -ENOTCONN, "settled by nobody");
    CHECK(cxl_mapped_open_through(fd, 0, &d->channel, &mapped) == -ENOTCONN, "mapped by nobody");
    CHECK(cxl_direct_close(file) == -ENOTCONN, "closed by nobody");
    d->gone = 0;
    close_slip(d);
    /* A fault of the medium: the second half of it is gone. */
    d->one_at_a_time = true;
    file = opened(d, fd);
    CHECK(cxl_direct_pwrite(file, model, SIZE, 0) == SIZE, "a large one");
    if (ftruncate(d->medium_fd, (off_t)(d->next_segment - 1) * SEGMENT + CXL_SLIP_BYTES + SIZE + SIZE / 2) != 0)
        abort();
    CHECK(cxl_direct_pwrite(file, model, SIZE, SIZE) == -EIO, "a fault is not told");
    if (ftruncate(d->medium_fd, (off_t)SEGMENT * SEGMENTS) != 0)
        abort();
    CHECK(cxl_direct_close(file) == 0, "close");
    close(fd);
    end(d);
    free(model);
}
