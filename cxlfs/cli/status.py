"""``cxlfs status``: the state of a store, what is wrong with it, and what to do about it.

Never here: counting (``store``), decoding (``inspect``).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import ClassVar, Self

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import OK, epilog
from cxlfs.cli.mounts import for_each_mount
from cxlfs.cli.output import Output, Report, Style, columns, quote, quote_first, time_or_none
from cxlfs.cli.status_parts import (
    Activity,
    Contents,
    Direct,
    Errors,
    Getter,
    Journal,
    LastVerify,
    Media,
    Options,
    Recovery,
    RefusedWrites,
    Space,
    Tidied,
    Transport,
    direct_from,
    last_verify_from,
    media_from,
    options_from,
    recovery_from,
    refused_writes_from,
    space_from,
    tidied_from,
    transport_from,
)
from cxlfs.cli.target import OPEN_EXIT_CODES, served_by
from cxlfs.control.client import control_request
from cxlfs.control.discovery import Registration
from cxlfs.errors import CxlfsError
from cxlfs.units import format_duration, format_size

HELP = """Show the state of the store on SOURCE, or of the one mounted on MOUNTPOINT; without
either, of every store that is mounted.

A mounted store is asked through its daemon; any other is opened read-only, and nothing on it
changes. When something is wrong, "status" says what, and "action" what to do.

\b
States:
  ONLINE       mounted and in order
  OFFLINE      not mounted, and in order
  READ-ONLY    mounted, but nothing can be changed
  NEEDS-CHECK  damage was seen: run cxlfs verify

\b
Examples:
  cxlfs status
  cxlfs status /mnt/ckpt
  cxlfs status /dev/dax0.0 --json
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Status(Report):
    """Everything that ``cxlfs status`` shows."""

    schema: ClassVar[str] = "cxlfs.status/1"

    source: bytes
    mountpoint: bytes | None
    pid: int | None
    log_path: bytes | None
    uuid: str
    label: str
    format_version: int
    state: str
    status: str | None
    action: str | None
    read_only: bool
    media: Media
    options: Options | None
    weakened: tuple[str, ...]
    """What this mount does not promise, or its source cannot."""
    transport: Transport | None
    direct: Direct | None
    space: Space
    journal: Journal
    contents: Contents
    errors: Errors
    damaged_files: int
    damaged_paths: tuple[str, ...]
    last_verify: LastVerify | None
    refused_writes: RefusedWrites | None
    activity: Activity
    recovery: Recovery
    tidied: Tidied | None
    """What became of unfinished checkpoints at mounting; None: that was not asked for."""

    @classmethod
    def from_message(cls, item: Mapping[str, object], daemon: Registration | None) -> Self:
        """From what ``inspect.status`` gives, here or through the control socket."""
        get = Getter(item)
        media = get.part("media")
        source = media.text("path") if daemon is None else daemon.source
        state, status, action = _judge(get, source, daemon)
        options = None if daemon is None else options_from(get.part("options"))
        return cls(
            source=os.fsencode(source),
            mountpoint=None if daemon is None else os.fsencode(daemon.mountpoint),
            pid=None if daemon is None else daemon.pid,
            log_path=os.fsencode(daemon.log_path) if daemon and daemon.log_path else None,
            uuid=get.text("uuid"),
            label=get.text("label"),
            format_version=get.number("format_version"),
            state=state,
            status=status,
            action=action,
            read_only=get.truth("read_only"),
            media=media_from(media),
            options=options,
            weakened=get.texts("weakened"),
            transport=None if daemon is None else transport_from(get.part("transport")),
            direct=None if daemon is None else direct_from(get.part("direct")),
            space=space_from(get),
            journal=Journal(
                used_bytes=get.number("journal_used_bytes"),
                size_bytes=get.number("journal_size_bytes"),
                last_commit=get.number("last_lsn"),
                last_commit_time=time_or_none(get.number("last_commit_time_ns")),
                generation=get.number("generation"),
            ),
            contents=Contents(
                get.number("files"), get.number("directories"), get.number("open_files")
            ),
            errors=Errors(
                get.number("checksum_errors"),
                get.number("media_errors"),
                get.number("no_space_errors"),
            ),
            damaged_files=get.number("damaged_files"),
            damaged_paths=get.texts("damaged_paths"),
            last_verify=last_verify_from(get.part("last_verify")),
            refused_writes=refused_writes_from(get.part("refused_writes")),
            activity=Activity(
                **{field.name: get.number(field.name) for field in dataclasses.fields(Activity)}
            ),
            recovery=recovery_from(get.part("recovery")),
            tidied=tidied_from(get),
        )

    def lines(self, style: Style, /) -> Iterator[str]:
        rows = [
            ("store", f"{quote(self.label) or '(no label)'}  {self.uuid}"),
            ("state", _painted(self.state, style)),
        ]
        if self.status is not None:
            rows.append(("status", self.status))
        if self.action is not None:
            rows.append(("action", self.action))
        rows.append(("source", quote(self.source)))
        if self.mountpoint is not None:
            rows.append(("mount", f"{quote(self.mountpoint)}, process {self.pid}"))
        rows += [("caution", style.warning(text)) for text in self.weakened]
        rows += [
            ("media", _media_text(self.media)),
            *([("transport", _transport_text(self.transport))] if self.transport else []),
            *([("direct", text)] if (text := _direct_text(self.direct)) else []),
            ("space", _space_text(self.space)),
            ("journal", _journal_text(self.journal)),
            ("contents", _contents_text(self.contents, self.space)),
            ("recovery", _recovery_text(self.recovery)),
            *([("tidied", quote(self.tidied.words))] if self.tidied else []),
            ("errors", _errors_text(self.errors)),
            ("verified", _verified_text(self.last_verify)),
        ]
        yield from columns(rows)


