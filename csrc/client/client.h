/* client.h - what a program uses to store into files of a mount, and to look at them, by itself: the bytes go from
 * its memory into the medium (direct.h has how that is agreed with the daemon; docs/direct.md the picture).
 *
 * Rules
 * - Functions return 0 or a count, or -errno; no output. All of them may be called by many threads. The only global is
 *   the table of clients (csrc/client/clients.c): one for each medium that the process has mapped, its lock, counters.
 * - Nothing here is needed for a file to be right: whatever is refused goes through the kernel as ever, with
 *   the same descriptor. What was taken becomes content when it is settled or the file is looked at, and is committed
 *   by close(2), fsync(2) and the like: never by this library.
 * - A fault of the medium is -EIO of the call that met it. Addresses that the caller gives are not checked.
 * - A forked child has none of it: every call on what the parent opened is refused there, and touches nothing.
 */
#ifndef CXLFS_CLIENT_H
#define CXLFS_CLIENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct cxl_direct_file cxl_direct_file; /* an open file description that is written to */
typedef struct cxl_mapped cxl_mapped;           /* a file that is looked at */
typedef struct cxl_reader cxl_reader;           /* a file that is read as if by read(2) */

/* --------------------------------------------------------------------------------------- files */

/* Prepare fd, of a regular file open for writing, which stays the caller's and must outlive the result. At most one
 * for each open file description. No room is asked for before enough was written that it pays.
 * -ENOTTY: no file of a mount that offers it. -EPERM, -EACCES: not for this user. -ENOENT, -ENXIO: the medium is not
 * to be found from here, or is another one. -ENOTCONN: the daemon is gone. -EINVAL: not open for writing. */
int cxl_direct_open(int fd, cxl_direct_file **out);

/* Store up to length bytes as content of the file at offset: how many, from the beginning, were taken, not 0 unless
 * length is. -EAGAIN: none, and these must go through write(2), now: there is no room for it, somebody else has the
 * file open, or it is not worth it. -EIO, -ENOTCONN and so on: an error that the writer must be told of. */
int64_t cxl_direct_pwrite(cxl_direct_file *file, const void *bytes, uint64_t length, uint64_t offset);

/* Room for what may be written next is asked for by a thread of the process, which is there as long as it has something
 * to do, and 0.2 s longer; before the first byte. */
void cxl_direct_permit_ahead(cxl_direct_file *file);

/* What was taken is content for whoever looks, whichever way, when this returns. 0, or what became of it. */
int cxl_direct_settle(cxl_direct_file *file);

/* Settle, give all room back, and end: file is gone whatever is returned. Before close(2), which commits. No other
 * call may be under way. */
int cxl_direct_close(cxl_direct_file *file);

/* ------------------------------------------------------------------------------- mapped files */

enum { CXL_MAPPED_VERIFY = 1, CXL_MAPPED_PRIVATE = 2, CXL_MAPPED_ALONE = 4, CXL_MAPPED_COMPARE = 8 };

/* The content of fd, a regular file open for reading, as it is now, as memory that can be read: whatever happens to the
 * file later, until it is closed. fd must outlive the result; at most one for each open file description. What does
 * not lie page by page on the medium is copied, and verified then; of the rest nothing was verified unless flags has
 * CXL_MAPPED_VERIFY, by this program or, lately, by others (CXL_MAPPED_ALONE: nothing that others have compared
 * counts). CXL_MAPPED_PRIVATE: mprotect(2) may let the caller write to it, who sees that alone; -EINVAL where
 * the medium has no such pages (a DAX device, hugetlbfs). As cxl_direct_open, and -EIO: damaged, -ENOMEM, also
 * where copies would take more than a 16th of the memory. CXL_MAPPED_COMPARE: compared, by this program
 * alone, and looked at piece by piece, where this process has the medium mapped already, and not as one piece of
 * memory; not by a forked child (-ENXIO). */
