"""What verifying can find: the table of kinds, one finding, and how far a run has come.

Never here: looking for anything, printing.

Invariants
- The id of a kind is a permanent name: never reused, never changed once released. The same holds
  for the numbers of passes.
- A warning says that redundancy is gone and nothing else: everything that was committed is there.
  An error says that something is lost, wrong, or cannot be trusted.
- ``repairable`` findings are those for which ``repair.plan`` has an action that can be undone.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Final

ERROR: Final = "error"
WARNING: Final = "warning"

_REPAIR = "unmount it, then: cxlfs verify SOURCE --repair"
_RESTORE = "copy what can still be read elsewhere (mount it read-only), then make a new store"
_FILE = "restore the file from another copy, or delete it"
_REPORT = "mount it read-only, copy the files elsewhere, and report this: checksums are right"


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A kind of finding; ``text`` explains it in the documentation."""

    id: str
    pass_id: int
    structure: str
    severity: str
    text: str
    next_step: str

    @property
    def repairable(self) -> bool:
        return self.next_step == _REPAIR


_KINDS = (
    Kind(
        "superblock-unusable",
        1,
        "superblock",
        ERROR,
        "No superblock copy can be used, or they contradict each other.",
        "run cxlfs dump SOURCE superblock; without a superblock nothing can be read",
    ),
    Kind(
        "superblock-copy-damaged",
        1,
        "superblock",
        WARNING,
        "One of the four superblock copies is damaged or says something else than the others.",
        _REPAIR,
    ),
    Kind(
        "root-missing",
        2,
        "root",
        ERROR,
        "Neither ring holds a valid root. If a metadata image is found by its segment headers, "
        "this is a warning, and can be repaired.",
        "run cxlfs dump SOURCE roots; without a root nothing can be read",
    ),
    Kind(
        "root-copy-damaged",
        2,
        "root",
        WARNING,
        "A root is damaged, missing or outdated in one ring; the other ring has it.",
        _REPAIR,
    ),
    Kind(
        "root-lost",
        2,
        "root",
        WARNING,
        "A slot is damaged in both rings. The root there was older than the newest, or what it led "
        "to was found without it.",
        _REPAIR,
    ),
    Kind(
        "root-rings-contradict",
        2,
        "root",
        ERROR,
        "The rings hold two different roots of the same generation.",
        _REPORT,
    ),
    Kind(
        "root-outdated",
        2,
        "root",
        ERROR,
        "The journal goes on behind what the newest root says: a newer root is lost in both rings.",
        _RESTORE,
    ),
    Kind(
        "segment-header-damaged",
        3,
        "segment header",
        WARNING,
        "The header of a segment in use is damaged, or says that it is used for something else.",
        _REPAIR,
    ),
    Kind(
        "journal-header-damaged",
        4,
        "segment header",
        WARNING,
        "A header of a journal segment that no root names is damaged. The journal before it still "
        "leads there.",
        _REPAIR,
    ),
    Kind(
        "journal-copy-damaged",
        4,
        "journal record",
        WARNING,
        "A journal record or the continuation at the end of a journal is good in one copy only.",
        _REPAIR,
    ),
    Kind(
        "journal-copies-contradict",
        4,
        "journal record",
        ERROR,
        "Both copies of a record are valid, but they are not equal.",
        _REPORT,
    ),
    Kind(
        "journal-record-lost",
        4,
        "journal record",
        ERROR,
        "A record that was durable is damaged in both copies; later changes cannot be applied.",
        _RESTORE,
    ),
    Kind(
        "journal-record-malformed",
        4,
        "journal record",
        ERROR,
        "The checksums of a record are right, but its content makes no sense.",
        _REPORT,
    ),
    Kind(
        "journal-lost",
        4,
        "segment header",
        ERROR,
        "Both headers of a journal are damaged: the changes since the last image cannot be read.",
        _RESTORE,
    ),
    Kind(
        "fallback-journal-incomplete",
        4,
        "journal record",
        WARNING,
        "The journal behind the fallback image does not reach the newest image.",
        _REPAIR,
    ),
    Kind(
        "image-damaged",
        5,
        "metadata image",
        ERROR,
        "The newest metadata image is damaged. With a good fallback image and its journal nothing "
        "is lost: then it is a warning and can be repaired.",
        _RESTORE,
    ),
    Kind(
        "image-fallback-damaged",
        5,
        "metadata image",
        WARNING,
        "The metadata image that is kept as a fallback is damaged.",
        _REPAIR,
    ),
    Kind(
        "store-unusable",
        6,
        "store",
        ERROR,
        "Image and journal together do not make a state that can be read.",
        _RESTORE,
    ),
    Kind(
        "store-incomplete",
        6,
        "store",
        ERROR,
        "The store can be read, but changes that were committed cannot: it may not be written.",
        _RESTORE,
    ),
    Kind(
        "root-unusable",
        6,
        "root",
        WARNING,
        "What a root leads to cannot be used; an older root and its journal led to the same state.",
        _REPAIR,
    ),
    Kind(
        "extent-impossible",
        7,
        "extent",
        ERROR,
        "An extent has no number, no length, the wrong number of checksums, or a place where none "
        "can be.",
        _REPORT,
    ),
    Kind(
        "extent-overlap",
        7,
        "extent",
        ERROR,
        "Two extents share bytes of the media.",
        _REPORT,
    ),
    Kind(
        "inode-impossible",
        8,
        "inode",
        ERROR,
        "An inode appears twice, is of no known type, or has what its type cannot have.",
        _REPORT,
    ),
    Kind(
        "inode-nameless",
        8,
        "inode",
        ERROR,
        "An inode has no name: nobody can reach it.",
        _REPORT,
    ),
    Kind(
        "name-impossible",
        8,
        "name",
        ERROR,
        "A name is empty, too long, holds a forbidden character, or appears twice in a directory.",
        _REPORT,
    ),
    Kind(
        "name-dangling",
        8,
        "name",
        ERROR,
        "A name belongs to no directory, or means no inode.",
        _REPORT,
    ),
    Kind(
        "directory-unreachable",
        8,
        "inode",
        ERROR,
        "A directory is not below the root directory: the directories above it form a loop.",
        _REPORT,
    ),
    Kind(
        "attribute-impossible",
        8,
        "xattr",
        ERROR,
        "An extended attribute or a symbolic link has no owner, no text, or one too long.",
        _REPORT,
    ),
    Kind(
        "reference-impossible",
        9,
        "reference",
        ERROR,
        "A piece of a file lies in no extent, outside its extent, beyond the end of the file, or "
        "over another piece.",
        _REPORT,
    ),
    Kind(
        "space-conflict",
        10,
        "segment",
        ERROR,
        "A segment that holds something in use counts as free or as something else.",
        "unmount it at once, and verify SOURCE",
    ),
    Kind(
        "space-leaked",
        10,
        "segment",
        WARNING,
        "A segment counts as in use, but nothing in it is.",
        "unmount and mount it: that counts anew",
    ),
    Kind(
        "data-checksum",
        11,
        "file data",
        ERROR,
        "File data does not match its checksum. Reading it gives EIO.",
        _FILE,
    ),
    Kind(
        "data-unreadable",
        11,
        "file data",
        ERROR,
        "The media cannot deliver file data. Reading it gives EIO.",
        _FILE,
    ),
    Kind(
        "data-unused-damaged",
        11,
        "file data",
        WARNING,
        "Damaged bytes that no file refers to. At most a version in history has them.",
        "nothing has to be done; if it comes again, check the device",
    ),
)
KINDS: Final[Mapping[str, Kind]] = {kind.id: kind for kind in _KINDS}
"""Every kind by its id."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A piece of a file that lies in the damaged bytes. ``version``: ``committed``, ``live`` (open,
    not committed yet) or ``kept aside``.
    """

    ino: int
    path: bytes | None
    file_offset: int
    length: int
    version: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem. ``expected`` and ``actual`` are checksums where a checksum differs. ``ino`` and
    ``path`` are the first of ``uses`` where file data is damaged.
    """

    id: str
    pass_id: int
    structure: str
    severity: str
    repairable: bool
    message: str
    next_step: str
    media_offset: int | None = None
    ino: int | None = None
    path: bytes | None = None
    expected: int | None = None
    actual: int | None = None
    uses: tuple[Use, ...] = ()


def make(
    kind_id: str,
    message: str,
    *,
    severity: str | None = None,
    structure: str | None = None,
    media_offset: int | None = None,
    ino: int | None = None,
    path: bytes | None = None,
    expected: int | None = None,
    actual: int | None = None,
    uses: tuple[Use, ...] = (),
) -> Finding:
    """A finding of a kind. A warning out of an error's kind can be repaired, and the reverse."""
    kind = KINDS[kind_id]
    repairable, next_step = kind.repairable, kind.next_step
    if severity is not None and severity != kind.severity:
        repairable = severity == WARNING
        next_step = _REPAIR if repairable else _RESTORE
    return Finding(
        id=kind.id,
        pass_id=kind.pass_id,
        structure=structure or kind.structure,
        severity=severity or kind.severity,
        repairable=repairable,
        message=message,
        next_step=next_step,
        media_offset=media_offset,
        ino=uses[0].ino if uses else ino,
        path=uses[0].path if uses else path,
        expected=expected,
        actual=actual,
        uses=uses,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a pass is: ``done`` of ``total`` ``unit`` (``bytes`` or ``items``).

    ``finished``: its last message. ``skipped``: why it could not run (then finished, too).
    """

    pass_id: int
    name: str
    done: int
    total: int
    unit: str
    finished: bool = False
    skipped: str | None = None


# --- over the control socket ----------------------------------------------------------------


def finding_to_dict(finding: Finding) -> dict[str, object]:
    """As JSON carries it; bytes become text that ``os.fsencode`` turns back."""
    return _plain(finding)


def _plain(value: Finding | Use | Progress) -> dict[str, object]:
    result: dict[str, object] = {}
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if isinstance(inner, bytes):
            inner = os.fsdecode(inner)
        elif isinstance(inner, tuple):
            inner = [_plain(use) for use in inner]
        result[field.name] = inner
    return result


def progress_to_dict(progress: Progress) -> dict[str, object]:
    return _plain(progress)


def finding_from_dict(message: Mapping[str, object]) -> Finding:
    """The reverse of :func:`finding_to_dict`; keys that are not known are left out."""
    fields = dict(_known(Finding, message))
    uses = message.get("uses")
    fields["uses"] = tuple(
        Use(**dict(_known(Use, use)))  # type: ignore[arg-type]
        for use in (uses if isinstance(uses, list) else ())
    )
    return Finding(**fields)  # type: ignore[arg-type]


def progress_from_dict(message: Mapping[str, object]) -> Progress:
    return Progress(**dict(_known(Progress, message)))  # type: ignore[arg-type]


def _known(
    kind: type[Finding | Use | Progress], message: Mapping[str, object]
) -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(kind):
        if field.name in message:
            value = message[field.name]
            is_path = field.name == "path" and isinstance(value, str)
            yield field.name, os.fsencode(value) if is_path else value  # type: ignore[arg-type]
