/* run_scenes.c - what programs do to files, a scene for each argument, and what each call answered, on stdout. A
 * scene has to say the same, and leave the same files, on tmpfs, on a mount, and on a mount with `cxlfs run`.
 *
 * Never: depends on time, numbers of processes, or the order of threads.
 */
#include "run_scenes.h"

uint8_t *bytes;

static void fill(void)
{
    uint64_t word = 0x9e3779b97f4a7c15;
    bytes = malloc(BYTES + 8);
    for (size_t i = 0; i < BYTES; i += 8) {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        memcpy(bytes + i, &word, 8);
    }
}

/* ------------------------------------------------------------------------------------ writing */

static void plain(void)
{
    int fd = make("plain", O_WRONLY | O_TRUNC);
    const size_t sizes[] = {BYTES, 1, 4095, 0, 65536, BYTES, 17, MIB};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        said("write", write(fd, bytes, sizes[i]));
        position(fd);
    }
    said("close", close(fd));
    said("again", close(fd));
    said("gone", write(fd, bytes, BYTES));
}

static void pieces(void)
{
    int fd = make("pieces", O_RDWR | O_TRUNC);
    struct iovec list[64];
    size_t total = 0;
    for (int i = 0; i < 64; i++) {
        list[i] = (struct iovec){bytes + i * 1000, i % 7 == 3 ? 0 : (size_t)(i * 1777 + 1)};
        total += list[i].iov_len;
    }
    for (int i = 0; i < 5; i++)
        said("writev", writev(fd, list, 64));
    position(fd);
    said("pwritev", pwritev(fd, list, 64, 12345));
    said("pwritev2", pwritev2(fd, list, 30, -1, 0));
    said("pwritev2", pwritev2(fd, list, 30, 999, RWF_DSYNC));
    said("none", writev(fd, list, 0));
    said("too many", writev(fd, list, -1));
    said("nowhere", pwritev(fd, list, 3, -5));
    position(fd);
    said("close", close(fd));
}

static void places(void)
{
    int fd = make("places", O_RDWR | O_TRUNC);
    uint8_t *back = malloc(BYTES);
    said("first", pwrite(fd, bytes, BYTES, 7 * MIB));
    said("end", lseek(fd, 0, SEEK_END));
    for (int i = 0; i < 40; i++) {
        off_t offset = (off_t)((i * 7919) % 97) * 65537;
        said("pwrite", pwrite(fd, bytes + i * 31, (size_t)(i * 4099 + 1), offset));
        said("pread", pread(fd, back, 200000, offset > 1000 ? offset - 1000 : 0));
        sum("read", back, 200000);
    }
    said("fsync", fsync(fd));
    said("set", lseek(fd, 5, SEEK_SET));
    said("read", read(fd, back, MIB));
    said("write", write(fd, bytes, BYTES));
    said("fdatasync", fdatasync(fd));
    position(fd);
    said("nowhere", pwrite(fd, bytes, 10, -1));
    said("close", close(fd));
    free(back);
}

static void sizes(void)
{
    struct stat status;
    int fd = make("sizes", O_RDWR | O_TRUNC);
    said("write", write(fd, bytes, BYTES));
    fstat(fd, &status);
    said("size", status.st_size);
    said("cut", ftruncate(fd, MIB + 5));
    said("write", write(fd, bytes, 2 * MIB));
    stat("sizes", &status);
    said("size", status.st_size);
    said("grow", ftruncate(fd, 9 * MIB));
    said("write", pwrite(fd, bytes, BYTES, 4 * MIB));
    said("room", posix_fallocate(fd, 0, 12 * MIB));
    said("data", lseek(fd, 0, SEEK_END));
    said("set", lseek(fd, 100, SEEK_SET));
    said("write", write(fd, bytes, BYTES));
    position(fd);
    said("close", close(fd));
}

/* -------------------------------------------------------------------------------- descriptors */

static void duplicates(void)
{
    int fd = make("duplicates", O_WRONLY | O_TRUNC), other = make("others", O_WRONLY | O_TRUNC);
    int copy = dup(fd), far = fcntl(fd, F_DUPFD_CLOEXEC, 100);
    said("far", far);
    for (int i = 0; i < 3; i++) {
        said("fd", write(fd, bytes, BYTES));
        said("copy", write(copy, bytes + 1, MIB));
        said("far", write(far, bytes + 2, 777777));
    }
    position(copy);
    said("close", close(fd));
    said("copy", write(copy, bytes + 3, BYTES));
    said("other", write(other, bytes, BYTES));
    said("over", dup2(copy, other) == other);
    said("other", write(other, bytes + 4, BYTES));
    position(far);
    said("three", dup3(far, 200, O_CLOEXEC));
    said("close", close(copy));
    said("200", write(200, bytes + 5, BYTES));
    said("same", dup2(200, 200));
    said("bad", dup2(copy, 200));
    said("200", write(200, bytes + 6, MIB));
    said("range", close_range(100, 300, 0));
    said("200", write(200, bytes, 1));
    said("other", write(other, bytes + 7, MIB));
    closefrom(3);
    said("other", write(other, bytes, 1));
    fd = make("after", O_WRONLY | O_TRUNC);
    said("lowest", fd);
    said("after", write(fd, bytes, BYTES));
    said("close", close(fd));
}

