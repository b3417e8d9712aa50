"""A directory of Megatron-LM: ``iter_NNNNNNN``, as one distributed checkpoint or as one directory
for each rank of the model.

Source: megatron/training/checkpointing.py (core 0.14). The tracker beside it
(``latest_checkpointed_iteration.txt``) is written last. Complete: the distributed checkpoint is,
and ``common.pt`` and ``metadata.json`` are there; or there is a ``model_optim_rng.pt`` for each
rank of tensors, pipeline and experts that the saved arguments name, all of one iteration, and a
``distrib_optim.pt`` beside each, where there is any or the arguments say so. A directory's name has
a number for each of these that is more than one (``get_checkpoint_name``).
"""

from __future__ import annotations

import math
import re

from cxlfs.checkpoint.formats.dcp import METADATA, is_distributed, take_distributed
from cxlfs.checkpoint.formats.files import check_one_step, take_files, take_member, take_stray
from cxlfs.checkpoint.formats.ranks import first_gap
from cxlfs.checkpoint.jsons import json_of, number_or_none
from cxlfs.checkpoint.model import Contents, File, IncompleteError, ProblemError
from cxlfs.checkpoint.pickles import Applied, Pairs
from cxlfs.checkpoint.place import Place

NAME = re.compile(r"iter_(\d{7,18})")
_RANK = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
_MODEL = "model_optim_rng.pt"
_OPTIMIZER = "distrib_optim.pt"
_PARTS = (_OPTIMIZER, "model_rng.pt", "optim.pt")
"""What else Megatron-LM loads of a rank, the last two with the names of earlier releases."""
_COMMON, _ABOUT = "common.pt", "metadata.json"
_RANKS_MAX = 1 << 16


class Megatron:
    kind = "megatron"

    def recognises(self, place: Place) -> bool:
        if not place.is_directory():
            return False
        names = place.names()
        if any(map(_RANK.fullmatch, names)) or {METADATA, _COMMON, _ABOUT} <= set(names):
            return True
        return NAME.fullmatch(place.name) is not None and (
            not names or is_distributed(place) or _COMMON in names
        )

    def examine(self, place: Place) -> Contents:
        contents = Contents()
        ranks = [name for name in place.names() if _RANK.fullmatch(name)]
        if not place.names():
            raise IncompleteError("nothing is in it")
        if ranks:
            self._take_ranks(place, ranks, contents)
        else:
            self._take_distributed(place, contents)
        match = NAME.fullmatch(place.name)
        contents.named_step = int(match[1]) if match is not None else None
        return contents

    @staticmethod
    def _take_distributed(place: Place, contents: Contents) -> None:
        if is_distributed(place) or not place.is_file(_MODEL):
            take_distributed(place, contents)
        for name in (_COMMON, _ABOUT):
            if not place.is_file(name):
                contents.files.append(File(name, None))
                contents.problems.append(IncompleteError(f"{name} is missing"))
        try:
            if place.is_file(_ABOUT):
                json_of(place, _ABOUT, dict[str, object])
        except ProblemError as error:
            contents.problems.append(error)
        if place.is_file(_COMMON):
            found = take_member(place, _COMMON, contents, required=True)
            if isinstance(found.root, Pairs):
                contents.step = number_or_none(found.root.get("iteration"))
        take_files(place, contents, place.names(), lambda _: False)

    def _take_ranks(self, place: Place, ranks: list[str], contents: Contents) -> None:
        sizes: list[int] | None = None
        has_optimizers = False
        steps: dict[int, str] = {}
        for rank in ranks:
            inside = place.below(rank)
            if not inside.is_file(_MODEL):
                contents.files.append(File(f"{rank}/{_MODEL}", None))
                contents.problems.append(IncompleteError(f"{rank}/{_MODEL} is missing"))
            take_files(inside, contents, [n for n in inside.names() if n in _PARTS])
            for name in (n for n in inside.names() if n not in (_MODEL, *_PARTS)):
                take_stray(inside, name, contents)
            if inside.is_file(_MODEL):
                found = take_member(inside, _MODEL, contents, required=True)
                if isinstance(found.root, Pairs):
                    step = number_or_none(found.root.get("iteration"))
                    if step is not None:
                        steps.setdefault(step, f"{rank}/{_MODEL}")
                    sizes = sizes or _sizes_of(found.root)
                    has_optimizers |= _has_optimizers(found.root)
        contents.step = next(iter(steps), None)
        check_one_step(steps, contents)
        self._check_alike(place, ranks, contents, is_needed=has_optimizers)
        self._check_ranks(ranks, sizes, contents)

    @staticmethod
    def _check_alike(
        place: Place, ranks: list[str], contents: Contents, *, is_needed: bool
    ) -> None:
        """Every rank of the model has the distributed optimizer's file, or none needs one."""
        files = [f"{rank}/{_OPTIMIZER}" for rank in ranks]
        missing = [name for name in files if not place.is_file(name)]
        if missing and (is_needed or len(missing) < len(files)):
            contents.files.append(File(missing[0], None))
            contents.problems.append(IncompleteError(f"{missing[0]} is missing"))

    @staticmethod
    def _check_ranks(ranks: list[str], sizes: list[int] | None, contents: Contents) -> None:
        matches = [match for match in map(_RANK.fullmatch, ranks) if match is not None]
        found = {tuple(int(n) for n in match.groups() if n is not None) for match in matches}
        if sizes is None or any(len(numbers) != len(sizes) for numbers in found):
            length = max(map(len, found))
            full = {numbers + (0,) * (length - len(numbers)) for numbers in found}
            sizes = [max(column) + 1 for column in zip(*full, strict=True)]
            found = full
        # Tensors outside, as the names are sorted.
        axes = [range(size) for size in reversed(sizes)]
        index, gap = first_gap(axes, {tuple(reversed(numbers)) for numbers in found})
        if gap:
            tensor, *others = reversed(gap)
            name = f"mp_rank_{tensor:02d}" + "".join(f"_{number:03d}" for number in others)
            contents.files.append(File(f"{name}/{_MODEL}", None))
            words = f"shard {index + 1} of {math.prod(sizes)} ({name}) is missing"
            contents.problems.append(IncompleteError(words))


def _arguments(root: Pairs) -> Pairs | None:
    arguments = root.get("args")
    state = arguments.state if isinstance(arguments, Applied) else None
    return state if isinstance(state, Pairs) else None


def _has_optimizers(root: Pairs) -> bool:
    state = _arguments(root)
    if state is None or state.get("use_distributed_optimizer") is not True:
        return False
    return state.get("no_save_optim") is not True


def _sizes_of(root: Pairs) -> list[int] | None:
    """How many ranks each number of a name has, from the saved arguments (argparse.Namespace)."""
    state = _arguments(root)
    if state is None:
        return None
    tensors = number_or_none(state.get("tensor_model_parallel_size"))
    if not tensors:
        return None
    sizes = [tensors]
    for kind in ("pipeline", "expert"):
        ranks = number_or_none(state.get(f"{kind}_model_parallel_size"))
        sizes += [ranks] if ranks and ranks > 1 else []
    return sizes if math.prod(sizes) <= _RANKS_MAX else None
