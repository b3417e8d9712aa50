"""The formats that are one file, and how directories look at files that belong to them.

To add one: a module with a class that is a :class:`~.base.FileFormat`, and a line in the table. The
first that recognises a file has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.formats.base import HEAD_BYTES, FileFormat
from cxlfs.checkpoint.formats.flax import Flax
from cxlfs.checkpoint.formats.hdf5 import Hdf5
from cxlfs.checkpoint.formats.keras import Keras
from cxlfs.checkpoint.formats.npy import NumpyArchive, NumpyArray
from cxlfs.checkpoint.formats.other import SUFFIXES, Other
from cxlfs.checkpoint.formats.pickle_file import PickleFile
from cxlfs.checkpoint.formats.safetensors import SafeTensors
from cxlfs.checkpoint.formats.torch_legacy import TorchLegacy
from cxlfs.checkpoint.formats.torch_zip import TorchZip
from cxlfs.checkpoint.jsons import read_json
from cxlfs.checkpoint.model import (
    BeyondLimitsError,
    Contents,
    DamagedError,
    File,
    IncompleteError,
    ProblemError,
)
from cxlfs.checkpoint.place import Place, Reader

FILE_FORMATS: tuple[FileFormat, ...] = (
    SafeTensors(),
    NumpyArray(),
    NumpyArchive(),
    Keras(),
    Hdf5(),
    TorchLegacy(),
    TorchZip(),
    PickleFile(),
    Flax(),
    Other(),
)
_JSON = ".json"
_READ_JSON = re.compile(
    r"(?:.*_)?(?:config|state|metadata)\.json|tokenizer\w*\.json|\w+_map\.json|vocab\.json"
    r"|added_tokens\.json|.*\.index\.json"
)
"""What libraries read when they load a checkpoint. Others are notes of a program's own."""
_NEVER_READ = ("training_args.bin",)
"""Written for people: no library reads them again when it loads the checkpoint."""
OF_FILES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".npy", ".h5", ".keras", ".msgpack"),
    ".pkl",
)
"""Names of files that hold states of training, among others."""
_OF_ANY_PROGRAM = (_JSON, ".pkl", ".pickle", *SUFFIXES)


def format_of(reader: Reader, name: str) -> FileFormat | None:
    """Which one an open file has. ``name``: the last part of its path."""
    head = reader.head(HEAD_BYTES)
    return next((each for each in FILE_FORMATS if each.recognises(name, head)), None)


def take_member(place: Place, name: str, contents: Contents, *, required: bool = False) -> Contents:
    """Add a file to what is known of a checkpoint, by whatever format it has.

    Its problems become the checkpoint's, with the name of the file. Returns what was found in the
    file alone. ``required``: it is a problem when it is missing, or not understood.
    """
    found = Contents()
    full_name = place.full_name(name)
    if name in _NEVER_READ and not required:
        contents.files.append(File(full_name, place.size_of(name), is_needed=False))
        return found
    try:
        with place.open(name) as reader:
            found.files.append(File(full_name, reader.size_bytes))
            found_format = format_of(reader, name.rpartition("/")[2])
            if found_format is not None:
                found = found_format.examine(reader)
            elif name.endswith(_JSON):
                _check_json(reader, found, required=required)
            elif required:
                raise _not_known(reader)
    except ProblemError as error:
        if not found.files:
            found.files.append(File(full_name, place.size_of(name)))
        if isinstance(error, BeyondLimitsError) and name.endswith(_OF_ANY_PROGRAM) and not required:
            contents.files += found.files
            contents.notes.append(f"{full_name}: {error}")
            return found
        named = str(error) if full_name in str(error) else f"{full_name}: {error}"
        found.problems.append(type(error)(named) if _is_plain(error) else error)
        if not required and not place.is_file(name):
            found = Contents()
    contents.files += found.files
    contents.tensors += found.tensors
    contents.regions += found.regions
    contents.notes += [f"{full_name}: {note}" for note in found.notes]
    contents.hdf5 += found.hdf5
    contents.problems += found.problems
    return found


