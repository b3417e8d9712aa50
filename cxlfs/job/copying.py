"""The shards of one rank on their way into another rank's store, over a link.

    sender      manifest ─►            pieces of all files, one behind the other ─►
    receiver    ◄─ there is room, or why not            ◄─ durable and verified, or why not

Never: which shards go where (``protocol.placement``), how a piece travels (``engines``), what is
done with files (``outgoing``, ``incoming``).

Invariants
- Room for every file is reserved before the first piece is sent: a full store refuses at once.
- Nothing counts in the receiving store before all of it is durable, was read back, and has the
  CRC32C of the manifest, as it came in and as it lies there.
- What a peer says is bounded, and a manifest of another rank, attempt or digest than the one that
  is expected is refused, before anything is made for it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cxlfs.errors import JobFilesError, JobLinkError, JobMessageError
from cxlfs.job import files, pieces
from cxlfs.job.engines import Link, Pending
from cxlfs.job.files import Manifest, Shard
from cxlfs.job.incoming import Incoming
from cxlfs.job.outgoing import Outgoing
from cxlfs.job.pieces import Part
from cxlfs.job.protocol import Attempt
from cxlfs.plain import PlainError, fields, number, parse, text

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


def _hear_consent(link: Link, blame: Callable[[], None] = lambda: None) -> None:
    """``blame``: what is done behind a refusal."""
    _, reason = _hear(link)
    if reason:
        blame()
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
    with Outgoing(directory, manifest.shards) as source:
        _hear_consent(link)
        _send_pieces(link, source, manifest.shards)
        _hear_consent(link, source.blame)


def _send_pieces(link: Link, source: Outgoing, shards: tuple[Shard, ...]) -> None:
    free: list[memoryview] = []
    waiting: collections.deque[tuple[memoryview | None, Pending]] = collections.deque()

    def end_one() -> None:
        buffer, pending = waiting.popleft()
        pending.wait()
        if buffer is not None:
            free.append(buffer)

    for parts in pieces.pieces(shards, pieces.PIECE_BYTES):
        if len(waiting) == (1 if link.is_stream else pieces.PIECES_IN_FLIGHT):
            end_one()
        buffer, views = None, source.in_place(parts)
        if views is None or (len(views) > 1 and not link.is_stream):
            buffer = free.pop() if free else memoryview(bytearray(pieces.PIECE_BYTES))
            views = [source.read(parts, buffer) if views is None else _in_one(views, buffer)]
        *before, last = views
        for view in before:
            link.send(view).wait()
        waiting.append((buffer, link.send(last)))
    while waiting:
        end_one()


def _in_one(views: list[memoryview], buffer: memoryview) -> memoryview:
    end = 0
    for view in views:
        buffer[end : end + len(view)] = view
        end += len(view)
    return buffer[:end]


def send_sealed(link: Link, directory: Path, digest: str) -> None:
    """As ``send``, what counts already and has a manifest of that digest; else it is refused."""
    try:
        data = files.read_manifest(directory, digest)
    except (JobFilesError, OSError) as error:
        refuse(link, error)
        raise
    send(link, directory, data)


# --- receiving ----------------------------------------------------------------------------------


def receive(link: Link, root: Path, wanted: Wanted) -> None:
    """Into the store at ``root``, in the place of what was there of it. On return it is durable and
    was read back, and counts; else nothing of it is left.

    Raises JobLinkError, JobFilesError, JobMessageError, OSError.
    """
    staged = files.staging_path(root, wanted.attempt, wanted.rank)
    try:
        manifest = _answered(link, lambda: _reserve(_hear_manifest(link, wanted), root))
        with Incoming(staged, manifest.shards) as target:
            _receive_pieces(link, target, manifest.shards)
            _answered(link, lambda: _finish(target, manifest, root))
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


def _receive_pieces(link: Link, target: Incoming, shards: tuple[Shard, ...]) -> None:
    if link.is_stream:
        _receive_bites(link, target, shards)
        return
    free: list[memoryview] = []
    waiting: collections.deque[tuple[list[Part], memoryview, Pending]] = collections.deque()

    def end_one() -> None:
        parts, buffer, pending = waiting.popleft()
        pending.wait()
        target.take(parts, buffer)
        free.append(buffer)

    for parts in pieces.pieces(shards, pieces.PIECE_BYTES):
        if len(waiting) == pieces.PIECES_IN_FLIGHT:
            end_one()
        size = pieces.size_of(parts)
        buffer = free.pop() if free else memoryview(bytearray(size))
        waiting.append((parts, buffer, link.receive(buffer[:size])))
    while waiting:
        end_one()


def _receive_bites(link: Link, target: Incoming, shards: tuple[Shard, ...]) -> None:
    """Each is stored by the thread that has received it, before the next one comes."""
    size_bytes = min(pieces.BITE_BYTES, pieces.PIECE_BYTES)
    buffer = memoryview(bytearray(size_bytes))
    for parts in pieces.pieces(shards, size_bytes):
        link.receive(buffer[: pieces.size_of(parts)]).wait()
        target.take(parts, buffer)


def _finish(target: Incoming, manifest: Manifest, root: Path) -> None:
    target.judge()
    files.seal(root, manifest)
