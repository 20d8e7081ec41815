"""The objectives: a loss for training, and a score in per cent."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn


class Objective(Protocol):
    """A loss and a score, which is a function of a mean over all samples."""

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch, a mean over its samples."""

    def tally(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the sum over the samples of a batch of the quantity that the score is made of."""

    def score(self, mean: float) -> float:
        """Return the score in per cent, from the mean of the tally over all samples."""


@dataclass(frozen=True)
class Classification:
    """The objective for classes of samples, or of the positions of samples; scores accuracy.

    Example:
        >>> import torch
        >>> output, y = torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 0])
        >>> Classification().score(Classification().tally(output, y).item() / 2)
        50.0
    """

    criterion: nn.Module = field(default_factory=nn.CrossEntropyLoss)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        if y.dim() > 1:
            output, y = output.flatten(0, -2), y.flatten()
        loss: Tensor = self.criterion(output, y)
        return loss

    def tally(self, output: Tensor, y: Tensor) -> Tensor:
        right = output.argmax(-1) == y
        return right.sum() * (len(y) / right.numel())

    def score(self, mean: float) -> float:
        return 100 * mean


@dataclass(frozen=True)
class Regression:
    """The objective for targets of unit scale: the score is 100 (1 - root mean square error).

    Example:
        >>> Regression().score(0.01)
        90.0
    """

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, y)

    def tally(self, output: Tensor, y: Tensor) -> Tensor:
        return (output - y).square().mean() * len(y)

    def score(self, mean: float) -> float:
        return 100 * (1 - math.sqrt(mean))
