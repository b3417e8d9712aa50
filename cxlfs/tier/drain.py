"""Put a checkpoint into a bucket: its files, each verified there, and last of all its manifest.

Never: calls a checkpoint drained because nothing failed: what is there is looked at. Never replaces
or removes the objects of a checkpoint that has a manifest.

Invariants
- Two drains of different contents under one name never mix: the first conditional put, of a claim,
  decides whose content the name is going to be, before any object is put.
- The manifest is put when every object that it names was verified, and only if there is none.
- Whatever ends it, calling it again goes on: objects that are what they have to be are not sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from cxlfs.errors import (
    CheckpointExistsError,
    CxlfsError,
    NotSendableError,
    TierUnavailableError,
    TierUntrustedError,
)
from cxlfs.native import crc32c
from cxlfs.tier.manifest import File, Manifest
from cxlfs.tier.objects import Bucket, EntityTag, Found
from cxlfs.tier.probe import Trust, probe
from cxlfs.tier.rate import Rate
from cxlfs.tier.stock import (
    CLAIM,
    MANIFEST,
    SUFFIXES,
    SUMS,
    finish_removal,
    key_of,
    missing_from,
    objects_of,
    read_manifest,
)
from cxlfs.tier.survey import Progress, no_progress, pieces, survey

PARALLEL = 4
_TRIES = 3
_CLAIM_BYTES_MAX = 4096
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """``read_back``: compare what the bucket has byte by byte, also where its entity tags are
    MD5s. ``parallel``: files at a time, and parts of each. ``take_over``: a claim of another
    content is of nobody any more. ``judge``: see ``survey``. ``single_writer``: see ``probe``.
    """

    bytes_per_second: float | None = None
    parallel: int = PARALLEL
    read_back: bool = False
    single_writer: bool = False
    take_over: bool = False
    judge: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """``found_files``: those that were there already. ``verified``: ``md5`` or ``read``."""

    url: str
    manifest: Manifest
    sent_files: int
    sent_bytes: int
    found_files: int
    verified: str
    trust: Trust


def drain(
    path: Path,
    bucket: Bucket,
    options: Options | None = None,
    *,
    progress: Progress = no_progress,
) -> Outcome:
    """The checkpoint at ``path`` is in the bucket, under its name, when this returns.

    Raises NotSendableError (it is incomplete, or changes), CheckpointExistsError (the name is that
    of another content), TierUnavailableError, TierFullError, TierUntrustedError, OSError. What is
    at ``path`` is untouched.
    """
    options = options or Options()
    if bucket.is_at(path.name, path):
        raise NotSendableError(
            f"{path} lies where {bucket.url} would have it: that is no second copy",
            next_step="name another URL",
        )
    manifest = survey(path, judge=options.judge, progress=progress)
    if manifest.name.endswith(SUFFIXES):
        raise NotSendableError(f"{path}: the name ends like one of a tier's own")
    trust = probe(bucket, single_writer=options.single_writer)
    there = read_manifest(bucket, manifest.name)
    if there is None:
        with contextlib.suppress(TierUnavailableError):  # who may not delete verifies what is left
            finish_removal(bucket, manifest.name)
        _claim(bucket, manifest, trust, take_over=options.take_over)
        there = read_manifest(bucket, manifest.name)  # whoever had the claim may have ended
    if there is not None:
        _require_same(bucket, manifest, there)
    work = _Work(path, bucket, manifest, options, trust, progress)
    manifest = dataclasses.replace(manifest, files=tuple(work.run()))
    _commit(bucket, manifest, trust)
    with contextlib.suppress(TierUnavailableError):  # who may not delete leaves it: nothing asks
        bucket.remove(manifest.name + CLAIM)
    verified = "md5" if trust.tells_md5 and not options.read_back else "read"
    sent = work.sent_files
    return Outcome(
        *(bucket.url_of(manifest.name), manifest, sent, work.sent_bytes),
        *(len(manifest.files) - sent, verified, trust),
    )


def each_of(
    files: list[File], work: Callable[[File], _Result], parallel: int, stop: threading.Event
) -> list[_Result]:
    """In order. The first error ends all, as soon as they look at ``stop``, and is raised."""
    errors: list[BaseException] = []

    def guarded(file: File) -> _Result:
        try:
            return work(file)
        except BaseException as error:
            errors.append(error)
            stop.set()
            raise

    with ThreadPoolExecutor(parallel, thread_name_prefix="cxlfs-tier") as pool:
        waiting = [pool.submit(guarded, file) for file in files]
        try:
            return [each.result() for each in waiting]
        except BaseException as error:
            stop.set()
            pool.shutdown(cancel_futures=True)
            if errors and isinstance(error, CxlfsError | OSError):
                raise errors[0] from None
            raise


# --- who may ------------------------------------------------------------------------------------


def _claim(bucket: Bucket, manifest: Manifest, trust: Trust, *, take_over: bool) -> None:
    key = manifest.name + CLAIM
    ours = json.dumps({"format": 1, "content_id": manifest.content_id}).encode()
    if trust.creates and bucket.create(key, ours):
        return
    found = bucket.read(key, _CLAIM_BYTES_MAX)
    if found == ours:
        return
    if found is not None and not take_over:
        raise CheckpointExistsError(
            f"{bucket.url}/{manifest.name}: another content of that name is on its way there, or "
            "was given up half-way",
            next_step="if nobody drains it any more: --take-over",
        )
    bucket.put(key, [ours], len(ours), parallel=1)


def _require_same(bucket: Bucket, manifest: Manifest, there: Manifest) -> None:
    if there.content_id != manifest.content_id:
        raise CheckpointExistsError(
            f"{bucket.url}/{manifest.name} is there, with another content",
            next_step="rename the checkpoint, or drain it to another URL",
        )


def _commit(bucket: Bucket, manifest: Manifest, trust: Trust) -> None:
    lost = missing_from(manifest, objects_of(bucket, manifest))
    if lost is not None:
        raise TierUntrustedError(f"{bucket.url}/{lost}: put, verified, and not listed")
    sums = _sha256_list(manifest)
    bucket.put(manifest.name + SUMS, [sums], len(sums), parallel=1)
    data, key = manifest.encode(), manifest.name + MANIFEST
    if not trust.creates:
        if read_manifest(bucket, manifest.name) is None:
            bucket.put(key, [data], len(data), parallel=1)
    else:
        bucket.create(key, data)
    there = read_manifest(bucket, manifest.name)
    if there is None:
        raise TierUntrustedError(f"{bucket.url}/{key}: put, and not there")
    _require_same(bucket, manifest, there)


def _sha256_list(manifest: Manifest) -> bytes:
    """As sha256sum writes it, which marks a name with a backslash by one before the line."""
    lines = []
    for file in manifest.files:
        name = key_of(manifest, file.name)
        mark = "\\" if "\\" in name else ""
        escaped = name.replace("\\", "\\\\")
        lines.append(f"{mark}{file.sha256}  {escaped}\n")
    return "".join(lines).encode()


# --- files --------------------------------------------------------------------------------------


class _Sums:
    """Of the bytes of one file as they pass; their CRC32C was compared where they were read."""

    def __init__(self, file: File, *, with_tag: bool) -> None:
        self._sha256 = hashlib.sha256()
        self._tag = EntityTag(file.size_bytes) if with_tag else None

    def update(self, piece: bytes) -> None:
        self._sha256.update(piece)
        if self._tag is not None:
            self._tag.update(piece)

    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def tag(self) -> str | None:
        return None if self._tag is None else self._tag.text()


class _Work:
    """The files of one drain, several at a time."""

    def __init__(
        self,
        path: Path,
        bucket: Bucket,
        manifest: Manifest,
        options: Options,
        trust: Trust,
        progress: Progress,
    ) -> None:
        self._path = path
        self._bucket = bucket
        self._manifest = manifest
        self._options = options
        self._with_tag = trust.tells_md5 and not options.read_back
        self._rate = Rate(options.bytes_per_second)
        self._progress = progress
        self._total = manifest.size_bytes
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._done = 0
        self._objects: dict[str, Found] = {}
        self.sent_files = 0
        self.sent_bytes = 0

    def run(self) -> list[File]:
        """The files with their SHA-256: each was verified in the bucket."""
        self._objects = objects_of(self._bucket, self._manifest)
        return each_of(list(self._manifest.files), self._one, self._options.parallel, self._stop)

    def _one(self, file: File) -> File:
        key = key_of(self._manifest, file.name)
        found = self._objects.get(key)
        if found is not None and found.size_bytes == file.size_bytes:
            sums = _Sums(file, with_tag=self._with_tag)
            for piece in pieces(self._path, file):
                self._go_on()
                sums.update(piece)
            if self._is(key, file, sums, found):
                self._count(file.size_bytes)
                return dataclasses.replace(file, sha256=sums.sha256())
        return self._sent(key, file)

    def _sent(self, key: str, file: File) -> File:
        problem: CxlfsError | None = None
        for _ in range(_TRIES):
            sums = _Sums(file, with_tag=self._with_tag)
            try:
                self._bucket.put(
                    *(key, self._passing(file, sums), file.size_bytes),
                    parallel=self._options.parallel,
                )
                found = self._bucket.look(key)
                if found is None:
                    problem = TierUntrustedError(f"{self._bucket.url}/{key}: put, and not there")
                elif self._is(key, file, sums, found):
                    with self._lock:
                        self.sent_files += 1
                        self.sent_bytes += file.size_bytes
                    return dataclasses.replace(file, sha256=sums.sha256())
                else:
                    problem = TierUntrustedError(
                        f"{self._bucket.url}/{key}: what is there is not what was put"
                    )
            except TierUnavailableError as error:
                problem = error
            self._go_on()
        raise problem or TierUnavailableError(key)

    def _passing(self, file: File, sums: _Sums) -> Iterator[bytes]:
        for piece in pieces(self._path, file):
            self._go_on()
            self._rate.wait_for(len(piece))
            sums.update(piece)
            yield piece
            self._count(len(piece))

    def _is(self, key: str, file: File, sums: _Sums, found: Found) -> bool:
        """What lies there is the file: told by the server's MD5, or by reading all of it."""
        if found.size_bytes != file.size_bytes:
            return False
        if self._with_tag and found.e_tag == sums.tag():
            return True
        size = value = 0
        for piece in self._bucket.pieces(key, file.size_bytes):
            self._go_on()
            size += len(piece)
            value = crc32c(piece, value)
        return (size, value) == (file.size_bytes, file.crc32c)

    def _count(self, size_bytes: int) -> None:
        with self._lock:
            self._done += size_bytes
            self._progress("draining", min(self._done, self._total), self._total)

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise TierUnavailableError("another file failed")
