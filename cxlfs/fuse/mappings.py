"""Whether a process maps a file, asked without keeping anybody waiting.

/proc/PID/maps says so, but the kernel may have its reader wait for the process, and the process for
requests. So a thread of its own reads it, and the request that wants to know is served again until
there is an answer.

Other modules read /proc (``processes``) and decide what follows from the answer (the store).

Invariants
- The lock of the store is held by the caller of ``has``, and never by the thread that reads.
- A question without an answer after ANSWER_SECONDS counts as no. So does one that finds
  no thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cxlfs.store import UnfinishedError

if TYPE_CHECKING:
    from cxlfs.fuse.processes import Process, ProcessTable

ANSWER_SECONDS = 1.0
_THREADS_MAX = 16


class _Question:
    """``answer``: None until the thread has it."""

    __slots__ = ("answer", "asked")

    def __init__(self, asked: float) -> None:
        self.asked = asked
        self.answer: bool | None = None


class Mappings:
    """One for each mount."""

    def __init__(
        self, processes: ProcessTable, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._processes = processes
        self._clock = clock
        self._questions: dict[tuple[Process, int], _Question] = {}
        self._threads = threading.Semaphore(_THREADS_MAX)

    def has(self, process: Process | None, ino: int) -> bool:
        """True if the process maps the inode, shared. Raises UnfinishedError until it is known."""
        if process is None:
            return False
        now = self._clock()
        question = self._questions.get((process, ino))
        if question is None:
            self._forget_old(now)
            if not self._threads.acquire(blocking=False):
                return False
            question = self._questions[process, ino] = _Question(now)
            self._ask(question, process, ino)
        if question.answer is None and now - question.asked < ANSWER_SECONDS:
            raise UnfinishedError
        del self._questions[process, ino]
        return bool(question.answer)

    def _forget_old(self, now: float) -> None:
        """The connection of whoever asked may be gone."""
        for key, question in list(self._questions.items()):
            if now - question.asked > 2 * ANSWER_SECONDS:
                del self._questions[key]

    def _ask(self, question: _Question, process: Process, ino: int) -> None:
        def answer() -> None:
            try:
                question.answer = self._processes.maps(process, ino)
            finally:
                self._threads.release()

        threading.Thread(target=answer, name="cxlfs-mappings", daemon=True).start()
