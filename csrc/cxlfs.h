/* cxlfs.h - what csrc/ offers: persist (store, write back, fence), checksums, mapping, the DRAM extent
 * map, and nothing of the media format: no policy, no on-media structure, no output.
 *
 * Rules
 * - Functions return 0 or a count, or -errno. No globals but the dispatch table, the SIGBUS
 *   bookkeeping, the fault switches of the tests and the table of clients (client/clients.c).
 * - Every change of media bytes goes through a cxl_media_* function of this file, which is where the
 *   recorder listens. Every access of media bytes is guarded: a SIGBUS becomes -EIO.
 * - Offsets are bytes from the start of the media and are checked against its size (-ERANGE).
 * - What is NOT promised: a store may become durable before it is written back, in any order,
 *   each aligned 8-byte word on its own.
 */
#ifndef CXLFS_H
#define CXLFS_H

#include <stddef.h>
#include <stdint.h>

/* ------------------------------------------------------------------ checksum and CPU dispatch */

/* CRC32C (Castagnoli) of length bytes, continuing from crc (0 to begin). */
uint32_t cxl_crc32c(uint32_t crc, const void *data, size_t length);

/* out[i] = checksum of length[i] bytes at base + offset[i], each continuing from crc. */
void cxl_crc32c_each(uint32_t crc, const void *base, const uint64_t *offset, const uint64_t *length, uint64_t count,
                     uint32_t *out);

/* Which routines were chosen, once, from the CPU and the environment:
 * "clwb" | "clflushopt" | "clflush" | "dc-cvap" | "dc-cvadp" | "none"; "sfence" | "dsb";
 * "crc32c-vpclmul" | "crc32c-vpclmul256" | "crc32c-sse42" | "crc32c-arm" | "crc32c-table";
 * "nt-avx512" | "nt-avx2" | "nt-sse2" | ...
 * Overridden by CXLFS_WRITE_BACK, CXLFS_CRC32C and CXLFS_COPY, read at cxl_dispatch_init(). */
int cxl_dispatch_init(void);            /* 0, or -EINVAL when an override names what this CPU lacks */
const char *cxl_dispatch_write_back(void);
const char *cxl_dispatch_fence(void);
const char *cxl_dispatch_crc32c(void);
const char *cxl_dispatch_copy(void);

/* ------------------------------------------------------------------------------------- media */

enum { CXL_GRANULARITY_BYTE = 0, CXL_GRANULARITY_LINE = 1, CXL_GRANULARITY_PAGE = 2 };
enum { CXL_MAP_READ_ONLY = 1, CXL_MAP_SYNC = 2 };

typedef struct cxl_media cxl_media;

/* Map size bytes of fd at a multiple of alignment, a power of two. CXL_MAP_SYNC: or -EOPNOTSUPP. */
int cxl_media_map(int fd, uint64_t size, uint64_t alignment, uint32_t flags, uint32_t granularity, cxl_media **out);
/* Anonymous memory, for tests; behaves at the granularity given (PAGE: fence does no msync). */
int cxl_media_anonymous(uint64_t size, uint32_t granularity, cxl_media **out);
void cxl_media_close(cxl_media *media);

uint64_t cxl_media_size(const cxl_media *media);
uint32_t cxl_media_granularity(const cxl_media *media);
void *cxl_media_base(const cxl_media *media);

/* Ordinary stores; not durable until written back and fenced. */
int cxl_media_store(cxl_media *media, uint64_t offset, const void *source, uint64_t length);
/* One aligned 8-byte word, never torn. */
int cxl_media_store_u64(cxl_media *media, uint64_t offset, uint64_t value);
/* Non-temporal copy; ragged head and tail lines are stored and written back. Durable after a fence. */
int cxl_media_copy(cxl_media *media, uint64_t offset, const void *source, uint64_t length);
/* The same, and *crc continues over the source in the same pass. */
int cxl_media_copy_crc(cxl_media *media, uint64_t offset, const void *source, uint64_t length, uint32_t *crc);
/* Map the pages of a range for writing before they are written to, so that the writer meets no page faults. No byte
 * changes, and nothing is recorded. Bytes populated; 0 where it costs more than memory (anything but a file of
 * tmpfs or ramfs) or the kernel cannot do it (before Linux 5.14). */
