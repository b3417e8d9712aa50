"""The control request ``remount``: close a mounted store for writing, or open it again.

Parameters: ``options`` (the ``-o`` options that the mount is to have) and ``apply`` (false: only
say whether they can be had). The answer: one ``remounted`` with ``read_only``.

Never here: what the kernel is told (``remount``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from cxlfs.daemon.callers import Caller
from cxlfs.daemon.control_server import Handler, Message
from cxlfs.daemon.options import MountConfig, checks_permissions, with_options
from cxlfs.errors import UsageError
from cxlfs.store import Store
from cxlfs.store.suspending import resume_writing, suspend_writing


def remount_handler(config: MountConfig, *, is_root: bool) -> Handler:
    """For the mount that was made with ``config``."""

    def handle(
        store: Store, parameters: Mapping[str, object], _caller: Caller
    ) -> Iterator[Message]:
        options, apply = parameters.get("options"), parameters.get("apply")
        if not isinstance(options, list) or not isinstance(apply, bool):
            raise UsageError("remount: options must be a list, apply true or false")
        wanted = with_options(config, [str(option) for option in options])
        _check(config, wanted, is_root=is_root)
        if apply and wanted.read_only and not config.read_only:
            suspend_writing(store)
        elif apply and not wanted.read_only:
            resume_writing(store)
        yield {"message_type": "remounted", "read_only": store.read_only}

    return handle


def _check(config: MountConfig, wanted: MountConfig, *, is_root: bool) -> None:
    """Raises UsageError for what would need another daemon, or another connection of the kernel."""
    if config.read_only and not wanted.read_only:
        raise UsageError(
            "the store was mounted read-only: its source is open for reading only",
            next_step=f"cxlfs umount {config.mountpoint}; "
            f"cxlfs mount {config.source} {config.mountpoint}",
        )
    permissions = checks_permissions(config, is_root=is_root)
    same = dataclasses.replace(
        wanted,
        read_only=config.read_only,
        kernel_options=config.kernel_options,
        default_permissions=config.default_permissions
        if permissions == checks_permissions(wanted, is_root=is_root)
        else wanted.default_permissions,
    )
    for field in dataclasses.fields(MountConfig):
        if getattr(same, field.name) != getattr(config, field.name):
            raise UsageError(
                f"{field.name} cannot be changed while the store is mounted",
                next_step="cxlfs umount MOUNTPOINT, then mount it with the options wanted; "
                "a remount may change ro, rw, suid, dev, exec and their opposites",
            )
