"""The shards of one rank on their way into another rank's store, over a link.

    sender      manifest ─►            pieces of all files, one behind the other ─►
    receiver    ◄─ there is room, or why not            ◄─ durable and verified, or why not

Never: which shards go where (``protocol.placement``), how a piece travels (``engines``).

Invariants
- Room for every file is reserved before the first piece is sent: a full store refuses at once.
- Nothing counts in the receiving store before each file's CRC32C was that of the manifest, once as
  it came in and once as it was read back, and all of it is durable.
- What a peer says is bounded, and a manifest of another rank, attempt or digest than the one that
  is expected is refused, before anything is made for it.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self, TypeVar

from cxlfs.durable import opened_file, promised_crc32c, size_and_crc32c
from cxlfs.errors import JobFilesError, JobLinkError, JobMessageError
from cxlfs.job import files
from cxlfs.job.engines import Link, Pending
from cxlfs.job.files import Manifest, Shard
from cxlfs.job.protocol import Attempt
from cxlfs.native import crc32c
from cxlfs.plain import PlainError, fields, number, parse, text

PIECE_BYTES = 4 << 20
PIECES_IN_FLIGHT = 4
"""So much memory each link takes, at each end."""
STRETCH_BYTES = 32 << 20
"""So much of a file is read back at once."""
READERS = 2
"""Threads that do, while more comes."""
_FRAME_BYTES = 4096
_REASON_MAX = 500

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What is to come: ``manifest`` is its digest, empty where it is not known yet."""

    attempt: Attempt
    rank: int
    world: int
    manifest: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Some bytes of one file, at ``begin`` of their piece."""

    shard: int
    offset: int
    begin: int
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Stretch:
    """Of one file, from ``begin`` on; ``sum``: the checksum of what is before it."""

    shard: int
    begin: int
    sum: int


def _pieces(shards: tuple[Shard, ...]) -> Iterator[list[_Part]]:
    """All bytes of all files in their order, cut without regard to where one ends."""
    parts: list[_Part] = []
    filled = 0
    for index, shard in enumerate(shards):
        offset = 0
        while offset < shard.size_bytes:
            size = min(shard.size_bytes - offset, PIECE_BYTES - filled)
            parts.append(_Part(index, offset, filled, size))
            offset += size
            filled += size
            if filled == PIECE_BYTES:
                yield parts
                parts, filled = [], 0
    if parts:
        yield parts


def _size(parts: list[_Part]) -> int:
    return parts[-1].begin + parts[-1].size_bytes


# --- what is said about them --------------------------------------------------------------------


def _tell(link: Link, size_bytes: int = 0, reason: str = "") -> None:
    """``size_bytes``: of the manifest that follows; ``reason``: why not, or empty."""
    plain = {"size_bytes": size_bytes, "reason": reason[:_REASON_MAX]}
    link.send(bytearray(json.dumps(plain).encode().ljust(_FRAME_BYTES))).wait()


def _hear(link: Link) -> tuple[int, str]:
    """Raises JobLinkError, JobMessageError."""
    frame = bytearray(_FRAME_BYTES)
    link.receive(frame).wait()
    try:
        found = fields(parse(bytes(frame), _FRAME_BYTES), ("size_bytes", "reason"))
        return number(found["size_bytes"]), text(found["reason"])
    except PlainError as error:
        raise JobMessageError(f"not an answer: {error}") from None


def _hear_consent(link: Link) -> None:
    _, reason = _hear(link)
    if reason:
        raise JobLinkError(f"refused: {reason}")


# --- sending ------------------------------------------------------------------------------------


def refuse(link: Link, error: Exception) -> None:
    """There is nothing to send, for that reason."""
    with contextlib.suppress(JobLinkError):
        _tell(link, reason=f"{type(error).__name__}: {error}")


def send(link: Link, directory: Path, data: bytes) -> None:
    """What lies there, of the manifest ``data``. On return the other rank has it, durable.

    Raises JobLinkError (also: the other refused), JobFilesError, JobMessageError, OSError.
    """
    manifest = files.decode_manifest(data, directory)
    _tell(link, len(data))
    link.send(bytearray(data)).wait()
    _hear_consent(link)
    with _Reader(directory, manifest.shards) as reader:
        _stream(manifest.shards, reader.fill, link.send, lambda _parts, _piece: None)
    _hear_consent(link)


def send_sealed(link: Link, directory: Path, digest: str) -> None:
    """As ``send``, what counts already and has a manifest of that digest; else it is refused."""
    try:
        data = files.read_manifest(directory, digest)
    except (JobFilesError, OSError) as error:
        refuse(link, error)
        raise
    send(link, directory, data)


def _stream(
    shards: tuple[Shard, ...],
    before: Callable[[list[_Part], memoryview], None],
    begin: Callable[[memoryview], Pending],
    after: Callable[[list[_Part], memoryview], None],
) -> None:
    """Each piece: ``before``, its way, ``after``; so many are on their way at once."""
    free: list[memoryview] = []
    waiting: collections.deque[tuple[list[_Part], memoryview, Pending]] = collections.deque()

    def end_one() -> None:
        parts, buffer, pending = waiting.popleft()
        pending.wait()
        after(parts, buffer)
        free.append(buffer)

    for parts in _pieces(shards):
        if len(waiting) == PIECES_IN_FLIGHT:
            end_one()
        buffer = free.pop() if free else memoryview(bytearray(_size(parts)))
        before(parts, buffer)
        waiting.append((parts, buffer, begin(buffer[: _size(parts)])))
    while waiting:
        end_one()


class _Files:
    """The files of a directory, one open at a time."""

    flags = os.O_RDONLY

    def __init__(self, directory: Path, shards: tuple[Shard, ...]) -> None:
        self._directory = directory
        self._shards = shards
        self._open: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def path(self, shard: int) -> Path:
        return self._directory / self._shards[shard].name

    def descriptor(self, shard: int) -> int:
        if self._open is None or self._open[0] != shard:
            self.close()
            path = self.path(shard)
            self._open = shard, os.open(path, self.flags | os.O_NOFOLLOW | os.O_NONBLOCK)
        return self._open[1]


class _Reader(_Files):
    def fill(self, parts: list[_Part], buffer: memoryview) -> None:
        for part in parts:
            descriptor = self.descriptor(part.shard)
            done = 0
            while done < part.size_bytes:
                view = buffer[part.begin + done : part.begin + part.size_bytes]
                found = os.preadv(descriptor, [view], part.offset + done)
                if not found:
                    raise JobFilesError(f"{self.path(part.shard)}: shorter than its manifest says")
                done += found


# --- receiving ----------------------------------------------------------------------------------


def receive(link: Link, root: Path, wanted: Wanted) -> None:
    """Into the store at ``root``, in the place of what was there of it. On return it is durable and
    was read back, and counts; else nothing of it is left.

    Raises JobLinkError, JobFilesError, JobMessageError, OSError.
    """
    staged = files.staging_path(root, wanted.attempt, wanted.rank)
    try:
        manifest = _answered(link, lambda: _reserve(_hear_manifest(link, wanted), root))
        with _Writer(staged, manifest.shards) as writer:
            _stream(manifest.shards, lambda _parts, _piece: None, link.receive, writer.take)
            _answered(link, lambda: _finish(writer, manifest, root))
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def _answered(link: Link, task: Callable[[], _Result]) -> _Result:
    """What it returns, and the other rank hears that it has; or why it has not."""
    try:
        found = task()
    except (JobFilesError, JobMessageError, OSError) as error:
        refuse(link, error)
        raise
    _tell(link)
    return found


def _hear_manifest(link: Link, wanted: Wanted) -> Manifest:
    size, reason = _hear(link)
    if reason:
        raise JobLinkError(f"refused: {reason}")
    if size > files.MANIFEST_BYTES_MAX:
        raise JobMessageError(f"a manifest of {size} bytes")
    data = bytearray(size)
    link.receive(data).wait()
    where = Path(files.rank_name(wanted.rank))
    manifest = files.decode_manifest(bytes(data), where)
    if (manifest.attempt, manifest.rank, manifest.world) != (
        wanted.attempt,
        wanted.rank,
        wanted.world,
    ):
        raise JobFilesError(f"{where}: what came is of rank {manifest.rank}, {manifest.attempt}")
    if wanted.manifest not in {"", files.digest_of_bytes(bytes(data))}:
        raise JobFilesError(f"{where}: another manifest than the one that was chosen")
    if manifest.encode() != data:
        raise JobFilesError(f"{where}: its manifest is not written as this version does")
    return manifest


def _reserve(manifest: Manifest, root: Path) -> Manifest:
    """All files are there, of their sizes."""
    staged = files.begin_anew(root, manifest.attempt, manifest.rank)
    for shard in manifest.shards:
        path = staged / shard.name
        if shard.name == files.MANIFEST_NAME:
            raise JobFilesError(f"{path}: the name is that of the manifest")
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            if shard.size_bytes:
                os.posix_fallocate(descriptor, 0, shard.size_bytes)
        finally:
            os.close(descriptor)
    return manifest


class _Writer(_Files):
    """What was written of a file is synced and read back while more comes."""

    flags = os.O_WRONLY

    def __init__(self, directory: Path, shards: tuple[Shard, ...]) -> None:
        super().__init__(directory, shards)
        self._sums = [0] * len(shards)
        self._stretch = _Stretch(-1, 0, 0)
        self._read_back: list[concurrent.futures.Future[None]] = []
        self._readers = concurrent.futures.ThreadPoolExecutor(READERS, "cxlfs-read-back")
        for index, shard in enumerate(shards):
            if not shard.size_bytes:
                self._end_stretch(_Stretch(index, 0, 0), 0)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._readers.shutdown(cancel_futures=True)

    def take(self, parts: list[_Part], buffer: memoryview) -> None:
        for part in parts:
            index, view = part.shard, buffer[part.begin : part.begin + part.size_bytes]
            if not part.offset:
                self._stretch = _Stretch(index, 0, 0)
            self._sums[index] = crc32c(view, self._sums[index])
            descriptor, done = self.descriptor(index), 0
            while done < part.size_bytes:
                done += os.pwrite(descriptor, view[done:], part.offset + done)
            end = part.offset + done
            is_whole = end == self._shards[index].size_bytes
            if is_whole or end - self._stretch.begin >= STRETCH_BYTES:
                self._end_stretch(self._stretch, end)
                self._stretch = _Stretch(index, end, self._sums[index])

    def _end_stretch(self, stretch: _Stretch, end: int) -> None:
        index, wanted = stretch.shard, self._sums[stretch.shard]
        shard = self._shards[index]
        if end == shard.size_bytes:
            self.close()

        def compare() -> None:
            with opened_file(self.path(index), JobFilesError) as (descriptor, size_bytes):
                os.fsync(descriptor)
                found = size_and_crc32c(descriptor, stretch.begin, end, stretch.sum)
            is_right = found == (end - stretch.begin, wanted) and size_bytes == shard.size_bytes
            if is_right and end == shard.size_bytes:
                is_right = promised_crc32c(self.path(index)) in {None, shard.crc32c}
            if not is_right:
                raise JobFilesError(
                    f"{self.path(index)}: read back, it is not what its manifest says"
                )

        self._read_back.append(self._readers.submit(compare))

    def judge(self) -> None:
        """Raises JobFilesError: what came in, or what is there now, is not what the manifest says;
        OSError.
        """
        for index, (shard, found) in enumerate(zip(self._shards, self._sums, strict=True)):
            if found != shard.crc32c:
                path, wanted = self.path(index), shard.crc32c
                raise JobFilesError(f"{path}: CRC32C {found:08x} on arrival, not {wanted:08x}")
        for compared in self._read_back:
            compared.result()


def _finish(writer: _Writer, manifest: Manifest, root: Path) -> None:
    writer.judge()
    files.seal(root, manifest)