def _judge(
    get: Getter, source: str, daemon: Registration | None
) -> tuple[str, str | None, str | None]:
    """State, status and action."""
    state, reason = get.text("state"), get.text_or_none("reason")
    target = source if daemon is None else daemon.mountpoint
    if state == "NEEDS-CHECK":
        if get.number("damaged_files"):
            action = f"save them again, or delete them; cxlfs verify {target} names every one"
            return state, reason, action
        return state, reason, f"run: cxlfs verify {target}"
    if daemon is None:
        return _judge_offline(get, source)
    if state == "READ-ONLY":
        return state, reason, _read_only_action(get, source, daemon)
    if get.number("media_errors"):
        return "NEEDS-CHECK", "the media failed while reading", f"run: cxlfs verify {target}"
    refused = refused_writes_from(get.part("refused_writes"))
    if refused is not None:
        status = (
            f"{_count(refused.count, 'write')} {'was' if refused.count == 1 else 'were'} refused "
            f"for want of space since {refused.since}; nothing that was committed is lost"
        )
        return state, status, _room_action(refused)
    return state, None, None


def _room_action(refused: RefusedWrites) -> str:
    if not refused.needed_bytes:
        return "delete checkpoints that are no longer needed"
    needed = format_size(refused.needed_bytes)
    return f"delete checkpoints that are no longer needed, until {needed} are free"


def _judge_offline(get: Getter, source: str) -> tuple[str, str | None, str | None]:
    clean = get.part("recovery").truth("clean")
    status = "not mounted; closed cleanly"
    if not clean:
        status = "not mounted; not closed cleanly: the next mount recovers it"
    return "OFFLINE", status, f"to use it: cxlfs mount {source} MOUNTPOINT"


def _read_only_action(get: Getter, source: str, daemon: Registration) -> str:
    mountpoint = daemon.mountpoint
    if get.text("reason") == "it was opened read-only":
        return f"to write: cxlfs umount {mountpoint}; cxlfs mount {source} {mountpoint}"
    if get.text("reason") == "it was remounted read-only":
        return f"to write: mount -o remount,rw {mountpoint}"
    log = "the log" if daemon.log_path is None else f"the log {daemon.log_path}"
    return f"read {log}, then unmount and run: cxlfs verify {source}"


def _transport_text(transport: Transport) -> str:
    if transport.kind != "native":
        return f"{transport.kind} serves file data in Python's thread"
    cache = "page cache bypassed" if transport.direct_mapping else "page cache for mappings"
    return f"native, {_count(transport.threads, 'thread')}, {cache}"


def _direct_text(direct: Direct | None) -> str:
    """Nothing where no program ever wrote or mapped a file by itself."""
    if direct is None:
        return ""
    parts = []
    if direct.writes:
        parts.append(f"{format_size(direct.bytes_written)} written by programs themselves")
    if direct.files:
        parts.append(f"{_count(direct.files, 'file')} being written so")
    if direct.mapped_files:
        parts.append(f"{_count(direct.mapped_files, 'file')} mapped")
    if direct.verified_contents:
        parts.append(f"{_count(direct.verified_contents, 'content')} verified lately")
    if direct.apart_bytes:
        parts.append(f"{format_size(direct.apart_bytes)} wait for their program to end")
    if direct.segments_held:
        held = _count(direct.segments_held, "segment")
        parts.append(f"{held} held for programs of a daemon before")
    return ", ".join(parts)


