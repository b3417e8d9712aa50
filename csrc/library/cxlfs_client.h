/* cxlfs_client.h - files of cxlfs mounts for programs without Python: what is written goes from the program's memory
 * into the medium, and what is read or mapped comes from there, without the kernel's copies, where the machine, the
 * user and the mount allow it. Everywhere else, on any file system, the same calls go through the kernel: a program
 * needs no second way. C11 and C++; link with what `pkg-config --cflags --libs cxlfs` says.
 *
 * Durability: that of the same calls of POSIX on the mount. cxlfs_close, cxlfs_sync and a rename are commit points:
 * what they cover survives a power cut when they have returned 0. cxlfs_write, cxlfs_pwrite and cxlfs_flush commit
 * nothing. A file that is overwritten from its beginning (O_TRUNC) has its old content until the new one is committed,
 * also when the program is killed.
 *
 * Errors: a function that returns a pointer returns NULL, one that returns a number -1, and errno says why: as
 * open(2), write(2), read(2) and close(2) do, and EIO for bytes that do not match their checksum.
 *
 * Threads: everything may be called by many threads, also with one file, but for the end of it: cxlfs_close,
 * cxlfs_revert and cxlfs_unmap are the last call, or the only one under way. Calls that move the position take turns;
 * cxlfs_pwrite and cxlfs_pread run beside each other.
 *
 * Ownership: what a function gives is the caller's until cxlfs_close or cxlfs_unmap, which end it whatever they return.
 * Texts that are returned are constants. A forked child may go on with what it has inherited: through the kernel.
 *
 * Signals: the library handles SIGBUS, for faults of the medium, and hands on what is not its own to the handler that
 * was there before. A program that installs one later passes on what it does not know.
 */
#ifndef CXLFS_CLIENT_H_INSTALLED
#define CXLFS_CLIENT_H_INSTALLED

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

/* The major version is that of libcxlfs.so.N: another one is for programs compiled anew. The minor one counts what was
 * added. */
#define CXLFS_CLIENT_VERSION_MAJOR 0
#define CXLFS_CLIENT_VERSION_MINOR 1
#define CXLFS_CLIENT_VERSION (CXLFS_CLIENT_VERSION_MAJOR * 1000 + CXLFS_CLIENT_VERSION_MINOR)

