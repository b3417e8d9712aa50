"""A model in several files with an index (Hugging Face): ``model.safetensors.index.json`` and
``model-00001-of-00008.safetensors``, or the same of ``pytorch_model.bin``.

Source: huggingface_hub/serialization/_torch.py, transformers/modeling_utils.py (5.23). Complete:
the index can be read, every file that it names is there and complete, and every tensor is in
the file that the index says. The index is written last: where a save over an older one was broken
off, some files are older than it and some newer. What the index does not name is left over.
"""

from __future__ import annotations

import re

import msgspec

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.ages import mixed
from cxlfs.checkpoint.formats.files import doubt_from, take_files, take_member, take_stray
from cxlfs.checkpoint.jsons import Name, json_of, prepared
from cxlfs.checkpoint.model import (
    BeyondLimitsError,
    Contents,
    DamagedError,
    File,
    IncompleteError,
    ProblemError,
)
from cxlfs.checkpoint.place import Place

INDEX_SUFFIX = ".index.json"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,6})-of-(?P<total>\d{5,6})(?P<end>\.\w+)")
_WEIGHTS = (".safetensors", ".bin")
_STEMS = ("model", "pytorch_model", "diffusion_pytorch_model")
"""Names that transformers and diffusers load without being told."""


def index_names(place: Place) -> list[str]:
    """Indexes of models in a directory."""
    ends = tuple(weights + INDEX_SUFFIX for weights in _WEIGHTS)
    return [name for name in place.names() if name.endswith(ends)]


def shard_names(place: Place) -> list[str]:
    """Files that are numbered as parts of a model."""
    return [name for name in place.names() if _is_shard(name)]


def _is_shard(name: str) -> bool:
    match = _SHARD.fullmatch(name)
    return match is not None and match["end"] in _WEIGHTS


@prepared
class _Index(msgspec.Struct):
    weight_map: dict[str, Name]


class Shards:
    kind = "safetensors-sharded"

    def recognises(self, place: Place) -> bool:
        return place.is_directory() and bool(index_names(place) or shard_names(place))

    def examine(self, place: Place) -> Contents:
        contents = Contents()
        take_models(place, contents)
        take_files(place, contents, place.names())
        return contents


def take_models(place: Place, contents: Contents) -> bool:
    """Add every model in parts that lies in the directory; whether there was one."""
    indexes = index_names(place)
    known = [name for name in indexes if name.partition(".")[0] in _STEMS]
    for name in indexes:
        before = len(contents.problems)
        try:
            _take_index(place, name, contents)
        except ProblemError as error:
            contents.problems.append(error)
        if known and name not in known:  # libraries load another one
            doubt_from(contents, before, place.full_name(name))
    named = {file.name for file in contents.files}
    stems = {name.removesuffix(INDEX_SUFFIX).rpartition(".")[0] for name in indexes}
    without: str | None = None
    for name in shard_names(place):
        match = _SHARD.fullmatch(name)
        if match is None or place.full_name(name) in named:
            continue
        if match["stem"] in stems:
            take_stray(place, name, contents)
            continue
        take_member(place, name, contents)
        without = without or f"{match['stem']}{match['end']}{INDEX_SUFFIX}"
    if without is not None:
        contents.problems.append(IncompleteError(f"{without} is missing"))
    return bool(indexes or without)


def _take_index(place: Place, name: str, contents: Contents) -> None:
    contents.files.append(File(place.full_name(name), place.size_of(name)))
    wanted: dict[str, list[str]] = {}
    for tensor, file in json_of(place, name, _Index).weight_map.items():
        wanted.setdefault(file, []).append(tensor)
    if len(wanted) > limits.FILES_MAX:
        raise BeyondLimitsError(f"{name} names more files than are read")
    if not wanted:
        raise DamagedError(f"{name} names no tensors")
    missing = {file for file in wanted if place.size_of(file) is None}
    for file in sorted(missing):
        contents.files.append(File(place.full_name(file), None))
        contents.problems.append(IncompleteError(f"{words_of(place.full_name(file))} is missing"))
    for file, tensors in sorted(wanted.items()):
        if file not in missing:
            _take_shard(place, file, tensors, contents)
    found = mixed(place, name, sorted(wanted))
    if found is not None:
        older, newer = place.full_name(found.older), place.full_name(found.newer)
        words = f"{newer} was written after {place.full_name(name)}, and {older} before"
        error = IncompleteError if found.is_proven else BeyondLimitsError
        contents.problems.append(error(f"the set may be mixed: {words}"))


def _take_shard(place: Place, file: str, tensors: list[str], contents: Contents) -> None:
    found = take_member(place, file, contents, required=True)
    if found.problems:
        return
    held = {tensor.name for tensor in found.tensors}
    absent = next((tensor for tensor in tensors if tensor not in held), None)
    if absent is not None and not found.notes:
        contents.problems.append(
            DamagedError(f"tensor {absent[:200]} is not in {place.full_name(file)}")
        )


def words_of(name: str) -> str:
    """``shard 3 of 8``, for a file that is numbered."""
    match = _SHARD.fullmatch(name)
    if match is None:
        return name
    return f"shard {int(match['number'])} of {int(match['total'])}"
