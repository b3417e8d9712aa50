/* threads.c - the transport and the extent map under as many threads as a busy daemon has, for ThreadSanitizer.
 *
 * Kernels send READ, WRITE and other requests over socket pairs to the workers of transports that share a few files.
 * A control thread does meanwhile, one step at a time, what the store does: it stops ports, takes deltas, applies or
 * cancels them, cuts and punches, moves what lies in a segment, closes leases, puts another content in place, opens
 * and closes handles. Another one takes down the references of contents, step by step, and a third one asks about
 * everything without any lock. Each slot of a kernel owns a range of each file and knows all its bytes.
 * Usage: threads SECONDS SEED; prints what is wrong and exits 1. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "threads.h"

typedef struct {
    cxl_transport *transport;
    cxl_worker *workers[WORKERS];
    pthread_t threads[WORKERS], pump, server;
    int kernel, fuse, control, served;
    int number;
    uint64_t writes, reads, others;
} connection;

cxl_engine *engine;
file files[FILES];
pthread_mutex_t store = PTHREAD_MUTEX_INITIALIZER;
uint64_t seed, steps;
atomic_bool done;
static connection connections[KERNELS];
static uint8_t noise[4 * REGION];   /* never 0 */

/* ----------------------------------------------------------------------------------- the daemon's side */

static void finish_write(connection *c, const cxl_upcall *call, file *f)
{
    const fuse_wire_write *in = (const void *)call->arguments;
    const uint8_t *bytes = call->arguments + sizeof(*in);
    uint64_t written = call->done, needed, place, length;
    cxl_fault fault;
    CHECK(call->length == sizeof(*in) + in->size && call->done <= in->size, "a strange call");
    while (written < in->size) {
        int64_t taken = cxl_map_write(f->live, in->offset + written, bytes + written, in->size - written, &needed,
                                      &fault);
        CHECK(taken > 0 || taken == -EAGAIN, "a write failed: %ld", (long)taken);
        if (taken > 0) {
            written += (uint64_t)taken;
            continue;
        }
        uint64_t id = open_extent();
        cxl_map_close_lease(f->live, &place, &length);
        CHECK(cxl_map_attach_lease(f->live, id) == 0, "a lease cannot be attached");
    }
    cxl_handle_allow(c->transport, in->handle, call->pid);
}

static void lease_ahead(file *f)
{
    uint64_t place, length;
    if (!cxl_map_wants_lease(f->live))
        return;
    uint64_t id = open_extent();
    if (cxl_map_attach_lease(f->live, id) != 0)
        CHECK(cxl_engine_close_lease(engine, id, &place, &length) == 0, "a spare lease cannot be closed");
}

static void serve_call(connection *c, const cxl_upcall *call)
{
    CHECK(call->opcode == CXL_UPCALL_LEASE || call->opcode == FUSE_WIRE_WRITE, "a call for %u", call->opcode);
    pthread_mutex_lock(&store);
    file *f = &files[call->inode];
    if (call->opcode == CXL_UPCALL_LEASE)
        lease_ahead(f);
    else
        finish_write(c, call, f);
    pthread_mutex_unlock(&store);
}

typedef struct {
    connection *connection;
    cxl_worker *worker;
} work;

static void *worker_main(void *argument)
{
    work job = *(work *)argument;
    cxl_upcall call = {.unique = 0};
    fuse_wire_write_reply answer = {.size = 0};
    int result;
    free(argument);
    while ((result = cxl_worker_serve(job.worker, call.unique, 0, &answer, sizeof(answer), &call)) == 1) {
        serve_call(job.connection, &call);
        if (call.opcode == FUSE_WIRE_WRITE)
            answer.size = ((const fuse_wire_write *)(const void *)call.arguments)->size;
    }
    CHECK(result == 0, "a worker ended with %d", result);
    return NULL;
}

