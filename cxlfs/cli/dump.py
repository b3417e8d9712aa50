"""``cxlfs dump``: structures of the media, decoded, for support.

Never here: decoding (``inspect``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style, quote
from cxlfs.cli.source import media_of
from cxlfs.errors import (
    BusyError,
    CorruptionError,
    MediaError,
    MediaUnavailableError,
    NotACxlfsError,
    UnsupportedFormatError,
    UsageError,
)
from cxlfs.media import Media
from cxlfs.store import Store, StoreOptions
from cxlfs.units import format_time_ns
from cxlfs.verify import inspect
from cxlfs.verify.inspect import Item, Value

HELP = """Show structures of the store on SOURCE as they lie on the media, good or damaged.

\b
WHAT is one of:
  superblock   the four copies
  roots        every slot of both rings; the newest good root counts
  segments     the header of every segment
  journal      the records that continue the newest image, and how the journal ends
  inode N      one inode: attributes, paths, extended attributes, where its content lies

Nothing is changed. All but "inode" also work while the store is mounted: what they show is then of
no single moment. With --json each structure is one line.

\b
Examples:
  cxlfs dump /dev/dax0.0 superblock
  cxlfs dump store.cxlfs journal --json | jq -c '.operations[]'
  cxlfs dump store.cxlfs inode 42
"""

_STRUCTURES: dict[str, Callable[[Media], Iterator[Item]]] = {
    "superblock": inspect.superblock_copies,
    "roots": inspect.root_slots,
    "segments": inspect.segment_headers,
    "journal": inspect.journal_records,
}
_HEAD_KEYS = ("structure", "media_offset", "problem")
_ON_ONE_LINE = ("segment", "journal segment", "journal end")
_SEGMENT_KEYS = ("epoch", "copy_number", "first_lsn", "partner", "predecessor", "written_ns")


@dataclasses.dataclass(frozen=True, slots=True)
class Structure(Report):
    """One structure; in JSON its keys stand beside ``schema``."""

    schema: ClassVar[str] = "cxlfs.dump/1"

    item: Mapping[str, Value]

    def json_items(self) -> Iterator[tuple[str, object]]:
        yield from self.item.items()

    def lines(self, style: Style, /) -> Iterator[str]:
        offset, problem = self.item["media_offset"], self.item["problem"]
        place = f" at {offset:#x}" if isinstance(offset, int) else ""
        head = style.strong(str(self.item["structure"]) + place)
        if isinstance(problem, str):
            yield f"{head}  {style.bad('damaged')}: {problem}"
        elif self.item["structure"] in _ON_ONE_LINE or self.item.get("state") == "never written":
            yield f"{head}  {_words(_summary(self.item))}"
            return
        else:
            yield head
        rest = {key: value for key, value in self.item.items() if key not in _HEAD_KEYS}
        yield from _block(rest, "  ")


def _summary(item: Mapping[str, Value]) -> Mapping[str, Value]:
    """What fits on the line of a good structure that has little to say."""
    if item["structure"] == "root":
        return {key: item[key] for key in ("ring", "slot", "state")}
    if item["structure"] != "segment":
        return {key: value for key, value in item.items() if key not in _HEAD_KEYS}
    fields = item["fields"]
    if not isinstance(fields, dict) or not fields:
        return {"index": item["index"], "role": "never used"}
    kept = {key: value for key, value in fields.items() if key in _SEGMENT_KEYS and value != 0}
    return {
        "index": item["index"],
        "role": item["role"],
        **kept,
        "named_by_newest_root": item["named_by_newest_root"],
    }


def _block(fields: Mapping[str, Value], indent: str) -> Iterator[str]:
    """One line for each scalar, keys in a column; what is nested goes below, further in."""
    width = max((len(key) for key, value in fields.items() if not _is_nested(value)), default=0)
    for key, value in fields.items():
        if not _is_nested(value):
            yield f"{indent}{key:<{width}}  {_scalar(key, value)}"
        elif isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _block(value, indent + "  ")
        elif isinstance(value, list):
            yield f"{indent}{key}:"
            for item in value:
                yield from _entry(item, indent + "  ")


def _entry(item: Value, indent: str) -> Iterator[str]:
    """One element of a list: its scalars on a line, lists of structures below it."""
    if not isinstance(item, dict):
        yield f"{indent}- {_scalar('', item)}"
        return
    yield f"{indent}- {_words({k: v for k, v in item.items() if not _is_nested(v)})}"
    for key, value in item.items():
        if _is_nested(value) and isinstance(value, list):
            yield f"{indent}    {key}:"
            for inner in value:
                yield from _entry(inner, indent + "    ")


def _is_nested(value: Value) -> bool:
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], dict)
    return isinstance(value, dict) and bool(value)


def _words(fields: Mapping[str, Value]) -> str:
    return "  ".join(
        f"{key.removesuffix('_ns')}={_scalar(key, value, brief=True)}"
        for key, value in fields.items()
    )


def _scalar(key: str, value: Value, *, brief: bool = False) -> str:
    if value is None or value in ([], {}):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, bytes | str):
        return quote(value)
    if isinstance(value, int) and key.endswith("_ns"):
        return format_time_ns(value) if brief else f"{value} ({format_time_ns(value)})"
    if isinstance(value, int) and key.endswith("_offset"):
        return hex(value)
    if isinstance(value, int) and key == "mode":
        return oct(value)
    if isinstance(value, list):
        return " ".join(_scalar("", item) for item in value)
    return str(value)


@click.command(
    "dump",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(
        NotACxlfsError.exit_code,
        BusyError.exit_code,
        UnsupportedFormatError.exit_code,
        MediaError.exit_code,
        MediaUnavailableError.exit_code,
        CorruptionError.exit_code,
    ),
)
@click.argument("source", type=ANY_PATH)
@click.argument("what", type=click.Choice([*_STRUCTURES, "inode"]))
@click.argument("number", required=False, metavar="[N]")
@common_options
def command(source: str, what: str, number: str | None, *, as_json: bool) -> None:
    """See HELP."""
    output = Output(as_json=as_json)
    for item in structures(source, what, number):
        output.report(Structure(item))


def structures(source: str, what: str, number: str | None) -> Iterator[Item]:
    """The structures asked for. Raises UsageError and what opening the source raises."""
    if what != "inode":
        if number is not None:
            raise UsageError(f"{what} takes no number", next_step=f"cxlfs dump {source} {what}")
        with media_of(source, exclusive=False) as media:
            yield from _STRUCTURES[what](media)
        return
    ino = _ino(source, number)
    with media_of(source) as media:
        store = Store.open(media, StoreOptions(read_only=True))
        try:
            yield inspect.inode(store, ino)
        finally:
            store.close()


def _ino(source: str, number: str | None) -> int:
    if number is None or not number.isascii() or not number.isdigit():
        raise UsageError(
            "inode needs a number" if number is None else f"not an inode number: {number}",
            next_step=f"cxlfs dump {source} inode 1 (ls -i shows the numbers of files)",
        )
    return int(number)
