"""``async_save``: the caller goes on when the state lies in the medium; the commit comes behind.

Never: a second copy of the state in memory.

Invariants
- One save of a process is under way at a time, so that a later one never overtakes.
- Whatever a save meets is in its future, and in the log, whether anybody asks for it or not.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from cxlfs.adapters import require

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint import SavePlanner
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import StorageWriter as AnyWriter

    from cxlfs.adapters.torch.writer import StorageWriter, Watcher

_log = logging.getLogger("cxlfs.torch")
_turn = threading.Lock()
"""Taken by whoever calls ``async_save``, given back when that save has ended."""


def _in_child() -> None:
    global _turn  # noqa: PLW0603 - the thread that would give it back is not there
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


def async_save(
    state_dict: dict[str, object],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: AnyWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[Metadata]:
    """As ``torch.distributed.checkpoint.async_save``, without its copy of the state in memory: it
    returns when all of it is stored, and may change. The result of the future is there when it is
    durable, and complete on all ranks. Until then the name has its old content.

    It waits for the save before, whichever that was. ``storage_writer``: a StorageWriter of this
    package; with another one it is PyTorch's own. Ctrl-C while it waits gives the save up.

    Raises FrameworkMissingError, ValueError; everything that a save meets is in the future.
    """
    require("torch", "torch")
    import torch  # noqa: PLC0415 - the framework, when it is used
    from torch.distributed import checkpoint  # noqa: PLC0415
    from torch.distributed.checkpoint.stateful import Stateful  # noqa: PLC0415

    from cxlfs.adapters.torch.writer import StorageWriter  # noqa: PLC0415

    arguments: dict[str, object] = {
        "checkpoint_id": checkpoint_id,
        "planner": planner,
        "process_group": process_group,
        "no_dist": no_dist,
        "use_collectives": use_collectives,
    }
    if storage_writer is None:
        if checkpoint_id is None:
            raise ValueError("a checkpoint_id or a storage_writer is needed")
        storage_writer = StorageWriter(checkpoint_id)
    if not isinstance(storage_writer, StorageWriter):
        theirs: Future[Metadata] = checkpoint.async_save(
            state_dict, storage_writer=storage_writer, **arguments
        )
        return theirs
    if not no_dist:
        _require_group_of_hosts(process_group)
    plain = {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state_dict.items()}
    if torch.accelerator.is_available():  # another thread does not wait for this one's stream
        torch.accelerator.current_stream().synchronize()
    return _copied(
        storage_writer, lambda: checkpoint.save(plain, storage_writer=storage_writer, **arguments)
    )


def _copied(writer: StorageWriter, save: Callable[[], Metadata]) -> Future[Metadata]:
    """What becomes of ``save``, which has come as far as that all is stored, or has failed."""
    from cxlfs.adapters.torch.writer import Watcher  # noqa: PLC0415 - as above

    copied = threading.Event()
    watcher = Watcher(copied.set)
    turn = _turn
    turn.acquire()  # another thread gives it back

    def ended(done: Future[Metadata]) -> None:
        writer.watcher = None
        turn.release()
        executor.shutdown(wait=False)
        if (error := done.exception()) is not None:
            _log.error("the save of %s has failed: %s", writer.path, error)
        copied.set()

    try:
        writer.watcher = watcher
        executor = ThreadPoolExecutor(1, thread_name_prefix="cxlfs-async-save")
        saved = executor.submit(save)
    except BaseException:
        turn.release()
        raise
    saved.add_done_callback(ended)
    _wait(copied, watcher)
    return saved


def _wait(copied: threading.Event, watcher: Watcher) -> None:
    try:
        copied.wait()
    except BaseException:
        watcher.is_given_up = True
        copied.wait()  # nobody may change the state before
        raise


def _require_group_of_hosts(group: ProcessGroup | None) -> None:
    """As PyTorch does: ranks talk behind training, whose own messages go another way."""
    import torch  # noqa: PLC0415 - as above
    from torch import distributed  # noqa: PLC0415

    if not distributed.is_available() or not distributed.is_initialized():
        return
    chosen = group or distributed.group.WORLD
    if torch.device("cpu") not in chosen._device_types:  # noqa: SLF001
        raise ValueError(
            "a backend for the CPU is needed: init_process_group('cpu:gloo,cuda:nccl')"
        )
