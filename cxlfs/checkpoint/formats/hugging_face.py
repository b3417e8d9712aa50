"""A directory of Hugging Face's Trainer: ``checkpoint-N``.

Source: transformers/trainer.py, ``_save_checkpoint`` (5.23): the model first, then optimizer,
scheduler and random states, ``trainer_state.json`` last. Complete: all of the files that are there
are, there are weights, an optimizer has its scheduler, the ranks' random states have no gap, and
there is a ``trainer_state.json``.

Others name directories ``checkpoint-N``, too. It is the Trainer's where something in it is that
the Trainer alone writes, or where the directory beside it has the Trainer's.
"""

from __future__ import annotations

import re

from cxlfs.checkpoint.ages import written_after
from cxlfs.checkpoint.formats.dcp import is_distributed, take_distributed
from cxlfs.checkpoint.formats.deepspeed import is_deepspeed, take_deepspeed
from cxlfs.checkpoint.formats.files import is_beside_others, take_files
from cxlfs.checkpoint.formats.ranks import check_numbers
from cxlfs.checkpoint.formats.shards import take_models
from cxlfs.checkpoint.jsons import json_of, number_or_none
from cxlfs.checkpoint.model import (
    Contents,
    File,
    IncompleteError,
    ProblemError,
)
from cxlfs.checkpoint.place import Place

NAME = re.compile(r"checkpoint-(\d{1,18})")
STATE = "trainer_state.json"
_UNFINISHED = "checkpoint-is-incomplete.txt"
_MARKS = (STATE, _UNFINISHED, "training_args.bin", "scheduler.pt")
_NOT_WEIGHTS = re.compile(r"(?:training_args|optimizer|scheduler|sampler)\w*\.bin")
_STATES = (".safetensors", ".bin", ".pt", ".pth")
_MODEL = re.compile(r"(?:pytorch_model|model|adapter_model)[._-]")
_LOADED = re.compile(
    _MODEL.pattern + r"|(?:optimizer|scheduler|scaler|sampler|rng_state|custom|random_states)\w*\."
    r"|[\w.]+\.json$"
)
"""What the Trainer, accelerate and transformers load, by its beginning."""
_RANDOM = re.compile(r"rng_state_(\d{1,9})\.pth")
_OF_ACCELERATE = re.compile(r"random_states_\d{1,9}\.pkl")


class HuggingFace:
    kind = "hugging-face"

    def recognises(self, place: Place) -> bool:
        if not place.is_directory():
            return False
        if place.is_file(STATE):
            return True
        if NAME.fullmatch(place.name) is None or any(map(_OF_ACCELERATE.match, place.names())):
            return False
        return not place.names() or (
            any(map(place.is_file, _MARKS)) or is_beside_others(place, NAME, STATE)
        )

    def examine(self, place: Place) -> Contents:
        contents = Contents()
        match = NAME.fullmatch(place.name)
        contents.named_step = int(match[1]) if match is not None else None
        if not place.names():
            raise IncompleteError("nothing is in it")
        if place.is_file(_UNFINISHED):
            contents.problems.append(IncompleteError(f"{_UNFINISHED} says so"))
        self._take_state(place, contents)
        has_weights = take_models(place, contents) | _take_directories(place, contents)
        has_weights |= any(is_weights(place, name) for name in place.names())
        has_known = any(map(_MODEL.match, place.names()))
        take_files(
            place,
            contents,
            place.names(),
            lambda name: bool(_LOADED.match(name)) or (is_weights(place, name) and not has_known),
        )
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
            contents.step = number_or_none(
                json_of(place, STATE, dict[str, object]).get("global_step")
            )
            if contents.step is None:
                contents.doubt(f"{STATE} names no step")
        except ProblemError as error:
            contents.problems.append(error)

    @staticmethod
    def _check_pairs(place: Place, contents: Contents) -> None:
        if place.is_file("optimizer.pt") != place.is_file("scheduler.pt"):
            name = "scheduler.pt" if place.is_file("optimizer.pt") else "optimizer.pt"
            contents.files.append(File(name, None))
            contents.problems.append(IncompleteError(f"{name} is missing"))
        elif _has_random_states(place) and not _has_optimizer(place):
            # All three are saved, or with ``save_only_model`` none of them.
            contents.files.append(File("optimizer.pt", None))
            contents.problems.append(IncompleteError("optimizer.pt is missing"))
        check_numbers(contents, place, _RANDOM, "rng_state_{}.pth")


def _is_of_rank_0(name: str) -> bool:
    """Written before ``trainer_state.json``, by the same process. Other ranks' random states may
    come at the same time.
    """
    return name.endswith(_STATES) and not name.startswith("rng_state")


def _has_random_states(place: Place) -> bool:
    return any(name == "rng_state.pth" or _RANDOM.fullmatch(name) for name in place.names())


def _has_optimizer(place: Place) -> bool:
    """As a file, or in the directory of FSDP or DeepSpeed."""
    return any(name.startswith("optimizer") or place.is_directory(name) for name in place.names())


def is_weights(place: Place, name: str) -> bool:
    """True for a file of a model, whatever it is called."""
    return (
        name.endswith((".safetensors", ".bin"))
        and not _NOT_WEIGHTS.fullmatch(name)
        and place.is_file(name)
    )


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