int64_t cxl_media_populate(cxl_media *media, uint64_t offset, uint64_t length);
int cxl_media_populates(const cxl_media *media);
/* LINE: write back every line touched. PAGE: remember the pages for the next fence. BYTE: nothing. */
int cxl_media_write_back(cxl_media *media, uint64_t offset, uint64_t length);
/* Order and complete everything this thread wrote back (LINE, BYTE) or anyone did (PAGE: msync).
 * After one failed msync every later fence is -EIO: a failure is never retried into a success. */
int cxl_media_fence(cxl_media *media);
/* Guarded copy out: 0, or -EIO with *fault_offset (may be NULL) the media offset that faulted. */
int cxl_media_read(cxl_media *media, uint64_t offset, void *target, uint64_t length, uint64_t *fault_offset);
/* Guarded checksum in place; *crc continues. */
int cxl_media_crc(cxl_media *media, uint64_t offset, uint64_t length, uint32_t *crc, uint64_t *fault_offset);
/* Guarded copy out and checksum in one pass. */
int cxl_media_read_crc(cxl_media *media, uint64_t offset, void *target, uint64_t length, uint32_t *crc,
                       uint64_t *fault_offset);

/* Recorder: a growing log of struct cxl_event, each followed by its stored bytes padded to 8. */
enum { CXL_EVENT_STORE = 1, CXL_EVENT_COPY = 2, CXL_EVENT_WRITE_BACK = 3, CXL_EVENT_FENCE = 4, CXL_EVENT_MARK = 5 };
typedef struct {
    uint32_t kind;      /* CXL_EVENT_*; COPY: non-temporal, needs a fence only */
    uint32_t thread;    /* kernel thread id; a fence covers its own thread only (LINE, BYTE) */
    uint64_t offset;    /* media offset; MARK: the caller's tag */
    uint64_t length;    /* bytes touched; STORE and COPY: that many payload bytes follow */
} cxl_event;
int cxl_media_record(cxl_media *media, int on);             /* on: start with an empty log; off: stop, keep it */
int cxl_media_record_mark(cxl_media *media, uint64_t tag);
int cxl_media_record_view(cxl_media *media, const void **log, uint64_t *length); /* valid until the next call */

/* Tests only: make the n-th (from 1) call of a kind fail from now on once; n = 0 switches it off.
 * cxl_fault_count tells how many calls of the kind there were since the switch was set. */
enum { CXL_FAULT_ALLOCATE = 0, CXL_FAULT_WRITE_BACK = 1, CXL_FAULT_COPY = 2, CXL_FAULT_MSYNC = 3, CXL_FAULT_MAP = 4,
       CXL_FAULT_FENCE = 5, CXL_FAULT_SPLICE = 6,
       CXL_FAULT_DECAY = 7,    /* media bytes change right behind the n-th pass that sums them */
       CXL_FAULT_KINDS = 8 };
int cxl_fault_set(uint32_t kind, uint64_t nth);
uint64_t cxl_fault_count(uint32_t kind);

/* -------------------------------------------------------------------------------- extent map */

/* An extent is a contiguous media range inside one segment, written once, front to back. Its chunk i
 * covers extent bytes [i*chunk, (i+1)*chunk) up to its length, and has
 *     CRC32C(le64(extent id) || le64(chunk index) || the bytes).
 * A map is one content of one file: sorted references into extents, and a size. All of it is DRAM. */

typedef struct cxl_engine cxl_engine;
typedef struct cxl_map cxl_map;

typedef struct {
    uint64_t file_offset;
    uint64_t length;
    uint64_t extent_id;      /* 0: a hole */
    uint64_t extent_offset;
} cxl_ref;

typedef struct {
    uint64_t id;
    uint64_t media_offset;
    uint64_t length;         /* bytes of the extent that are defined */
    uint64_t crc_index;      /* index of this extent's first checksum in the array that comes along */
    uint32_t first_chunk;    /* that first checksum is of this chunk (appends repeat the last partial one) */
    uint32_t crc_count;
} cxl_extent_info;

typedef struct {
    int32_t error;           /* 0, -EIO (media fault), -EBADMSG (checksum), -EREMOTEIO (a fence failed) */
    uint32_t chunk;
    uint64_t file_offset;    /* where in the file the first damaged piece begins */
    uint64_t length;         /* of that piece */
    uint64_t extent_id;
    uint64_t media_offset;   /* of the damaged chunk, or of the faulting byte */
    uint32_t expected;
    uint32_t actual;
} cxl_fault;

