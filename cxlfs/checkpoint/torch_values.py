"""Tensors in the values of a pickle that PyTorch wrote.

Source: torch/_utils.py (``_rebuild_*``), torch/serialization.py (``persistent_id``), torch 2.13.

Never here: how the storages lie in a file (``formats``).
"""

from __future__ import annotations

import dataclasses

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.jsons import number_or_none
from cxlfs.checkpoint.model import BeyondLimitsError, DamagedError
from cxlfs.checkpoint.pickles import Applied, Global, Pairs, Persistent

_STORAGES = {
    "DoubleStorage": ("float64", 8),
    "FloatStorage": ("float32", 4),
    "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2),
    "LongStorage": ("int64", 8),
    "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2),
    "CharStorage": ("int8", 1),
    "ByteStorage": ("uint8", 1),
    "BoolStorage": ("bool", 1),
    "ComplexDoubleStorage": ("complex128", 16),
    "ComplexFloatStorage": ("complex64", 8),
    "QInt8Storage": ("qint8", 1),
    "QInt32Storage": ("qint32", 4),
    "QUInt8Storage": ("quint8", 1),
    "QUInt4x2Storage": ("quint4x2", 1),
    "QUInt2x4Storage": ("quint2x4", 1),
    "UntypedStorage": ("uint8", 1),
}
ITEM_BYTES = {
    "float64": 8,
    "double": 8,
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "qint8": 1,
    "quint8": 1,
    "qint32": 4,
}
_UNTYPED = frozenset({"torch._utils._rebuild_tensor_v3"})
_TENSORS = frozenset(
    {
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_qtensor",
    }
)
_WRAPPERS = "torch._utils._rebuild_parameter"
_ORDERED = "collections.OrderedDict"


