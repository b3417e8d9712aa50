/* client_verified_tests.h - the rest of client.c: mappings that others have verified, or verify just now. */

/* Bytes that this process has compared. */
static uint64_t compared(void)
{
    cxl_client_counts counts;
    cxl_client_statistics(&counts);
    return counts.verified_bytes;
}

static cxl_mapped *map_again(daemon_state *d, int fd, uint32_t flags)
{
    cxl_mapped *mapped = NULL;
    d->next_piece = d->pieces_given = d->pieces_done = 0;
    CHECK(cxl_mapped_open_through(fd, flags, &d->channel, &mapped) == 0, "not mapped");
    return mapped;
}

/* Who maps what others have verified, or verify now, compares nothing, or his part; by himself he compares all. */
static void test_verified_by_others(void)
{
    enum { SIZE = 48 << 20, SHARE = 4 << 20 };
    daemon_state *d = begin(CXL_GRANULARITY_PAGE);
    uint8_t *model = filled(SIZE);
    int fd = new_file();
    cxl_direct_file *file = opened(d, fd);
    for (uint64_t at = 0; at < SIZE; at += 1 << 20)
        write_somehow(d, file, model + at, 1 << 20, at);
    CHECK(cxl_direct_close(file) == 0, "close");
    /* By several threads, and the daemon remembers nothing. */
    uint64_t before = compared();
    cxl_mapped *mapped = map_again(d, fd, 0);
    CHECK(!mapped->is_shared && !cxl_mapped_is_verified(mapped), "it is shared");
    CHECK(cxl_mapped_verify_all(mapped, NULL, NULL) == 0 && cxl_mapped_is_verified(mapped), "verified alone");
    CHECK(compared() - before >= SIZE, "%lu bytes were compared", (unsigned long)(compared() - before));
    cxl_mapped_close(mapped);
    /* Together: half of it by others. */
    d->piece_bytes = d->others_take = SHARE;
    before = compared();
    mapped = map_again(d, fd, CXL_MAPPED_VERIFY);
    CHECK(d->pieces_done == SIZE / SHARE / 2, "%lu pieces", (unsigned long)d->pieces_done);
    CHECK(compared() - before < SIZE / 2 + SIZE / 16, "%lu bytes were compared", (unsigned long)(compared() - before));
    CHECK(memcmp(cxl_mapped_base(mapped), model, SIZE) == 0, "what is mapped is something else");
    cxl_mapped_close(mapped);
    /* The daemon forgets in the middle: all of it is compared here. */
    d->forgets_after = 2;
    before = compared();
    mapped = map_again(d, fd, CXL_MAPPED_VERIFY);
    CHECK(compared() - before >= SIZE, "%lu bytes were compared", (unsigned long)(compared() - before));
    cxl_mapped_close(mapped);
    d->forgets_after = 0;
    /* Damage in a piece of one's own: told, and found; where others look it is theirs. */
    mapped = map_again(d, fd, 0);
    const cxl_direct_row *row = &mapped->rows[mapped_find(mapped, 2 * SHARE + 10)].is;
    uint64_t media = row->extent_media_offset + row->extent_offset + (2 * SHARE + 10 - row->file_offset);
    ((uint8_t *)cxl_media_base(d->media))[media] ^= 1;
    uint64_t bad_offset = 0, bad_length = 0;
    CHECK(cxl_mapped_verify_all(mapped, &bad_offset, &bad_length) == -EIO, "damage is not found");
    CHECK(bad_offset <= 2 * SHARE + 10 && 2 * SHARE + 10 < bad_offset + bad_length && d->wrong_at == bad_offset,
          "it is at %lu, told at %lu", (unsigned long)bad_offset, (unsigned long)d->wrong_at);
    CHECK(!cxl_mapped_is_verified(mapped), "it is verified all the same");
    cxl_mapped_close(mapped);
    /* Verified by others: no checksums, and nothing is compared; but for one who does not take their word. */
    d->is_verified = true;
    before = compared();
    mapped = map_again(d, fd, CXL_MAPPED_VERIFY);
    CHECK(mapped->sum_count == 0 && cxl_mapped_is_verified(mapped), "it is to be verified");
    CHECK(cxl_mapped_verify(mapped, 0, SIZE, NULL, NULL) == 0 && compared() == before, "it is compared");
    cxl_mapped *other = map_again(d, fd, CXL_MAPPED_ALONE);
    CHECK(!cxl_mapped_is_verified(other), "others are believed");
    CHECK(cxl_mapped_verify_all(other, NULL, NULL) == -EIO, "damage is trusted");
    cxl_mapped_close(other);
    cxl_mapped_close(mapped);
    close(fd);
    end(d);
    free(model);
}
