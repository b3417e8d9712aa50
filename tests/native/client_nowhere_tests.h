/* client_nowhere_tests.h - the rest of client.c: whoever is led nowhere goes on without the daemon. */

static void test_answers_that_lead_nowhere(void)
{
    enum { SIZE = 4 << 20, ANSWERS_MAX = 2000 };
    daemon_state *d = begin(CXL_GRANULARITY_PAGE);
    uint8_t *model = filled(SIZE);
    int fd = new_file();
    cxl_direct_file *file = opened(d, fd);
    CHECK(cxl_direct_pwrite(file, model, SIZE, 0) == SIZE, "a large one");
    CHECK(cxl_direct_close(file) == 0, "close");
    /* Of what is verified together: no piece, as if others were at it, and the same one again and again. */
    d->piece_bytes = 1 << 20;
    d->channel.waits_max = 20;
    cxl_mapped *mapped = map_again(d, fd, 0);
    d->pauses = ANSWERS_MAX;
    CHECK(cxl_mapped_verify_all(mapped, NULL, NULL) == 0, "not verified without the others");
    CHECK(d->pauses > 0 && d->pieces_given == 0, "%d answers are left", d->pauses);
    cxl_mapped_close(mapped);
    mapped = map_again(d, fd, 0);
    d->leads_nowhere = true;
    uint64_t requests = d->requests;
    CHECK(cxl_mapped_verify_all(mapped, NULL, NULL) == 0, "not verified without the daemon");
    CHECK(d->requests - requests < ANSWERS_MAX, "%lu requests", (unsigned long)(d->requests - requests));
    cxl_mapped_close(mapped);
    /* Rows that never come, and room for nothing. */
    requests = d->requests;
    CHECK(cxl_mapped_open_through(fd, 0, &d->channel, &mapped) == -EPROTO, "what is not there is mapped");
    file = opened(d, fd);
    CHECK(cxl_direct_pwrite(file, model, SIZE, 0) == -EAGAIN, "stored where there is no room");
    CHECK(d->requests - requests < ANSWERS_MAX, "%lu requests", (unsigned long)(d->requests - requests));
    d->leads_nowhere = false;
    CHECK(cxl_direct_close(file) == 0, "close");
    close(fd);
    end(d);
    free(model);
}
