/* direct_file.h - what the files about one directly written file share: its slip and its leases.
 *
 * Invariants
 * - A lease is filled by one thread at a time (busy); everything else is under the lock of the file.
 * - One request for room is under way at a time (asking), and the file is not locked meanwhile.
 * - A lease of which the pages are touched is busy, so that it stays reachable, and is waited for like no other: leases
 *   are begun in their order.
 * - A lease that is used up stays locked until the daemon is about to be told: so it is with many at once.
 * - A lease belongs to the slip with which it was given, and ends with it. A slip is locked as long as any of its
 *   leases or the file itself refers to it: the daemon says with its first word that it wants no more.
 */
#ifndef CXLFS_DIRECT_FILE_H
#define CXLFS_DIRECT_FILE_H

#include "client/ahead.h"
#include "client/parts.h"
#include "client/placing.h"

enum { LEASES_AT_ONCE = 32 };    /* of one file: more threads than this wait for each other */
enum { DIRECT_FROM = 256 << 10 };/* bytes offered before room is asked for: below, the kernel's way is quicker */
enum { LEASE_FIRST = 32 << 20, LEASE_LARGEST = 128 << 20 };  /* of one request */
enum { AHEAD_FROM = 32 << 20 };  /* bytes that are left, or half of what was given last: the time of two requests */
enum { REFUSED_FOR = 16 << 20 }; /* bytes that go through the kernel before room is asked for again */

typedef struct {
    uint64_t offset;             /* on the medium */
    uint64_t length;             /* with the checksums of its leases */
    uint64_t watch;
    uint64_t appended;           /* descriptors, all of them by this process */
    uint64_t absorbed;           /* of them, at least */
    uint32_t users;
    bool closed;
} direct_slip;

typedef struct direct_lease {
    direct_slip *slip;
    uint64_t id;
    uint64_t number;             /* in the order in which they are to be filled */
    placing_room room;           /* used: what is appended */
    uint64_t length;             /* of what is locked */
    uint64_t crc_offset;
    uint64_t file_end;           /* of the last of them in the file */
    uint32_t crc;                /* of the chunk that ends at used, as far as it goes */
    bool is_ahead;               /* given for where the file was expected to be */
    bool is_touched;             /* its pages are known to the process, or left to who fills it; */
    bool is_touching;            /* just now: busy, and worth waiting for */
    bool busy;
} direct_lease;

struct cxl_direct_file {
    int fd;
    const cxl_client_channel *channel;
    _Atomic(cxl_client *) client;
    cxl_client *clients_before[2];       /* until the file is closed: somebody may just look at it */
    atomic_uint_least64_t offered;       /* bytes, before the first lease */
    atomic_uint_least64_t refused_for;   /* bytes that need not ask for room; UINT64_MAX: until it is settled */
    pthread_mutex_t lock;
    pthread_cond_t idle;                 /* a lease is not busy any more, or gone */
    bool is_checked;                     /* that the medium is the daemon's, since the file was opened */
    bool distrusts;                      /* it was not: the daemon is to be asked */
    bool has_asked;                      /* for room, with success */
    bool asking;
    ahead_file ahead;
    uint64_t next_bytes;                 /* of the next request, */
    uint64_t given_bytes;                /* and by the last one */
    uint64_t numbers;                    /* of leases so far */
    uint64_t expected_bytes;             /* where it may end: as the one before; 0: nobody knows */
    uint64_t stored_end;                 /* of what went directly */
    direct_slip *slip;
    direct_lease *leases[LEASES_AT_ONCE];
    direct_lease *finished[CXL_DIRECT_LEASES];   /* not used any more, to be told with the next request, as are */
    uint32_t finished_count;
    uint64_t returned[CXL_DIRECT_LEASES];        /* these, which are not even locked */
    uint32_t returned_count;
};

/* All with the file locked. */
/* Room for a piece that begins at file offset: as much as is wanted, more, or less. 0: look again whether there is some
 * by now; -EAGAIN, or an error. The file is not locked while the daemon answers. */
int lease_ask(cxl_direct_file *file, uint64_t wanted, uint64_t file_offset);
/* The same for what will be needed soon; nothing comes of it where it fails. */
void lease_ask_ahead(cxl_direct_file *file, uint64_t wanted, uint64_t file_offset);
/* The pages of what was given ahead become known to the process, and are not looked for while they are filled. The file
 * is not locked meanwhile. */
void leases_touch(cxl_direct_file *file);
/* Nothing more goes into it; the daemon gets the rest with the next request. 0, or what the daemon said. */
int lease_return(cxl_direct_file *file, direct_lease *lease);
/* The daemon wants no more of a slip: its leases are gone, those that are busy when they are not any more. */
void slip_is_closed(cxl_direct_file *file, direct_slip *slip);
void lease_not_busy(cxl_direct_file *file, direct_lease *lease);
void leases_drop_all(cxl_direct_file *file);
/* Nothing more is appended: who looks next takes in what there is, and has the room back that is not locked. */
void slip_end(cxl_direct_file *file);
/* Room for one more descriptor. */
int slip_make_room(cxl_direct_file *file, direct_slip *slip);
/* *state, as the daemon has left it. */
int slip_state(const cxl_client *client, const direct_slip *slip, uint64_t *state);
int file_settle(cxl_direct_file *file, uint32_t flags);

#endif
