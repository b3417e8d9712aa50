"""A tag directory of DeepSpeed: ``global_stepN`` with one file for each rank and part.

Source: deepspeed/runtime/engine.py, ``save_checkpoint`` and ``_get_ckpt_name`` (0.19): every rank
writes its own files; rank 0 writes the name of the directory to ``latest`` beside it, last.
Complete: every file is, and for each rank of the world that a file of the model names
(``dp_world_size``, ``mp_world_size``) there is a shard of the optimizer, where there are any. With
ZeRO there are: a file of the model has the shapes of its parameters then and no optimizer
(``_save_checkpoint``). All files of the model are of one step.
"""

from __future__ import annotations

import re

from cxlfs.checkpoint.formats.files import check_one_step, take_files, take_member
from cxlfs.checkpoint.jsons import number_or_none
from cxlfs.checkpoint.model import Contents, File, IncompleteError
from cxlfs.checkpoint.pickles import Pairs
from cxlfs.checkpoint.place import Place

NAME = re.compile(r"global_step(\d{1,18})")
_MODEL = re.compile(r"(?:zero_pp_rank_\d{1,6}_)?mp_rank_\d{2,6}_model_states\.pt")
_SHARD = re.compile(
    r"(?P<head>(?:bf16_|fp16_)?zero_pp_rank_)(?P<data>\d{1,6})_mp_rank_(?P<model>\d{2,6})"
    r"(?P<end>_(?:optim|model)_states\.pt)"
)
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_\d{1,6}_mp_rank_\d{2,6}_optim_states\.pt")
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
    if NAME.fullmatch(place.name):
        return True
    return any(_MODEL.fullmatch(name) or _SHARD.fullmatch(name) for name in place.names())


def take_deepspeed(place: Place, contents: Contents) -> None:
    """Add the tag directory."""
    match = NAME.fullmatch(place.name)
    if not place.names():
        contents.problems.append(IncompleteError(f"nothing is in {place.name}"))
    world: tuple[int, int] | None = None
    models = [name for name in place.names() if _MODEL.fullmatch(name)]
    steps: dict[int, str] = {}
    is_zero = False
    for name in models:
        found = take_member(place, name, contents)
        if isinstance(found.root, Pairs):
            of_file = number_or_none(found.root.get("global_steps"))
            if of_file is not None:
                steps.setdefault(of_file, place.full_name(name))
            world = world or _world_of(found.root)
            is_zero = is_zero or _is_zero(found.root)
    check_one_step(steps, contents)
    if not models and place.names():
        contents.files.append(File(place.full_name("mp_rank_00_model_states.pt"), None))
        contents.problems.append(IncompleteError("mp_rank_00_model_states.pt is missing"))
    take_files(place, contents, place.names())
    contents.step = int(match[1]) if match is not None else next(iter(steps), None)
    _check_shards(place, world, contents)
    if is_zero and not any(map(_OPTIMIZER.fullmatch, place.names())):
        name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
        contents.files.append(File(place.full_name(name), None))
        total = f" of {world[0] * world[1]}" if world is not None else ""
        words = f"shard 1{total} of the optimizer (*{name}) is missing"
        contents.problems.append(IncompleteError(words))


def _is_zero(root: Pairs) -> bool:
    """Each rank keeps its part of the optimizer in a file of its own."""
    return root.get("param_shapes") is not None and root.get("optimizer") is None


def _world_of(root: Pairs) -> tuple[int, int] | None:
    data, model = (number_or_none(root.get(key)) for key in ("dp_world_size", "mp_world_size"))
    if not data or not model or data * model > _RANKS_MAX:
        return None
    return data, model


def _check_shards(place: Place, world: tuple[int, int] | None, contents: Contents) -> None:
    """Of each kind that there is one of, every rank has one."""
    kinds: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for name in place.names():
        match = _SHARD.fullmatch(name)
        if match is not None:
            ranks = kinds.setdefault((match["head"], match["end"]), set())
            ranks.add((int(match["model"]), int(match["data"])))
    for (head, end), ranks in kinds.items():
        data, model = world or (max(r[1] for r in ranks) + 1, max(r[0] for r in ranks) + 1)
        total = data * model
        # Looked for in order: the first gap is at most one behind what is there.
        for index in range(min(total, len(ranks) + 1)):
            wanted = divmod(index, data)
            if wanted not in ranks:
                name = f"{head}{wanted[1]}_mp_rank_{wanted[0]:02d}{end}"
                contents.files.append(File(place.full_name(name), None))
                words = f"shard {index + 1} of {total} ({place.full_name(name)}) is missing"
                contents.problems.append(IncompleteError(words))
                break
