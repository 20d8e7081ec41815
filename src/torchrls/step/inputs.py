"""The inputs of the network, which the default step standardizes before P learns them.

To these no gradient flows, and users give them any scale. Their layer is taken as
W r ((x - mu) / r) + b' with b' = b + W mu: mu is their running mean and r their ranges in the first
minibatch. Ranges grow where inputs do. So it matters little how inputs have been scaled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrls.layers.rows import ranges_of, sizes_of

#: Ranges grow where inputs turn out to be so many times as large.
FARTHER = 4.0
#: The mean remembers a hundred steps.
MEMORY = 0.99


def first_ranges(extent: Tensor, is_centred: bool) -> Tensor:
    """Return the range of each column in the first minibatch, (n,) or (g, n).

    It is a third of the largest distance from the mean, or from zero where no bias can take the
    mean out. Columns that have not varied yet get the mean of the others.

    Args:
        extent: of the inputs, (4, g, n): see :func:`torchrls.layers.rows.extent_of`.
    """
    distances = ranges_of(extent) if is_centred else sizes_of(extent)
    return thirds(distances[0] if len(distances) == 1 else distances)


def thirds(distances: Tensor) -> Tensor:
    """Return a third of each distance, or of the mean of the others where it is zero.

    It is rounded to a power of 2, so that weights are multiplied and divided by it exactly.

    Example:
        >>> thirds(torch.tensor([3.0, 0.0, 9.0]))
        tensor([1., 2., 4.])
    """
    varied = distances > 0
    count = varied.sum(-1, keepdim=True)
    mean = torch.where(count > 0, distances.sum(-1, keepdim=True) / count.clamp(min=1), 3.0)
    thirds = (torch.where(varied, distances, mean) / 3).clamp(1e-15, 1e15)  # squares stay finite
    return thirds.log2().round().exp2()


def grown(ranges: Tensor, B: Tensor) -> Tensor:
    """Return the ranges, larger where inputs are now FARTHER times as far from their mean.

    Without it, inputs whose first minibatch was not like the rest would get far too long steps.

    Args:
        B: the centred mean rows of the sets, (sets, n) or (g, sets, n).

    Example:
        >>> grown(torch.tensor([1.0, 1.0]), torch.tensor([[11.0, 50.0], [-3.0, -100.0]]))
        tensor([ 1., 32.])
    """
    thirds = B.abs().amax(-2) / 3
    return torch.where(thirds > FARTHER * ranges, thirds.log2().round().exp2(), ranges)


def followed(mean: Tensor | None, now: Tensor, lessons: int, counts_for: int) -> Tensor:
    """Return the running mean: of all minibatches at first, then of the last hundred steps.

    Args:
        now: the mean of this minibatch.
        lessons: the count of earlier minibatches that it has followed.
        counts_for: the number of steps that this one stands for.
    """
    if mean is None:
        return now
    return mean.lerp(now, min(1.0, counts_for * max(1 - MEMORY, 1 / (lessons + 1))))
