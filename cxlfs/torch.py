"""PyTorch's ways to save and load, for files of a mounted store, without the kernel's copies.

    import cxlfs.torch
    cxlfs.torch.save(state, "/mnt/ckpt/last.pt")
    state = cxlfs.torch.load("/mnt/ckpt/last.pt")

    dcp.save(state, storage_writer=cxlfs.torch.StorageWriter("/mnt/ckpt/step-7"))
    dcp.load(state, storage_reader=cxlfs.torch.StorageReader("/mnt/ckpt/step-7"))
    committed = cxlfs.torch.async_save(state, checkpoint_id="/mnt/ckpt/step-8")

Never here: anything but names; what they do is in ``cxlfs.adapters.torch``.

Invariants
- Importing it does not import PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxlfs.adapters import torch as _adapter
from cxlfs.adapters.torch import async_save, load, save

if TYPE_CHECKING:
    from cxlfs.adapters.torch.reader import StorageReader
    from cxlfs.adapters.torch.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter", "async_save", "load", "save"]


def __getattr__(name: str) -> object:
    if name in ("StorageReader", "StorageWriter"):
        return getattr(_adapter, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
