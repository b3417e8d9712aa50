"""What the commands return: one table, made from ``errors``, for --help and docs/operations.md.

Never here: choosing an exit code (``cli``), printing.
"""

from __future__ import annotations

import dataclasses
import errno
import inspect
import os
from collections.abc import Iterator

from cxlfs import errors
from cxlfs.errors import CxlfsError

OK = 0
FAILURE = 1
USAGE = 2
FINDINGS = 3
REPAIRED = 4
HINTS = 5
SIGNAL_BASE = 128

PLAIN = {
    OK: "done",
    FAILURE: "failed; the message and the error id say why",
    USAGE: "the arguments cannot be meant as given",
    FINDINGS: "verify found damage, and some of it is still there",
    REPAIRED: "verify found damage and repaired all of it",
    HINTS: "verify --deep found no damage, and hints of some that no checksum finds",
}
"""Codes that are not of one kind of error."""

BEGIN_MARK = "<!-- exit codes and error ids: written by scripts/update-operations -->"
END_MARK = "<!-- end of exit codes and error ids -->"


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorKind:
    """One class of ``errors``."""

    id: str
    exit_code: int
    errno_name: str
    meaning: str
    next_step: str


def error_classes() -> list[type[CxlfsError]]:
    """All of them, in the order of the module."""
    members = vars(errors).values()
    return [m for m in members if inspect.isclass(m) and issubclass(m, CxlfsError)]


def error_kinds() -> list[ErrorKind]:
    return [_kind(error_class) for error_class in error_classes()]


def _kind(error_class: type[CxlfsError]) -> ErrorKind:
    return ErrorKind(
        id=error_class.id,
        exit_code=error_class.exit_code,
        errno_name=_errno_name(error_class.errno),
        meaning=_meaning(error_class),
        next_step=error_class.default_next_step,
    )


def _meaning(error_class: type[CxlfsError]) -> str:
    """The class's own docstring; the system's words for its errno where it has none."""
    if error_class is CxlfsError:
        return "A failure that has no kind of its own."
    own_text = error_class.__dict__.get("__doc__") or f"{os.strerror(error_class.errno)}."
    return " ".join(own_text.replace("``", "`").split())


def _errno_name(number: int) -> str:
    """Two names share a number on Linux; the manual pages use this one."""
    return "EOPNOTSUPP" if number == errno.EOPNOTSUPP else errno.errorcode[number]


def meanings() -> dict[int, str]:
    """Every exit code and its meaning, smallest first."""
    found = dict(PLAIN)
    for kind in error_kinds():
        if kind.exit_code > HINTS:  # the class that sets it comes before those that inherit it
            found.setdefault(kind.exit_code, kind.meaning)
    return dict(sorted(found.items()))


def markdown() -> str:
    """The tables between the marks in docs/operations.md."""
    return "\n".join([BEGIN_MARK, "", *_code_table(), "", *_error_table(), "", END_MARK])


def _code_table() -> Iterator[str]:
    yield "| exit code | meaning | error id |"
    yield "| --- | --- | --- |"
    kinds = error_kinds()
    for code, meaning in meanings().items():
        ids = ", ".join(f"`{kind.id}`" for kind in kinds if kind.exit_code == code)
        yield f"| {code} | {meaning} | {ids or '-'} |"
    yield f"| {SIGNAL_BASE} + N | ended by signal N (130: Ctrl-C, 141: closed pipe) | - |"


def _error_table() -> Iterator[str]:
    yield "| error id | exit code | errno | meaning | next step |"
    yield "| --- | --- | --- | --- | --- |"
    for kind in error_kinds():
        yield (
            f"| `{kind.id}` | {kind.exit_code} | {kind.errno_name} | {kind.meaning} "
            f"| {kind.next_step} |"
        )


def epilog(*codes: int) -> str:
    """The paragraph of --help that lists a verb's exit codes; 0, 1 and 2 always."""
    known = meanings()
    lines = [f"  {code:>3}  {_short(known[code])}" for code in sorted({OK, FAILURE, USAGE, *codes})]
    return "\n".join(["\b", "Exit codes:", *lines, "All of them: docs/operations.md."])


def _short(meaning: str) -> str:
    first, _, _ = meaning.partition(": ")
    first, _, _ = first.partition(". ")
    return first[0].lower() + first[1:].rstrip(".")