/* The descriptor is closed where nobody sees it, and its number is another file's. */
static void unseen(void)
{
    int fd = make("unseen", O_WRONLY | O_TRUNC), number = fd;
    said("write", write(fd, bytes, BYTES));
    said("close", syscall(SYS_close, fd));
    fd = (int)syscall(SYS_openat, AT_FDCWD, "unseen2", O_CREAT | O_WRONLY | O_TRUNC, 0644);
    said("same", fd == number);
    said("write", write(fd, bytes + 1, BYTES));
    said("write", write(fd, bytes + 2, MIB));
    position(fd);
    said("close", close(fd));
    fd = make("unseen3", O_WRONLY | O_TRUNC);
    said("write", write(fd, bytes + 3, BYTES));
    said("close", syscall(SYS_close, fd));
    fd = make("unseen4", O_WRONLY | O_TRUNC);
    said("write", write(fd, bytes + 4, BYTES));
    said("close", close(fd));
}

static void appended(void)
{
    int fd = make("appended", O_WRONLY | O_TRUNC | O_APPEND);
    said("write", write(fd, bytes, BYTES));
    said("set", lseek(fd, 0, SEEK_SET));
    said("write", write(fd, bytes, MIB));
    said("close", close(fd));
    fd = make("later", O_WRONLY | O_TRUNC);
    said("write", write(fd, bytes, BYTES));
    said("set", lseek(fd, 0, SEEK_SET));
    said("flags", fcntl(fd, F_SETFL, O_APPEND));
    said("write", write(fd, bytes, BYTES));
    position(fd);
    said("flags", fcntl(fd, F_SETFL, 0));
    said("set", lseek(fd, 10, SEEK_SET));
    said("write", write(fd, bytes, BYTES));
    said("close", close(fd));
    fd = open("later", O_RDONLY);
    said("read only", write(fd, bytes, BYTES));
    said("close", close(fd));
}

static void openers(void)
{
    uint8_t *back = malloc(BYTES);
    int fd = make("openers", O_WRONLY | O_TRUNC);
    said("write", write(fd, bytes, BYTES));
    int reader = open("openers", O_RDONLY), writer = open("openers", O_WRONLY);
    said("read", read(reader, back, BYTES));
    sum("read", back, BYTES);
    for (int i = 0; i < 4; i++) {
        said("write", pwrite(fd, bytes + i, BYTES, i * MIB));
        said("other", pwrite(writer, bytes + 100 + i, MIB, i * MIB + 4096));
        said("read", pread(reader, back, 2 * MIB, i * MIB));
        sum("read", back, 2 * MIB);
    }
    said("close", close(writer));
    said("write", write(fd, bytes, BYTES));
    said("rename", rename("openers", "renamed"));
    said("write", write(fd, bytes, BYTES));
    said("unlink", unlink("renamed"));
    said("write", write(fd, bytes, BYTES));
    said("end", lseek(reader, 0, SEEK_END));
    said("close", close(fd));
    said("read", pread(reader, back, MIB, 3 * BYTES));
    sum("read", back, MIB);
    said("close", close(reader));
    free(back);
}

static void memory(void)
{
    int fd = make("memory", O_WRONLY | O_TRUNC);
    uint8_t *area = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    said("write", write(fd, bytes, BYTES));
    said("null", write(fd, NULL, MIB));
    said("wild", pwrite(fd, (void *)16, BYTES, 0));
    munmap(area + 2 * MIB, 2 * MIB);
    position(fd);
    said("short", write(fd, area + 2 * MIB, MIB));
    position(fd);
    said("list", writev(fd, (void *)16, 4));
    struct iovec bad[2] = {{NULL, 4096}, {bytes, MIB}};
    said("bad", writev(fd, bad, 2));
    position(fd);
    said("write", write(fd, bytes, MIB));
    struct rlimit limit = {8 * MIB, 8 * MIB};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    said("far", pwrite(fd, bytes, BYTES, 8 * MIB));
    said("near", pwrite(fd, bytes, MIB, 7 * MIB));
    said("close", close(fd));
}

/* ------------------------------------------------------------------------------------ streams */

