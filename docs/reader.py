"""Read a cxlfs store without cxlfs.

    python reader.py IMAGE                  list what is committed
    python reader.py IMAGE --json           the same as JSON
    python reader.py IMAGE --extract DIR    write it to DIR, which is made

This program is written from format.md alone, which explains every structure and rule. It consists
of this file and of ``reader_state.py`` and ``reader_structures.py`` beside it. It needs Python 3.11
and NumPy, and imports nothing of cxlfs. IMAGE is a file or a block device. The exit code is 0, 1 if
something is damaged or missing, or 2 if the store cannot be read.

Other programs mount, recover and repair stores. This one never writes to IMAGE.

Invariants
- Memory is bounded by a multiple of the metadata image (IMAGE_BYTES_MAX) and of a segment.
- Work on metadata is bounded by WORK_MAX, so no store makes the reader hang.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import stat
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO, Final

import numpy as np
import reader_structures as structures
from reader_state import ROOT_INO, Inode, Operations, State, read_image
from reader_structures import DamageError, Medium, ReaderError, Superblock, crc32c, unpack

HIDDEN: Final = b"trusted.cxlfs."
"""Attributes with names that begin so are the store's own."""


class ContradictionError(DamageError):
    """A record does not fit the state before it."""

    def __init__(self, lsn: int, why: str) -> None:
        super().__init__(f"record {lsn} contradicts the state: {why}; later changes do not count")
        self.lsn = lsn


# --- journals -------------------------------------------------------------------------------


class Journal:
    """One journal segment and its mirror, from the record with ``first_lsn`` on."""

    def __init__(
        self, medium: Medium, block: Superblock, header: SimpleNamespace, first_lsn: int
    ) -> None:
        self.header = header
        self.last_lsn = first_lsn - 1
        self._medium, self._block = medium, block
        medium.spend(block.segment_bytes >> 6)
        self._copies = [
            medium.read(block.segment_offset(index), block.segment_bytes)
            for index in (header.index, header.partner)
        ]
        self._seed = crc32c(struct.pack("<QQ", header.nonce, header.epoch) + block.uuid)
        self._end = structures.SEGMENT_HEADER_BYTES

    def _at(self, data: bytes, position: int, lsn: int) -> SimpleNamespace | None:
        """Return the record with that LSN, if a good one is there in that copy."""
        head_bytes = structures.RECORD.itemsize
        if position + head_bytes > len(data):
            return None
        found = unpack(structures.RECORD, data, position)
        right = (structures.RECORD_MAGIC, lsn, self.header.epoch)
        if (found.magic, found.lsn, found.epoch) != right:
            return None
        if found.crc != crc32c(data[position : position + head_bytes - 4], self._seed):
            return None
        payload = data[position + head_bytes : position + found.length]
        if found.length % structures.RECORD_ALIGN or found.length != head_bytes + len(payload):
            return None
        self._medium.spend(len(payload) >> 4)
        if found.payload_bytes > len(payload) or found.payload_crc != crc32c(payload, self._seed):
            return None
        found.payload = payload[: found.payload_bytes]
        return found

    def records(self) -> Iterator[SimpleNamespace]:
        """Yield each transaction, from the primary copy or else from the mirror."""
        while True:
            both = [self._at(data, self._end, self.last_lsn + 1) for data in self._copies]
            good = [
                found for found in both if found and found.type == structures.RECORD_TRANSACTION
            ]
            if not good:
                return
            self.last_lsn += 1
            self._end += good[0].length
            yield good[0]

    def successors(self) -> list[SimpleNamespace]:
        """Return headers of journals that the end of this one names, the newest first."""
        found = []
        for data in self._copies:
            record = self._at(data, self._end, self.last_lsn + 1)
            if record is not None and record.type == structures.RECORD_CONTINUATION:
                with contextlib.suppress(DamageError):
                    header = structures.decode_header(record.payload, self._block)
                    right = (structures.ROLE_JOURNAL, 0, record.lsn)
                    if (header.role, header.copy_number, header.first_lsn) == right:
                        found.append(header)
        later = [header for header in found if header.epoch > self.header.epoch]
        return sorted(later, key=lambda header: -header.epoch)

    def lost(self) -> str | None:
        """Say why the end of the records is not the end of what was durable; None if it is."""
        lsn = self.last_lsn + 1
        for data in self._copies:
            record = self._at(data, self._end, lsn)
            known = (structures.RECORD_TRANSACTION, structures.RECORD_CONTINUATION)
            if record is not None and record.type not in known:
                return f"record {lsn} has the unknown type {record.type}"
            rows = structures.table(structures.RECORD, data[self._end :])
            proves = (rows["magic"] == structures.RECORD_MAGIC) & (rows["lsn"] > lsn)
            proves &= (rows["epoch"] == self.header.epoch) & (rows["fenced_lsn"] >= lsn)
            for place in np.flatnonzero(proves).tolist():
                position = self._end + place * structures.RECORD.itemsize
                if self._at(data, position, int(rows["lsn"][place])) is not None:
                    return f"record {lsn} is damaged in both copies"
        return None


# --- stores ---------------------------------------------------------------------------------


