"""Checked readings of what JSON gives: every number and text in its bounds, nothing unexpected.

Never: trusts a type, allocates for a number that was read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeAlias, TypeVar

TEXT_MAX = 1 << 12
NUMBER_MAX = (1 << 63) - 1

Plain: TypeAlias = "dict[str, Plain] | list[Plain] | str | int | bool | None"


class PlainError(ValueError):
    """Not what was expected there."""


def parse(data: bytes, size_max: int) -> Plain:
    """Raises PlainError."""
    if len(data) > size_max:
        raise PlainError(f"{len(data)} bytes, more than {size_max}")
    try:
        plain: Plain = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PlainError(f"not JSON: {error}") from None
    return plain


def fields(plain: Plain, names: tuple[str, ...]) -> dict[str, Plain]:
    """These and no others."""
    if not isinstance(plain, dict) or set(plain) != set(names):
        raise PlainError(f"not the fields {', '.join(names)}")
    return plain


def number(plain: Plain) -> int:
    if not isinstance(plain, int) or isinstance(plain, bool) or not 0 <= plain <= NUMBER_MAX:
        raise PlainError("a number out of its bounds")
    return plain


def constant(plain: Plain, value: int) -> None:
    """Raises PlainError unless it is that."""
    if number(plain) != value:
        raise PlainError(f"not {value}")


def constant_text(plain: Plain, value: str) -> None:
    """Raises PlainError unless it is that."""
    if text(plain) != value:
        raise PlainError(f"not {value}")


def text(plain: Plain) -> str:
    if not isinstance(plain, str) or len(plain) > TEXT_MAX:
        raise PlainError("a text that is none, or too long")
    return plain


def truth(plain: Plain) -> bool:
    if not isinstance(plain, bool):
        raise PlainError("neither true nor false")
    return plain


_Item = TypeVar("_Item")


def row(
    plain: Plain, read: Callable[[Plain], _Item], count_max: int = 1 << 20
) -> tuple[_Item, ...]:
    if not isinstance(plain, list) or len(plain) > count_max:
        raise PlainError("not a list, or too long")
    return tuple(read(item) for item in plain)
