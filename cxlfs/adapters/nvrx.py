"""NVIDIA Resiliency Extension: its local checkpoints, committed for the whole job.

    manager = CheckpointManager(Checkpointer("/mnt/ckpt/run1", replicas=2))

takes the place of its LocalCheckpointManager (which works on a mount as it is): votes, checksums,
copies on other nodes and what is kept are the Checkpointer's, so that a ReplicationStrategy is not
needed, and none is taken.

Never: what is in a state dict (TensorAwareStateDict), when it is saved.

Invariants
- ``find_latest`` names a step that all ranks have loaded already: whatever ``load`` returns then is
  of one attempt.
"""

from __future__ import annotations

import functools
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cxlfs.adapters import require
from cxlfs.errors import JobConfigurationError, UndecidedError
from cxlfs.job import Aborted, Checkpointer, Committed, PendingCheckpoint, Restored

if TYPE_CHECKING:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
    from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import (
        BaseCheckpointManager,
    )

NAME = "state.pt"
_POLL_SECONDS = 0.05


def __getattr__(name: str) -> object:
    """``CheckpointManager`` is a class of NVRx's: made when it is asked for."""
    if name == "CheckpointManager":
        return _class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _class() -> Callable[..., BaseCheckpointManager]:  # noqa: C901 - a class and its methods
    require("nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager", "nvrx")
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest  # noqa: PLC0415
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import base_manager  # noqa: PLC0415

    class CheckpointManager(base_manager.BaseCheckpointManager):  # type: ignore[misc]  # not typed
        """See the module. ``save``, ``find_latest`` and ``load`` are called on all ranks."""

        def __init__(self, checkpointer: Checkpointer, session_id: str = "") -> None:
            super().__init__(session_id)
            self._checkpointer = checkpointer
            self._restored: TensorAwareStateDict | None = None
            self.latest_iteration: int = -1

        def find_latest(self) -> int:
            if self.latest_iteration == -1:
                found = self._checkpointer.restore_from_checkpoint(self._take)
                self.latest_iteration = found.step if isinstance(found, Restored) else -1
            return self.latest_iteration

        def _take(self, directory: Path) -> None:
            self._restored = _read(directory)

        def load(self) -> tuple[TensorAwareStateDict, object]:
            if self._restored is None:
                raise base_manager.CheckpointingException("find_latest has found nothing to load")
            state, self._restored = self._restored, None
            state.restore_tensor_device(non_blocking=False)
            return state, self._ckpt_id(self.latest_iteration)

        def save(
            self,
            state_dict: TensorAwareStateDict,
            iteration: int,
            is_async: bool = False,  # noqa: FBT001, FBT002 - NVRx's signature
        ) -> AsyncRequest | None:
            snapshot = functools.partial(_on_host, state_dict)
            pending = self._checkpointer.async_checkpoint(iteration, _write, snapshot=snapshot)
            if not is_async:
                self._finish(iteration, pending)
                return None
            done = _when_done(pending)
            seconds = self._checkpointer.deadline_seconds
            finish = functools.partial(self._finish, iteration, pending)
            return AsyncRequest(_await_removal, (str(done), seconds), [finish])

        def _finish(self, iteration: int, pending: PendingCheckpoint) -> None:
            outcome: Committed | Aborted = pending.wait()
            if isinstance(outcome, Aborted):
                reasons = "; ".join(f"rank {rank}: {why}" for rank, why in outcome.reasons)
                raise base_manager.CheckpointingException(f"iteration {iteration}: {reasons}")
            self.latest_iteration = iteration

        def _refuse(self, *_given: object) -> None:
            raise JobConfigurationError("the Checkpointer saves, loads and keeps")

        _my_ckpt_ids = _load = _save = _cleanup = _cleanup_failed_save = _refuse

    return CheckpointManager


# --- files --------------------------------------------------------------------------------------


def _write(directory: Path, state: TensorAwareStateDict) -> None:
    import torch  # noqa: PLC0415 - the framework, when it is used

    with (directory / NAME).open("wb") as file:
        torch.save(state, file)


def _read(directory: Path) -> TensorAwareStateDict:
    """As NVRx reads its own: the state dict is an object of the program's, in a pickle."""
    import torch  # noqa: PLC0415 - as above

    state: TensorAwareStateDict = torch.load(directory / NAME, weights_only=False)
    return state


def _on_host(state: TensorAwareStateDict) -> TensorAwareStateDict:
    """With tensors that training does not change: ``to("cpu")`` copies none that is there."""
    before = {tensor.data_ptr() for tensor in state.tensors}
    state.copy_tensors_to_cpu(non_blocking=False)
    tensors = list(state.pop_tensors())
    state.insert_tensors([t.clone() if t.data_ptr() in before else t for t in tensors])
    return state


# --- beside training ----------------------------------------------------------------------------


def _when_done(pending: PendingCheckpoint) -> Path:
    """A file that is removed then: for a process that NVRx begins to wait in."""
    descriptor, name = tempfile.mkstemp(prefix="cxlfs-pending-")
    os.close(descriptor)
    path = Path(name)

    def watch() -> None:
        try:
            pending.wait()
        except Exception:  # noqa: BLE001, S110 - it is raised where the request is finished
            pass
        finally:
            path.unlink(missing_ok=True)

    threading.Thread(target=watch, name="cxlfs-pending").start()
    return path


def _await_removal(name: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while Path(name).exists():
        if time.monotonic() > end:
            raise UndecidedError(f"a checkpoint is still in flight after {seconds:g} s")
        time.sleep(_POLL_SECONDS)
