/* dispatch.c - looks at the CPU and the environment once and fills the table of routines.
 *
 * Never: chooses a routine the CPU lacks; takes "no write-back instruction" for "none needed".
 *
 * Invariants
 * - Until cxl_dispatch_init the table holds what runs everywhere and persists nothing (can_write_back
 *   is false); no media can exist by then.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "persist/persist.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

static void fence_generic(void)
{
    atomic_thread_fence(memory_order_seq_cst);
}

void cxl_write_back_none(const void *address, size_t length)
{
    (void)address;
    (void)length;
}

cxl_routines cxl_table = {
    .write_back = cxl_write_back_none,
    .fence = fence_generic,
    .crc32c = cxl_crc32c_table,
    .copy_lines = cxl_copy_lines_plain,
    .write_back_name = "none",
    .fence_name = "none",
    .crc32c_name = "crc32c-table",
    .copy_name = "stores",
};

/* What one choice offers, best first; the first one present is taken, or the one asked for. */
typedef struct {
    const char *name;
    bool present;
    void (*write_back)(const void *, size_t);
    uint32_t (*crc32c)(uint32_t, const void *, size_t);
    void (*copy_lines)(void *, const void *, size_t);
} choice;

/* What the environment asks for; empty counts as unset. */
static const char *override_of(const char *variable)
{
    const char *wanted = getenv(variable);
    return wanted != NULL && *wanted != '\0' ? wanted : NULL;
}

/* The index of the choice, -1 when none is present, -EINVAL when the override cannot be had. */
static int choose(const choice *choices, int count, const char *variable)
{
    const char *wanted = override_of(variable);
    for (int index = 0; index < count; index++) {
        if (wanted == NULL && choices[index].present)
            return index;
        if (wanted != NULL && strcmp(wanted, choices[index].name) == 0)
            return choices[index].present ? index : -EINVAL;
    }
    return wanted != NULL ? -EINVAL : -1;
}

enum { NO_CHOICE = -1 };
_Static_assert(EINVAL != -NO_CHOICE, "a missing choice must not look like an error");

#if defined(__x86_64__)

static bool has_leaf7_ebx(uint32_t bit)
{
    uint32_t eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx >> bit & 1) != 0;
}

static int choose_write_back(void)
{
    const choice choices[] = {
        {.name = "clwb", .present = has_leaf7_ebx(24), .write_back = cxl_write_back_clwb},
        {.name = "clflushopt", .present = has_leaf7_ebx(23), .write_back = cxl_write_back_clflushopt},
        {.name = "clflush", .present = true, .write_back = cxl_write_back_clflush},
        {.name = "none", .present = true, .write_back = cxl_write_back_none},
    };
    int index = choose(choices, 4, "CXLFS_WRITE_BACK");
    if (index < 0)
        return index;
    cxl_table.write_back = choices[index].write_back;
    cxl_table.write_back_name = choices[index].name;
    cxl_table.can_write_back = true;
    cxl_table.fence = cxl_fence_sfence;
    cxl_table.fence_name = "sfence";
    return 0;
}

static int choose_crc32c(void)
{
    bool sse42 = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
    bool vpclmul256 = sse42 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq");
    bool vpclmul = vpclmul256 && __builtin_cpu_supports("avx512f");
    const choice choices[] = {
        {.name = "crc32c-vpclmul", .present = vpclmul, .crc32c = cxl_crc32c_vpclmul},
        {.name = "crc32c-vpclmul256", .present = vpclmul256, .crc32c = cxl_crc32c_vpclmul256},
        {.name = "crc32c-sse42", .present = sse42, .crc32c = cxl_crc32c_sse42},
        {.name = "crc32c-table", .present = true, .crc32c = cxl_crc32c_table},
    };
    int index = choose(choices, 4, "CXLFS_CRC32C");
    if (index < 0)
        return index;
    cxl_table.crc32c = choices[index].crc32c;
    cxl_table.crc32c_name = choices[index].name;
    return 0;
}

