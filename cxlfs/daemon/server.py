"""The main loop of a mount: FUSE requests, maintenance of the store, signals, the control socket.

Never here: setting up a process (``daemon``), what a request means (``operations``).

Invariants
- SIGTERM and SIGINT unmount and close the store; processes that still have files open get some
  time to close them, unless the signal comes again.
- On a failure the mount point goes dead (ENOTCONN), never empty: whoever mirrors or prunes the
  directory must see an error, not a directory without checkpoints.
- The store is closed in the thread that used it, after the last request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pyfuse3
import trio

from cxlfs.control import discovery, mountinfo
from cxlfs.daemon import linux, runtime
from cxlfs.daemon.attach import attach
from cxlfs.daemon.callers import Caller
from cxlfs.daemon.control_server import ControlServer, Message, status
from cxlfs.daemon.detach import detach
from cxlfs.daemon.first_visit import FirstVisit
from cxlfs.daemon.garbage import GarbageCollector
from cxlfs.daemon.history_request import HANDLERS as HISTORY_HANDLERS
from cxlfs.daemon.judge import Judge
from cxlfs.daemon.judging import Judging
from cxlfs.daemon.options import MountConfig, fuse_options
from cxlfs.daemon.policy_request import policy
from cxlfs.daemon.populater import Populater
from cxlfs.daemon.preflight import CONTAINER_STEP
from cxlfs.daemon.remount_request import remount_handler
from cxlfs.daemon.verify_request import verify
from cxlfs.errors import BusyError, CxlfsError, MountError
from cxlfs.fuse import direct
from cxlfs.fuse.operations import Operations
from cxlfs.fuse.request_sizes import request_sizes
from cxlfs.fuse.workers import Workers
from cxlfs.store import Store

log = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
"""How long processes with open files may go on after SIGTERM."""

MAINTENANCE_SECONDS = 0.5
PAUSE_SECONDS_MIN = 0.001
PAUSE_SECONDS_MAX = 0.02
"""Between two pieces of maintenance that follow each other."""
_TURN_SECONDS = 0.0002
"""Between two steps of a request."""
READAHEAD_KIB = 1024
"""Why: see ``page_cache``. Only root may raise it from the kernel's 128."""

