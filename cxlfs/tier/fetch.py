"""Bring a checkpoint back from a bucket: verified, durable, and named in one step.

Never: believes that an object is what it was when it was put.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

from cxlfs.errors import NotInTierError, StreamError, TierUnavailableError, TierUntrustedError
from cxlfs.tier.drain import PARALLEL, each_of
from cxlfs.tier.manifest import File, Manifest
from cxlfs.tier.objects import Bucket
from cxlfs.tier.staging import Staging, staging
from cxlfs.tier.stock import key_of, read_manifest, stored
from cxlfs.tier.survey import Progress, no_progress

_NAMES_MAX = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Fetched:
    """``kept_files``: those that a fetch which broke off had brought."""

    path: Path
    manifest: Manifest
    kept_files: int
    fetched_bytes: int


def fetch(
    bucket: Bucket,
    name: str,
    directory: Path,
    *,
    replace: bool = False,
    parallel: int = PARALLEL,
    progress: Progress = no_progress,
) -> Fetched:
    """``directory``/NAME: compared byte by byte with the manifest, and durable, when this returns.
    Whatever it raises, no name was given; files that had come whole are kept for the next try.

    Raises NotInTierError, TierUnavailableError, TierUntrustedError (an object is lost, or another
    one), CheckpointExistsError, NoSpaceError, BusyError, OSError.
    """
    manifest = read_manifest(bucket, name)
    if manifest is None:
        raise NotInTierError(f"{bucket.url} has no {name}{_others(bucket)}")
    with staging(directory, name) as place:
        place.begin(manifest, replace=replace)
        work = _Work(bucket, manifest, place, progress)
        wanted = [file for file in manifest.files if not place.has(file)]
        place.require_room(sum(file.size_bytes for file in wanted))
        work.run(wanted, parallel)
        path = place.publish(manifest, replace=replace)
    kept = len(manifest.files) - len(wanted)
    return Fetched(path, manifest, kept, sum(file.size_bytes for file in wanted))


def newest(bucket: Bucket) -> str:
    """The name of the newest checkpoint there. Raises NotInTierError."""
    found = stored(bucket)
    if not found:
        raise NotInTierError(f"{bucket.url} has no checkpoint")
    return found[0].name


def _others(bucket: Bucket) -> str:
    names = [each.name for each in stored(bucket)]
    if not names:
        return ", and no other checkpoint"
    more = f" and {len(names) - _NAMES_MAX} more" if len(names) > _NAMES_MAX else ""
    return f"; it has {', '.join(names[:_NAMES_MAX])}{more}"


class _Work:
    def __init__(
        self, bucket: Bucket, manifest: Manifest, place: Staging, progress: Progress
    ) -> None:
        self._bucket = bucket
        self._manifest = manifest
        self._place = place
        self._progress = progress
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._done = self._total = 0

    def run(self, files: list[File], parallel: int) -> None:
        self._total = sum(file.size_bytes for file in files)
        each_of(files, self._one, parallel, self._stop)

    def _one(self, file: File) -> None:
        try:
            self._place.take(file, self._pieces(file))
        except StreamError as error:
            raise TierUntrustedError(f"{self._bucket.url}: {error.message}") from None

    def _pieces(self, file: File) -> Iterator[bytes]:
        key = key_of(self._manifest, file.name)
        for piece in self._bucket.pieces(key, file.size_bytes):
            if self._stop.is_set():
                raise TierUnavailableError("another file failed")
            yield piece
            with self._lock:
                self._done += len(piece)
                self._progress("fetching", self._done, self._total)