#ifdef __cplusplus
extern "C" {
#endif

/* CXLFS_CLIENT_VERSION of the library that was loaded. */
unsigned cxlfs_client_version(void);

/* --------------------------------------------------------------------------------------- files */

typedef struct cxlfs_file cxlfs_file;

/* As open(2) with these flags, and O_CLOEXEC. Nothing goes directly with O_APPEND, O_SYNC and O_DSYNC. */
cxlfs_file *cxlfs_open(const char *path, int flags, unsigned permissions);
/* The same of a descriptor, which belongs to the file from then on; after NULL it is still the caller's. At most one
 * file for each open file description. flags: O_TRUNC or O_EXCL where it was opened so. */
cxlfs_file *cxlfs_fdopen(int fd, int flags);
/* A file that gets new content whole, or not at all: cxlfs_close makes it the content, cxlfs_revert before does not.
 * A name that is new is then gone, unless somebody else has taken it; an old file has its old content on a mounted
 * store, and is empty elsewhere, as opening has emptied it. */
cxlfs_file *cxlfs_replace(const char *path, unsigned permissions);

/* All of it at the position, which moves behind it: length, or -1; then a part may be there. Nothing is gathered: many
 * small pieces go through cxlfs_stream. */
ssize_t cxlfs_write(cxlfs_file *file, const void *bytes, size_t length);
/* The same at offset; the position stays. Several threads store at the same time. */
ssize_t cxlfs_pwrite(cxlfs_file *file, const void *bytes, size_t length, int64_t offset);
/* Bytes read at the position, which moves behind them; fewer than length only at the end of the file, where it is 0. */
ssize_t cxlfs_read(cxlfs_file *file, void *bytes, size_t length);
ssize_t cxlfs_pread(cxlfs_file *file, void *bytes, size_t length, int64_t offset);
/* Where the position is then. whence: SEEK_SET, SEEK_CUR or SEEK_END. */
int64_t cxlfs_seek(cxlfs_file *file, int64_t offset, int whence);
int cxlfs_truncate(cxlfs_file *file, int64_t size);

/* What was written is there for whoever looks at the file, whichever way. Without it others see it soon. */
int cxlfs_flush(cxlfs_file *file);
/* As fsync(2): a commit point. */
int cxlfs_sync(cxlfs_file *file);
/* Give up what was written: for files opened with O_TRUNC or O_EXCL, and of cxlfs_replace; EINVAL of others. All that
 * is left to do with it is cxlfs_close, which returns 0 then; a write fails with ECANCELED. */
int cxlfs_revert(cxlfs_file *file);
/* The end of it, and a commit point. After -1 the new content is not to be relied on: a mounted store may have the old
 * one. */
int cxlfs_close(cxlfs_file *file);

/* The descriptor, at the position, what was written before in the file. It is not to be closed. */
int cxlfs_fileno(cxlfs_file *file);
/* Why the file goes through the kernel, and the errno of it in *error (may be NULL); NULL and 0: it may go directly. A
 * file that is read is tried once 1 MiB of it was read; and pieces of any file go through the kernel where that pays.
 * How much went which way: cxlfs_statistics. */
const char *cxlfs_why_not(const cxlfs_file *file, int *error);

/* A stream of it, as fdopen(3) gives: small pieces are gathered to 1 MiB. The file belongs to it from then on: fclose
 * ends it as cxlfs_close does. Between fflush and the next call with the stream, cxlfs_flush, cxlfs_sync and
 * cxlfs_revert may be called with the file; fclose then says that what still waited was not written. */
FILE *cxlfs_stream(cxlfs_file *file, const char *mode);

/* ---------------------------------------------------------------------------------------- maps */

/* The content of a file as memory in one piece, as it was when it was mapped, whatever becomes of the file. */
typedef struct cxlfs_map cxlfs_map;

enum {
    CXLFS_MAP_VERIFY = 1,   /* all of it, before anything is returned; damaged: EIO */
    CXLFS_MAP_PRIVATE = 2,  /* the memory may be written to, which changes no file */
    CXLFS_MAP_ALONE = 4     /* what other programs have verified lately does not count: see docs/direct.md */
};

/* Where the store's own pages cannot be had, the file is mapped as mmap(2) does: then it changes with the file, and
 * what the mount cannot deliver is a SIGBUS, unless it is verified before. */
cxlfs_map *cxlfs_map_open(const char *path, unsigned flags);
/* The same of a descriptor open for reading, as with cxlfs_fdopen. */
cxlfs_map *cxlfs_map_fdopen(int fd, unsigned flags);
/* Bytes [offset, offset + length), each chunk of them compared with its checksum by its first use, unless all of the
 * content was verified lately (CXLFS_MAP_ALONE). EIO: damaged; ERANGE: it leaves the file. */
const void *cxlfs_map_get(cxlfs_map *map, uint64_t offset, uint64_t length);
/* The same comparison alone. EIO: with the damaged part in *bad_offset and *bad_length (may be NULL). */
int cxlfs_map_verify(cxlfs_map *map, uint64_t offset, uint64_t length, uint64_t *bad_offset, uint64_t *bad_length);
/* All of it as it lies there: of what was not verified nothing is promised. To be read alone, unless it was mapped with
 * CXLFS_MAP_PRIVATE. */
void *cxlfs_map_data(const cxlfs_map *map);
uint64_t cxlfs_map_size(const cxlfs_map *map);
/* As cxlfs_why_not. */
const char *cxlfs_map_why_not(const cxlfs_map *map, int *error);
void cxlfs_unmap(cxlfs_map *map);

/* ------------------------------------------------------------------------------------- process */

/* Of the process, since it began. */
typedef struct {
    uint64_t direct_bytes;      /* written into the medium */
    uint64_t kernel_bytes;      /* of files that may go directly: left to the kernel */
    uint64_t read_bytes;        /* read from the medium */
    uint64_t mapped_bytes;      /* of files that were mapped from the medium, */
    uint64_t copied_bytes;      /* and of these, as copies */
    uint64_t media;             /* mapped just now */
    uint64_t verified_bytes;    /* of what was mapped, compared with checksums by this process */
} cxlfs_counts;

/* size: sizeof(cxlfs_counts) of the program; what a later version counts is left out. */
void cxlfs_statistics(cxlfs_counts *out, size_t size);
/* Let go of media of which no file is in use: they stay mapped otherwise, since the next file is written sooner then.
 * Before the file system below a store is unmounted. */
void cxlfs_forget(void);

#ifdef __cplusplus
}
#endif

#endif
