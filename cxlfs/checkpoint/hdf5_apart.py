"""HDF5 files of later versions, read by HDF5's own library: in a process of its own, with limits.

That library is written for files of friends. What a file can make it do (fail, hang, take all
memory, open other files) happens in a process that holds one descriptor, open for reading, and can
open nothing more. It is not asked for data: the tree, whose every part has a checksum in those
versions, is walked, and the data sets are named.

Never here: the superblock (``formats.hdf5``), h5py in this process (``hdf5_child`` imports it).

Invariants
- Without h5py (the extra ``hdf5``) a checkpoint is what its superblock says, and a note says so.
- What the child says is not trusted: it is parsed as any JSON, within limits.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.jsons import mapping, parse_json, sequence
from cxlfs.checkpoint.model import Contents, DamagedError, Later, ProblemError, Tensor
from cxlfs.checkpoint.place import Place

SECONDS_MAX = 30.0
FILES_MAX = 64
"""Of one checkpoint: each takes half a second."""
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL})
_ENVIRONMENT = {"HDF5_PLUGIN_PRELOAD": "::", "HDF5_USE_FILE_LOCKING": "FALSE"}
"""No filter is loaded from elsewhere (H5PLset_loading_state), and no lock taken."""
_LATER = re.compile(r"(?<!object header )version")
"""What HDF5 says of what a later library wrote; of object headers there are two versions alone."""
_HINT = "h5py is not installed (pip install h5py, or the extra hdf5)"


def list_later(place: Place, contents: Contents) -> None:
    """Name the data sets of the HDF5 files in ``contents.later``; their problems become those of
    the checkpoint, and what could not be looked at a note.
    """
    for number, part in enumerate(contents.later):
        name = f"{part.file}: " if part.file else ""
        if importlib.util.find_spec("h5py") is None:
            reason = _HINT
        elif number >= FILES_MAX:
            reason = "there are many such files"
        else:
            try:
                reason = _list_one(place, part, contents)
            except ProblemError as error:
                contents.problems.append(error)
                continue
        if reason:
            contents.notes.append(f"{name}its groups were not looked into: {reason}")


def _list_one(place: Place, part: Later, contents: Contents) -> str:
    """Why it could not be looked into; empty: it was. Raises ProblemError."""
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
            except subprocess.TimeoutExpired:
                process.kill()
                return f"HDF5's library took more than {SECONDS_MAX:g} s"
            except BaseException:
                process.kill()
                raise
    if -process.returncode in _CRASHES:
        raise DamagedError(f"HDF5's library ends with signal {-process.returncode} reading it")
    if process.returncode != 0 or len(said) > limits.JSON_BYTES_MAX:
        return f"HDF5's library ended with code {process.returncode}"
    found = mapping(parse_json(said, "what h5py says"), "what h5py says")
    problem = found.get("problem")
    if isinstance(problem, str) and _LATER.search(problem):
        return f"HDF5's library does not know it: {problem[:200]}"
    if isinstance(problem, str):
        raise DamagedError(f"HDF5's library cannot read it: {problem[:200]}")
    with contextlib.suppress(ValueError):
        contents.notes.remove(part.note)
    listed = [_tensor(each, part) for each in sequence(found.get("tensors"), "what h5py says")]
    others = [tensor for tensor in contents.tensors if tensor.file != part.file]
    contents.tensors[:] = [*others, *listed]
    reason = found.get("left_out")
    return reason[:200] if isinstance(reason, str) else ""


def _tensor(claim: object, part: Later) -> Tensor:
    fields = mapping(claim, "what h5py says")
    shape = tuple(_number(each) or 0 for each in sequence(fields.get("shape"), "a shape"))
    offset, size = _number(fields.get("offset")), _number(fields.get("size"))
    name = str(fields.get("name"))[: limits.NAME_CHARACTERS_MAX]
    if offset is None or size is None:
        return Tensor(name, str(fields.get("dtype")), shape, part.file, None, None)
    if offset + size > part.length:
        raise DamagedError(f"tensor {name[:200]} lies behind the end")
    return Tensor(name, str(fields.get("dtype")), shape, part.file, part.base + offset, size)


def _number(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= limits.NUMBER_MAX else None
