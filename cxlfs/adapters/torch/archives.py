"""``torch.save`` and ``torch.load``: bytes go directly between a program's tensors and the medium.

    save(state, "/mnt/ckpt/last.pt")
    state = load("/mnt/ckpt/last.pt")

What goes directly is said by ``cxlfs.client``; on any other file system both do what PyTorch does.

Never: another format; a setting of PyTorch that others see; an object unpickled in another way than
PyTorch does.

Invariants
- ``save`` writes what ``torch.save`` writes to a file object, byte for byte. Nothing is opened
  before the object was pickled, and what was not finished is discarded (``client.replacing``).
- A tensor that ``load`` gives was verified; the file never changes with it, nor it with the file.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from types import ModuleType
from typing import IO, TYPE_CHECKING, Literal, Protocol

from cxlfs import client
from cxlfs.adapters import require

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_FORCED = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
_ZIP = b"PK\x03\x04"
_SAVERS_MAX = 4
"""Memory has no more to give, and each has a lease of its own."""
_SHARED_FROM_BYTES = 8 << 20
"""Of one tensor: less is stored sooner than it is handed out."""
_LARGE_PAGE_BYTES = 2 << 20

Path = str | os.PathLike[str]


# --- saving -------------------------------------------------------------------------------------


def save(
    obj: object,
    f: Path | IO[bytes],
    pickle_module: ModuleType | None = None,
    pickle_protocol: int = 2,
    _use_new_zipfile_serialization: bool = True,  # noqa: FBT001, FBT002 - torch.save has it
    *,
    crc32: bool = False,
) -> None:
    """As ``torch.save``, the archive named as that of a file object; durable when it returns.

    ``crc32``: with the checksums of the zip format, which say of files of a store nothing that the
    store does not. PyTorch asks no archive for them.

    After an exception a file of a store has the content that it had, and a new name is gone:
    ``cxlfs.client.replacing``. To a file object, and in the old format, it is ``torch.save``.

    Raises FrameworkMissingError, OSError and what ``torch.save`` does.
    """
    require("torch", "torch")
    import torch  # noqa: PLC0415 - the framework, when it is used
    from torch import serialization  # noqa: PLC0415

    module = serialization.pickle if pickle_module is None else pickle_module
    skips_data = serialization._serialization_tls.skip_data  # noqa: SLF001
    is_ours = _use_new_zipfile_serialization and not skips_data
    if not isinstance(f, str | os.PathLike) or not is_ours:
        torch.save(obj, f, module, pickle_protocol, _use_new_zipfile_serialization)
        return
    serialization._check_dill_version(module)  # noqa: SLF001 - as torch.save does
    with _target(f) as target:
        write_archive(obj, target, module, pickle_protocol, crc32=crc32)


class Target(io.RawIOBase):
    """What an archive is written to. A writer of archives ends them when it is thrown away, too:
    what comes after ``spoiled`` goes nowhere.
    """

    spoiled = False

    def writable(self) -> bool:
        return True


def write_archive(
    obj: object, target: Target, module: ModuleType, protocol: int, *, crc32: bool
) -> None:
    """As ``torch.save`` to a file object; nothing is written before the object was pickled."""
    import torch  # noqa: PLC0415 - as above
    from torch import serialization  # noqa: PLC0415

    alignment = serialization._get_storage_alignment()  # noqa: SLF001
    writer = torch._C.PyTorchFileWriter(target, crc32, alignment)  # noqa: SLF001
    try:
        serialization._save(obj, writer, module, protocol, False)  # noqa: FBT003, SLF001
    except BaseException:
        target.spoiled = True
        # Else its destructor does it, and ends the process where that fails.
        with contextlib.suppress(RuntimeError):
            writer.write_end_of_file()
        raise
    writer.write_end_of_file()


class _Target(Target):
    """A file that is opened with the first byte."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: client.File | None = None
        self.pool: ThreadPoolExecutor | None = None
        self.steps = contextlib.ExitStack()

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data)
        if self.spoiled:
            return view.nbytes
        if self.file is None:
            self.file = self.steps.enter_context(client.replacing(self.path))
        if view.nbytes < _SHARED_FROM_BYTES or not self.file.direct:
            return self.file.write(view)
        return self._write_in_threads(self.file, view.cast("B"))

    def _write_in_threads(self, file: client.File, view: memoryview) -> int:
        """Each a stretch of its own, which begins with a large page, as room does."""
        if self.pool is None:
            self.pool = self.steps.enter_context(ThreadPoolExecutor(_threads(_SAVERS_MAX)))
        count, begin = _threads(_SAVERS_MAX), file.tell()
        end = begin + len(view)
        step = -(-len(view) // count)
        pages = (-(-(begin + i * step) // _LARGE_PAGE_BYTES) for i in range(1, count))
        cuts = [min(page * _LARGE_PAGE_BYTES, end) for page in pages]
        starts, ends = [begin, *cuts], [*cuts, end]
        stored = [
            self.pool.submit(file.write_at, view[a - begin : b - begin], a)
            for a, b in zip(starts, ends, strict=True)
        ]
        wait(stored)  # all of them, whatever one meets: the memory is not ours
        for each in stored:
            each.result()
        file.seek(end)
        return len(view)


@contextlib.contextmanager
def _target(path: Path) -> Iterator[_Target]:
    target = _Target(path)
    try:
        with target.steps:
            yield target
    finally:
        target.spoiled = True


# --- loading ------------------------------------------------------------------------------------


def load(
    f: Path | IO[bytes],
    map_location: object = None,
    pickle_module: ModuleType | None = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    verify: bool | Literal["always"] = True,
    **pickle_load_args: object,
) -> object:
    """As ``torch.load``; tensors are memory of the medium, pages become private when written to.

    That is so unless ``mmap`` is False, of a name of which the store's pages can be mapped so (not
    on DAX devices); everything else is ``torch.load``. The file may be overwritten, or removed,
    while they are in use. ``verify``: all bytes are compared with their checksums first, by several
    threads, together with other processes that load it just now, and not again where that was done
    lately (mount option ``verified_for``), but for "always"; without, nobody does.

    Raises FrameworkMissingError, OSError (EIO names the file and the bytes that are damaged) and
    what ``torch.load`` does.
    """
    require("torch", "torch")
    import torch  # noqa: PLC0415 - the framework, when it is used

    def as_torch_does() -> object:
        loaded: object = torch.load(
            f,
            map_location,
            pickle_module,
            weights_only=weights_only,
            mmap=mmap,
            **pickle_load_args,
        )
        return loaded

    if mmap is False or not _is_plain(f, pickle_module, weights_only, pickle_load_args):
        return as_torch_does()
    assert isinstance(f, str | os.PathLike)  # noqa: S101 - _is_plain says so, mypy cannot know
    how = client.Verify.ALWAYS if verify == "always" else client.Verify.NO
    with client.map(f, how, private=True) as mapped:
        if not mapped.direct or bytes(mapped.view[: len(_ZIP)]) != _ZIP:
            return as_torch_does()
        if verify:
            mapped.verify()
        view = mapped.view
    return _load(view, map_location, pickle_module, weights_only, as_torch_does, pickle_load_args)


def _is_plain(
    f: object, pickle_module: object, weights_only: object, arguments: dict[str, object]
) -> bool:
    """Nothing is asked for of which only ``torch.load`` itself knows what it means."""
    from mmap import MAP_SHARED  # noqa: PLC0415 - an argument is called mmap

    from torch.serialization import get_default_mmap_options  # noqa: PLC0415

    return (
        isinstance(f, str | os.PathLike)
        and not os.fspath(f).endswith(".safetensors")
        and not any(name in os.environ for name in _FORCED)
        and not (weights_only and (pickle_module is not None or arguments))
        and get_default_mmap_options() != MAP_SHARED
    )


def _load(
    view: memoryview,
    map_location: object,
    pickle_module: ModuleType | None,
    weights_only: object,
    as_torch_does: Callable[[], object],
    arguments: dict[str, object],
) -> object:
    import torch  # noqa: PLC0415 - as above
    from torch import serialization  # noqa: PLC0415

    reader = torch._C.PyTorchFileReader(Content(view))  # noqa: SLF001
    safe = weights_only
    if safe is None:
        safe = serialization._default_to_weights_only(pickle_module)  # noqa: SLF001
    if serialization._is_torchscript_zip(reader) or (safe and arguments):  # noqa: SLF001
        return as_torch_does()
    module = serialization.pickle if pickle_module is None else pickle_module
    if safe:
        module = serialization._weights_only_unpickler  # noqa: SLF001
    try:
        loaded: object = serialization._load(  # noqa: SLF001
            reader,
            map_location,
            module,
            overall_storage=torch.frombuffer(view, dtype=torch.uint8).untyped_storage(),
            **{"encoding": "utf-8", **arguments},
        )
    except serialization.pickle.UnpicklingError:
        if not safe:
            raise
        return as_torch_does()  # which refuses it too, and says what to do
    return loaded


def _threads(most: int) -> int:
    return min(os.cpu_count() or 1, most)


class Sliceable(Protocol):
    """Memory: as it is, or verified where a slice is taken."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> memoryview: ...


class Content(io.RawIOBase):
    """Memory as a file that PyTorch reads an archive's directory and pickle from."""

    def __init__(self, view: Sliceable) -> None:
        self._view = view
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._view)}
        self._position = base[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        part = self._view[self._position : self._position + memoryview(buffer).nbytes]
        memoryview(buffer).cast("B")[: len(part)] = part
        self._position += len(part)
        return len(part)