@dataclasses.dataclass(frozen=True, slots=True)
class Storage:
    """A stretch of memory that tensors share; ``key`` names it in the file."""

    key: str
    dtype: str
    item_bytes: int
    items: int

    @property
    def size_bytes(self) -> int:
        return self.items * self.item_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class TorchTensor:
    """``offset`` and ``size_bytes`` are bytes within the storage, gaps of strides included."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    storage: Storage
    offset: int
    size_bytes: int
    strides: tuple[int, ...] = ()
    """In items."""


def storage_of(value: object) -> Storage | None:
    """What a persistent id stands for; None: something else.

    ``('storage', type, key, location, items)``; the legacy format adds a view. Raises DamagedError.
    """
    if not isinstance(value, Persistent) or not isinstance(value.id, tuple):
        return None
    parts = value.id
    if len(parts) < 5 or parts[0] != "storage":
        return None
    kind, key, items = parts[1], parts[2], parts[4]
    if not isinstance(kind, Global) or not isinstance(key, str):
        raise DamagedError("a storage has no type or no name")
    if not isinstance(items, int) or not 0 <= items <= limits.NUMBER_MAX:
        raise DamagedError(f"the size of storage {key[:40]} cannot be")
    dtype, item_bytes = _STORAGES.get(kind.name, (kind.name, 1))
    return Storage(key, dtype, item_bytes, items)


class TensorWalk:
    """Finds the tensors below a value, in the order in which they were written.

    A name is the way there, keys joined by dots, as in a state dictionary.
    """

    def __init__(self) -> None:
        self.tensors: list[TorchTensor] = []
        self.storages: dict[str, Storage] = {}
        self._seen: set[int] = set()
        self._steps = 0
        self.shortened = False
        """Something was nested deeper than is looked into."""

    def walk(self, value: object, name: str = "", depth: int = 0) -> None:
        """Raises DamagedError, BeyondLimitsError."""
        self._steps += 1
        if self._steps > limits.PICKLE_STEPS_MAX:
            raise BeyondLimitsError("its values are more than are looked at")
        if isinstance(value, Applied) and self._take_tensor(value, name):
            return
        storage = storage_of(value)
        if storage is not None:
            self.storages.setdefault(storage.key, storage)
            return
        if not isinstance(value, Applied | Pairs | list | tuple) or id(value) in self._seen:
            return
        if depth > limits.WALK_DEPTH_MAX:
            self.shortened = True
            return
        self._seen.add(id(value))
        self._walk_inside(value, name, depth + 1)

    def _walk_inside(self, value: object, name: str, depth: int) -> None:
        if isinstance(value, Pairs):
            for key, inner in value.items:
                self.walk(inner, _joined(name, key), depth)
        elif isinstance(value, list | tuple):
            for index, inner in enumerate(value):
                if not isinstance(inner, str | int | float | None):
                    self.walk(inner, _joined(name, index), depth)
        elif isinstance(value, Applied):
            self._walk_applied(value, name, depth)

    def _walk_applied(self, value: Applied, name: str, depth: int) -> None:
        if value.called.startswith(_WRAPPERS) and isinstance(value.arguments, tuple):
            self.walk(next(iter(value.arguments), None), name, depth)
            return
        self.walk(value.arguments, name, depth)
        for key, inner in value.items:
            self.walk(inner, _joined(name, key), depth)
        for index, inner in enumerate(value.elements):
            self.walk(inner, _joined(name, index), depth)
        if value.called != _ORDERED:  # the state of one is bookkeeping of its module
            self.walk(value.state, name, depth)

    def _take_tensor(self, value: Applied, name: str) -> bool:
        if value.called not in _TENSORS or not isinstance(value.arguments, tuple):
            return False
        arguments = value.arguments
        if len(arguments) < 4:
            raise DamagedError(f"tensor {name} has no size")
        storage = storage_of(arguments[0])
        if storage is None:
            return False
        self.storages.setdefault(storage.key, storage)
        dtype, item_bytes = storage.dtype, storage.item_bytes
        if value.called in _UNTYPED and len(arguments) > 6 and isinstance(arguments[6], Global):
            dtype = arguments[6].name
            item_bytes = ITEM_BYTES.get(dtype, 1)
        self._append(name, dtype, item_bytes, storage, arguments)
        return True

    def _append(
        self,
        name: str,
        dtype: str,
        item_bytes: int,
        storage: Storage,
        arguments: tuple[object, ...],
    ) -> None:
        first, shape, strides = arguments[1], _numbers(arguments[2]), _numbers(arguments[3])
        if shape is None or strides is None or len(shape) != len(strides):
            raise DamagedError(f"the shape of tensor {name} cannot be")
        if not isinstance(first, int) or not 0 <= first <= limits.NUMBER_MAX:
            raise DamagedError(f"the place of tensor {name} cannot be")
        items = 0
        if all(shape):
            items = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        size = items * item_bytes
        if items and first * item_bytes + size > storage.size_bytes:
            raise DamagedError(f"tensor {name} is larger than its storage")
        if len(self.tensors) >= limits.TENSORS_MAX:
            raise BeyondLimitsError("it has more tensors than are listed")
        begin = first * item_bytes
        self.tensors.append(TorchTensor(name, dtype, shape, storage, begin, size, strides))


def _numbers(value: object) -> tuple[int, ...] | None:
    if isinstance(value, Applied) and value.called == "torch.Size":
        value = value.arguments[0] if isinstance(value.arguments, tuple) and value.arguments else ()
    if not isinstance(value, tuple | list) or len(value) > limits.DIMENSIONS_MAX:
        return None
    numbers = tuple(each for each in value if isinstance(each, int) and each >= 0)
    return numbers if len(numbers) == len(value) and all(map(_is_small, numbers)) else None


def _is_small(value: int) -> bool:
    return value <= limits.NUMBER_MAX


def _joined(name: str, key: object) -> str:
    part = str(key) if isinstance(key, str | int) else "?"
    found = f"{name}.{part}" if name else part
    return found[: limits.NAME_CHARACTERS_MAX]


STEP_KEYS = ("global_step", "global_steps", "step", "iteration", "iter", "num_steps")


EPOCH_KEYS = ("epoch", "current_epoch")


def progress_of(root: object) -> tuple[int | None, int | None]:
    """Step and epoch that a saved dictionary names under the usual keys."""
    items = root.items if isinstance(root, Pairs | Applied) else []
    found = {key: value for key, value in items if isinstance(key, str)}
    return _first(found, STEP_KEYS), _first(found, EPOCH_KEYS)


def _first(found: dict[str, object], keys: tuple[str, ...]) -> int | None:
    numbers = (number_or_none(found.get(key)) for key in keys)
    return next((number for number in numbers if number is not None), None)