class Store:
    """What is committed in a store: the newest root that can be used, its image, its journals.

    ``open_units``: see :func:`open_units`.

    ``problems``: what is damaged or missing, one sentence each.
    """

    def __init__(self, stream: BinaryIO) -> None:
        """Read the metadata. Raises ReaderError."""
        self.medium = Medium(stream)
        self.block = structures.read_superblock(self.medium)
        self.problems: list[str] = []
        roots, is_newer_lost = structures.read_roots(self.medium, self.block)
        self._headers = structures.read_journal_headers(self.medium, self.block)
        self._journals: list[Journal] = []
        for root in roots:
            follow = is_newer_lost or root is not roots[0] or root.flags & structures.ROOT_IN_USE
            try:
                self.state = self._load(root, follow=bool(follow))
            except DamageError as error:
                self.problems.append(f"root {root.generation} cannot be used: {error}")
                continue
            if root is not roots[0] and not self._reaches(roots[0]):
                self.problems.append("newer changes are lost: no journal reaches the newest root")
            if is_newer_lost and not any(j.last_lsn >= j.header.first_lsn for j in self._journals):
                self.problems.append("a root is damaged in both rings: a newer one may be lost")
            self.open_units = open_units(self.state)
            return
        raise ReaderError("; ".join(self.problems) or "no root is good")

    def _load(self, root: SimpleNamespace, *, follow: bool) -> State:
        """Return the state of a root. If a record contradicts it, the state in front of that."""
        problems, end = len(self.problems), structures.NUMBER_LIMIT
        while True:
            state = read_image(self.medium, self.block, root)
            try:
                self._replay(root, state, end, follow=follow)
            except ContradictionError as error:
                del self.problems[problems:]
                self.problems.append(str(error))
                end = error.lsn
            else:
                return state

    def _replay(self, root: SimpleNamespace, state: State, end_lsn: int, *, follow: bool) -> None:
        """Apply the records with LSNs below ``end_lsn``."""
        self._journals.clear()
        header = self._first_journal(root, state) if follow else None
        operations = Operations(state)
        while header is not None and state.last_lsn + 1 < end_lsn:
            journal = Journal(self.medium, self.block, header, state.last_lsn + 1)
            self._journals.append(journal)
            for record in journal.records():
                if record.lsn >= end_lsn:
                    return
                try:
                    operations.apply(record)
                except DamageError as error:
                    raise ContradictionError(record.lsn, str(error)) from error
            lost = journal.lost()
            if lost is not None:
                self.problems.append(f"{lost}: later changes are missing")
                return
            header = self._next_journal(journal)
        if self._journals and self._is_followed(self._journals[-1]):
            self.problems.append(f"record {state.last_lsn + 1} is damaged: later changes are lost")

    def _first_journal(self, root: SimpleNamespace, state: State) -> SimpleNamespace | None:
        """Return the header of the journal that a root names, or that follows a closed store."""
        if root.journal_segment == structures.NO_SEGMENT:
            return self._newest(state.last_lsn + 1, root.next_epoch - 1)
        place = root.journal_segment, root.journal_mirror, root.journal_epoch
        for header in self._headers:
            if (header.index, header.partner, header.epoch) == place:
                return header
        self.problems.append("both headers of the journal are damaged: changes may be missing")
        return None

    def _newest(self, first_lsn: int, after_epoch: int) -> SimpleNamespace | None:
        fitting = (h for h in self._headers if h.first_lsn == first_lsn and h.epoch > after_epoch)
        return max(fitting, key=lambda header: header.epoch, default=None)

    def _next_journal(self, journal: Journal) -> SimpleNamespace | None:
        """Return the header of the journal in which records go on: see format.md, Journal."""
        found = self._newest(journal.last_lsn + 1, journal.header.epoch)
        for named in journal.successors():
            if found is not None and found.epoch >= named.epoch:
                break
            first = Journal(self.medium, self.block, named, named.first_lsn)
            if any(True for _ in first.records()) or first.successors():
                return named
        return found

    def _is_followed(self, journal: Journal) -> bool:
        """True if a journal with a record proves that ``journal`` had more than can be read."""
        mine = journal.header.index, journal.header.epoch
        return any(
            next(Journal(self.medium, self.block, header, header.first_lsn).records(), None)
            for header in self._headers
            if (header.predecessor, header.predecessor_epoch) == mine
            and header.predecessor_last_lsn > journal.last_lsn
        )

    def _reaches(self, newest: SimpleNamespace) -> bool:
        epochs = [journal.header.epoch for journal in self._journals]
        is_closed = newest.journal_segment == structures.NO_SEGMENT
        reached = is_closed or newest.journal_epoch in epochs
        return reached and self.state.last_lsn >= newest.image_lsn


def open_units(state: State) -> dict[int, int]:
    """Return the directory of each open checkpoint unit, and the copy of what it was before (0:
    nothing); inode numbers. After a crash, cxlfs puts the copies in the places of the directories.
    """
    found: dict[int, int] = {}
    for name, value in state.inodes[ROOT_INO].xattrs.items():
        try:
            if name.startswith(HIDDEN + b"unit-"):
                found[int(name[len(HIDDEN) + 5 :])] = int(json.loads(value)[0])
            elif name == HIDDEN + b"units":
                found |= {int(row[0]): int(row[1]) for row in json.loads(value)}
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            continue
    return found


