"""One long call into C in a thread of its own, while Python goes on with something else: an opening
has two cores, and Python uses one.

Never here: what is called; anything that outlives the opening.

Invariants
- Whoever leaves the ``with`` block finds the call ended, whatever else happened: nothing that it
  uses may vanish under it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Beside(Generic[T]):
    """``call`` is under way from now on. Its error is raised by :meth:`result`."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="cxlfs-open", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found.append(self._call())
        except BaseException as error:  # noqa: BLE001 - whatever it is, result() raises it
            self._error = error

    def __enter__(self) -> Beside[T]:
        return self

    def __exit__(self, *_error: object) -> None:
        self._thread.join()

    def result(self) -> T:
        """What the call returned, once it has. Raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found[0]
