/* harness.c - what of csrc/ cannot be seen from Python: which bytes a copy writes back, which pages a fence
 * makes durable, that no checksum reads beyond its data, and guards inside guards. Linked with the sources
 * themselves; prints what is wrong and exits 1. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <unistd.h>

#include "persist/persist.h"

enum { AREA = 4096 };

static int failures;

#define CHECK(condition, ...)          \
    do {                               \
        if (!(condition)) {            \
            printf(__VA_ARGS__);       \
            putchar('\n');             \
            failures++;                \
        }                              \
    } while (0)

/* ------------------------------------------------------------------ ragged ends are written back */

static uint8_t *area;
static uint8_t durable[AREA];      /* by a line copy, or by a write-back after the store */

static void note_write_back(const void *address, size_t length)
{
    uintptr_t first = ((uintptr_t)address - (uintptr_t)area) & ~(uintptr_t)(CXL_LINE - 1);
    uintptr_t end = (uintptr_t)address - (uintptr_t)area + length;
    for (uintptr_t byte = first; byte < end; byte++)
        durable[byte] = area[byte];
}

static void note_lines(void *target, const void *source, size_t count)
{
    CHECK(((uintptr_t)target & (CXL_LINE - 1)) == 0, "a line copy to an unaligned target");
    memcpy(target, source, count * CXL_LINE);
    memcpy(durable + ((uint8_t *)target - area), source, count * CXL_LINE);
}

static void check_copy(size_t offset, size_t length, const uint8_t *source, bool with_crc)
{
    memset(area, 0, AREA);
    memset(durable, 0, AREA);
    if (with_crc)
        CHECK(cxl_copy_out_crc(7, area + offset, source, length, true) == cxl_crc32c_table(7, source, length),
              "checksum of %zu bytes at %zu", length, offset);
    else
        cxl_copy_out(area + offset, source, length, true);
    CHECK(memcmp(area + offset, source, length) == 0, "content of %zu bytes at %zu", length, offset);
    CHECK(memcmp(durable + offset, source, length) == 0,
          "%zu bytes at %zu are not all written back%s", length, offset, with_crc ? " (with checksum)" : "");
}

static void check_ragged_copies(void)
{
    uint8_t source[AREA];
    for (size_t byte = 0; byte < AREA; byte++)
        source[byte] = (uint8_t)(byte * 31 % 255 + 1);
    cxl_table.write_back = note_write_back;
    cxl_table.copy_lines = note_lines;
    cxl_table.copy_lines_crc = NULL;
    for (size_t head = 0; head < CXL_LINE; head++)
        for (size_t tail = 0; tail < CXL_LINE; tail++)
            for (size_t lines = 0; lines < 40; lines += 3) {
                size_t length = lines * CXL_LINE + ((tail - head) & (CXL_LINE - 1));
                check_copy(CXL_LINE + head, length, source + tail, false);
                check_copy(CXL_LINE + head, length, source + tail, true);
            }
}

/* ------------------------------------------------------ checksums up to the end of what is mapped */

typedef struct {
    const char *name;
    bool present;
    uint32_t (*crc32c)(uint32_t, const void *, size_t);
    uint32_t (*copy_lines)(uint32_t, void *, const void *, size_t);     /* or NULL */
} checksum;

static void check_routine(const checksum *routine, const uint8_t *end)
{
    for (size_t length = 0; length < AREA; length += length < 900 ? 1 : 61)
        for (size_t gap = 0; gap < CXL_LINE && length + gap <= AREA; gap++) {
            uint32_t seed = (uint32_t)(length * 2654435761u + gap);
            const uint8_t *data = end - gap - length;
            CHECK(routine->crc32c(seed, data, length) == cxl_crc32c_table(seed, data, length),
                  "%s: %zu bytes, %zu before the end", routine->name, length, gap);
        }
    for (size_t count = 0; routine->copy_lines != NULL && count < AREA / CXL_LINE; count++)
        for (size_t gap = 0; gap < CXL_LINE; gap++) {
            const uint8_t *data = end - gap - count * CXL_LINE;
            memset(area, 0, AREA);
            uint32_t crc = routine->copy_lines(7, area, data, count);
            CHECK(crc == cxl_crc32c_table(7, data, count * CXL_LINE),
                  "%s: copy of %zu lines, %zu before the end: checksum", routine->name, count, gap);
            CHECK(memcmp(area, data, count * CXL_LINE) == 0, "%s: copy of %zu lines", routine->name, count);
            for (size_t byte = count * CXL_LINE; byte < AREA; byte++)
                CHECK(area[byte] == 0, "%s: copy of %zu lines changed byte %zu", routine->name, count, byte);
        }
}