# --- the program ----------------------------------------------------------------------------


def _shown(name: bytes) -> str:
    """Return a name for a terminal, whatever it consists of."""
    text = name.decode(errors="surrogateescape")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def remarks(store: Store, inode: Inode) -> list[str]:
    """Say what a user has to know of an inode besides its attributes."""
    found = []
    if inode.flags & structures.INODE_INCOMPLETE:
        found.append("incomplete: its writer did not close it")
    if inode.aside is not None and HIDDEN + b"held" in inode.xattrs:
        found.append(f"the version before is held: {inode.aside.size} bytes")
    elif inode.aside is not None:
        found.append(f"a version is kept aside: {inode.aside.size} bytes")
    if HIDDEN + b"damaged" in inode.xattrs:
        found.append("damage was seen in it")
    if (before := store.open_units.get(inode.ino)) is not None:
        found.append(f"open checkpoint unit, before: {f'inode {before}' if before else 'nothing'}")
    return found


def describe(store: Store) -> dict[str, object]:
    """Return what ``--json`` shows."""
    names = ("ino", "mode", "uid", "gid", "rdev", "size", "mtime_ns", "commit_lsn", "commit_ns")
    entries = [
        {
            "path": os.fsdecode(path),
            "kind": inode.kind,
            **{name: getattr(inode, name) for name in names},
            "target": os.fsdecode(inode.target),
            "xattrs": {os.fsdecode(k): v.hex() for k, v in sorted(inode.xattrs.items())},
            "remarks": remarks(store, inode),
        }
        for path, inode in store.state.walk()
    ]
    block = store.block
    head = {"uuid": block.uuid.hex(), "label": block.label, "last_lsn": store.state.last_lsn}
    return {**head, "problems": store.problems, "entries": entries}


def _list(store: Store) -> None:
    for path, inode in store.state.walk():
        target = f" -> {_shown(inode.target)}" if inode.target else ""
        told = "".join(f" [{remark}]" for remark in remarks(store, inode))
        owners = f"{inode.uid:>6} {inode.gid:>6} {inode.size:>14}"
        print(f"{stat.filemode(inode.mode)} {owners} {_shown(path)}{target}{told}")


class Extraction:
    """Files written below a new directory: content, permission bits, times; no owners, no devices.

    Symbolic links are made last, so nothing is written through one.
    """

    def __init__(self, state: State, target: Path) -> None:
        self._state = state
        self._target = target
        self._made: dict[int, Path] = {}
        self.problems: list[str] = []

    def run(self) -> None:
        """Write everything. Raises OSError if the directory cannot be made."""
        self._target.mkdir(mode=0o700)
        last = []
        for path, inode in self._state.walk():
            place = self._target / os.fsdecode(path[1:])
            if inode.kind in ("directory", "symbolic link"):
                last.append((place, inode))
            with self._noted(path):
                if inode.kind == "directory" and inode.ino != ROOT_INO:
                    place.mkdir(mode=0o700)
                elif inode.kind == "file":
                    self._file(path, place, inode)
        for place, inode in reversed(last):
            with self._noted(os.fsencode(place)):
                if inode.kind == "symbolic link":
                    place.symlink_to(os.fsdecode(inode.target))
                else:
                    self._finish(place, inode)

    @contextlib.contextmanager
    def _noted(self, path: bytes) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.problems.append(f"{_shown(path)}: {error.strerror}")

    def _file(self, path: bytes, place: Path, inode: Inode) -> None:
        if inode.ino in self._made:
            place.hardlink_to(self._made[inode.ino])
            return
        with place.open("xb") as file:
            for offset, piece in self._state.pieces(inode.content):
                file.seek(offset)
                if piece is not None:
                    file.write(piece)
                else:
                    self.problems.append(f"{_shown(path)}: damaged at {offset}, zeros stand there")
            file.truncate(inode.content.size)
        self._made[inode.ino] = place
        self._finish(place, inode)

    def _finish(self, place: Path, inode: Inode) -> None:
        place.chmod(inode.mode & 0o777)
        os.utime(place, ns=(inode.atime_ns, inode.mtime_ns))


def main() -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(description="Read a cxlfs store without cxlfs.")
    parser.add_argument("image", type=Path, help="a file or a block device")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print everything but contents as JSON")
    how.add_argument("--extract", type=Path, metavar="DIR", help="write all files to a new DIR")
    options = parser.parse_args()
    try:
        with options.image.open("rb") as stream:
            store = Store(stream)
            problems = store.problems
            if options.extract is not None:
                extraction = Extraction(store.state, options.extract)
                extraction.run()
                problems = problems + extraction.problems
            elif options.json:
                print(json.dumps(describe(store), indent=1))
            else:
                _list(store)
    except (ReaderError, OSError) as error:
        print(f"reader: cannot read {options.image}: {error}", file=sys.stderr)
        return 2
    for problem in problems:
        print(f"reader: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
