/* streams.c - steps through streams of libc. Each ends with fflush, so that nothing of a file stays in a buffer that
 * another descriptor changes.
 */
#include "fuzz.h"

enum { SMALL = 4096, BIG = 256 * KIB };
static char buffers[STREAMS][BIG];       /* libc would choose a size by what the file system says of itself */

static void give_buffer(FILE **one, unsigned size)
{
    if (*one != NULL)
        setvbuf(*one, size == 0 ? NULL : buffers[one - streams], size == 0 ? _IONBF : _IOFBF, size);
}

static FILE **pick_stream(void)
{
    unsigned first = below(STREAMS);
    for (unsigned i = 0; i < STREAMS; i++)
        if (streams[(first + i) % STREAMS] != NULL)
            return &streams[(first + i) % STREAMS];
    return &streams[first];
}

static void play_fopen(void)
{
    static const char *const modes[] = {"r", "w", "r+", "w+", "a", "a+"};
    FILE **one = &streams[below(STREAMS)];
    int name = (int)below(NAMES), mode = (int)below(6), buffer = (int)below(4);
    slot *from = pick();
    bool adopts = below(4) == 0;
    if (*one != NULL)
        say("fclose = %d", fclose(*one));
    if (adopts) {                           /* a stream of a descriptor that is there already */
        int fd = dup(from->fd);
        *one = fdopen(fd, "r+");
        if (*one == NULL)
            close(fd);
    } else {
        *one = fopen(name_of(name), modes[mode]);
        if (*one != NULL && shared->names[name] < 0)
            shared->names[name] = make_file();
        changed(shared->names[name]);
    }
    give_buffer(one, buffer == 0 ? 0 : buffer == 1 ? BIG : SMALL);
    say("adopts %d, file %d, mode %s = %ld", adopts, name, modes[mode], answer(*one == NULL ? -1 : 0));
}

static void play_fwrite(void)
{
    FILE *one = *pick_stream();
    size_t length = a_length(), size = 1 + below(3), short_length = 1 + below(200);
    if (one == NULL)
        return;
    for (int i = 0; i < NAMES; i++)
        changed(shared->names[i]);
    fseek(one, 0, SEEK_CUR);
    size_t done = fwrite(some_bytes(length), size, length / size, one);
    size_t more = below(2) ? fwrite_unlocked(some_bytes(short_length), 1, short_length, one) : 0;
    int last = fputc('x', one), failed = ferror(one) != 0, flushed = fflush(one);
    clearerr(one);
    say("%zu of %zu: %zu, %zu, %d, failed %d, flushed %d, at %ld", length, size, done, more, last, failed, flushed,
        ftell(one));
}

static void play_fread(void)
{
    FILE *one = *pick_stream();
    size_t length = a_length(), size = 1 + below(3);
    unsigned way = below(3);
    if (one == NULL)
        return;
    fseek(one, 0, SEEK_CUR);
    int first = way > 0 ? fgetc(one) : 0;
    if (way == 2 && first != EOF)
        ungetc(first ^ 1, one);
    memset(target, 0, length);
    size_t done = fread(target, size, length / size, one);
    int at_end = feof(one) != 0, failed = ferror(one) != 0, flushed = fflush(one);
    clearerr(one);
    say("way %u, first %d, %zu of %zu: %zu, end %d, failed %d, flushed %d, at %ld, sum %llx", way, first, length, size,
        done, at_end, failed, flushed, ftell(one), (unsigned long long)sum_of(target, done * size));
}

static void play_fseek(void)
{
    FILE *one = *pick_stream();
    int whence = (int)below(3);
    off_t offset = whence == SEEK_SET ? an_offset() : (off_t)below(100000) - 50000;
    if (one == NULL)
        return;
    long result = answer(fseeko(one, offset, whence));
    int flushed = fflush(one);
    clearerr(one);
    say("%lld, whence %d = %ld, flushed %d, at %ld", (long long)offset, whence, result, flushed, ftell(one));
}

/* Through the descriptor of a stream, which knows nothing of it. */
static void play_fileno(void)
{
    FILE *one = *pick_stream();
    size_t length = a_length();
    if (one == NULL)
        return;
    for (int i = 0; i < NAMES; i++)
        changed(shared->names[i]);
    long result = answer(write(fileno(one), some_bytes(length), length));
    fseek(one, 0, SEEK_CUR);
    int flushed = fflush(one);
    say("%zu = %ld, flushed %d, at %ld", length, result, flushed, ftell(one));
}

static void play_freopen(void)
{
    FILE **one = pick_stream();
    int name = (int)below(NAMES);
    unsigned way = below(3);
    if (*one == NULL)
        return;
    if (way == 0) {
        say("fclose = %d", fclose(*one));
        *one = NULL;
        return;
    }
    *one = freopen(name_of(name), way == 1 ? "r+" : "w+", *one);
    if (*one != NULL && shared->names[name] < 0)
        shared->names[name] = make_file();
    changed(shared->names[name]);
    give_buffer(one, SMALL);
    say("way %u, file %d = %d", way, name, *one != NULL);
}

const kind stream_kinds[] = {
    {"fopen", 3, play_fopen, ALONE},
    {"fwrite", 3, play_fwrite, ALONE},
    {"fread", 3, play_fread, ALONE},
    {"fseek", 2, play_fseek, ALONE},
    {"fileno", 1, play_fileno, ALONE},
    {"freopen", 1, play_freopen, ALONE},
    {NULL, 0, NULL, ALONE},
};
