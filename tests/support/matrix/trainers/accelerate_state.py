"""accelerate: ``save_state`` with automatic names, two kept, and ``load_state`` of the newest."""

from __future__ import annotations

import accelerate
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from tests.support.matrix.trainers.life import Life, save_steps, serve
from tests.support.matrix.trainers.torch_models import Model, get_state, make_optimizer, set_state


class Progress:
    """Saved with the rest."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, loaded: dict[str, int]) -> None:
        self.step = loaded["step"]


def train(life: Life) -> None:
    configuration = ProjectConfiguration(
        project_dir=str(life.directory), automatic_checkpoint_naming=True, total_limit=2
    )
    accelerator = Accelerator(cpu=True, project_config=configuration)
    model = Model()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    saved = life.directory / "checkpoints"
    if saved.exists() and any(saved.iterdir()):
        accelerator.load_state()
        step = life.resumed(get_state(model, optimizer.optimizer), {"progress": progress.step})
    else:
        step = life.nothing()
    accelerator.project_configuration.iteration = step + 1

    def save(step: int, _content: object) -> None:
        progress.step = step
        set_state(model, optimizer.optimizer, step)
        accelerator.save_state()

    save_steps(life, step, save)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve({"accelerate": accelerate.__version__, "torch": torch.__version__}, train)
