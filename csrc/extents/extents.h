/* extents.h - what the files of the extent map share: extents, the references of one content, the
 * marks of what changed.
 *
 * Never: anything of the media format or of policy (where a lease lies, when a delta is taken).
 *
 * Locks, in the order in which they are taken; nobody waits for an earlier one while holding a
 * later one, and nobody holds two of the same kind:
 *   1. map.writer        one change of a map at a time; held while its data is copied
 *   2. engine.maps_lock  the list of maps
 *   3. map.lock          content, size and marks; held for pointer work only, never over a copy
 *   4. discards_lock     references that are dropped in steps
 *   5. references_lock   what is taken down of references for a metadata image,
 *   6. engine.lock       table of extents, lease states, segment counts
 *   7. snapshots.lock    what is taken down of extents for one
 *   8. engine.stripes    length, published state and checksums of an extent
 * Under held_lock none is waited for. Counters are atomic. An extent lives while somebody holds it (extent.holds): each
 * reference of a map, a delta or a cxl_held, an open lease, a read in flight, and, until cxl_engine_drop_unreferenced,
 * its definition. Whoever has a hold may take another one without a lock; from the table it is taken under engine.lock.
 */
#ifndef CXLFS_EXTENTS_H
#define CXLFS_EXTENTS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cxl_direct.h"
#include "cxlfs.h"
#include "persist/persist.h"

enum {
    PUBLISH_ALIGN = 64,       /* published bytes share no such unit with bytes that come later */
    BLOCK_BYTES = 4096,       /* small overwrites carry their whole file block along */
    STRIPES = 32,
    CHUNK_BYTES_MIN = 64,
    CHUNK_BYTES_MAX = 1 << 26,
    SEGMENT_BYTES_MIN = 8192, /* bounds the segment table to a thousandth of the media */
    LEAF_MAX = 127,           /* references of a leaf: with its header just below 4 KiB */
    DIRTY_MAX = 4096,         /* changed ranges of a map before neighbours are joined */
};

/* Offsets and sizes of files and maps stay below this, so that their sums never wrap. */
#define FILE_OFFSET_MAX ((uint64_t)INT64_MAX)

/* ------------------------------------------------------------------------------------ extents */

/* How bytes count that references of a map cover. Of those from COVER_HELD on no record and no image knows (history);
 * those from COVER_PAST on count as free. */
enum { COVER_KEPT, COVER_REPLACED, COVER_ASIDE, COVER_HELD, COVER_PAST, COVER_KINDS };
enum { COVER_FEW = 2 };          /* pieces of most extents: what one reference covers, and nothing */

/* From start to the next piece: how many references of each kind cover it. */
typedef struct {
    uint32_t start;
    uint32_t counts[COVER_KINDS];
} cover_piece;

/* What refers, or referred, to a range of an extent: see referrers.c. */
typedef struct {
    uint64_t owner;
    uint64_t file_base;       /* file offset of extent offset 0, modulo 2^64 */
    uint32_t start;           /* extent offsets */
    uint32_t end;
} referrer;

typedef struct extent extent;
struct extent {
    extent *next;             /* in its hash bucket; engine.lock */
    extent *segment_next;     /* in its segment; engine.lock */
    extent *segment_previous;
    uint64_t id;
    uint64_t media_offset;
    uint64_t length;          /* bytes defined; changed by the appender alone, under its stripe */
    uint64_t published;       /* bytes the journal knows; stripe */
    uint64_t capacity;        /* room while open; engine.lock, and the writer lock of its map */
    uint32_t segment;         /* where it lies */
    _Atomic uint64_t holds;
    uint32_t *crcs;           /* of the chunks below length; stripe */
    uint32_t crc_capacity;
    uint32_t published_tail;  /* checksum of the last published chunk if it is partial; stripe */
    cover_piece cover_few[COVER_FEW];
    cover_piece *cover;       /* coverage.c, as are the next ones; NULL: the few above; stripe */
    uint32_t cover_count;
    uint32_t cover_capacity;
    uint64_t covered[COVER_KINDS];
    uint64_t leased;          /* room while open; stripe */
    union {
        referrer one;         /* while referrer_capacity is 0 */
        referrer *list;
    } referrers;              /* referrers.c, as are the next ones; stripe */
    uint32_t referrer_count;
    uint32_t referrer_capacity;
    _Atomic bool referrers_lost;
    bool past_lost;           /* and those of history alone; stripe */
    bool cover_stays;         /* memory was short: nothing is counted any more; stripe */
    uint32_t past_chunks;     /* not 0: history alone refers to it, and it had so many chunks then; stripe */
    uint32_t snapshot;        /* number of the last one that has it, or began before it; snapshots.lock */
    bool open;                /* has a lease; engine.lock */
    bool attached;            /* the lease belongs to a map; engine.lock */
    bool busy;                /* cxl_engine_copy_ranges appends just now; engine.lock */
    bool kept;                /* its definition holds it; engine.lock */
    _Atomic uint32_t readers; /* of the holds: references of a cxl_held */
};

