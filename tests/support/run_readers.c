/* run_readers.c - the scenes of run_scenes.c that read: of files that stand still, beside those who change them, and of
 * files that are not what they were.
 */
#include "run_scenes.h"

enum { LARGE = 9 * MIB + 777 };

static uint8_t *large, *back;

/* A file of LARGE bytes, all of it written and closed. */
static void put(const char *name, unsigned salt)
{
    int fd = make(name, O_WRONLY | O_TRUNC);
    if (large == NULL) {
        large = malloc(LARGE);
        back = malloc(LARGE + MIB);
    }
    for (size_t i = 0; i < LARGE; i++)
        large[i] = bytes[(i + salt) % BYTES] ^ (uint8_t)(i / BYTES);
    said("put", write(fd, large, LARGE));
    said("close", close(fd));
}

/* So that it is read directly from here on. */
static int open_read(const char *name)
{
    int fd = open(name, O_RDONLY);
    said("all", pread(fd, back, LARGE, 0));
    sum("all", back, LARGE);
    return fd;
}

static void readers(void)
{
    put("readers", 1);
    int fd = open_read("readers");
    const size_t sizes[] = {MIB, 1, 4096, 0, 65536, 100000, 5 * MIB, 70001, 5 * MIB, MIB, 4096};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        memset(back, 7, 5 * MIB);
        said("read", read(fd, back, sizes[i]));
        sum("read", back, sizes[i]);
        position(fd);
    }
    for (int i = 0; i < 40; i++) {
        size_t length = (size_t)(i * 40961 + 4000);
        off_t offset = (off_t)((i * 7919) % 97) * 98765;
        memset(back, i, length);
        said("pread", pread(fd, back, length, offset));
        sum("pread", back, length);
    }
    said("behind", pread(fd, back, MIB, LARGE));
    said("far", pread(fd, back, MIB, 1LL << 60));
    said("nowhere", pread(fd, back, MIB, -1));
    said("set", lseek(fd, LARGE - 5000, SEEK_SET));
    said("end", read(fd, back, MIB));
    said("end", read(fd, back, MIB));
    said("far", lseek(fd, 1LL << 40, SEEK_SET));
    said("end", read(fd, back, MIB));
    position(fd);
    said("written", write(fd, bytes, MIB));
    said("close", close(fd));
    said("gone", read(fd, back, MIB));
}

static void read_pieces(void)
{
    struct iovec list[40];
    size_t at = 0;
    put("read_pieces", 2);
    int fd = open_read("read_pieces");
    for (int i = 0; i < 40; i++) {
        list[i] = (struct iovec){back + at, i % 7 == 3 ? 0 : (size_t)(i * i * 211 + 1)};
        at += list[i].iov_len + 3;
    }
    memset(back, 0, at);
    for (int i = 0; i < 3; i++) {
        said("readv", readv(fd, list + i, 40 - i));
        sum("readv", back, at);
        position(fd);
    }
    said("preadv", preadv(fd, list, 40, 12345));
    said("preadv", preadv(fd, list, 40, LARGE - 1000000));
    sum("preadv", back, at);
    said("preadv2", preadv2(fd, list, 33, -1, 0));
    said("preadv2", preadv2(fd, list, 33, 99, RWF_HIPRI));
    sum("preadv2", back, at);
    said("none", readv(fd, list, 0));
    said("too many", readv(fd, list, -1));
    said("list", readv(fd, (void *)16, 4));
    position(fd);
    said("close", close(fd));
}

static void read_memory(void)
{
    put("read_memory", 3);
    int fd = open_read("read_memory");
    uint8_t *area = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(area + 2 * MIB, 2 * MIB);
    said("null", read(fd, NULL, MIB));
    said("wild", pread(fd, (void *)16, 2 * MIB, 0));
    position(fd);
    said("fits", read(fd, area, 2 * MIB));
    position(fd);
    mprotect(area, MIB, PROT_READ);
    said("shut", read(fd, area, MIB));
    position(fd);
    struct iovec bad[2] = {{area, 4096}, {back, MIB}};
    said("bad", readv(fd, bad, 2));
    position(fd);
    said("read", read(fd, back, MIB));
    sum("read", back, MIB);
    said("close", close(fd));
}

