/* client_ahead.h - the rest of client.c: how often the daemon is asked, room that is gone before it is locked, and room
 * that is asked for ahead. */

/* How often the daemon is asked: once what the medium is, for each room, and at the end. */
static void test_requests(void)
{
    enum { SIZE = 1 << 20 };
    daemon_state *d = begin(CXL_GRANULARITY_PAGE);
    uint8_t *model = filled(SIZE);
    cxl_direct_file *file;
    int fd = new_file();
    for (uint64_t i = 0; i < 3; i++) {
        uint64_t requests = d->requests, looks = d->looks;
        file = opened(d, fd);
        CHECK(write_somehow(d, file, model, SIZE, 0) == SIZE, "it goes another way");
        CHECK(cxl_direct_close(file) == 0, "close");
        CHECK(d->requests - requests == (i == 0 ? 2 : 1), "%lu requests", (unsigned long)(d->requests - requests));
        CHECK(d->looks - looks == 1 && d->settles == 0, "%lu looks, %lu settles", (unsigned long)(d->looks - looks),
              (unsigned long)d->settles);
        CHECK(d->attaches == 1 && d->slip_at == 0, "attached %lu times", (unsigned long)d->attaches);
        check_content(d, model, SIZE, "asked");
    }
    /* Another daemon serves the medium by now. */
    set_watch(d, d->watch, F_UNLCK);
    d->watch = begin_watch(d);
    for (uint64_t i = 0; i < 2; i++) {
        file = opened(d, fd);
        CHECK(write_somehow(d, file, model, SIZE, 0) == SIZE, "it goes another way");
        CHECK(cxl_direct_close(file) == 0, "close");
        CHECK(d->attaches == 2, "attached %lu times", (unsigned long)d->attaches);
    }
    close(fd);
    end(d);
    free(model);
}

/* Room that is gone before it is locked is not stored into. */
static void test_watches(void)
{
    enum { SIZE = 1 << 20 };
    daemon_state *d = begin(CXL_GRANULARITY_PAGE);
    uint8_t *model = filled(SIZE);
    int fd = new_file();
    cxl_direct_file *file = opened(d, fd);
    d->closes = d->one_at_a_time = true;
    CHECK(cxl_direct_pwrite(file, model, SIZE, 0) == -EAGAIN, "stored into what is gone");
    CHECK(d->attaches == 2, "the daemon was not asked what the medium is: %lu", (unsigned long)d->attaches);
    CHECK(cxl_map_size(d->map) == 0 && !any_lock(d), "something is left");
    const uint8_t *medium = cxl_media_base(d->media);
    for (uint64_t i = SEGMENT + CXL_SLIP_DESCRIPTORS_AT; i < d->next_segment * SEGMENT; i++)
        if (medium[i] != 0 && i % SEGMENT >= CXL_SLIP_DESCRIPTORS_AT) {
            CHECK(false, "byte %lu of the medium", (unsigned long)i);
            break;
        }
    d->closes = false;
    CHECK(cxl_direct_settle(file) == 0, "settle");
    CHECK(cxl_direct_pwrite(file, model, SIZE, 0) == SIZE, "not asked again");
    /* Of a slip that goes on, and is closed with the next room. */
    d->closes = true;
    uint64_t direct = 0;
    for (int i = 0; i < 4; i++)
        direct += write_somehow(d, file, model, SIZE, 0);
    CHECK(direct < 4 * SIZE, "all of it went directly");
    d->closes = false;
    CHECK(cxl_direct_close(file) == 0, "close");
    check_content(d, model, SIZE, "watched");
    close(fd);
    end(d);
    free(model);
}

static int refuse_all(void *context, int fd, unsigned long number, void *argument)
{
    (void)context, (void)fd, (void)number, (void)argument;
    return -ENOTTY;
}

/* Room is asked for ahead, by a thread, while the slip is closed, room refused, and files end with a request under way.
 * The pieces of a file that is written front to back lie one behind the other, whoever asked for their room. */
static void test_ahead(bool disturbed)
{
    enum { SIZE = 12 << 20, PIECE = 1 << 18 };
    daemon_state *d = begin(CXL_GRANULARITY_LINE);
    uint8_t *model = filled(SIZE);
    atomic_bool over = false;
    pthread_t other;
    thread_job job = {.d = d, .over = &over};
    if (disturbed)
        pthread_create(&other, NULL, disturb, &job);
    for (int round = 0; round < 4; round++) {
        int fd = new_file();
        uint64_t size = SIZE - random_below(SIZE / 2), direct = 0, place, left;
        pthread_mutex_lock(&d->lock);
        cxl_map_close_lease(d->map, &place, &left); /* what the kernel's way has left: all segments are free again */
        cxl_map_close_lease(d->map, &place, &left);
        d->lease_bytes = random_below(2) == 0 ? 600000 : SEGMENT;
        d->next_segment = 1;
        CHECK(cxl_map_truncate(d->map, 0) == 0, "not cut");
        pthread_mutex_unlock(&d->lock);
        cxl_direct_file *file = opened(d, fd);
        cxl_direct_permit_ahead(file);
        for (uint64_t at = 0; at < size; at += PIECE) {
            pthread_mutex_lock(&d->lock);
            d->refuse = disturbed && random_below(6) == 0 ? -EAGAIN : 0;
            pthread_mutex_unlock(&d->lock);
            direct += write_somehow(d, file, model + at, size - at < PIECE ? size - at : PIECE, at);
        }
        CHECK(disturbed || direct == size, "only %lu of %lu bytes", (unsigned long)direct, (unsigned long)size);
        cxl_client *client = file->client;
        CHECK(cxl_direct_close(file) == 0, "close");
        CHECK(disturbed || atomic_load(&client->last_bytes) == size, "it is not known where it ended");
        check_content(d, model, size, "asked ahead");
        close(fd);
    }
    atomic_store(&over, true);
    if (disturbed)
        pthread_join(other, NULL);
    end(d);
    free(model);
}

/* A child has no such thread, and one of its own when it needs one. */
static void test_ahead_and_fork(void)
{
    enum { SIZE = 6 << 20 };
    daemon_state *d = begin(CXL_GRANULARITY_PAGE);
    uint8_t *model = filled(SIZE);
    cxl_direct_file *file, *second;
    int fd = new_file(), other = new_file(), status;
    d->lease_bytes = 1 << 20;
    file = opened(d, fd);
    cxl_direct_permit_ahead(file);
    CHECK(write_somehow(d, file, model, SIZE / 2, 0) == SIZE / 2, "the first half");
    for (int i = 0; i < 5; i++) {
        pid_t child = fork();
        if (child == 0) {
            bool fine = cxl_direct_pwrite(file, model, SIZE, 0) == -EAGAIN && cxl_direct_settle(file) == 0;
            fine = fine && cxl_direct_close(file) == 0;
            /* The daemon's lock may be anybody's here: what a file of the child asks for is refused. */
            d->channel.request = refuse_all;
            fine = fine && cxl_direct_open_through(other, &d->channel, &second) == -ENOTTY;
            _exit(fine ? 0 : 1);
        }
        uint64_t at = SIZE / 2 + i * 200000;
        CHECK(write_somehow(d, file, model + at, 200000, at) == 200000, "piece %d", i);
        CHECK(waitpid(child, &status, 0) == child && status == 0, "the child: %d", status);
    }
    CHECK(cxl_direct_close(file) == 0, "close");
    check_content(d, model, SIZE / 2 + 5 * 200000, "forked ahead");
    close(fd);
    close(other);
    end(d);
    free(model);
}
