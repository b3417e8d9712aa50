"""``cxlfs mkfs``: make a store on a region, or in a new ordinary file.

Never here: the format (``store``, ``superblock``), what is a known signature (``signatures``).

Invariants
- Nothing on the source is changed before every reason to refuse has been looked at.
- A file that mkfs created is gone again when mkfs fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style, columns, quote
from cxlfs.cli.target import naming_the_mount
from cxlfs.errors import (
    BusyError,
    CxlfsError,
    MediaError,
    MediaUnavailableError,
    NoSpaceError,
    NotPersistentError,
    OccupiedError,
    UsageError,
)
from cxlfs.format import superblock
from cxlfs.media import Media, locks, open_media, signatures
from cxlfs.media.room import VOLATILE_TEXT
from cxlfs.media.signatures import Found
from cxlfs.store import Store, StoreOptions
from cxlfs.units import MIB, format_size, parse_size

HELP = """Make an empty store on SOURCE: a DAX device, a file on a DAX file system, or an
ordinary file.

When SOURCE does not exist, --size makes it an ordinary file of that size, fully allocated. What
is on SOURCE already is not overwritten unless --force says so: mkfs looks for stores, file
systems, partition tables, volume managers, encrypted volumes, swap, archives and model files, and
in a file for any content at all.

\b
Examples:
  cxlfs mkfs /dev/dax0.0 --label ckpt0
  cxlfs mkfs /mnt/pmem/ckpt.cxlfs --size 64G
  cxlfs mkfs old.cxlfs --force
"""

_NAMED_MAX = 3
_HEAD_BYTES = MIB


@dataclasses.dataclass(frozen=True, slots=True)
class Made(Report):
    """What mkfs made."""

    schema: ClassVar[str] = "cxlfs.mkfs/1"

    source: bytes
    uuid: str
    label: str
    format_version: int
    size_bytes: int
    segment_size_bytes: int
    segments: int
    usable_bytes: int
    media: str
    granularity: str
    write_back: str
    persistence_domain: str | None
    volatile: bool
    """A file in memory (tmpfs, hugetlbfs): gone with the power."""
    created_file: bool
    overwrote: tuple[str, ...]
    """What was there before, by name; only with --force."""

    def lines(self, style: Style, /) -> Iterator[str]:
        yield f"{style.good('made')} a cxlfs store on {quote(self.source)}"
        rows = [
            ("uuid", self.uuid),
            ("label", quote(self.label) or "-"),
            ("size", f"{format_size(self.size_bytes)} ({self.size_bytes} bytes)"),
            ("segments", f"{self.segments} of {format_size(self.segment_size_bytes)}"),
            ("usable", format_size(self.usable_bytes)),
            ("media", describe_media(self.media, self.granularity, self.write_back)),
        ]
        if self.volatile:
            rows.append(("caution", style.warning(VOLATILE_TEXT)))
        if self.overwrote:
            rows.append(("overwrote", ", ".join(self.overwrote)))
        yield from columns(rows)
        yield f"next: cxlfs mount {quote(self.source)} MOUNTPOINT"


def describe_media(kind: str, granularity: str, write_back: str) -> str:
    """``devdax, line granularity, write-back clwb``"""
    return f"{kind}, {granularity} granularity, write-back {write_back}"


@click.command(
    "mkfs",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(
        BusyError.exit_code,
        MediaError.exit_code,
        NoSpaceError.exit_code,
        NotPersistentError.exit_code,
        MediaUnavailableError.exit_code,
        OccupiedError.exit_code,
    ),
)
@click.argument("source", type=ANY_PATH)
@click.option("--size", metavar="SIZE", help="Size of the file to make: 512M, 4G, 1.5T.")
@click.option("--label", default="", metavar="NAME", help="A name for the store, up to 64 bytes.")
@click.option("--force", is_flag=True, help="Overwrite whatever SOURCE holds.")
@common_options
def command(source: str, size: str | None, label: str, *, force: bool, as_json: bool) -> None:
    """See HELP."""
    Output(as_json=as_json).report(make(Path(source), size=size, label=label, force=force))


def make(source: Path, *, size: str | None, label: str, force: bool) -> Made:
    """Make the store; raises UsageError, OccupiedError and what the media raise."""
    size_bytes = None if size is None else parse_size(size)
    _check_label(label)
    creates = _must_create(source, size_bytes)
    if size_bytes is not None:
        superblock.plan_geometry(size_bytes, label=label)
    with _media(source, size_bytes, creates=creates) as media:
        superblock.plan_geometry(media.size_bytes, label=label)
        found = _contents(media)
        if found and not force:
            _refuse_to_overwrite(source, found)
        locks.refuse_locked(media.path, media.locked_ranges())  # nothing has been changed yet
        media.preallocate()
        _wipe(media, found)
        Store.format(media, label=label)
        overwrote = tuple(dict.fromkeys(item.name for item in found))
        return _describe(source, media, created_file=creates, overwrote=overwrote)


def _check_label(label: str) -> None:
    if not label.isprintable():
        raise UsageError("the label has control characters", next_step="use letters and digits")


def _must_create(source: Path, size_bytes: int | None) -> bool:
    """Whether SOURCE is to be made; raises when what is there does not fit what was asked for."""
    try:
        status = source.stat()
    except FileNotFoundError as error:
        if Path("/dev") in source.absolute().parents and not _is_on_another_mount(source):
            raise MediaUnavailableError(
                f"there is no device {source}",
                next_step="daxctl list and ndctl list show the devices that exist",
            ) from error
        if size_bytes is None:
            raise MediaUnavailableError(
                f"{source} does not exist",
                next_step=f"give its size to make a file: cxlfs mkfs {source} --size 4G",
            ) from error
        return True
    except OSError as error:
        raise MediaUnavailableError(f"{source}: {error.strerror}") from error
    if stat.S_ISDIR(status.st_mode):
        raise MediaUnavailableError(
            f"{source} is a directory",
            next_step=f"name a file in it: cxlfs mkfs {source / 'store.cxlfs'} --size 4G",
        )
    is_file = stat.S_ISREG(status.st_mode)
    if size_bytes is not None and is_file and status.st_size not in (0, size_bytes):
        raise UsageError(
            f"{source} exists already, with {status.st_size} bytes",
            next_step="leave --size away to use the file as it is, or remove it first",
        )
    return False


def _is_on_another_mount(source: Path) -> bool:
    """In /dev/shm or /dev/hugepages, say, and not where device nodes lie."""
    with contextlib.suppress(OSError):
        if source.absolute().parent.stat().st_dev != Path("/dev").stat().st_dev:
            return True
    return Path("/dev/shm") in source.absolute().parents  # noqa: S108  a path is compared only


@contextlib.contextmanager
def _media(source: Path, size_bytes: int | None, *, creates: bool) -> Iterator[Media]:
    """SOURCE, opened for this process alone; a file made here goes away with a failure."""
    with naming_the_mount(str(source)):
        media = open_media(source, create_size_bytes=size_bytes)
    try:
        yield media
    except BaseException:
        if creates:
            source.unlink(missing_ok=True)
        raise
    finally:
        media.close()


def _contents(media: Media) -> tuple[Found, ...]:
    """What lies there. A device may hold anything; a file with content is somebody's file."""
    found = signatures.find(media.read, media.size_bytes)
    if found or media.kind not in ("file", "fsdax"):
        return found
    head = media.read(0, min(media.size_bytes, _HEAD_BYTES))
    first = len(head) - len(head.lstrip(b"\0"))
    return () if first == len(head) else (Found("data of an unknown kind", first, 0),)


