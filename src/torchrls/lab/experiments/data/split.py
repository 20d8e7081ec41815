"""Training and test sets, and their minibatches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Split(NamedTuple):
    """The inputs and the targets, such as class labels, of a training and a test set.

    A *stream* has no test set, and every epoch has the next ``segment`` samples, in order.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    segment: int = 0

    @property
    def samples(self) -> int:
        """The number of samples in an epoch."""
        return self.segment or len(self.train_x)

    def batches(
        self, size: int, generator: torch.Generator, start: int = 0, epoch: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield minibatches (x, y) of the training set in random order.

        Args:
            size: the number of samples in a minibatch.
            generator: the source of the order.
            start: the number of minibatches to skip.
            epoch: the segment of a stream, which is not shuffled.
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
        """Yield minibatches (x, y) of the test set, in order."""
        yield from zip(torch.split(self.test_x, size), torch.split(self.test_y, size), strict=True)

    def to(self, device: torch.device | str) -> Split:
        """Return the split with its tensors on a device."""
        x, y, test_x, test_y = (tensor.to(device) for tensor in self[:4])
        return Split(x, y, test_x, test_y, self.segment)

    def held_out(self, share: float) -> Split:
        """Split the training set at random; ``share`` of its samples become the test set."""
        order = torch.randperm(len(self.train_x), generator=torch.Generator().manual_seed(0))
        test, train = order.tensor_split([round(share * len(order))])
        x, y = self.train_x, self.train_y
        return Split(x[train], y[train], x[test], y[test])


def chosen(count: int, limit: int | None) -> Tensor:
    """Return the indices of a random subset; a smaller limit gives the first of a larger one.

    The subset is the same in every run. Without a limit, all indices are returned in order.

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
    """Return the split of images, given as bytes (count, channels, ...), with scaled pixels.

    Args:
        train: the images and the classes for training.
        test: the images and the classes for testing.
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
