"""``cxlfs run``: start a program that stores into files of a mount by itself, without changing it.

A library (csrc/run) is loaded before libc; this finds it and becomes the program.

Never here: which calls go which way (csrc/run), storing.

Invariants
- The program takes this process over (its number, signals, descriptors), but where a report is
  wanted: then it is a child, signals are handed to it, and its exit code is this one's.
- Counts are in a file that all processes share: one that is killed has told what it did.
- What LD_PRELOAD held stays, behind the library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NoReturn

import click

from cxlfs.cli.common import CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import SIGNAL_BASE, epilog
from cxlfs.cli.output import Output, Report, Style, columns, document, quote
from cxlfs.errors import UsageError
from cxlfs.units import format_size

HELP = """Start PROGRAM, whose large writes go from its memory into the medium by themselves.

Writes of 1 MiB and more to files of 8 MiB and more are stored directly, at the speed of memory,
where the medium is mapped in large pages. Everything else is the kernel's, and means the same. The
program must run as root or as the user of the mount's daemon, since it opens the medium itself;
else all of its writes go through the kernel. Its children do the same. Statically linked programs,
and those with rights of their own, are not reached.

\b
Environment:
  CXLFS_RUN=off          everything through the kernel
  CXLFS_RUN_LOG=PATH     a line for each way that large writes of a process go (stderr: there)
  CXLFS_RUN_REPORT=PATH  a line of JSON at the end, as --report --json says it

\b
Examples:
  cxlfs run -- python train.py
  cxlfs run --report -- torchrun --nproc-per-node 8 train.py
  CXLFS_RUN_LOG=stderr cxlfs run -- python train.py
"""

_LIBRARY = "cxlfs._run"
_HANDED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ELF_HEADER = struct.Struct("=32xQ14xHH6x")
"""Of 64 bits: where its program headers are, how long one is, how many."""
_LOADED, _INTERPRETER = 1, 3
_PROGRAM_HEADERS_MAX = 1024
_OFFSET_MAX = (1 << 63) - 1
_COUNTS = struct.Struct("<4Q")
"""Bytes stored directly, bytes left to the kernel, leases, processes (csrc/run/run.h)."""
_REASON_BYTES = 96
_COUNTS_BYTES = 4096
"""Of the file in which all processes count: reasons follow the counts."""
_ASAN_OPTION = "verify_asan_link_order=0"
"""Programs with AddressSanitizer refuse to start behind another library without it."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunReport(Report):
    """How large writes of all processes of a program went; sizes in bytes."""

    schema: ClassVar[str] = "cxlfs.run/1"

    processes: int
    """Those that wrote in large pieces to a mount."""
    direct_bytes: int
    kernel_bytes: int
    """Of large writes to files of a mount, what went through the kernel."""
    leases: int
    reasons: tuple[str, ...]
    """Why the kernel got them."""

    def lines(self, _style: Style, /) -> Iterator[str]:
        yield from columns(
            [
                ("stored directly", format_size(self.direct_bytes)),
                ("through the kernel", f"{format_size(self.kernel_bytes)} in large writes"),
                ("leases", f"{self.leases}"),
                ("processes", f"{self.processes}"),
                *(("because", reason) for reason in self.reasons),
            ]
        )


@click.command(
    "run",
    help=HELP,
    context_settings={**CONTEXT_SETTINGS, "allow_interspersed_args": False},
    epilog=epilog(),
)
@click.option("--report", is_flag=True, help="Say at the end, on stderr, what was moved how.")
@click.argument("program", type=str)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@common_options
def command(program: str, arguments: Sequence[str], *, report: bool, as_json: bool) -> int:
    """See HELP."""
    path = find_program(program)
    output = Output(as_json=as_json, stdout=sys.stderr)  # stdout is the program's
    hint = why_not_reached(path)
    if hint is not None:
        output.warning(f"{quote(program)} {hint}: its calls go through the kernel")
    environment = environment_for(library_path(), os.environ)
    if report or os.environ.get("CXLFS_RUN_REPORT"):
        return _run_and_report(output if report else None, path, [program, *arguments], environment)
    sys.stderr.flush()
    return _become(path, [program, *arguments], environment)


def _become(path: str, arguments: list[str], environment: dict[str, str]) -> NoReturn:
    os.execve(path, arguments, environment)  # noqa: S606  no shell is wanted


