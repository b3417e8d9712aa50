"""Checkpoints as they lie in a bucket, and which of them there are.

    NAME/model.pt ...      one object for each file (of a checkpoint of one file: NAME)
    NAME.cxlfs-claim       whose content NAME is going to be; gone when it is there
    NAME.cxlfs-sha256      for sha256sum -c, and rclone checksum sha256
    NAME.cxlfs-manifest    last, by a conditional put: the checkpoint is there
    NAME.cxlfs-going       the manifest of one that is being removed

Never: uploads; removes what no manifest names.
"""

from __future__ import annotations

import datetime as dt
from typing import NamedTuple

from cxlfs.checkpoint.catalogue import step_in
from cxlfs.errors import StreamError, TierUntrustedError
from cxlfs.tier.manifest import BYTES_MAX, Manifest, decode, why_not_a_name
from cxlfs.tier.objects import Bucket, Found

CLAIM, SUMS, MANIFEST, GOING = ".cxlfs-claim", ".cxlfs-sha256", ".cxlfs-manifest", ".cxlfs-going"
SUFFIXES = (CLAIM, SUMS, MANIFEST, GOING)


class Stored(NamedTuple):
    """A checkpoint that has a manifest."""

    name: str
    modified: dt.datetime


def key_of(manifest: Manifest, name: str) -> str:
    """Of the object that a file is."""
    return f"{manifest.name}/{name}" if manifest.is_directory else manifest.name


def stored(bucket: Bucket) -> list[Stored]:
    """Newest first: by the steps that their names say, where all say one, else by the time of their
    manifests.
    """
    found = [
        Stored(key.removesuffix(MANIFEST), each.modified)
        for key, each in bucket.objects_here().items()
        if key.endswith(MANIFEST) and why_not_a_name(key.removesuffix(MANIFEST)) is None
    ]
    steps = {each.name: step_in(each.name) for each in found}

    def newness(each: Stored) -> tuple[int, dt.datetime]:
        step = steps[each.name]
        return (-1 if step is None or None in steps.values() else step), each.modified

    return sorted(found, key=newness, reverse=True)


def read_manifest(bucket: Bucket, name: str, suffix: str = MANIFEST) -> Manifest | None:
    """None: there is none. Raises TierUntrustedError: it is none that can be."""
    data = bucket.read(name + suffix, BYTES_MAX)
    if data is None:
        return None
    try:
        manifest = decode(data)
    except StreamError as error:
        raise TierUntrustedError(f"{bucket.url}/{name}: {error.message}") from None
    if manifest.name != name or any(file.base is not None for file in manifest.files):
        raise TierUntrustedError(f"{bucket.url}/{name}: its manifest is not that of {name}")
    return manifest


def objects_of(bucket: Bucket, manifest: Manifest) -> dict[str, Found]:
    """Of a checkpoint's files, by key: what is listed of them."""
    if manifest.is_directory:
        return bucket.objects_below(manifest.name)
    found = bucket.look(manifest.name)
    return {} if found is None else {manifest.name: found}


def missing_from(manifest: Manifest, objects: dict[str, Found]) -> str | None:
    """The first file that is not there with its size; None: all are."""
    for file in manifest.files:
        found = objects.get(key_of(manifest, file.name))
        if found is None or found.size_bytes != file.size_bytes:
            return key_of(manifest, file.name)
    return None


def keep_newest(bucket: Bucket, name: str, keep: int) -> list[str]:
    """Removes all that are older than the newest ``keep`` that are whole, and says which; never
    ``name``, of which the caller knows that it is. Finishes what a removal that broke off has left.

    Raises TierUnavailableError, TierUntrustedError.
    """
    for key in bucket.objects_here():
        if key.endswith(GOING):
            finish_removal(bucket, key.removesuffix(GOING))
    kept, gone = 0, []
    for each in stored(bucket):
        if each.name == name:
            kept += 1
            continue
        if kept >= keep:
            begin_removal(bucket, each.name)
            gone.append(each.name)
            continue
        manifest = read_manifest(bucket, each.name)
        if manifest is not None and not missing_from(manifest, objects_of(bucket, manifest)):
            kept += 1
    return gone


def begin_removal(bucket: Bucket, name: str) -> None:
    """From here on it is no checkpoint; what was its is removed, now or by the next who looks."""
    data = bucket.read(name + MANIFEST, BYTES_MAX)
    if data is None:
        finish_removal(bucket, name)
        return
    bucket.put(name + GOING, [data], len(data), parallel=1)
    _remove(bucket, name)


def finish_removal(bucket: Bucket, name: str) -> None:
    """Of one that broke off, if any. One that has a manifest is a checkpoint, and stays: the
    removal had not come that far, or it was drained again since.
    """
    if bucket.look(name + GOING) is None:
        return
    if bucket.look(name + MANIFEST) is not None:
        bucket.remove(name + GOING)
    else:
        _remove(bucket, name)


def _remove(bucket: Bucket, name: str) -> None:
    manifest = read_manifest(bucket, name, GOING)
    bucket.remove(name + MANIFEST)
    if manifest is not None:
        for file in manifest.files:
            bucket.remove(key_of(manifest, file.name))
    # Whoever has found it whole before may have named it again: nothing of it is there now.
    for suffix in (MANIFEST, SUMS, CLAIM, GOING):
        bucket.remove(name + suffix)
