"""A directory of accelerate's ``save_state``: ``checkpoint_N``, or a name of the user's choice.

Source: accelerate/checkpointing.py, ``save_accelerator_state`` (1.15): weights, optimizers,
schedulers, samplers, then each rank's ``random_states_R.pkl``, then ``custom_checkpoint_N.pkl``.
Complete: all of them are that are there, there are weights and random states, and the numbers
have no gap.
Nothing in the directory says how many custom objects there should be.
"""

from __future__ import annotations

import re

from cxlfs.checkpoint.formats.dcp import is_distributed, take_distributed
from cxlfs.checkpoint.formats.deepspeed import is_deepspeed, take_deepspeed
from cxlfs.checkpoint.formats.files import take_files
from cxlfs.checkpoint.formats.hugging_face import check_numbers
from cxlfs.checkpoint.formats.shards import take_models
from cxlfs.checkpoint.model import Contents, File, IncompleteError
from cxlfs.checkpoint.place import Place

NAME = re.compile(r"checkpoint_(\d{1,18})")
_RANDOM = re.compile(r"random_states_(\d{1,9})\.pkl")
_CUSTOM = re.compile(r"custom_checkpoint_(\d{1,9})\.pkl")
_WEIGHTS = re.compile(r"(?:model|pytorch_model)(?:_\d{1,9})?\.(?:safetensors|bin)")


class Accelerate:
    kind = "accelerate"

    def recognises(self, place: Place) -> bool:
        if not place.is_directory():
            return False
        return NAME.fullmatch(place.name) is not None or any(map(_RANDOM.fullmatch, place.names()))

    def examine(self, place: Place) -> Contents:
        contents = Contents()
        match = NAME.fullmatch(place.name)
        if match is not None:
            contents.step = int(match[1])
        names = place.names()
        if not names:
            raise IncompleteError("nothing is in it")
        has_weights = take_models(place, contents)
        for name in names:
            if place.is_directory(name):
                has_weights |= self._take_directory(place.below(name), contents)
        step = contents.step
        take_files(place, contents, names)
        contents.step = step
        if not has_weights and not any(map(_WEIGHTS.fullmatch, names)):
            contents.problems.append(IncompleteError("it has no weights"))
        if not any(map(_RANDOM.fullmatch, names)):
            contents.files.append(File("random_states_0.pkl", None))
            contents.problems.append(IncompleteError("random_states_0.pkl is missing"))
        check_numbers(contents, place, _RANDOM, "random_states_{}.pkl")
        check_numbers(contents, place, _CUSTOM, "custom_checkpoint_{}.pkl", by_rank=False)
        return contents

    @staticmethod
    def _take_directory(inside: Place, contents: Contents) -> bool:
        if is_distributed(inside):
            take_distributed(inside, contents)
            return inside.name.startswith("pytorch_model")
        if is_deepspeed(inside):
            take_deepspeed(inside, contents)
            return True
        return False
