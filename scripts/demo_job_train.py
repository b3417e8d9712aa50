"""What each rank of scripts/demo-job runs: train a small Transformer on Python's own manual, under
DistributedDataParallel, and save one checkpoint of the whole job with cxlfs.job.Checkpointer.

    torchrun ... demo_job_train.py --root /mnt/ckpt/run --told DIRECTORY [--fates JSON]

It notes what it saw in DIRECTORY/rank-N, a JSON document a line. ``--fates``: at which moments of
the protocol which rank is sent SIGKILL, one for each start of the job.

Invariants
- What a step sees depends on its number and the rank alone, so a resumed run sees what it would
  have seen.
- Gradients are added up in one order from the first step on: DDP must not put them into other
  buckets behind it (``find_unused_parameters``), as a resumed run has its first step elsewhere.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import signal
import sys
from pathlib import Path

import torch
from demo_train import digest, load_text
from torch import distributed, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cxlfs.job import Checkpointer, Restored
from cxlfs.job.engines import engine_named
from tests.support.job_faults.moments import Fate, Moment, watched

WIDTH = 96
LENGTH = 48
BATCH = 4
SECONDS = 60


class Reader(nn.Module):
    """Which letter comes next."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(vocabulary, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        later = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        inner = self.layers(self.letters(text) + self.places(torch.arange(LENGTH)), later)
        logits: torch.Tensor = self.head(inner)
        return logits


class Teller:
    def __init__(self, directory: Path, rank: int) -> None:
        self._path = directory / f"rank-{rank}"

    def __call__(self, kind: str, **what: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind, **what}) + "\n")


class Training:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        torch.manual_seed(1)
        self.text, _ = load_text()
        self.model = Reader(int(self.text.max()) + 1)
        # One order of adding up from the first step on: see above.
        self.parallel = nn.parallel.DistributedDataParallel(self.model, find_unused_parameters=True)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.step, self.loss = 0, float("nan")

    def train_one_step(self) -> None:
        torch.manual_seed(self.step * 1000 + self.rank)
        first = torch.randint(len(self.text) - LENGTH - 1, (BATCH, 1))
        text = self.text[first + torch.arange(LENGTH + 1)]
        self.optimizer.zero_grad()
        logits = self.parallel(text[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.step, self.loss = self.step + 1, loss.item()

    def save(self, directory: Path) -> None:
        torch.save(self.model.state_dict(), directory / "model.pt")
        torch.save(self.optimizer.state_dict(), directory / "optimizer.pt")

    def load(self, directory: Path) -> None:
        self.model.load_state_dict(torch.load(directory / "model.pt"))
        self.optimizer.load_state_dict(torch.load(directory / "optimizer.pt"))

    def digest(self) -> str:
        return digest({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})


def fate_of(arguments: argparse.Namespace, rank: int, tell: Teller) -> Fate:
    """The first that has not come yet, if it is this rank's."""
    number = len(list(arguments.told.glob("fate-*")))
    moments = [Moment(**plain) for plain in json.loads(arguments.fates)]

    def die() -> None:
        (arguments.told / f"fate-{number}").touch()
        tell("killed", what=moments[number].what, when=moments[number].when)
        os.kill(os.getpid(), signal.SIGKILL)

    is_mine = number < len(moments) and moments[number].rank == rank
    return Fate(moments[number] if is_mine else None, die)


def run(arguments: argparse.Namespace) -> None:
    rank = distributed.get_rank()
    tell = Teller(arguments.told, rank)
    fate = fate_of(arguments, rank, tell)
    engine, kind = watched(engine_named("torch"), fate)
    training = Training(rank)
    with kind(
        arguments.root,
        engine=engine,
        replicas=arguments.replicas,
        keep=arguments.keep,
        deadline_seconds=SECONDS,
        allow_volatile=arguments.allow_volatile,
    ) as checkpointer:
        found = checkpointer.restore_from_checkpoint(training.load)
        if isinstance(found, Restored):
            training.step = found.step
        fetched = isinstance(found, Restored) and found.is_fetched
        node = os.uname().nodename
        tell("began", step=training.step, node=node, fetched=fetched, digest=training.digest())
        train(arguments, training, checkpointer, fate, tell)
    tell("ended", step=training.step, loss=training.loss, digest=training.digest())


def train(
    arguments: argparse.Namespace,
    training: Training,
    checkpointer: Checkpointer,
    fate: Fate,
    tell: Teller,
) -> None:
    while training.step < arguments.steps:
        with fate.around("step"):
            training.train_one_step()
        if training.step % arguments.save_every == 0:
            made = checkpointer.distributed_checkpoint(training.step, training.save)
            tell(type(made).__name__.lower(), step=training.step, digest=training.digest())


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small Transformer on many nodes.")
    parser.add_argument("--root", type=Path, required=True, help="where to save, on each node")
    parser.add_argument("--told", type=Path, required=True, help="where to note what was seen")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--keep", type=int, default=2)
    parser.add_argument("--allow-volatile", action="store_true")
    parser.add_argument("--fates", default="[]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # several round otherwise, now and then: see demo_train.py
    distributed.init_process_group("gloo", timeout=dt.timedelta(seconds=SECONDS))
    run(arguments)
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
