"""The Trainer of transformers: saves each step, keeps two, resumes from ``get_last_checkpoint``."""

from __future__ import annotations

import logging
from typing import Any

import accelerate
import torch
import transformers
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from tests.support.matrix.trainers.life import Life, serve
from tests.support.matrix.trainers.torch_models import Model, get_state, make_optimizer, set_state


class Items(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"item": torch.tensor([float(index)])}


class Voice(TrainerCallback):
    def __init__(self, life: Life, step: int) -> None:
        self.life = life
        self.step = step

    def on_train_begin(
        self, _args: object, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if self.step:
            found = get_state(kwargs["model"], kwargs["optimizer"])
            schedule = kwargs["lr_scheduler"].last_epoch
            self.life.resumed(found, {"trainer_state": state.global_step, "schedule": schedule})
        return control

    def on_step_end(
        self, _args: object, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        set_state(kwargs["model"], kwargs["optimizer"], state.global_step)
        self.life.begin(state.global_step)
        return control

    def on_save(
        self, _args: object, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> TrainerControl:
        self.life.end(state.global_step)
        control.should_training_stop = not self.life.goes_on
        return control


def train(life: Life) -> None:
    last = get_last_checkpoint(str(life.directory))
    if last is None:
        life.nothing()
    arguments = TrainingArguments(
        output_dir=str(life.directory),
        max_steps=1 << 20,
        save_steps=1,
        save_total_limit=2,
        per_device_train_batch_size=1,
        logging_steps=1 << 20,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_num_workers=0,
        ignore_data_skip=True,
        max_grad_norm=0.0,
    )
    model = Model()
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Items(),
        optimizers=(optimizer, schedule),
        callbacks=[Voice(life, 0 if last is None else 1)],
    )
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    serve(
        {
            "transformers": transformers.__version__,
            "accelerate": accelerate.__version__,
            "torch": torch.__version__,
        },
        train,
    )