_TELL_SECONDS_MAX = 2.0
_QUIESCE_SECONDS_MAX = 5.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What one daemon serves, and where it can be asked about it."""

    config: MountConfig
    store: Store
    uuid: str
    runtime_directory: Path
    on_ready: Callable[[], None]
    log_path: str | None = None
    weakened: tuple[str, ...] = ()
    """What this mount does not promise."""
    grace_seconds: float = GRACE_SECONDS


def run(service: Service) -> None:
    """Mount, serve until unmounted or told to stop, close the store. Raises CxlfsError when the
    mount did not come up, ended by a failure, or the store could not be closed.
    """
    with _signals_wait():
        try:
            connection = _mount(service.store, service.config)
            server = _Server(service, connection)
            try:
                trio.run(server.main)
            finally:
                server.close_connection()
        finally:
            # Idempotent: the main loop has done it, where there was one.
            service.store.close()
            service.store.media.close()
        server.finish()


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Stop signals wait until the main loop takes them; those after it are void."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        while signal.sigtimedwait(_STOP_SIGNALS, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclasses.dataclass(frozen=True, slots=True)
class _Connection:
    """A mount whose requests wait to be served. ``workers``: who serves file data, if not
    pyfuse3's handlers.
    """

    operations: Operations
    workers: Workers | None


def _mount(store: Store, config: MountConfig) -> _Connection:
    """Raises MountError, FuseUnavailableError."""
    if config.transport == "pyfuse3":
        operations = Operations(store)
        _init(operations, config, config.mountpoint, fuse_options(config, is_root=linux.is_root()))
        workers = None
    else:
        operations, workers = _mount_with_workers(store, config)
    store.on_event = operations.on_store_event
    operations.pause = functools.partial(trio.sleep, _TURN_SECONDS)
    return _Connection(operations, workers)


def _mount_with_workers(store: Store, config: MountConfig) -> tuple[Operations, Workers]:
    sizes = request_sizes()
    workers = Workers(
        store,
        attach(config, read_bytes_max=sizes.read),
        upcalls=direct.UPCALLS,
        sizes=sizes,
        busy_poll_us=config.busy_poll_us,
    )
    try:
        operations = Operations(store, data_plane=workers)
        _init(operations, config, f"/dev/fd/{workers.serves_fd}", set(pyfuse3.default_options))
    except BaseException:
        os.close(workers.serves_fd)  # which pyfuse3 closes only where it has begun to serve it
        workers.close()
        raise
    return operations, workers


def _init(operations: Operations, config: MountConfig, target: str, options: set[str]) -> None:
    """Raises MountError with what libfuse had to say, which it only writes to stderr."""
    with _captured_stderr() as said:
        try:
            pyfuse3.init(operations, target, options)
        except RuntimeError as error:
            reasons = [line for line in said() if line]
            reason = reasons[-1] if reasons else "no reason given"
            raise MountError(
                f"cannot mount on {config.mountpoint}: {reason}",
                next_step=CONTAINER_STEP if "permitted" in reason else None,
            ) from error


@contextlib.contextmanager
def _captured_stderr() -> Iterator[Callable[[], list[str]]]:
    with tempfile.TemporaryFile() as capture:
        saved = os.dup(2)
        os.dup2(capture.fileno(), 2)

        def lines() -> list[str]:
            capture.seek(0)
            return capture.read().decode(errors="replace").strip().splitlines()

        try:
            yield lines
        finally:
            os.dup2(saved, 2)
            os.close(saved)


class _Server:
    """The tasks of one mount."""

    def __init__(self, service: Service, connection: _Connection) -> None:
        self._service = service
        self._operations = operations = connection.operations
        self._workers = connection.workers
        self._populater = Populater(service.store, operations.lock)
        self._judging = Judging(service.store, operations.lock, Judge())
        self._control = ControlServer(
            service.store, operations, lets_users_in=service.config.allow_other
        )
        self._control.register("verify", verify)
        self._control.register("policy", policy)
        for name, handler in HISTORY_HANDLERS.items():
            self._control.register(name, handler)
        self._control.register("remount", remount_handler(service.config, is_root=linux.is_root()))
        self._control.register("status", self._status)
        self._first_visit = FirstVisit(service.config, service.store, operations)
        self._registration: Path | None = None
        self._failure: Exception | None = None
        self._stopping = False
        self._device = ""
        """major:minor of the mount: what else may be mounted there later is not ours."""
        self._is_quiet = True
        """No thread uses the connection."""

    def _status(
        self, store: Store, parameters: Mapping[str, object], caller: Caller
    ) -> Iterator[Message]:
        """What the store says, who serves its data, and how it was mounted."""
        config = self._service.config
        options = {
            "verify": "read" if config.verify_reads else "off",
            "commit_seconds": config.commit_interval_s,
            "allow_incomplete_overwrite": config.allow_incomplete_overwrite,
            "allow_other": config.allow_other,
            "default_permissions": config.default_permissions,
            "units": config.units,
            "tidy": config.tidy,
            "torn": config.torn,
            "dedup": "on" if config.dedup else "off",
        }
        tidied = self._first_visit.describe()
        transport = self._operations.data_plane.describe()
        for message in status(store, parameters, caller):
            mounted = {"transport": transport, "options": options, "tidied": tidied}
            yield {**message, **mounted, "weakened": self._service.weakened}

    async def main(self) -> None:
        service = self._service
        self._control.listen(discovery.socket_path(service.runtime_directory, service.uuid))
        self._registration = runtime.register(
            service.runtime_directory,
            discovery.Registration(
                uuid=service.uuid,
                pid=os.getpid(),
                source=service.config.source,
                mountpoint=service.config.mountpoint,
                log_path=service.log_path,
            ),
        )
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._serve_control)
                await self._serve_mount()
                await self._quiesce()
                with self._operations.lock:
                    self._operations.release_left()
                    self._operations.lookups.forget_all()
                    self._operations.past.release_all()
                    with contextlib.suppress(CxlfsError):
                        self._operations.readers.maintain()
                self._hide()
                self._close_store()
                await self._control.close(self._failure, seconds_max=_TELL_SECONDS_MAX)
                nursery.cancel_scope.cancel()
        finally:
            self._hide()

    def _hide(self) -> None:
        """From here on nobody finds this daemon: whoever is told that the store is closed must not,
        and what lies at these paths later belongs to the next daemon.
        """
        self._control.hide()
        path, self._registration = self._registration, None
        if path is not None:
            path.unlink(missing_ok=True)

    async def _serve_control(self) -> None:
        """Losing the control socket must not end the mount."""
        try:
            await self._control.serve()
        except* Exception:
            log.exception("the control socket failed")

    async def _serve_mount(self) -> None:
        """Until the mount is gone. A failure is kept, to be raised when the store is closed."""
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._watch_signals)
                nursery.start_soon(self._maintain)
                nursery.start_soon(self._populater.run)
                nursery.start_soon(self._judging.run)
                self._operations.page_cache.start()
                nursery.start_soon(self._announce)
                if self._workers is not None:
                    nursery.start_soon(self._serve_data, self._workers)
                # Handlers never wait, so a second task would only pass a lock to and fro.
                await pyfuse3.main(min_tasks=1, max_tasks=1)
                nursery.cancel_scope.cancel()
        except* Exception as group:
            log.exception("the mount failed", exc_info=group)
            first = _first(group)
            self._failure = (
                first
                if isinstance(first, CxlfsError)
                else MountError(
                    f"serving {self._service.config.mountpoint} failed: {first}",
                    next_step="mount again: that clears the dead mount and recovers the store",
                )
            )

    async def _serve_data(self, workers: Workers) -> None:
        """Raises MountError when /dev/fuse failed."""
        token = trio.lowlevel.current_trio_token()
        ended = trio.Event()
        errors: list[MountError] = []

        def on_end(error: MountError | None) -> None:
            errors.extend([error] if error is not None else [])
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(ended.set)

        served = direct.Direct(self._operations, workers.transport, on_lease=self._populater.wake)
        workers.start(served.serve, on_end)
        await ended.wait()
        if errors:
            raise errors[0]
        pyfuse3.terminate()  # the mount is gone; pyfuse3 only sees a socket that stays silent

    async def _quiesce(self) -> None:
        """Nothing may use the connection any more. A thread that waits for an answer which the main
        loop did not give before it failed is released by aborting the connection.
        """
        seconds_max = 0 if self._failure else _QUIESCE_SECONDS_MAX
        self._is_quiet = await self._quiesce_page_cache(seconds_max)
        if not self._is_quiet and linux.abort_connection(self._device):
            self._is_quiet = await self._quiesce_page_cache(_QUIESCE_SECONDS_MAX)

    async def _quiesce_page_cache(self, seconds_max: float) -> bool:
        return await trio.to_thread.run_sync(self._operations.page_cache.quiesce, seconds_max)

    def close_connection(self) -> None:
        """From here on the mount is dead; the end of the process does it where we may not."""
        if self._is_quiet:
            # Never libfuse's own unmount: it would detach whatever is mounted there by now.
            pyfuse3.close(unmount=False)
            if self._workers is not None:
                self._workers.close()
        else:
            log.warning("a cache invalidation does not end; the connection is left to the kernel")
            if self._workers is not None:
                self._workers.stop()

    def _close_store(self) -> None:
        """Close the store and give its source free, so that whoever is told so can open it."""
        store = self._service.store
        try:
            if self._workers is not None:
                self._workers.stop()
            store.close()
        except Exception as error:
            log.exception("closing the store failed")
            self._failure = self._failure or error
        store.media.close()

    def finish(self) -> None:
        """The connection is closed: take away what is left of the mount if all went well, else
        leave it dead. Raises what went wrong.
        """
        mountpoint = self._service.config.mountpoint
        if self._failure is not None:
            raise self._failure
        if self._is_still_mounted():
            if not self._stopping:
                raise MountError(
                    f"the connection of {mountpoint} was aborted",
                    next_step="mount again: that clears the dead mount",
                )
            detach(mountpoint, lazy=True, apart=True)
        log.info("unmounted %s, store closed", mountpoint)

    def _is_still_mounted(self) -> bool:
        mount = mountinfo.find_mount(self._service.config.mountpoint)
        return mount is not None and mount.device == self._device

    # --- tasks ------------------------------------------------------------------------------

    async def _announce(self) -> None:
        """Report readiness once the mount answers, and raise its readahead where permitted."""
        mountpoint = self._service.config.mountpoint
        error = await trio.to_thread.run_sync(
            linux.answer_apart, mountpoint, abandon_on_cancel=True
        )
        if error is not None:
            raise MountError(f"{mountpoint} does not answer: {error.strerror}")
        mount = await trio.to_thread.run_sync(mountinfo.find_mount, mountpoint)
        if mount is not None:
            self._device = mount.device
            linux.raise_readahead(mount.device, READAHEAD_KIB)
        await self._first_visit.receive()
        log.info("mounted %s on %s", self._service.config.source, mountpoint)
        self._service.on_ready()

    async def _maintain(self) -> None:
        """Short pieces of work, with pauses as long as they: requests come first, and whoever waits
        for the lock gets it (it is not handed over in order).
        """
        problem = ""
        with GarbageCollector() as garbage:
            while True:
                garbage.maintain()
                began = time.monotonic()
                more = False
                try:
                    more = self._maintain_store(began)
                    problem = ""
                except CxlfsError as error:
                    if error.message != problem:  # said once, not twice a second
                        problem = error.message
                        log.warning("maintenance: %s", problem)
                except Exception as error:  # noqa: BLE001  like any other request
                    with self._operations.lock:
                        self._operations.failures.report("maintain", error)
                pause = min(max(time.monotonic() - began, PAUSE_SECONDS_MIN), PAUSE_SECONDS_MAX)
                await trio.sleep(pause if more else MAINTENANCE_SECONDS)

    def _maintain_store(self, now: float) -> bool:
        """One piece of work; True when there is more to do soon."""
        store = self._service.store
        with self._operations.lock:
            held = time.monotonic()
            self._operations.readers.maintain()
            more = store.maintain(now, apart=True)
            counters = store.volume.counters
            held = time.monotonic() - held
            counters.maintenance_seconds_max = max(held, counters.maintenance_seconds_max)
        return store.maintain_apart() or more

    async def _watch_signals(self, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            with trio.open_signal_receiver(*_STOP_SIGNALS) as signals:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
                task_status.started()
                try:
                    async for number in signals:
                        name = signal.Signals(number).name
                        if self._stopping:
                            log.info("%s again: ending at once", name)
                            nursery.start_soon(self._terminate)
                            continue
                        log.info("%s: unmounting", name)
                        self._stopping = True
                        nursery.start_soon(self._stop)
                finally:
                    # Closing the store is not interrupted: see _signals_wait.
                    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)

    async def _stop(self) -> None:
        """Unmount; wait a while for processes with open files; then end whatever they do."""
        mountpoint = self._service.config.mountpoint
        self._first_visit.cancel()
        try:
            await trio.to_thread.run_sync(
                lambda: detach(mountpoint, apart=True), abandon_on_cancel=True
            )
        except BusyError as error:
            log.info("%s; they have %.0f s", error, self._service.grace_seconds)
            await self._detach_lazily(mountpoint)
            await trio.sleep(self._service.grace_seconds)
        except CxlfsError as error:
            log.info("%s", error)  # it may be gone already
        # After a successful unmount the loop ends by itself and this task with it.
        await trio.sleep(_TELL_SECONDS_MAX)
        await self._terminate()

    async def _terminate(self) -> None:
        """End the main loop, but not while a thread needs its answers."""
        await self._quiesce_page_cache(_QUIESCE_SECONDS_MAX)
        pyfuse3.terminate()

    async def _detach_lazily(self, mountpoint: str) -> None:
        try:
            await trio.to_thread.run_sync(
                lambda: detach(mountpoint, lazy=True, apart=True), abandon_on_cancel=True
            )
        except CxlfsError as error:
            log.info("%s", error)


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    """The first single exception inside nested groups."""
    error: Exception | BaseExceptionGroup[Exception] = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