def _check_json(reader: Reader, found: Contents, *, required: bool) -> None:
    try:
        read_json(reader, reader.name)
    except BeyondLimitsError as error:
        found.notes.append(str(error))
    except ProblemError as error:
        if required or _READ_JSON.fullmatch(reader.name.rpartition("/")[2]):
            raise
        found.notes.append(str(error))


def _not_known(reader: Reader) -> ProblemError:
    """Why a file that is needed is not taken as it is, although no reader knows it."""
    if not reader.size_bytes:
        return IncompleteError("it is empty")
    if not reader.head(HEAD_BYTES).strip(b"\0"):
        return IncompleteError("it begins with zeros")
    return BeyondLimitsError("its format is not known")


def take_stray(place: Place, name: str, contents: Contents) -> None:
    """Add a file that lies there and belongs to nothing: how it is does not matter."""
    full_name = place.full_name(name)
    contents.files.append(File(full_name, place.size_of(name), is_needed=False))
    contents.notes.append(f"{full_name} belongs to no part of it")


def _is_plain(error: ProblemError) -> bool:
    """Made from one line of text, so that another line can stand in its place."""
    return type(error).__init__ is ProblemError.__init__


def check_one_step(steps: Mapping[int, str], contents: Contents) -> None:
    """``steps``: that of each save which a file says it is of, and the name of the first one."""
    if len(steps) > 1:
        (first, one), (second, other), *_ = steps.items()
        words = f"{one} is of step {first}, {other} of step {second}"
        contents.problems.append(IncompleteError(f"files of several saves: {words}"))


def is_beside_others(place: Place, names: re.Pattern[str], mark: str) -> bool:
    """The directory that it lies in has another one of such a name, and in that a file ``mark``:
    a name alone proves nothing.
    """
    home = Place(place.path.parent)
    return any(
        names.fullmatch(each) is not None and home.is_file(f"{each}/{mark}")
        for each in home.names()
    )


def take_rest(place: Place, contents: Contents, depth: int = 0) -> None:
    """Add every file below a directory that was not added before."""
    if depth > limits.DEPTH_MAX:
        contents.notes.append(f"{place.prefix}: deeper than what is looked at")
        return
    take_files(place, contents, place.names())
    for name in place.names():
        if len(contents.files) > limits.FILES_MAX:
            raise BeyondLimitsError("it has more files than are read")
        if place.is_directory(name):
            take_rest(place.below(name), contents, depth + 1)


def doubt_from(contents: Contents, before: int, name: str) -> None:
    """Problems from number ``before`` on are of the file ``name``, which nothing may ask for."""
    contents.problems[before:] = [
        BeyondLimitsError(f"if {name} belongs to it: {error}")
        for error in contents.problems[before:]
    ]


def take_files(
    place: Place,
    contents: Contents,
    names: list[str] | tuple[str, ...],
    is_loaded: Callable[[str], bool] = lambda _: True,
) -> None:
    """Add all of these that are files and not added before. ``is_loaded``: whether the framework
    asks for a file of that name; others may be a program's own, or left over.
    """
    known = {file.name for file in contents.files}
    for name in names:
        full_name = place.full_name(name)
        if full_name in known:
            continue
        before = len(contents.problems)
        _take_file(place, contents, name, full_name)
        if not is_loaded(name):
            doubt_from(contents, before, full_name)


def _take_file(place: Place, contents: Contents, name: str, full_name: str) -> None:
    if place.is_file(name) or name in _NEVER_READ:
        take_member(place, name, contents)
    elif name.endswith(OF_FILES) and place.status(name) is None:
        contents.files.append(File(full_name, None))
        contents.problems.append(
            IncompleteError(f"{full_name} is missing: a link leads to what is not there")
        )
    elif name.endswith(OF_FILES) and not _is_filled(place, name):
        contents.files.append(File(full_name, None))
        contents.problems.append(DamagedError(f"{full_name} is not a regular file"))


def _is_filled(place: Place, name: str) -> bool:
    """True for a directory that holds something: savers give such names to directories, too."""
    return place.is_directory(name) and bool(place.below(name).names())
