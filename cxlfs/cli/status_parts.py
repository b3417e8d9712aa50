"""The parts of what ``cxlfs status`` shows, and reading them from what a daemon or a store says.

Never here: judging a state, text for people.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from cxlfs.cli.output import time_or_none
from cxlfs.daemon.options import COMMIT_SECONDS_DEFAULT


@dataclasses.dataclass(frozen=True, slots=True)
class Media:
    """What the store lies on."""

    kind: str
    size_bytes: int
    granularity: str
    write_back: str
    persistence_domain: str | None
    alignment_bytes: int
    page_size_bytes: int | None
    """The largest pages in the mapping of whoever tells this; None: not known."""
    huge_page_share: float | None
    """Of what is mapped, the part in pages larger than the processor's smallest."""
    dirty_shutdowns: int | None
    volatile: bool
    """A file in memory (tmpfs, hugetlbfs): gone with the power."""


@dataclasses.dataclass(frozen=True, slots=True)
class Transport:
    """Who serves a mount's file data, and how many requests that took so far."""

    kind: str
    threads: int
    direct_mapping: bool
    reads: int
    writes: int
    calls: int
    forwarded: int


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How a mount was asked for, where that changes what is kept or who may enter."""

    verify: str
    commit_seconds: float
    allow_incomplete_overwrite: bool
    allow_other: bool
    default_permissions: bool
    units: str
    """Which directories are checkpoint units: auto, policy, off."""
    tidy: str
    torn: str
    dedup: str
    """When unfinished checkpoints are set aside at mounting: off, unclean, always."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tidied:
    """What became of unfinished checkpoints when the store was mounted: see
    ``daemon.first_visit``.
    """

    state: str
    message: str | None
    directories: int
    checkpoints: int
    trackers: int
    failed: int
    seconds: float

    @property
    def is_left(self) -> bool:
        """Something could not be done."""
        return self.state in ("incomplete", "failed")

    @property
    def words(self) -> str:
        if self.state in ("not needed", "running"):
            return f"{self.state}: {self.message}" if self.message else self.state
        text = (
            f"{self.checkpoints} set aside, {self.trackers} put right (files that name one); "
            f"directories looked at: {self.directories}, in {self.seconds:g} s"
        )
        return text if self.message is None else f"{self.state}: {self.message}; {text}"


@dataclasses.dataclass(frozen=True, slots=True)
class Space:
    """Bytes; ``free_bytes`` counts what deleting and compacting have made available."""

    size_bytes: int
    used_bytes: int
    free_bytes: int
    reserved_bytes: int
    incomplete_bytes: int
    segment_size_bytes: int
    segments: int
    segments_free: int


@dataclasses.dataclass(frozen=True, slots=True)
class Journal:
    """The open journal segment, and the last commit."""

    used_bytes: int
    size_bytes: int
    last_commit: int
    last_commit_time: str | None
    generation: int


@dataclasses.dataclass(frozen=True, slots=True)
class Contents:
    files: int
    directories: int
    open_files: int


@dataclasses.dataclass(frozen=True, slots=True)
class Errors:
    """Since the store was opened."""

    checksum: int
    media: int
    no_space: int


@dataclasses.dataclass(frozen=True, slots=True)
class Activity:
    """Since the store was opened."""

    bytes_written: int
    bytes_read: int
    commits: int
    reverts: int
    rollovers: int
    cleaned_segments: int
    moved_bytes: int
    journal_bytes_written: int
    image_bytes_written: int
    maintenance_seconds_max: float
    memory_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Recovery:
    """What opening the store found."""

    clean: bool
    records: int
    seconds: float
    mirror_used: int
    dirty_shutdown: bool
    problems: tuple[str, ...]
    open_units: int
    open_unit_paths: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LastVerify:
    """How the last verify ended that the store remembers."""

    time: str | None
    structure_only: bool
    complete: bool
    errors: int
    warnings: int
    kinds: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RefusedWrites:
    """Writes that found no room and would find none now."""

    count: int
    since: str | None
    last: str | None
    needed_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Direct:
    """Programs that store file data by themselves: what they have open and do, since the store was
    opened; ``verified_contents``: need not be verified when they are mapped, for ``verified_for_s``
    seconds; ``apart_bytes``, ``segments_held``: room that waits for them to end.
    """

    files: int
    mapped_files: int
    verified_contents: int
    verified_for_s: int
    apart_bytes: int
    segments_held: int
    leases: int
    writes: int
    bytes_written: int