typedef struct {
    extent *first;            /* of those that lie in the segment */
    uint32_t extents;         /* how many these are */
    uint32_t next_dead;       /* in the queue of dead segments; SEGMENT_NOT_QUEUED, SEGMENT_LAST */
    _Atomic uint64_t used;    /* bytes of open extents, and of others those that references of kinds below
                               * COVER_PAST cover, each once */
} segment_state;

/* What the journal knew of extents when the snapshot that is being made began. */
typedef struct {
    pthread_mutex_t lock;     /* of the following */
    _Atomic bool active;
    bool failed;              /* for want of memory */
    uint32_t number;          /* of the last one begun; engine.lock too */
    uint64_t cursor;          /* the buckets below it are done, */
    uint64_t table_size;      /* in a table of this size */
    cxl_extent_info *infos;
    uint64_t info_count;
    uint64_t info_capacity;
    uint32_t *crcs;
    uint64_t crc_count;
    uint64_t crc_capacity;
} extent_snapshots;

typedef struct discard discard;

struct cxl_engine {
    cxl_media *media;
    uint64_t first;
    uint64_t segment_size;
    uint64_t segment_count;
    uint32_t chunk;
    uint32_t chunk_shift;
    bool fenced_writes;       /* LINE and BYTE: a write is durable when it returns */
    bool closing;             /* its maps are being freed, by one thread */

    pthread_mutex_t maps_lock; /* of the next four */
    cxl_map *map_list;
    uint64_t map_count;
    cxl_map **owners;         /* hashed by owner */
    uint64_t owners_size;     /* a power of two */

    pthread_mutex_t lock;     /* of the following */
    extent **table;
    uint64_t table_size;      /* a power of two */
    uint64_t hash_seed;       /* random: a crafted image cannot aim at one bucket */
    uint64_t extent_count;
    segment_state *segments;
    uint32_t dead_first;
    uint32_t dead_last;

    extent_snapshots snapshots;
    pthread_mutex_t stripes[STRIPES];

    pthread_mutex_t discards_lock; /* of the next one */
    discard *discards;        /* the oldest first */
    uint64_t discard_min;     /* more references than that are dropped in steps */
    pthread_mutex_t references_lock; /* of the next one, and all that it leads to */
    cxl_reference_snapshot *reference_snapshots;

    pthread_mutex_t held_lock; /* of the next one */
    cxl_held *held;           /* held.c */

    _Atomic uint64_t covered[COVER_KINDS];
    _Atomic uint64_t occupied_segments; /* in which an extent lies, */
    _Atomic uint64_t used_segments; /* and those in which bytes are used */
    _Atomic uint64_t past_extents; /* to which history alone refers, */
    _Atomic uint64_t past_crcs; /* their checksums, */
    _Atomic uint64_t past_refs; /* and its references */
    _Atomic uint64_t leased;
    _Atomic uint64_t uncounted; /* extents whose coverage was not counted any more */
    _Atomic uint64_t promised_blocks;
    _Atomic uint64_t refs;
    _Atomic uint64_t discarded_refs;
    _Atomic uint64_t crcs;
    _Atomic uint64_t memory;
    _Atomic uint64_t bytes_written, bytes_read;
    _Atomic uint64_t checksum_errors;
    _Atomic uint64_t chunks_verified;
    _Atomic uint64_t refs_visited;
    _Atomic uint64_t pieces_visited;
};

/* DRAM of the engine, counted; NULL when there is none. */
void *engine_allocate(cxl_engine *engine, size_t size);
void engine_release(cxl_engine *engine, void *pointer, size_t size);

static inline uint64_t chunks_of(const cxl_engine *engine, uint64_t length)
{
    return (length >> engine->chunk_shift) + ((length & (engine->chunk - 1)) != 0);
}

static inline pthread_mutex_t *stripe_of(cxl_engine *engine, const extent *x)
{
    return &engine->stripes[(x->id * UINT64_C(0x9e3779b97f4a7c15)) >> 59];
}

