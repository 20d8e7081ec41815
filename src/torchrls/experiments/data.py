"""Data sets as tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Split(NamedTuple):
    """Inputs and class labels, for training and for testing."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    def batches(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """The training set in random order."""
        order = torch.randperm(len(self.train_x), generator=generator)
        for start in range(0, len(order), size):
            indices = order[start : start + size]
            yield self.train_x[indices], self.train_y[indices]


def digits(seed: int, *, test_samples: int = 500) -> Split:
    """The 1,797 handwritten digits of 8 x 8 pixels that ship inside scikit-learn, in [0, 1].

    Example:
        >>> split = digits(seed=0)
        >>> tuple(split.train_x.shape), tuple(split.test_x.shape)
        ((1297, 64), (500, 64))
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.from_numpy(bunch.data).float() / 16
    y = torch.from_numpy(bunch.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, train = order[:test_samples], order[test_samples:]
    return Split(x[train], y[train], x[test], y[test])
