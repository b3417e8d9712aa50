"""``save_pretrained`` of transformers into one directory, in shards, and ``from_pretrained``."""

from __future__ import annotations

import logging

import numpy as np
import safetensors
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from tests.support.matrix.trainers.life import TENSOR_ITEMS, TENSORS, Life, save_steps, serve


class Model(PreTrainedModel):
    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        for number in range(TENSORS):
            parameter = torch.nn.Parameter(torch.zeros(TENSOR_ITEMS))
            self.register_parameter(f"tensor-{number}", parameter)
        self.post_init()

    def _init_weights(self, _module: torch.nn.Module) -> None:
        """None: each is loaded."""


def train(life: Life) -> None:
    path = life.directory / "model"
    if path.exists():
        model = Model.from_pretrained(path)
        found = {name: value.detach() for name, value in model.named_parameters()}
        step = life.resumed(found, {"config": model.config.step})
    else:
        model = Model(PreTrainedConfig())
        step = life.nothing()

    def save(step: int, content: dict[str, np.ndarray]) -> None:
        model.config.step = step
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(content[name]))
        model.save_pretrained(path, max_shard_size="600KB")

    save_steps(life, step, save)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    serve(
        {
            "safetensors": safetensors.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
        train,
    )
