"""The one place where an exception becomes an errno.

pyfuse3 ends its main loop, with the request unanswered, when a handler raises anything but
FUSEError. So every handler is a plain function wrapped here; no other module raises FUSEError.

Invariants
- A CxlfsError becomes its errno, silently: who has something to report has reported it already.
- Anything else is a defect: it is logged with its traceback, counted, and the store stops writing,
  because nobody knows what state it left behind. Reading goes on.
- A handler cannot await, and holds the lock of its owner: it runs to completion, so the store sees
  one request at a time, whichever thread serves it. One that raises UnfinishedError has done a
  step, and is called again when others had their turn.
"""

from __future__ import annotations

import collections
import errno
import functools
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

import pyfuse3

from cxlfs.errors import CxlfsError
from cxlfs.store import UnfinishedError

log = logging.getLogger(__name__)

_TRACEBACKS_MAX = 20


class StopsWriting(Protocol):
    def stop_writing(self, reason: str) -> None: ...


class Failures:
    """What happens on a defect, and how often it happened."""

    def __init__(self, store: StopsWriting) -> None:
        self._store = store
        self.counts: collections.Counter[str] = collections.Counter()
        """Per place and kind, such as ``write: KeyError``."""

    def report(self, place: str, error: Exception) -> None:
        """Log ``error``, count it, and stop the store's writing: with the lock of the store held.
        Raises nothing.
        """
        kind = f"{place}: {type(error).__name__}"
        self.counts[kind] += 1
        # A defect in a hot path must not fill the disk with the same traceback.
        if self.counts.total() <= _TRACEBACKS_MAX or self.counts[kind] == 1:
            log.error("unexpected error in %s", place, exc_info=error)
        try:
            self._store.stop_writing(f"unexpected error in {kind}: {error}")
        except Exception:
            log.exception("the store could not be switched to read-only")


class Owner(Protocol):
    """Of handlers. ``lock`` is held by whoever uses the store."""

    @property
    def failures(self) -> Failures: ...

    @property
    def lock(self) -> threading.Lock: ...


class Handlers(Owner, Protocol):
    """``caller``: the thread whose request is being served; 0: not known. ``user``: whose it is;
    None: likewise. ``pause``: lets others have their turn between two steps of a request.
    """

    caller: int
    user: int | None
    pause: Callable[[], Awaitable[None]]

    def other_handler(
        self, name: str, arguments: tuple[object, ...]
    ) -> Callable[..., object] | None:
        """What serves a request that is not about the store as it is."""
        ...


def caller_of(arguments: tuple[object, ...]) -> int:
    """A handler's last argument says it, where pyfuse3 gives it one that does."""
    context = arguments[-1] if arguments else None
    return context.pid if isinstance(context, pyfuse3.RequestContext) else 0


def user_of(arguments: tuple[object, ...]) -> int | None:
    """Likewise."""
    context = arguments[-1] if arguments else None
    return context.uid if isinstance(context, pyfuse3.RequestContext) else None


_Self = TypeVar("_Self", bound=Handlers)
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def outcome_of(
    failures: Failures, place: str, function: Callable[..., _Result], *arguments: object
) -> tuple[int, _Result | None]:
    """0 and what ``function`` returns, or the errno of what it raised. With the lock held. Raises
    UnfinishedError: others have their turn, then the same again.
    """
    try:
        return 0, function(*arguments)
    except CxlfsError as error:
        return error.errno, None
    except UnfinishedError:
        raise
    except Exception as error:  # noqa: BLE001  see the invariants
        failures.report(place, error)
        return errno.EIO, None


def request(
    function: Callable[Concatenate[_Self, _Parameters], _Result],
) -> Callable[Concatenate[_Self, _Parameters], Coroutine[object, object, _Result]]:
    """A handler that answers a request: errors become FUSEError."""

    async def handler(
        self: _Self, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs
    ) -> _Result:
        while True:
            try:
                with self.lock:
                    self.caller = caller_of(args)
                    self.user = user_of(args)
                    name = function.__name__
                    other = self.other_handler(name, args)
                    serve = functools.partial(function, self) if other is None else other
                    number, result = outcome_of(
                        self.failures, name, functools.partial(serve, *args, **kwargs)
                    )
                break
            except UnfinishedError:
                await self.pause()
        if number:
            raise pyfuse3.FUSEError(number)
        return cast("_Result", result)

    functools.update_wrapper(handler, function)
    return handler


def notice(
    function: Callable[Concatenate[_Self, _Parameters], None],
) -> Callable[Concatenate[_Self, _Parameters], Coroutine[object, object, None]]:
    """A handler that has nobody to answer (FORGET): nothing may be raised at all."""

    async def handler(
        self: _Self, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs
    ) -> None:
        with self.lock:
            try:
                function(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001  see the invariants
                self.failures.report(function.__name__, error)

    functools.update_wrapper(handler, function)
    return handler