/* In libfuse's place: answers what is passed on with the bytes that came. */
static void *server_main(void *argument)
{
    connection *c = argument;
    static _Thread_local uint8_t message[MESSAGE_MAX];
    ssize_t length;
    while ((length = recv(c->served, message, sizeof(message), 0)) >= (ssize_t)sizeof(fuse_wire_header)) {
        const fuse_wire_header *header = (const void *)message;
        fuse_wire_reply answer = {.length = (uint32_t)sizeof(answer), .unique = header->unique};
        CHECK(header->opcode == OTHER, "request %u was passed on", header->opcode);
        CHECK(send(c->served, &answer, sizeof(answer), 0) == sizeof(answer), "an answer cannot be sent");
    }
    return NULL;
}

/* ----------------------------------------------------------------------------------- the kernel's side */

typedef struct {
    uint8_t bytes[FILES][REGION];
    uint64_t base;                /* file offset of the region */
    uint32_t opcode, number, size;
    uint64_t offset;              /* of the request under way, in the region */
} slot;

static void send_request(connection *c, slot *s, uint64_t unique, uint64_t *rng)
{
    struct {
        fuse_wire_header header;
        fuse_wire_write in;
        uint8_t bytes[PIECE_MAX];
    } message = {.header = {.unique = unique, .pid = 1}};
    uint64_t kind = random_below(rng, 16);
    if (c->number == 0)            /* the other one has a single client */
        message.header.pid += (uint32_t)(unique % SLOTS);
    s->opcode = kind == 0 ? OTHER : kind < 8 ? FUSE_WIRE_READ : FUSE_WIRE_WRITE;
    s->number = (uint32_t)random_below(rng, FILES);
    s->size = (uint32_t)(1 + random_below(rng, random_below(rng, 2) ? 600 : PIECE_MAX));
    s->offset = random_below(rng, REGION - s->size);
    message.header.opcode = s->opcode;
    message.header.inode = s->number;
    message.in = (fuse_wire_write){.handle = s->number, .offset = s->base + s->offset, .size = s->size};
    size_t length = sizeof(message.header) + sizeof(message.in);
    if (s->opcode == FUSE_WIRE_READ)
        message.in.handle += HANDLE_READ_ONLY;
    if (s->opcode == FUSE_WIRE_WRITE) {
        const uint8_t *fresh = noise + random_below(rng, sizeof(noise) - s->size);
        memcpy(s->bytes[s->number] + s->offset, fresh, s->size);
        memcpy(message.bytes, fresh, s->size);
        length += s->size;
    }
    message.header.length = (uint32_t)length;
    CHECK(send(c->kernel, &message, length, 0) == (ssize_t)length, "a request cannot be sent");
}

static void check_bytes(const slot *s, const uint8_t *bytes, size_t length)
{
    const uint8_t *expected = s->bytes[s->number] + s->offset;
    bool steady = s->number < STEADY;
    CHECK(length <= s->size, "%zu bytes of %u", length, s->size);
    if (length == s->size && memcmp(bytes, expected, length) == 0)
        return;
    for (uint32_t i = 0; i < s->size; i++) {
        uint8_t found = i < length ? bytes[i] : 0;
        CHECK(found == expected[i] || (!steady && found == 0), "file %u, byte %lu: %d instead of %d", s->number,
              (unsigned long)(s->base + s->offset + i), found, expected[i]);
    }
}

static void check_answer(connection *c, const slot *s, const uint8_t *message, size_t length)
{
    const fuse_wire_reply *header = (const void *)message;
    const uint8_t *body = message + sizeof(*header);
    CHECK(header->length == length && header->error == 0, "request %u: error %d", s->opcode, header->error);
    length -= sizeof(*header);
    if (s->opcode == FUSE_WIRE_READ) {
        check_bytes(s, body, length);
        c->reads++;
    } else if (s->opcode == FUSE_WIRE_WRITE) {
        CHECK(length == sizeof(fuse_wire_write_reply) && ((const fuse_wire_write_reply *)(const void *)body)->size ==
              s->size, "a short write");
        c->writes++;
    } else {
        c->others++;
    }
}

static slot slots[KERNELS][SLOTS];

