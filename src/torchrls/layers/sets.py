"""Sets of samples, and what else is asked of rows in a forward pass."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from torchrls.layers.within import Within
from torchrls.matrix.inverse import statistics_dtype

#: What is asked of rows in the contexts under way, innermost last: the number of sets that samples
#: are split into, and whether what only a first step needs is wanted.
_WANTED: list[tuple[int, bool]] = []


def is_anything_wanted() -> bool:
    """Whether more is asked of rows than their sum."""
    return bool(_WANTED)


def averages() -> int:
    """Into how many sets the samples of a pass are to be split; 1 is the paper's rule."""
    return _WANTED[-1][0] if _WANTED else 1


def wants_first() -> bool:
    """Whether the numbers are asked for that P_0 comes from: squares and extent of the rows."""
    return _WANTED[-1][1] if _WANTED else False


def averaging(count: int, first: bool = False) -> Within:
    """Within the context, rows are summed up in so many sets of samples."""
    return Within(_WANTED, [(count, first)])


def squares_of(*tensors: Tensor) -> Tensor | None:
    """The sum of the squares of all entries, (1,), if it is asked for."""
    if not wants_first():
        return None
    parts = [t.detach().flatten().to(statistics_dtype(t.dtype)).square().sum() for t in tensors]
    return torch.stack(parts).sum(0, keepdim=True)


def sizes_of_sets(samples: int) -> list[int]:
    """How many samples each set has: sample i of M is in set floor(i b / M).

    So sets of halves of a minibatch, put together by twos, are the sets of the whole.

    Example:
        >>> with averaging(4):
        ...     sizes_of_sets(10), sizes_of_sets(3)
        ([3, 2, 3, 2], [1, 1, 1, 0])
    """
    count = averages()
    ends = [-(-samples * i // count) for i in range(count + 1)]
    return [end - start for start, end in pairwise(ends)]


def sums_of_sets(x: Tensor, dim: int, others: tuple[int, ...] = ()) -> Tensor:
    """Sums over the samples of each set, and over other dimensions: (sets, what remains).

    The samples are neighbours along ``dim``. Sums are in the precision of the statistics.

    Example:
        >>> with averaging(2):
        ...     sums_of_sets(torch.arange(6.0).view(3, 2), 0)
        tensor([[2., 4.],
                [4., 5.]])
    """
    count, samples, dtype = averages(), x.shape[dim], statistics_dtype(x.dtype)
    x = x.detach()
    if count == 1:
        return x.sum((dim, *others), dtype=dtype).unsqueeze(0)
    if samples % count == 0:
        sets = x.reshape(*x.shape[:dim], count, samples // count, *x.shape[dim + 1 :])
        dims = [dim + 1, *(d + int(d > dim) for d in others)]
        found: Tensor = sets.sum(dims, dtype=dtype)
        return found.movedim(dim - sum(d < dim for d in others), 0)
    if torch.compiler.is_compiling():
        x = x.sum(others, dtype=dtype) if others else x.to(dtype)
        return _sums_by_index(x, dim - sum(d < dim for d in others))
    parts = torch.split(x, sizes_of_sets(samples), dim)
    return torch.stack([part.sum((dim, *others), dtype=dtype) for part in parts])


def _sums_by_index(x: Tensor, dim: int) -> Tensor:
    """The same without a split: compiled code is then good for any number of samples.

    Example:
        >>> with averaging(2):
        ...     _sums_by_index(torch.arange(6.0).view(3, 2), 0)
        tensor([[2., 4.],
                [4., 5.]])
    """
    count, samples = averages(), x.shape[dim]
    ends = (samples * torch.arange(1, count + 1, device=x.device) + count - 1) // count
    index = torch.searchsorted(ends, torch.arange(samples, device=x.device), right=True)
    x = x.movedim(dim, 0)
    return x.new_zeros(count, *x.shape[1:]).index_add(0, index, x)
