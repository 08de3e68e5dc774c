"""A moving average of the trained weights, with which a detector is evaluated and saved (SOLVER.EMA)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class AveragedWeights:
    """The average a <- d a + (1 - d) w after each iteration, of the parameters w that are trained.

    The decay d is min(SOLVER.EMA, (1 + i) / (10 + i)) after iteration i (from 0), so that the initial weights are soon
    forgotten (as TensorFlow's ExponentialMovingAverage). Buffers are not averaged: precise BN computes them anew for
    the average, and without it, it is evaluated with those of the training.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay, self._is_applied = decay, False
        # Under the names of the state dict, which those of the torchvision engine's modules are not.
        names = {tensor.data_ptr(): name for name, tensor in model.state_dict().items()}
        self._parameters = {names[p.data_ptr()]: p for p in model.parameters() if p.requires_grad}
        self._others = [p.detach().clone() for p in self._parameters.values()]  # the average, or w while it is applied

    @torch.no_grad()
    def update(self, iteration: int) -> None:
        """Takes in the weights after ``iteration``."""
        decay = min(self._decay, (1 + iteration) / (10 + iteration))
        torch._foreach_lerp_(self._others, list(self._parameters.values()), 1 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within it, the model has the averages."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def saved(self, model: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds: ``model`` with the averages, and ``trained``, the weights to go on from.

        Args:
            model: its state dict.
        """
        others = dict(zip(self._parameters, self._others, strict=True))
        current = {name: parameter.detach() for name, parameter in self._parameters.items()}
        averages, trained = (current, others) if self._is_applied else (others, current)
        return {"model": {**model, **averages}, "trained": trained}

    @torch.no_grad()
    def restore(self, trained: Mapping[str, Tensor]) -> None:
        """Takes the model's weights, which are those of a checkpoint, as the averages, and goes on from ``trained``."""
        for other, (name, parameter) in zip(self._others, self._parameters.items(), strict=True):
            if trained[name].shape != parameter.shape:
                raise ValueError(f"the trained {name} has another shape than the average")
            other.copy_(parameter)
            parameter.copy_(trained[name])

    @torch.no_grad()
    def _swap(self) -> None:
        self._is_applied = not self._is_applied
        for parameter, other in zip(self._parameters.values(), self._others, strict=True):
            kept = parameter.clone()
            parameter.copy_(other)
            other.copy_(kept)


def applied(average: AveragedWeights | None) -> Any:
    """`AveragedWeights.applied`, or nothing where there is no average."""
    return average.applied() if average else contextlib.nullcontext()
