"""Units for systemd: what a mount as a service needs on disk, and how systemd writes names.

Never here: running systemctl, printing, deciding what is mounted.

Invariants
- The program is named by its absolute path: a service has no PATH of a virtual environment.
- A file that was not written by this module is never replaced or removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.resources
import os
import sys
from pathlib import Path

from cxlfs.errors import CxlfsError, OccupiedError, UsageError

UNIT_NAME = "cxlfs@.service"
_UNITS = Path("etc/systemd/system")
_CONFIGURATIONS = Path("etc/cxlfs")
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789:_.")
_NEEDS_ROOT = "run it as root (sudo)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFiles:
    """The two files of one instance; contents are text."""

    instance: str
    unit_path: Path
    unit: str
    configuration_path: Path
    configuration: str

    @property
    def service(self) -> str:
        """What systemctl calls it."""
        return UNIT_NAME.replace("@", f"@{self.instance}")


def instance_of(mountpoint: str) -> str:
    """The path as ``systemd-escape --path`` writes it (systemd.unit(5), string escaping)."""
    path = os.path.normpath(mountpoint)
    if not path.startswith("/"):
        raise UsageError(f"not an absolute path: {mountpoint}")
    words = os.fsencode(path.strip("/"))
    if not words:
        return "-"
    escaped = [_escaped(byte, first=position == 0) for position, byte in enumerate(words)]
    return "".join(escaped)


def _escaped(byte: int, *, first: bool) -> str:
    character = chr(byte)
    if character == "/":
        return "-"
    if character in _PLAIN and not (first and character == "."):
        return character
    return f"\\x{byte:02x}"


def program_path() -> str:
    """The installed program, by its absolute path. Raises CxlfsError."""
    for candidate in (Path(sys.argv[0]), Path(sys.executable).with_name("cxlfs")):
        if candidate.name == "cxlfs" and os.access(candidate, os.X_OK) and candidate.is_file():
            return os.path.abspath(candidate)  # noqa: PTH100  a link of an environment stays one
    raise CxlfsError(
        "the program cxlfs is not installed beside this Python",
        next_step="install the package (pip install .), and run the program that it installs",
    )


def service_files(
    source: str, mountpoint: str, options: str, *, program: str, root: Path
) -> ServiceFiles:
    """What ``install`` writes below ``root``. Raises UsageError."""
    for text in (source, options):
        if not text.isprintable():
            raise UsageError("a control character cannot be written into a configuration")
    instance = instance_of(mountpoint)
    template = importlib.resources.files("cxlfs.daemon").joinpath(UNIT_NAME)
    quoted = _quoted(program.replace("%", "%%"))
    return ServiceFiles(
        instance=instance,
        unit_path=root / _UNITS / UNIT_NAME,
        unit=template.read_text(encoding="utf-8").replace("@PROGRAM@", quoted),
        configuration_path=root / _CONFIGURATIONS / f"{instance}.conf",
        configuration=f"{_MARK}\nSOURCE={_quoted(source)}\nOPTIONS={_quoted(options)}\n",
    )


_MARK = '# Written by "cxlfs service install"'


def _quoted(text: str) -> str:
    """As systemd.exec(5) and systemd.syntax(7) read it in an environment file or a command."""
    return '"' + "".join(f"\\{c}" if c in '"\\`$' else c for c in text) + '"'


def install(files: ServiceFiles) -> list[Path]:
    """Write the files; returns those that changed. Raises OccupiedError, CxlfsError."""
    contents = (
        (files.unit_path, files.unit),
        (files.configuration_path, files.configuration),
    )
    for path, _ in contents:
        _refuse_others(path)
    return [path for path, text in contents if _write(path, text)]


def remove(instance: str, *, root: Path, dry_run: bool) -> list[Path]:
    """Remove an instance's configuration and, with the last one, the unit; returns what went.

    Raises OccupiedError, CxlfsError.
    """
    configurations = root / _CONFIGURATIONS
    configuration = configurations / f"{instance}.conf"
    gone = [configuration] if configuration.exists() else []
    others = [path for path in configurations.glob("*.conf") if path != configuration]
    unit = root / _UNITS / UNIT_NAME
    if not others and unit.exists():
        gone.append(unit)
    for path in gone:
        _refuse_others(path)
    if not dry_run:
        for path in gone:
            with _explained(path):
                path.unlink()
        with contextlib.suppress(OSError):
            configurations.rmdir()
    return gone


def _refuse_others(path: Path) -> None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise CxlfsError(f"{path}: {error.strerror}", next_step=_NEEDS_ROOT) from error
    if "cxlfs service install" not in text:
        raise OccupiedError(
            f'{path} was not written by "cxlfs service install"',
            next_step="look at it, and move it away first",
        )


def _write(path: Path, text: str) -> bool:
    """False: it says so already. Replaced in one step."""
    with _explained(path):
        if path.exists() and path.read_text(encoding="utf-8") == text:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.new")
        beside.write_text(text, encoding="utf-8")
        beside.chmod(0o644)
        beside.replace(path)
    return True


class _explained(contextlib.AbstractContextManager["_explained"]):  # noqa: N801  used like a function
    """An OSError inside becomes a CxlfsError with its next step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError):
            raise CxlfsError(f"{self._path}: {error.strerror}", next_step=_NEEDS_ROOT) from error