/* Bytes of an extent that maps refer to: all that overlap are one. */
typedef struct {
    uint64_t extent_id;
    uint64_t extent_offset;
    uint64_t length;
    uint64_t owner;          /* one of the owners, */
    uint64_t file_offset;    /* and the first place where it has them */
    uint64_t first_owner;    /* all of them: owner_count from there in the array that comes along */
    uint64_t owner_count;
    uint64_t span;           /* the one that it lies in */
} cxl_live_range;

typedef struct {
    uint64_t source_id;
    uint64_t source_offset;
    uint64_t length;
    uint64_t target_id;
    uint64_t target_offset;
} cxl_move;

typedef struct {
    uint64_t media_offset;
    uint64_t length;
} cxl_span;

typedef struct {
    uint64_t start;
    uint64_t end;
} cxl_range;

typedef struct {
    uint64_t extents;        /* extents known */
    uint64_t refs;           /* references in all maps */
    uint64_t discarded_refs; /* in none any more, and not dropped yet: see cxl_engine_discard */
    uint64_t crcs;           /* checksums kept */
    uint64_t maps;
    uint64_t memory;         /* bytes of DRAM held by extents, checksums and references, estimated */
    uint64_t bytes_written;  /* file bytes accepted since the engine began */
    uint64_t bytes_read;     /* file bytes delivered */
    uint64_t checksum_errors;
    uint64_t chunks_verified;
    uint64_t refs_visited;   /* by cxl_engine_live_ranges, cxl_maps_move, copying maps, dropping them, images */
    uint64_t pieces_visited; /* of extents, looked at and moved to count what references cover */
    /* of extents that references cover, each byte once, as the first kind that covers it: see cxl_map_count_as */
    uint64_t kept_bytes, replaced_bytes, aside_bytes, held_bytes, past_bytes;
    uint64_t past_refs;      /* of the references those of maps that count as held or past */
    uint64_t leased_bytes;   /* of open extents, whether covered or not */
    uint64_t uncounted_extents; /* since the engine began: that memory was too short for to go on counting them */
} cxl_engine_stats;

/* Segment i covers media [first + i*segment_size, first + (i+1)*segment_size). chunk: a power of two. */
int cxl_engine_new(cxl_media *media, uint64_t first, uint64_t segment_size, uint64_t segment_count, uint32_t chunk,
                   cxl_engine **out);
void cxl_engine_free(cxl_engine *engine);   /* all maps must be gone, else they are freed too */
void cxl_engine_statistics(cxl_engine *engine, cxl_engine_stats *out);
/* What tables take with so many bytes for each extent, reference and checksum but for those of history alone. */
uint64_t cxl_engine_table_bytes(cxl_engine *engine, uint64_t extent_bytes, uint64_t ref_bytes, uint64_t crc_bytes);

/* Define extents, or extend known ones (replay, image), all or none: -EINVAL on overlap of a segment
 * border, range outside the media, wrong crc_count, shrinking, a known checksum contradicted, or a known id
 * elsewhere; *bad is the index at fault. They count as published, and stay without references until
 * cxl_engine_drop_unreferenced, because a later record may extend them or refer to them. */
int cxl_engine_define(cxl_engine *engine, const cxl_extent_info *infos, uint64_t count, const uint32_t *crcs,
                      uint64_t crc_count, uint64_t *bad);
/* Segments in which the last extent vanished since the last call: up to capacity indexes, returns how many. */
int64_t cxl_engine_dead_segments(cxl_engine *engine, uint64_t *indexes, uint64_t capacity);
/* used[i] = bytes of segment i that some map references (shared ones once) or an open lease holds. No walk: they
 * are counted as they come and go. A read or a delta in flight may hold more: a segment is free when
 * cxl_engine_dead_segments says so. */
int cxl_engine_usage(cxl_engine *engine, uint64_t *used, uint64_t segment_count);
uint64_t cxl_engine_past_segments(cxl_engine *engine); /* of which nothing is used, and that something holds */
/* The maps that count as past and refer to bytes in a segment, each once (malloc'ed: cxl_free). */
int cxl_engine_past_maps(cxl_engine *engine, uint64_t segment, cxl_map ***maps, uint64_t *count);
/* Sizes and references of contents, and each extent that they refer to, once, by id, with all its checksums: as they
 * are now, published or not. counts[i]: references of map i. What comes out is malloc'ed: cxl_free. */
int cxl_maps_describe(cxl_engine *engine, cxl_map *const *maps, uint64_t map_count, uint64_t *sizes,
                      uint64_t *counts, cxl_ref **refs, uint64_t *ref_count, cxl_extent_info **infos,
                      uint64_t *info_count, uint32_t **crcs, uint64_t *crc_count);
