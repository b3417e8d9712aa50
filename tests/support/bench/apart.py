"""Measurements in processes of their own: what a store keeps in memory is what such a process has
gained, and an opening takes as long as in a mount. In a process that made a million files it takes
four times as long, because the objects of the old store go away meanwhile.

Never here: what is measured.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from cxlfs.daemon.garbage import GarbageCollector
from cxlfs.media import open_media
from cxlfs.store import Store
from tests.support.bench.measure import Figures, private_bytes
from tests.support.bench.workers import WorkError


def apart(
    measure: Callable[..., Figures | None], *arguments: object, quick: bool
) -> Figures | None:
    """What ``measure`` returns in a new process. Raises WorkError. ``quick``: a copy of this one,
    which saves a third of a second of imports, and pays for memory that it shares when it writes.
    """
    context = multiprocessing.get_context("fork" if quick else "spawn")
    here, there = context.Pipe()
    process = context.Process(target=_run, args=(there, measure, arguments), daemon=True)
    process.start()
    there.close()
    try:
        found: Figures | str | None = here.recv()
    except EOFError:
        found = "it ended early"
    process.join()
    if isinstance(found, str):
        raise WorkError(f"{measure.__name__} {arguments}: {found}")
    return found


def _run(
    connection: Connection, measure: Callable[..., Figures | None], arguments: tuple[object, ...]
) -> None:
    try:
        with GarbageCollector():  # as the daemon has it
            connection.send(measure(*arguments))
    except Exception as error:  # noqa: BLE001  whatever it is, the parent tells it
        connection.send(repr(error))


def open_apart(source: str, records: int, *, quick: bool) -> Figures:
    """Seconds and processor seconds (of all threads) of an opening in a new process, which ends
    without warning, the memory that it gained, and how many records were read. Raises WorkError, if
    fewer than ``records``.
    """
    found = apart(_open, source, quick=quick)
    if found is None or found["records"] < records:
        raise WorkError(f"an opening that was to read {records} records: {found}")
    return found


def _open(source: str) -> Figures:
    media = open_media(source)
    before = private_bytes(os.getpid())
    began, used = time.perf_counter(), time.process_time()
    store = Store.open(media)
    figures: Figures = {
        "open_s": time.perf_counter() - began,
        "processor_s": time.process_time() - used,
        "memory_bytes": private_bytes(os.getpid()) - before,
        "records": store.statistics().recovery.records,
    }
    store.abandon()
    return figures