def library_path() -> str:
    """Where the preloaded library lies. Raises UsageError when it was not built."""
    found = importlib.util.find_spec(_LIBRARY)
    if found is None or found.origin is None:
        raise UsageError("the library is missing", next_step="install cxlfs again")
    return found.origin


def environment_for(library: str, given: Mapping[str, str]) -> dict[str, str]:
    """What ``given`` is for a program that loads ``library`` first."""
    before = [
        part for part in given.get("LD_PRELOAD", "").replace(":", " ").split() if part != library
    ]
    options = [*filter(None, [given.get("ASAN_OPTIONS")]), _ASAN_OPTION]
    return {
        **given,
        "LD_PRELOAD": ":".join([library, *before]),
        "ASAN_OPTIONS": ":".join(options),
    }


def find_program(program: str) -> str:
    """The file of a program, as a shell finds it. Raises UsageError."""
    found = shutil.which(program)
    if found is not None:
        return found
    if Path(program).is_file():
        raise UsageError(
            f"{quote(program)} cannot be executed", next_step="chmod +x, or name its interpreter"
        )
    raise UsageError(
        f"{quote(program)} was not found", next_step="name a program in PATH, or its path"
    )


def why_not_reached(path: str) -> str | None:
    """Why the library is not loaded into a program; None when it is (or a script)."""
    with contextlib.suppress(OSError):
        mode = Path(path).stat().st_mode
        if mode & (stat.S_ISUID | stat.S_ISGID) and os.geteuid() != 0:
            return "has rights of its own (set-user-ID)"
        if is_static(path):
            return "is statically linked"
    return None


def is_static(path: str) -> bool:
    """An ELF file without an interpreter: no loader, and nothing that could be put before libc."""
    with Path(path).open("rb") as file:
        head = file.read(_ELF_HEADER.size)
        if len(head) < _ELF_HEADER.size or head[:5] != b"\x7fELF\x02":
            return False
        offset, size, count = _ELF_HEADER.unpack(head)
        if size < 4 or count > _PROGRAM_HEADERS_MAX:
            return False
        file.seek(min(offset, _OFFSET_MAX))
        table = file.read(size * count)
    kinds = {int.from_bytes(table[at : at + 4], sys.byteorder) for at in range(0, len(table), size)}
    return _LOADED in kinds and _INTERPRETER not in kinds


def _run_and_report(
    output: Output | None, path: str, arguments: list[str], environment: dict[str, str]
) -> int:
    with tempfile.TemporaryDirectory(prefix="cxlfs-run-") as directory:
        counts = begin_counting(Path(directory, "counts"))
        code = _run(path, arguments, {**environment, "CXLFS_RUN_COUNTS": str(counts)})
        report = summary(counts.read_bytes())
    besides = os.environ.get("CXLFS_RUN_REPORT")
    if besides:
        with Path(besides).open("a") as file:
            file.write(f"{document(report)}\n")
    if output is not None:
        output.report(report)
    return code


def begin_counting(path: Path) -> Path:
    """Make the file in which processes count, to be named by ``CXLFS_RUN_COUNTS``."""
    path.write_bytes(bytes(_COUNTS_BYTES))
    return path


def _run(path: str, arguments: list[str], environment: dict[str, str]) -> int:
    """Start, hand signals on, wait; the exit code."""
    before = {given: signal.getsignal(given) for given in (*_HANDED_ON, signal.SIGINT)}
    try:
        with subprocess.Popen(arguments, executable=path, env=environment) as child:
            signal.signal(signal.SIGINT, lambda _number, _frame: None)  # the terminal tells both
            for given in _HANDED_ON:
                signal.signal(given, lambda got, _frame: child.send_signal(got))
            code = child.wait()
    finally:
        for given, handler in before.items():
            signal.signal(given, handler)
    return code if code >= 0 else SIGNAL_BASE - code


def summary(counts: bytes) -> RunReport:
    """What the file says in which processes have counted."""
    direct_bytes, kernel_bytes, leases, processes = _COUNTS.unpack_from(counts)
    slots = range(_COUNTS.size, len(counts) - _REASON_BYTES, _REASON_BYTES)
    texts = (
        counts[at : at + _REASON_BYTES].split(b"\0")[0].decode("ascii", "replace") for at in slots
    )
    return RunReport(
        processes=processes,
        direct_bytes=direct_bytes,
        kernel_bytes=kernel_bytes,
        leases=leases,
        reasons=tuple(sorted({*texts} - {""})),
    )