static void check_checksums(void)
{
    uint8_t *pages = mmap(NULL, 3 * AREA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED || mprotect(pages + 2 * AREA, AREA, PROT_NONE) != 0)
        abort();
    for (size_t byte = 0; byte < 2 * AREA; byte++)
        pages[byte] = (uint8_t)(byte * byte * 31 % 257);
#if defined(__x86_64__)
    bool sse42 = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
    bool folds = sse42 && __builtin_cpu_supports("vpclmulqdq");
    const checksum routines[] = {
        {"sse42", sse42, cxl_crc32c_sse42, cxl_copy_lines_sse42},
        {"vpclmul256", folds && __builtin_cpu_supports("avx2"), cxl_crc32c_vpclmul256, cxl_copy_lines_vpclmul256},
        {"vpclmul", folds && __builtin_cpu_supports("avx512f"), cxl_crc32c_vpclmul, cxl_copy_lines_vpclmul},
    };
#elif defined(__aarch64__)
    const checksum routines[] = {{"arm", (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0, cxl_crc32c_arm, NULL}};
#else
    const checksum routines[] = {{"table", true, cxl_crc32c_table, NULL}};
#endif
    for (size_t index = 0; index < sizeof routines / sizeof *routines; index++)
        if (routines[index].present)
            check_routine(&routines[index], pages + 2 * AREA);
}

/* ------------------------------------------------------------------ copies into ordinary memory */

static void check_copies_in(void)
{
    enum { LONGEST = 3 * CXL_COPY_BLOCK };
    static uint8_t source[LONGEST + CXL_LINE], target[LONGEST + 2 * CXL_LINE];
    for (size_t byte = 0; byte < sizeof source; byte++)
        source[byte] = (uint8_t)(byte * byte * 31 % 257 | 1);
    cxl_table.crc32c = cxl_crc32c_table;
    for (size_t length = 0; length < LONGEST; length += length % CXL_COPY_BLOCK < 130 ? 1 : 113) {
        size_t from = length * 7 % CXL_LINE, to = length * 11 % CXL_LINE;
        memset(target, 0, sizeof target);
        CHECK(cxl_copy_in_crc(7, target + to, source + from, length) == cxl_crc32c_table(7, source + from, length),
              "copy in of %zu bytes: checksum", length);
        CHECK(memcmp(target + to, source + from, length) == 0, "copy in of %zu bytes", length);
        for (size_t byte = 0; byte < sizeof target; byte++)
            CHECK((byte >= to && byte < to + length) || target[byte] == 0, "copy in of %zu bytes changed byte %zu",
                  length, byte);
    }
}

/* -------------------------------------------------------------------------- guards in guards */

typedef struct {
    uint8_t *inner, *outer;        /* mappings that fault on access */
    uint8_t *touched;              /* the one the inner body reads */
    int inner_result;
    uint64_t inner_fault;
    bool after_inner;
} nest;

static void touch(void *argument)
{
    nest *state = argument;
    *(volatile uint8_t *)(state->touched + 5000);
}

static void guard_inside(void *argument)
{
    nest *state = argument;
    state->inner_result = cxl_guarded(state->inner, 8192, touch, state, &state->inner_fault);
    state->after_inner = true;
}

static uint8_t *faulting(void)
{
    FILE *file = tmpfile();
    uint8_t *base = mmap(NULL, 8192, PROT_READ, MAP_SHARED, fileno(file), 0);
    if (base == MAP_FAILED)
        abort();
    return base;                   /* the file is empty: every access is a SIGBUS */
}

static void check_nested_guards(void)
{
    uint64_t fault = 0;
    nest state = {.inner = faulting(), .outer = faulting()};
    CHECK(cxl_guard_install() == 0, "the guard cannot be installed");

    state.touched = state.inner;
    int result = cxl_guarded(state.outer, 8192, guard_inside, &state, &fault);
    CHECK(result == 0 && state.inner_result == -EIO && state.after_inner, "a fault of the inner guard");
    CHECK(state.inner_fault == 5000, "the inner guard names the offset");

    state.touched = state.outer;
    state.after_inner = false;
    result = cxl_guarded(state.outer, 8192, guard_inside, &state, &fault);
    CHECK(result == -EIO && fault == 5000 && !state.after_inner, "a fault of the outer guard, below the inner");

    state.touched = state.inner;
    result = cxl_guarded(state.inner, 8192, touch, &state, &fault);
    CHECK(result == -EIO && fault == 5000, "a guard after a jump over a guard");
}

/* --------------------------------------------------------------------- which pages a fence msyncs */

enum { FILE_PAGES = 1 << 14, PAGE_BYTES = 4096 };

static bool waiting[FILE_PAGES];       /* stored since the last fence */
static bool synced[FILE_PAGES];        /* by msync since then */
static uint8_t *file_base;
static int msync_calls;

/* In place of the one of libc. */
int msync(void *address, size_t length, int flags)
{
    size_t offset = (size_t)((uint8_t *)address - file_base);
    CHECK(offset % PAGE_BYTES == 0 && flags == MS_SYNC, "msync of %zu bytes at %zu", length, offset);
    for (size_t page = offset / PAGE_BYTES; page * PAGE_BYTES < offset + length; page++)
        synced[page] = true;
    msync_calls++;
    return 0;
}

static void store_somewhere(cxl_media *media, bool copied)
{
    static const uint8_t zeros[3 * PAGE_BYTES];
    uint64_t length = 1 + (uint64_t)rand() % sizeof zeros;
    uint64_t offset = ((uint64_t)rand() << 8 | (uint64_t)rand() % 256) % (FILE_PAGES * (uint64_t)PAGE_BYTES - length);
    if (copied) {
        CHECK(cxl_media_copy(media, offset, zeros, length) == 0, "a copy");
    } else {
        CHECK(cxl_media_store(media, offset, zeros, length) == 0, "a store");
        CHECK(cxl_media_write_back(media, offset, length) == 0, "a write-back");
    }
    for (uint64_t page = offset / PAGE_BYTES; page * PAGE_BYTES < offset + length; page++)
        waiting[page] = true;
}

static void check_fence(cxl_media *media, int stores)
{
    memset(waiting, 0, sizeof waiting);
    memset(synced, 0, sizeof synced);
    msync_calls = 0;
    for (int i = 0; i < stores; i++)
        store_somewhere(media, rand() % 2);
    CHECK(cxl_media_fence(media) == 0, "a fence");
    CHECK(msync_calls <= DIRTY_RANGES, "%d calls of msync", msync_calls);
    int distance = DIRTY_GAP / PAGE_BYTES + 1;
    for (int page = 0; page < FILE_PAGES; page++) {
        CHECK(synced[page] || !waiting[page], "page %d is not durable after a fence", page);
        bool near = !synced[page] || stores > DIRTY_RANGES;
        for (int other = page - distance; !near && other <= page + distance; other++)
            near = other >= 0 && other < FILE_PAGES && waiting[other];
        CHECK(near, "page %d was synced for nothing", page);
    }
}

static void check_fences(void)
{
    cxl_media *media;
    FILE *file = tmpfile();
    if (ftruncate(fileno(file), FILE_PAGES * (off_t)PAGE_BYTES) != 0)
        abort();
    CHECK(cxl_media_map(fileno(file), FILE_PAGES * (uint64_t)PAGE_BYTES, 1, 0, CXL_GRANULARITY_PAGE, &media) == 0,
          "a file cannot be mapped");
    file_base = cxl_media_base(media);
    for (int round = 0; round < 300; round++)
        check_fence(media, rand() % 20);
    cxl_media_close(media);
    fclose(file);
}

int main(void)
{
    check_fences();
    area = aligned_alloc(CXL_LINE, AREA);
    check_nested_guards();
    check_checksums();
    check_copies_in();
    check_ragged_copies();
    return failures != 0;
}
