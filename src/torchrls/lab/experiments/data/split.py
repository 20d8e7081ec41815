"""Training and test sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Split(NamedTuple):
    """Inputs and class labels, or other targets, for training and for testing.

    A *stream* has no test set: every epoch has ``segment`` new samples, in their order.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    segment: int = 0

    @property
    def samples(self) -> int:
        """Of an epoch."""
        return self.segment or len(self.train_x)

    def batches(
        self, size: int, generator: torch.Generator, start: int = 0, epoch: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The training set in random order, from its batch number ``start`` on.

        Of a stream, what comes in the given epoch.
        """
        if self.segment:
            part = slice(epoch * self.segment, (epoch + 1) * self.segment)
            pairs = zip(
                torch.split(self.train_x[part], size),
                torch.split(self.train_y[part], size),
                strict=True,
            )
            yield from list(pairs)[start:]
            return
        order = torch.randperm(len(self.train_x), generator=generator)
        for indices in torch.split(order, size)[start:]:
            yield self.train_x[indices], self.train_y[indices]

    def test_batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The test set in order."""
        yield from zip(torch.split(self.test_x, size), torch.split(self.test_y, size), strict=True)

    def to(self, device: torch.device | str) -> Split:
        """The same, on a device."""
        x, y, test_x, test_y = (tensor.to(device) for tensor in self[:4])
        return Split(x, y, test_x, test_y, self.segment)

    def held_out(self, share: float) -> Split:
        """With a random part of the training set in the place of the test set."""
        order = torch.randperm(len(self.train_x), generator=torch.Generator().manual_seed(0))
        test, train = order.tensor_split([round(share * len(order))])
        x, y = self.train_x, self.train_y
        return Split(x[train], y[train], x[test], y[test])


def chosen(count: int, limit: int | None) -> Tensor:
    """Indices of a random subset; the same in every run, and those of a smaller limit first.

    Example:
        >>> chosen(10, 4).tolist() == chosen(10, 7)[:4].tolist()
        True
        >>> chosen(3, None).tolist()
        [0, 1, 2]
    """
    if limit is None or limit >= count:
        return torch.arange(count)
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))[:limit]


def images(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], *, scaling: str) -> Split:
    """Bytes of shape (count, channels, ...) as inputs.

    Args:
        scaling: ``"unit"`` divides by 255; ``"standard"`` then subtracts the mean of each channel
            over the training set and divides by its standard deviation.
    """
    (train_x, train_y), (test_x, test_y) = train, test
    train_x, test_x = train_x.float() / 255, test_x.float() / 255
    if scaling == "standard":
        dims = [d for d in range(train_x.dim()) if d != 1]
        mean = train_x.mean(dims, keepdim=True)
        deviation = train_x.std(dims, keepdim=True).clamp_min(1e-6)
        train_x, test_x = (train_x - mean) / deviation, (test_x - mean) / deviation
    elif scaling != "unit":
        raise ValueError(f'scaling must be "unit" or "standard", got {scaling!r}')
    return Split(train_x, train_y.long(), test_x, test_y.long())