static void read_holes(void)
{
    int fd = make("read_holes", O_WRONLY | O_TRUNC);
    said("data", pwrite(fd, bytes, MIB + 17, 2 * MIB + 5));
    said("data", pwrite(fd, bytes, BYTES, 12 * MIB + 4000));
    said("size", ftruncate(fd, 20 * MIB));
    said("close", close(fd));
    back = malloc(20 * MIB);
    fd = open("read_holes", O_RDONLY);
    said("all", read(fd, back, 20 * MIB));
    sum("all", back, 20 * MIB);
    for (off_t offset = 0; offset < 20 * MIB; offset += 777777) {
        memset(back, 1, MIB);
        said("pread", pread(fd, back, MIB, offset));
        sum("pread", back, MIB);
    }
    said("hole", lseek(fd, 13 * MIB, SEEK_SET));
    said("close", close(fd));
}

/* One descriptor is as good as another, and so is the number of one that was closed. */
static void read_duplicates(void)
{
    put("read_duplicates", 4);
    put("read_others", 5);
    int fd = open_read("read_duplicates"), copy = dup(fd), far = fcntl(fd, F_DUPFD, 300);
    for (int i = 0; i < 3; i++) {
        said("fd", read(fd, back, MIB));
        said("copy", read(copy, back + MIB, 300001));
        said("far", read(far, back + 2 * MIB, 65536));
        sum("bytes", back, 2 * MIB + 65536);
    }
    position(copy);
    said("close", close(fd));
    said("copy", read(copy, back, MIB));
    sum("copy", back, MIB);
    said("close", syscall(SYS_close, copy));
    said("same", syscall(SYS_openat, AT_FDCWD, "read_others", O_RDONLY) >= 0);
    for (int i = 3; i < 8; i++)
        said("any", pread(i, back, MIB, 4096) >= 0);
    sum("any", back, MIB);
    said("far", pread(far, back, MIB, 4096));
    sum("far", back, MIB);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        said("child", read(far, back, MIB));
        sum("child", back, MIB);
        int own = open_read("read_others");
        said("own", read(own, back, 2 * MIB));
        sum("own", back, 2 * MIB);
        _exit(0);
    }
    waitpid(child, NULL, 0);
    position(far);
    said("far", read(far, back, MIB));
    sum("far", back, MIB);
    said("close", close(far));
}

static void look(int fd, const char *what, size_t length, off_t offset)
{
    memset(back, 9, length);
    said(what, pread(fd, back, length, offset));
    sum(what, back, length);
}

/* The file is changed in every way there is, and read after each: through descriptors of before and of after. */
static void read_changes(void)
{
    struct stat status;
    put("read_changes", 6);
    int fd = open_read("read_changes"), writer = open("read_changes", O_WRONLY);
    said("write", pwrite(writer, bytes, MIB, 3 * MIB));
    look(fd, "written", 4 * MIB, 2 * MIB);
    for (int i = 0; i < 12; i++) {
        said("write", pwrite(writer, bytes + i, MIB, i * 500000));
        look(fd, "written", 8 * MIB, 0);
    }
    said("close", close(writer));
    for (int i = 0; i < 12; i++)
        look(fd, "again", 8 * MIB, i);
    said("cut", truncate("read_changes", 5 * MIB));
    look(fd, "cut", 6 * MIB, 0);
    said("grown", truncate("read_changes", 9 * MIB));
    for (int i = 0; i < 12; i++)
        look(fd, "grown", 8 * MIB, MIB);
    writer = open("read_changes", O_WRONLY | O_APPEND);
    said("append", write(writer, bytes, 2 * MIB));
    look(fd, "appended", 4 * MIB, 8 * MIB);
    fstat(fd, &status);
    said("size", status.st_size);
    said("close", close(writer));
    for (int i = 0; i < 10; i++)
        look(fd, "appended", 8 * MIB, 2 * MIB);
    writer = open("read_changes", O_RDWR);
    uint8_t *area = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED, writer, 0);
    said("close", close(writer));
    memcpy(area + 12345, bytes, 2 * MIB);
    look(fd, "mapped", 4 * MIB, 0);
    area[5] = 'x';
    look(fd, "mapped", 4 * MIB, 0);
    munmap(area, 4 * MIB);
    for (int i = 0; i < 10; i++)
        look(fd, "unmapped", 8 * MIB, 0);
    writer = open("read_changes", O_WRONLY | O_TRUNC);
    look(fd, "emptied", MIB, 0);
    said("write", write(writer, bytes, BYTES));
    look(fd, "rewritten", 5 * MIB, 0);
    said("close", close(writer));
    look(fd, "rewritten", 5 * MIB, 0);
    said("close", close(fd));
}