static void *pump_main(void *argument)
{
    connection *c = argument;
    static _Thread_local uint8_t message[MESSAGE_MAX];
    uint64_t rng = seed + 1 + (uint64_t)c->number, flying = 0, unique = SLOTS;
    for (; flying < SLOTS; flying++, unique++)
        send_request(c, &slots[c->number][unique % SLOTS], unique, &rng);
    while (flying > 0) {
        ssize_t length = recv(c->kernel, message, sizeof(message), 0);
        CHECK(length >= (ssize_t)sizeof(fuse_wire_reply), "no answer");
        uint64_t answered = ((const fuse_wire_reply *)(const void *)message)->unique;
        slot *s = &slots[c->number][answered % SLOTS];
        check_answer(c, s, message, (size_t)length);
        if (atomic_load(&done))
            flying--;
        else
            send_request(c, s, answered + SLOTS, &rng);
    }
    return NULL;
}

/* ----------------------------------------------------------------------------- the others */

static void *control_main(void *unused)
{
    uint64_t rng = seed;
    while (!atomic_load(&done)) {
        pthread_mutex_lock(&store);
        one_step(&rng, connections[0].transport);
        pthread_mutex_unlock(&store);
        usleep(100);
    }
    return unused;
}

static void *ask_main(void *unused)
{
    uint64_t rng = ~seed;
    while (!atomic_load(&done))
        ask_everything(&rng, connections[0].transport);
    return unused;
}

static void *snapshot_main(void *unused)
{
    uint64_t rng = seed ^ UINT64_C(0x5555555555);
    while (!atomic_load(&done))
        if (!step_snapshots(&rng))
            usleep(50);
    return unused;
}

/* ------------------------------------------------------------------------------------------ one round */

static void start(pthread_t *thread, void *(*body)(void *), void *argument)
{
    CHECK(pthread_create(thread, NULL, body, argument) == 0, "no thread");
}

static void connect_all(connection *c)
{
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0, "no sockets");
    c->kernel = pair[0], c->fuse = pair[1];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0, "no sockets");
    c->control = pair[0], c->served = pair[1];
    const cxl_transport_settings settings = {
        .request_max = REQUEST_MAX, .read_max = REQUEST_MAX, .file_size_max = FILE_BYTES, .verify = 1,
        .poll_ns = POLL_NS, .waiting_bytes_max = WAITING_MAX,
    };
    CHECK(cxl_transport_new(engine, c->fuse, c->control, &settings, &c->transport) == 0, "new");
    for (uint64_t i = 0; i < FILES; i++) {
        CHECK(cxl_handle_open(c->transport, i, files[i].port, 0) == 0, "a handle");
        CHECK(cxl_handle_open(c->transport, i + HANDLE_READ_ONLY, files[i].port, 1) == 0, "a handle");
    }
    CHECK(cxl_transport_start(c->transport) == 0, "start");
    for (int i = 0; i < WORKERS; i++) {
        work *job = malloc(sizeof(*job));
        CHECK(cxl_worker_new(c->transport, &c->workers[i]) == 0, "worker");
        *job = (work){c, c->workers[i]};
        start(&c->threads[i], worker_main, job);
    }
    for (int i = 0; i < SLOTS; i++)
        slots[c->number][i].base = (uint64_t)(c->number * SLOTS + i) * REGION;
    start(&c->server, server_main, c);
    start(&c->pump, pump_main, c);
}

static void disconnect(connection *c)
{
    cxl_transport_stop(c->transport);
    for (int i = 0; i < WORKERS; i++)
        pthread_join(c->threads[i], NULL);
    close(c->control);
    pthread_join(c->server, NULL);
    cxl_transport_free(c->transport);
    close(c->fuse), close(c->kernel), close(c->served);
    CHECK(c->reads > 0 && c->writes > 0 && c->others > 0, "kernel %d did nothing", c->number);
}