/* What maps refer to inside the spans (by media offset, apart, none beyond a segment), cut at their borders, by
 * (owner, file_offset): what owner has of it in the order of its file. Of several owners of a range the one
 * preferred is named, else the lowest. busy[i] is set, and nothing listed, where span i must not be moved (a
 * lease or a cxl_held in its segment, unpublished bytes). *ranges and *owners are malloc'ed: cxl_free. */
int cxl_engine_live_ranges(cxl_engine *engine, const cxl_span *spans, uint64_t span_count, uint64_t preferred,
                           uint8_t *busy, cxl_live_range **ranges, uint64_t *count, uint64_t **owners,
                           uint64_t *owner_count);
/* The same for what [offset, +length) of a map refers to, its owner preferred; *busy: some of it is not listed. */
int cxl_map_live_ranges(cxl_map *map, uint64_t offset, uint64_t length, uint8_t *busy, cxl_live_range **ranges,
                        uint64_t *count, uint64_t **owners, uint64_t *owner_count);
/* Drop every extent that nothing but its definition holds (after replay). */
void cxl_engine_drop_unreferenced(cxl_engine *engine);
void cxl_free(void *pointer);

/* Leases: an open extent with reserved room, at a multiple of 64. A map has at most two, the second one taking
 * over when the first has no room for a write; what the first then has left is lost until its segment dies.
 * -EEXIST: the id is known, -EINVAL: no such place, -EBUSY: the map has two already. */
int cxl_engine_lease(cxl_engine *engine, uint64_t id, uint64_t media_offset, uint64_t capacity);
int cxl_map_attach_lease(cxl_map *map, uint64_t id);
/* Close the one that was attached last: *media_offset, *length (0: none) is its unused room. How many there were. */
int cxl_map_close_lease(cxl_map *map, uint64_t *media_offset, uint64_t *length);
/* 1: less than half of the only lease is left, so that the next one should be attached before it is needed. */
int cxl_map_wants_lease(cxl_map *map);

/* Empty, size 0, dirty from 0: its delta is all of it. */
int cxl_map_new(cxl_engine *engine, uint64_t owner, cxl_map **out);
/* Promise room to ranges of the map (sorted, apart), instead of those before: as many blocks of 4096 bytes as
 * their holes would fill. -ENOMEM changes nothing. */
int cxl_map_promise(cxl_map *map, const cxl_range *ranges, uint64_t count);
/* Bytes promised to the map and not written yet; *inside: not 0: some lie in [offset, +length). */
uint64_t cxl_map_promised(cxl_map *map, uint64_t offset, uint64_t length, uint64_t *inside);
/* Bytes promised to all maps, in blocks: no walk. */
uint64_t cxl_engine_promised(cxl_engine *engine);
/* How what the map references counts: kept (0, as in the beginning), replaced (1), aside (2), and of history, which is
 * in no image, held (3) or past (4), which is neither used nor alive. One walk. */
int cxl_map_count_as(cxl_map *map, int kind);
/* From now on, where a map ends or is cut and more references than that go (in the beginning: never), they wait until
 * they are dropped in steps: their bytes count as covered, and their extents live, meanwhile. */
void cxl_engine_discard(cxl_engine *engine, uint64_t refs_min);
int cxl_engine_drop_discarded(cxl_engine *engine, uint64_t count); /* a step of so much work; 0: none wait */
int cxl_map_clone(cxl_map *map, int kind, cxl_map **out); /* same content, clean, no lease; kind: see count_as */
/* The same in parts: a new map of that owner, to which each further call adds up to count references, until it
 * returns 0: it is all there. -ENOMEM: as before. Meanwhile nothing may change either but cxl_maps_move of both. */
int cxl_map_begin_copy(cxl_map *map, int kind, cxl_map **out);
int cxl_map_copy_part(cxl_map *map, cxl_map *copy, uint64_t count);
void cxl_map_free(cxl_map *map);
uint64_t cxl_map_size(cxl_map *map);
uint64_t cxl_map_ref_count(cxl_map *map);
uint64_t cxl_map_allocated(cxl_map *map);    /* bytes that are not holes */
uint64_t cxl_map_occupied(cxl_map *map, uint64_t *size); /* with holes that room is promised to; and the size */
int cxl_map_is_dirty(cxl_map *map);          /* 1: differs from what was last taken as a delta */
int cxl_map_truncate(cxl_map *map, uint64_t size); /* cutting drops references beyond it; marks dirty */
/* Replay: no dirty mark; cuts references beyond. A new map without marks is clean from then on. */
int cxl_map_set_size(cxl_map *map, uint64_t size);
/* One replayed change, all or nothing: cut to cut bytes; ranges replaced by references, one after the other (extent 0:
 * a hole); cxl_map_set_size. -EINVAL with *bad: an unknown extent, a range outside it, overflow, or beyond limits. */
