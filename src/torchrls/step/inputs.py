"""The inputs of the network, which the default step standardizes before P learns them.

They are inputs x that get no gradient. A layer with such inputs is taken as
W r ((x - mu) / r) + b' with b' = b + W mu. mu is the running mean of x, and r has the range of each
column in the first minibatch; it grows where inputs become much larger.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrls.layers.rows import ranges_of, sizes_of

#: A range grows where a third of a later distance from the mean is above so many times the range.
FARTHER = 4.0
#: The decay of the running mean, a memory of a hundred steps.
MEMORY = 0.99


def first_ranges(extent: Tensor, is_centred: bool) -> Tensor:
    """Return the range of each column in the first minibatch, (n,) or (g, n).

    It is a third of the largest distance from the mean, as a power of 2.

    Args:
        extent: of the inputs, (4, g, n): see :func:`torchrls.layers.rows.extent_of`.
        is_centred: the layer has a bias. Without one, distances are from zero.
    """
    distances = ranges_of(extent) if is_centred else sizes_of(extent)
    return thirds(distances[0] if len(distances) == 1 else distances)


def thirds(distances: Tensor) -> Tensor:
    """Return a third of each distance, or of the mean of the others where it is 0; 1 if all are 0.

    It is rounded to a power of 2, so that weights are multiplied and divided by it exactly.

    Example:
        >>> thirds(torch.tensor([3.0, 0.0, 9.0]))
        tensor([1., 2., 4.])
    """
    varied = distances > 0
    count = varied.sum(-1, keepdim=True)
    mean = torch.where(count > 0, distances.sum(-1, keepdim=True) / count.clamp(min=1), 3.0)
    ranges = (torch.where(varied, distances, mean) / 3).clamp(1e-15, 1e15)  # squares stay finite
    return ranges.log2().round().exp2()


def standardized(
    B: Tensor,
    shares: Tensor,
    mean: Tensor | None,
    ranges: Tensor,
    is_centred: bool,
    lessons: int,
    counts_for: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (B - mu) / r, and the new mu and r.

    mu is the mean of all minibatches at first, then of the last hundred steps. r grows where a
    third of a set's distance from mu is above FARTHER r: else inputs whose first minibatch was not
    like the rest would get far too long steps.

    Args:
        B: the mean row of each set, (sets, n) or (g, sets, n).
        shares: the share of all rows that each set has, (sets, 1) or (g, sets, 1).
        mean, ranges: the old ones, (n,) or (g, n). In the first step, mean is None.
        is_centred: the layer has a bias. Without one, mu is not subtracted.
        lessons: the count of earlier steps in which P has learnt.
        counts_for: the number of steps that this one counts for.

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
