"""Find where the tensors of a checkpoint are, from what the readers of formats say.

The readers name most tensors with a file, an offset and a size. What they leave out is added here:
the boxes of a tensor that torch DCP and Orbax cut up, arrays that are deflated. Nothing but headers
is read.

Other modules read the items. Every number is checked here before anything uses it: a tensor that
does not fit its shape, its file or the limits is listed with a reason, and without places.
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.catalogue import catalogue, with_step
from cxlfs.checkpoint.inspection import Examined, checkpoint_of, examine
from cxlfs.checkpoint.model import Algorithm, Contents, ProblemError, Region, Tensor
from cxlfs.checkpoint.place import Place
from cxlfs.checkpoint.tensors import boxes, compressed
from cxlfs.checkpoint.tensors.dtypes import item_type
from cxlfs.checkpoint.tensors.model import (
    Digest,
    Layout,
    Part,
    StoredTensor,
    dense_strides,
    span_items,
)
from cxlfs.errors import DirectoryAbsentError, NotInspectableError

_CHECKSUMS = (Algorithm.CRC32, Algorithm.CRC32C, Algorithm.CRC32C_MASKED)
_NO_PLACE = "the format says no place: it is compressed, cut up, or part of an index"
_IS_NO_TENSOR = "its items are not numbers of 8 bits or more"


def layout_of(path: str | Path) -> Layout | None:
    """The tensors of one checkpoint; None: it is none of a format that is known.

    Raises ProblemError where not even the format can be told.
    """
    found = examine(path, lists_all=True)
    if found is None:
        return None
    home, contents = found.home, found.contents
    sizes = {file.name: file.size_bytes for file in contents.files}
    regions = _Regions(contents.regions)
    plain = with_step(checkpoint_of(path, found))
    return Layout(
        path=str(path),
        kind=found.kind,
        home=home,
        state=plain.state,
        state_reason=plain.reason,
        step=plain.step,
        files=tuple(contents.files),
        tensors=tuple(_checked(each, sizes, regions) for each in _tensors(found)),
        notes=tuple(contents.notes),
    )


def only_layout(path: str | Path) -> Layout | None:
    """Of the checkpoint at ``path``, or of the only one in that directory; None: there is none.

    Raises DirectoryAbsentError, NotInspectableError: which says what to name instead.
    """
    try:
        found = layout_of(path)
        if found is not None and (found.tensors or found.kind != "unknown"):
            return found
        if not os.path.lexists(path):
            raise DirectoryAbsentError(f"{path} is not there")
        inside = catalogue(path) if Path(path).is_dir() else ()
        if len(inside) > 1:
            raise NotInspectableError(
                f"{path} is no checkpoint, and {len(inside)} are in it",
                next_step=f"name one of them: {inside[0].checkpoint.path}",
            )
        return layout_of(inside[0].checkpoint.path) if inside else None
    except ProblemError as error:
        raise NotInspectableError(f"cannot look inside {path}: {error}") from error


def _tensors(found: Examined) -> list[StoredTensor]:
    """Before their numbers are compared with the files."""
    # What follows reads headers again, and has as much to read as the first time.
    home = Place(found.home.path)
    listed: list[StoredTensor] = []
    rest: list[Tensor] = []
    taken: dict[str, bool] = {}
    for tensor in found.contents.tensors:
        name = boxes.home_of(tensor)
        if name is None:
            rest.append(tensor)
        elif name not in taken:
            taken[name] = True
            listed += _boxed(home, name, found.contents)
    inflated = compressed.tensors_in(home, [each for each in rest if each.offset is None])
    for tensor in rest:
        listed.append(inflated.get((tensor.file, tensor.name)) or _plain(tensor))
    return listed


def _boxed(home: Place, name: str, contents: Contents) -> list[StoredTensor]:
    try:
        return boxes.tensors_in(home, name, contents)
    except ProblemError as error:
        whole = [each for each in contents.tensors if boxes.home_of(each) == name]
        return [StoredTensor(each.name, each.dtype, each.shape, (), str(error)) for each in whole]


def _plain(tensor: Tensor) -> StoredTensor:
    if tensor.offset is None or tensor.size_bytes is None:
        return StoredTensor(tensor.name, tensor.dtype, tensor.shape, (), _NO_PLACE)
    shape = tensor.shape
    strides = dense_strides(shape) if tensor.strides is None else tensor.strides
    start = (0,) * len(shape)
    part = Part(tensor.file, tensor.offset, tensor.size_bytes, start, shape, strides)
    return StoredTensor(tensor.name, tensor.dtype, shape, (part,))


class _Regions:
    """The checksums of a format, by the bytes that they are of."""

    def __init__(self, regions: list[Region]) -> None:
        self._by_end: dict[tuple[str, int], Region] = {}
        for region in regions:
            if region.algorithm in _CHECKSUMS and not region.deflated:
                self._by_end.setdefault((region.file, region.offset + region.size_bytes), region)

    def around(self, part: Part) -> Digest | None:
        """Of bytes that end where the part does, or with the few that follow a tensor in its
        record; of others nothing is known.
        """
        region = self._by_end.get((part.file, part.offset + part.size_bytes))
        if region is None or region.offset > part.offset:
            return None
        ahead = part.offset - region.offset
        return Digest(region.algorithm, region.expected, region.size_bytes, ahead)


def _checked(tensor: StoredTensor, sizes: dict[str, int | None], regions: _Regions) -> StoredTensor:
    """The same with digests; or with a reason, and without parts that cannot be."""
    if tensor.reason is not None:
        return tensor
    of_item = item_type(tensor.dtype)
    for part in tensor.parts:
        end = part.offset + part.size_bytes
        if end > (sizes.get(part.file) or 0):
            words = f"it ends at byte {end} of {part.file or 'the file'}, which is shorter"
            return StoredTensor(tensor.name, tensor.dtype, tensor.shape, (), words)
    if of_item is None:
        return dataclasses.replace(tensor, reason=_IS_NO_TENSOR)
    for part in tensor.parts:
        needed = span_items(part.shape, part.strides) * of_item.item_bytes
        if part.codec is None and needed > part.size_bytes:
            return dataclasses.replace(tensor, reason="its size does not fit its shape")
    if any(size > limits.NUMBER_MAX for size in (tensor.items, *tensor.shape)):
        return dataclasses.replace(tensor, reason="its shape cannot be")
    if not all(_is_inside(part, tensor.shape) for part in tensor.parts):
        return dataclasses.replace(tensor, reason="its parts do not fit its shape")
    if math.prod(tensor.shape) != sum(part.items for part in tensor.parts):
        return dataclasses.replace(tensor, reason="its parts do not make up its shape")
    parts = tuple(dataclasses.replace(part, digest=regions.around(part)) for part in tensor.parts)
    return dataclasses.replace(tensor, parts=parts)


def _is_inside(part: Part, shape: tuple[int, ...]) -> bool:
    """The box of the part lies inside the tensor."""
    if not len(part.start) == len(part.shape) == len(part.strides) == len(shape):
        return False
    return all(
        at + size <= whole for at, size, whole in zip(part.start, part.shape, shape, strict=True)
    )
