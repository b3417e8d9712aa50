"""``cxlfs drain``: a checkpoint into an object store, and verified there.

Never here: how it is put and verified (``tier``).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import click

from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style, quote
from cxlfs.cli.progress import Progress
from cxlfs.errors import (
    CheckpointExistsError,
    NotSendableError,
    TierFullError,
    TierUnavailableError,
    TierUntrustedError,
)
from cxlfs.tier import Drained, Options, drain, keep_newest, note, open_bucket
from cxlfs.units import format_size, parse_size

HELP = """Put the checkpoint DIR (a directory or a file, on a store or not) into the object store at
URL, under its name: each file one object, and behind them a manifest. It is in the tier when that
is there, and that is put when every object was verified.

Called again it goes on where it broke off. The bucket is tried first: one that accepts a second
create of the same name, loses what was put, or does not list it, is refused. What it has is
compared by the MD5 that its entity tags are, or read back where they are none.

\b
Examples:
  cxlfs drain /mnt/ckpt/run1/step-100 s3://bucket/run1
  cxlfs drain "$(cxlfs good /mnt/ckpt/run1)" s3://bucket/run1 --keep 5 --rate 200M
  cxlfs drain step-100 file:///mnt/nas/run1
"""


@dataclasses.dataclass(frozen=True, slots=True)
class DrainReport(Report):
    """What is in the tier now."""

    schema: ClassVar[str] = "cxlfs.drain/1"

    path: bytes
    url: str
    files: int
    size_bytes: int
    sent_files: int
    sent_bytes: int
    found_files: int
    verified: str
    conditional_create: bool
    removed: tuple[str, ...]
    recorded: bool

    def lines(self, style: Style, /) -> Iterator[str]:
        yield f"{style.good('drained')}: {quote(self.url)}"
        how = "by the server's MD5" if self.verified == "md5" else "by reading it back"
        sent = f"{format_size(self.sent_bytes)} of {format_size(self.size_bytes)} sent"
        yield f"    {self.files} files, {sent}, verified {how}"
        for name in self.removed:
            yield f"    removed there: {quote(name)}"


class _Size(click.ParamType[int]):
    name = "size"

    def convert(
        self, value: str | int, _parameter: click.Parameter | None, _context: click.Context | None
    ) -> int:
        return value if isinstance(value, int) else parse_size(value.removesuffix("/s"))


@click.command(
    "drain",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(
        NotSendableError.exit_code,
        CheckpointExistsError.exit_code,
        TierUnavailableError.exit_code,
        TierFullError.exit_code,
        TierUntrustedError.exit_code,
    ),
)
@click.argument("directory", metavar="DIR", type=ANY_PATH)
@click.argument("url", metavar="URL")
@click.option("--rate", type=_Size(), metavar="SIZE", help="No more bytes a second than these.")
@click.option(
    "--parallel",
    type=click.IntRange(min=1, max=64),
    default=4,
    metavar="N",
    help="So many files at a time, and parts of each (4).",
)
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    metavar="N",
    help="Then remove all there but the newest N that are whole. Without it nothing is removed.",
)
@click.option("--read-back", is_flag=True, help="Compare by reading, whatever the server tells.")
@click.option(
    "--single-writer",
    is_flag=True,
    help="Take a bucket that accepts a second create: nobody else drains there, you say.",
)
@click.option(
    "--take-over",
    is_flag=True,
    help="Go on where a drain of another content of that name was given up.",
)
@common_options
def command(
    directory: str,
    url: str,
    rate: int | None,
    parallel: int,
    keep: int | None,
    *,
    read_back: bool,
    single_writer: bool,
    take_over: bool,
    as_json: bool,
) -> None:
    """See HELP."""
    output = Output(as_json=as_json)
    progress = Progress(output)
    path = Path(directory).absolute()
    bucket = open_bucket(url)
    options = Options(
        bytes_per_second=rate or None,
        parallel=parallel,
        read_back=read_back,
        single_writer=single_writer,
        take_over=take_over,
    )
    done = drain(path, bucket, options, progress=progress)
    recorded = True
    try:
        note(path, Drained(done.url, done.manifest.content_id))
    except OSError as error:
        recorded = False
        output.warning(f"{quote(str(path))}: that it was drained is not recorded: {error.strerror}")
    removed = [] if keep is None else keep_newest(bucket, done.manifest.name, keep)
    progress.clear()
    output.report(
        DrainReport(
            path=os.fsencode(path),
            url=done.url,
            files=len(done.manifest.files),
            size_bytes=done.manifest.size_bytes,
            sent_files=done.sent_files,
            sent_bytes=done.sent_bytes,
            found_files=done.found_files,
            verified=done.verified,
            conditional_create=done.trust.creates,
            removed=tuple(removed),
            recorded=recorded,
        )
    )