/* The segment in which an extent lies. */
static inline segment_state *segment_of(cxl_engine *engine, const extent *x)
{
    return &engine->segments[x->segment];
}

/* Seeded, for tables that a crafted image must not fill unevenly. */
uint64_t engine_hash(const cxl_engine *engine, uint64_t id);

/* extent.c: the table. Functions named _locked want engine.lock. */
int table_init(cxl_engine *engine);
void table_free(cxl_engine *engine);
/* Once for many extents, instead of doubling again and again. */
void table_make_room(cxl_engine *engine, uint64_t count);
bool extent_place(const cxl_engine *engine, uint64_t media_offset, uint64_t length, uint64_t *segment);
extent *extent_find_locked(cxl_engine *engine, uint64_t id);
/* In a large table each step is a miss of the cache: so many turns of a loop ahead memory is asked for. */
enum { AHEAD = 16 };
/* Both will be looked for, sooner_id first. */
void extent_prefetch(const cxl_engine *engine, uint64_t id, uint64_t sooner_id);
extent *extent_create_locked(cxl_engine *engine, uint64_t id, uint64_t media_offset, uint64_t chunks);
/* count_dead: its segment may have died with it (not when a definition is undone). */
void extent_destroy_locked(cxl_engine *engine, extent *x, bool count_dead);
int extent_grow_crcs(cxl_engine *engine, extent *x, uint64_t chunks);
/* A held extent, or NULL. */
extent *extent_take(cxl_engine *engine, uint64_t id);
void extent_drop(cxl_engine *engine, extent *x);
void extent_drop_locked(cxl_engine *engine, extent *x);
/* The end of a lease, and of its hold; *media_offset, *length: room that was not used. */
void extent_close(cxl_engine *engine, extent *x, uint64_t *media_offset, uint64_t *length);
uint64_t extent_published(cxl_engine *engine, extent *x);
/* The journal knows its bytes up to end, or did when something but history referred to it. */
bool extent_is_known(cxl_engine *engine, extent *x, uint64_t end);
void extent_set_published(cxl_engine *engine, extent *x, uint64_t length, uint32_t tail);

/* leases.c */

/* An open extent without a map, for the caller alone until extent_unused (0), or why not. */
int extent_use_open(cxl_engine *engine, uint64_t id, extent **out);
void extent_unused(cxl_engine *engine, extent *x);

/* definitions.c */

/* What the journal knows of an extent; later bytes in its last chunk have changed the checksum of that.
 * info.crc_index stays. False: there is no room for so many checksums. */
bool extent_describe_published(cxl_engine *engine, extent *x, cxl_extent_info *info, uint32_t *crcs,
                               uint64_t room);

/* held.c: an engine ends, and what it holds for readers with it. */
void helds_free(cxl_engine *engine);

/* snapshot.c: before what the journal knows of x changes, or x is forgotten. */
void snapshot_keep(cxl_engine *engine, extent *x);

static inline void extent_hold(extent *x)
{
    atomic_fetch_add_explicit(&x->holds, 1, memory_order_relaxed);
}

/* extent_io.c: bytes and checksums; append.h: how they become more. */

uint32_t chunk_seed(uint64_t id, uint64_t chunk);

/* Length and checksums [first, first+count) of an extent as of one moment. The chunks must lie
 * below a length that the extent had before. */
uint64_t extent_checksums(cxl_engine *engine, extent *x, uint64_t first, uint64_t count, uint32_t *crcs);

/* A range of an extent as one file sees it. */
typedef struct {
    extent *extent;
    uint64_t extent_offset;   /* of the range wanted */
    uint64_t length;
    uint64_t reference_start; /* extent offsets of the whole reference: what a damaged chunk hits */
    uint64_t reference_end;
    uint64_t file_base;       /* file offset of extent offset 0, modulo 2^64 */
} extent_range;

/* Deliver a range to target, or only check it (target NULL): 0, or -EIO with *fault. What is delivered
 * is what was summed: each byte is loaded once. */
int extent_read(cxl_engine *engine, const extent_range *range, uint8_t *target, bool verify, cxl_fault *fault);
enum { READ_BATCH = 64 };        /* ranges delivered at once */

/* The same for up to READ_BATCH ranges in the order of their file: those that lie in one chunk are checked together. */
int extent_read_each(cxl_engine *engine, const extent_range *ranges, uint8_t *const *targets,
                     unsigned count, bool verify, cxl_fault *fault);
