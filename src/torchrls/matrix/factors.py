r"""The two factors of a gradient: :math:`G = s\, E^T X`, and how to know that it is so.

X are the rows of a minibatch and E the gradients of the outputs. Then P G needs
:math:`n^2 M + n M o` operations instead of :math:`n^2 o`, and G itself is not needed at all
(:mod:`torchrls.observe.deferred`). But a gradient may have been changed since the backward pass: by
clipping and unscaling, which is only another s, or by accumulation and penalties on the weight. A
random probe tells (Freivalds): R G and (E R^T)^T X are parallel for a random R if, and almost
surely only if, G is s E^T X. R has two rows: with one, every G would pass for a minibatch of a
single row.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

#: Multiplications that factors have to save, since they cost something, too.
WORTH = 1 << 22


class Factors(NamedTuple):
    """Rows X (M, inputs) and output gradients E (M, outputs) of one call of a layer.

    They are copies, which nobody else writes to. ``sums`` is what the gradient of the bias was
    when it was made: E summed up. ``augmented`` is [X, 1], of a layer with a bias, and ``bound``
    the square of what E^T X can be at most.
    """

    X: Tensor
    E: Tensor
    sums: Tensor | None = None
    augmented: Tensor | None = None
    bound: Tensor | None = None

    @classmethod
    def copied(cls, X: Tensor, E: Tensor, sums: Tensor | None) -> Factors:
        """Copies of what a backward pass has; ``sums`` is the gradient of the bias."""
        E = E.clone(memory_format=torch.contiguous_format)
        if sums is None:
            X = X.clone(memory_format=torch.contiguous_format)
            return cls(X, E, bound=bound_of(X, E))
        rows = torch.cat([X, ones(X.shape[0], X.dtype, X.device)], 1)
        return cls(rows.narrow(1, 0, X.shape[1]), E, sums.clone(), rows, bound_of(rows, E))

    def rows(self, has_bias: bool) -> Tensor:
        """[X, 1] or X."""
        return self.X if self.augmented is None or not has_bias else self.augmented

    def norm(self) -> Tensor:
        """That of E^T X, from M x M matrices."""
        return ((self.X @ self.X.T) * (self.E @ self.E.T)).sum().clamp(min=0).sqrt()

    def bounds(self, bias: Tensor | None) -> list[Tensor]:
        """The square of what E^T X can be at most; and what has been changed of the bias."""
        most = bound_of(self.X.reshape(-1), self.E) if self.bound is None else self.bound
        if bias is None or self.sums is None:
            return [most]
        return [most, torch.ne(bias, self.sums).any()]

    def probe(self, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        """Numbers about a gradient, (outputs, inputs) and (outputs,), for :meth:`explain`."""
        R = probe_matrix(len(weight), weight.dtype, weight.device)
        projected = (self.E @ R.T).T
        found, expected = (R @ weight).view(-1), (projected @ self.X).view(-1)
        scale = torch.dot(found, expected) / torch.dot(expected, expected)
        error = torch.dist(found, scale * expected)
        numbers = [scale, error, torch.linalg.vector_norm(found)]
        return numbers if bias is None else [*numbers, R @ bias, projected.sum(1)]

    def explain(self, numbers: list[list[float]]) -> bool:
        """Whether a gradient with these numbers is ``scale`` E^T [X, 1], to rounding."""
        (scale,), (error,), (size,), *last = numbers
        if last:
            errors = (abs(a - scale * b) for a, b in zip(*last, strict=True))
            error, size = max(error, *errors), max(size, *(abs(a) for a in last[0]))
        return math.isfinite(scale) and error <= tolerance(self.X.dtype) * size


@functools.lru_cache(maxsize=64)
def ones(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(rows, 1)."""
    return torch.ones(rows, 1, dtype=dtype, device=device)


def bound_of(X: Tensor, E: Tensor) -> Tensor:
    """The square of what E^T X can be at most."""
    rows, outputs = X.view(-1), E.view(-1)
    return torch.dot(rows, rows) * torch.dot(outputs, outputs)


def tolerance(dtype: torch.dtype) -> float:
    """What rounding can do: sums of thousands of terms, in another order."""
    return 64 * torch.finfo(dtype).eps


def pay(rows: int, inputs: int, outputs: int) -> bool:
    """Whether the product through the factors needs so many fewer operations, if G is known."""
    return inputs * (inputs * outputs - rows * (inputs + outputs)) > WORTH


def replace(rows: int, inputs: int, outputs: int) -> bool:
    """The same if G, which is another inputs x rows x outputs, need not be computed."""
    return inputs * inputs * (outputs - rows) > WORTH


@functools.lru_cache(maxsize=256)
def probe_matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Two rows of random signs and magnitudes in [0.5, 1.5].

    It is the same in every run, so that training can be repeated to the bit, and it does not
    touch torch's own random numbers. No entry is near zero: a change of a single output shows.
    """
    generator = torch.Generator().manual_seed(size)
    magnitudes, signs = torch.rand(2, 2, size, generator=generator, dtype=torch.float64)
    matrix: Tensor = (0.5 + magnitudes) * (signs - 0.5).sign()
    return matrix.to(device, dtype)
