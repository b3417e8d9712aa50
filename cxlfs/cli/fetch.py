"""``cxlfs fetch``: a checkpoint back from an object store.

Never here: how it is read and named (``tier``).
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
    BusyError,
    CheckpointExistsError,
    NoSpaceError,
    NotInTierError,
    TierUnavailableError,
    TierUntrustedError,
)
from cxlfs.tier import Drained, fetch, newest, note, open_bucket, split_url
from cxlfs.units import format_size

HELP = """Bring the checkpoint at URL, which "cxlfs drain" put there, back into DIR, under its name.

Every byte is compared with the manifest, and durable, before the checkpoint gets its name, in one
step. When it breaks off, DIR is as it was; what had come whole is kept in DIR/.cxlfs-receiving, and
is not asked for again.

\b
Examples:
  cxlfs fetch s3://bucket/run1/step-100 /mnt/ckpt/run1
  cxlfs fetch --newest s3://bucket/run1 /mnt/ckpt/run1
"""


@dataclasses.dataclass(frozen=True, slots=True)
class FetchReport(Report):
    """What was brought."""

    schema: ClassVar[str] = "cxlfs.fetch/1"

    path: bytes
    url: str
    files: int
    size_bytes: int
    fetched_bytes: int
    kept_files: int

    def lines(self, style: Style, /) -> Iterator[str]:
        yield f"{style.good('fetched')}: {quote(self.path)}"
        kept = f", {self.kept_files} of them had come before" if self.kept_files else ""
        yield f"    {self.files} files, {format_size(self.size_bytes)}{kept}"


@click.command(
    "fetch",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(
        BusyError.exit_code,
        NoSpaceError.exit_code,
        CheckpointExistsError.exit_code,
        TierUnavailableError.exit_code,
        TierUntrustedError.exit_code,
        NotInTierError.exit_code,
    ),
)
@click.argument("url", metavar="URL")
@click.argument("directory", metavar="DIR", type=ANY_PATH)
@click.option("--newest", "is_newest", is_flag=True, help="URL holds checkpoints: the newest one.")
@click.option("--replace", is_flag=True, help="A checkpoint of that name goes, in the same step.")
@click.option(
    "--parallel",
    type=click.IntRange(min=1, max=64),
    default=4,
    metavar="N",
    help="So many files at a time (4).",
)
@common_options
def command(
    url: str, directory: str, parallel: int, *, is_newest: bool, replace: bool, as_json: bool
) -> None:
    """See HELP."""
    output = Output(as_json=as_json)
    progress = Progress(output)
    above, name = (url.rstrip("/"), "") if is_newest else split_url(url)
    bucket = open_bucket(above)
    name = name or newest(bucket)
    path = Path(directory).absolute()
    done = fetch(bucket, name, path, replace=replace, parallel=parallel, progress=progress)
    progress.clear()
    try:
        note(done.path, Drained(bucket.url_of(name), done.manifest.content_id))
    except OSError as error:
        output.warning(f"{quote(str(path))}: where it came from is not recorded: {error.strerror}")
    output.report(
        FetchReport(
            path=os.fsencode(done.path),
            url=bucket.url_of(name),
            files=len(done.manifest.files),
            size_bytes=done.manifest.size_bytes,
            fetched_bytes=done.fetched_bytes,
            kept_files=done.kept_files,
        )
    )
