"""What a request has done so far, to be taken back where the rest of it fails.

Never here: what a request does.

Invariants
- All that was noted is done again, the last first, whatever is raised meanwhile; nothing where the
  request succeeds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Self


class Undo:
    """What is done again, the last first, where a request fails. An ExitStack takes a microsecond
    for each, also where none fails.
    """

    __slots__ = ("_noted",)

    def __init__(self) -> None:
        self._noted: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def note(self, function: Callable[..., object], *arguments: object) -> None:
        self._noted.append((function, arguments))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            with contextlib.ExitStack() as stack:
                for function, arguments in self._noted:
                    stack.callback(function, *arguments)
