"""Asks the judge about files that may be torn, while nobody waits for them, or at once.

Other modules decide which files these are and what follows (``store.overwrites``), and read the
bytes (``judge``, in a process of its own).

Invariants
- The store's lock is held for one range of bytes at a time, never while the judge thinks.
- A judge that fails leaves the file as it is: nothing is known of it then.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import trio

from cxlfs.checkpoint.judge import Evidence as Found
from cxlfs.checkpoint.judge import (
    changes_as_one,
    is_judged,
    is_judged_new,
    is_unread,
    looks_alike,
    shows_format,
)
from cxlfs.errors import CxlfsError
from cxlfs.store.overwrite import Evidence
from cxlfs.store.overwrites import HEAD_BYTES

if TYPE_CHECKING:
    from cxlfs.daemon.judge import Judge
    from cxlfs.store import Store
    from cxlfs.store.overwrites import Question

IDLE_SECONDS = 0.5
_OF_AN_OVERWRITE = {
    Found.NONE: Evidence.NONE,
    Found.UNKNOWN: Evidence.UNKNOWN,
    Found.WEAK: Evidence.WEAK,
    Found.BEGINNING: Evidence.STRONG,
    Found.STRONG: Evidence.STRONG,
}
_OF_A_NEW_FILE = dict.fromkeys(Found, Evidence.NONE) | {Found.STRONG: Evidence.STRONG}
"""Files of one series need not hold the same tensors: numbers mean ranks and layers, too."""
_NOTHING = Evidence.NONE, ""


class Judging:
    """One for each mount. ``lock``: the one that every use of the store is under."""

    def __init__(self, store: Store, lock: threading.Lock, judge: Judge) -> None:
        self._store = store
        self._lock = lock
        self._judge = judge
        self._token: trio.lowlevel.TrioToken | None = None
        self._woken = trio.Event()
        store.overwrites.judges = is_judged
        store.overwrites.judges_new = is_judged_new
        store.overwrites.changes_as_one = changes_as_one
        store.overwrites.on_question = self.wake

    def wake(self) -> None:
        """A reader waits for an answer. From any thread."""
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._set_woken, idempotent=True)

    def _set_woken(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        """Until cancelled."""
        self._token = trio.lowlevel.current_trio_token()
        try:
            while True:
                with trio.move_on_after(IDLE_SECONDS):
                    await self._woken.wait()
                self._woken = trio.Event()
                while (question := self._next()) is not None:
                    await self._answer(question)
                await self._judge.rest()
        finally:
            with trio.CancelScope(shield=True):
                await self._judge.aclose()

    def _next(self) -> Question | None:
        with self._lock:
            return self._store.overwrites.next_question()

    def _look(self, question: Question) -> tuple[Evidence, str] | None:
        """What the first bytes of a new file say; None: the judge is to be asked."""
        if is_unread(question.name):
            return Evidence.UNKNOWN, "its format is not read here"
        if not question.new_bytes:
            return (Evidence.WEAK, "it is empty") if shows_format(question.name) else _NOTHING
        try:
            with self._lock:
                new, old = (
                    question.read(which, 0, min(HEAD_BYTES, size))
                    for which, size in (("new", question.new_bytes), ("old", question.old_bytes))
                )
        except CxlfsError:
            return _NOTHING
        return None if looks_alike(question.name, new, old) else _NOTHING

    async def _answer(self, question: Question) -> None:
        def read(which: str, offset: int, length: int) -> bytes:
            with self._lock:
                return question.read(which, offset, length)

        if question.is_new:
            early = self._look(question)
            if early is not None:
                with self._lock:
                    self._store.overwrites.judged(question, *early)
                return
        verdict = await self._judge.judge(
            question.name, question.new_bytes, question.old_bytes, read
        )
        with self._lock:
            meaning = _OF_A_NEW_FILE if question.is_new else _OF_AN_OVERWRITE
            evidence = meaning[verdict.evidence]
            self._store.overwrites.judged(question, evidence, verdict.reason)
