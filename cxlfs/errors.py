"""Every error cxlfs raises on purpose: one tree, each class with an errno, an exit code, a stable
id and the next step for the person who sees it.

This module never maps, logs or prints: the one place that turns errors into errno values is
``fuse.boundary``, the one that turns them into exit codes is ``cli``.

Invariants
- ``id`` is unique, never reused and never changed once released (``docs/operations.md`` lists it).
- An exit code above 2 belongs to one kind of problem only.
- ``InvariantError`` lies outside the tree: it is a defect of ours, not of the world.
"""

from __future__ import annotations

import dataclasses as _dataclasses
import errno as _errno
from typing import ClassVar


@_dataclasses.dataclass(frozen=True, slots=True)
class DataFault:
    """Which file bytes [file_offset, file_offset + length) cannot be read, and why.

    ``media_offset`` is that of the chunk whose checksum differs, or of the byte that faulted.
    ``expected`` and ``actual`` are checksums; both 0 when the media could not be accessed.
    """

    file_offset: int
    length: int
    extent_id: int
    chunk: int
    media_offset: int
    expected: int
    actual: int


class CxlfsError(Exception):
    """Base of all expected errors: ``str(error)`` is one line that a user can read."""

    errno: ClassVar[int] = _errno.EIO
    exit_code: ClassVar[int] = 1
    id: ClassVar[str] = "failure"
    default_next_step: ClassVar[str] = "run the command again with --debug and report the output"

    def __init__(self, message: str, *, next_step: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step if next_step is not None else self.default_next_step


class UsageError(CxlfsError):
    """The arguments cannot be meant as given."""

    errno = _errno.EINVAL
    exit_code = 2
    id = "usage"
    default_next_step = "see --help"


class MediaError(CxlfsError):
    """The media could not be mapped, read, or made durable at the range named."""

    fault: DataFault | None = None
    exit_code = 13
    id = "media-error"
    default_next_step = "check the device (cxl list -H, ndctl list -H, dmesg), run cxlfs verify"

    def __init__(
        self,
        message: str,
        *,
        offset: int | None = None,
        length: int | None = None,
        not_durable: bool = False,
        next_step: str | None = None,
    ) -> None:
        """``not_durable``: a write-back or a fence failed, so that nobody knows what of all that
        was stored survives. Otherwise the range named is all that is concerned.
        """
        super().__init__(message, next_step=next_step)
        self.offset = offset
        self.length = length
        self.not_durable = not_durable


class NotPersistentError(MediaError):
    """The region would lose its content with the power, or cannot be written back finely enough."""

    errno = _errno.EOPNOTSUPP
    exit_code = 15
    id = "not-persistent"
    default_next_step = "use a persistent region (daxctl list, ndctl list), or a file"


class MediaUnavailableError(MediaError):
    """The source does not exist, may not be opened, or is not something that can hold a store."""

    errno = _errno.ENOENT
    exit_code = 16
    id = "media-unavailable"
    default_next_step = "check the path and its permissions"


class BusyError(CxlfsError):
    """Another process holds the store, or the mount point is taken."""

    errno = _errno.EBUSY
    exit_code = 11
    id = "in-use"
    default_next_step = "unmount it first: cxlfs umount MOUNTPOINT"


class NotACxlfsError(CxlfsError):
    """No superblock copy is readable: this is not a store, or nothing of it is left."""

    errno = _errno.EINVAL
    exit_code = 10
    id = "not-a-store"
    default_next_step = "make a store with cxlfs mkfs SOURCE"


class UnsupportedFormatError(CxlfsError):
    """The store needs a feature or a format version that this program does not know."""

    errno = _errno.EOPNOTSUPP
    exit_code = 12
    id = "format-unsupported"
    default_next_step = "use a newer cxlfs"


class CorruptionError(CxlfsError):
    """A structure on the media fails its check; it names the structure and where it lies."""

    fault: DataFault | None = None
    exit_code = 17
    id = "corruption"
    default_next_step = "run cxlfs verify SOURCE to see everything that is damaged"

    def __init__(
        self,
        message: str,
        *,
        structure: str,
        media_offset: int | None = None,
        expected: int | None = None,
        actual: int | None = None,
        next_step: str | None = None,
    ) -> None:
        super().__init__(message, next_step=next_step)
        self.structure = structure
        self.media_offset = media_offset
        self.expected = expected
        self.actual = actual


class ContradictionError(CorruptionError):
    """A journal record, which is whole, does not apply to the state before it."""

    id = "contradicting-record"

    def __init__(
        self, message: str, *, structure: str, media_offset: int | None = None, lsn: int = 0
    ) -> None:
        super().__init__(message, structure=structure, media_offset=media_offset)
        self.lsn = lsn


class NoSpaceError(CxlfsError):
    """The store cannot hold what was asked for; nothing that was committed is touched."""

    errno = _errno.ENOSPC
    exit_code = 14
    id = "no-space"
    default_next_step = "delete checkpoints that are no longer needed, or use a larger store"

    def __init__(
        self,
        message: str,
        *,
        needed_bytes: int = 0,
        available_bytes: int = 0,
        next_step: str | None = None,
    ) -> None:
        super().__init__(message, next_step=next_step)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class ReadOnlyError(CxlfsError):
    """The store is mounted read-only, or stopped writing after a failure."""

    errno = _errno.EROFS
    exit_code = 18
    id = "read-only"
    default_next_step = "run cxlfs status to see why it is read-only"


class RecordRefusedError(CxlfsError):
    """A change contradicts the state of the store: a defect. Nothing was written."""

    id = "record-refused"
    default_next_step = "report this with the log of the mount"


class SavedCopyError(CxlfsError):
    """The file that keeps what a repair changes cannot be written, read, or belongs elsewhere."""

    id = "saved-copy"
    default_next_step = "name a file that does not exist, on another file system than the store"


class OutOfMemoryError(CxlfsError):
    """The process could not get memory; nothing on the media changed."""

    errno = _errno.ENOMEM
    id = "out-of-memory"
    default_next_step = "free memory, or raise the limit the process runs under"


class OccupiedError(CxlfsError):
    """The source holds something that mkfs would destroy: another store, a file system, data."""

    errno = _errno.EEXIST
    exit_code = 19
    id = "source-occupied"
    default_next_step = "use another source, or --force to destroy what is there"


class FuseUnavailableError(CxlfsError):
    """This machine cannot mount: no /dev/fuse, no fusermount3, or no permission."""

    errno = _errno.ENODEV
    exit_code = 20
    id = "fuse-unavailable"
    default_next_step = "install the Debian package fuse3 and load the kernel module fuse"


class MountError(CxlfsError):
    """The mount point is missing, is not a directory, or did not come up."""

    errno = _errno.EINVAL
    exit_code = 21
    id = "mount-failed"
    default_next_step = "check the mount point, then read the log that the message names"


class NoDaemonError(MountError):
    """No living daemon serves the mount point or source."""

    id = "no-daemon"
    default_next_step = "mount it: cxlfs mount SOURCE MOUNTPOINT"


class NoCheckpointError(CxlfsError):
    """The directory is there, answers, and holds no checkpoint at all: a first start."""

    errno = _errno.ENOENT
    exit_code = 22
    id = "no-checkpoint"
    default_next_step = "start from the beginning, or name the directory that checkpoints are in"


class DirectoryAbsentError(CxlfsError):
    """The directory of checkpoints is not there: a wrong path, or its store is not mounted."""

    errno = _errno.ENOENT
    exit_code = 32
    id = "directory-absent"
    default_next_step = "mount the store, name the right directory, or make it for a first start"


class DirectoryUnreachableError(CxlfsError):
    """The directory of checkpoints cannot be looked into: its mount is dead or does not answer."""

    errno = _errno.ENOTCONN
    exit_code = 33
    id = "directory-unreachable"
    default_next_step = "mount it again, or run the command as who may look into it"


class NoDirectoryError(CxlfsError):
    """What should hold checkpoints is not a directory."""

    errno = _errno.ENOTDIR
    exit_code = 34
    id = "no-directory"
    default_next_step = "name the directory that checkpoints are in"


class NotMountedError(CxlfsError):
    """The directory holds no checkpoint and is on no cxlfs mount, where one was expected."""

    errno = _errno.ENODEV
    exit_code = 36
    id = "not-on-a-mount"
    default_next_step = "mount the store; --plain says that the directory is meant to be on none"


class NoGoodCheckpointError(CxlfsError):
    """The directory holds checkpoints, and none of them is complete and verified."""

    exit_code = 23
    id = "no-good-checkpoint"
    default_next_step = "look at them (cxlfs list), restore an older one, or start anew on purpose"


class UnknownCheckpointError(NoGoodCheckpointError):
    """No checkpoint is known to be good, and there is one that could not be judged."""

    exit_code = 35
    id = "unknown-checkpoint"
    default_next_step = "look at what is said of it, and load it with its own library"


class SuspectCheckpointError(CxlfsError):
    """The newest good checkpoint was opened and followed by a crash too often: it may be why."""

    exit_code = 24
    id = "suspect-checkpoint"
    default_next_step = "resume from the one before it: cxlfs good DIR --suspect skip"


class NotSendableError(CxlfsError):
    """A checkpoint cannot be taken elsewhere: it is incomplete, changing, or has links in it."""

    exit_code = 25
    id = "not-sendable"
    default_next_step = "look at it (cxlfs list, cxlfs good), and send one that is complete"


class StreamError(CxlfsError):
    """A stream of checkpoints ends early, or is not what it says of itself."""

    exit_code = 26
    id = "stream"
    default_next_step = "send it again; with --base and cxlfs receive DIR --have it goes on"


class NotInspectableError(CxlfsError):
    """There is nothing at a path that can be looked into: no checkpoint, or several, or a format
    that no reader knows.
    """

    errno = _errno.ENOENT
    exit_code = 37
    id = "not-inspectable"
    default_next_step = "name one checkpoint: a file, a directory, or the prefix of TensorFlow's"


class ManifestError(CxlfsError):
    """A manifest of a checkpoint cannot be read, or is not what it says of itself."""

    errno = _errno.EINVAL
    exit_code = 38
    id = "manifest"
    default_next_step = "make it again: cxlfs manifest PATH --output FILE"


class CheckpointExistsError(CxlfsError):
    """A checkpoint of that name is there already, and is left as it is."""

    exit_code = 27
    id = "checkpoint-exists"
    default_next_step = "give it another name with --name, or replace that one with --replace"


class TierUnavailableError(CxlfsError):
    """The tier below cannot be reached, refuses, or does not answer in time."""

    exit_code = 28
    id = "tier-unavailable"
    default_next_step = "try again: what arrived there is not sent again"


class TierFullError(CxlfsError):
    """The tier below has no room."""

    exit_code = 29
    id = "tier-full"
    default_next_step = "make room there, or keep fewer (cxlfs drain --keep N), and try again"


class TierUntrustedError(CxlfsError):
    """The tier below does not do what it says: a second create, a lost or another object."""

    exit_code = 30
    id = "tier-untrusted"
    default_next_step = "use another bucket; see docs/tier.md for what is asked of one"


class NotInTierError(CxlfsError):
    """The tier below has no such checkpoint."""

    exit_code = 31
    id = "not-in-tier"
    default_next_step = "name one that is there"


class JobMessageError(CxlfsError):
    """What a rank of a job said is not a message of this program."""

    id = "job-message"
    default_next_step = "run the same version of cxlfs on all nodes"


class JobFilesError(CxlfsError):
    """A file of a job's checkpoint cannot be read, or is not what its manifest says."""

    id = "job-files"
    default_next_step = "look at the file that the message names (cxlfs verify MOUNTPOINT)"


class JobEngineError(UsageError):
    """The processes of a job cannot reach each other the way that was asked for."""

    id = "job-engine"
    default_next_step = "call torch.distributed.init_process_group first, or give an engine"


class JobLinkError(CxlfsError):
    """Bytes on the way from one rank of a job to another did not arrive."""

    id = "job-link"
    default_next_step = "look at the log of the rank that the message names, and at the network"


class JobConfigurationError(UsageError):
    """What was asked of a job's checkpointer is not there, or comes in another order."""

    id = "job-configuration"
    default_next_step = "see docs/job.md"


class UndecidedError(CxlfsError):
    """Not all ranks of a job were heard before the deadline: nobody may say how the call ended."""

    id = "job-undecided"
    default_next_step = "start the job again: it resumes from what all ranks have saved"


class ForkError(UndecidedError):
    """Stores of a job have several histories, of which none leads to another."""

    id = "job-fork"
    default_next_step = "say which counts: cxlfs job decide ROOT --resume LINE"


class NotWholeError(UndecidedError):
    """The checkpoint that a job resumes from cannot be loaded whole from the stores heard."""

    id = "job-not-whole"
    default_next_step = "bring the absent stores back, or say which checkpoint counts"


class JobBusyError(CxlfsError):
    """Another start of a job, or another job, has the directory of checkpoints."""

    id = "job-busy"
    default_next_step = "end the other one first, or name another directory"


class AbortedError(CxlfsError):
    """An asynchronous checkpoint of a job was aborted, and nobody had asked how it ended."""

    id = "job-aborted"
    default_next_step = "look at the reasons; what was committed before is there"


class NotRestoredError(CxlfsError):
    """There are checkpoints of a job, and none that all its ranks can load."""

    id = "job-not-restored"
    default_next_step = "look at the reasons; to begin anew on purpose, name another directory"


class FrameworkMissingError(UsageError):
    """An adapter was asked for whose framework is not installed."""

    id = "framework-missing"
    default_next_step = "install the extra that the message names"


class JobTierError(CxlfsError):
    """A committed checkpoint of a job did not get into the tier below; it lies in the stores."""

    outcome: object = None  # what the call came to that raised it: it did what it was asked
    id = "job-tier"
    default_next_step = "look at the tier (cxlfs drain tells more); the next commit drains again"


class LimitError(CxlfsError):
    """A documented limit would be passed (see ``docs/format.md``, limits)."""

    errno = _errno.EINVAL
    id = "limit"
    default_next_step = "see the limits in docs/format.md"


class NameTooLongError(LimitError):
    errno = _errno.ENAMETOOLONG
    id = "name-too-long"


class FileTooLargeError(LimitError):
    errno = _errno.EFBIG
    id = "file-too-large"


class TooManyLinksError(LimitError):
    errno = _errno.EMLINK
    id = "too-many-links"


class TooManyPinsError(LimitError):
    errno = _errno.EDQUOT
    id = "too-many-pins"
    default_next_step = "take one away with cxlfs unpin"


class StillPinnedError(CxlfsError):
    """History keeps nothing of a path any more, but pins hold some of it."""

    errno = _errno.EBUSY
    id = "still-pinned"
    default_next_step = "take the pins away with cxlfs unpin"


class NamespaceError(CxlfsError):
    """A POSIX verb that cannot be done; behind the mount it is only an errno."""

    errno = _errno.EINVAL
    id = "namespace"
    default_next_step = "check the path"


class NotFoundError(NamespaceError):
    errno = _errno.ENOENT
    id = "not-found"


class ExistsError(NamespaceError):
    errno = _errno.EEXIST
    id = "exists"


class NotDirectoryError(NamespaceError):
    errno = _errno.ENOTDIR
    id = "not-a-directory"


class IsDirectoryError(NamespaceError):
    errno = _errno.EISDIR
    id = "is-a-directory"


class NotEmptyError(NamespaceError):
    errno = _errno.ENOTEMPTY
    id = "not-empty"


class InvalidArgumentError(NamespaceError):
    errno = _errno.EINVAL
    id = "invalid-argument"


class NotPermittedError(NamespaceError):
    errno = _errno.EPERM
    id = "not-permitted"


class NoAttributeError(NamespaceError):
    errno = _errno.ENODATA
    id = "no-such-attribute"


class AttributeLongerError(NamespaceError):
    """Than what the caller has room for."""

    errno = _errno.ERANGE
    id = "attribute-longer"


class AttributeTooLargeError(NamespaceError):
    errno = _errno.ENOSPC
    id = "attribute-too-large"


class BeyondDataError(NamespaceError):
    errno = _errno.ENXIO
    id = "beyond-data"


class BadHandleError(NamespaceError):
    errno = _errno.EBADF
    id = "bad-handle"


class StaleError(NamespaceError):
    """What an inode number meant is elsewhere: look its name up again."""

    errno = _errno.ESTALE
    id = "stale"


class UnsupportedOperationError(NamespaceError):
    errno = _errno.EOPNOTSUPP
    id = "unsupported-operation"


class InvariantError(AssertionError):
    """Our own state contradicts itself: writing stops, the process goes on serving reads."""


def invariant(condition: object, message: str) -> None:
    """Raise InvariantError unless ``condition``; unlike assert it survives ``python -O``."""
    if not condition:
        raise InvariantError(message)
