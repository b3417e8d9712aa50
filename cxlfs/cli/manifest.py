"""``cxlfs manifest``: write down what a checkpoint consists of, with checksums.

Never here: the format of a manifest, summing, signing (``checkpoint.tensors``).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import click

from cxlfs.checkpoint.model import ProblemError
from cxlfs.checkpoint.tensors import (
    Manifest,
    ManifestFile,
    ManifestTensor,
    Parent,
    manifest_of,
    read_manifest,
    sha256_lines,
)
from cxlfs.cli.common import ANY_PATH, CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import OK, epilog
from cxlfs.cli.inspect import INSPECT_EXIT_CODES
from cxlfs.cli.output import Output, Report, Style, quote
from cxlfs.cli.targets import check_target
from cxlfs.durable import write_durably
from cxlfs.errors import ManifestError, NotInspectableError, UsageError
from cxlfs.units import format_size

_MANIFEST = re.compile(rb'\{\s*"schema": "cxlfs\.manifest/')
_SHA256 = re.compile(rb"\\?[0-9a-f]{64}  ")
"""How files that were written before begin."""

HELP = """Write the manifest of the checkpoint at PATH: its files and tensors with type, shape,
place, bytes and CRC32C, its step, and the manifests that it was made from.

The manifest is JSON, one format for all formats of checkpoints (docs/inspect.md). Without --output
it goes to standard output. "cxlfs verify --manifest" compares a directory with it.

On a cxlfs mount the store knows the CRC32C of each file: with --no-tensors nothing is read. With
--sha256 the manifest has SHA-256 of each file, and FILE gets them in the form of sha256sum, with
names relative to the checkpoint's directory. --sign signs the manifest with a key of Ed25519 and
adds SHA-256 (needs the extra "sign").

\b
Examples:
  cxlfs manifest run/step-700 --output step-700.manifest
  cxlfs manifest run/step-700 --output step-700.manifest --parent step-600.manifest
  cxlfs manifest run/step-700 --output step-700.manifest --sha256 step-700.sha256
  cd run/step-700; sha256sum -c ../../step-700.sha256
  openssl genpkey -algorithm ed25519 -out key.pem
  openssl pkey -in key.pem -pubout -out public.pem
  cxlfs manifest run/step-700 --output step-700.manifest --sign key.pem
  cxlfs verify --manifest step-700.manifest run/step-700 --public-key public.pem
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Printed(Report):
    """The manifest itself, as it is in a file."""

    schema: ClassVar[str] = "cxlfs.manifest/1"

    id: str
    name: str
    is_directory: bool
    kind: str | None
    step: int | None
    made: str
    parents: tuple[Parent, ...]
    files: tuple[ManifestFile, ...]
    tensors: tuple[ManifestTensor, ...]
    signature: dict[str, str] | None

    @classmethod
    def of(cls, found: Manifest) -> Printed:
        return cls(
            found.id,
            found.name,
            found.is_directory,
            found.kind,
            found.step,
            found.made,
            found.parents,
            found.files,
            found.tensors,
            found.plain_signature,
        )

    def lines(self, _style: Style, /) -> Iterator[str]:
        plain = {"schema": self.schema, **dataclasses.asdict(self)}
        yield from json.dumps(plain, indent=1).splitlines()


@dataclasses.dataclass(frozen=True, slots=True)
class Written(Report):
    """A manifest that was written to a file."""

    schema: ClassVar[str] = "cxlfs.manifest_written/1"

    output: bytes
    id: str
    files: int
    tensors: int
    size_bytes: int
    sha256: bool
    signed: bool

    def lines(self, _style: Style, /) -> Iterator[str]:
        signed = ", signed" if self.signed else ""
        yield (
            f"wrote {quote(self.output)}{signed}: {self.tensors} tensors, "
            f"{format_size(self.size_bytes)} in {self.files} files"
        )


@click.command(
    "manifest",
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog=epilog(*INSPECT_EXIT_CODES, ManifestError.exit_code),
)
@click.argument("path", metavar="PATH", type=ANY_PATH)
@click.option("--output", "-o", metavar="FILE", type=ANY_PATH, help="Write the manifest there.")
@click.option("--sha256", metavar="FILE", type=ANY_PATH, help="Write SHA-256 as sha256sum does.")
@click.option("--no-tensors", is_flag=True, help="Name files alone.")
@click.option(
    "--parent",
    "parents",
    metavar="MANIFEST",
    type=ANY_PATH,
    multiple=True,
    help="Name a manifest that the checkpoint was made from.",
)
@click.option("--sign", metavar="KEY", type=ANY_PATH, help="Sign with a private key (PEM).")
@common_options
def command(
    path: str,
    output: str | None,
    sha256: str | None,
    parents: tuple[str, ...],
    sign: str | None,
    *,
    no_tensors: bool,
    as_json: bool,
) -> int:
    """See HELP."""
    said = Output(as_json=as_json)
    check_target(output, _MANIFEST, "manifest")
    check_target(sha256, _SHA256, "list of SHA-256")
    if sha256 is not None and output is not None and Path(output) == Path(sha256):
        raise UsageError("both files have one name", next_step="name another one")
    made_from = [_parent(Path(each)) for each in parents]
    written = [Path(each) for each in (output, sha256) if each is not None]
    try:
        found = manifest_of(
            Path(os.path.normpath(Path.cwd() / path)),
            with_tensors=not no_tensors,
            with_sha256=sha256 is not None or sign is not None,
            parents=made_from,
            left_out=written,
        )
    except ProblemError as error:
        raise NotInspectableError(f"cannot look inside {path}: {error}") from error
    if sign is not None:
        found = found.signed(Path(sign))
    data = found.encode()
    if sha256 is not None:
        write_durably(Path(sha256), os.fsencode(sha256_lines(found.files)))
    if output is None:
        said.report(Printed.of(found))
        return OK
    write_durably(Path(output), data)
    said.report(
        Written(
            output=os.fsencode(output),
            id=found.id,
            files=len(found.files),
            tensors=len(found.tensors),
            size_bytes=found.size_bytes,
            sha256=sha256 is not None or sign is not None,
            signed=sign is not None,
        )
    )
    return OK


def _parent(path: Path) -> Parent:
    found = read_manifest(path)
    return Parent(found.name, found.step, found.id)
