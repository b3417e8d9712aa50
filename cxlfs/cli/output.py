"""The only place that prints: reports as text or JSON on stdout, messages on stderr.

Never here: what a verb does, exit codes, where a report's numbers come from.

Invariants
- Text and JSON come from the same dataclass: a key is a field, so every key is always there (null
  when not known), sizes are integers in bytes, times are RFC 3339 in UTC.
- A ``bytes`` field is a path or a name: text in JSON, and where it is not UTF-8 a second key with
  ``_b64`` at the end holds it exactly.
- With --json stdout holds JSON documents only, one on a line, and a failure ends in ``exit_error``.
- Names from a store are shown with control characters escaped: they never steer the terminal. What
  is said on stderr is escaped here once more, whoever made it: messages hold names, too.
- Colour is used on a terminal only, and not when NO_COLOR is set (https://no-color.org).
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, TextIO

from cxlfs.units import format_time_ns, printable

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

_COLOURS = {"good": "32", "warning": "33", "bad": "31", "strong": "1"}


@dataclasses.dataclass(frozen=True, slots=True)
class Style:
    """How words are set off from others: not at all unless ``colour``. ``width``: characters of a
    line of the terminal; None: it is none, and lines may be as long as they are.
    """

    colour: bool = False
    width: int | None = None

    def good(self, text: str) -> str:
        return self._paint("good", text)

    def warning(self, text: str) -> str:
        return self._paint("warning", text)

    def bad(self, text: str) -> str:
        return self._paint("bad", text)

    def strong(self, text: str) -> str:
        return self._paint("strong", text)

    def _paint(self, name: str, text: str) -> str:
        return f"\x1b[{_COLOURS[name]}m{text}\x1b[0m" if self.colour else text


class Report:
    """Base of everything that a verb says: a dataclass with a schema, and its text."""

    schema: ClassVar[str]
    message_type: ClassVar[str | None] = None
    """Set where a verb writes several documents: what kind this one is."""

    def lines(self, _style: Style, /) -> Iterator[str]:
        """The text, line by line."""
        raise NotImplementedError

    def json_items(self) -> Iterator[tuple[str, object]]:
        """The keys of the document behind ``schema``: the fields."""
        yield from _fields(self)


def quote(name: bytes | str) -> str:
    """A path or name as a person reads it: control characters, backslashes and what is not UTF-8
    are escaped as in C (hexadecimal); everything else stays.
    """
    text = os.fsdecode(name) if isinstance(name, bytes) else name
    return printable(text.replace("\\", "\\\\"))


def quote_first(names: Sequence[str], count: int) -> str:
    """Return names for a message; ``names`` are the first of ``count``."""
    text, more = ", ".join(quote(name) for name in names), count - len(names)
    return f"{text} and {more} more" if more > 0 else text


def time_or_none(time_ns: int | None) -> str | None:
    """RFC 3339 in UTC; None for a time that is not known."""
    return format_time_ns(time_ns) if time_ns is not None and time_ns > 0 else None


def columns(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """``key: value`` with the keys flush right, the way zpool status does."""
    pairs = list(rows)
    width = max((len(key) for key, _ in pairs), default=0)
    for key, value in pairs:
        yield f"{key:>{width}}: {value}"


def to_json(value: object) -> Json:
    """The JSON form of a report or of one of its values; see the module's invariants."""
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if dataclasses.is_dataclass(value):
        return _object(_fields(value))
    if isinstance(value, Mapping):
        return _object(value.items())
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, Iterable):
        return [to_json(item) for item in value]
    raise TypeError(f"no JSON form for {type(value).__name__}")


def _fields(value: object) -> list[tuple[str, object]]:
    names = [] if isinstance(value, type) else [f.name for f in dataclasses.fields(value)]  # type: ignore[arg-type]
    return [(name, getattr(value, name)) for name in names]


def _object(items: Iterable[tuple[str, object]]) -> dict[str, Json]:
    result: dict[str, Json] = {}
    for key, value in items:
        result[key] = to_json(value)
        if isinstance(value, bytes) and not _is_utf8(value):
            result[f"{key}_b64"] = base64.b64encode(value).decode("ascii")
    return result


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def document(report: Report) -> str:
    """The report as one line of JSON."""
    items: list[tuple[str, object]] = [("schema", report.schema)]
    if report.message_type is not None:
        items.append(("message_type", report.message_type))
    return json.dumps(_object([*items, *report.json_items()]), ensure_ascii=False)


@dataclasses.dataclass(frozen=True, slots=True)
class ExitError(Report):
    """The last document of a command that failed."""

    schema: ClassVar[str] = "cxlfs.exit_error/1"
    message_type: ClassVar[str | None] = "exit_error"

    command: str
    """As typed, without its arguments: ``cxlfs mkfs``, ``mount.cxlfs``."""
    id: str
    exit_code: int
    message: str
    next_step: str

    def lines(self, style: Style, /) -> Iterator[str]:
        yield f"{style.strong(self.command)}: {printable(self.message)}"
        yield f"next: {printable(self.next_step)}"


class Output:
    """Where one command writes. ``as_json`` decides the form of everything it says."""

    def __init__(
        self, *, as_json: bool, stdout: TextIO | None = None, stderr: TextIO | None = None
    ) -> None:
        self.as_json = as_json
        self.stdout = stdout if stdout is not None else sys.stdout
        self.stderr = stderr if stderr is not None else sys.stderr

    @property
    def shows_progress(self) -> bool:
        """A person watches: stderr is a terminal that can rewrite a line."""
        return not self.as_json and _is_terminal(self.stderr)

    def report(self, report: Report) -> None:
        """Say it on stdout, at once."""
        if self.as_json:
            _write(self.stdout, document(report))
        else:
            for line in report.lines(Style(_wants_colour(self.stdout), _width_of(self.stdout))):
                _write(self.stdout, line)

    def text(self, line: str) -> None:
        """A line for people only; nothing with --json."""
        if not self.as_json:
            _write(self.stdout, line)

    def warning(self, message: str) -> None:
        """Something that the user should know though the command goes on."""
        if not self.as_json:
            style = Style(_wants_colour(self.stderr))
            _write(self.stderr, f"{style.warning('warning')}: {printable(message)}")

    def failure(self, error: ExitError) -> None:
        """Why the command failed: stderr, or the last JSON document on stdout."""
        if self.as_json:
            _write(self.stdout, document(error))
        else:
            for line in error.lines(Style(_wants_colour(self.stderr))):
                _write(self.stderr, line)

    def rewrite(self, line: str) -> None:
        """Show ``line`` in place of what :meth:`rewrite` showed last; terminals only."""
        self.stderr.write(f"\r{line}\x1b[K")
        self.stderr.flush()

    def flush(self) -> None:
        """What was said has been taken; raises OSError when not (a full disk, a closed pipe)."""
        self.stdout.flush()


def _write(stream: TextIO, line: str) -> None:
    encoding = stream.encoding or "utf-8"
    stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _width_of(stream: TextIO) -> int | None:
    return shutil.get_terminal_size().columns if stream.isatty() else None


def _wants_colour(stream: TextIO) -> bool:
    return _is_terminal(stream) and not os.environ.get("NO_COLOR")
