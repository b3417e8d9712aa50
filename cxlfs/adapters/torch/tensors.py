"""One tensor as an archive of its own in a file: the form in which DCP keeps each.

Never: a copy in host memory of more than a piece of a contiguous tensor; a tensor that changes
meanwhile (whoever calls sees to that).

Invariants
- PyTorch reads the archive as it reads that of ``torch.save`` of the tensor in host memory.
- What is written of a view is the view, not the storage below it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import serialization

from cxlfs import client
from cxlfs.adapters.torch.archives import Target, write_archive

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PIECE_BYTES = 32 << 20
"""Of a tensor on a device, in host memory on its way."""

Guard = Callable[[], None]
"""Called before each piece: raises when nothing more is wanted."""


class Staging:
    """Host memory for one thread, through which tensors of devices go. Page-locked where the device
    is a GPU, so that it is copied to without another copy in between.
    """

    def __init__(self) -> None:
        self._room: torch.Tensor | None = None

    def pieces(self, raw: torch.Tensor) -> Iterator[memoryview]:
        """The bytes of a tensor of bytes; each piece is there until the next is asked for."""
        if self._room is None:
            is_gpu = raw.device.type == "cuda"
            self._room = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=is_gpu)
        for start in range(0, raw.numel(), PIECE_BYTES):
            piece = raw[start : start + PIECE_BYTES]
            room = self._room[: piece.numel()]
            room.copy_(piece)  # done when it returns: nothing here is asynchronous
            yield memory_of(room)


class _Body(Target):
    """Goes on in a file. What the writer leaves out, the data of a record, comes from elsewhere."""

    def __init__(self, file: client.File, pieces: Iterator[memoryview], guard: Guard) -> None:
        self._file = file
        self._pieces = pieces
        self._guard = guard

    def write(self, data: ReadableBuffer, /) -> int:
        if self.spoiled:
            return memoryview(data).nbytes
        self._guard()
        return self._file.write(data)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """PyTorch's writer skips what it was not given, and asks for nothing else."""
        if not self.spoiled:
            for piece in self._pieces:
                self._guard()
                self._file.write(piece)
                offset -= len(piece)
            if offset != 0 or whence != 1:
                raise RuntimeError("this PyTorch writes archives in another way")
        return 0


def write_tensor(file: client.File, tensor: torch.Tensor, staging: Staging, guard: Guard) -> None:
    """At the file's position. Raises OSError, and what ``torch.save`` does."""
    tensor = tensor.detach()
    on_host = is_on_host(tensor)
    is_whole = on_host and tensor.untyped_storage().nbytes() == tensor.nbytes
    if is_whole or not _is_in_one_piece(tensor):
        tensor = tensor.cpu()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        _write(tensor, _Body(file, iter(()), guard))
        return
    raw = bytes_of(tensor)
    pieces = iter([memory_of(raw)]) if on_host else staging.pieces(raw)
    with serialization.skip_data():
        _write(_stand_in(tensor), _Body(file, pieces, guard))


def _write(tensor: torch.Tensor, body: _Body) -> None:
    protocol = serialization.DEFAULT_PROTOCOL
    write_archive(tensor, body, serialization.pickle, protocol, crc32=False)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Its bytes can be addressed."""
    return bool(tensor.device.type == "cpu")


def _is_in_one_piece(tensor: torch.Tensor) -> bool:
    """Its elements lie one behind the other, and their bytes are all that there is of it."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.is_contiguous()
        and tensor.nbytes > 0
    )


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Of the same shape and type in host memory, of which no page is ever touched."""
    storage = torch.UntypedStorage(tensor.nbytes)
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.size())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as a tensor of bytes."""
    offset = tensor.storage_offset() * tensor.element_size()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage(), offset, (tensor.nbytes,))


def memory_of(raw: torch.Tensor) -> memoryview:
    """Of a tensor of bytes in host memory, which has to outlive it."""
    return memoryview((ctypes.c_ubyte * raw.numel()).from_address(raw.data_ptr())).cast("B")
