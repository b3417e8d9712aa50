"""What ``cxlfs verify`` does with checkpoints instead of a store: ``--manifest`` and ``--deep``.

Never here: comparing, computing (``checkpoint.tensors``).

Invariants
- A hint is never called damage, and has an exit code of its own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from cxlfs.checkpoint import State, catalogue
from cxlfs.checkpoint.model import ProblemError
from cxlfs.checkpoint.tensors import (
    Finding,
    Hint,
    Looked,
    Manifest,
    compare,
    in_order,
    look,
    read_manifest,
)
from cxlfs.cli.exit_codes import FINDINGS, HINTS, OK
from cxlfs.cli.output import Output, Report, Style, quote
from cxlfs.errors import DirectoryAbsentError, NotInspectableError, UsageError
from cxlfs.units import format_size

_SHOWN_MAX = 10
"""Hints and tensors of one checkpoint that are shown as text; --json has them all."""


# --- --manifest -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as the manifest says."""

    id: str
    file: bytes | None
    tensor: str | None
    message: str

    @classmethod
    def of(cls, found: Finding) -> Difference:
        file = None if found.file is None else os.fsencode(found.file)
        return cls(found.id, file, found.tensor, found.message)


@dataclasses.dataclass(frozen=True, slots=True)
class Compared(Report):
    """A directory, compared with a manifest."""

    schema: ClassVar[str] = "cxlfs.verify_manifest/1"

    manifest: bytes
    path: bytes
    id: str
    step: int | None
    files: int
    tensors: int
    size_bytes: int
    signed: bool
    signature_checked: bool
    findings: tuple[Difference, ...]
    unknown_files: tuple[bytes, ...]
    """In the directory, and not in the manifest: no finding."""

    def lines(self, style: Style, /) -> Iterator[str]:
        for each in self.findings:
            where = "" if each.tensor is None else f"tensor {quote(each.tensor)}: "
            yield f"{style.bad('error')} {each.id}: {where}{quote(each.message)}"
        for name in self.unknown_files[:_SHOWN_MAX]:
            yield f"note: {quote(name)} is not in the manifest"
        if len(self.unknown_files) > _SHOWN_MAX:
            yield f"note: {len(self.unknown_files) - _SHOWN_MAX} more are not in the manifest"
        what = f"{self.files} files, {self.tensors} tensors, {format_size(self.size_bytes)}"
        if self.findings:
            count = len(self.findings)
            yield style.bad(f"differs: {count} finding{'s'[: count != 1]} in {what}")
        else:
            yield f"{style.good('as the manifest says')}: {what}"
        if self.signed and not self.signature_checked:
            yield "the manifest is signed; --public-key checks by whom"


def verify_manifest(
    manifest: str, directory: str | None, public_key: str | None, output: Output
) -> int:
    """Compare; the exit code. Raises ManifestError, DirectoryAbsentError, and what keys raise."""
    found = read_manifest(Path(manifest))
    root = _root_of(found, Path(manifest), directory)
    findings: list[Finding] = []
    if public_key is not None and not found.is_signed_by(Path(public_key)):
        words = f"is not signed by the key of {public_key}"
        findings.append(Finding("signature", None, None, f"{manifest} {words}"))
    try:
        differences, others = compare(found, root)
    except ProblemError as error:
        raise NotInspectableError(f"cannot compare {root} with {manifest}: {error}") from error
    findings += differences
    output.report(
        Compared(
            manifest=os.fsencode(manifest),
            path=os.fsencode(root),
            id=found.id,
            step=found.step,
            files=len(found.files),
            tensors=len(found.tensors),
            size_bytes=found.size_bytes,
            signed=found.signature is not None,
            signature_checked=public_key is not None,
            findings=tuple(map(Difference.of, findings)),
            unknown_files=tuple(map(os.fsencode, others)),
        )
    )
    return FINDINGS if findings else OK