static void streams(void)
{
    FILE *stream = fopen("streams", "w");
    said("small", (long long)fwrite(bytes, 1, 100, stream));
    said("large", (long long)fwrite(bytes, 1, BYTES, stream));
    said("tell", ftell(stream));
    said("items", (long long)fwrite(bytes, 1000, 1000, stream));
    said("small", fprintf(stream, "%d words\n", 12));
    said("tell", ftell(stream));
    said("past", write(fileno(stream), bytes, 0));
    said("seek", fseek(stream, 50, SEEK_SET));
    said("large", (long long)fwrite(bytes + 9, 1, MIB, stream));
    said("small", fputs("end of it", stream));
    said("tell", ftell(stream));
    int copy = dup(fileno(stream));
    said("flush", fflush(stream));
    FILE *second = fdopen(copy, "w");
    said("large", (long long)fwrite(bytes + 11, 1, BYTES, second));
    said("tell", ftell(second));
    said("close", fclose(second));
    said("seek", fseek(stream, 0, SEEK_END));
    said("tell", ftell(stream));
    stream = freopen("streams2", "w+", stream);
    said("large", (long long)fwrite(bytes, 1, BYTES, stream));
    rewind(stream);
    uint8_t *back = malloc(BYTES);
    said("read", (long long)fread(back, 1, BYTES, stream));
    sum("read", back, BYTES);
    said("close", fclose(stream));
    stream = fopen("streams2", "a");
    said("large", (long long)fwrite(bytes, 1, BYTES, stream));
    said("tell", ftell(stream));
    said("close", fclose(stream));
    stream = fopen("streams2", "r");
    said("read only", (long long)fwrite(bytes, 1, BYTES, stream));
    said("error", ferror(stream) != 0);
    said("close", fclose(stream));
    free(back);
}

static void copies(void)
{
    int from = make("from", O_RDWR | O_TRUNC), to = make("to", O_RDWR | O_TRUNC), ends[2];
    said("write", write(from, bytes, BYTES));
    said("write", write(to, bytes + 5, 2 * MIB));
    said("set", lseek(from, 1000, SEEK_SET));
    said("sendfile", sendfile(to, from, NULL, MIB));
    position(from);
    position(to);
    off_t offset = 5;
    said("sendfile", sendfile(to, from, &offset, MIB));
    said("offset", offset);
    said("write", write(to, bytes, BYTES));
    off64_t in = 3, out = 4 * MIB;
    ssize_t done = copy_file_range(from, &in, to, &out, 700000, 0);
    if (done < 0)
        done = pwrite(to, bytes + 3, 700000, 4 * MIB);  /* not on every file system */
    said("range", done);
    said("pipe", pipe(ends));
    said("piped", write(ends[1], bytes, 60000));
    said("splice", splice(ends[0], NULL, to, NULL, 60000, 0));
    position(to);
    said("write", write(to, bytes, BYTES));
    said("close", close(from));
    said("close", close(to));
}

static void sent(void)
{
    char again[32];
    int from = memfd_create("from", 0), to = make("to", O_RDWR | O_TRUNC), ends[2];
    snprintf(again, sizeof again, "/proc/self/fd/%d", from);
    int appends = make("appends", O_WRONLY | O_TRUNC | O_APPEND), unread = open(again, O_WRONLY);
    off_t offset = BYTES - 400000;
    for (size_t done = 0; done < 2 * BYTES; done += BYTES)
        said("write", write(from, bytes + done / 1000, BYTES));
    said("set", lseek(from, 0, SEEK_SET));
    said("all", sendfile(to, from, NULL, 10 * MIB));
    position(from);
    position(to);
    said("end", sendfile(to, from, NULL, MIB));
    said("offset", sendfile(to, from, &offset, MIB));
    said("behind", offset);
    offset = 2 * BYTES - 300000;
    said("rest", sendfile(to, from, &offset, MIB));
    said("behind", offset);
    said("nothing", sendfile(to, from, &offset, MIB));
    offset = -1;
    said("before", sendfile(to, from, &offset, MIB));
    said("nowhere", sendfile(to, from, (off_t *)8, MIB));
    offset = 5;
    said("appends", sendfile(appends, from, &offset, MIB));
    said("unread", sendfile(to, unread, &offset, MIB));
    said("pipe", pipe(ends));
    said("piped", sendfile(to, ends[0], NULL, MIB));
    said("itself", sendfile(to, to, &offset, MIB));
    position(from);
    position(to);
    said("back", lseek(to, 100, SEEK_SET));
    said("over", sendfile(to, from, &offset, MIB));
    said("close", close(to));
    said("closed", sendfile(to, from, &offset, MIB));
    said("unwritten", sendfile(open("to", O_RDONLY), from, &offset, MIB));
    said("close", close(from));
}

/* --------------------------------------------------------------------------------------- main */

int main(int count, char **arguments)
{
    static const struct {
        const char *name;
        void (*play)(void);
    } scenes[] = {
        {"plain", plain},
        {"pieces", pieces},
        {"places", places},
        {"sizes", sizes},
        {"duplicates", duplicates},
        {"unseen", unseen},
        {"appended", appended},
        {"openers", openers},
        {"memory", memory},
        {"streams", streams},
        {"copies", copies},
        {"sent", sent},
    };
    if (count != 2)
        return 2;
    fill();
    errno = 0;
    for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++) {
        if (strcmp(arguments[1], scenes[i].name) == 0) {
            scenes[i].play();
            return 0;
        }
    }
    return play_rules(arguments[1]) || play_other(arguments[1], arguments[0]) ? 0 : 2;
}