/* Where it lies in the mapped media. */
const uint8_t *range_address(const cxl_engine *engine, const extent_range *range);

/* --------------------------------------------------------------------------------- references */

typedef struct {
    uint64_t file_offset;
    uint64_t length;
    extent *extent;
    uint64_t extent_offset;
} reference;

typedef struct snapshot_slot snapshot_slot;
typedef struct leaf {
    uint32_t count;
    uint32_t capacity;
    union {
        _Atomic(snapshot_slot *) snapshot; /* reference_snapshot.c: what it is part of, or NULL */
        struct leaf *next_spare;
    };
    reference refs[];
} leaf;

/* Room promised to a range of the file; holes: bytes of it. */
typedef struct {
    uint64_t start;
    uint64_t end;
    uint64_t holes;
} promised_range;

/* Sorted references without overlap in a row of leaves. Every leaf has some; when there is more
 * than one leaf all have room for LEAF_MAX. Two references that continue each other are one. */
typedef struct {
    leaf **leaves;            /* &only while one is enough */
    leaf *only;
    uint32_t leaf_count;
    uint32_t leaf_capacity;
    leaf *spares;             /* kept for the changes of a batch, */
    uint32_t batch_capacity;  /* which have at least this much room; 0: no batch */
    uint64_t refs;
    uint64_t bytes;           /* mapped */
    uint64_t owner;           /* of the map */
    uint8_t kind;             /* how it counts: COVER_KEPT ... */
    promised_range *promised; /* promise.c, as are the next ones */
    uint32_t promised_count;
    uint64_t promised_blocks;
    uint64_t promised_holes;  /* bytes */
} tree;

typedef struct {
    uint32_t leaf;
    uint32_t slot;
} tree_position;

/* tree.c, for those that change a tree, or look left */
leaf *leaf_new(cxl_engine *engine, tree *content, uint32_t capacity);
void leaf_retire(cxl_engine *engine, tree *content, leaf *old);
uint32_t leaf_capacity_for(uint64_t count);
int tree_reserve_row(cxl_engine *engine, tree *content, uint64_t leaves);
bool tree_step_back(const tree *content, tree_position *position);

void tree_init(tree *content, uint64_t owner);
void tree_clear(cxl_engine *engine, tree *content);
/* The memory alone: what its references hold and cover is somebody else's by now. */
void tree_free_leaves(cxl_engine *engine, tree *content);
/* kind: how the copy counts. */
int tree_copy(cxl_engine *engine, const tree *source, int kind, tree *target);
/* The first reference that ends beyond offset. */
tree_position tree_find(const tree *content, uint64_t offset);
reference *tree_at(const tree *content, tree_position position); /* NULL behind the last one */
tree_position tree_next(const tree *content, tree_position position);
/* The reference that ends just at offset, or NULL. */
reference *tree_ending_at(const tree *content, uint64_t offset);
/* Make [start, end) consist of the references given (sorted, apart, inside). Takes a hold for each
 * of its own, drops those that go. -ENOMEM changes nothing; removing up to a reference's border, or
 * to the end of everything, needs no memory. */
int tree_replace(cxl_engine *engine, tree *content, uint64_t start, uint64_t end,
                 const reference *with, size_t count);
/* Make the next count replacements by one reference each succeed for certain. */
int tree_reserve(cxl_engine *engine, tree *content, uint64_t count);
void tree_unreserve(cxl_engine *engine, tree *content);

/* promise.c: around every change of [start, end). */
void promise_before(cxl_engine *engine, tree *content, uint64_t start, uint64_t end);
void promise_after(cxl_engine *engine, tree *content, uint64_t start, uint64_t end);
void promise_clear(cxl_engine *engine, tree *content);

/* ----------------------------------------------------------------------------------- coverage */

/* coverage.c */
void cover_init(extent *x);
void cover_destroy(cxl_engine *engine, extent *x);
void cover_open(cxl_engine *engine, extent *x, uint64_t capacity);
void cover_close(cxl_engine *engine, extent *x);
/* Each reference of a content once more, as of that kind, with a hold on its extent; -ENOMEM changes nothing. */
int cover_hold_all(cxl_engine *engine, const tree *content, int kind);
/* None of a content any more, nor its holds. */
void cover_drop_all(cxl_engine *engine, const tree *content);
/* As tree_replace is about to do it; -ENOMEM changes nothing. must: succeed, if need be by counting too much. */
int cover_replace(cxl_engine *engine, const tree *content, uint64_t start, uint64_t end, const reference *with,
                  size_t count, bool must);
