"""PyTorch's own ways to save and load, without the kernel's copies: ``save`` and ``load`` of one
file, and DCP's ``StorageWriter`` and ``StorageReader``.

Never: another format than PyTorch's; a setting of PyTorch that others see.

Invariants
- Importing it does not import PyTorch.
"""

from __future__ import annotations

from cxlfs.adapters import require
from cxlfs.adapters.torch.archives import load, save
from cxlfs.adapters.torch.behind import async_save

__all__ = ["StorageReader", "StorageWriter", "async_save", "load", "save"]


def __getattr__(name: str) -> object:
    """Subclasses of PyTorch's are made when they are asked for. Raises FrameworkMissingError."""
    if name == "StorageWriter":
        require("torch", "torch")
        from cxlfs.adapters.torch.writer import StorageWriter  # noqa: PLC0415 - it imports PyTorch

        return StorageWriter
    if name == "StorageReader":
        require("torch", "torch")
        from cxlfs.adapters.torch.reader import StorageReader  # noqa: PLC0415 - it imports PyTorch

        return StorageReader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
