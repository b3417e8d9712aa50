"""PyTorch Lightning's plug-in for saving and loading: ``Trainer(plugins=[CheckpointIO()])``.

Lightning's own writes each checkpoint into the system's temporary directory and moves it, which
between two file systems is a copy over the old one. This one writes beside the name and renames,
durably. Under DDP Lightning saves on rank 0 alone; with stores of each node's own the other nodes
are given what they load by a rank that has it.

Never: when Lightning saves, and what (its callbacks, its strategy).

Invariants
- The name leads to the whole new checkpoint or to what was there before, and is durable on return.
- All ranks load the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cxlfs.adapters import require
from cxlfs.checkpoint import good
from cxlfs.durable import sync_directory
from cxlfs.errors import CxlfsError, NoCheckpointError, NoGoodCheckpointError

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO as LightningCheckpointIO

_PIECE_BYTES = 64 << 20
_Place = tuple[str, int, int, int, int]


def __getattr__(name: str) -> object:
    """``CheckpointIO`` is a class of Lightning's: made when it is asked for."""
    if name == "CheckpointIO":
        return _class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _class() -> Callable[[], LightningCheckpointIO]:
    require("lightning", "lightning")
    from lightning.fabric.plugins import CheckpointIO as Base  # noqa: PLC0415 - when it is used

    class CheckpointIO(Base):  # type: ignore[misc]  # Lightning is not typed here
        """See the module. A directory for a path to load: the newest complete checkpoint in it."""

        def save_checkpoint(
            self, checkpoint: object, path: str | os.PathLike[str], storage_options: object = None
        ) -> None:
            if storage_options is not None:
                raise TypeError("CheckpointIO of cxlfs takes no storage_options")
            save(checkpoint, Path(path))

        def load_checkpoint(
            self,
            path: str | os.PathLike[str],
            map_location: object = None,
            weights_only: bool | None = None,  # noqa: FBT001 - Lightning's signature
        ) -> object:
            return load(Path(path), map_location=map_location, weights_only=weights_only)

        def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
            remove(Path(path))

    return CheckpointIO


# --- files --------------------------------------------------------------------------------------


def save(checkpoint: object, path: Path) -> None:
    """Raises OSError, and what torch.save does; the name is then as it was."""
    require("torch", "lightning")
    import torch  # noqa: PLC0415 - as above

    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.tmp")  # what a killed one has left is written over
    try:
        with beside.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def remove(path: Path) -> None:
    """For good. What is not there is removed already. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        sync_directory(path.parent)


def find(path: Path) -> Path | None:
    """The file to load; None: there is none on this node.

    Raises NoGoodCheckpointError: a directory in which no checkpoint is complete.
    """
    if not path.is_dir():
        return path if path.exists() else None
    try:
        entry, _ = good(path)
    except NoCheckpointError:
        return None
    return entry.path


def load(path: Path, *, map_location: object = None, weights_only: bool | None = None) -> object:
    """On all ranks. Raises NoCheckpointError (no node has it), NoGoodCheckpointError, OSError."""
    require("torch", "lightning")
    import torch  # noqa: PLC0415 - as above

    error: CxlfsError = NoCheckpointError(f"there is no checkpoint {path}, on any node")
    found = None
    try:
        found = find(path)
    except NoGoodCheckpointError as failure:  # what other ranks have may be good
        error = failure
    source = _shared(found) if _is_distributed() else found
    if source is None:
        raise error
    return torch.load(source, map_location=map_location or "cpu", weights_only=weights_only)


# --- between nodes ------------------------------------------------------------------------------


def _is_distributed() -> bool:
    from torch import distributed  # noqa: PLC0415 - as above

    return bool(distributed.is_available() and distributed.is_initialized())


def _shared(found: Path | None) -> Path | io.BytesIO | None:
    """That file, or the bytes of the one that the lowest rank has which has any: of this rank's
    own only where it is the very same. A collective of all ranks.
    """
    from torch import distributed  # noqa: PLC0415 - as above

    places: list[_Place | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(places, None if found is None else _place_of(found))
    source = next((rank for rank, place in enumerate(places) if place is not None), None)
    if source is None or all(place == places[source] for place in places):
        return found
    rank = distributed.get_rank()
    is_own = places[rank] == places[source]
    received = io.BytesIO()
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(found.open("rb")) if found and rank == source else None
        while True:
            piece = [b"" if file is None else file.read(_PIECE_BYTES)]
            distributed.broadcast_object_list(piece, src=source)
            if not piece[0]:
                break
            if not is_own:
                received.write(piece[0])
    received.seek(0)
    return found if is_own else received


def _place_of(path: Path) -> _Place:
    """Of a file that was not changed in between, the same in all processes of a node alone."""
    status = path.stat()
    return (
        socket.gethostname(),
        status.st_dev,
        status.st_ino,
        status.st_mtime_ns,
        status.st_size,
    )
