"""HDF5 files, listed by HDF5's own library: in a process of its own, with limits.

That library is written for files of friends. What a file can make it do (fail, hang, take all
memory, open other files) happens in a process that holds one descriptor, open for reading, and can
open nothing more. It is not asked for data: all objects are opened, and the data sets are named.

Never here: the superblock (``formats.hdf5``), h5py in this process (``hdf5_child`` imports it).

Invariants
- What the child says is not trusted: it is checked against its type, within limits.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from cxlfs.checkpoint import hdf5_child, limits
from cxlfs.checkpoint.jsons import Name, Number, checked, parse_json, prepared
from cxlfs.checkpoint.model import (
    BeyondLimitsError,
    Contents,
    DamagedError,
    Hdf5Part,
    ProblemError,
    Tensor,
)
from cxlfs.checkpoint.place import Place

SECONDS_MAX = 30.0
FILES_MAX = 64
"""Of one checkpoint: each takes a third of a second."""
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL})
_ENVIRONMENT = {"HDF5_PLUGIN_PRELOAD": "::", "HDF5_USE_FILE_LOCKING": "FALSE"}
"""No filter is loaded from elsewhere (H5PLset_loading_state), and no lock taken."""
_NOT_KNOWN = re.compile(r"(?<!object header )version|alloc")
"""What HDF5 says of what a later library wrote (of object headers there are two versions alone),
and of memory that it does not get.
"""
_HINT = "h5py cannot be imported; next: pip install --force-reinstall h5py"


@prepared
class _DataSet(msgspec.Struct):
    name: Name
    dtype: Name
    shape: tuple[Number, ...]
    offset: Number | None
    size: Number | None


@prepared
class _Listed(msgspec.Struct):
    """What the child says. ``problem``: in HDF5's words; ``lies``: in its own."""

    tensors: list[_DataSet]
    attributes: list[str]
    problem: str = ""
    lies: str = ""
    left_out: str = ""


def list_hdf5(place: Place, contents: Contents) -> None:
    """Name the data sets of the HDF5 files in ``contents.hdf5``; their problems become those of
    the checkpoint, and what could not be looked at a note.
    """
    for number, part in enumerate(contents.hdf5):
        name = f"{part.file}: " if part.file else ""
        if number >= FILES_MAX:
            contents.notes.append(f"{name}its groups were not looked into: there are many files")
            continue
        try:
            take_listed(part, _ask_child(place, part), contents, name)
        except ProblemError as error:
            contents.problems.append(error)


def take_listed(part: Hdf5Part, said: object, contents: Contents, name: str = "") -> None:
    """Add what the child's ``listed`` says of a file. Raises ProblemError."""
    found = checked(said, _Listed, "what HDF5's library says of it")
    if _NOT_KNOWN.search(found.problem):
        raise BeyondLimitsError(f"HDF5's library does not read it: {found.problem[:200]}")
    if found.problem:
        raise DamagedError(f"HDF5's library cannot read it: {found.problem[:200]}")
    if found.lies:
        raise DamagedError(found.lies[:300])
    if found.left_out:
        contents.notes.append(f"{name}{found.left_out[:200]}")
    contents.tensors += [_tensor(each, part) for each in found.tensors]
    contents.attributes += found.attributes


def _ask_child(place: Place, part: Hdf5Part) -> object:
    """Raises BeyondLimitsError: it could not be looked into; DamagedError: HDF5 crashes on it."""
    with place.open(part.file) as reader:
        command = (sys.executable, "-I", str(Path(__file__).with_name("hdf5_child.py")))
        numbers = (str(reader.descriptor), str(part.base), str(part.length))
        process = subprocess.Popen(
            (*command, *numbers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[reader.descriptor],
            env=_ENVIRONMENT,
        )
        with process:
            try:
                said, _ = process.communicate(timeout=SECONDS_MAX)
            except subprocess.TimeoutExpired as error:
                process.kill()
                words = f"HDF5's library took more than {SECONDS_MAX:g} s"
                raise BeyondLimitsError(words) from error
            except BaseException:
                process.kill()
                raise
    if -process.returncode in _CRASHES:
        raise DamagedError(f"HDF5's library ends with signal {-process.returncode} reading it")
    if process.returncode == hdf5_child.MISSING:
        raise BeyondLimitsError(_HINT)
    if process.returncode != 0 or len(said) > limits.JSON_BYTES_MAX:
        raise BeyondLimitsError(f"HDF5's library ended with code {process.returncode}")
    return parse_json(said, "what HDF5's library says of it")


def _tensor(found: _DataSet, part: Hdf5Part) -> Tensor:
    offset = size = None
    if found.offset is not None and found.size is not None:
        if found.offset + found.size > part.length:
            raise DamagedError(f"tensor {found.name[:200]} lies behind the end")
        offset, size = part.base + found.offset, found.size
    return Tensor(found.name, found.dtype, found.shape, part.file, offset, size)