static int choose_copy(void)
{
    const choice choices[] = {
        {.name = "nt-avx512", .present = __builtin_cpu_supports("avx512f"), .copy_lines = cxl_copy_lines_avx512},
        {.name = "nt-avx2", .present = __builtin_cpu_supports("avx2"), .copy_lines = cxl_copy_lines_avx2},
        {.name = "nt-sse2", .present = true, .copy_lines = cxl_copy_lines_sse2},
        {.name = "stores", .present = true, .copy_lines = cxl_copy_lines_plain},
    };
    int index = choose(choices, 4, "CXLFS_COPY");
    if (index < 0)
        return index;
    cxl_table.copy_lines = choices[index].copy_lines;
    cxl_table.copy_name = choices[index].name;
    if (cxl_table.copy_lines == cxl_copy_lines_avx512 && cxl_table.crc32c == cxl_crc32c_vpclmul)
        cxl_table.copy_lines_crc = cxl_copy_lines_vpclmul;
    else if (cxl_table.copy_lines != cxl_copy_lines_plain && cxl_table.crc32c == cxl_crc32c_vpclmul256)
        cxl_table.copy_lines_crc = cxl_copy_lines_vpclmul256;
    else if (cxl_table.copy_lines != cxl_copy_lines_plain && cxl_table.crc32c == cxl_crc32c_sse42)
        cxl_table.copy_lines_crc = cxl_copy_lines_sse42;
    return 0;
}

#else   /* Arm64, and CPUs for which only PAGE media work */

#if defined(__aarch64__)
enum { HAS_CRC32 = 1 << 7, HAS_DCPOP = 1 << 16 };    /* AT_HWCAP */
enum { HAS_DCPODP = 1 << 0 };                        /* AT_HWCAP2 */
#endif

static int choose_write_back(void)
{
    const choice choices[] = {
#if defined(__aarch64__)
        {.name = "dc-cvap", .present = getauxval(AT_HWCAP) & HAS_DCPOP, .write_back = cxl_write_back_cvap},
        /* Deep persistence survives more failures and costs more: only when asked for. */
        {.name = "dc-cvadp", .present = getauxval(AT_HWCAP2) & HAS_DCPODP, .write_back = cxl_write_back_cvadp},
#endif
        {.name = "none", .present = override_of("CXLFS_WRITE_BACK") != NULL, .write_back = cxl_write_back_none},
    };
    int index = choose(choices, (int)(sizeof choices / sizeof choices[0]), "CXLFS_WRITE_BACK");
#if defined(__aarch64__)
    cxl_table.fence = cxl_fence_dsb;
    cxl_table.fence_name = "dsb";
#endif
    if (index < 0)
        return index == NO_CHOICE ? 0 : index;
    cxl_table.write_back = choices[index].write_back;
    cxl_table.write_back_name = choices[index].name;
    cxl_table.can_write_back = true;
    return 0;
}

static int choose_crc32c(void)
{
    const choice choices[] = {
#if defined(__aarch64__)
        {.name = "crc32c-arm", .present = getauxval(AT_HWCAP) & HAS_CRC32, .crc32c = cxl_crc32c_arm},
#endif
        {.name = "crc32c-table", .present = true, .crc32c = cxl_crc32c_table},
    };
    int index = choose(choices, (int)(sizeof choices / sizeof choices[0]), "CXLFS_CRC32C");
    if (index < 0)
        return index;
    cxl_table.crc32c = choices[index].crc32c;
    cxl_table.crc32c_name = choices[index].name;
    return 0;
}

static int choose_copy(void)
{
    const choice choices[] = {{.name = "stores", .present = true, .copy_lines = cxl_copy_lines_plain}};
    int index = choose(choices, 1, "CXLFS_COPY");
    return index < 0 ? index : 0;
}

#endif

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int outcome;

static void initialise(void)
{
    outcome = choose_write_back();
    if (outcome == 0)
        outcome = choose_crc32c();
    if (outcome == 0)
        outcome = choose_copy();
}

int cxl_dispatch_init(void)
{
    pthread_once(&once, initialise);
    return outcome;
}

const char *cxl_dispatch_write_back(void)
{
    return cxl_table.write_back_name;
}

const char *cxl_dispatch_fence(void)
{
    return cxl_table.fence_name;
}

const char *cxl_dispatch_crc32c(void)
{
    return cxl_table.crc32c_name;
}

const char *cxl_dispatch_copy(void)
{
    return cxl_table.copy_name;
}
