"""Bugs planted on purpose, by name: the campaign and the corruption checks must catch every one.

A mutant changes production functions in this process (:class:`pytest.MonkeyPatch`), or the
recorder's log where the bug would lie in C below the recorder: a store that C forgot to write back
looks just like that in the log. ``classes``: numbers of the bug classes in docs/crash-testing.md.
``hint``: the unit that is tried first.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cxlfs.media import SimulatedMedia
from cxlfs.native import EventKind

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
_EVENT = struct.Struct("=IIQQ")
Event = tuple[int, int, int, int, bytes]
"""Kind, thread, offset, length, payload of one event of the recorder's log."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    classes: tuple[int, ...]
    hint: str
    plant: Plant
    what: str


MUTANTS: dict[str, Mutant] = {}


def mutant(hint: str, *classes: int) -> Callable[[Plant], Plant]:
    """Register a mutant under its function's name; its docstring says what is wrong."""

    def register(plant: Plant) -> Plant:
        what = " ".join((plant.__doc__ or "").split())
        MUTANTS[plant.__name__] = Mutant(plant.__name__, classes, hint, plant, what)
        return plant

    return register


def nothing(*_args: object, **_options: object) -> None:
    """What a forgotten call does."""


def during(patch: Patch, owner: Any, name: str, *changes: tuple[Any, str, Any]) -> None:
    """While ``owner.name`` runs, other things are changed."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            for changed, attribute, value in changes:
                inner.setattr(changed, attribute, value)
            return original(*args, **options)

    patch.setattr(owner, name, wrapped)


def on_result(patch: Patch, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """What ``owner.name`` returns is changed."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **options: change(original(*args, **options)))


def every_but(number: int) -> Callable[..., None]:
    """A fence that is forgotten the ``number``-th time (from 0)."""
    fence = SimulatedMedia.fence
    calls = iter(range(1 << 30))

    def forgetful(media: SimulatedMedia) -> None:
        if next(calls) != number:
            fence(media)

    return forgetful


class Anything:
    """Equal to every checksum."""

    def __eq__(self, _other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __and__(self, _other: object) -> int:
        return 0


# --- the log --------------------------------------------------------------------------------


def on_log(patch: Patch, change: Callable[[list[Event]], Iterator[Event]]) -> None:
    """The recorder's log is changed before anybody reads it."""
    original = SimulatedMedia.recorded

    def recorded(media: SimulatedMedia) -> bytes:
        return b"".join(_encode(event) for event in change(list(_decode(original(media)))))

    patch.setattr(SimulatedMedia, "recorded", recorded)


def _decode(log: bytes) -> Iterator[Event]:
    position = 0
    while position < len(log):
        kind, thread, offset, length = _EVENT.unpack_from(log, position)
        position += _EVENT.size
        payload = b""
        if kind in (EventKind.STORE, EventKind.COPY):
            payload = log[position : position + length]
            position += -(-length // 8) * 8
        yield kind, thread, offset, length, payload


def _encode(event: Event) -> bytes:
    kind, thread, offset, length, payload = event
    return _EVENT.pack(kind, thread, offset, length) + payload.ljust(
        -(-len(payload) // 8) * 8, b"\0"
    )


from tests.support import (  # noqa: E402 - they register, and need what stands above
    mutants_of_direct,  # noqa: F401
    mutants_of_mappings,  # noqa: F401
    mutants_of_order,  # noqa: F401
    mutants_of_overwrites,  # noqa: F401
    mutants_of_past,  # noqa: F401
    mutants_of_recovery,  # noqa: F401
    mutants_of_rollbacks,  # noqa: F401
    mutants_of_rollover,  # noqa: F401
    mutants_of_units,  # noqa: F401
    mutants_of_writing,  # noqa: F401
)
