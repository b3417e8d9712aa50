"""A tag directory of DeepSpeed: ``global_stepN`` with one file for each rank and part.

Source: deepspeed/runtime/engine.py, ``save_checkpoint``, ``_get_ckpt_name``,
``_get_expert_ckpt_name``; deepspeed/runtime/pipe/module.py, ``ckpt_layer_path`` (0.19). Every rank
writes its own files; rank 0 writes the name of the directory to ``latest`` beside it, last.

A name holds numbers: of the rank of data, of the model's rank, of a layer, of an expert. Of each
kind of name the files must fill the whole grid of those numbers: no number is left out below the
highest one that is there, or below what a file of the model says (``dp_world_size``,
``mp_world_size``; how many experts a gate knows). Layers alone may leave numbers out: a stage of a
pipeline that has no parameters has no file. So of layers one is missing where those before and
after it hold the same tensors, where the shapes of the parameters name it, or where the optimizer
has more parameters than all layers hold tensors. A file of a rank or an expert that the files of
the model do not know is left over from an earlier attempt.

With ZeRO there are shards of the optimizer: a file of the model has the shapes of its parameters
then and no optimizer (``_save_checkpoint``). All files of the model are of one step.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence

from cxlfs.checkpoint.formats.files import (
    check_one_step,
    doubt_from,
    take_files,
    take_member,
    take_stray,
)
from cxlfs.checkpoint.formats.ranks import first_gap
from cxlfs.checkpoint.jsons import number_or_none
from cxlfs.checkpoint.model import Contents, File, IncompleteError, Tensor
from cxlfs.checkpoint.pickles import Applied, Pairs
from cxlfs.checkpoint.place import Place

NAME = re.compile(r"global_step(\d{1,18})")
_MODEL = re.compile(r"(?:zero_pp_rank_\d{1,6}_)?mp_rank_\d{2,6}_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_\d{1,6}_mp_rank_\d{2,6}_optim_states\.pt")
_PART = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_\d{1,6}_|expp_rank_\d{1,6}_)?mp_rank_\d{2,6}_"
    r"(?:model|optim)_states\.pt"
    r"|layer_\d{1,6}_expert_\d{1,6}_mp_rank_\d{2,6}_model_states\.pt"
    r"|layer_\d{1,6}(?:-model_\d{2,6})?-model_states\.pt"
)
_LAYER = re.compile(r"layer_(\d{1,6})(?:-model_\d{2,6})?-model_states\.pt")
"""Without a rank where the model has one alone."""
_EXPERT = re.compile(r"layer_(\d{1,6})_expert_(\d{1,6})_mp_rank_\d{2,6}_model_states\.pt")
_OF_EXPERTS = re.compile(r"expp_rank_\d{1,6}_")
_RANK = re.compile(r"mp_rank_(\d{2,6})_")
_DATA_RANK = re.compile(r"(?:zero_pp|expp)_rank_(\d{1,6})_")
_NUMBER = re.compile(r"\d+")
_GATE = re.compile(r"gate\.wg\.weight$")
_LAYER_OF_NAME = re.compile(r"(\d{1,6})\.")
_RANKS_MAX = 1 << 20


class DeepSpeed:
    kind = "deepspeed"

    def recognises(self, place: Place) -> bool:
        return place.is_directory() and is_deepspeed(place)

    def examine(self, place: Place) -> Contents:
        contents = Contents()
        take_deepspeed(place, contents)
        return contents


def is_deepspeed(place: Place) -> bool:
    names = place.names()
    return any(map(_PART.fullmatch, names)) or (
        not names and NAME.fullmatch(place.name) is not None
    )


def take_deepspeed(place: Place, contents: Contents) -> None:
    """Add the tag directory."""
    match = NAME.fullmatch(place.name)
    names = place.names()
    if not names:
        contents.problems.append(IncompleteError(f"nothing is in {place.name}"))
    model = _Model()
    steps: dict[int, str] = {}
    tensors: dict[str, list[Tensor]] = {}
    # Files of the model first: they say which of the others there should be.
    for name in sorted(filter(_PART.fullmatch, names), key=lambda n: not _MODEL.fullmatch(n)):
        if model.is_stray(name) and not _MODEL.fullmatch(name):
            _take_stray(place, name, contents)
            continue
        before = len(contents.problems)
        found = take_member(place, name, contents, required=True)
        tensors[name] = found.tensors
        if _LAYER.fullmatch(name) and 0 < model.parameters <= model.held:
            doubt_from(contents, before, place.full_name(name))  # those before it are enough
        if _LAYER.fullmatch(name):
            model.held += len(found.tensors)
            model.is_torn |= bool(found.problems)
        if _MODEL.fullmatch(name):
            _learn(place.full_name(name), found, model, steps, contents)
    check_one_step(steps, contents)
    contents.step = next(iter(steps), None)
    take_files(place, contents, names)
    contents.named_step = int(match[1]) if match is not None else None
    if names:
        for name, words in _missing(tuple(tensors), model, tensors):
            contents.files.append(File(place.full_name(name), None))
            contents.problems.append(
                IncompleteError(f"{words} ({place.full_name(name)}) is missing")
            )


def _take_stray(place: Place, name: str, contents: Contents) -> None:
    take_stray(place, name, contents)
    if _OPTIMIZER.fullmatch(name):  # the engine loads none, its converter counts them
        contents.doubt(f"{place.full_name(name)} is of a rank that there is not")


def _learn(
    name: str, found: Contents, model: _Model, steps: dict[int, str], contents: Contents
) -> None:
    """From a file of the model, of which there may be no more than it says itself."""
    if model.is_stray(name.rpartition("/")[2]):
        words = f"{name} is of another save: no such rank is known to the files before it"
        contents.problems.append(IncompleteError(words))
    if isinstance(found.root, Pairs):
        of_file = number_or_none(found.root.get("global_steps"))
        if of_file is not None:
            steps.setdefault(of_file, name)
        model.learn(found.root, found.tensors)


class _Model:
    """What files of the model say of the others."""

    def __init__(self) -> None:
        self.world: tuple[int, int] | None = None
        self.is_zero = False
        self.experts = 0
        self.gates = 0
        self.parameters = 0
        """Of the optimizers that files of the model hold."""
        self.held = 0
        """Tensors of its layers; not all of them where one ``is_torn``."""
        self.is_torn = False
        self.layers: set[int] = set()

    def is_stray(self, name: str) -> bool:
        """True if the files of the model know no such rank or expert."""
        expert, rank, data = (p.search(name) for p in (_EXPERT, _RANK, _DATA_RANK))
        if expert is not None and self.gates:
            is_known = int(expert[1]) < self.gates and int(expert[2]) < self.experts
            if not is_known:
                return True
        if self.world is None:
            return False
        return (rank is not None and int(rank[1]) >= self.world[1]) or (
            data is not None and int(data[1]) >= self.world[0]
        )

    def learn(self, root: Pairs, tensors: list[Tensor]) -> None:
        data, ranks = (number_or_none(root.get(key)) for key in ("dp_world_size", "mp_world_size"))
        if data and ranks and data * ranks <= _RANKS_MAX:
            self.world = self.world or (data, ranks)
        self.parameters += _parameters_of(root.get("optimizer"))
        shapes = root.get("param_shapes")
        # Each rank keeps its part of the optimizer in a file of its own.
        self.is_zero |= shapes is not None and root.get("optimizer") is None
        for group in shapes if isinstance(shapes, list) else [shapes]:
            items = group.items if isinstance(group, Pairs | Applied) else []
            found = (_LAYER_OF_NAME.match(key) for key, _ in items if isinstance(key, str))
            self.layers |= {int(match[1]) for match in found if match is not None}
        for tensor in tensors:
            if _GATE.search(tensor.name) and tensor.shape:
                self.experts = max(self.experts, tensor.shape[0])
                self.gates += 1


def _parameters_of(optimizer: object) -> int:
    """How many tensors it changes, as ``torch.optim`` lists them."""
    groups = optimizer.get("param_groups") if isinstance(optimizer, Pairs) else None
    found = [
        group.get("params")
        for group in (groups if isinstance(groups, list) else [])
        if isinstance(group, Pairs)
    ]
    return sum(len(each) for each in found if isinstance(each, list))


def _missing(
    names: tuple[str, ...], model: _Model, tensors: dict[str, list[Tensor]]
) -> Iterator[tuple[str, str]]:
    """The first file of each kind that is not there, and what to call it."""
    kinds: dict[str, set[tuple[int, ...]]] = {}
    for name in filter(_PART.fullmatch, names):
        numbers = tuple(map(int, _NUMBER.findall(_plain(name))))
        kinds.setdefault(_NUMBER.sub("{}", _plain(name)), set()).add(numbers)
    if not any(map(_MODEL.fullmatch, names)):
        yield "mp_rank_00_model_states.pt", "shard 1 of the model"
    for kind, found in kinds.items():
        yield from _gap(kind, found, model)
    layers = {int(m[1]): m[0] for m in reversed(list(map(_LAYER.fullmatch, names))) if m}
    for layer in _missing_layers(layers, model, tensors):
        name = next(iter(layers.values()))
        yield name.replace(name.partition("-")[0], f"layer_{layer:02d}"), f"layer {layer}"
    if layers and not model.is_torn and model.held < model.parameters:
        words = f"one of the layers with {model.parameters} tensors in all, of {model.held},"
        yield "layer_*", words
    if any(map(_EXPERT.fullmatch, names)) and not any(map(_OF_EXPERTS.match, names)):
        yield "expp_rank_0_mp_rank_00_optim_states.pt", "the optimizer of the experts"
    if model.is_zero and not any(map(_OPTIMIZER.fullmatch, names)):
        total = f" of {model.world[0] * model.world[1]}" if model.world is not None else ""
        yield (
            "*zero_pp_rank_0_mp_rank_00_optim_states.pt",
            f"shard 1{total} of the optimizer",
        )


def _plain(name: str) -> str:
    """Without the numbers of types of numbers."""
    return name.replace("bf16_", "bfloat_").replace("fp16_", "half_")


def _gap(kind: str, found: set[tuple[int, ...]], model: _Model) -> Iterator[tuple[str, str]]:
    """The first of a grid of numbers that is not there."""
    highest = [max(column) for column in zip(*found, strict=True)]
    axes: list[Sequence[int]] = [range(number + 1) for number in highest]
    world = model.world
    if "zero_pp_rank" in kind and world is not None:
        axes = [range(world[0]), range(world[1])]
    elif "mp_rank" in kind or "-model_{}" in kind:
        ranks = world[1] if world is not None and "-model_{}" not in kind else highest[-1] + 1
        axes[-1] = range(ranks)
    if "_expert_" in kind:
        axes[1] = range(max(model.experts, highest[1] + 1))
    if kind.startswith("layer_{}-model_"):
        axes[0] = sorted({numbers[0] for numbers in found})
    index, numbers = first_gap(axes, found)
    if numbers:
        total = math.prod(map(len, axes))
        yield _name_of(kind, numbers), f"shard {index + 1} of {total}"


def _name_of(kind: str, numbers: tuple[int, ...]) -> str:
    """With as many digits as DeepSpeed gives a rank of the model and a layer of a pipeline."""
    text = kind.replace("bfloat_", "bf16_").replace("half_", "fp16_")
    for number in numbers:
        before = text.partition("{}")[0]
        is_wide = before.endswith(("mp_rank_", "-model_")) or (
            before.endswith("layer_") and "-model_" in text
        )
        text = text.replace("{}", f"{number:02d}" if is_wide else str(number), 1)
    return text


def _missing_layers(
    layers: dict[int, str], model: _Model, tensors: dict[str, list[Tensor]]
) -> Iterator[int]:
    if not layers:
        return
    missing = model.layers - layers.keys()

    def held(layer: int) -> list[tuple[str, tuple[int, ...]]]:
        return [(tensor.name, tensor.shape) for tensor in tensors.get(layers[layer], [])]

    for before, after in itertools.pairwise(sorted(layers)):
        if after - before > 1 and held(before) and held(before) == held(after):
            missing.add(before + 1)
    if missing:
        yield min(missing)
