"""A directory of Megatron-LM: ``iter_NNNNNNN``, as one distributed checkpoint or as one directory
for each rank of the model.

Source: megatron/training/checkpointing.py (core 0.14). The tracker beside it
(``latest_checkpointed_iteration.txt``) is written last. Complete: the distributed checkpoint is,
and ``common.pt`` and ``metadata.json`` are there; or there is a ``model_optim_rng.pt`` for each
rank of tensors and pipeline that the saved arguments name, all of one iteration, and a
``distrib_optim.pt`` beside each, where there is any.
"""

from __future__ import annotations

import re

from cxlfs.checkpoint.formats.dcp import METADATA, is_distributed, take_distributed
from cxlfs.checkpoint.formats.files import check_one_step, take_files, take_member
from cxlfs.checkpoint.jsons import json_of, number_or_none
from cxlfs.checkpoint.model import Contents, File, IncompleteError, ProblemError
from cxlfs.checkpoint.pickles import Applied, Pairs
from cxlfs.checkpoint.place import Place

NAME = re.compile(r"iter_(\d{7,18})")
_RANK = re.compile(r"mp_rank_(?P<tensor>\d{2,6})(?:_(?P<pipeline>\d{3,6}))?(?:_\d{3,6})?")
_MODEL = "model_optim_rng.pt"
_OPTIMIZER = "distrib_optim.pt"
_COMMON, _ABOUT = "common.pt", "metadata.json"
_RANKS_MAX = 1 << 16


class Megatron:
    kind = "megatron"

    def recognises(self, place: Place) -> bool:
        if not place.is_directory():
            return False
        names = place.names()
        return (
            NAME.fullmatch(place.name) is not None
            or any(map(_RANK.fullmatch, names))
            or {METADATA, _COMMON, _ABOUT} <= set(names)
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
        contents.step = int(match[1]) if match is not None else contents.step
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
                json_of(place, _ABOUT)
        except ProblemError as error:
            contents.problems.append(error)
        if place.is_file(_COMMON):
            found = take_member(place, _COMMON, contents, required=True)
            if isinstance(found.root, Pairs):
                contents.step = number_or_none(found.root.get("iteration"))
        take_files(place, contents, place.names())

    def _take_ranks(self, place: Place, ranks: list[str], contents: Contents) -> None:
        parallel: tuple[int, int] | None = None
        steps: dict[int, str] = {}
        for rank in ranks:
            inside = place.below(rank)
            if not inside.is_file(_MODEL):
                contents.files.append(File(f"{rank}/{_MODEL}", None))
                contents.problems.append(IncompleteError(f"{rank}/{_MODEL} is missing"))
            take_files(inside, contents, [name for name in inside.names() if name != _MODEL])
            if inside.is_file(_MODEL):
                found = take_member(inside, _MODEL, contents, required=True)
                if isinstance(found.root, Pairs):
                    step = number_or_none(found.root.get("iteration"))
                    if step is not None:
                        steps.setdefault(step, f"{rank}/{_MODEL}")
                    parallel = parallel or _parallel_of(found.root)
        contents.step = next(iter(steps), None)
        check_one_step(steps, contents)
        self._check_alike(place, ranks, contents)
        self._check_ranks(ranks, parallel, contents)

    @staticmethod
    def _check_alike(place: Place, ranks: list[str], contents: Contents) -> None:
        """Every rank of the model has the distributed optimizer's file, or none has."""
        files = [f"{rank}/{_OPTIMIZER}" for rank in ranks]
        missing = [name for name in files if not place.is_file(name)]
        if missing and len(missing) < len(files):
            contents.files.append(File(missing[0], None))
            contents.problems.append(IncompleteError(f"{missing[0]} is missing"))

    @staticmethod
    def _check_ranks(
        ranks: list[str], parallel: tuple[int, int] | None, contents: Contents
    ) -> None:
        found = set()
        for rank in ranks:
            match = _RANK.fullmatch(rank)
            if match is not None:
                found.add((int(match["tensor"]), int(match["pipeline"] or 0)))
        tensors, stages = parallel or (
            max(tensor for tensor, _ in found) + 1,
            max(stage for _, stage in found) + 1,
        )
        total = tensors * stages
        for index in range(min(total, len(found) + 1)):
            tensor, stage = divmod(index, stages)
            if (tensor, stage) not in found:
                name = f"mp_rank_{tensor:02d}" + (f"_{stage:03d}" if stages > 1 else "")
                contents.files.append(File(f"{name}/{_MODEL}", None))
                words = f"shard {index + 1} of {total} ({name}) is missing"
                contents.problems.append(IncompleteError(words))
                return


def _parallel_of(root: Pairs) -> tuple[int, int] | None:
    """Ranks of tensors and of the pipeline, from the saved arguments (argparse.Namespace)."""
    arguments = root.get("args")
    state = arguments.state if isinstance(arguments, Applied) else None
    if not isinstance(state, Pairs):
        return None
    keys = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    tensors, stages = (number_or_none(state.get(key)) for key in keys)
    if not tensors or not stages or tensors * stages > _RANKS_MAX:
        return None
    return tensors, stages
