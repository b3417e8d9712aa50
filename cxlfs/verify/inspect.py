"""Structures of the media, decoded for support: one plain dictionary each, good or damaged.

Never here: printing, writing, judging a store as a whole (``verify``), recovery.

Invariants
- Everything is read as it lies there, without trust: what fails its check is still shown, with
  ``problem`` saying why. Memory is bounded by one journal segment.
- Every dictionary has ``structure``, ``media_offset`` and ``problem`` (None: good).
- Values are integers, text, names as bytes, lists and dictionaries of these. Checksums and nonces
  are text in hexadecimal; a segment number that names none is None; ``..._ns`` counts nanoseconds
  since the epoch.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from cxlfs.errors import CorruptionError, MediaError, NotFoundError
from cxlfs.format import (
    journal_chain,
    journal_reader,
    layout,
    operations,
    roots,
    segments,
    superblock,
)
from cxlfs.media.room import VOLATILE_TEXT
from cxlfs.store.attributes import content_state
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    from cxlfs.format.superblock import Superblock
    from cxlfs.media import Media
    from cxlfs.native.maps import FileMap
    from cxlfs.store import Store

Value = int | float | str | bytes | bool | None | list["Value"] | dict[str, "Value"]
Item = dict[str, Value]

_HEX_FIELDS = frozenset({"crc", "nonce", "image_header_crc", "device_hash"})
_SEGMENT_FIELDS = frozenset({"predecessor", "partner", "journal_segment", "journal_mirror"})


# --- rows of the media format -------------------------------------------------------------------


def fields_of(row: np.void) -> Item:
    """The fields of one structure; reserved ones only where they are not zero."""
    result: Item = {}
    for name in row.dtype.names or ():
        raw = row[name]
        if isinstance(raw, np.ndarray):
            result[name] = _array(raw)
        elif isinstance(raw, np.bytes_):
            result[name] = bytes(raw).decode("ascii", "backslashreplace")
        elif isinstance(raw, np.void):
            if not name.startswith("reserved") or any(raw.tobytes()):
                result[name] = _blob(name, raw.tobytes())
        else:
            result[name] = _number(name, int(raw))
    return result


def _array(raw: np.ndarray[tuple[int, ...], np.dtype[np.void]]) -> list[Value]:
    if raw.dtype.names is None:
        return [int(number) for number in raw]
    return [fields_of(row) for row in raw if any(row.tobytes())]


def _blob(name: str, data: bytes) -> Value:
    if name.endswith("uuid"):
        return str(uuid.UUID(bytes=data))
    if name == "label":
        return data.rstrip(b"\0")
    return data.hex()


def _number(name: str, number: int) -> Value:
    if name.startswith("reserved") and number == 0:
        return 0
    if name in _HEX_FIELDS:
        return f"{number:#010x}"
    if name in _SEGMENT_FIELDS and number == layout.NO_SEGMENT:
        return None
    return number


def _read_row(
    media: Media, offset: int, dtype: np.dtype[np.void]
) -> tuple[Item, bytes, str | None]:
    """Fields and bytes at ``offset``; the third says why they cannot be read."""
    try:
        data = media.read(offset, dtype.itemsize)
    except MediaError as error:
        return {}, b"", error.message
    return fields_of(np.frombuffer(data, dtype=dtype, count=1)[0]), data, None


# --- superblock, roots, segments ----------------------------------------------------------------


def superblock_copies(media: Media) -> Iterator[Item]:
    """The four copies. Raises NotACxlfsError when nothing like one is there, and what opening
    raises for a store that is too new or was cut.
    """
    states = superblock.read_copies(media)
    items = []
    for state in states:
        fields, data, problem = _read_row(media, state.media_offset, layout.SUPERBLOCK_DTYPE)
        items.append(
            Item(
                structure="superblock",
                media_offset=state.media_offset,
                copy=state.number,
                problem=problem or state.problem,
                fields=_used(fields),
            )
        )
        if not data.startswith(layout.SUPERBLOCK_MAGIC):
            items[-1]["fields"] = {}
    if not any(item["fields"] for item in items):
        superblock.choose(media)
    yield from items


def _used(fields: Item) -> Item:
    """Without the image segments that do not count."""
    segments_named = fields.get("image_segments")
    count = fields.get("image_segment_count")
    if isinstance(segments_named, list) and isinstance(count, int):
        fields["image_segments"] = segments_named[:count]
    return fields


def root_slots(media: Media) -> Iterator[Item]:
    """Every slot of both rings; ``newest`` marks the root that counts, ``problem`` "never written"
    one that was not used yet. Raises what ``superblock.choose`` raises.
    """
    block, _ = superblock.choose(media)
    states = roots.read_slots(media, block)
    newest = next(iter(roots.candidates(states)), None)
    for state in states:
        fields, data, problem = _read_row(media, state.media_offset, layout.ROOT_DTYPE)
        never_written = state.root is None and state.problem is None
        shown = {} if never_written or not data.startswith(layout.ROOT_MAGIC) else _used(fields)
        yield Item(
            structure="root",
            media_offset=state.media_offset,
            ring=state.ring,
            slot=state.slot,
            state=_slot_state(state, never_written=never_written),
            newest=newest is not None and state.root == newest,
            in_use=None if state.root is None else state.root.in_use,
            problem=problem or state.problem,
            fields=shown,
        )


def _slot_state(state: roots.SlotState, *, never_written: bool) -> str:
    if never_written:
        return "never written"
    return "damaged" if state.root is None else "good"


def segment_headers(media: Media) -> Iterator[Item]:
    """Every segment: its header and whether the newest root names it. Raises what
    ``superblock.choose`` raises.
    """
    block, _ = superblock.choose(media)
    newest = next(iter(roots.candidates(roots.read_slots(media, block))), None)
    named = frozenset() if newest is None else frozenset(newest.segments)
    for index in range(block.segment_count):
        offset = block.segment_offset(index)
        fields, data, problem = _read_row(media, offset, layout.SEGMENT_DTYPE)
        has_magic = data.startswith(layout.SEGMENT_MAGIC)
        if problem is None and has_magic:
            found = segments.decode(data, block, index)
            problem = found if isinstance(found, str) else None
        role = fields.get("role")
        yield Item(
            structure="segment",
            media_offset=offset,
            index=index,
            role=layout.ROLE_NAMES.get(role) if has_magic and isinstance(role, int) else None,
            named_by_newest_root=index in named,
            problem=problem,
            fields=fields if has_magic else {},
        )


# --- journal ------------------------------------------------------------------------------------


def journal_records(media: Media) -> Iterator[Item]:
    """The journal that continues the newest root's image: segments, records, and how it ends.

    Raises CorruptionError without a valid root, and what ``superblock.choose`` raises.
    """
    block, _ = superblock.choose(media)
    newest = next(iter(roots.candidates(roots.read_slots(media, block))), None)
    if newest is None:
        raise CorruptionError(
            "no valid root is left in either ring",
            structure="root",
            next_step="run cxlfs dump SOURCE roots",
        )
    lsn = newest.image_lsn + 1
    if newest.journal_segment is None or newest.journal_mirror is None:
        yield _journal_end(None, newest.image_lsn, "closed cleanly: the image has everything", None)
        return
    header = journal_reader.read_header(
        media, block, newest.journal_segment, newest.journal_mirror, newest.journal_epoch
    )
    if header is None:
        offset = block.segment_offset(newest.journal_segment)
        reason = "both copies of the journal segment's header are damaged"
        yield _journal_end(offset, newest.image_lsn, reason, reason)
        return
    headers = segments.read_all(media, block)
    while header is not None:
        reader = journal_reader.SegmentReader(media, block, header, expected_lsn=lsn)
        yield _journal_segment(block, header)
        for record in reader:
            yield _record(record)
        lsn = reader.scan.last_lsn + 1
        end_offset = block.segment_offset(header.index) + reader.scan.end
        if reader.scan.lost_lsn is not None:
            reason = f"record {reader.scan.lost_lsn} is damaged in both copies"
            yield _journal_end(end_offset, lsn - 1, reason, reason)
            return
        header = journal_chain.find_next(media, block, headers, reader.scan)
    yield _journal_end(end_offset, lsn - 1, "the end: no further record", None)


def _journal_segment(block: Superblock, header: segments.SegmentHeader) -> Item:
    return Item(
        structure="journal segment",
        media_offset=block.segment_offset(header.index),
        problem=None,
        index=header.index,
        mirror_index=header.partner,
        mirror_media_offset=block.segment_offset(header.partner),
        epoch=header.epoch,
        first_lsn=header.first_lsn,
    )


def _record(record: journal_reader.Record) -> Item:
    problem = None
    decoded: list[Value] = []
    try:
        found = operations.decode(record.payload, record.operation_count, record.media_offset)
        decoded = [_operation(operation) for operation in found]
    except CorruptionError as error:
        problem = error.message
    return Item(
        structure="journal record",
        media_offset=record.media_offset,
        problem=problem,
        lsn=record.lsn,
        time_ns=record.time_ns,
        fenced_lsn=record.fenced_lsn,
        length=record.length,
        copy=record.copy_number,
        operations=decoded,
    )


def _journal_end(offset: int | None, last_lsn: int, reason: str, problem: str | None) -> Item:
    return Item(
        structure="journal end",
        media_offset=offset,
        problem=problem,
        last_lsn=last_lsn,
        reason=reason,
    )


def _operation(operation: operations.Operation) -> Item:
    item: Item = {"operation": type(operation).__name__.removesuffix("Operation").lower()}
    for name, value in operation._asdict().items():
        convert = _CONVERSIONS.get(name)
        item[name] = value if convert is None else convert(value)
    return item


def _references(data: bytes) -> Value:
    return [fields_of(row) for row in np.frombuffer(data, dtype=layout.REF_DTYPE)]


def _checksums(data: bytes) -> Value:
    return [f"{value:#010x}" for value in np.frombuffer(data, dtype="<u4").tolist()]


_CONVERSIONS: dict[str, Callable[..., Value]] = {
    "refs": _references,
    "crcs": _checksums,
    "inos": list,
}


# --- an open store ------------------------------------------------------------------------------


def inode(store: Store, ino: int) -> Item:
    """One inode of an open store, with every path that means it and where its content lies.

    Raises NotFoundError.
    """
    found = store.namespace.inodes.get(ino)
    if found is None:
        raise NotFoundError(
            f"no inode has the number {ino}", next_step="ls -i shows the numbers of files"
        )
    item = Item(structure="inode", media_offset=None, problem=None, kind=found.kind.name.lower())
    item |= found.attributes()._asdict()
    item["paths"] = list[Value](_paths(store, ino))
    if found.target:
        item["target"] = found.target
    item["xattrs"] = [
        Item(name=name, value=value) for name, value in sorted((found.xattrs or {}).items())
    ]
    if found.live is not None:
        item |= Item(
            state=content_state(found),
            commit_lsn=found.commit_lsn,
            commit_time_ns=found.commit_ns,
        )
        versions = (("live", found.live), ("committed", found.committed), ("aside", found.aside))
        item["versions"] = [
            _content(store, name, content) for name, content in versions if content is not None
        ]
    return item


def _paths(store: Store, ino: int) -> Iterator[bytes]:
    if ino == ROOT_INO:
        yield b"/"
        return
    for directory in store.namespace.walk(ROOT_INO):
        names = [name for name, child in (directory.entries or {}).items() if child == ino]
        if names:
            above = store.path_of(directory.ino) or b"?"
            yield from (above.rstrip(b"/") + b"/" + name for name in sorted(names))


def _content(store: Store, version: str, content: FileMap) -> Item:
    references: list[Value] = []
    for row in content.export(0, content.size):
        reference = fields_of(row)
        infos, checksums = store.volume.engine.describe(int(row["extent_id"]))
        info = infos[0]
        reference["media_offset"] = int(info["media_offset"]) + int(row["extent_offset"])
        reference["extent_length"] = int(info["length"])
        reference["crcs"] = [f"{value:#010x}" for value in checksums.tolist()]
        references.append(reference)
    return Item(
        version=version,
        size=content.size,
        allocated_bytes=content.allocated,
        references=references,
    )


def status(store: Store) -> Item:
    """What ``Store.statistics`` counts, and the media below it: the same for a store opened here
    and for one that a daemon serves.
    """
    item = _plain(store.statistics())
    item["media"] = media_facts(store.media)
    item["direct"] = _plain(store.direct.describe())
    item["read_only"] = store.read_only
    item["weakened"] = [VOLATILE_TEXT] if store.media.volatile else []
    return item


def media_facts(media: Media) -> Item:
    """What a source is and how stores into it are made durable."""
    supported, dirty_shutdowns, _devices = media.dirty_shutdown()
    pages = media.mapped_pages()
    return Item(
        kind=media.kind,
        path=media.path,
        size_bytes=media.size_bytes,
        granularity=media.granularity.name.lower(),
        write_back=media.write_back_name,
        persistence_domain=media.persistence_domain,
        alignment_bytes=media.alignment_bytes,
        page_size_bytes=pages.page_size_bytes,
        huge_page_share=None if pages.huge_share is None else round(pages.huge_share, 3),
        dirty_shutdowns=dirty_shutdowns if supported else None,
        volatile=media.volatile,
    )


def _plain(value: object) -> Item:
    """A dataclass as a dictionary; what is not plain in it becomes so."""
    item: Item = {}
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        inner = getattr(value, field.name)
        if field.name == "uuid":
            item[field.name] = str(uuid.UUID(bytes=inner))
        elif dataclasses.is_dataclass(inner):
            item[field.name] = _plain(inner)
        else:
            item[field.name] = inner
    return item
