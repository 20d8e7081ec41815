"""Rows: what a layer multiplies with its matrix Theta. They are summed up only on demand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from torchrls.common.numerics import statistics_dtype
from torchrls.common.torch_private import current_backward

#: The number of rows in each set, for each group: counts[group][set].
Counts = list[list[int]]
#: The first SUMS rows of an extent are sums, the others maxima.
SUMS = 2
#: The most nodes of autograd at which a parameter is looked for.
MOST_NODES = 1000
#: Distances from a mean below this share of the mean are rounding errors.
ROUNDING = 1e-5


class Mask:
    """The valid rows of a padded batch, (batch, time), or (batch,) for inputs without time.

    Attributes:
        count: the number of valid rows.
        samples: the number of samples that have a valid row.
        seen, heeded: whether any layer was observed under the mask, and whether it applied to one.
    """

    def __init__(self, valid: Any, time_first: bool) -> None:
        if not isinstance(valid, Tensor) or valid.dtype != torch.bool or not 1 <= valid.dim() <= 2:
            given = type(valid).__name__
            if isinstance(valid, Tensor):
                given = f"{tuple(valid.shape)} of {valid.dtype}"
            raise TypeError(
                f"a mask of rows is a bool tensor (batch, time) or (batch,), got {given}"
            )
        self.valid, self.time_first = valid, time_first
        self.count = int(valid.sum())
        self.samples = int(valid.any(-1).sum()) if valid.dim() == 2 else len(valid)
        self.seen = self.heeded = False
        if self.count == 0:
            raise ValueError(f"the mask of rows, {tuple(valid.shape)}, has no valid row")

    def oriented(self, time_first: bool | None) -> Tensor:
        """Return the mask in the layout of inputs: (time, batch) if ``time_first``.

        If ``time_first`` is None, the mask's own ``time_first`` decides.
        """
        transposed = self.time_first if time_first is None else time_first
        return self.valid.mT if transposed and self.valid.dim() == 2 else self.valid

    def fits(self, shape: Sequence[int], time_first: bool | None) -> bool:
        """Return whether the mask has the shape of leading dimensions; set ``seen``, ``heeded``."""
        fits = self.oriented(time_first).shape == shape
        self.seen, self.heeded = True, self.heeded or fits
        return fits

    def check_heeded(self) -> None:
        """Raise if layers were observed under the mask, but it applied to none of them."""
        if self.seen and not self.heeded:
            raise ValueError(
                f"the mask of rows, {tuple(self.valid.shape)}, fits the input of no layer in this "
                f"pass: it must be (batch, time) where inputs are (batch, time, features); for "
                f"models with time first, pass time_first=True"
            )


class Rows:
    """The rows of one block in one call: ``x`` with all dimensions but the last flattened.

    Subclasses compute sums of other rows: receptive fields, packed sequences.

    Args:
        x: (..., inputs); the first dimension counts samples.
        samples: for layers with time, the number of samples that the rows come from, so that
            T = rows / samples; 0 for layers without time (c = k).
        time_first: ``x`` is (time, batch, inputs); None if only the user's mask says it.
        hidden: ``x`` is no input of the network although it needs no gradient: states, say.

    Example:
        >>> Rows(torch.arange(6.0).view(3, 2)).sums(2)  # two samples in the first set
        (tensor([[[2., 4.],
             [4., 5.]]]), [[2, 1]])
    """

    mask: Mask | None = None

    def __init__(
        self, x: Tensor, samples: int = 0, *, time_first: bool | None = None, hidden: bool = False
    ) -> None:
        self.x, self.samples, self.time_first, self.hidden = x, samples, time_first, hidden

    def heed(self, mask: Mask) -> None:
        """Apply the mask from now on, if it has the leading dimensions of ``x``."""
        if mask.fits(self._plain().shape[:-1], self.time_first):
            self.mask = mask
            self.samples = mask.samples if self.samples else 0

    def sums(self, sets: int) -> tuple[Tensor, Counts]:
        """Return the sum of the rows of each set, (groups, sets, inputs), and their counts.

        Sets have neighbouring samples (:func:`sizes_of_sets`). Sums are in the statistics' dtype.
        """
        x, mask = self._plain(), self.mask
        x = x if x.dim() > 1 else x.unsqueeze(0)
        time_first = self.time_first if self.time_first is not None or not mask else mask.time_first
        dim = 1 if time_first and x.dim() == 3 else 0
        others = tuple(d for d in range(x.dim() - 1) if d != dim)
        total = sums_of_sets(x, sets, dim, others).unsqueeze(0)
        if mask is None:
            per_sample = prod([x.shape[d] for d in others])
            return total, [[size * per_sample for size in sizes_of_sets(x.shape[dim], sets)]]
        if sets == 1:
            return total, [[mask.count]]
        valid = mask.oriented(self.time_first).unsqueeze(-1).float()
        return total, [[int(n) for n in sums_of_sets(valid, sets, dim, others).view(-1).tolist()]]

    def squares(self) -> Tensor:
        """Return the sum of the squares of all entries of each group's rows, (groups,)."""
        return sum_of_squares(self._plain())

    def extent(self) -> Tensor | None:
        """Return the extent of the columns, (4, groups, inputs): see :func:`extent_of`.

        None for hidden layers: only the network's inputs have one.
        """
        valid = None if self.mask is None else self.mask.oriented(self.time_first)
        return None if self.hidden else extent_of(self.x, valid=valid)

    def _plain(self) -> Tensor:
        """Return ``x``, detached and dense, with zeros for rows that the mask leaves out."""
        x = self.x.detach()
        if x.is_nested:
            x = torch.cat([part.reshape(-1, part.shape[-1]) for part in x.unbind()])
        elif x.layout != torch.strided:
            x = x.to_dense()
        if self.mask is None:
            return x
        return x.masked_fill(~self.mask.oriented(self.time_first).unsqueeze(-1), 0)