/* Names that come and go are nothing to who has the file open. */
static void read_names(void)
{
    put("read_names", 7);
    put("read_new", 8);
    int fd = open_read("read_names");
    said("rename", rename("read_new", "read_names"));
    look(fd, "old", 4 * MIB, 100);
    int other = open_read("read_names");
    look(other, "new", 4 * MIB, 100);
    said("unlink", unlink("read_names"));
    look(fd, "old", 4 * MIB, MIB);
    look(other, "new", 4 * MIB, MIB);
    said("close", close(fd));
    said("close", close(other));
}

static void read_streams(void)
{
    char line[100];
    put("read_streams", 9);
    FILE *stream = fopen("read_streams", "r");
    said("small", (long long)fread(back, 1, 100, stream));
    for (int i = 0; i < 4; i++) {
        said("large", (long long)fread(back, 3, 600000, stream));
        sum("large", back, 1800000);
        said("tell", ftell(stream));
        said("small", (long long)fread(back, 1, 33, stream));
        sum("small", back, 33);
        said("letter", fgetc(stream));
        said("tell", ftell(stream));
    }
    said("seek", fseek(stream, 77, SEEK_SET));
    said("large", (long long)fread(back, 1, 8 * MIB, stream));
    sum("large", back, 8 * MIB);
    said("rest", (long long)fread(back, 1, 8 * MIB, stream));
    sum("rest", back, MIB);
    said("end", feof(stream) != 0);
    said("tell", ftell(stream));
    said("none", (long long)fread(back, 1, MIB, stream));
    rewind(stream);
    said("end", feof(stream) != 0);
    said("back", ungetc('!', stream));
    said("large", (long long)fread(back, 1, MIB, stream));
    sum("large", back, MIB);
    said("tell", ftell(stream));
    int copy = dup(fileno(stream));
    said("shared", lseek(copy, 0, SEEK_CUR) >= MIB);
    said("close", fclose(stream));
    stream = fdopen(copy, "r");
    said("set", fseek(stream, 4 * MIB, SEEK_SET));
    said("line", fgets(line, 50, stream) != NULL);
    said("large", (long long)fread_unlocked(back, 1, 3 * MIB, stream));
    sum("large", back, 3 * MIB);
    said("tell", ftell(stream));
    said("write", (long long)fwrite(bytes, 1, MIB, stream));
    said("error", ferror(stream) != 0);
    said("close", fclose(stream));
}

/* Two threads share an offset: every byte is read by one of them. */
static int shared;
static atomic_llong read_in_all;

static void *take_part(void *argument)
{
    uint8_t *own = malloc(MIB);
    ssize_t got;
    while ((got = read(shared, own, 123457)) > 0)
        read_in_all += got;
    free(own);
    return argument;
}

static void read_shared(void)
{
    pthread_t threads[4];
    put("read_shared", 10);
    shared = open_read("read_shared");
    for (int round = 0; round < 5; round++) {
        read_in_all = 0;
        lseek(shared, 0, SEEK_SET);
        for (int i = 0; i < 4; i++)
            pthread_create(&threads[i], NULL, take_part, NULL);
        for (int i = 0; i < 4; i++)
            pthread_join(threads[i], NULL);
        said("in all", read_in_all);
        position(shared);
    }
    said("close", close(shared));
}

bool play_readers(const char *name)
{
    static const struct {
        const char *name;
        void (*play)(void);
    } scenes[] = {
        {"readers", readers},
        {"read_pieces", read_pieces},
        {"read_memory", read_memory},
        {"read_holes", read_holes},
        {"read_duplicates", read_duplicates},
        {"read_changes", read_changes},
        {"read_names", read_names},
        {"read_streams", read_streams},
        {"read_shared", read_shared},
    };
    for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++) {
        if (strcmp(name, scenes[i].name) == 0) {
            scenes[i].play();
            return true;
        }
    }
    return false;
}
