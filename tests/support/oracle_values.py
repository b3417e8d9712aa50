"""What the libraries of ``oracle`` save: a format, its values, and one text for equal values."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Format:
    """``save`` writes a checkpoint of a seed at a path; ``load`` gives all that it holds back.

    ``checked``: the format has a checksum of all data. Otherwise changed bytes cannot be seen.
    """

    name: str
    needs: tuple[str, ...]
    file: str
    save: Callable[[Path, int], None]
    load: Callable[[Path], Any]
    checked: bool = False

    @property
    def is_here(self) -> bool:
        return all(importlib.util.find_spec(each) is not None for each in self.needs)


def arrays(seed: int) -> dict[str, np.ndarray]:
    made = np.random.default_rng(seed)
    return {
        "layers.0.w": made.random((40, 30)),
        "layers.0.b": made.random(30).astype(np.float32),
        "layers.1.w": made.integers(0, 1000, (25, 8)),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": made.random(()),
    }


def digest(value: Any) -> str:
    """One text for equal values of any library."""
    total = hashlib.sha256()
    _feed(total, value)
    return total.hexdigest()


def _feed(total: Any, value: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            total.update(repr(key).encode("utf-8", "backslashreplace"))
            _feed(total, value[key])
    elif isinstance(value, list | tuple):
        total.update(b"[%d" % len(value))
        for each in value:
            _feed(total, each)
    elif isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        total.update(f"{array.dtype}{array.shape}".encode())
        total.update(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())
    elif hasattr(value, "detach"):
        flat = value.detach().contiguous()
        total.update(f"{flat.dtype}{tuple(flat.shape)}".encode())
        total.update(
            bytes(flat.reshape(-1).view(_bytes_of_torch()).numpy()) if flat.numel() else b""
        )
    elif hasattr(value, "__dict__"):
        _feed(total, vars(value))
    else:
        total.update(repr(value).encode("utf-8", "backslashreplace"))


def _bytes_of_torch() -> Any:
    import torch

    return torch.uint8


def tensors(seed: int) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(np.array(each)) for name, each in arrays(seed).items()}
