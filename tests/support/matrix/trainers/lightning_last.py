"""Lightning: ModelCheckpoint after each step, two kept and ``last``, ``ckpt_path="last"``."""

from __future__ import annotations

import logging
import warnings

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.matrix.trainers.life import Life, serve
from tests.support.matrix.trainers.torch_models import Model, get_state, make_optimizer, set_state


class Module(LightningModule):
    def __init__(self, life: Life) -> None:
        super().__init__()
        self.life = life
        self.model = Model()

    def training_step(self, _batch: object, _index: int) -> torch.Tensor:
        self.log("progress", float(self.global_step))
        return self.model()["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model)

    def on_train_start(self) -> None:
        if self.trainer.ckpt_path is None:
            self.life.nothing()
        else:
            found = get_state(self.model, self.optimizers().optimizer)
            self.life.resumed(found, {"global_step": self.global_step})

    def on_train_batch_end(self, *_arguments: object) -> None:
        self.life.end(self.global_step)
        self.trainer.should_stop = not self.life.goes_on


class Voice(Callback):
    """Comes before ModelCheckpoint; the module's own hook comes behind it."""

    def on_train_batch_end(self, trainer: Trainer, module: Module, *_arguments: object) -> None:
        set_state(module.model, trainer.optimizers[0], trainer.global_step)
        module.life.begin(trainer.global_step)


def train(life: Life) -> None:
    saver = ModelCheckpoint(
        dirpath=life.directory,
        every_n_train_steps=1,
        save_last=True,
        save_top_k=2,
        monitor="progress",
        mode="max",
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1 << 20,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Voice(), saver],
        default_root_dir=life.directory,
    )
    items = torch.utils.data.DataLoader(range(1 << 20), batch_size=1)
    trainer.fit(Module(life), items, ckpt_path="last", weights_only=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    serve({"lightning": lightning.__version__, "torch": torch.__version__}, train)
