"""A directory of Hugging Face's Trainer: ``checkpoint-N``.

Source: transformers/trainer.py, ``_save_checkpoint`` (5.23): the model first, then optimizer,
scheduler and random states, ``trainer_state.json`` last. Complete: all of the files that are there
are, there are weights, an optimizer has its scheduler, the ranks' random states have no gap, and
``trainer_state.json`` names the step.
"""

from __future__ import annotations

import re

from cxlfs.checkpoint.ages import written_after
from cxlfs.checkpoint.formats.dcp import is_distributed, take_distributed
from cxlfs.checkpoint.formats.deepspeed import is_deepspeed, take_deepspeed
from cxlfs.checkpoint.formats.files import take_files
from cxlfs.checkpoint.formats.shards import take_models
from cxlfs.checkpoint.jsons import json_of, number_or_none
from cxlfs.checkpoint.model import (
    Contents,
    DamagedError,
    File,
    IncompleteError,
    ProblemError,
)
from cxlfs.checkpoint.place import Place

NAME = re.compile(r"checkpoint-(\d{1,18})")
STATE = "trainer_state.json"
_UNFINISHED = "checkpoint-is-incomplete.txt"
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin")
_STATES = (".safetensors", ".bin", ".pt", ".pth")
_RANDOM = re.compile(r"rng_state_(\d{1,9})\.pth")


class HuggingFace:
    kind = "hugging-face"

    def recognises(self, place: Place) -> bool:
        if not place.is_directory():
            return False
        return place.is_file(STATE) or NAME.fullmatch(place.name) is not None

    def examine(self, place: Place) -> Contents:
        contents = Contents()
        match = NAME.fullmatch(place.name)
        if match is not None:
            contents.step = int(match[1])
        if not place.names():
            raise IncompleteError("nothing is in it")
        if place.is_file(_UNFINISHED):
            contents.problems.append(IncompleteError(f"{_UNFINISHED} says so"))
        self._take_state(place, contents)
        has_weights = take_models(place, contents) | _take_directories(place, contents)
        has_weights |= any(map(_is_weights, place.names()))
        take_files(place, contents, place.names())
        if not has_weights:
            contents.problems.append(IncompleteError("it has no weights"))
        self._check_pairs(place, contents)
        late = written_after(place, STATE, [n for n in place.names() if _is_of_rank_0(n)])
        if late is not None:
            text = f"{late} was written after {STATE}: it may be of another save"
            contents.problems.append(IncompleteError(text))
        return contents

    @staticmethod
    def _take_state(place: Place, contents: Contents) -> None:
        contents.files.append(File(STATE, place.size_of(STATE)))
        try:
            step = number_or_none(json_of(place, STATE).get("global_step"))
        except ProblemError as error:
            contents.problems.append(error)
            return
        if step is None or contents.step not in (None, step):
            contents.problems.append(DamagedError(f"{STATE} names another step: {step}"))
        contents.step = step if contents.step is None else contents.step

    @staticmethod
    def _check_pairs(place: Place, contents: Contents) -> None:
        if place.is_file("optimizer.pt") != place.is_file("scheduler.pt"):
            name = "scheduler.pt" if place.is_file("optimizer.pt") else "optimizer.pt"
            contents.files.append(File(name, None))
            contents.problems.append(IncompleteError(f"{name} is missing"))
        check_numbers(contents, place, _RANDOM, "rng_state_{}.pth")


def _is_of_rank_0(name: str) -> bool:
    """Written before ``trainer_state.json``, by the same process. Other ranks' random states may
    come at the same time.
    """
    return name.endswith(_STATES) and not name.startswith("rng_state")


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin")) and name not in _NOT_WEIGHTS


def _take_directories(place: Place, contents: Contents) -> bool:
    """What FSDP and DeepSpeed put below it; whether there was any."""
    found = False
    for name in place.names():
        if not place.is_directory(name):
            continue
        inside = place.below(name)
        if is_distributed(inside):
            take_distributed(inside, contents)
            found = True
        elif is_deepspeed(inside):
            take_deepspeed(inside, contents)
            found = True
    return found


def check_numbers(
    contents: Contents,
    place: Place,
    pattern: re.Pattern[str],
    template: str,
    *,
    by_rank: bool = True,
) -> None:
    """Files that are numbered from 0: none below the highest may be missing. ``by_rank``: or those
    of a later node alone, which has as many ranks as each, in a directory of its own.
    """
    numbers = {int(match[1]) for match in map(pattern.fullmatch, place.names()) if match}
    if not numbers:
        return
    lowest, highest = min(numbers), max(numbers)
    is_node = by_rank and highest - lowest + 1 == len(numbers) and lowest % len(numbers) == 0
    if is_node:
        return
    missing = next((n for n in range(min(highest, len(numbers)) + 1) if n not in numbers), None)
    if missing is not None and missing < highest:
        name = template.format(missing)
        contents.files.append(File(place.full_name(name), None))
        contents.problems.append(IncompleteError(f"{place.full_name(name)} is missing"))
