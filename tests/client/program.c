/* program.c - a program that uses the installed client library, in C11 and in C++: what each call does is compared with
 * what a plain file would do.
 *
 * Usage: program SCENE PATH direct|kernel [NUMBER]; prints what is wrong and exits 1. The third says where the bytes
 * are to go. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE             /* what C++ does by itself */
#endif
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cxlfs_client.h>

enum { MIB = 1 << 20, PART = 2 * MIB + 777, PARTS = 4, PIECE = 300000, SIZE = PARTS * PART };

static int failures;
static int is_direct;
static unsigned char content[SIZE], found[SIZE];

#define CHECK(condition) ((condition) ? (void)0 : failed(__LINE__, #condition))

static void failed(int line, const char *condition)
{
    printf("line %d: %s (errno %d: %s)\n", line, condition, errno, strerror(errno));
    failures++;
}

static cxlfs_counts counted(void)
{
    cxlfs_counts counts;
    cxlfs_statistics(&counts, sizeof counts);
    return counts;
}

static void require(const void *pointer, const char *what)
{
    if (pointer != NULL)
        return;
    printf("%s: %s\n", what, strerror(errno));
    exit(1);
}

static cxlfs_file *opened(const char *path, int flags)
{
    cxlfs_file *file = cxlfs_open(path, flags, 0666);
    require(file, path);
    return file;
}

static void save(const char *path, const void *bytes, size_t length)
{
    cxlfs_file *file = opened(path, O_WRONLY | O_CREAT | O_TRUNC);
    CHECK(cxlfs_write(file, bytes, length) == (ssize_t)length);
    CHECK(cxlfs_close(file) == 0);
}

/* By plain calls of the kernel. */
static int has(const char *path, const void *bytes, size_t length)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    int same = fd >= 0 && fstat(fd, &status) == 0 && status.st_size == (off_t)length &&
               pread(fd, found, length, 0) == (ssize_t)length && memcmp(found, bytes, length) == 0;
    if (fd >= 0)
        close(fd);
    return same;
}

/* ------------------------------------------------------------------------------------- writing */

typedef struct {
    cxlfs_file *file;
    size_t first;
} part;

static void *write_part(void *argument)
{
    const part *own = (const part *)argument;
    for (size_t at = own->first; at < own->first + PART;) {
        size_t left = own->first + PART - at, length = left < PIECE ? left : (size_t)PIECE;
        CHECK(cxlfs_pwrite(own->file, content + at, length, (int64_t)at) == (ssize_t)length);
        at += length;
    }
    return NULL;
}

static void *read_part(void *argument)
{
    const part *own = (const part *)argument;
    CHECK(cxlfs_pread(own->file, found + own->first, PART, (int64_t)own->first) == PART);
    return NULL;
}

static void each_part(cxlfs_file *file, void *(*run)(void *))
{
    pthread_t threads[PARTS];
    part parts[PARTS];
    for (size_t i = 0; i < PARTS; i++) {
        parts[i].file = file;
        parts[i].first = i * PART;
        if (pthread_create(&threads[i], NULL, run, &parts[i]) != 0)
            abort();
    }
    for (size_t i = 0; i < PARTS; i++)
        pthread_join(threads[i], NULL);
}

static void scene_threads(const char *path)
{
    int error = -1;
    cxlfs_file *file = opened(path, O_WRONLY | O_CREAT | O_TRUNC);
    CHECK((cxlfs_why_not(file, &error) == NULL) == is_direct && (error == 0) == is_direct);
    each_part(file, write_part);
    CHECK(cxlfs_seek(file, 0, SEEK_CUR) == 0);
    CHECK(cxlfs_flush(file) == 0);
    CHECK(has(path, content, SIZE));
    CHECK(cxlfs_sync(file) == 0);
    CHECK(cxlfs_close(file) == 0);
    CHECK(!is_direct || counted().direct_bytes >= SIZE - PARTS * MIB);
    CHECK(is_direct || counted().direct_bytes == 0);
    file = opened(path, O_RDONLY);
    each_part(file, read_part);
    CHECK(memcmp(found, content, SIZE) == 0);
    CHECK(cxlfs_pread(file, found, MIB, SIZE - 5) == 5 && memcmp(found, content + SIZE - 5, 5) == 0);
    CHECK(cxlfs_pread(file, found, MIB, SIZE) == 0);
    CHECK((counted().read_bytes > PART) == is_direct);
    CHECK((cxlfs_why_not(file, NULL) == NULL) == is_direct);
    CHECK(cxlfs_close(file) == 0);
}

