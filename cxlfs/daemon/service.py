"""From a configuration to a served mount, in this process: checks, source, store, main loop.

Never here: becoming a background process (``daemon``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid as uuid_module
from collections.abc import Callable

from cxlfs.daemon import linux, preflight, runtime, server
from cxlfs.daemon.options import MountConfig, weakened
from cxlfs.errors import MountError
from cxlfs.media import open_media
from cxlfs.media.room import VOLATILE_TEXT
from cxlfs.store import Store, StoreOptions
from cxlfs.store.overwrites import TornMode
from cxlfs.store.unit_rules import UnitsMode

log = logging.getLogger(__name__)


def serve(config: MountConfig, *, on_ready: Callable[[], None], log_path: str | None) -> None:
    """Mount, call ``on_ready`` when the mount answers, and serve until the end.

    Raises FuseUnavailableError, MountError, BusyError, and what the media and the store raise.
    """
    preflight.prepare(config)
    directory = runtime.make_runtime_directory()
    with contextlib.ExitStack() as mounted:
        if config.wakeup_latency_us is not None:
            _limit_wakeup_latency(mounted, config.wakeup_latency_us)
        store = open_store(config)
        promises = weakened_promises(config, store)
        for text in promises:  # asked for, so no warning; whoever looks for lost data finds it here
            log.info("weaker than promised: %s", text)
        granted = linux.protect_process()
        log.info("process protection: %s", ", ".join(granted) or "none permitted")
        os.chdir("/")
        server.run(
            server.Service(
                config=config,
                store=store,
                uuid=str(uuid_module.UUID(bytes=store.superblock.uuid)),
                runtime_directory=directory,
                on_ready=on_ready,
                log_path=log_path,
                weakened=tuple(promises),
            )
        )


def weakened_promises(config: MountConfig, store: Store) -> list[str]:
    """What this mount does not promise: asked for, or because of its source."""
    found = [VOLATILE_TEXT] if store.media.volatile else []
    return [*found, *weakened(config)]


def _limit_wakeup_latency(until: contextlib.ExitStack, microseconds: int) -> None:
    """Raises MountError."""
    try:
        until.enter_context(linux.wakeup_latency_limit(microseconds))
    except OSError as error:
        raise MountError(
            f"wakeup_latency: {linux.CPU_LATENCY_DEVICE}: {error.strerror}",
            next_step="mount as root, or leave the option out",
        ) from error


def open_store(config: MountConfig) -> Store:
    """The store in ``config.source``, recovered and locked; raises what media and store raise."""
    media = open_media(config.source, read_only=config.read_only)
    log.debug("opening %s", config.source)
    try:
        store = Store.open(
            media,
            StoreOptions(
                read_only=config.read_only,
                verify_reads=config.verify_reads,
                commit_interval_s=config.commit_interval_s,
                allow_incomplete_overwrite=config.allow_incomplete_overwrite,
                units=UnitsMode(config.units),
                torn=TornMode(config.torn),
                dedup=config.dedup,
            ),
        )
    except BaseException:
        media.close()
        raise
    store.direct.verified.for_seconds = config.verified_for_s
    return store
