"""Errors on their way from the daemon to the command that waits for it, as plain dictionaries.

Never here: sockets, pipes, JSON text.

Invariants
- An error arrives as the class it was raised as, found by its ``id``; an unknown id arrives as
  CxlfsError with the same words.
- What comes in is not trusted: wrong types become empty values, never an exception.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cxlfs.errors import CorruptionError, CxlfsError, MediaError, NoSpaceError

_FIELDS: dict[type[CxlfsError], tuple[str, ...]] = {
    MediaError: ("offset", "length", "not_durable"),
    CorruptionError: ("structure", "media_offset", "expected", "actual"),
    NoSpaceError: ("needed_bytes", "available_bytes"),
}


def error_to_dict(error: Exception) -> dict[str, object]:
    """What a client needs to raise ``error`` again; a defect of ours becomes a plain failure."""
    if not isinstance(error, CxlfsError):
        error = CxlfsError(f"unexpected {type(error).__name__}: {error}")
    report: dict[str, object] = {
        "message_type": "exit_error",
        "id": error.id,
        "message": error.message,
        "next_step": error.next_step,
        "exit_code": error.exit_code,
    }
    for field in _fields_of(type(error)):
        report[field] = getattr(error, field)
    return report


def error_from_dict(report: Mapping[str, object]) -> CxlfsError:
    """The error that :func:`error_to_dict` described."""
    known = {error_class.id: error_class for error_class in _tree(CxlfsError)}
    error_class = known.get(str(report.get("id")), CxlfsError)
    error = error_class.__new__(error_class)
    next_step = report.get("next_step")
    CxlfsError.__init__(
        error,
        str(report.get("message", "the daemon failed without a message")),
        next_step=next_step if isinstance(next_step, str) else None,
    )
    for field in _fields_of(error_class):
        value = report.get(field)
        setattr(error, field, value if isinstance(value, int | str) else None)
    return error


def _fields_of(error_class: type[CxlfsError]) -> tuple[str, ...]:
    for base, fields in _FIELDS.items():
        if issubclass(error_class, base):
            return fields
    return ()


def _tree(error_class: type[CxlfsError]) -> Iterator[type[CxlfsError]]:
    yield error_class
    for child in error_class.__subclasses__():
        yield from _tree(child)