class Getter:
    """Typed access to a message from a daemon; what is missing or of another type is empty."""

    def __init__(self, item: Mapping[str, object]) -> None:
        self._item = item

    def number(self, name: str) -> int:
        return self.number_or_none(name) or 0

    def number_or_none(self, name: str) -> int | None:
        value = self._item.get(name)
        return value if isinstance(value, int) else None

    def real(self, name: str) -> float:
        return self.real_or_none(name) or 0.0

    def real_or_none(self, name: str) -> float | None:
        value = self._item.get(name)
        return float(value) if isinstance(value, int | float) else None

    def text(self, name: str) -> str:
        return self.text_or_none(name) or ""

    def text_or_none(self, name: str) -> str | None:
        value = self._item.get(name)
        return value if isinstance(value, str) else None

    def truth(self, name: str) -> bool:
        return bool(self._item.get(name))

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._item.get(name)
        return tuple(str(text) for text in value) if isinstance(value, list | tuple) else ()

    def part(self, name: str) -> Getter:
        value = self._item.get(name)
        return Getter(value if isinstance(value, Mapping) else {})


def media_from(media: Getter) -> Media:
    return Media(
        kind=media.text("kind"),
        size_bytes=media.number("size_bytes"),
        granularity=media.text("granularity"),
        write_back=media.text("write_back"),
        persistence_domain=media.text_or_none("persistence_domain"),
        alignment_bytes=media.number("alignment_bytes"),
        page_size_bytes=media.number_or_none("page_size_bytes"),
        huge_page_share=media.real_or_none("huge_page_share"),
        dirty_shutdowns=media.number_or_none("dirty_shutdowns"),
        volatile=media.truth("volatile"),
    )


def options_from(options: Getter) -> Options:
    return Options(
        verify=options.text("verify") or "read",
        commit_seconds=options.real("commit_seconds") or COMMIT_SECONDS_DEFAULT,
        allow_incomplete_overwrite=options.truth("allow_incomplete_overwrite"),
        allow_other=options.truth("allow_other"),
        default_permissions=options.truth("default_permissions"),
        units=options.text("units") or "auto",
        tidy=options.text("tidy") or "off",
        torn=options.text("torn") or "off",
        dedup=options.text("dedup") or "off",
    )


def tidied_from(message: Getter) -> Tidied | None:
    """None: nobody asked for it, or the daemon does not know it."""
    found = message.part("tidied")
    if not found.text("state"):
        return None
    return Tidied(
        state=found.text("state"),
        message=found.text_or_none("message"),
        directories=found.number("directories"),
        checkpoints=found.number("checkpoints"),
        trackers=found.number("trackers"),
        failed=found.number("failed"),
        seconds=found.real("seconds"),
    )


def last_verify_from(found: Getter) -> LastVerify | None:
    if not found.number("ended_ns"):
        return None
    return LastVerify(
        time=time_or_none(found.number("ended_ns")),
        structure_only=found.truth("structure_only"),
        complete=found.truth("complete"),
        errors=found.number("errors"),
        warnings=found.number("warnings"),
        kinds=found.texts("kinds"),
    )


def refused_writes_from(found: Getter) -> RefusedWrites | None:
    if not found.number("count"):
        return None
    return RefusedWrites(
        count=found.number("count"),
        since=time_or_none(found.number("since_ns")),
        last=time_or_none(found.number("last_ns")),
        needed_bytes=found.number("needed_bytes"),
    )


def transport_from(transport: Getter) -> Transport:
    return Transport(
        kind=transport.text("kind"),
        threads=transport.number("threads"),
        direct_mapping=transport.truth("direct_mapping"),
        reads=transport.number("reads"),
        writes=transport.number("writes"),
        calls=transport.number("calls"),
        forwarded=transport.number("forwarded"),
    )


def space_from(get: Getter) -> Space:
    return Space(
        size_bytes=get.number("size_bytes"),
        used_bytes=get.number("used_bytes"),
        free_bytes=get.number("free_bytes"),
        reserved_bytes=get.number("reserved_bytes"),
        incomplete_bytes=get.number("incomplete_bytes"),
        segment_size_bytes=get.number("segment_size_bytes"),
        segments=get.number("segments_total"),
        segments_free=get.number("segments_free"),
    )


def direct_from(direct: Getter) -> Direct:
    return Direct(**{field.name: direct.number(field.name) for field in dataclasses.fields(Direct)})


def recovery_from(recovery: Getter) -> Recovery:
    return Recovery(
        clean=recovery.truth("clean"),
        records=recovery.number("records"),
        seconds=round(recovery.real("seconds"), 6),
        mirror_used=recovery.number("mirror_used"),
        dirty_shutdown=recovery.truth("dirty_shutdown"),
        problems=recovery.texts("problems"),
        open_units=recovery.number("open_units"),
        open_unit_paths=recovery.texts("open_unit_paths"),
    )