int cxl_map_replay(cxl_map *map, uint64_t cut, const cxl_ref *refs, uint64_t count, uint64_t size, uint64_t *bad);
/* What a row of records says of contents, in its order: change i comes behind the first changes[i].definitions
 * definitions; its references lie at data + refs_offset (a multiple of 8), the checksums of definitions at
 * data + crc_index * 4. 0, or what cxl_engine_define and cxl_map_replay return: then *changes_done took effect,
 * and definition *definitions_done is at fault, or, when it waits for none, the next change. */
typedef struct {
    uint64_t cut;
    uint64_t size;
    uint64_t refs_offset;
    uint64_t ref_count;
    uint64_t definitions;
} cxl_change;
int cxl_engine_replay(cxl_engine *engine, const cxl_extent_info *infos, uint64_t info_count,
                      const cxl_change *changes, cxl_map *const *maps, uint64_t change_count, const void *data,
                      uint64_t length, uint64_t *definitions_done, uint64_t *changes_done);
/* References that overlap [offset, offset+length), clipped to it, holes left out. *out: cxl_free. */
int cxl_map_export(cxl_map *map, uint64_t offset, uint64_t length, cxl_ref **out, uint64_t *count);
/* Re-aim what each of the maps refers to in the sources of moves at their targets: each map is looked at where it
 * refers to them, or once as a whole. They are sorted by source, apart. Keeps dirty marks. -EINVAL with *bad: a
 * move out of order, or to where nothing is; -ENOMEM: each map is as before or done, calling again does the rest. */
int cxl_maps_move(cxl_engine *engine, cxl_map *const *maps, uint64_t map_count, const cxl_move *moves,
                  uint64_t move_count, uint64_t *bad);

/* Many maps at once (image load): maps[i] takes refs [first[i], first[i+1]), owner owners[i], sizes[i]. */
int cxl_maps_import(cxl_engine *engine, uint64_t map_count, const uint64_t *owners, const uint64_t *sizes,
                    const uint64_t *first, const cxl_ref *refs, cxl_map **out, uint64_t *bad);
/* The published state of many maps (image): references of all of them in order (counts[i] each), and every
 * published extent that anything holds, once, by id, with its published length and checksums (also those
 * that only a lease or another map holds: later deltas name them as known). -EINVAL when a reference is
 * not published. All three arrays: cxl_free. */
int cxl_maps_export(cxl_engine *engine, cxl_map *const *maps, uint64_t map_count, uint64_t *counts, cxl_ref **refs,
                    uint64_t *ref_count, cxl_extent_info **infos, uint64_t *info_count, uint32_t **crcs,
                    uint64_t *crc_count);
/* The references of many maps alone, and their sizes. counts[i] UINT64_MAX: one that has more than refs_max, which
 * are left out. *refs: cxl_free. */
int cxl_maps_references(cxl_map *const *maps, uint64_t map_count, uint64_t refs_max, uint64_t *sizes,
                        uint64_t *counts, cxl_ref **refs, uint64_t *ref_count);
/* The references of one map as of this moment, *count of them, and its *size, while it goes on: each step takes down
 * about so many (1: there are more, 0: all done, -EINVAL: one was not published), and what is about to change is taken
 * down before it does. *rows is written to until the end of the snapshot, which comes before cxl_free of them; an
 * engine that is freed ends its snapshots. -EBUSY: there is one of this map, -ENOMEM. */
typedef struct cxl_reference_snapshot cxl_reference_snapshot;
int cxl_map_begin_snapshot(cxl_map *map, uint64_t *size, uint64_t *count, cxl_ref **rows,
                           cxl_reference_snapshot **out);
int cxl_reference_snapshot_step(cxl_reference_snapshot *snapshot, uint64_t count);
void cxl_reference_snapshot_end(cxl_reference_snapshot *snapshot);

/* The same extents as of the moment of cxl_snapshot_begin (-EBUSY: one is being made), while the journal goes on:
 * each step looks at so many buckets of the table (1: there are more, 0: all done, -ENOMEM), and before an
 * extent is published further or vanishes it is taken down. cxl_snapshot_take ends it and gives them, in no order
 * (both arrays: cxl_free; nothing is given on -ENOMEM). Not beside cxl_engine_define. */