int cxl_mapped_open(int fd, uint32_t flags, cxl_mapped **out);
const void *cxl_mapped_base(const cxl_mapped *mapped);   /* NULL: CXL_MAPPED_COMPARE */
/* All of what was opened with CXL_MAPPED_PRIVATE may be written to from here on. -EINVAL: it was not opened so. */
int cxl_mapped_permit_writes(cxl_mapped *mapped);
/* Of what was opened with CXL_MAPPED_COMPARE: where the byte of the file at offset lies, and in *length how many, from
 * this one on, lie there one behind the other. NULL: nowhere, as in a hole. Nothing was verified. */
const void *cxl_mapped_lies(const cxl_mapped *mapped, uint64_t offset, uint64_t *length);
uint64_t cxl_mapped_size(const cxl_mapped *mapped);
uint64_t cxl_mapped_copied(const cxl_mapped *mapped);    /* bytes of it that are copies */
/* Compare all chunks that lie in a part of [offset, offset + length) with their checksums, each once. 0; -EIO with
 * the damaged part of the file in *bad_offset and *bad_length (may be NULL); -ERANGE. */
int cxl_mapped_verify(cxl_mapped *mapped, uint64_t offset, uint64_t length, uint64_t *bad_offset, uint64_t *bad_length);
/* The same for all of it, by several threads, and together with others who map the same content just now. */
int cxl_mapped_verify_all(cxl_mapped *mapped, uint64_t *bad_offset, uint64_t *bad_length);
/* All of it was verified already, and nothing is compared any more. */
bool cxl_mapped_is_verified(const cxl_mapped *mapped);
/* Its pages become known to the process, those of the first 8 GiB, by several threads: sooner than by looking. */
void cxl_mapped_touch(cxl_mapped *mapped);
void cxl_mapped_close(cxl_mapped *mapped);

/* ----------------------------------------------------------------------------------- reading */

/* Prepare to read fd, of a regular file open for reading alone; at most one for each open file description, and no
 * mapping beside it. As cxl_mapped_open, and -EBUSY: not now, somebody has the file open for writing. */
int cxl_reader_open(int fd, cxl_reader **out);
/* Of the file, as long as nothing is refused. */
uint64_t cxl_reader_size(const cxl_reader *reader);
/* Whether the file may still be read so: nobody has it open for writing, or has had it since, and the daemon lives. */
bool cxl_reader_holds(const cxl_reader *reader);
/* Copy [offset, offset + length), which lies inside the file, every byte compared with its checksum by its first use:
 * the content of the file during all of the call. 0. Otherwise what was copied is not to be used, and read(2) is to be
 * asked: -ESTALE: cxl_reader_holds is false, and stays so. -EAGAIN: this range is damaged, or cannot be read, or
 * somebody changes bytes meanwhile. -ERANGE. */
int cxl_reader_copy(cxl_reader *reader, void *bytes, uint64_t length, uint64_t offset);
/* The end of it. fd: a descriptor of the same description that stays open, or -1. No other call may be under way. */
void cxl_reader_close(cxl_reader *reader, int fd);

/* ------------------------------------------------------------------------------------ counters */

/* Of the process, since it began. */
typedef struct {
    uint64_t direct_bytes;       /* taken by cxl_direct_pwrite */
    uint64_t fuse_bytes;         /* left to write(2): -EAGAIN */
    uint64_t leases;             /* pieces of room that were given */
    uint64_t settles;            /* requests to take over what was stored */
    uint64_t mapped_bytes;       /* of files that were mapped, also only to be compared */
    uint64_t copied_bytes;       /* of these, as copies */
    uint64_t verified_bytes;     /* compared with checksums where they lie, by this process */
    uint64_t read_bytes;         /* by cxl_reader_copy */
    uint64_t refused;            /* calls of cxl_direct_open, cxl_mapped_open, cxl_reader_open, and requests for room
                                  * that failed */
    int32_t last_errno;          /* of the last of these; 0: none */
    uint32_t media;              /* mapped just now */
} cxl_client_counts;

void cxl_client_statistics(cxl_client_counts *out);

/* Let go of media of which no file is in use: they stay mapped otherwise, since the next file is written sooner
 * where the pages of the medium are known. */
void cxl_client_forget(void);

#endif
