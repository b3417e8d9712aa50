"""A StorageWriter for ``torch.distributed.checkpoint``: several threads store tensors straight into
the medium.

    dcp.save(state, storage_writer=StorageWriter("/mnt/ckpt/step-7"))

Never: another layout than that of PyTorch's FileSystemWriter, which reads what this one writes.

Invariants
- Nothing is committed before every byte was stored: after an exception the files have the content
  that they had, and ``.metadata`` leads to none of what was new.
- ``.metadata`` comes last, by a rename over the old one; in between there is one or the other.
- Whatever a thread meets is raised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future as LocalFuture
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystem,
    _split_by_size_and_type,
    _StorageInfo,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from cxlfs import client
from cxlfs.adapters.torch.tensors import Staging, write_tensor

THREAD_COUNT = 2


@dataclasses.dataclass(slots=True)
class Watcher:
    """Whoever waits for a save: ``copied`` is called when the tensors may change again, before
    anything is committed; ``is_given_up``: the save is to end as soon as it can.
    """

    copied: Callable[[], None]
    is_given_up: bool = False


class GivenUpError(Exception):
    """Nobody wants the rest."""


class _Names(FileSystem):  # type: ignore[misc]  # torch is not typed here
    """What FileSystemWriter does with names; but ``.metadata`` is there until it is replaced."""

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Asked for in front of a rename over it, which is all that is needed."""


class StorageWriter(FileSystemWriter):  # type: ignore[misc]  # torch is not typed here
    """As FileSystemWriter, whose arguments these are, with more than one thread, each with a file
    of its own. ``sync_files`` concerns other file systems: a store's files are durable when closed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = THREAD_COUNT,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
    ) -> None:
        if thread_count < 1:
            raise ValueError(f"thread_count {thread_count}: 1 or more")
        super().__init__(
            path,
            single_file_per_rank=single_file_per_rank,
            sync_files=sync_files,
            thread_count=thread_count,
            cache_staged_state_dict=cache_staged_state_dict,
            overwrite=overwrite,
        )
        self.fs = _Names()
        self.watcher: Watcher | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Raises OSError, and what a planner does."""
        results = _Saving(self, planner).save(self._files(plan))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _files(self, plan: SavePlan) -> list[tuple[str, list[WriteItem]]]:
        if self.single_file_per_rank:
            parts = _split_by_size_and_type(self.thread_count, plan.items)
        else:
            parts = [[item] for item in plan.items]
        prefix = plan.storage_data.prefix
        return [(f"{prefix}{i}{DEFAULT_SUFFIX}", items) for i, items in enumerate(parts)]

    def sync(self, file: client.File) -> None:
        """What closing does not do on other file systems. Raises OSError."""
        if self.sync_files and not file.direct:
            os.fsync(file.fileno())


class _Saving:
    """One call of ``write_data``."""

    def __init__(self, writer: StorageWriter, planner: SavePlanner) -> None:
        self._writer = writer
        self._planner = planner
        self._watcher = writer.watcher
        self._failed: BaseException | None = None
        self._steps = contextlib.ExitStack()
        """What closes the files that were written, in their order, or discards them."""

    def save(self, files: Sequence[tuple[str, list[WriteItem]]]) -> list[WriteResult]:
        directory = Path(self._writer.path)
        keeps_open = self._writer.single_file_per_rank  # else there are as many as tensors
        opened: list[client.File] = []
        with self._steps, ThreadPoolExecutor(self._writer.thread_count) as pool:
            running: list[LocalFuture[list[WriteResult]]] = []
            try:
                for name, items in files:
                    if keeps_open:
                        opened.append(self._steps.enter_context(client.replacing(directory / name)))
                    file = opened[-1] if keeps_open else None
                    running.append(pool.submit(self._write, directory / name, items, file))
                results = [each for part in running for each in part.result()]
            except BaseException as error:  # noqa: BLE001 - raised below
                self._failed = self._failed or error
                pool.shutdown(cancel_futures=True)
                raise self._failed from None
            if self._watcher is not None:
                self._watcher.copied()
            for file in opened:
                self._writer.sync(file)
        return results

    def _write(
        self, path: Path, items: list[WriteItem], opened: client.File | None
    ) -> list[WriteResult]:
        try:
            with contextlib.ExitStack() as steps:
                file = opened or steps.enter_context(client.replacing(path))
                staging = Staging()
                # As FileSystemWriter has it: what is small comes first.
                ordered = sorted(items, key=lambda item: item.type is not WriteItemType.BYTE_IO)
                results = [self._write_item(file, path.name, each, staging) for each in ordered]
                file.flush()
                if opened is None:
                    self._writer.sync(file)
                return results
        except BaseException as error:
            self._failed = self._failed or error
            raise

    def _write_item(
        self, file: client.File, name: str, item: WriteItem, staging: Staging
    ) -> WriteResult:
        self._go_on()
        data = self._planner.resolve_data(item)
        offset = file.tell()
        if item.type is WriteItemType.BYTE_IO:
            file.write(data.getbuffer())
        else:
            write_tensor(file, data, staging, self._go_on)
        length = file.tell() - offset
        return WriteResult(
            index=item.index,
            size_in_bytes=length,
            storage_data=_StorageInfo(name, offset, length),
        )

    def _go_on(self) -> None:
        """Raises GivenUpError once another thread has failed, or whoever waits has gone."""
        if self._failed is not None or (self._watcher is not None and self._watcher.is_given_up):
            raise GivenUpError("given up")