int cxl_snapshot_begin(cxl_engine *engine);
int cxl_snapshot_step(cxl_engine *engine, uint64_t buckets);
int cxl_snapshot_take(cxl_engine *engine, cxl_extent_info **infos, uint64_t *info_count, uint32_t **crcs,
                      uint64_t *crc_count);
void cxl_snapshot_cancel(cxl_engine *engine);

/* Write: copies what the lease has room for. Returns bytes taken (> 0), -EAGAIN when another lease is
 * needed first (*needed: what would take all of it; a smaller one of 8 KiB or more takes a part),
 * -EIO with *fault when old bytes of a small overwrite are
 * damaged, -ENOMEM. LINE, BYTE: the data is durable when it returns. A write of less than 4 KiB that does not
 * continue the open extent carries its whole 4 KiB file block along, so that references stay few. */
int64_t cxl_map_write(cxl_map *map, uint64_t offset, const void *source, uint64_t length, uint64_t *needed,
                      cxl_fault *fault);
/* Make a range read as zeros (keeps the size). Marks dirty. */
int cxl_map_punch(cxl_map *map, uint64_t offset, uint64_t length);
/* The first byte at or behind offset that lies in an extent, or (hole) that does not; the end of file is the
 * last hole. -ENXIO: there is none, or offset lies at or behind the end of file. */
int64_t cxl_map_seek(cxl_map *map, uint64_t offset, int hole);
/* Bytes of [offset, offset+length) that are not holes; *refs: in how many references. */
uint64_t cxl_map_mapped(cxl_map *map, uint64_t offset, uint64_t length, uint64_t *refs);
/* How much of length bytes from offset on lies in refs_max references (1 at least) and holes; counted leaf by leaf. */
uint64_t cxl_map_reach(cxl_map *map, uint64_t offset, uint64_t length, uint64_t refs_max);
/* Make [target_offset, +length) of target what source has at offset, cut at its end of file, by references to
 * the same extents: no data is moved or looked at. Marks target dirty, makes it longer where needed. Returns
 * bytes shared (0: behind the end). -EBUSY: part of them lies in an open extent (close the lease of the map
 * that has it first), -EINVAL: the ranges overlap in one map, -EFBIG, -ENOMEM: nothing changed. */
int64_t cxl_map_share(cxl_map *source, uint64_t offset, uint64_t length, cxl_map *target, uint64_t target_offset);
/* A new map of another owner with all that source has, clean: nothing of it is in its next delta. As cxl_map_share. */
int cxl_map_twin(cxl_map *source, uint64_t owner, cxl_map **out);
/* Read up to length bytes, short at the end of file: returns bytes, or -EIO with *fault. verify: check every
 * chunk that is touched, as a whole, before any of its bytes are delivered. */
int64_t cxl_map_read(cxl_map *map, uint64_t offset, void *target, uint64_t length, int verify, cxl_fault *fault);
/* CRC32C of what a read would deliver from offset on, *crc continuing: combined from the checksums of chunks, holes
 * are zeros. Of a chunk that the file has in part all bytes are read, and verified. Stops, behind a chunk or a hole,
 * when it has done as much as reading work bytes is; returns how far it came, 0 at the end of file, or -EIO with
 * *fault. */
int64_t cxl_map_crc(cxl_map *map, uint64_t offset, uint64_t work, uint32_t *crc, cxl_fault *fault);
/* Without a copy: when the range (clipped at the end of file) lies in one extent, verify it in place and
 * return its length and *address; 0 when it does not lie so (then use cxl_map_read). */
int64_t cxl_map_peek(cxl_map *map, uint64_t offset, uint64_t length, int verify, const void **address,
                     cxl_fault *fault);

/* Delta: what changed since the last one. Taking it pads the open extent with zeros to a multiple of 64 bytes
 * (so that published bytes never share a word with later ones), and clears the dirty marks. */
typedef struct {
    uint64_t size;            /* of the file now */
    uint64_t cut;             /* first cut the older content to this size (its smallest since the last delta) */
    uint64_t ref_count;
    uint64_t extent_count;
    uint64_t crc_count;
    cxl_ref *refs;            /* including holes that were punched */
    cxl_extent_info *extents; /* every extent the refs name whose definition is new or longer than published */
    uint32_t *crcs;
} cxl_delta;
int cxl_map_take_delta(cxl_map *map, cxl_delta **out);   /* -EIO, or -EREMOTEIO when a fence failed */
/* After the record is durable: the extents count as published; target (may be NULL, may be another map or the
 * same, which has the content already) gets cut, refs and size. Frees the delta; on -ENOMEM nothing has
 * changed and it may be applied again. */
