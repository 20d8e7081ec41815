r"""The two factors of a gradient: :math:`G = s\, E^T X`, and how to know that it is so.

X are the rows of a minibatch and E the gradients of the outputs. Then P G needs
:math:`n^2 M + n M o` operations instead of :math:`n^2 o`. But a gradient may have been changed
since the backward pass: by clipping and unscaling, which is only another s, or by hooks, penalties
on the weight, averages over processes. A random probe tells (Freivalds): r^T G and
(E r)^T X are parallel for a random vector r if, and almost surely only if, G is s E^T X.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor


class Factors(NamedTuple):
    """Rows X (M, inputs) and output gradients E (M, outputs) of the one call of a layer."""

    X: Tensor
    E: Tensor
    version: int = 0  #: of X when it was captured

    @property
    def are_changed(self) -> bool:
        """Whether X has been written to since."""
        return self.X._version != self.version

    def probe(self, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        """Numbers about a gradient, (outputs, inputs) and (outputs,), for :meth:`explain`."""
        r = probe_vector(len(weight), weight.dtype, weight.device)
        found, projected = r @ weight, self.E @ r
        expected = projected @ self.X
        scale = torch.dot(found, expected) / torch.dot(expected, expected)
        error = torch.dist(found, scale * expected)
        numbers = [scale, error, torch.linalg.vector_norm(found)]
        return numbers if bias is None else [*numbers, torch.dot(r, bias), projected.sum()]

    def explain(self, numbers: list[float]) -> bool:
        """Whether a gradient with these numbers is ``numbers[0]`` E^T [X, 1], to rounding."""
        scale, error, size, *last = numbers
        if last:
            error, size = max(error, abs(last[0] - scale * last[1])), max(size, abs(last[0]))
        return math.isfinite(scale) and error <= tolerance(self.X.dtype) * size


def tolerance(dtype: torch.dtype) -> float:
    """What rounding can do: sums of thousands of terms, in another order."""
    return 64 * torch.finfo(dtype).eps


def pay(rows: int, inputs: int, outputs: int) -> bool:
    """Whether the product through the factors needs fewer operations."""
    return rows * (inputs + outputs) < inputs * outputs


@functools.lru_cache(maxsize=256)
def probe_vector(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A vector of random signs and magnitudes in [0.5, 1.5].

    It is the same in every run, so that training can be repeated to the bit, and it does not
    touch torch's own random numbers. No entry is near zero: a change of a single output shows.
    """
    generator = torch.Generator().manual_seed(size)
    magnitudes, signs = torch.rand(2, size, generator=generator, dtype=torch.float64)
    vector: Tensor = (0.5 + magnitudes) * (signs - 0.5).sign()
    return vector.to(device, dtype)
