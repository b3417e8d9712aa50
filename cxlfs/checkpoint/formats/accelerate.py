"""A directory of accelerate's ``save_state``: ``checkpoint_N``, or a name of the user's choice.

Source: accelerate/checkpointing.py, ``save_accelerator_state`` (1.15): weights, optimizers,
schedulers, samplers, then each rank's ``random_states_R.pkl``, then ``custom_checkpoint_N.pkl``.
Complete: all of them are that are there, there are weights and random states, and the numbers
have no gap.
Nothing in the directory says how many custom objects there should be, nor how far training came.
Others name directories ``checkpoint_N``, too, as flax does: they hold what accelerate does not.
"""

from __future__ import annotations

import re

from cxlfs.checkpoint.formats.dcp import is_distributed, take_distributed
from cxlfs.checkpoint.formats.deepspeed import is_deepspeed, take_deepspeed
from cxlfs.checkpoint.formats.files import is_beside_others, take_files
from cxlfs.checkpoint.formats.hugging_face import is_weights
from cxlfs.checkpoint.formats.ranks import check_numbers
from cxlfs.checkpoint.formats.shards import take_models
from cxlfs.checkpoint.model import Contents, File, IncompleteError
from cxlfs.checkpoint.place import Place

NAME = re.compile(r"checkpoint_(\d{1,18})")
_RANDOM = re.compile(r"random_states_(\d{1,9})\.pkl")
_MARK = re.compile(r"(?:optimizer|scheduler|sampler)(?:_\d{1,9})?\.bin")
_CUSTOM = re.compile(r"custom_checkpoint_(\d{1,9})\.pkl")


class Accelerate:
    kind = "accelerate"

    def recognises(self, place: Place) -> bool:
        if not place.is_directory():
            return False
        names = place.names()
        if any(map(_RANDOM.fullmatch, names)):
            return True
        if NAME.fullmatch(place.name) is None:
            return False
        return (
            not names
            or any(map(_MARK.fullmatch, names))
            or (
                any(is_weights(place, name) for name in names)
                and is_beside_others(place, NAME, "random_states_0.pkl")
            )
        )

    def examine(self, place: Place) -> Contents:
        contents = Contents()
        match = NAME.fullmatch(place.name)
        contents.named_step = int(match[1]) if match is not None else None
        names = place.names()
        if not names:
            raise IncompleteError("nothing is in it")
        has_weights = take_models(place, contents)
        for name in names:
            if place.is_directory(name):
                has_weights |= self._take_directory(place.below(name), contents)
        take_files(place, contents, names)
        contents.step = contents.epoch = None  # of nothing that says how far it had come
        if not has_weights and not any(is_weights(place, name) for name in names):
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
        # A hook of the program's own (register_save_state_pre_hook) saves models below it.
        has_models = take_models(inside, contents)
        take_files(inside, contents, inside.names())
        return has_models or any(is_weights(inside, name) for name in inside.names())
