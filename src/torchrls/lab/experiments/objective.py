"""Objectives: a loss to be trained with, and a score in per cent for people."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn


class Objective(Protocol):
    """What is asked of a network."""

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """The mean over the samples."""

    def tally(self, output: Tensor, y: Tensor) -> Tensor:
        """The sum of something over the samples of a batch."""

    def score(self, mean: float) -> float:
        """Per cent, from the mean of the tally over all samples."""


@dataclass(frozen=True)
class Classification:
    """Classes, one for each sample or for each of its positions: the score is the accuracy.

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
        found: Tensor = self.criterion(output, y)
        return found

    def tally(self, output: Tensor, y: Tensor) -> Tensor:
        right = output.argmax(-1) == y
        return right.sum() * (len(y) / right.numel())

    def score(self, mean: float) -> float:
        return 100 * mean


@dataclass(frozen=True)
class Regression:
    """Values with a mean of squares of about 1: the score is 100 (1 - root mean square error).

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