def _refuse_to_overwrite(source: Path, found: Sequence[Found]) -> None:
    first: dict[str, int] = {}
    for item in found:
        first.setdefault(item.name, item.offset)
    named = [f"{name} (at byte {offset})" for name, offset in first.items()]
    raise OccupiedError(
        f"{source} holds something: {', '.join(named[:_NAMED_MAX])}",
        next_step="use another source; --force overwrites it, and everything on it is lost",
    )


def _wipe(media: Media, found: Sequence[Found]) -> None:
    """Take the magic of what is overwritten away: nothing may take the region for it later."""
    for item in found:
        if item.length:
            media.store(item.offset, bytes(item.length))
            media.write_back(item.offset, item.length)
    media.fence()


def _describe(
    source: Path, media: Media, *, created_file: bool, overwrote: tuple[str, ...]
) -> Made:
    store = Store.open(media, StoreOptions(read_only=True))
    try:
        block = store.superblock
        return Made(
            source=os.fsencode(source),
            uuid=str(uuid.UUID(bytes=block.uuid)),
            label=block.label,
            format_version=block.format_version,
            size_bytes=block.size_bytes,
            segment_size_bytes=block.segment_size_bytes,
            segments=block.segment_count,
            usable_bytes=store.statfs().available_bytes,
            media=media.kind,
            granularity=media.granularity.name.lower(),
            write_back=media.write_back_name,
            persistence_domain=media.persistence_domain,
            volatile=media.volatile,
            created_file=created_file,
            overwrote=overwrote,
        )
    except CxlfsError as error:
        raise MediaError(f"the new store cannot be read back: {error.message}") from error
    finally:
        store.close()