def _painted(state: str, style: Style) -> str:
    if state == "ONLINE":
        return style.good(state)
    return style.bad(state) if state == "NEEDS-CHECK" else style.warning(state)


def _media_text(media: Media) -> str:
    parts = [
        f"{media.kind}, {format_size(media.size_bytes)}",
        f"{media.granularity} granularity",
        f"write-back {media.write_back}",
    ]
    if media.persistence_domain is not None:
        parts.append(f"persistence domain {media.persistence_domain}")
    if media.dirty_shutdowns is not None:
        parts.append(f"{media.dirty_shutdowns} dirty shutdowns")
    parts.append(_pages_text(media))
    return ", ".join(parts)


def _pages_text(media: Media) -> str:
    if media.page_size_bytes is None:
        return "page size unknown"
    text = f"{format_size(media.page_size_bytes)} pages"
    if media.huge_page_share and media.huge_page_share < 1:
        text += f" for {100 * media.huge_page_share:.0f}% of what is mapped"
    return text


def _space_text(space: Space) -> str:
    total = space.used_bytes + space.free_bytes
    percent = 100 * space.used_bytes // total if total else 0
    return (
        f"{format_size(space.used_bytes)} used ({percent}%), {format_size(space.free_bytes)} free, "
        f"{format_size(space.reserved_bytes)} reserved, of {format_size(space.size_bytes)}"
    )


def _journal_text(journal: Journal) -> str:
    when = "" if journal.last_commit_time is None else f" at {journal.last_commit_time}"
    return (
        f"{format_size(journal.used_bytes)} of {format_size(journal.size_bytes)} used, "
        f"last commit {journal.last_commit}{when}"
    )


def _contents_text(contents: Contents, space: Space) -> str:
    text = f"{_count(contents.files, 'file')}, {_count(contents.directories, 'director')}"
    if space.incomplete_bytes:
        text += f", {format_size(space.incomplete_bytes)} of incomplete versions kept aside"
    return text


def _count(number: int, noun: str) -> str:
    if noun.endswith("r"):
        return f"{number} {noun}{'y' if number == 1 else 'ies'}"
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _recovery_text(recovery: Recovery) -> str:
    took = format_duration(recovery.seconds)
    if recovery.clean:
        text = f"not needed (opened in {took})"
        return text + _open_units_text(recovery)
    text = f"{_count(recovery.records, 'journal record')} replayed in {took}"
    if recovery.mirror_used:
        text += f", {recovery.mirror_used} of them from the mirror"
    return text + _open_units_text(recovery)


def _open_units_text(recovery: Recovery) -> str:
    if not recovery.open_units:
        return ""
    return f"; left unfinished: {quote_first(recovery.open_unit_paths, recovery.open_units)}"


def _errors_text(errors: Errors) -> str:
    named = [
        (errors.checksum, "checksum"),
        (errors.media, "media"),
        (errors.no_space, "out of space"),
    ]
    return ", ".join(f"{count} {name}" for count, name in named if count) or "none"


def _verified_text(last: LastVerify | None) -> str:
    if last is None:
        return "never"
    what = "structures" if last.structure_only else "structures and data"
    if not last.complete:
        what += ", but not all of it"
    found = last.errors + last.warnings
    if not found:
        return f"{last.time}, clean ({what})"
    return f"{last.time}, {_count(found, 'finding')} ({what}): {', '.join(last.kinds)}"


@click.command(
    "status",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(*OPEN_EXIT_CODES),
)
@click.argument("target", metavar="[SOURCE|MOUNTPOINT]", type=ANY_PATH, required=False)
@common_options
def command(target: str | None, *, as_json: bool) -> int:
    """See HELP."""
    output = Output(as_json=as_json)
    if target is not None:
        output.report(look(target))
        return OK
    return for_each_mount(output, look)


def look(target: str) -> Status:
    """The status of a store, mounted or not."""
    daemon = served_by(target)
    if daemon is not None:
        for message in control_request(daemon.mountpoint, "status"):
            return Status.from_message(message, daemon)
        raise CxlfsError("the daemon gave no status", next_step="look at its log")
    # Only where a store is opened: asking a daemon takes 50 ms of the processor, loading numpy 150.
    from cxlfs.cli.source import store_of  # noqa: PLC0415
    from cxlfs.media.room import VOLATILE_TEXT  # noqa: PLC0415
    from cxlfs.verify import inspect  # noqa: PLC0415

    with store_of(target) as store:
        found = Status.from_message(inspect.status(store), None)
        weakened = (VOLATILE_TEXT,) if store.media.volatile else ()
        return dataclasses.replace(found, weakened=weakened)
