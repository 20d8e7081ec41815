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


def standardized(
    B: Tensor,
    shares: Tensor,
    mean: Tensor | None,
    ranges: Tensor,
    is_centred: bool,
    lessons: int,
    counts_for: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (B - mu) / r, and mu and r as they are now.

    The mean is that of all minibatches at first, then of the last hundred steps. Ranges grow where
    inputs are now FARTHER times as far from it: without that, inputs whose first minibatch was not
    like the rest would get far too long steps.

    Args:
        B: the mean row of each set, (sets, n) or (g, sets, n).
        shares: of all rows, (sets, 1) or (g, sets, 1).
        mean, ranges: as they were; there is no mean before the first minibatch.
        is_centred: a bias can take the mean out.
        lessons: the count of earlier minibatches.
        counts_for: the number of steps that this one stands for.

    Example:
        >>> B, shares = torch.tensor([[12.0, 90.0], [-2.0, -60.0]]), torch.full((2, 1), 0.5)
        >>> standardized(B, shares, torch.zeros(2), torch.ones(2), True, 4, 1)  # a fifth is new
        (tensor([[11.0000,  2.7188],
                [-3.0000, -1.9688]]), tensor([1., 3.]), tensor([ 1., 32.]))
    """
    now, is_first = (B * shares).sum(-2), mean is None
    if mean is None:
        mean = now
    else:
        mean = mean.lerp(now, min(1.0, counts_for * max(1 - MEMORY, 1 / (lessons + 1))))
    B = B - mean.unsqueeze(-2) if is_centred else B
    if not is_first:
        farthest = B.where(shares > 0, 0.0).abs().amax(-2) / 3
        ranges = torch.where(farthest > FARTHER * ranges, farthest.log2().round().exp2(), ranges)
    return B / ranges.unsqueeze(-2), mean, ranges