static void check_file(file *f, uint32_t number)
{
    static uint8_t live[FILE_BYTES], committed[FILE_BYTES];
    cxl_fault fault;
    commit(f, true);
    memset(live, 0, sizeof(live));
    memset(committed, 0, sizeof(committed));
    CHECK(cxl_map_read(f->live, 0, live, FILE_BYTES, 1, &fault) >= 0, "the live content is damaged");
    CHECK(cxl_map_read(f->committed, 0, committed, FILE_BYTES, 1, &fault) >= 0, "the committed content is damaged");
    CHECK(memcmp(live, committed, FILE_BYTES) == 0, "file %u: live and committed content differ", number);
    for (int k = 0; k < KERNELS; k++)
        for (int i = 0; i < SLOTS; i++) {
            slot *s = &slots[k][i];
            s->number = number, s->offset = 0, s->size = REGION;
            check_bytes(s, live + s->base, REGION);
        }
    cxl_port_free(f->port);
    cxl_map_free(f->live);
    cxl_map_free(f->committed);
}

static void run(uint32_t granularity, double seconds)
{
    cxl_media *media;
    pthread_t control, ask, snapshots;
    uint64_t empty, rng = seed;
    cxl_engine_stats stats;
    atomic_store(&done, false);
    memset(slots, 0, sizeof(slots));
    CHECK(cxl_media_anonymous(FIRST + (uint64_t)SEGMENTS * SEGMENT_BYTES, granularity, &media) == 0, "media");
    CHECK(cxl_engine_new(media, FIRST, SEGMENT_BYTES, SEGMENTS, CHUNK, &engine) == 0, "engine");
    cxl_engine_statistics(engine, &stats);
    empty = stats.memory;
    cxl_engine_discard(engine, DISCARDED_MIN);
    store_begin();
    for (uint32_t i = 0; i < FILES; i++) {
        CHECK(cxl_map_new(engine, i, &files[i].live) == 0 && cxl_map_new(engine, i, &files[i].committed) == 0, "map");
        CHECK(cxl_port_new(i, files[i].live, &files[i].port) == 0, "port");
    }
    for (int i = 0; i < KERNELS; i++) {
        connections[i] = (connection){.number = i};
        connect_all(&connections[i]);
    }
    start(&control, control_main, NULL);
    start(&ask, ask_main, NULL);
    start(&snapshots, snapshot_main, NULL);
    usleep((useconds_t)(seconds * 1e6));
    atomic_store(&done, true);
    for (int i = 0; i < KERNELS; i++)
        pthread_join(connections[i].pump, NULL);
    pthread_join(control, NULL);
    pthread_join(ask, NULL);
    pthread_join(snapshots, NULL);
    for (int i = 0; i < KERNELS; i++)
        disconnect(&connections[i]);
    for (uint32_t i = 0; i < FILES; i++)
        check_file(&files[i], i);
    end_snapshots(&rng);             /* of contents that are gone, some of them */
    drop_discarded();
    cxl_engine_statistics(engine, &stats);
    CHECK(stats.extents == 0 && stats.refs == 0 && stats.maps == 0 && stats.memory == empty, "something is still held");
    cxl_engine_free(engine);
    cxl_media_close(media);
}

int main(int count, char **arguments)
{
    double seconds = count > 1 ? atof(arguments[1]) : 1;
    seed = count > 2 ? strtoull(arguments[2], NULL, 10) : 1;
    uint64_t rng = seed;
    for (size_t i = 0; i < sizeof(noise); i++)
        noise[i] = (uint8_t)(1 + random_below(&rng, 255));
    CHECK(cxl_dispatch_init() == 0, "dispatch");
    /* Stores that the sanitizer sees. */
    cxl_table.copy_lines = cxl_copy_lines_plain;
    cxl_table.copy_lines_crc = NULL;
    cxl_table.crc32c = cxl_crc32c_table;
    run(CXL_GRANULARITY_PAGE, seconds / 2);
    if (cxl_table.can_write_back)
        run(CXL_GRANULARITY_LINE, seconds / 2);
    fprintf(stderr, "%lu steps of control; kernel 0: %lu reads, %lu writes, %lu others\n", (unsigned long)steps,
            (unsigned long)connections[0].reads, (unsigned long)connections[0].writes,
            (unsigned long)connections[0].others);
    return 0;
}