/* It did not do it. */
void cover_restore(cxl_engine *engine, const tree *content, uint64_t start, uint64_t end, const reference *with,
                   size_t count);
void cover_set_kind(cxl_engine *engine, tree *content, int kind);
/* More references (or, negative, fewer) than before. */
void cover_refs(cxl_engine *engine, const tree *content, int64_t more);
/* The first run of bytes in [start, end) that a kind below that one covers; false: none. The stripe is held. */
bool cover_run(const extent *x, int below, uint64_t start, uint64_t end, uint64_t *first, uint64_t *last);

/* A growing list of equal items (report.c); count stays right when memory runs out. */
typedef struct {
    void *items;
    uint64_t count;
    uint64_t capacity;
    size_t size;
} growing_list;

/* Where the next item goes, or NULL. */
void *list_add(growing_list *to);
/* The items without the room behind them, for cxl_free: an allocation even when there are none. NULL: no memory. */
void *list_give(growing_list *from);

/* -------------------------------------------------------------------------------------- marks */

typedef struct {
    uint64_t start;
    uint64_t end;
} interval;

/* What differs from the last delta: content beyond cut is gone, the intervals are new. */
typedef struct {
    uint64_t cut;             /* smallest size since then */
    uint64_t taken_size;      /* size then */
    interval *list;           /* sorted, apart, not adjacent */
    uint32_t count;
    uint32_t capacity;
    bool fresh;               /* no delta was taken yet */
} marks;

void marks_release(cxl_engine *engine, marks *dirty);
/* Make the next marks_add succeed. */
int marks_reserve(cxl_engine *engine, marks *dirty);
void marks_add(marks *dirty, uint64_t start, uint64_t end);
void marks_cut(marks *dirty, uint64_t size);
bool marks_any(const marks *dirty, uint64_t size);
/* Put the older marks back; *older is empty afterwards. */
void marks_return(cxl_engine *engine, marks *dirty, marks *older);

/* --------------------------------------------------------------------------------------- maps */

struct cxl_map {
    cxl_engine *engine;
    uint64_t owner;
    cxl_map *previous;        /* engine.maps_lock */
    cxl_map *next;
    cxl_map *next_owner;      /* in its bucket of engine.owners */
    pthread_mutex_t writer;
    pthread_rwlock_t lock;    /* of the following; its holder for writing holds writer too */
    uint64_t size;
    tree content;
    marks dirty;
    extent *lease;            /* writer */
    extent *next_lease;       /* writer; takes over when lease is used up */
    _Atomic uint32_t users;   /* who keeps the map alive: its owner, and reads in flight */
};

/* One more user; cxl_map_free is what each of them ends with. */
static inline void map_use(cxl_map *map)
{
    atomic_fetch_add_explicit(&map->users, 1, memory_order_relaxed);
}

/* map_read.c */

/* How many of length bytes from offset on lie below the size. */
uint64_t map_clip_to_size(cxl_map *map, uint64_t offset, uint64_t length);
/* Deliver [offset, +length), which lies below the size; holes are zeros. Bytes delivered: fewer when
 * the file was cut meanwhile, whose lost bytes never were zeros; or -errno. */
int64_t map_deliver(cxl_map *map, uint64_t offset, uint8_t *target, uint64_t length, bool verify,
                    cxl_fault *fault);
/* Where up to length bytes lie, if in one piece: their number, and the extent is held; else 0. Nothing is verified. */
uint64_t map_hold_extent(cxl_map *map, uint64_t offset, uint64_t length, extent_range *held);

/* map.c: life, for maps that are made elsewhere */
cxl_map *map_allocate(cxl_engine *engine, uint64_t owner);
void map_link(cxl_map *map);

/* The maps of an owner, one after the other (before NULL: the first); NULL: no more. engine.maps_lock is held. */
cxl_map *map_of_owner(cxl_engine *engine, uint64_t owner, const cxl_map *before);
/* Put references (extent NULL: a hole), all or nothing, without marks. map.writer is held. */
int map_put(cxl_map *map, const reference *refs, uint64_t count);
/* Cut, put references, set the size, all or nothing, without marks. */
int map_apply(cxl_map *map, uint64_t cut, const reference *refs, uint64_t count, uint64_t size);

static inline uint64_t reference_end(const reference *ref)
{
    return ref->file_offset + ref->length;
}

static inline uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static inline uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

#endif
