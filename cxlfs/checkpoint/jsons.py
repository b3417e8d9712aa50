"""JSON of bounded size, and claims of it (or of a pickle) checked against a type.

Python's parser, as the programs that write and load these files have: they hold NaN and Infinity,
which ``msgspec`` and JSON itself refuse. ``msgspec`` checks what was parsed.

Never here: a format. Whatever is wrong is a :class:`DamagedError` with one line that says what.
"""

from __future__ import annotations

import contextlib
import json
import math
from typing import Annotated, TypeVar

import msgspec

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.model import BeyondLimitsError, DamagedError, IncompleteError
from cxlfs.checkpoint.place import Place, Reader

Number = Annotated[int, msgspec.Meta(ge=0, le=limits.NUMBER_MAX)]
"""A size, an offset or a count."""
Name = Annotated[str, msgspec.Meta(max_length=limits.NAME_CHARACTERS_MAX)]
Shape = Annotated[tuple[Number, ...], msgspec.Meta(max_length=limits.DIMENSIONS_MAX)]
_Kind = TypeVar("_Kind")
_WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")


def parse_json(data: bytes, what: str, *, once: frozenset[str] | None = None) -> object:
    """Raises DamagedError, BeyondLimitsError.

    ``once``: as Rust's serde reads it: these keys stand once in an object, there are no numbers
    that JSON itself does not know, and no half of a pair of surrogates.
    """
    parts = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if len(data) > limits.JSON_BYTES_MAX or parts > limits.JSON_PARTS_MAX:
        raise BeyondLimitsError(f"{what} is larger than what is read")
    try:
        # Not the bytes: they would choose the codec, and which of Python's modules is loaded.
        source = data.decode("utf-8")
        if once is None:
            return json.loads(source, parse_constant=float)
        value = json.loads(
            source,
            parse_constant=_refused,
            parse_float=_finite,
            parse_int=lambda digits: float(digits) if digits == "-0" else int(digits),
            object_pairs_hook=lambda pairs: _object(pairs, once),
        )
    except RecursionError as error:
        raise BeyondLimitsError(f"{what} is nested deeper than what is read") from error
    except ValueError as error:
        raise DamagedError(f"{what} is not JSON: {str(error)[:80]}") from error
    return value


def ends_early(error: BaseException | None) -> bool:
    """Whether what :func:`parse_json` has met is the end of the text, or zeros up to there, in the
    middle of a value.
    """
    if isinstance(error, json.JSONDecodeError):
        rest = error.doc.rstrip("\0")[error.pos :].strip()
        if not rest or error.msg.startswith("Unterminated string"):
            return True
        return error.msg == "Expecting value" and any(w.startswith(rest) for w in _WORDS)
    return isinstance(error, UnicodeDecodeError) and error.reason == "unexpected end of data"


def _refused(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _finite(source: str) -> float:
    value = float(source)
    if not math.isfinite(value):
        raise ValueError(f"{source[:40]} is out of range")
    return value


def _object(pairs: list[tuple[str, object]], once: frozenset[str]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs) and sum(key in once for key, _ in pairs) > len(once & found.keys()):
        raise ValueError("a key stands twice in an object")
    for key, value in pairs:
        for text_ in (key, value):
            if isinstance(text_, str):
                text_.encode("utf-8")  # a lone surrogate is a ValueError
    return found


def read_json(reader: Reader, what: str) -> object:
    """A whole file. An empty one was not written to its end."""
    if not reader.size_bytes:
        raise IncompleteError(f"{what} is empty")
    if reader.size_bytes > limits.JSON_BYTES_MAX:
        raise BeyondLimitsError(f"{what} is larger than what is read")
    data = reader.read(0, reader.size_bytes)
    if not data.rstrip(b" \t\r\n\0").endswith((b"}", b"]")):
        raise IncompleteError(f"{what} was not written to its end")
    return parse_json(data, what)


def prepared(kind: type[_Kind]) -> type[_Kind]:
    """Have ``msgspec`` read the annotations now, which executes them: not beside hostile bytes."""
    with contextlib.suppress(msgspec.ValidationError):
        msgspec.convert(None, kind)
    return kind


def json_of(place: Place, name: str, kind: type[_Kind]) -> _Kind:
    """The object in the file ``name``, checked."""
    with place.open(name) as reader:
        what = place.full_name(name)
        return checked(read_json(reader, what), kind, what)


def checked(value: object, kind: type[_Kind], what: str) -> _Kind:
    """A claim of JSON or of a pickle as what it should be. Raises DamagedError."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise DamagedError(f"{what} is damaged: {error}") from error


def number_or_none(value: object) -> int | None:
    """A step, where there is one that can be."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limits.NUMBER_MAX:
        return value
    return None