class JoinedRows(Rows):
    """The rows of one block with several groups: query, key and value of an attention layer."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        super().__init__(parts[0].x, parts[0].samples, hidden=True)
        self.parts = parts

    def heed(self, mask: Mask) -> None:
        for part in dict.fromkeys(self.parts):
            part.heed(mask)
        self.samples = self.parts[0].samples

    def sums(self, sets: int) -> tuple[Tensor, Counts]:
        known = {part: part.sums(sets) for part in dict.fromkeys(self.parts)}
        total = torch.cat([known[part][0] for part in self.parts])
        return total, [known[part][1][0] for part in self.parts]

    def squares(self) -> Tensor:
        return torch.cat([part.squares() for part in self.parts])


def sum_of_squares(*tensors: Tensor) -> Tensor:
    """Return the sum of the squares of all entries of the tensors, (1,)."""
    parts = [t.detach().flatten().to(statistics_dtype(t.dtype)).square().sum() for t in tensors]
    return torch.stack(parts).sum(0, keepdim=True)


def sizes_of_sets(samples: int, sets: int) -> list[int]:
    """Return the number of samples of each set: sample i of M is in set floor(i sets / M).

    Example:
        >>> sizes_of_sets(10, 4), sizes_of_sets(3, 4)
        ([3, 2, 3, 2], [1, 1, 1, 0])
    """
    ends = [-(-samples * i // sets) for i in range(sets + 1)]
    return [end - start for start, end in pairwise(ends)]


def sums_of_sets(x: Tensor, sets: int, dim: int, others: tuple[int, ...] = ()) -> Tensor:
    """Return sums over the samples (``dim``) of each set and over ``others``, (sets, ...)."""
    samples, dtype = x.shape[dim], statistics_dtype(x.dtype)
    x = x.detach()
    if sets == 1:
        return x.sum((dim, *others), dtype=dtype).unsqueeze(0)
    if samples % sets == 0:
        split = x.reshape(*x.shape[:dim], sets, samples // sets, *x.shape[dim + 1 :])
        total: Tensor = split.sum([dim + 1, *(d + int(d > dim) for d in others)], dtype=dtype)
        return total.movedim(dim - sum(d < dim for d in others), 0)
    if not torch.compiler.is_compiling():
        parts = torch.split(x, sizes_of_sets(samples, sets), dim)
        return torch.stack([part.sum((dim, *others), dtype=dtype) for part in parts])
    # without a split, so that compiled code holds for any number of samples
    x = x.sum(others, dtype=dtype) if others else x.to(dtype)
    x = x.movedim(dim - sum(d < dim for d in others), 0)
    ends = (samples * torch.arange(1, sets + 1, device=x.device) + sets - 1) // sets
    index = torch.searchsorted(ends, torch.arange(samples, device=x.device), right=True)
    return x.new_zeros(sets, *x.shape[1:]).index_add(0, index, x)


def is_hidden(x: Tensor) -> bool:
    """Return whether a gradient flows through ``x`` to a parameter: it is no input of the network.

    Inputs can require a gradient themselves, as in adversarial training. That is not looked into in
    compiled code, nor where a checkpointed segment is recomputed, whose inputs look like such ones.
    """
    if not x.requires_grad or torch.compiler.is_compiling() or current_backward() != -1:
        return x.requires_grad
    if x.grad_fn is None:
        return isinstance(x, torch.nn.Parameter)
    seen, nodes = {x.grad_fn}, [x.grad_fn]
    while nodes and len(seen) < MOST_NODES:
        node = nodes.pop()
        if isinstance(getattr(node, "variable", None), torch.nn.Parameter):
            return True
        new = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= new
        nodes += new
    return bool(nodes)


def extent_of(x: Tensor, dim: int = -1, valid: Tensor | None = None) -> Tensor | None:
    """Return the extent of inputs: [sum, count, greatest, - least] of each column, (4, 1, columns).

    Extents of micro-batches and of ranks can be joined. None if ``x`` is no input of the network.

    Args:
        dim: the dimension of columns.
        valid: False for rows that are padding.
    """
    if is_hidden(x) or x.layout != torch.strided or x.is_nested or not x.numel():
        return None
    total = x.movedim(dim, -1).reshape(-1, x.shape[dim]).to(statistics_dtype(x.dtype))
    greatest, least, count = total, total, total.new_full((), len(total))
    if valid is not None:
        no = ~valid.reshape(-1, 1)
        count = (~no).sum().to(total)
        greatest, least = total.masked_fill(no, -torch.inf), total.masked_fill(no, torch.inf)
        total = total.masked_fill(no, 0)
    columns = (total.sum(0), count.expand(x.shape[dim]), greatest.amax(0), -least.amin(0))
    return torch.stack(columns).unsqueeze(1)


def joined(one: Tensor | None, other: Tensor) -> Tensor:
    """Return the extent of the rows of both."""
    if one is None:
        return other
    sums = one[:SUMS] + other[:SUMS]
    return torch.cat([sums, torch.maximum(one[SUMS:], other[SUMS:])])


def ranges_of(extent: Tensor) -> Tensor:
    """Return the largest distance of each column from its mean, (groups, inputs)."""
    total, count, greatest, least = extent
    mean = total / count.clamp(min=1)
    ranges = torch.maximum(greatest - mean, mean + least)
    return ranges.where(ranges > ROUNDING * mean.abs(), 0.0)


def sizes_of(extent: Tensor) -> Tensor:
    """Return the largest distance of each column from zero, (groups, inputs)."""
    return torch.maximum(extent[2], extent[3])