int cxl_delta_apply(cxl_delta *delta, cxl_map *map, cxl_map *target);
/* The record was not written: the dirty marks come back (map may be NULL when it is gone). Frees the delta. */
void cxl_delta_cancel(cxl_delta *delta, cxl_map *map);

/* Append ranges to an open extent (a lease without a map), one behind the other, each verified in the pass that
 * copies it: only extent, offset and length of each are looked at. Stops where the room ends, maybe inside a range.
 * Returns how many moves[] say what went where; durable then (LINE, BYTE). The extent becomes published with
 * cxl_engine_publish. -EIO with *bad and *fault, -ENOENT, -EINVAL (no such range), -EBUSY: nothing was appended. */
int64_t cxl_engine_copy_ranges(cxl_engine *engine, const cxl_live_range *ranges, uint64_t count, uint64_t target_id,
                               cxl_move *moves, uint64_t *bad, cxl_fault *fault);
/* The definition of one extent as it is now (crcs: cxl_free). */
int cxl_engine_describe(cxl_engine *engine, uint64_t id, cxl_extent_info *info, uint32_t **crcs);
int cxl_engine_publish(cxl_engine *engine, uint64_t id);
int cxl_engine_close_lease(cxl_engine *engine, uint64_t id, uint64_t *media_offset, uint64_t *length);
/* Verify extents [first, first+count) of a stable listing, for scrub: chunk by chunk, faults to the array. */
int cxl_engine_verify(cxl_engine *engine, uint64_t id, cxl_fault *faults, uint64_t capacity, uint64_t *count,
                      uint64_t *bytes);
/* Ids, places and lengths of all extents, by media offset. *out: cxl_free (cxl_extent_info without checksums). */
int cxl_engine_list(cxl_engine *engine, cxl_extent_info **out, uint64_t *count);

/* --------------------------------------------------------------------------------- transport */

/* Threads that read requests from /dev/fuse and answer READ and WRITE of the files that the control plane has shown
 * them. Other requests they hand to the control plane, or pass on, over a socket, to whoever serves it. */

typedef struct cxl_transport cxl_transport;
typedef struct cxl_worker cxl_worker;   /* what one thread needs to serve requests */
typedef struct cxl_port cxl_port;       /* one open file as the threads see it */

/* A request that a worker's thread takes to the control plane, which must answer it (cxl_transport_reply) before the
 * thread's next cxl_worker_serve. */
typedef struct {
    uint32_t opcode;        /* of the FUSE protocol; CXL_UPCALL_LEASE: nothing to answer */
    uint32_t uid;
    uint32_t gid;
    uint32_t pid;           /* the calling thread; 0: the kernel itself */
    uint64_t unique;
    uint64_t inode;
    const uint8_t *arguments; /* what follows the header, length bytes */
    uint64_t length;
    uint64_t done;          /* WRITE: that many bytes of it are already in the live content */
    int32_t error;          /* WRITE: -EREMOTEIO when a fence failed, see cxl_fault */
} cxl_upcall;

enum { CXL_UPCALL_LEASE = 0 };  /* the live content of inode will soon want another lease */

typedef struct {
    uint64_t reads;         /* requests that the threads answered */
    uint64_t writes;
    uint64_t read_bytes;
    uint64_t write_bytes;
    uint64_t upcalls;       /* that they handed to the control plane */
    uint64_t forwarded;     /* to the other end of the socket */
    uint64_t waited;        /* of these two: that had to wait, for a worker or for room in the socket */
    uint64_t read_copies;   /* reads that were copied because they lie in several places */
    uint64_t spliced_reads; /* reads whose answer went through a pipe */
    uint64_t ahead_bytes;   /* of reads: verified before they were asked for */
    uint64_t direct_mapping; /* 1: the kernel lets files that bypass its page cache be mapped */
    uint64_t active_workers; /* that wait for requests or serve them just now; the others rest */
    uint64_t busy_workers;  /* of these: serve */
    uint64_t stays, trials; /* 1: who serves one thread alone stays on its processor; trials of that that ended */
} cxl_transport_stats;

