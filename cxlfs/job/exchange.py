"""Transfers of shards between ranks, each over a link of its own, by those who are its ends.

Never: decides which (``protocol.placement``), or what is sent (who asks).

Invariants
- A transfer ends before its time has passed, done or with an error; one that failed leaves the
  others alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from cxlfs.job.engines import Engine, Link
from cxlfs.job.protocol import Transfer

log = logging.getLogger(__name__)

Failures = dict[Transfer, Exception]
LINK_SHARE = 0.4
"""Of a deadline: both halves of a link's time end before those stop waiting who hear how it went,
whichever end has failed first.
"""


def exchange(
    engine: Engine,
    transfers: Iterable[Transfer],
    name: str,
    seconds: float,
    send: Callable[[Link, Transfer], None],
    receive: Callable[[Link, Transfer], None],
) -> Failures:
    """Those that this rank is an end of, all at once. ``name``: the same on all ranks, and no other
    time.
    """
    own = engine.world().rank
    failures: Failures = {}

    def carry(transfer: Transfer) -> None:
        sends = transfer.source == own
        other = transfer.target if sends else transfer.source
        whole = f"{name}/{transfer.shard}.{transfer.source}.{transfer.target}"
        try:
            link = engine.link(other, whole, seconds)
            is_done = False
            try:
                (send if sends else receive)(link, transfer)
                is_done = True
            finally:
                link.close(is_done=is_done)
        except Exception as error:
            log.exception("the shards of rank %d were not copied", transfer.shard)
            failures[transfer] = error

    mine = [t for t in transfers if own in {t.source, t.target}]
    threads = [
        threading.Thread(target=carry, args=(t,), name="cxlfs-copy", daemon=True) for t in mine
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures
