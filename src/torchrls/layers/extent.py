"""The extent of the network's inputs: from where to where each of their columns goes.

An extent is one tensor (4, groups, inputs): [sum, number, greatest, - least] of each column, so
that those of micro-batches and of ranks can be joined.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrls.layers.sets import wants_first
from torchrls.matrix.inverse import statistics_dtype

#: How many rows are sums, before those that are maxima.
SUMS = 2
#: Distances from a mean that are less than this part of it are none.
ROUNDING = 1e-5


def extent_of(x: Tensor, dim: int = -1, valid: Tensor | None = None) -> Tensor | None:
    """Of the columns of ``x`` along ``dim``: (4, 1, columns).

    None if that is not asked for, or if ``x`` is no input of the network: a gradient flows to it.
    If some rows are padding, ``valid`` is True for the others.

    Example:
        >>> from torchrls.layers.sets import averaging
        >>> with averaging(1, first=True):
        ...     extent_of(torch.tensor([[1.0, 5.0], [4.0, 5.0]]))[:, 0]
        tensor([[ 5., 10.],
                [ 2.,  2.],
                [ 4.,  5.],
                [-1., -5.]])
    """
    if not wants_first() or x.requires_grad or x.layout != torch.strided or x.is_nested:
        return None
    if not x.numel():
        return None
    rows = x.movedim(dim, -1).reshape(-1, x.shape[dim]).to(statistics_dtype(x.dtype))
    if valid is None:
        number = rows.new_full((rows.shape[1],), len(rows))
        found = [rows.sum(0), number, rows.amax(0), -rows.amin(0)]
    else:
        no = ~valid.reshape(-1, 1)
        number = (~no).sum().to(rows).expand(rows.shape[1])
        least = rows.masked_fill(no, torch.inf).amin(0)
        found = [rows.masked_fill(no, 0).sum(0), number, rows.masked_fill(no, -torch.inf).amax(0)]
        found.append(-least)
    return torch.stack(found).unsqueeze(1)


def joined(one: Tensor | None, other: Tensor) -> Tensor:
    """The extent of both.

    Example:
        >>> one = torch.tensor([4.0, 2.0, 4.0, 0.0]).view(4, 1, 1)
        >>> joined(one, 2 * one).flatten()
        tensor([12.,  6.,  8.,  0.])
    """
    if one is None:
        return other
    sums = one[:SUMS] + other[:SUMS]
    return torch.cat([sums, torch.maximum(one[SUMS:], other[SUMS:])])


def ranges_of(extent: Tensor) -> Tensor:
    """How far each column is from its mean, at most: (groups, inputs).

    Example:
        >>> ranges_of(torch.tensor([4.0, 2.0, 4.0, 0.0]).view(4, 1, 1))
        tensor([[2.]])
    """
    total, number, greatest, least = extent
    mean = total / number.clamp(min=1)
    found = torch.maximum(greatest - mean, mean + least)
    return found.where(found > ROUNDING * mean.abs(), 0.0)


def sizes_of(extent: Tensor) -> Tensor:
    """How far each column is from zero, at most: (groups, inputs).

    Example:
        >>> sizes_of(torch.tensor([4.0, 2.0, 4.0, 0.0]).view(4, 1, 1))
        tensor([[4.]])
    """
    return torch.maximum(extent[2], extent[3])