typedef struct {
    uint64_t file_size_max; /* bytes; writes beyond it become upcalls */
    uint64_t upcalls;       /* bit n is set when requests with opcode n become upcalls, beside those that must */
    uint64_t waiting_bytes_max; /* of upcalls, and of requests for the socket, that wait: more holds up a worker */
    uint64_t poll_ns;       /* how long a worker that serves alone looks for the next request before it sleeps */
    uint64_t splice_min;    /* reads from here on are answered through a pipe; 0: none, as a socket would cut them */
    uint32_t request_max;   /* largest WRITE, bytes; a multiple of the page size */
    uint32_t read_max;      /* largest READ that the kernel was told to send, at most request_max */
    int32_t verify;         /* as cxl_map_read */
    uint32_t absent_seconds; /* how long the kernel may remember that a name is absent */
} cxl_transport_settings;
/* fuse_fd: a mounted /dev/fuse; control_fd: one end of a SOCK_SEQPACKET pair. Neither is closed here. */
int cxl_transport_new(cxl_engine *engine, int fuse_fd, int control_fd, const cxl_transport_settings *settings,
                      cxl_transport **out);
void cxl_transport_free(cxl_transport *transport);   /* after all workers and ports */
/* Pass the answers from the socket on to the kernel, in a thread of its own. */
int cxl_transport_start(cxl_transport *transport);
/* Make every cxl_worker_serve return 0, wait until they have, and end the thread above. */
void cxl_transport_stop(cxl_transport *transport);
void cxl_transport_stay(cxl_transport *transport, int stays);  /* see stays above; -1, as at first: both are tried */
void cxl_transport_statistics(cxl_transport *transport, cxl_transport_stats *out);
int cxl_worker_new(cxl_transport *transport, cxl_worker **out);
void cxl_worker_free(cxl_worker *worker);
/* Answer the upcall before, unless unique is 0, with error (an errno) or with data; then serve requests until one
 * must become an upcall: 1; 0 when stopped or unmounted; or -errno. */
int cxl_worker_serve(cxl_worker *worker, uint64_t unique, int error, const void *data, uint64_t length,
                     cxl_upcall *out);
/* The upcall of the last cxl_worker_serve goes on later, behind those that wait, with the done that it has now: 1,
 * and it is not to be answered; 0: none waits, or there is no room for it. */
int cxl_worker_put_back(cxl_worker *worker, const cxl_upcall *upcall);
/* Answer with error (an errno) or with data. 0, or -errno when the kernel could not take it. */
int cxl_transport_reply(cxl_transport *transport, uint64_t unique, int error, const void *data, uint64_t length);
/* Drop what the kernel caches of an inode; attributes_only: keep its pages. May wait for requests, also for as long
 * as nobody serves any: it needs no transport, which may end meanwhile. */
int cxl_fuse_invalidate(int fuse_fd, uint64_t inode, int attributes_only);
/* One for each open file, with its live content. */
int cxl_port_new(uint64_t inode, cxl_map *live, cxl_port **out);
void cxl_port_free(cxl_port *port);                  /* no handle may lead to it any more */
/* The live content is another one now; call it between cxl_port_stop and the next cxl_handle_allow. */
void cxl_port_set_map(cxl_port *port, cxl_map *live);
/* From here on, until allowed again, every write becomes an upcall. Waits for writes that are being copied.
 * Returns the time of the last write since the last call of this or cxl_port_written, ns since 1970, or 0. */
uint64_t cxl_port_stop(cxl_port *port);
uint64_t cxl_port_written(cxl_port *port);
/* Whether every read and write becomes an upcall, allowed or not. What is under way goes on. */
void cxl_port_ask(cxl_port *port, int asks);
/* Handles: what the kernel names an open file by. Reading is allowed at once where readable. */
int cxl_handle_open(cxl_transport *transport, uint64_t handle, cxl_port *port, int readable);
void cxl_handle_close(cxl_transport *transport, uint64_t handle);
/* Writes by this thread, and by those allowed before, through this handle need no upcall until cxl_port_stop. */
void cxl_handle_allow(cxl_transport *transport, uint64_t handle, uint32_t pid);
enum { CXL_ABSENT_NAMES_MAX = 16 };  /* The last names (no zero behind) that mean nothing: who asks needs no upcall. */
void cxl_absent_note(cxl_transport *transport, uint64_t directory, const char *name, uint64_t length);
/* It may mean something from here on, or every name may: nobody is being told otherwise when this returns. */
void cxl_absent_take_back(cxl_transport *transport, uint64_t directory, const char *name, uint64_t length);
void cxl_absent_take_all_back(cxl_transport *transport);

#endif