static unsigned char changing[PIECE];
static int is_over;

static void *change(void *nothing)
{
    while (!__atomic_load_n(&is_over, __ATOMIC_RELAXED))
        for (size_t i = 0; i < PIECE; i += 64)
            __atomic_fetch_xor(&changing[i], 0xff, __ATOMIC_RELAXED);
    return nothing;
}

/* Memory changes while it is stored: some mixture is there, and can be read. */
static void scene_changing(const char *path)
{
    pthread_t thread;
    cxlfs_file *file = opened(path, O_WRONLY | O_CREAT | O_TRUNC);
    if (pthread_create(&thread, NULL, change, NULL) != 0)
        abort();
    for (int i = 0; i < 40; i++)
        CHECK(cxlfs_write(file, changing, (size_t)(PIECE - i)) == PIECE - i);
    __atomic_store_n(&is_over, 1, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
    CHECK(cxlfs_close(file) == 0);
    cxlfs_map *map = cxlfs_map_open(path, CXLFS_MAP_VERIFY);
    require(map, "what changed while it was stored");
    CHECK(cxlfs_map_size(map) == 40 * PIECE - 40 * 39 / 2);
    cxlfs_unmap(map);
}

static void scene_calls(const char *path)
{
    cxlfs_file *file = opened(path, O_RDWR | O_CREAT | O_TRUNC);
    CHECK(cxlfs_write(file, content, 3 * MIB) == 3 * MIB);
    CHECK(cxlfs_write(file, content, 0) == 0);
    CHECK(cxlfs_seek(file, -MIB, SEEK_CUR) == 2 * MIB);
    CHECK(cxlfs_read(file, found, 2 * MIB) == MIB && memcmp(found, content + 2 * MIB, MIB) == 0);
    CHECK(cxlfs_seek(file, MIB, SEEK_END) == 4 * MIB);
    CHECK(cxlfs_write(file, "behind a hole", 13) == 13);
    CHECK(cxlfs_pread(file, found, 100, 3 * MIB - 3) == 100 && memcmp(found, content + 3 * MIB - 3, 3) == 0 &&
          found[3] == 0);
    CHECK(cxlfs_truncate(file, 3 * MIB) == 0 && cxlfs_seek(file, 0, SEEK_END) == 3 * MIB);
    CHECK(cxlfs_seek(file, 5, SEEK_SET) == 5);
    CHECK(cxlfs_seek(file, -6, SEEK_CUR) == -1 && errno == EINVAL);
    CHECK(cxlfs_seek(file, 0, 9) == -1 && errno == EINVAL);
    CHECK(cxlfs_pwrite(file, content, 1, -1) == -1 && errno == EINVAL);
    int fd = cxlfs_fileno(file);
    CHECK(fd >= 0 && lseek(fd, 0, SEEK_CUR) == 5 && (fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK(cxlfs_close(file) == 0);
    CHECK(has(path, content, 3 * MIB));
    file = opened(path, O_WRONLY | O_APPEND);
    int error;
    CHECK(cxlfs_why_not(file, &error) != NULL && error == EINVAL);
    CHECK(cxlfs_write(file, content + 3 * MIB, MIB) == MIB && cxlfs_seek(file, 0, SEEK_CUR) == 4 * MIB);
    CHECK(cxlfs_read(file, found, 1) == -1 && errno == EBADF);
    CHECK(cxlfs_revert(file) == -1 && errno == EINVAL);
    CHECK(cxlfs_close(file) == 0);
    CHECK(has(path, content, 4 * MIB));
    CHECK(cxlfs_open(path, O_WRONLY | O_CREAT | O_EXCL, 0666) == NULL && errno == EEXIST);
    CHECK(cxlfs_fdopen(-1, 0) == NULL && errno == EBADF);
    file = cxlfs_fdopen(open(path, O_RDONLY | O_CLOEXEC), 0);
    require(file, path);
    CHECK(cxlfs_write(file, content, 1) == -1 && errno == EBADF);
    CHECK(cxlfs_close(file) == 0);
    CHECK(cxlfs_client_version() == CXLFS_CLIENT_VERSION);
}

static void scene_fork(const char *path)
{
    int status;
    cxlfs_file *file = opened(path, O_WRONLY | O_CREAT | O_TRUNC);
    CHECK(cxlfs_write(file, content, 2 * MIB) == 2 * MIB);
    pid_t child = fork();
    if (child == 0) {
        CHECK(cxlfs_write(file, "child", 5) == 5);
        CHECK(counted().media == 0);
        _exit(failures != 0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(cxlfs_pwrite(file, content + 2 * MIB, MIB, 2 * MIB) == MIB);
    CHECK(cxlfs_close(file) == 0);
    CHECK(has(path, content, 3 * MIB));
}

static void scene_stream(const char *path)
{
    cxlfs_file *file = opened(path, O_RDWR | O_CREAT | O_TRUNC);
    FILE *stream = cxlfs_stream(file, "w+");
    require(stream, path);
    for (size_t at = 0; at < 3 * MIB; at += 1000)
        CHECK(fwrite(content + at, 3 * MIB - at < 1000 ? 3 * MIB - at : 1000, 1, stream) == 1);
    CHECK(fwrite(content + 3 * MIB, MIB, 3, stream) == 3);
    CHECK(fseek(stream, MIB + 3, SEEK_SET) == 0 && fread(found, 1, 10, stream) == 10);
    CHECK(memcmp(found, content + MIB + 3, 10) == 0);
    CHECK(fseek(stream, 0, SEEK_END) == 0 && ftell(stream) == 6 * MIB);
    CHECK(fflush(stream) == 0 && cxlfs_sync(file) == 0);
    CHECK(fclose(stream) == 0);
    CHECK(has(path, content, 6 * MIB));
    file = opened("/dev/full", O_WRONLY);
    stream = cxlfs_stream(file, "w");
    require(stream, "/dev/full");
    CHECK(fputs("anything", stream) >= 0);
    CHECK(fclose(stream) == EOF && errno == ENOSPC);
    CHECK(cxlfs_stream(NULL, "?") == NULL && errno == EINVAL);
}

/* ----------------------------------------------------------------------------------- replacing */

static cxlfs_file *replaced(const char *path)
{
    cxlfs_file *file = cxlfs_replace(path, 0666);
    require(file, path);
    return file;
}

static void scene_replace(const char *path)
{
    char other[512];
    snprintf(other, sizeof other, "%s.other", path);
    for (int is_new = 1; is_new >= 0; is_new--) {
        for (int at = 0; at < 3; at++) {            /* before a byte, after a few, after many */
            cxlfs_file *file = replaced(path);
            CHECK(at == 0 || cxlfs_write(file, content, at == 1 ? 5 : 3 * MIB) > 0);
            CHECK(cxlfs_revert(file) == 0 && cxlfs_revert(file) == 0);
            CHECK(cxlfs_write(file, content, 5) == -1 && errno == ECANCELED);
            CHECK(cxlfs_close(file) == 0);
            if (is_new)
                CHECK(access(path, F_OK) != 0 && errno == ENOENT);
            else
                CHECK(has(path, content, is_direct ? 3 * MIB : 0));
        }
        cxlfs_file *file = replaced(path);
        CHECK(cxlfs_write(file, content, 3 * MIB) == 3 * MIB);
        CHECK(is_new || !is_direct || counted().direct_bytes > 0);
        CHECK(cxlfs_close(file) == 0);
        CHECK(has(path, content, 3 * MIB));
    }
    cxlfs_file *file = replaced(other);             /* somebody else takes the name meanwhile */
    CHECK(rename(path, other) == 0);
    CHECK(cxlfs_revert(file) == 0 && cxlfs_close(file) == 0);
    CHECK(has(other, content, 3 * MIB) && unlink(other) == 0);
    CHECK(cxlfs_replace("/no/such/directory/file", 0666) == NULL && errno == ENOENT);
}

/* ---------------------------------------------------------------------------------------- maps */

static void scene_map(const char *path)
{
    uint64_t bad_offset, bad_length;
    save(path, content, SIZE);
    for (unsigned flags = 0; flags <= (CXLFS_MAP_VERIFY | CXLFS_MAP_PRIVATE); flags++) {
        cxlfs_map *map = cxlfs_map_open(path, flags);
        require(map, path);
        CHECK((cxlfs_map_why_not(map, NULL) == NULL) == is_direct);
        CHECK(cxlfs_map_size(map) == SIZE);
        const void *middle = cxlfs_map_get(map, PART, PART);
        CHECK(middle != NULL && memcmp(middle, content + PART, PART) == 0);
        CHECK(cxlfs_map_verify(map, 0, SIZE, &bad_offset, &bad_length) == 0);
        CHECK(memcmp(cxlfs_map_data(map), content, SIZE) == 0);
        CHECK(cxlfs_map_get(map, SIZE, 0) != NULL);
        CHECK(cxlfs_map_get(map, 1, SIZE) == NULL && errno == ERANGE);
        if ((flags & CXLFS_MAP_PRIVATE) != 0)
            memcpy((char *)cxlfs_map_data(map) + MIB, "changed", 7);
        cxlfs_unmap(map);
    }
    CHECK(has(path, content, SIZE));
    CHECK(!is_direct || counted().mapped_bytes == 4 * (uint64_t)SIZE);
    cxlfs_map *map = cxlfs_map_open(path, 0);
    require(map, path);
    if (is_direct) {
        save(path, content + 1, MIB);
        CHECK(cxlfs_map_verify(map, 0, SIZE, NULL, NULL) == 0 && memcmp(cxlfs_map_data(map), content, SIZE) == 0);
    } else {                                        /* where the kernel has nothing any more, it says so */
        CHECK(truncate(path, MIB) == 0);
        CHECK(cxlfs_map_verify(map, 0, SIZE, &bad_offset, &bad_length) == -1 && errno == EIO);
        CHECK(bad_offset == MIB && bad_length == (uint64_t)sysconf(_SC_PAGESIZE));
        CHECK(cxlfs_map_verify(map, 0, MIB, NULL, NULL) == 0);
    }
    cxlfs_unmap(map);
    save(path, content, 0);
    map = cxlfs_map_open(path, CXLFS_MAP_VERIFY);
    require(map, path);
    CHECK(cxlfs_map_size(map) == 0 && cxlfs_map_get(map, 0, 0) != NULL);
    cxlfs_unmap(map);
    CHECK(cxlfs_map_open("/no/such/file", 0) == NULL && errno == ENOENT);
    CHECK(cxlfs_map_fdopen(-1, 0) == NULL && errno == EBADF);
}

/* The file has what was saved, and damage at offset. */
static void scene_damage(const char *path, uint64_t offset)
{
    uint64_t bad_offset = 0, bad_length = 0;
    cxlfs_map *map = cxlfs_map_open(path, 0);
    require(map, path);
    CHECK((cxlfs_map_why_not(map, NULL) == NULL) == is_direct);
    CHECK(cxlfs_map_verify(map, 0, SIZE, &bad_offset, &bad_length) == -1 && errno == EIO);
    CHECK(bad_offset <= offset && bad_length <= MIB);
    CHECK(offset - bad_offset < (is_direct ? bad_length : (uint64_t)MIB));    /* the kernel tells of one page */
    CHECK(cxlfs_map_get(map, offset, 1) == NULL && errno == EIO);
    CHECK(cxlfs_map_get(map, 0, bad_offset) != NULL && memcmp(cxlfs_map_data(map), content, bad_offset) == 0);
    cxlfs_unmap(map);
    CHECK(cxlfs_map_open(path, CXLFS_MAP_VERIFY) == NULL && errno == EIO);
    cxlfs_file *file = opened(path, O_RDONLY);
    CHECK(cxlfs_read(file, found, 2 * MIB) == 2 * MIB && memcmp(found, content, 2 * MIB) == 0);
    CHECK(cxlfs_pread(file, found, PIECE, (int64_t)offset - PIECE / 2) <= PIECE / 2);
    CHECK(cxlfs_pread(file, found, 1, (int64_t)offset) == -1 && errno == EIO);
    CHECK(cxlfs_pread(file, found, MIB, SIZE - MIB) == MIB && memcmp(found, content + SIZE - MIB, MIB) == 0);
    CHECK(cxlfs_close(file) == 0);
}

int main(int argc, char **argv)
{
    if (argc < 4)
        return 2;
    const char *scene = argv[1], *path = argv[2];
    is_direct = strcmp(argv[3], "direct") == 0;
    uint64_t state = 1;
    for (size_t i = 0; i < SIZE; i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        content[i] = (unsigned char)(state >> 56);
    }
    if (strcmp(scene, "threads") == 0)
        scene_threads(path);
    else if (strcmp(scene, "changing") == 0)
        scene_changing(path);
    else if (strcmp(scene, "save") == 0)
        save(path, content, SIZE);
    else if (strcmp(scene, "calls") == 0)
        scene_calls(path);
    else if (strcmp(scene, "fork") == 0)
        scene_fork(path);
    else if (strcmp(scene, "stream") == 0)
        scene_stream(path);
    else if (strcmp(scene, "replace") == 0)
        scene_replace(path);
    else if (strcmp(scene, "map") == 0)
        scene_map(path);
    else if (strcmp(scene, "damage") == 0 && argc == 5)
        scene_damage(path, strtoull(argv[4], NULL, 10));
    else
        return 2;
    cxlfs_forget();
    CHECK(counted().media == 0);
    return failures != 0;
}
