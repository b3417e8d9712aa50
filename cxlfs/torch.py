"""``torch.save`` and ``torch.load`` for files of a mounted store, without the kernel's copies.

    import cxlfs.torch
    cxlfs.torch.save(state, "/mnt/ckpt/last.pt")
    state = cxlfs.torch.load("/mnt/ckpt/last.pt")

Never here: anything but names; what they do is in ``cxlfs.adapters.torch``.

Invariants
- Importing it does not import PyTorch.
"""

from __future__ import annotations

from cxlfs.adapters.torch import load, save

__all__ = ["load", "save"]
