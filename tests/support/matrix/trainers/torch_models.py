"""What the trainers above PyTorch share: a module whose parameters, and an optimizer whose
momentum, are what ``life.state`` says of the step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tests.support.matrix.trainers.life import TENSOR_ITEMS, TENSORS, tensor

MOMENTUM_FROM = TENSORS // 2
"""Tensors from here on are the momenta of those before."""


class Model(torch.nn.Module):
    """``forward`` costs nothing and gives a loss."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(MOMENTUM_FROM):
            parameter = torch.nn.Parameter(torch.zeros(TENSOR_ITEMS))
            self.register_parameter(f"tensor-{number}", parameter)

    def forward(self, item: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        del item
        return {"loss": sum(each[0] for each in self.parameters()) * 0.0}


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)


def set_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.from_numpy(tensor(step, number)))
            momentum = torch.from_numpy(tensor(step, number + MOMENTUM_FROM))
            optimizer.state[parameter]["momentum_buffer"] = momentum


def get_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Mapping[str, torch.Tensor]:
    found = {}
    for number, parameter in enumerate(model.parameters()):
        found[f"tensor-{number}"] = parameter.detach()
        momentum = optimizer.state.get(parameter, {}).get("momentum_buffer", torch.zeros(0))
        found[f"tensor-{number + MOMENTUM_FROM}"] = momentum
    return found
