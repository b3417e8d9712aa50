"""PyTorch's distributed checkpoint (DCP) in stores of each node's own, committed for the whole job.

    checkpointer = Checkpointer("/mnt/ckpt/run1")
    found = dcp.load(checkpointer, state)               # Restored, Nothing, or Resharded
    dcp.save(checkpointer, step, state)
    pending = dcp.async_save(checkpointer, step, state)
    state = {"training": dcp.Training(model, optimizer)}

Each rank writes what it holds as a DCP checkpoint of one rank, straight into the medium where it
may (``cxlfs.torch``): files and metadata lie where the rank runs, and nothing is planned over the
network (docs/job.md has the reasons). The commit is the Checkpointer's. The metadata of all ranks
are put together when somebody loads it in another number of ranks.

Never: collectives of the job's process group.

Invariants
- Nothing is left as it was in memory without an error: a tensor of which parts cannot be reached
  is refused before any is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cxlfs.adapters import require
from cxlfs.errors import JobFilesError, NotRestoredError, NotWholeError
from cxlfs.job import (
    Aborted,
    Checkpointer,
    Committed,
    Nothing,
    PendingCheckpoint,
    Reachable,
    Resharded,
    Restored,
)

if TYPE_CHECKING:
    from torch import nn, optim
    from torch.distributed.checkpoint import LoadPlanner, StorageReader
    from torch.distributed.checkpoint.metadata import Metadata

State = dict[str, object]
_METADATA = ".metadata"


class Training:
    """A model and its optimizers as one entry of a state, however they are sharded or wrapped (DDP,
    FSDP, tensor parallel), by what PyTorch has for that (``get_state_dict``): names of parameters
    in the place of their numbers, so that it loads in another number of ranks, too.
    """

    def __init__(self, model: nn.Module, *optimizers: optim.Optimizer) -> None:
        require("torch", "torch")
        self._model = model
        self._optimizers = optimizers

    def state_dict(self) -> State:
        from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: PLC0415

        model, optimizers = get_state_dict(self._model, self._optimizers)
        return {"model": model, "optimizers": optimizers}

    def load_state_dict(self, state: State) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict  # noqa: PLC0415

        set_state_dict(
            *(self._model, self._optimizers),
            model_state_dict=state["model"],
            optim_state_dict=state["optimizers"],
        )


# --- verbs --------------------------------------------------------------------------------------


def save(checkpointer: Checkpointer, step: int, state: State) -> Committed | Aborted:
    """As ``Checkpointer.distributed_checkpoint``: on ``Committed`` it is durable on all nodes.

    Raises FrameworkMissingError, UndecidedError, AbortedError, JobConfigurationError.
    """
    require("torch", "torch")
    plain = _without_statefuls(state)
    return checkpointer.distributed_checkpoint(step, lambda directory: write(directory, plain))


def async_save(checkpointer: Checkpointer, step: int, state: State) -> PendingCheckpoint:
    """As ``Checkpointer.async_checkpoint``: what is saved was copied to the host when this returns.

    Raises FrameworkMissingError, UndecidedError, AbortedError, JobConfigurationError.
    """
    require("torch", "torch")
    return checkpointer.async_checkpoint(step, write, snapshot=lambda: _staged(state))


def load(
    checkpointer: Checkpointer, state: State, *, stores: Sequence[str | os.PathLike[str]] = ()
) -> Restored | Nothing | Resharded:
    """Into the state, in place, as ``torch.distributed.checkpoint.load`` does; comes first, at each
    start of the job. Where the newest checkpoint is of another number of ranks, or sharded in
    another way, all ranks load what each needs of it: from this rank's directory, from ``stores``
    (other nodes' directories of the same run, as they can be reached here), and from those of other
    ranks, who send the parts. Tensors that every rank held need no others.

    Raises FrameworkMissingError, UndecidedError, ForkError, NotRestoredError (with the stores that
    would be needed), AbortedError.
    """
    require("torch", "torch")
    rank = checkpointer.world.rank
    try:
        return checkpointer.restore_from_checkpoint(
            lambda directory: read({rank: directory}, state, rank=rank)
        )
    except (NotRestoredError, NotWholeError) as error:
        try:
            return checkpointer.restore_resharded(
                lambda found: _load_parts(found, state, rank),
                check=lambda found: _needed(found, state, rank),
                heads=(_METADATA,),
                stores=stores,
            )
        except NotRestoredError as other:
            other.add_note(f"each rank its own: {error}")
            raise


def write(directory: Path, state: State) -> None:
    """As a DCP checkpoint of one rank: ``torch.distributed.checkpoint.load`` reads it, too."""
    require("torch", "torch")
    from torch.distributed import checkpoint  # noqa: PLC0415 - the framework, when it is used

    from cxlfs.adapters.torch.writer import StorageWriter  # noqa: PLC0415 - it imports PyTorch

    with _one_process():
        writer = StorageWriter(directory, overwrite=False)
        checkpoint.save(state, storage_writer=writer, no_dist=True)


def read(directories: Mapping[int, Path], state: State, *, rank: int = 0) -> None:
    """From what ranks have written, by rank: ``rank``'s own comes first where several have it.

    Raises FrameworkMissingError, JobFilesError (a part of a tensor is in none of them), OSError,
    and what DCP raises.
    """
    require("torch", "torch")
    first = sorted(directories, key=lambda each: (each != rank, each))
    _read(state, _reader_class()({each: directories[each] for each in first}))


# --- one rank's part ----------------------------------------------------------------------------


def _read(state: State, reader: StorageReader) -> None:
    from torch.distributed import checkpoint  # noqa: PLC0415 - as above

    with _one_process():
        planner = _planner_class()()
        checkpoint.load(state, storage_reader=reader, planner=planner, no_dist=True)


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """DCP warns of what is meant here, that it is not to talk to other ranks; and what it raises is
    no Exception, but has one.
    """
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415 - as above

    _expect_no_collectives()
    try:
        yield
    except CheckpointException as error:
        raise next(failure for failure, _ in error.failures.values()) from error


@functools.cache
def _expect_no_collectives() -> None:
    """For good: what is put back (``catch_warnings``) is put back for all threads, and a checkpoint
    beside training is written in one of its own.
    """
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


def _without_statefuls(state: State) -> State:
    from torch.distributed.checkpoint.stateful import Stateful  # noqa: PLC0415 - as above

    return {
        name: value.state_dict() if isinstance(value, Stateful) else value
        for name, value in state.items()
    }


def _staged(state: State) -> State:
    from torch.distributed.checkpoint.staging import BlockingAsyncStager  # noqa: PLC0415 - as above

    staged: State = BlockingAsyncStager().stage(_without_statefuls(state))
    return staged


def _merged(directories: Mapping[int, Path]) -> Metadata:
    """What these ranks wrote, as if it were one checkpoint; of what several have, the first's."""
    from torch.distributed import checkpoint  # noqa: PLC0415 - as above
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata  # noqa: PLC0415

    merged = Metadata(state_dict_metadata={}, planner_data={}, storage_data={})
    for directory in directories.values():
        found = checkpoint.FileSystemReader(directory).read_metadata()
        for name, entry in found.state_dict_metadata.items():
            known = merged.state_dict_metadata.setdefault(name, entry)
            if isinstance(entry, TensorStorageMetadata) and known is not entry:
                if (known.size, known.properties.dtype) != (entry.size, entry.properties.dtype):
                    raise JobFilesError(f"{directory}: {name} is of another size, or type")
                offsets = {chunk.offsets for chunk in known.chunks}
                known.chunks += [c for c in entry.chunks if c.offsets not in offsets]
        for index, place in found.storage_data.items():
            path = str(directory / place.relative_path)  # absolute: it stays where it is
            whole = dataclasses.replace(place, relative_path=path)
            merged.storage_data.setdefault(index, whole)
        merged.planner_data = {**(found.planner_data or {}), **merged.planner_data}
        merged.version = found.version
    return merged


@functools.cache
def _reader_class() -> Callable[..., StorageReader]:
    from cxlfs.adapters.torch.reader import StorageReader  # noqa: PLC0415 - it imports PyTorch

    class PartsReader(StorageReader):
        """Parts by rank; ``verify`` is asked for each that is read from, before it is."""

        def __init__(
            self,
            directories: Mapping[int, Path],
            verify: Callable[[int], object] | None = None,
        ) -> None:
            self.directories = {each: path.absolute() for each, path in directories.items()}
            super().__init__(next(iter(self.directories.values())))
            self.verify = verify

        def read_metadata(self) -> Metadata:
            return _merged(self.directories)

        def read_data(self, plan: object, planner: object) -> object:
            places = {self.storage_data[i.storage_index].relative_path for i in plan.items}  # type: ignore[attr-defined]
            for rank in sorted(_ranks_of(places, self.directories)):
                if self.verify is not None:
                    self.verify(rank)
            return super().read_data(plan, planner)

    return PartsReader


@functools.cache
def _planner_class() -> Callable[..., LoadPlanner]:
    from torch.distributed.checkpoint import DefaultLoadPlanner  # noqa: PLC0415 - as above

    class CoveringPlanner(DefaultLoadPlanner):  # type: ignore[misc]  # as above
        """DCP's own leaves what no chunk covers as it is, without a word."""

        def create_local_plan(self) -> object:
            plan = super().create_local_plan()
            planned: dict[str, int] = {}
            for item in plan.items:
                name = item.dest_index.fqn
                planned[name] = planned.get(name, 0) + math.prod(item.lengths)
            for name, value in self.state_dict.items():
                wanted = _elements(value)
                if wanted is not None and planned.get(name, 0) != wanted:
                    raise JobFilesError(
                        f"{planned.get(name, 0)} of {wanted} elements of {name} are there",
                        next_step="name the stores of all ranks that saved it",
                    )
            return plan

    return CoveringPlanner


def _elements(value: object) -> int | None:
    """Of a tensor, as many as this rank holds; None: no tensor, which is there or is not."""
    import torch  # noqa: PLC0415 - as above
    from torch.distributed._shard.sharded_tensor import ShardedTensor  # noqa: PLC0415
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    if isinstance(value, DTensor):
        is_held = value.device_mesh.get_coordinate() is not None
        return int(value.to_local().numel()) if is_held else None
    if isinstance(value, ShardedTensor):
        return sum(int(shard.tensor.numel()) for shard in value.local_shards())
    return int(value.numel()) if isinstance(value, torch.Tensor) else None


def _ranks_of(places: Iterable[str], directories: Mapping[int, Path]) -> set[int]:
    """Whose directories these files lie in."""
    ranks = {path: rank for rank, path in directories.items()}
    return {ranks[Path(place).parent] for place in places}


def _needed(found: Reachable, state: State, rank: int) -> set[int]:
    """Whose parts loading would read. Raises what it would, as far as their metadata say."""
    planner, directories = _planner_class()(), _directories(found, rank)
    metadata = _merged(directories)
    planner.set_up_planner(_without_statefuls(state), metadata, is_coordinator=True)
    places, plan = metadata.storage_data, planner.create_local_plan()
    return _ranks_of((places[i.storage_index].relative_path for i in plan.items), directories)


def _load_parts(found: Reachable, state: State, rank: int) -> None:
    _read(state, _reader_class()(_directories(found, rank), found.verified))


def _directories(found: Reachable, rank: int) -> dict[int, Path]:
    """The rank's own comes first, then what need not be brought."""
    parts = sorted(found.parts, key=lambda p: (p.rank != rank, p.rank in found.elsewhere, p.rank))
    return {part.rank: found.directory(part).absolute() for part in parts}