def _root_of(manifest: Manifest, path: Path, directory: str | None) -> Path:
    """The directory that the names are relative to."""
    if directory is not None:
        given = Path(directory)
        if not manifest.is_directory and not given.is_dir():
            given = given.parent
        if not given.is_dir():
            raise DirectoryAbsentError(f"{directory} is not there, or no directory")
        return given
    beside = path.parent / manifest.name
    if not manifest.is_directory:
        return path.parent
    if not beside.is_dir():
        raise UsageError(
            f"{manifest.name} is not beside {path}",
            next_step=f"name the directory: cxlfs verify --manifest {path} DIR",
        )
    return beside


# --- --deep ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Unread:
    """A tensor that could not be looked at."""

    tensor: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class LookedAt(Report):
    """One checkpoint of those looked at."""

    schema: ClassVar[str] = "cxlfs.verify_deep/1"

    path: bytes
    format: str
    step: int | None
    state: str
    reason: str | None
    tensors: int
    compared_with: bytes | None
    hints: tuple[Hint, ...]
    unread: tuple[Unread, ...]

    @classmethod
    def of(cls, found: Looked) -> LookedAt:
        before = None if found.compared_with is None else os.fsencode(found.compared_with)
        return cls(
            os.fsencode(found.path),
            found.kind,
            found.step,
            found.state.value,
            found.reason,
            found.tensors,
            before,
            found.hints,
            tuple(Unread(*each) for each in found.unread),
        )

    def lines(self, style: Style, /) -> Iterator[str]:
        words = self.state if self.reason is None else f"{self.state}: {quote(self.reason)}"
        paint = style.good if self.state == State.COMPLETE.value else style.bad
        yield f"{quote(self.path)}: {paint(words)}"
        for each in self.hints[:_SHOWN_MAX]:
            where = "" if each.tensor is None else f"tensor {quote(each.tensor)}: "
            yield f"    {style.warning('hint')} {each.id}: {where}{quote(each.message)}"
        if len(self.hints) > _SHOWN_MAX:
            yield f"    {len(self.hints) - _SHOWN_MAX} more hints"
        if self.unread:
            first = self.unread[0]
            yield (
                f"    not looked at: {len(self.unread)} of {self.tensors} tensors "
                f"({quote(first.tensor)}: {quote(first.reason)})"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class DeepSummary(Report):
    """Of all checkpoints."""

    schema: ClassVar[str] = "cxlfs.verify_deep_summary/1"

    checkpoints: int
    bad: int
    """Not complete, or their checksums differ."""
    hints: int
    unknown: int
    """Not looked at, or not all of them."""
    exit_code: int

    def lines(self, style: Style, /) -> Iterator[str]:
        what = f"{self.checkpoints} checkpoint{'s'[: self.checkpoints != 1]}"
        if self.bad:
            yield style.bad(f"{self.bad} of {what} are not as they were saved")
        if self.hints:
            yield style.warning(
                f"{self.hints} hint{'s'[: self.hints != 1]} in {what}: none of them proves damage"
            )
        if self.unknown:
            yield style.warning(f"{self.unknown} of {what} could not be looked at, or not whole")
        if not (self.bad or self.hints or self.unknown):
            yield f"{style.good('nothing found')} in {what}"


def verify_deep(path: str, last: int | None, output: Output) -> int:
    """Look at the checkpoints in a directory, or at one; the exit code.

    Raises DirectoryAbsentError, NotInspectableError.
    """
    count = bad = hints = unknown = 0
    for found in look(_paths(path, last)):
        count += 1
        bad += found.state in (State.DAMAGED, State.INCOMPLETE)
        hints += len(found.hints)
        unknown += found.state is State.UNKNOWN or bool(found.unread)
        output.report(LookedAt.of(found))
        output.flush()
    if not count:
        raise NotInspectableError(f"cannot look inside {path}: no reader here knows its format")
    code = FINDINGS if bad else HINTS if hints else OK
    output.report(DeepSummary(count, bad, hints, unknown, code))
    return code


def _paths(path: str, last: int | None) -> list[Path]:
    if not Path(path).is_dir():
        if not (os.path.lexists(path) or os.path.lexists(f"{path}.index")):
            raise DirectoryAbsentError(f"{path} is not there")
        return [Path(path)]
    entries = in_order(catalogue(path))
    if last is not None:
        entries = entries[-last:]
    return [Path(each.checkpoint.path) for each in entries]
