"""Train a character model on Python's own manual, and save it with torch.save over one name.

An ordinary training script: what lies under the directory it saves to is nothing to it, and it does
nothing special about crashes. Beside the checkpoints it keeps a ledger of what it saved (elsewhere,
with --ledger), so that someone else can tell whether a checkpoint is what was saved.

    demo_train.py CHECKPOINT --steps 60 --ledger FILE     train, or go on where CHECKPOINT stands
    demo_train.py CHECKPOINT --show                       load it and print its step and digest
    demo_train.py --steps 60                              train, save nothing, print the digest

The last line printed is always ``step N loss L digest D``; D covers every bit of every tensor of
model and optimizer.
"""

from __future__ import annotations

import argparse
import hashlib
import pydoc_data.topics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

ROWS = 100_003
WIDTH = 128
LETTERS_MAX = 5
BATCH = 4096


class CharacterModel(nn.Module):
    """Which letter follows the last one, two, ... five: a vector for each such context, in a hashed
    table of 13 million parameters. With Adam's two moments that is 154 MB to save.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        nn.init.normal_(self.table.weight, std=0.02)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary))

    def forward(self, contexts: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.table(contexts).sum(dim=1))
        return logits


def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """The manual as numbers, and for each place in it the rows of its contexts."""
    topics = pydoc_data.topics.topics
    text = "".join(topics[name] for name in sorted(topics))
    numbers = {letter: number for number, letter in enumerate(sorted(set(text)))}
    letters = torch.tensor([numbers[letter] for letter in text])
    rows, code = [], torch.zeros_like(letters)
    for count in range(LETTERS_MAX):
        code = (code * 1_000_003 + letters.roll(count) + 1) % ROWS
        rows.append(code)
    return letters, torch.stack(rows, dim=1)


def pieces(value: object) -> Iterator[bytes | memoryview]:
    """Every bit of a state, in order."""
    if isinstance(value, torch.Tensor):
        yield value.detach().contiguous().numpy().data
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key).encode()
            yield from pieces(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from pieces(item)
    else:
        yield repr(value).encode()


def digest(state: dict[str, object]) -> str:
    total = hashlib.sha256()
    for piece in pieces(state):
        total.update(piece)
    return total.hexdigest()[:16]


def note(ledger: Path | None, line: str) -> None:
    if ledger is not None:
        with ledger.open("a") as file:
            file.write(line + "\n")


def train(arguments: argparse.Namespace) -> None:
    # Two threads now and then round otherwise, on any file system: 2 of 40 runs of 5 steps ended
    # with other last bits (PyTorch 2.13 on two cores); with one thread none of 60.
    torch.set_num_threads(1)
    torch.manual_seed(1)
    letters, contexts = load_text()
    model = CharacterModel(int(letters.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    step, loss = 0, float("nan")
    if arguments.checkpoint is not None and arguments.checkpoint.exists():
        state = torch.load(arguments.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, loss = state["step"], state["loss"]
        print(f"resumed from step {step} loss {loss:.3f}", flush=True)
    state = {}
    while step < arguments.steps:
        # What a step sees depends on its number alone: a resumed run sees what it would have seen.
        chance = torch.Generator().manual_seed(step)
        places = torch.randint(LETTERS_MAX, len(letters) - 1, (BATCH,), generator=chance)
        optimizer.zero_grad()
        output = nn.functional.cross_entropy(model(contexts[places]), letters[places + 1])
        output.backward()
        optimizer.step()
        step, loss = step + 1, output.item()
        if step % arguments.save_every and step != arguments.steps:
            continue
        state = {
            "step": step,
            "loss": loss,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        if arguments.checkpoint is not None:
            note(arguments.ledger, f"saving {step} {digest(state)}")
            torch.save(state, arguments.checkpoint)
            note(arguments.ledger, f"saved {step} {digest(state)}")
            print(f"saved step {step} loss {loss:.3f}", flush=True)
    print(f"step {step} loss {loss:.3f} digest {digest(state)}", flush=True)


def show(checkpoint: Path) -> None:
    state = torch.load(checkpoint)
    print(f"step {state['step']} loss {state['loss']:.3f} digest {digest(state)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a character model.")
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--ledger", type=Path)
    parser.add_argument("--show", action="store_true")
    arguments = parser.parse_args()
    if arguments.show:
        show(arguments.checkpoint)
    else:
        train(arguments)


if __name__ == "__main__":
    sys.exit(main())
